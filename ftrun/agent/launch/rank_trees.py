"""Ends the processes that ranks have started, and waits until they have ended.

Runs in the main thread. The agent is a subreaper, so it becomes the parent of each process whose
own parent ends. A process that outlives its rank keeps device memory, ports and files.

Rule 1: the trees are read before the kill. Afterwards a program with a session and an environment
        of its own cannot be distinguished from other children of the agent.
Rule 2: a pidfd of each is opened, then its parent is checked, so that no signal reaches a later
        process with the same number.
Rule 3: if a rank died first, its children are found by its session, by the launch request in their
        environment, or by the rank's page in their memory. A fork of a warm rank, such as a
        DataLoader worker, has the page and no request: its environment is that of the zygote.
"""

import contextlib
import os
import signal
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from ftrun import process_tree
from ftrun.agent.launch.process import has_ended
from ftrun.linux import open_device_files
from ftrun.wire.messages.worker import decode_launch
from ftrun.wire.run_environment import LAUNCH

_COMPONENTS = process_tree.PERSISTENT | {"ftrun-zygote", "ftrun-standby"}
"""Children of the agent that have no page of a rank; a read of memory maps takes milliseconds."""


class RankTrees:
    """The processes of some ranks: their trees before the kill, and orphans after it."""

    def __init__(self, ranks: Collection[int], page_fds: Collection[int]) -> None:
        self._ranks = frozenset(ranks)
        self._pages: list[str] = []
        for fd in page_fds:
            with contextlib.suppress(OSError):  # closed, because the next generation is prepared
                self._pages.append(f" {os.fstat(fd).st_ino} /memfd:ftrun-rank")
        self._pidfds: dict[int, int] = {}
        self._orphans: set[int] = set()
        """Killed ones. As a zombie, a process does not show any more whose it was."""
        below = process_tree.descendants_by_list(ranks)
        parents = {*ranks, *below}
        for pid in below:
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(pid)
                if process_tree.parent_of(pid) in parents:
                    self._pidfds[pid] = pidfd
                else:
                    os.close(pidfd)
        self._sessions = {*ranks, *map(process_tree.session_of, self._pidfds)} - {0}

    def use_device(self) -> bool:
        return any(open_device_files(pid) for pid in (*self._ranks, *self._pidfds))

    def kill_below(self) -> None:
        for pid, pidfd in list(self._pidfds.items()):
            if has_ended(pidfd):
                _reap(pid)
                os.close(self._pidfds.pop(pid))
            else:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def kill_all(self) -> set[int]:
        """After the ranks have ended: kill what is left; return the pids, empty if nothing is."""
        self.kill_below()
        return {*self._pidfds, *self._kill_orphans(), *self._groups_with_members()}

    def close(self) -> None:
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])

    def _kill_orphans(self) -> Iterator[int]:
        """Kill the children of this process that belong to a rank; all that are not reaped."""
        self._orphans = {pid for pid in self._orphans if not _reap(pid)}
        for pid in set(process_tree.children_by_list()) - self._ranks - self._orphans:
            if self._has_started(pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                self._orphans.add(pid)
        yield from self._orphans

    def _has_started(self, pid: int) -> bool:
        if process_tree.session_of(pid) in self._sessions or _agent_of(pid) == os.getpid():
            return True
        if process_tree.name_of(pid) in _COMPONENTS:
            return False
        with contextlib.suppress(OSError):  # it has ended
            mapped = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
            mapped = " ".join(mapped.split())
            return any(page in mapped for page in self._pages)
        return False

    def _groups_with_members(self) -> Iterator[int]:
        """The process groups of ended ranks that still have members, which have got SIGKILL.

        The kernel's list of children can omit one while another one ends. `waitid` omits none.
        """
        for rank in self._ranks:
            if not process_tree.state_of(rank):
                with contextlib.suppress(ChildProcessError):
                    os.waitid(os.P_PGID, rank, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                    yield rank


def _reap(pid: int) -> bool:
    """Reap an ended child; return whether there is no such child any more."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _agent_of(pid: int) -> int:
    """Pid of the agent whose rank has started this process; 0 if no rank has started it."""
    for variable in process_tree.variables_of(pid):
        name, _, value = variable.partition(b"=")
        if name == LAUNCH.encode():
            with contextlib.suppress(msgspec.MsgspecError):
                return decode_launch(value).agent_pid
    return 0
