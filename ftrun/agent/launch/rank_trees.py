"""Ends ranks and the processes that they have started, and waits until all have ended.

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
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from ftrun import clock, process_tree
from ftrun.agent.launch.process import ChildProcess, has_ended
from ftrun.agent.launch.warm_start import WorkerHandle
from ftrun.linux import open_device_files
from ftrun.wire.messages.worker import LaunchRequest, decode_launch
from ftrun.wire.run_environment import LAUNCH
from ftrun.wire.shared_memory.pages import HeartbeatField

KILL_WAIT_S = 20.0
"""Shorter than the leader's wait for the answer of a node, `MembershipSettings.answer_s`, also with
the longest `restart.park_s` before it."""

_ORPHANS_WAIT_S = 1.0
_POLL_AGAIN_S = 0.002
_COMPONENTS = process_tree.PERSISTENT | {"ftrun-zygote", "ftrun-standby"}
"""Children of the agent that have no page of a rank; a read of memory maps takes milliseconds."""


class RankEnding:
    """Ends ranks, and remembers what does not end."""

    def __init__(self, stuck_before: Collection[int] = ()) -> None:
        """`stuck_before`: pids of processes that did not end under an earlier agent."""
        self.used_device = False
        """Ranks that were killed have used a device."""
        self._stuck: list[ChildProcess] = []
        """Processes that have not ended within `KILL_WAIT_S` of SIGKILL."""
        self._stuck_before: list[tuple[int, int]] = []
        """The same of an earlier agent: (pid, pidfd). Only the pidfds show their end."""
        for pid in stuck_before:
            with contextlib.suppress(OSError):
                self._stuck_before.append((pid, os.pidfd_open(pid)))

    def end(
        self,
        handles: Sequence[WorkerHandle],
        *,
        others_stay: bool = False,
        give_up_s: float | None = None,
    ) -> None:
        """End these ranks, and every process that they have started.

        What does not end hangs in the kernel with SIGKILL pending, so it runs no line of the script
        any more.

        Args:
            others_stay: there are ranks that do not end.
            give_up_s: the time at which to stop waiting; None: after `KILL_WAIT_S`.
        """
        page_fds = [handle.slot.request.descriptors["heartbeat"] for handle in handles]
        numbers = [handle.slot.rank for handle in handles] if others_stay else None
        trees = RankTrees([handle.pid for handle in handles], page_fds, numbers=numbers)
        is_on_page = any(handle.slot.page.get(HeartbeatField.DEVICE_NS) for handle in handles)
        self.used_device |= is_on_page or trees.use_device()
        for handle in handles:
            handle.child.signal_group(signal.SIGKILL)
            handle.child.signal(signal.SIGKILL)
        trees.kill_below()
        give_up_s = clock.now_s() + KILL_WAIT_S if give_up_s is None else give_up_s
        for handle in handles:
            known = handle.child in self._stuck
            if not known and not handle.child.wait(max(0.0, give_up_s - clock.now_s())):
                handle.child.name = f"rank {handle.slot.rank}"
                self._add(handle.child)
        give_up_s = max(give_up_s, clock.now_s() + _ORPHANS_WAIT_S)
        while left := trees.kill_all() - {child.pid for child in self._stuck}:
            if clock.now_s() > give_up_s:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        self._add(ChildProcess(pid, "a process that a rank has started"))
                break
            clock.sleep(_POLL_AGAIN_S)
        trees.close()

    def _add(self, child: ChildProcess) -> None:
        if files := open_device_files(child.pid):
            child.name += f" with {', '.join(files)} open"
        self._stuck.append(child)

    def stuck(self) -> str:
        """Processes that have not died of SIGKILL, in words; empty if there are none."""
        self._stuck = [child for child in self._stuck if not child.reap()]
        for pid, pidfd in [one for one in self._stuck_before if has_ended(one[1])]:
            self._stuck_before.remove((pid, pidfd))
            os.close(pidfd)
        names = [f"{child.name} (pid {child.pid})" for child in self._stuck]
        names += [f"an earlier rank (pid {pid})" for pid, _ in self._stuck_before]
        if not names:
            return ""
        found = ", ".join(names)
        return (
            f"{found} has not died of SIGKILL: a device or a file system hangs in the kernel. This "
            "node needs attention"
        )


class RankTrees:
    """The processes of some ranks: their trees before the kill, and orphans after it."""

    def __init__(
        self,
        ranks: Collection[int],
        page_fds: Collection[int],
        *,
        numbers: Collection[int] | None = None,
    ) -> None:
        """`ranks` are pids; `numbers` the ranks that end, None: all ranks of this agent end."""
        self._ranks = frozenset(ranks)
        self._numbers = numbers
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
        if process_tree.session_of(pid) in self._sessions:
            return True
        launch = _launch_of(pid)
        if launch is not None and launch.agent_pid == os.getpid():
            return self._numbers is None or launch.rank in self._numbers
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


def _launch_of(pid: int) -> LaunchRequest | None:
    """The request of the rank that has started this process; None if no rank has started it."""
    for variable in process_tree.variables_of(pid):
        name, _, value = variable.partition(b"=")
        if name == LAUNCH.encode():
            with contextlib.suppress(msgspec.MsgspecError):
                return decode_launch(value)
    return None
