"""One agent: `python -m ftrun.agent RUN_FOLDER`, started by the stub or forked from the reserve.

Runs in:  agent.
Takes in: a run folder.
Gives:    the zygote, forked before anything is opened; then the agent's exit code.
"""

import os
import sys

from ftrun.agent.launch.agent_start import begin

if __name__ == "__main__":
    started = begin()
    if started is not None:
        from ftrun.agent.agent_main import main

        code = main(started)
        sys.stdout.flush()
        sys.stderr.flush()
        # With torch loaded, the interpreter's own teardown takes up to 0.7 s. It frees nothing that
        # the kernel would not free.
        os._exit(code)
