"""Keeps rehearsed standbys: processes that have set up as one of this node's ranks.

Runs in:  agent, main thread, once per turn of the loop.
Takes in: the pages of ranks and rehearsals; `Parked` on the lines of rehearsals.
Gives:    a parked process for a rank that is started while other ranks stay. It has run the script
          up to its first step, so it continues without the set-up.
Survives: the end of a rehearsal: its rank is then forked, as without it.

Rule 1: nothing of a rehearsal counts as its rank's: it has its own page, line and log, no error
        file, and no socket of a flight recorder.
Rule 2: one at a time, at low priority, also for the OOM killer, after each rank here has made
        `MIN_STEPS` steps. If the generation ends before it has parked, it is killed, so that the
        restart has the processors.
Rule 3: a rehearsal belongs to the processes that run now: it has the results of their set-up. When
        all ranks start again, or the world changes, it is killed.
Rule 4: a rehearsed process continues only in the loop in which it has parked.
"""

import logging
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING

import msgspec

from ftrun import process_tree
from ftrun.agent.launch.process import ChildProcess
from ftrun.agent.launch.rank_trees import RankTrees
from ftrun.agent.launch.warm_start import LaunchSlot, WorkerHandle
from ftrun.agent.launch.zygote_client import ZygoteClient, ZygoteUnavailable
from ftrun.ids import Rank, version
from ftrun.linux import OOM_SCORE, AvailableMemory, available_memory
from ftrun.monitor.worker_exits import exit_text
from ftrun.records.snapshots import RankRehearsed
from ftrun.wire.messages.worker import LaunchRequest, Parked
from ftrun.wire.shared_memory.pages import (
    HeartbeatField,
    SharedPage,
    create_page,
    create_stack_file,
)

if TYPE_CHECKING:
    from ftrun.agent.launcher import Run

MIN_STEPS = 3
_NICER = 10
_FIRST_TO_GO = 900  # OOM score of a rehearsal, so that the kernel does not kill a rank first
_LEAST_LIMIT_S, _LIMIT_FACTOR = 300.0, 20.0
"""Longest rehearsal: this time, and this multiple of the set-up of the rank itself."""

_CHECK_MEMORY_S = 10.0
_RUNS_AGAIN = (
    "--rehearse: the set-up of the script runs again next to the ranks, as if it were one of them. "
    "Where it writes a file or starts a logger, check ftrun.is_rehearsal()"
)
_MAX_MISMATCHES = 2
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_MAX_ANSWER_BYTES = 1 << 16
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Rehearsal:
    """A process that has not parked yet."""

    handle: WorkerHandle
    since_s: float
    limit_s: float


class Rehearsals:
    """The rehearsed standbys of this node, and the one that rehearses now."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        wanted = run.spec.profile.restart.rehearse
        self._most = sys.maxsize if wanted == "all" else wanted
        if run.spec.profile.restart.survivors == "off":
            self._most = 0
        self._parked: dict[int, WorkerHandle] = {}
        self._running: _Rehearsal | None = None
        self._ending: list[WorkerHandle] = []
        self._problems: dict[int, str] = {}
        self._mismatches = Counter[int]()
        self._begun_s: dict[int, float] = {}
        self._generation = -1
        self._memory_due_s = 0.0
        self._memory_problem = ""
        self._may_be_nice = bool(self._most) and _can_take_back_priority()
        if self._most:
            _log.info("%s", _RUNS_AGAIN)

    @property
    def handles(self) -> list[WorkerHandle]:
        """The parked ones."""
        return [one for one in self._parked.values() if not one.child.reap()]

    @property
    def children(self) -> list[ChildProcess]:
        running = [] if self._running is None else [self._running.handle]
        return [one.child for one in (*self._parked.values(), *running, *self._ending)]

    @property
    def text(self) -> str:
        """Which ranks are rehearsed, and why others are not; empty if that is off."""
        if not self._most:
            return ""
        ranks = ", ".join(map(str, sorted(self._parked))) or "none"
        problems = [f"rank {rank}: {text}" for rank, text in sorted(self._problems.items())]
        reasons = [*problems, *filter(None, [self._memory_problem])]
        return "; ".join([f"rehearsed ranks: {ranks}", *reasons[:1]])

    def poll(self, now_s: float) -> None:
        if not self._most:
            return
        self._reap()
        if self._generation != self._run.workers.generation:
            self._generation = self._run.workers.generation
            self._problems.clear()
            self._mismatches.clear()
        self._drop_ended()
        if self._running is not None:
            self._collect(self._running, now_s)
        elif (rank := self._next()) is not None:
            self._begin(rank, now_s)

    def begin_generation(
        self, request: LaunchRequest, ranks: range, taken: Collection[int]
    ) -> dict[int, WorkerHandle]:
        """Return the rehearsed processes that start in a generation, by local rank.

        Args:
            request: that of the generation, without what differs between the ranks.
            ranks: of this node.
            taken: local ranks whose processes stay.
        """
        self.end_unfinished()
        if not request.joins or request.restore is None:
            self.end()  # Rule 3
            return {}
        found: dict[int, WorkerHandle] = {}
        for rank, handle in list(self._parked.items()):
            parked, local = handle.parked, rank - ranks.start
            is_over = parked is not None and parked.last_step < request.restore.step
            is_over |= rank not in ranks or handle.child.reap() or self._is_in_other_loop(handle)
            if is_over:
                self._end(self._parked.pop(rank))
            elif local not in taken and parked and parked.first_step <= request.restore.step:
                del self._parked[rank]
                self._make_equal(handle.pid)
                _close_slot(handle.slot)
                handle.local_rank_id = local
                found[local] = handle
        return found

    def end_unfinished(self) -> None:
        """Kill the rehearsal that has not parked, without a wait."""
        if self._running is not None:
            self._end(self._running.handle)
            self._running = None

    def end(self) -> None:
        self.end_unfinished()
        while self._parked:
            self._end(self._parked.popitem()[1])

    # --- one rehearsal ------------------------------------------------------------------------

    def _next(self) -> int | None:
        """The rank to rehearse now, if there is one."""
        run = self._run
        workers, zygote = run.workers, run.workers.starter.zygote
        is_stable = run.generations.has_ranks and not workers.is_suspended
        committed = workers.committed()
        if not is_stable or workers.awaits_boundary or zygote is None or not zygote.has_standby:
            return None
        if committed is None or committed[0] != workers.generation or workers.join_problem:
            return None
        if len(self._parked) >= self._most or not all(map(self._is_ready, workers.slots)):
            return None
        ranks = [one.rank for one in workers.slots]
        left = [one for one in ranks if one not in self._parked and one not in self._problems]
        return min(left, key=lambda rank: self._begun_s.get(rank, 0.0), default=None)

    def _is_ready(self, slot: LaunchSlot) -> bool:
        page, restored = slot.page, self._run.workers.restored
        first = restored.step if restored is not None else 0
        has_stepped = page.get(HeartbeatField.STEP) - first >= MIN_STEPS
        return has_stepped and bool(page.get(HeartbeatField.MAY_STAY))

    def _begin(self, rank: int, now_s: float) -> None:
        workers = self._run.workers
        local = rank - workers.first_rank
        handle, request = workers.starter.handles.get(local), workers.starter.requests.get(local)
        zygote = workers.starter.zygote
        if handle is None or request is None or zygote is None:
            return
        if handle.slot.page.get(HeartbeatField.DEVICE_NS):
            self._fail(rank, "ranks use a device, and a second process may not fit there")
            return
        if not self._has_memory(handle, now_s):
            return
        try:
            started = self._launch(rank, local, request, zygote)
        except (OSError, ZygoteUnavailable) as error:
            self._fail(rank, str(error))
            return
        _set_oom_score(started.pid, _FIRST_TO_GO)
        if self._may_be_nice:
            _set_priority(started.pid, os.getpriority(os.PRIO_PROCESS, 0) + _NICER)
        self._begun_s[rank] = now_s
        limit_s = max(_LEAST_LIMIT_S, _LIMIT_FACTOR * _set_up_s(handle.slot.page))
        self._running = _Rehearsal(started, now_s, limit_s)

    def _has_memory(self, handle: WorkerHandle, now_s: float) -> bool:
        if now_s < self._memory_due_s:
            return False
        needed = self._run.smp.needed
        self._memory_problem = memory_problem(
            resident_bytes(handle.pid), needed.arena_bytes + needed.parity_bytes, available_memory()
        )
        if self._memory_problem:
            self._memory_due_s = now_s + _CHECK_MEMORY_S
        return not self._memory_problem

    def _launch(
        self, rank: int, local: int, request: LaunchRequest, zygote: ZygoteClient
    ) -> WorkerHandle:
        """Start the process. Raises OSError or ZygoteUnavailable."""
        workers, smp = self._run.workers, self._run.smp
        committed = workers.committed()
        assert committed is not None
        wanted = version(*committed)
        arena_fd = smp.memory.arena_for(Rank(rank), wanted)
        if arena_fd is None:
            raise ZygoteUnavailable(f"this node has no memory of rank {rank}")
        log = Path(self._run.spec.log_folder) / f"rehearsal-rank{rank}.log"
        line, its_line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.setblocking(False)
        descriptors = {
            "heartbeat": create_page(f"rank-{rank}"),
            "command": workers.command_fd,
            "stack": create_stack_file(str(rank)),
            "arena": arena_fd,
            "line": its_line.fileno(),
        }
        variables = {name: one for name, one in request.variables.items() if name != _ERROR_FILE}
        request = msgspec.structs.replace(
            request,
            rank=Rank(rank),
            restore=wanted,
            restore_world_size=0,
            skip_batches=0,
            rank_socket="",
            variables=variables,
            joins=False,
            rehearses=True,
        )
        slot = LaunchSlot(
            msgspec.structs.replace(request, descriptors=descriptors),
            SharedPage(descriptors["heartbeat"]),
            line,
        )
        try:
            with its_line, open(log, "w") as output:
                streams = {"stdout": output.fileno(), "stderr": output.fileno()}
                request = msgspec.structs.replace(request, descriptors={**descriptors, **streams})
                child = zygote.launch(request, local)
        except BaseException:
            _close_slot(slot)
            line.close()
            raise
        zygote.refill()
        return WorkerHandle(local, child, slot, "rehearsed")

    def _collect(self, one: _Rehearsal, now_s: float) -> None:
        handle = one.handle
        rank, seconds = handle.slot.rank, round(now_s - one.since_s, 3)
        answer = _answer(handle)
        if isinstance(answer, str):
            reason = answer
        elif answer is not None and not answer.problem:
            self._running = None
            if self._is_in_other_loop(handle):
                self._mismatch(handle)
            else:
                handle.parked = answer
                self._parked[rank] = handle
                self._run.journal.write(RankRehearsed("", rank, seconds))
            return
        elif answer is not None:
            reason = answer.problem
        elif seconds > one.limit_s:
            reason = f"it has not made a step within {one.limit_s:.0f} s"
        else:
            return
        self._running = None
        self._end(handle)
        log = f"{self._run.spec.log_folder}/rehearsal-rank{rank}.log"
        self._fail(rank, f"{reason}; its output is in {log}", seconds)

    def _mismatch(self, handle: WorkerHandle) -> None:
        """The rank has entered another loop in the meantime, such as that of the next epoch."""
        rank = handle.slot.rank
        self._mismatches[rank] += 1
        self._end(handle)
        if self._mismatches[rank] >= _MAX_MISMATCHES:
            self._fail(rank, "its loop over steps ends before a rehearsal is ready")

    def _fail(self, rank: int, reason: str, seconds: float = 0.0) -> None:
        self._problems[rank] = reason
        self._run.journal.write(RankRehearsed(reason, rank, seconds))
        _log.info("rank %d is not rehearsed: %s", rank, reason)

    def _is_in_other_loop(self, handle: WorkerHandle) -> bool:
        pages = {slot.rank: slot.page for slot in self._run.workers.slots}
        page = pages.get(Rank(handle.slot.rank))
        now = 0 if page is None else page.get(HeartbeatField.LOOP)  # 0: it is in no loop yet
        return now not in (0, handle.slot.page.get(HeartbeatField.LOOP))

    def _drop_ended(self) -> None:
        """Forget parked processes that have ended, or that are in a loop that is over."""
        for rank, handle in list(self._parked.items()):
            is_over = self._run.generations.has_ranks and self._is_in_other_loop(handle)
            if handle.child.reap() or is_over:
                self._end(self._parked.pop(rank))

    # --- the end ------------------------------------------------------------------------------

    def _end(self, handle: WorkerHandle) -> None:
        """Kill the process and what it has started; `_reap` reads its status."""
        trees = RankTrees([handle.pid], [])
        handle.child.signal_group(SIGKILL)
        handle.child.signal(SIGKILL)
        trees.kill_below()
        trees.close()
        _close_slot(handle.slot)
        if handle.slot.line is not None:
            handle.slot.line.close()
        self._ending.append(handle)

    def _reap(self) -> None:
        self._ending = [one for one in self._ending if not one.child.reap()]

    def _make_equal(self, pid: int) -> None:
        """Give a standby and its children the priority of a rank, also for the OOM killer."""
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        for one in (pid, *process_tree.descendants_by_list([pid])):
            _set_oom_score(one, OOM_SCORE)
            if self._may_be_nice:
                _set_priority(one, nice)


def _answer(handle: WorkerHandle) -> Parked | str | None:
    """What the rehearsal has sent; why it ends without it; None: nothing yet."""
    line = handle.slot.line
    assert line is not None
    with suppress(OSError, msgspec.MsgspecError):
        if data := line.recv(_MAX_ANSWER_BYTES):
            return msgspec.json.decode(data, type=Parked)
    if not handle.child.reap():
        return None
    if handle.child.status == 0:
        return "its loop has no step left"
    return f"it {exit_text(handle.child.ended_with)}"


def _close_slot(slot: LaunchSlot) -> None:
    for name in ("heartbeat", "stack"):
        os.close(slot.request.descriptors[name])


def _set_up_s(page: SharedPage) -> float:
    since_ns = page.get(HeartbeatField.STARTED_NS)
    return max(0.0, page.get(HeartbeatField.FIRST_STEP_NS) - since_ns) / 1e9 if since_ns else 0.0


def memory_problem(of_rank: int, of_snapshots: int, free: AvailableMemory) -> str:
    """Why a process of this size does not fit next to the memory that snapshots still need."""
    if of_rank + of_snapshots <= free.num_bytes:
        return ""
    return (
        f"a rehearsal needs {of_rank >> 20} MB and snapshots {of_snapshots >> 20} MB more, and "
        f"{free.num_bytes >> 20} MB are free ({free.limit})"
    )


def resident_bytes(pid: int) -> int:
    """Memory of a process, shared memory included; 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


def _can_take_back_priority() -> bool:
    """Whether this process may raise a priority that it has lowered; only some users may."""
    found: list[bool] = []

    def attempt() -> None:  # each thread of Linux has its own priority
        before = os.getpriority(os.PRIO_PROCESS, 0)
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, before + 1)
            os.setpriority(os.PRIO_PROCESS, 0, before)
            found.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(found)


def _set_oom_score(pid: int, score: int) -> None:
    with suppress(OSError):  # it has ended, or a container forbids it
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(score), encoding="ascii")


def _set_priority(pid: int, nice: int) -> None:
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), nice)
