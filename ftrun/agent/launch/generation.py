"""Prepares and starts a generation on this node, and measures the phases of a restart.

Runs in the main thread. The state for the next agent is persisted in the SMP and the stub before a
plan is accepted.
"""

import logging
import os
from collections import deque
from collections.abc import Mapping

import msgspec
import xxhash

from ftrun import clock
from ftrun.agent.launch.elastic import FtrunElasticAgent
from ftrun.agent.launch.phases import phases_of
from ftrun.agent.launch.worker_group import WorkerGroup
from ftrun.agent.observe.repeated_steps import RepeatedSteps
from ftrun.agent.snapshots.retained_memory import PersistedAgentState, StubClient
from ftrun.agent.snapshots.smp_client import NOTHING, AgentSmpClient
from ftrun.agent.snapshots.topology import begin_generation, claim_of, load_order, sources_of
from ftrun.config.run_spec import RunSpec
from ftrun.errors import DirectoryTaken, PeerError, SnapshotError
from ftrun.ids import Generation, Rank, Version, version
from ftrun.journal import Journal
from ftrun.network.detect.rails import env_for, match_rails, rails_of_node
from ftrun.records.incidents import VerdictRecord
from ftrun.records.membership import GenerationChosen, NodeLost
from ftrun.records.recovery import GenerationStartedRecord, Recovered, RestorePointChosen
from ftrun.records.snapshots import CheckpointRejected, SmpUnreachable
from ftrun.recovery.commands import JournalEntry
from ftrun.urls import without_password
from ftrun.wire.cluster.generation import GenerationPlan
from ftrun.wire.cluster.membership import RestartTimes
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages.worker import CONFIRM_S, LaunchRequest
from ftrun.wire.shared_memory.pages import HeartbeatField

_log = logging.getLogger(__name__)


class GenerationRunner:
    """Runs one generation after another on this node."""

    def __init__(
        self,
        spec: RunSpec,
        node_id: str,
        *,
        journal: Journal,
        smp: AgentSmpClient,
        stub: StubClient,
        workers: WorkerGroup,
        kept: PersistedAgentState,
    ) -> None:
        self.number = -1
        self.restarts: deque[Recovered] = deque(maxlen=100)
        self.plan: GenerationPlan | None = None
        """The plan whose ranks run here, or are about to start."""
        self.is_over = False
        """The ranks of this generation have ended, the inventory of this node was reported, and
        another generation follows."""
        self.checkpoint = ""
        """Name of the checkpoint from which the plan's ranks start; empty: none."""
        self.rejected: dict[str, str] = {}
        """Checkpoints that this node cannot use for this plan: names and reasons."""
        self._spec = spec
        self._node_id = node_id
        self._journal = journal
        self._smp = smp
        self._stub = stub
        self._workers = workers
        self.repeats = RepeatedSteps(journal, workers)
        self.announcements = Announcements()
        self._has_started = False
        self._persisted = kept
        self._decided_s = 0.0
        self._memory_s = 0.0
        self._restored: Version | None = None
        self._previous_world_size = 0
        """World size of the restored version; 0: the same as now."""
        self._is_share = False
        """Other nodes have read a part of the loaded checkpoint."""
        self._reported_bad: set[str] = set()

    @property
    def is_member(self) -> bool:
        return self.plan is not None and self.plan.member(self._node_id) is not None

    @property
    def newest_plan(self) -> GenerationPlan | None:
        return self.plan or self._persisted.plan

    @property
    def holds_ranks(self) -> bool:
        """Whether the newest plan gives this node ranks, whose state may be in its memory."""
        plan = self.newest_plan
        return plan is not None and plan.member(self._node_id) is not None

    @property
    def has_ranks(self) -> bool:
        """Whether this agent started the ranks of the newest plan, and no ballot has ended them."""
        return self._has_started and not self.is_over

    @property
    def is_alone(self) -> bool:
        return self.plan is not None and len(self.plan.members) == 1

    @property
    def token(self) -> str:
        """Identifies this generation: equal on all of its nodes, and for a restarted agent."""
        plan = self.newest_plan
        if plan is None:
            return ""
        lives = " ".join(str(node.card.incarnation) for node in plan.members)
        return xxhash.xxh3_64_hexdigest(f"{plan.generation} {lives}".encode())

    @property
    def life(self) -> str:
        """Identifies this run: equal on all nodes and in all generations of this run only."""
        plan = self.newest_plan
        return plan.life if plan is not None else ""

    def adopt(self, agent: FtrunElasticAgent, plan: GenerationPlan) -> Version | None:
        """Prepare: void later versions, load a checkpoint if needed, and send the plan to the SMP.

        Raises:
            SnapshotError: a state to resume from exists, but cannot be loaded.
        """
        self._decided_s = clock.now_s()
        self.is_over = False
        self.checkpoint, self.rejected = "", {}
        self.plan, self.number, self._has_started = plan, plan.generation, False
        crash_point("agent.restart.decided")
        self._note_join_problem(plan.history.join_problem)
        self._workers.keep_parked(plan, self._node_id)
        if plan.staying:
            crash_point("agent.renew.planned")
        self._restored = self._restore_point(plan)
        crash_point("agent.restart.voided")
        agent.close_generation()
        node = plan.member(self._node_id)
        ranks = node.ranks if node is not None else range(0)
        resized = bool(self._previous_world_size)
        self.repeats.prepare(plan, ranks, self._restored, resized=resized)
        self._workers.prepare(
            self._launch_request(plan),
            ranks,
            kept=plan.committed,
            rails=_path_variables(plan, self._node_id),
        )
        self.send_to_smp()
        crash_point("agent.restart.smp_notified")
        self._await_share()
        # Before the plan is accepted: the state proves to the next agent of this node what this
        # agent has accepted.
        self._persist_state()
        return self._restored

    def run(
        self, agent: FtrunElasticAgent, *, noticed_s: float, stopped_s: float, memory_s: float
    ) -> None:
        plan = self.plan
        assert plan is not None
        self._memory_s = memory_s
        agent.place_in(plan, self._node_id)
        agent.start_generation(plan.generation)
        if plan.staying:
            crash_point("agent.renew.started")
        self._workers.launched(agent)
        self._has_started = True
        crash_point("agent.restart.launched")
        if self.number > 0:
            start = str(self._restored) if self._restored is not None else "the beginning"
            start += (
                f"; ranks that stay: {len(plan.staying)} of {plan.world_size}"
                if plan.staying
                else ""
            )
            _log.info("%s", self.announcements.beginning(plan.reason, self.number, start))
            decided_s = self._decided_s
            times = (noticed_s or decided_s, decided_s, stopped_s or decided_s, clock.now_s())
            self.restarts.append(Recovered(self.number, plan.reason, *times, self._restored))
        pids, ranks = self._workers.pids(), [one.slot.rank for one in self._workers.handles]
        staying = [rank for rank in ranks if rank in plan.staying]
        self._journal.write(
            GenerationStartedRecord(
                plan.reason, self.number, self._restored, tuple(pids), tuple(ranks), tuple(staying)
            )
        )
        self._persist_state()
        crash_point("agent.restart.state_kept")
        self.repeats.launched()

    def _note_join_problem(self, problem: str) -> None:
        if problem and not self._workers.join_problem:
            _log.warning("--survivors has no effect in the rest of this run, because %s", problem)
        self._workers.join_problem = problem

    def send_to_smp(self) -> None:
        if self.plan is None:
            return
        # In the middle of a generation the newest commit must be protected again.
        versions = [one for one in (self._restored, self._smp.committed) if one is not None]
        newest = max(versions, default=None)
        previous_world_size = self._previous_world_size if newest == self._restored else 0
        body = begin_generation(
            self.plan,
            self._node_id,
            self._spec,
            newest,
            self._smp,
            previous_world_size=previous_world_size,
        )
        try:
            self._smp.begin_generation(body, self._workers.command_fd)
        except PeerError as error:
            self._journal.write(SmpUnreachable(str(error)))

    def configure_new_smp(self) -> None:
        if not self.is_over:
            self.send_to_smp()
        self._remember()

    def move_peers(self, ports: dict[str, int]) -> None:
        if self.plan is not None:
            smp_ports = {**self.plan.smp_ports, **ports}
            self.plan = msgspec.structs.replace(self.plan, smp_ports=smp_ports)
            self.send_to_smp()

    def measure(self) -> None:
        restart = self.restarts[-1] if self.restarts else None
        if restart is None or restart.phases_s is not None or restart.generation != self.number:
            return
        pages = self._workers.pages
        if not pages or not all(page.get(HeartbeatField.FIRST_STEP_NS) for page in pages):
            return

        phases_s = phases_of(restart, pages, memory_s=self._memory_s)
        self.restarts[-1] = msgspec.structs.replace(restart, phases_s=phases_s)
        self._journal.write(self.restarts[-1])

    def restart_times(self, now_s: float) -> RestartTimes | None:
        """Times of this generation's restart; None until every rank has completed a step."""
        self.measure()
        restart = self.restarts[-1] if self.restarts else None
        if restart is None or restart.phases_s is None or restart.generation != self.number:
            return None
        phases_s = restart.phases_s
        total_s = sum(phases_s.values())
        return RestartTimes(
            stepped_age_s=max(0.0, now_s - restart.noticed_s - total_s),
            total_s=total_s,
            restore_s=phases_s["restore"],
            first_step_s=phases_s["first_step"],
        )

    def _launch_request(self, plan: GenerationPlan) -> LaunchRequest:
        return LaunchRequest(
            generation=Generation(plan.generation),
            rank=Rank(-1),
            world_size=plan.world_size,
            agent_pid=os.getpid(),
            smp_socket=str(self._smp.folder.smp_socket),
            restore=self._restored,
            restore_world_size=self._previous_world_size,
            skip_batches=plan.skip_batches if self._restored is not None else 0,
            snapshot=self._spec.profile.snapshot,
            num_nodes=len(plan.members),
            has_storage=self._spec.checkpoint_directory is not None,
            joins=bool(plan.staying),
            confirm_s=confirm_s(len(plan.members), self._spec.profile.nodes.failure_timeout_s),
        )

    def _restore_point(self, plan: GenerationPlan) -> Version | None:
        found = version(*plan.restore) if plan.restore is not None else None
        reason = plan.restore_reason
        self._previous_world_size = plan.restore_world_size if plan.is_resized else 0
        self._is_share = False
        if found is None:
            found, reason = self._load_checkpoint(plan, reason)
        runs_ranks = plan.member(self._node_id) is not None
        if found is None and runs_ranks and self._smp.committed is not None:
            # Never restart from step 0 without an error if there was a state to resume from.
            has_directory = self._spec.checkpoint_directory is not None
            to_do = "" if has_directory else ". Give --checkpoint-dir to resume from disk next time"
            raise SnapshotError(
                f"the newest committed version {self._smp.committed} cannot be restored: {reason}"
                f"{to_do}"
            )
        if found is not None:
            # A version from a checkpoint is protected and committed again. The previous committed
            # version is lost, and must not be fetched.
            self._smp.committed = found if found.generation >= 0 else None
        voided = self._smp.void_after(found if found is not None else NOTHING)
        self._journal.write(RestorePointChosen(found, reason, voided))
        return found

    def _await_share(self) -> None:
        """Wait until this node has the whole checkpoint, before it accepts the plan."""
        if not self._is_share:
            return
        try:
            self._smp.await_restored()
        except PeerError as error:
            # The next SMP reports that it has no complete slot, so another generation begins.
            self._journal.write(SmpUnreachable(str(error)))
            return
        if self._smp.restore_failed:
            self._reject({self.checkpoint: self._smp.restore_failed})
            raise SnapshotError(f"the checkpoint cannot be read: {self._smp.restore_failed}")

    def _load_checkpoint(self, plan: GenerationPlan, reason: str) -> tuple[Version | None, str]:
        """Load a version from storage; return it, and the reason. None: there is no checkpoint."""
        node = plan.member(self._node_id)
        had = self._smp.committed is not None
        sources = sources_of(self._spec, plan.life, has_committed=had)
        if not sources:
            return None, reason
        if node is None:
            return None, "a spare loads no checkpoint"
        self._report_bad(plan.history.bad_checkpoints)
        for source in sources:
            claim = claim_of(plan, self._node_id, self._spec)
            limit_bytes = self._spec.profile.snapshot.limit_bytes
            order = load_order(plan, self._node_id, source, self._smp, claim, limit_bytes)
            answer = self._smp.load_checkpoint(order)
            if isinstance(answer, str):
                raise SnapshotError(f"{answer}. Nothing there was changed")
            self._reject(answer.rejected)
            if answer.is_taken:
                raise DirectoryTaken(answer.problem)
            if answer.problem:
                raise SnapshotError(f"{answer.problem}. Nothing there was changed")
            if answer.path:
                self.checkpoint = answer.path.rpartition("/")[2]
                self._previous_world_size, self._is_share = answer.world_size, answer.is_share
                reason = "; ".join([f"checkpoint {answer.path}", *answer.rejected.values()])
                return version(answer.generation, answer.step), reason
        if path := self._spec.resume_path:
            path = without_password(path)
            raise SnapshotError(f"--resume {path}: there is no checkpoint there; name another one")
        return None, sources[0].no_metrics_reason

    def _reject(self, bad: Mapping[str, str]) -> None:
        self.rejected.update(bad)
        self._report_bad(bad)

    def _report_bad(self, bad: Mapping[str, str]) -> None:
        for name, reason in bad.items():
            if name not in self._reported_bad:
                self._reported_bad.add(name)
                self._journal.write(CheckpointRejected(name, reason))
                _log.warning("checkpoint %s is not used: %s", name, reason)

    def keep_arenas(self) -> None:
        """Report new and freed arenas to the stub; cheap if nothing has changed."""
        self._stub.keep([fd for _, fd in self._smp.memory.held], self._persisted)

    @property
    def fault(self) -> str:
        """The hardware fault that this agent or an earlier one has found; empty: none."""
        return self._persisted.fault

    def keep_fault(self, fault: str) -> None:
        """Persist a hardware fault for this node's next agent; cheap if it is not new."""
        if fault != self.fault:
            self._persisted = msgspec.structs.replace(self._persisted, fault=fault)
            self.keep_arenas()

    def keep_plan(self, plan: GenerationPlan, *, is_chosen: bool) -> None:
        """Persist a plan for this node's next agent; `self.plan` does not change."""
        self._persisted = msgspec.structs.replace(self._persisted, plan=plan, is_chosen=is_chosen)
        self.keep_arenas()
        self._remember()

    def _persist_state(self) -> None:
        assert self.plan is not None
        self.keep_plan(self.plan, is_chosen=self._has_started)

    def _remember(self) -> None:
        try:
            self._smp.persist_run_state(self._persisted.encode())
        except PeerError as error:
            self._journal.write(SmpUnreachable(str(error)))


def _path_variables(plan: GenerationPlan, node_id: str) -> dict[str, str]:
    """Variables that set the rails of this node's ranks, without those that the user has set."""
    if plan.paths is None or plan.member(node_id) is None:
        return {}
    try:
        matched = match_rails({node.node_id: node.card.rails for node in plan.members})
        return env_for(plan.paths, rails_of_node(matched, node_id), os.environ)
    except Exception:  # noqa: BLE001 - a bug costs the network plan, never the run
        _log.exception("a bug in ftrun: ranks use the rails that their libraries choose")
        return {}


_CAUSES = (NodeLost, VerdictRecord)
"""Records that may name the same failure, like the reason of the next generation."""


class Announcements:
    """The causes that were printed since the last generation started."""

    def __init__(self) -> None:
        self._printed: deque[str] = deque(maxlen=20)

    def is_new(self, cause: str) -> bool:
        """Return whether this cause was not printed yet; from now on it counts as printed."""
        if cause in self._printed:
            return False
        self._printed.append(cause)
        return True

    def show(self, entry: JournalEntry, *, has_ranks: bool) -> None:
        """Print an entry, unless its cause was already printed.

        Without ranks here, `beginning` is not called, so the entry for a new generation clears the
        causes.
        """
        record = entry.record
        if isinstance(record, GenerationChosen) and not has_ranks:
            self._printed.clear()
        if entry.announce and (not isinstance(record, _CAUSES) or self.is_new(record.text)):
            _log.warning("%s", record.text)

    def beginning(self, reason: str, generation: int, start: str) -> str:
        """The line for a new generation; a cause that was already printed is left out."""
        printed = next((one for one in self._printed if reason.startswith(one)), "")
        self._printed.clear()
        rest = reason.removeprefix(printed).lstrip("; ")
        return "; ".join(
            [*([rest] if rest else []), f"generation {generation} starts from {start}"]
        )


def confirm_s(num_nodes: int, failure_timeout_s: float) -> float:
    """Longest time until a rank whose connection has broken is revoked for the failure of another.

    A node that runs ranks may be lost, and the leader with it: both take a failure timeout.
    """
    return CONFIRM_S + (2 * failure_timeout_s if num_nodes > 1 else 0.0)
