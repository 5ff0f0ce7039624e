"""`python -m ftrun.smp`: the snapshot management process of one node, started by the agent.

Runs in:  its own session, so that neither ^C nor a closed terminal reaches it.
Takes in: --run-id ID --socket PATH --orphan-s SECONDS [--adopt]; SIGTERM ends it.
Gives:    log lines on stderr when something changes; nothing on stdout.

The process stays small: no torch, no config, no asyncio. Its memory holds the weights. It is
therefore excluded from core dumps and not readable by other processes of the user.
"""

import argparse
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from ftrun.errors import ExitCode
from ftrun.ids import RunId
from ftrun.linux import hide_memory, ignore_user_signals, name_process, raise_file_limit
from ftrun.smp.server import SmpServer, is_served, let_go_of_streams

_log = logging.getLogger(__name__)


def main() -> int:
    arguments = _arguments()
    logging.basicConfig(level=logging.INFO, format="[ftrun smp] %(message)s", stream=sys.stderr)
    logging.raiseExceptions = False  # a closed stderr must not end the SMP
    _seclude()
    path = Path(arguments.socket).absolute()
    if is_served(path):
        _log.error("another SMP already serves %s", path)
        return ExitCode.TRY_AGAIN
    server = SmpServer(
        RunId(arguments.run_id), path, orphan_s=arguments.orphan_s, adopt=arguments.adopt
    )
    with _signals(server):
        server.serve()
    return ExitCode.DONE


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ftrun.smp", description="the snapshot manager")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--socket", required=True, help="path to listen at")
    parser.add_argument(
        "--orphan-s", type=float, required=True, help="seconds without an agent before it ends"
    )
    parser.add_argument(
        "--adopt", action="store_true", help="workers wait until memory was adopted"
    )
    return parser.parse_args()


def _seclude() -> None:
    """Start a session, set the process name, leave the terminal, and disable core dumps.

    Links need about three descriptors and two threads for each node of the group and of the
    previous one, which is more than the usual soft limit of 1,024 from about 330 nodes.
    """
    with contextlib.suppress(PermissionError):  # a process group leader already leads its session
        os.setsid()
    let_go_of_streams(0, 1)
    name_process("ftrun-smp")
    hide_memory()
    raise_file_limit()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextlib.contextmanager
def _signals(server: SmpServer) -> Iterator[None]:
    """Let SIGTERM end a server without an agent; ignore the other signals of a terminal or Slurm.

    Slurm signals every process of a step. If an agent is connected, the agent ends the SMP after
    the last checkpoint.
    """
    ours, kernels = socket.socketpair()
    kernels.setblocking(False)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    ignore_user_signals()
    signal.signal(signal.SIGTERM, lambda *_: server.end_if_alone())
    signal.set_wakeup_fd(kernels.fileno(), warn_on_full_buffer=False)
    server.wake_on(ours)
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        # All memory is freed. At exit Python restores the default action of SIGTERM. A SIGTERM at
        # that time would then make a clean exit look like a kill.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ours.close()
        kernels.close()


if __name__ == "__main__":
    sys.exit(main())
