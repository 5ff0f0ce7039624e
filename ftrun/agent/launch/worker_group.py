"""The workers of this node: their processes, their pages, and the commands for all of them.

Runs in the main thread. Pages and error files outlive their worker, and are read here.
"""

import os
import socket
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from signal import SIGCONT, SIGKILL, SIGSTOP

import msgspec

from ftrun import clock, events, process_tree
from ftrun.agent.launch.elastic import FtrunElasticAgent
from ftrun.agent.launch.parking import RankParking, survivor_variables
from ftrun.agent.launch.rank_trees import KILL_WAIT_S, RankEnding
from ftrun.agent.launch.warm_start import LaunchSlot, RehearsedRanks, WorkerHandle, WorkerStarter
from ftrun.agent.observe.evidence import EndedRank, WrittenErrors
from ftrun.agent.observe.introspection import as_traceback, parse_dump
from ftrun.agent.observe.recorder_dumps import DUMPS, has_nccl_devices, recorder_variables
from ftrun.agent.snapshots.smp_client import AgentSmpClient
from ftrun.config.run_spec import RunSpec
from ftrun.ids import Rank, Step, Version
from ftrun.monitor.page_values import quantile_s
from ftrun.monitor.worker_exits import ExitFacts, explain
from ftrun.wire.cluster.generation import GenerationPlan, VersionPair
from ftrun.wire.cluster.membership import RankReport
from ftrun.wire.crash_points import crash_point
from ftrun.wire.fault_orders import FaultPages
from ftrun.wire.messages.worker import LaunchRequest
from ftrun.wire.run_environment import GENERATION, RUN_ID
from ftrun.wire.shared_memory.pages import (
    CommandField,
    HeartbeatField,
    SharedPage,
    create_command_page,
    create_page,
    create_stack_file,
    most,
    stacks,
)

AWAY_S = 2.0
"""Longer than any turn of the loop takes while the machine runs."""
_LEAST_WAIT_S = 0.05
_POOL_WAIT = ". In the last capture, the training waited {:.1f} s for the storage"


class WorkerGroup:
    """All ranks of one node in one generation."""

    def __init__(
        self,
        spec: RunSpec,
        *,
        smp: AgentSmpClient,
        starter: WorkerStarter,
        stuck_pids: Sequence[int] = (),
    ) -> None:
        self.starter = starter
        self.generation = -1
        self.first_rank = 0
        self.restored: Version | None = None
        self.commands: SharedPage | None = None
        self.command_fd = -1
        self._spec = spec
        self._smp = smp
        self._error_files: dict[int, str] = {}
        self._written = WrittenErrors(spec.profile.monitor.error_patterns)
        self.is_suspended = False
        self.awaits_boundary = False
        """The ranks were asked for a final snapshot, and wait at its boundary."""
        self.join_problem = ""
        """See `FailureHistory.join_problem`."""
        self.rehearsed: RehearsedRanks = lambda *_: {}
        self._ends = RankEnding(stuck_pids)
        self._polled_s = clock.now_s()
        self.unused_fds: SimpleQueue[int] = SimpleQueue()
        """Stack files of ranks that have ended; the thread that writes to them closes them."""
        self.fault_pages = FaultPages() if spec.allow_faults else None

    # --- the life of a generation -----------------------------------------------------------------

    def prepare(
        self,
        request: LaunchRequest,
        ranks: range,
        *,
        kept: VersionPair | None,
        rails: Mapping[str, str],
    ) -> None:
        """Create pages and variables for the workers of a generation.

        Args:
            request: without what differs between the ranks.
            ranks: of this node.
            kept: the newest version that was committed before this generation.
            rails: variables that set the rails of the ranks.
        """
        restored = request.restore
        self.generation, self.restored = request.generation, restored
        self.first_rank = ranks.start
        self._close_places()
        self.is_suspended = False
        self.command_fd = create_command_page()
        self.commands = SharedPage(self.command_fd)
        self.lease(None if self._spec.nodes is None else 0.0)
        self.commands.set(CommandField.PERSIST_EVERY, self._spec.persist_every)
        if restored is not None:
            self.commands.set(CommandField.COMMITTED_GENERATION, restored.generation)
            self.commands.set(CommandField.COMMITTED_STEP, restored.step)
        if kept is not None:
            self.commands.set(CommandField.RETAINED_GENERATION, kept[0])
            self.commands.set(CommandField.RETAINED_STEP, kept[1])
        self.starter.parked |= self.rehearsed(request, ranks, self.starter.parked)
        self.starter.slots = {
            local: self._slot(
                msgspec.structs.replace(request, rank=Rank(rank)), self.starter.parked.get(local)
            )
            for local, rank in enumerate(ranks)
        }
        self.starter.variables = {
            **rails,
            **survivor_variables(os.environ, survivors=self._spec.profile.restart.survivors),
            RUN_ID: self._spec.run_id,
            GENERATION: str(request.generation),
            **recorder_variables(
                os.environ,
                dumps=Path(self._spec.log_folder) / DUMPS / str(request.generation),
                pipes=self._smp.folder.path,
                has_devices=has_nccl_devices(),
            ),
        }
        self.starter.handles = {}

    def launched(self, agent: FtrunElasticAgent) -> None:
        self._close_given()
        self._error_files = dict(agent.error_files)
        with suppress(OSError):  # a full disk costs the second of two signs
            process_tree.note_sessions(self._smp.folder.path, self.pids())

    def kill(self) -> str:
        """End every worker, and every process that a worker has started; return what is stuck."""
        self._ends.end([*self.handles, *self.starter.parked.values()])
        self.starter.parked = {}
        return self.stuck()

    def park(self, *, failed: Collection[int]) -> RankParking:
        """Park the ranks that may stay; end the others, and all that they have started.

        Args:
            failed: ranks that do not stay.
        """
        limit_s = self._spec.profile.restart.park_s
        parking = RankParking(self.generation, limit_s=limit_s)
        give_up_s = clock.now_s() + limit_s + KILL_WAIT_S
        parking.ask(self.handles, failed=failed)
        crash_point("agent.renew.revoked")
        staying = [*self.parked, *parking.asked]
        ended = [one for one in self.handles if one not in staying]
        self._ends.end(ended, others_stay=bool(staying), give_up_s=give_up_s)
        if parking.asked and self.is_suspended:
            self.suspend(False)  # their lease has expired, so they park and make no step
        parking.wait()
        if ended := [one for one in parking.asked if one.parked is None]:
            self._ends.end(ended, others_stay=bool(self.parked), give_up_s=give_up_s)
        crash_point("agent.renew.parked")
        return parking

    def keep_parked(self, plan: GenerationPlan, node_id: str) -> None:
        """Keep the parked processes that this node has in the plan, and end the others.

        A node that is a spare in the plan may have parked a rank that stays on another node.
        """
        node = plan.member(node_id)
        ranks = set(plan.staying).intersection(node.ranks if node is not None else ())
        kept = [one for one in self.parked if one.slot.rank in ranks]
        if ended := [one for one in self.parked if one not in kept]:
            self._ends.end(ended, others_stay=bool(kept))
        for handle in kept:
            handle.close()  # the files of its last generation
        self.starter.parked = {handle.local_rank_id: handle for handle in kept}

    def stuck(self) -> str:
        """Processes that have not died of SIGKILL, in words; empty if there are none."""
        return self._ends.stuck()

    @property
    def used_device(self) -> bool:
        """Ranks that were killed have used a device since its memory was last awaited."""
        return self._ends.used_device

    def device_awaited(self) -> None:
        self._ends.used_device = False

    def signal(self, number: int) -> None:
        for handle in self.alive():
            handle.child.signal_group(number)
            if not self.is_suspended:
                # A stopped process cannot handle the signal until it continues.
                handle.child.signal_group(SIGCONT)

    def ask_last_snapshot(self, after_step: int) -> None:
        """Have every rank stop after this step; -1: at the first boundary that none has passed."""
        if self.commands is not None:
            step = after_step if after_step >= 0 else most(self.pages, HeartbeatField.STEP) + 1
            self.commands.set(CommandField.STOP_AFTER_STEP, step)

    def sealed(self) -> tuple[int, int] | None:
        """Steps of the newest seal of each rank, in this generation: the smallest, the largest."""
        steps = [
            page.get(HeartbeatField.SEALED_STEP)
            for page in self.pages
            if page.get(HeartbeatField.SEALED_COUNT)
            and page.get(HeartbeatField.SEALED_GENERATION) == self.generation
        ]
        return (min(steps), max(steps)) if steps else None

    def committed(self) -> tuple[int, int] | None:
        """The newest version that the command page shows as committed: (generation, step)."""
        if self.commands is None or self.commands.get(CommandField.COMMITTED_STEP) < 0:
            return None
        step = self.commands.get(CommandField.COMMITTED_STEP)
        return (self.commands.get(CommandField.COMMITTED_GENERATION), step)

    def take_from(self, step: int) -> None:
        if self.commands is not None:
            # a new leader starts with a lower step
            step = max(step, self.commands.get(CommandField.TAKE_FROM))
            self.commands.set(CommandField.TAKE_FROM, step)

    def set_interval(self, every: int, from_step: int) -> None:
        """Set the interval ahead of time, because ranks read it at different steps."""
        if self.commands is not None:
            self.commands.set(CommandField.EVERY_FROM_STEP, from_step)
            self.commands.set(CommandField.SNAPSHOT_EVERY, every)

    def lease(self, until_s: float | None) -> None:
        """Allow the ranks to step until this time; None: without a limit. From any thread."""
        if self.commands is not None:
            # 0 means no limit, and the first nanosecond has passed already.
            until_ns = 0 if until_s is None else max(1, round(until_s * 1e9))
            self.commands.set(CommandField.LEASE_NS, until_ns)

    def suspend(self, on: bool) -> None:
        """From any thread. Parked ranks make no step, and are left alone."""
        self.is_suspended = on
        number = SIGSTOP if on else SIGCONT
        handles = [one for one in list(self.starter.handles.values()) if one.parked is None]
        alive = [one.child for one in handles if one.child.status is None]
        for child in alive:
            child.signal_group(number)
        # Processes in sessions of their own, such as a rank behind a wrapper.
        below = process_tree.descendants([child.pid for child in alive])
        tree = {*below, *(child.pid for child in alive)}
        for pid in below:
            process_tree.send(pid, number, still=lambda pid: process_tree.parent_of(pid) in tree)

    # --- observations -----------------------------------------------------------------------------

    @property
    def handles(self) -> list[WorkerHandle]:
        return [handle for _, handle in sorted(self.starter.handles.items())]

    @property
    def pages(self) -> list[SharedPage]:
        return [slot.page for slot in self.slots]

    @property
    def slots(self) -> list[LaunchSlot]:
        return [slot for _, slot in sorted(self.starter.slots.items())]

    def alive(self) -> list[WorkerHandle]:
        return [handle for handle in self.handles if handle.child.is_alive]

    @property
    def descriptors(self) -> list[int]:
        """Readable when a rank ends."""
        return [fd for handle in self.handles for fd in handle.child.descriptors]

    def watch_ends(self) -> None:
        """Have the failures of ranks reported early, from the first step of each rank on."""
        for handle in self.handles:
            if handle.slot.page.get(HeartbeatField.FIRST_STEP_NS):
                handle.child.watch_thread()

    @property
    def parked(self) -> list[WorkerHandle]:
        return [handle for handle in self.handles if handle.parked is not None]

    def pids(self) -> list[int]:
        return [handle.pid for handle in self.handles]

    def ended(self) -> list[WorkerHandle]:
        over = [h for h in self.handles if h.child.reap() or h.child.is_ending()]
        found = [handle for handle in over if not handle.exit_seen]
        for handle in found:
            handle.exit_seen = True
        return found

    def explain(
        self, handles: Sequence[WorkerHandle], *, oom_kills: int | None
    ) -> list[events.WorkerExit]:
        """How ranks have ended; the first cause among them has its error classes too."""
        return self._written.of_first_cause([self._explain(one, oom_kills) for one in handles])

    def _explain(self, handle: WorkerHandle, oom_kills: int | None) -> EndedRank:
        page, folder = handle.slot.page, self._log_folder(handle)
        error_file = self._error_files.get(handle.local_rank_id, "")
        left = self._written.exception_of(error_file, folder)
        traceback = left.traceback or _last_stack(handle)
        corrupt = page.get(HeartbeatField.CORRUPT_SLOT)
        if corrupt:
            other = page.get(HeartbeatField.CORRUPT_RANK)
            rank = other - 1 if other else handle.slot.rank
            self._smp.memory.void_slot(Rank(rank), self.restored)
        facts = ExitFacts(
            rank=Rank(handle.slot.rank),
            pid=handle.pid,
            status=handle.child.ended_with,
            message=left.message,
            traceback=traceback,
            failed_at_ns=page.get(HeartbeatField.FAILED_NS) or left.failed_at_ns,
            oom_kills=oom_kills,
            stopped_s=handle.killed_for_s,
            last_call=handle.last_call or "",
            full_disk=folder if left.is_disk_full else "",
            corrupt=page.note if corrupt else "",
        )
        return EndedRank(explain(facts), folder, f"{traceback}\n{left.message}")

    def written_errors(self, handle: WorkerHandle) -> tuple[events.ErrorLine, ...]:
        """Error classes in the logs of a rank; from any thread."""
        return self._written.find(self._log_folder(handle))

    def _log_folder(self, handle: WorkerHandle) -> str:
        return os.path.dirname(self._error_files.get(handle.local_rank_id, ""))

    def error_file(self, rank: int) -> str:
        return self._error_files.get(rank - self.first_rank, "")

    def unprotected_reason(self) -> str:
        """Why no snapshots are taken of a rank here; empty if they are."""
        pages = self.pages
        notes = [page.note for page in pages if page.get(HeartbeatField.UNPROTECTED)]
        if notes:
            waited_s = most(pages, HeartbeatField.POOL_WAIT_NS) / 1e9
            return notes[0] + (_POOL_WAIT.format(waited_s) if waited_s >= _LEAST_WAIT_S else "")
        # ftrun.dcp takes snapshots without `attach`.
        is_attached = any(page.get(HeartbeatField.ATTACHED) for page in pages)
        is_protected = is_attached or self.committed() is not None
        has_heartbeat = any(page.get(HeartbeatField.HEARTBEAT_NS) for page in pages)
        return "" if is_protected or not has_heartbeat else "the script does not call ftrun.attach"

    def stay_problem(self) -> str:
        """Why a rank here could not stay if another one failed; empty if all could, or none may."""
        if self._spec.profile.restart.survivors == "off" or self.join_problem:
            return self.join_problem
        reasons = [(slot.rank, text) for slot in self.slots if (text := slot.page.stay_problem)]
        return f"rank {reasons[0][0]}: {reasons[0][1]}" if reasons else ""

    def slow_capture(self) -> str:
        """Why ranks here copy from devices slowly, and what to do; empty if none does."""
        slow = [(slot.rank, text) for slot in self.slots if (text := slot.page.slow_capture)]
        if not slow:
            return ""
        (rank, reason), *others = slow
        more = f" and {len(others)} more here" if others else ""
        return f"rank {rank}{more}: {reason}"

    def progress(self) -> events.Progress:
        first = self.restored.step if self.restored is not None else 0
        pages = self.pages
        step = most(pages, HeartbeatField.STEP)
        here = [
            step - first if page.get(HeartbeatField.ATTACHED) else page.get(HeartbeatField.STEP)
            for page in pages
            if page.get(HeartbeatField.FIRST_STEP_NS)
        ]
        attached = any(page.get(HeartbeatField.ATTACHED) for page in pages)
        return events.Progress(Step(step), max(here, default=0), attached)

    def reports(self, now_s: float) -> tuple[RankReport, ...]:
        return tuple(_report(handle, now_s) for handle in self.handles)

    def all_at_boundary(self) -> bool:
        alive = self.alive()
        return bool(alive) and all(
            h.slot.page.get(HeartbeatField.STOPPED_AT_BOUNDARY) for h in alive
        )

    def kill_long_stopped(self, now_s: float, limit_s: float) -> None:
        """Kill workers that were stopped from outside, because one blocks all the others.

        If this process was paused too, the whole machine was paused, and the time starts again.
        """
        was_away, self._polled_s = now_s - self._polled_s > AWAY_S, now_s
        for handle in self.alive():
            if self.is_suspended or not handle.child.is_stopped():
                handle.stopped_since_s = handle.last_call = None
            elif handle.stopped_since_s is None or was_away:
                handle.stopped_since_s = now_s
            elif now_s - handle.stopped_since_s > limit_s and handle.killed_for_s is None:
                handle.killed_for_s = now_s - handle.stopped_since_s
                handle.child.signal_group(SIGKILL)

    def stopped_by_order(self, handle: WorkerHandle, since_s: float) -> None:
        """Record the stop of a rank by a fault.

        The start of the reverter delays this process, and must not count as a paused machine.
        """
        handle.stopped_since_s, self._polled_s = since_s, clock.now_s()

    def requested_every(self) -> int:
        if self._spec.profile.snapshot.every != "auto":
            return 0
        return most(self.pages, HeartbeatField.REQUESTED_EVERY)

    # --- details ------------------------------------------------------------------------------

    def _slot(self, request: LaunchRequest, parked: WorkerHandle | None) -> LaunchSlot:
        """The slot of a rank, which runs in a parked process or in a new one."""
        rank, line = request.rank, None
        page_fd = create_page(f"rank-{rank}")
        descriptors = {
            "heartbeat": page_fd,
            "command": self.command_fd,
            "stack": create_stack_file(str(rank)),
        }
        # After a resize, a rank is assembled from the shards that its SMP provides.
        if not request.restore_world_size:
            arena_fd = self._smp.memory.arena_for(rank, request.restore)
            if arena_fd is not None:
                # Another connection to the SMP closes all descriptors of arenas.
                descriptors["arena"] = os.dup(arena_fd)
        if parked is not None:
            request, line = msgspec.structs.replace(request, joins=False), parked.slot.line
        elif self._spec.profile.restart.survivors == "on":
            line, its_line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            line.setblocking(False)
            descriptors["line"] = its_line.detach()
        if self.fault_pages is not None:
            descriptors["fault"] = self.fault_pages.fd_of(rank)
        is_inspected = self._spec.profile.monitor.enabled
        path = str(self._smp.folder.rank_socket(rank)) if is_inspected else ""
        request = msgspec.structs.replace(request, rank_socket=path, descriptors=descriptors)
        return LaunchSlot(request, SharedPage(page_fd), line)

    def _close_given(self) -> None:
        """Close the arenas and the ends of lines that the ranks have.

        A descriptor here would keep memory that the SMP gives up, and hide the end of a rank.
        """
        for slot in self.slots:
            for name in ("arena", "line"):
                if (fd := slot.request.descriptors.pop(name, -1)) >= 0:
                    os.close(fd)

    def _close_places(self) -> None:
        self._close_given()
        kept = [handle.slot.line for handle in self.starter.parked.values()]
        for slot in self.slots:
            if slot.line is not None and slot.line not in kept:
                slot.line.close()
            os.close(slot.request.descriptors["heartbeat"])
            if self._spec.profile.monitor.enabled:
                self.unused_fds.put(slot.stack_fd)
            else:
                os.close(slot.stack_fd)
        if self.command_fd >= 0:
            os.close(self.command_fd)


def _report(handle: WorkerHandle, now_s: float) -> RankReport:
    page = handle.slot.page
    heartbeat_ns = page.get(HeartbeatField.HEARTBEAT_NS)
    return RankReport(
        rank=handle.slot.rank,
        pid=handle.pid,
        state=handle.state,
        step=page.get(HeartbeatField.STEP),
        age_s=max(0.0, round(now_s - heartbeat_ns / 1e9, 3)) if heartbeat_ns else -1.0,
        phase=page.phase,
        loss=page.loss if page.get(HeartbeatField.LOSS) else None,
        loss_step=page.get(HeartbeatField.LOSS_STEP),
        bad_step=page.get(HeartbeatField.NUMERICAL_ANOMALY_STEP),
        p50_s=quantile_s(page.step_times, 0.5),
        p99_s=quantile_s(page.step_times, 0.99),
    )


def _last_stack(handle: WorkerHandle) -> str:
    stack = parse_dump(stacks(handle.slot.stack_fd)) if handle.child.ended_with < 0 else None
    return as_traceback(stack) if stack is not None else ""
