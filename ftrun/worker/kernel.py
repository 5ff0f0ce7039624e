"""The few Linux calls that Python has no name for.

Runs in: zygote, standbys and workers.
"""

import contextlib
import ctypes
import os
import signal
from pathlib import Path

from ftrun import clock

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
OOM_SCORE = 500
"""Under memory pressure a worker goes before anything of ftrun."""


def name_process(name: str) -> None:
    """What `ps -o comm` shows, at most 15 characters."""
    _prctl(_PR_SET_NAME, name.encode()[:15] + b"\0")


def die_with_parent(parent_pid: int, *, deadline_s: float = 10.0) -> None:
    """Be killed when `parent_pid` dies; end at once if it already has.

    Waits until it is the parent: a process that is forked twice belongs for a moment to the one
    in the middle.
    """
    give_up_s = clock.now_s() + deadline_s
    while os.getppid() != parent_pid:
        if clock.now_s() > give_up_s or not Path(f"/proc/{parent_pid}").exists():
            os._exit(1)
        os.sched_yield()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def offer_to_oom_killer() -> None:
    """Raise this process's OOM score, where the kernel lets us."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE), encoding="ascii")


def _prctl(option: int, value: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(ctypes.c_int(option), ctypes.c_char_p(value) if isinstance(value, bytes) else value)
