"""Calls the Linux functions that Python does not wrap, and reads the limits of cgroups.

Linux only: a module imports this one only in processes that need Linux.
"""

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ftrun import clock

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
OOM_SCORE = 500
"""OOM score of workers, so that the kernel kills a worker before any process of ftrun."""


def name_process(name: str) -> None:
    """Sets the name that `ps -o comm` shows, at most 15 characters."""
    _prctl(_PR_SET_NAME, name.encode()[:15] + b"\0")


def die_with_parent(parent_pid: int, *, deadline_s: float = 10.0) -> None:
    """Has the kernel kill this process when `parent_pid` dies; exits if it is dead already.

    Waits until `parent_pid` is the parent, because a process that was forked twice is a child of
    the intermediate process for a moment.
    """
    give_up_s = clock.now_s() + deadline_s
    while os.getppid() != parent_pid:
        if clock.now_s() > give_up_s or not Path(f"/proc/{parent_pid}").exists():
            os._exit(1)
        os.sched_yield()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died between the check and prctl(); then the kernel sends no signal.
    if os.getppid() != parent_pid:
        os._exit(1)


def end_with_parent() -> None:
    """Has the kernel send SIGTERM when the parent dies, also a parent in another pid namespace.

    The setting survives exec() and does not apply to children.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def fork_orphan() -> bool:
    """Forks a process that becomes a child of the nearest subreaper above; True in that process.

    Raises:
        OSError: no process can be created.
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
    """The reason why a fork of this process could hang; empty if a fork is safe."""
    with open("/proc/self/status", encoding="ascii") as status:
        threads = next(int(line.split()[1]) for line in status if line.startswith("Threads:"))
    # OpenBLAS starts its own threads if OMP_NUM_THREADS is not set, up to one per CPU; they are
    # harmless.
    allowed = 1 if "OMP_NUM_THREADS" in os.environ else os.cpu_count() or 1
    if threads <= allowed:
        return ""
    return f"the zygote has {threads} threads, and only {allowed} can be forked safely"


def become_subreaper() -> None:
    """Makes this process the new parent of every descendant that loses its parent.

    Raises:
        OSError: the kernel does not allow it.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Forbids core dumps and tracing by other users, because the memory holds weights."""
    _prctl(_PR_SET_DUMPABLE, 0)


def let_parent_trace() -> None:
    """Lets the parent and its other children read this process, where Yama restricts that.

    The agent starts py-spy, which is no ancestor of a rank (kernel.yama.ptrace_scope=1).
    """
    with contextlib.suppress(OSError):  # a kernel without Yama
        _prctl(_PR_SET_PTRACER, os.getppid())


def offer_to_oom_killer() -> None:
    """Raises the OOM score of this process, if the kernel allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE), encoding="ascii")


def _prctl(option: int, value: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if libc.prctl(ctypes.c_int(option), argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def ignore_user_signals() -> None:
    """Ignores SIGUSR1 and SIGUSR2 until the script installs handlers.

    Slurm sends them to every process of a job step. The agent and the stub treat them as stop
    requests, and a rank that died of one could not reach the step boundary first.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
_FILES = {
    ("memory", True): ("memory.max", "memory.current"),
    ("memory", False): ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("pids", True): ("pids.max", "pids.current"),
    ("pids", False): ("pids.max", "pids.current"),
}
_RECLAIMABLE = ("inactive_file", "total_inactive_file")


def cgroup_room(controller: str) -> int | None:
    """The smallest remainder of this cgroup and all above it (v1, v2); None without a limit.

    The kernel counts page cache that it reclaims on demand as used. The inactive part of that
    cache counts as free here.

    Args:
        controller: `memory` (bytes) or `pids` (processes and threads).
    """
    found: list[int] = []
    for folder, is_v2 in _folders(controller):
        limit_name, used_name = _FILES[controller, is_v2]
        with suppress(OSError, ValueError):
            text = (folder / limit_name).read_text(encoding="ascii").strip()
            if text == "max" or int(text) >= _UNLIMITED:
                continue
            used = int((folder / used_name).read_text(encoding="ascii"))
            found.append(max(0, int(text) - used + _reclaimable(folder, controller)))
    return min(found, default=None)


def _folders(controller: str) -> Iterator[tuple[Path, bool]]:
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, names, inside = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        mount = ROOT / controller if names else ROOT
        folder = mount / inside.lstrip("/")
        if not folder.is_dir():
            # in a container the path is the host's, but the mount is the container's
            folder = mount
        while True:
            yield folder, not names
            if folder == mount or mount not in folder.parents:
                break
            folder = folder.parent


def _reclaimable(folder: Path, controller: str) -> int:
    total = 0
    if controller == "memory":
        for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            total = max(total, int(count)) if name in _RECLAIMABLE else total
    return total
