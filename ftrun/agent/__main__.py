"""One agent: `python -m ftrun.agent RUN_FOLDER`, started by the stub; or a fork of the reserve.

Runs in:  agent.
Takes in: a run folder.
Gives:    the zygote, forked before anything is opened; then the agent's exit code.
"""

import os
import sys

from ftrun.agent.launch.agent_start import begin

if __name__ == "__main__":
    begun = begin()
    if begun is not None:
        from ftrun.agent.agent_main import main

        code = main(begun)
        sys.stdout.flush()
        sys.stderr.flush()
        # The interpreter's own teardown takes up to 0.7 s with torch loaded and frees nothing that
        # the kernel would not.
        os._exit(code)
