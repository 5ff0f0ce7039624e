"""Stops a process and waits until it is stopped: a busy machine takes a moment."""

import os
import signal
import time
from pathlib import Path

WAIT_S = 600.0


def stop(pid: int) -> None:
    """Stop it, with all its threads; the caller sends SIGCONT."""
    os.kill(pid, signal.SIGSTOP)
    give_up_s = time.monotonic() + WAIT_S
    while any(state(one) not in "TtZX" for one in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < give_up_s, f"{pid} does not stop"
        time.sleep(0.005)


def state(process: Path) -> str:
    """A letter, as in the kernel's folder of /proc; X if the process has ended."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
