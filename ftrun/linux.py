"""The few Linux calls that Python has no name for.

Runs in: every process. Linux only; imported where that is certain.
"""

import contextlib
import ctypes
import errno
import os
import signal
from pathlib import Path

from ftrun import clock

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
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
    # It may have died between the look and the call, and the signal with it.
    if os.getppid() != parent_pid:
        os._exit(1)


def end_with_parent() -> None:
    """Be sent SIGTERM when the parent dies, also one of another pid namespace.

    It holds for what this process executes later, not for its children.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def fork_orphan() -> bool:
    """Fork a process that becomes a child of the next subreaper above; True in that process.

    Raises:
        OSError: no process can be made.
    """
    middle = os.fork()
    if middle == 0:
        try:
            child = os.fork()
        except OSError:
            os._exit(1)
        if child != 0:
            os._exit(0)
        return True
    if os.waitpid(middle, 0)[1] != 0:
        raise OSError(errno.EAGAIN, "a second fork has failed")
    return False


def threads_in_the_way() -> str:
    """Why a fork of this process could hang; empty if it could not."""
    with open("/proc/self/status", encoding="ascii") as status:
        threads = next(int(line.split()[1]) for line in status if line.startswith("Threads:"))
    # OpenBLAS starts one harmless thread of its own when OMP_NUM_THREADS is not set.
    allowed = 1 if "OMP_NUM_THREADS" in os.environ else os.cpu_count() or 1
    if threads <= allowed:
        return ""
    return f"the warm process has {threads} threads, and only {allowed} can be forked safely"


def become_subreaper() -> None:
    """From now on a descendant that loses its parent becomes a child of this process.

    Raises:
        OSError: the kernel does not allow it.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """No core dump and no tracer of another user: weights are in here."""
    _prctl(_PR_SET_DUMPABLE, 0)


def let_parent_trace() -> None:
    """Let the parent and its other children read this process, where Yama restricts that.

    py-spy, which the agent starts, is no ancestor of a rank (kernel.yama.ptrace_scope=1).
    """
    with contextlib.suppress(OSError):  # a kernel without Yama
        _prctl(_PR_SET_PTRACER, os.getppid())


def offer_to_oom_killer() -> None:
    """Raise this process's OOM score, where the kernel lets us."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE), encoding="ascii")


def _prctl(option: int, value: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if libc.prctl(ctypes.c_int(option), argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def ignore_user_signals() -> None:
    """Until the script puts a handler in place: Slurm sends them to every process of a step.

    Agent and stub take them as a wish to stop; a rank that died of one could not reach the
    boundary first.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
