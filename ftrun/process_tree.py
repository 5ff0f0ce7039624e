"""The processes of one run on this machine: how they are found, and how they are ended.

Runs in:  stub, cli, agent. Linux only; standard library only.
Takes in: a parent, or a run folder whose stub has ended.
Gives:    process ids; ended processes.

A process that loses its parent becomes a child of the agent, and after the agent's end a child of
the stub: both are subreapers. So the stub finds every process of its run among its descendants,
whatever their names, groups and sessions are. After the stub's end there are two signs of them:
the mark in the environment, and the sessions of the ranks, which the agent writes into the run
folder. A process loses the first one if it overwrites its environment (setproctitle does), and the
second one if it makes a session of its own. A cgroup would show both, but a job of Slurm or
Kubernetes may not make one.

Rule 1: a process that is not a child of the caller is named by a pidfd from before it was looked
        at, so a signal never reaches a later process of the same number.
Rule 2: a session is its leader's pid and start time. The kernel gives the number to no other
        process while the session has one, so a session without its leader is still the same one.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from ftrun import clock

MARK = "FTRUN_PROCESS_TREE"
"""Variable in the environment of all processes of a run below its stub."""

LASTING = frozenset({"ftrun-smp", "ftrun-healer", "ftrun-reserve"})
"""Names of processes that outlive their agent: snapshots, what takes a fault back, and what the
next agents are forked from."""

_SESSIONS = "rank-sessions"
"""In the run folder: where pids count, then pid and start time of each rank."""

_TERM_S = 3.0
_KILL_S = 3.0
_LOOK_S = 0.005
_STATE, _PARENT, _SESSION, _START = 0, 1, 3, 19


def mark_of(folder: Path) -> str:
    """What `MARK` is for the run of this folder; of no other folder, also not a later one."""
    found = folder.stat()
    return f"{found.st_dev:x}-{found.st_ino:x}-{folder}"


def children() -> list[int]:
    """The children of this process, ended ones too."""
    own = str(os.getpid())
    return [pid for pid in _all_pids() if _stat(pid)[_PARENT] == own]


def children_by_list() -> list[int]:
    """The same from the kernel's lists, which are short; one may be missing while another ends."""
    found: list[int] = []
    try:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                text = Path(f"/proc/self/task/{thread}/children").read_text(encoding="ascii")
                found += map(int, text.split())
    except OSError:  # a kernel without these lists
        return children()
    return found


def descendants(roots: Collection[int]) -> list[int]:
    """All processes below these; those that have lost a parent in between are not below them."""
    below: dict[str, list[int]] = {}
    for pid in _all_pids():
        below.setdefault(_stat(pid)[_PARENT], []).append(pid)
    found: list[int] = []
    left = list(roots)
    while left:
        beneath = below.get(str(left.pop()), [])
        found += beneath
        left += beneath
    return found


def note_sessions(folder: Path, leaders: Iterable[int]) -> None:
    """Write down the sessions of the ranks that run now, each named by the pid of its leader."""
    lines = [_pid_world(), *(f"{pid} {_stat(pid)[_START]}" for pid in leaders)]
    (folder / _SESSIONS).write_text("\n".join(lines), encoding="ascii")


def left_behind(folder: Path) -> list[int]:
    """The processes of a run whose stub has ended, except those in `LASTING` and this one."""
    is_left = _left_behind(folder)
    return [pid for pid in _all_pids() if is_left(pid)]


def _left_behind(folder: Path) -> Callable[[int], bool]:
    """Whether a process is of the run of this folder."""
    try:
        wanted = f"{MARK}={mark_of(folder)}".encode()
    except OSError:  # the folder has gone
        return lambda _pid: False
    sessions = _sessions(folder)

    def is_in_session(pid: int) -> bool:
        stat = _stat(pid)
        leader = stat[_SESSION]
        if leader not in sessions:
            return False
        start = _stat(int(leader))[_START]
        return not start or start == sessions[leader]  # Rule 2

    def is_left(pid: int) -> bool:
        is_ours = wanted in variables_of(pid) or is_in_session(pid)
        return is_ours and pid != os.getpid() and name_of(pid) not in LASTING

    return is_left


def _sessions(folder: Path) -> dict[str, str]:
    """Start times of the ranks that were written down, by pid; none if pids count elsewhere."""
    try:
        where, *lines = (folder / _SESSIONS).read_text(encoding="ascii").splitlines()
        found = dict(line.split() for line in lines)
    except (OSError, ValueError):
        return {}
    return found if where == _pid_world() else {}


def _pid_world() -> str:
    """This boot of this machine, and the pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def name_of(pid: int) -> str:
    """What `ps -o comm` shows; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def state_of(pid: int) -> str:
    """The kernel's letter for the main thread: R, S, D, T, Z; empty if there is no process."""
    return _stat(pid)[_STATE]


def parent_of(pid: int) -> int:
    """0 if there is no process."""
    return int(_stat(pid)[_PARENT] or 0)


def session_of(pid: int) -> int:
    """The session's number; 0 if there is no process."""
    return int(_stat(pid)[_SESSION] or 0)


def variables_of(pid: int) -> list[bytes]:
    """The environment that a process was started with; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        # The main thread may have ended before others; it has no environment any more then.
        for thread in [str(pid), *os.listdir(f"/proc/{pid}/task")]:
            with contextlib.suppress(OSError):
                if found := Path(f"/proc/{pid}/task/{thread}/environ").read_bytes():
                    return found.split(b"\0")
    return []


def send(pid: int, number: int, *, still: Callable[[int], object]) -> None:
    """Signal a process that may not be ours.

    Args:
        pid: its number.
        number: the signal.
        still: whether the process of this number is the one that is meant; asked after the number
            is bound to a process.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if still(pid):
            signal.pidfd_send_signal(pidfd, number)
    except OSError:
        pass
    finally:
        os.close(pidfd)


def end_children(
    *, term_first: bool, spare: Collection[str] = (), kill_s: float = _KILL_S
) -> list[int]:
    """End every descendant; the children of one that ends become ours, until none is left.

    Args:
        term_first: ask before killing.
        spare: processes of these names live on.
        kill_s: seconds to wait for their end after SIGKILL.

    Returns:
        Those that the kernel keeps (`explain_stuck`); none of them runs any more code.
    """

    def find() -> list[int]:
        reap_all()
        return [pid for pid in children() if not spare or name_of(pid) not in spare]

    return _end(find, _kill, term_first=term_first, kill_s=kill_s)


def end_left_behind(folder: Path) -> list[int]:
    """End what a run has left behind whose stub was killed; those that the kernel keeps.

    For the holder of the run's lock, before an agent is started.
    """

    def kill(pid: int, number: int) -> None:
        send(pid, number, still=_left_behind(folder))

    return _end(lambda: left_behind(folder), kill, term_first=False, kill_s=_KILL_S)


def reap_all() -> list[tuple[int, int]]:
    """Every child that has ended, with its wait status."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))


def _end(
    find: Callable[[], Iterable[int]],
    kill: Callable[[int, int], None],
    *,
    term_first: bool,
    kill_s: float,
) -> list[int]:
    patience_s = clock.now_s() + (_TERM_S if term_first else 0.0)
    asked: set[int] = set()
    while True:
        alive = list(find())
        now_s = clock.now_s()
        if not alive or now_s > patience_s + kill_s:
            return alive
        for pid in alive:
            if now_s >= patience_s:
                kill(pid, signal.SIGKILL)
            elif pid not in asked:
                asked.add(pid)
                kill(pid, signal.SIGTERM)
                kill(pid, signal.SIGCONT)
        clock.sleep(_LOOK_S)


def explain_stuck(pid: int) -> str:
    """What to say of a process that has not ended after SIGKILL."""
    return (
        f"process {pid} ({name_of(pid)}, state {state_of(pid)}) has not ended after SIGKILL: a "
        "device or a file system hangs in the kernel. It runs no more code, but keeps its memory. "
        "This node needs attention"
    )


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty ones if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return [""] * 52
