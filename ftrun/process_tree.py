"""Finds and ends the processes of one run on this machine.

Linux only; standard library only, because the stub imports it. A process that loses its parent
becomes a child of the agent, or of the stub once the agent has ended: both are subreapers. The stub
therefore finds every process of its run among its descendants, whatever their names, groups and
sessions are.

After the stub has ended, two things identify the processes: the mark in the environment, and the
sessions of the ranks, which the agent writes into the run folder. A process loses the mark if it
overwrites its environment, as setproctitle does. It leaves the session if it creates a session of
its own. A cgroup would show both, but a Slurm or Kubernetes job may not be allowed to create one.

Rule 1: before a process that is not a child of the caller is examined, a pidfd of it is opened. A
        signal therefore never reaches a later process with the same number.
Rule 2: a session is identified by its leader's pid and start time. While the session has a process,
        the kernel gives its number to no other process. A session without its leader is therefore
        still the same one.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from ftrun import clock

MARK = "FTRUN_PROCESS_TREE"  # environment variable of all processes of a run below its stub
PERSISTENT = frozenset({"ftrun-smp", "ftrun-healer", "ftrun-reserve"})
"""Names of the processes that outlive their agent: the SMP, the reverter of faults, and the process
from which the next agents are forked."""

_SESSIONS = "rank-sessions"  # file: boot and pid namespace, then pid and start time of ranks
_TERM_S = 3.0
_KILL_S = 3.0
_POLL_S = 0.005
_STATE, _PARENT, _SESSION, _START, _EXIT_CODE = 0, 1, 3, 19, 49


def mark_of(folder: Path) -> str:
    """Value of `MARK` for the run of this folder; a later folder of this name has another one."""
    found = folder.stat()
    return f"{found.st_dev:x}-{found.st_ino:x}-{folder}"


def children() -> list[int]:
    """The children of this process, including zombies."""
    own = str(os.getpid())
    return [pid for pid in _all_pids() if _stat(pid)[_PARENT] == own]


def children_by_list() -> list[int]:
    """The children from the kernel's short lists; one may be missing while another one ends."""
    return _listed_children("self") if _has_lists() else children()


def descendants_by_list(roots: Collection[int]) -> list[int]:
    """As `descendants`, without a read of every process of the machine."""
    if not _has_lists():
        return descendants(roots)
    found: list[int] = []
    left = list(roots)
    while left:
        beneath = _listed_children(left.pop())
        found += beneath
        left += beneath
    return found


def _has_lists() -> bool:
    """A kernel may be built without these lists."""
    return os.path.exists("/proc/thread-self/children")


def _listed_children(pid: int | str) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="ascii")
                found += map(int, text.split())
    return found


def descendants(roots: Collection[int]) -> list[int]:
    """All processes below these, except those that have been given to another parent."""
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


def fatal_status_of(pid: int) -> int | None:
    """Exit code or negative signal number of a process that the kernel is ending.

    None: it is not being ended, it ends with 0, or it is not readable. A stopped process shows the
    signal of the stop at this place.
    """
    stat = _stat(pid)
    if stat[_STATE] in ("", "T", "t") or not stat[_EXIT_CODE].isdigit():
        return None
    return os.waitstatus_to_exitcode(int(stat[_EXIT_CODE])) or None


def note_sessions(folder: Path, leaders: Iterable[int]) -> None:
    lines = [_pid_world(), *(f"{pid} {_stat(pid)[_START]}" for pid in leaders)]
    (folder / _SESSIONS).write_text("\n".join(lines), encoding="ascii")


def left_behind(folder: Path) -> list[int]:
    """The processes of a run whose stub has ended, except those in `PERSISTENT` and this one."""
    is_left = _left_behind(folder)
    return [pid for pid in _all_pids() if is_left(pid)]


def _left_behind(folder: Path) -> Callable[[int], bool]:
    try:
        wanted = f"{MARK}={mark_of(folder)}".encode()
    except OSError:  # the folder does not exist
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
        return is_ours and pid != os.getpid() and name_of(pid) not in PERSISTENT

    return is_left


def _sessions(folder: Path) -> dict[str, str]:
    """Start times of the recorded ranks by pid; empty after a reboot or in another namespace."""
    try:
        where, *lines = (folder / _SESSIONS).read_text(encoding="ascii").splitlines()
        found = dict(line.split() for line in lines)
    except (OSError, ValueError):
        return {}
    return found if where == _pid_world() else {}


def _pid_world() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def name_of(pid: int) -> str:
    """The name that `ps -o comm` shows; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def state_of(pid: int) -> str:
    """The kernel's letter for the main thread: R, S, D, T, Z; empty if there is no such process."""
    return _stat(pid)[_STATE]


def parent_of(pid: int) -> int:
    """Pid of the parent; 0 if there is no such process."""
    return int(_stat(pid)[_PARENT] or 0)


def session_of(pid: int) -> int:
    """Number of the session; 0 if there is no such process."""
    return int(_stat(pid)[_SESSION] or 0)


def variables_of(pid: int) -> list[bytes]:
    """The environment at the start of a process; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        # The main thread may have ended before others. Its environment can then no longer be read.
        for thread in [str(pid), *os.listdir(f"/proc/{pid}/task")]:
            with contextlib.suppress(OSError):
                if found := Path(f"/proc/{pid}/task/{thread}/environ").read_bytes():
                    return found.split(b"\0")
    return []


def send(pid: int, number: int, *, still: Callable[[int], object]) -> None:
    """Sends a signal if, after a pidfd is opened, `still` accepts the pid (Rule 1)."""
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
    """Ends every descendant. The children of an ended process become children of this one.

    With `term_first`, SIGKILL follows 3 s after SIGTERM. Processes with a name in `spare` are left
    running. Returns those that have not ended `kill_s` after SIGKILL (`explain_stuck`); none of
    them runs code any more.
    """

    def find() -> list[int]:
        reap_all()
        return [pid for pid in children() if not spare or name_of(pid) not in spare]

    return _end(find, _kill, term_first=term_first, kill_s=kill_s)


def end_left_behind(folder: Path) -> list[int]:
    """Ends a killed stub's processes; returns those left. The caller holds the run's lock."""

    def kill(pid: int, number: int) -> None:
        send(pid, number, still=_left_behind(folder))

    return _end(lambda: left_behind(folder), kill, term_first=False, kill_s=_KILL_S)


def reap_all() -> list[tuple[int, int]]:
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
    timeout_s = clock.now_s() + (_TERM_S if term_first else 0.0)
    asked: set[int] = set()
    while True:
        alive = list(find())
        now_s = clock.now_s()
        if not alive or now_s > timeout_s + kill_s:
            return alive
        for pid in alive:
            if now_s >= timeout_s:
                kill(pid, signal.SIGKILL)
            elif pid not in asked:
                asked.add(pid)
                kill(pid, signal.SIGTERM)
                kill(pid, signal.SIGCONT)
        clock.sleep(_POLL_S)


def explain_stuck(pid: int) -> str:
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
    """Fields of /proc/PID/stat from the state on; empty strings if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return [""] * 52
