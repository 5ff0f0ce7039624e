"""The leader's view of a running generation: turns the reports of all nodes into supervisor events.

Runs in:  the agent that leads. Pure.
Takes in: heartbeats of the members, lost nodes.
Gives:    the supervisor's commands; the orders in the leader's own heartbeat.
Survives: the leader: `FailureHistory` is part of each plan, and the next leader starts from it.

Rule 1: the content of a heartbeat counts for the generation it names.
Rule 2: ranks that failed by an exception wait briefly for the failure that may have caused it: a
        killed peer, or a node that is found lost only when it does not answer.
Rule 3: a version is committed when every member reports that it holds and protects exactly that
        version. After a commit in a generation, no older version is committed in it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import assert_never

import msgspec

from ftrun.config.cluster import MembershipSettings
from ftrun.errors import ExitCode
from ftrun.events import (
    AllAtBoundary,
    Event,
    ExitKind,
    GenerationStarted,
    StopRequested,
    Tick,
    WorkerExit,
    WorkersExited,
)
from ftrun.ids import Generation, Rank, version
from ftrun.monitor.verdicts import Verdict, VerdictKind
from ftrun.monitor.worker_exits import may_be_a_consequence, node_lost, restore_failed
from ftrun.recovery.commands import (
    EndRun,
    ExcludeNode,
    JournalEntry,
    KillWorkers,
    RequestFinalSnapshot,
    Send,
    SignalWorkers,
    StartGeneration,
    SupervisorCommand,
)
from ftrun.recovery.health import HealthMonitor
from ftrun.recovery.incidents import IncidentLog
from ftrun.recovery.lost_links import PairFinder
from ftrun.recovery.past import NodeFailures, Past
from ftrun.recovery.repeated_causes import Placement
from ftrun.recovery.snapshot_coordination import MemberReports, SnapshotAlignment, StepRate
from ftrun.recovery.supervisor import STOPPING, Supervisor, SupervisorState
from ftrun.wire.cluster.generation import ConfigurationId, FailureHistory, GenerationPlan, NodeCard
from ftrun.wire.cluster.membership import Heartbeat, LeaderHeartbeat

CAUSE_WAIT_S = 0.15
"""Seconds within which a peer's death and the exceptions it causes are reported."""

EXAMINE_WAIT_S = 0.6
"""Seconds within which nodes report the last calls of their ranks, if at all."""

EVERY_AHEAD_STEPS = 64
"""Steps ahead at which a new interval begins; ranks drift apart by less."""

_ENDS_ITSELF = (ExitKind.EXCEPTION, ExitKind.EXIT_CODE)
_SIGTERM = 15


class GenerationMonitor:
    """One run, as its leader sees it."""

    def __init__(self, settings: MembershipSettings, me: str = "", *, pairs: PairFinder) -> None:
        limit = settings.max_restarts
        self.supervisor = Supervisor(settings.profile, max_restarts=limit, world_size=0)
        self.orders = LeaderHeartbeat(generation=-1)
        self.stop_signal = 0
        """The signal that requested the end of the run; 0: none."""
        self.past = Past()
        self.reports = MemberReports()
        self.watching = HealthMonitor(settings, me, pairs, self.reports)
        self.num_spares = 0
        """Nodes that could replace a member."""
        self.drain_requested: frozenset[str] = frozenset()
        """Nodes that received SIGTERM."""
        self.awaits_notices = False
        """The leader has not decided whether nodes drain or the run stops. No rank is restarted."""
        self._settings = settings
        self._alignment = SnapshotAlignment()
        self._plan: GenerationPlan | None = None
        self._reported = self.orders
        self._exits: dict[Rank, WorkerExit] = {}
        self._waiting: list[WorkerExit] = []
        self._stops_handled = 0
        per_hour = settings.profile.nodes.max_failures_per_hour
        self.failures = NodeFailures(per_hour, self.reports)
        self._problems: set[str] = set()
        self._is_boundary_reported = False
        self._checkpoint_s = self._waits_until_s = 0.0
        self._persist_step = 0
        """Newest step for which a checkpoint was ordered because a rank waits for it."""
        self._rate = StepRate(settings.times.heartbeat_interval_s)

    @property
    def incidents(self) -> IncidentLog:
        return self.watching.incidents

    def succeed(
        self,
        history: FailureHistory,
        *,
        now_s: float,
        known_s: float,
        newest: GenerationPlan | None = None,
    ) -> None:
        """Takes over the history that the last leader knew at `known_s`; may be called again.

        Ages that count towards the budget do not include the time since `known_s`: the strict
        choice. `newest` is the plan of this history.
        """
        self.past.succeed(history.past_restarts, history.gone, known_s=known_s)
        self.supervisor.succeed(history, now_s=now_s)
        self.incidents.succeed(history.incidents)
        self.watching.hung.succeed(history.hung_nodes, history.longest_start_s)
        self.failures.succeed(history, newest, known_s=known_s)

    def history(self, *, now_s: float) -> FailureHistory:
        known = self.supervisor.history(now_s=now_s)
        return msgspec.structs.replace(
            known,
            node_failures=self.failures.ages_s(now_s=now_s),
            barred=self.failures.barred_ages_s(now_s=now_s),
            exclusions=self.failures.reasons(now_s=now_s),
            incidents=self.incidents.count,
            hung_nodes=[*self.watching.hung.nodes],
            longest_start_s=self.watching.hung.longest_s,
            bad_version=self.watching.bad_version,
            skip_to=self.watching.skip_to,
            past_restarts=self.past.past_restarts(now_s=now_s),
            gone=self.past.gone_nodes(now_s=now_s),
        )

    def note_failure(self, node_id: str, *, now_s: float, fault_s: float | None = None) -> None:
        """Records the loss of a node; its last sign of life was at `fault_s`, if known."""
        if fault_s is not None and self._plan is not None and self._plan.member(node_id):
            self.incidents.sign(fault_s)
        if not self.past.was_asked_to_drain(node_id):  # draining is no failure
            self.failures.note(node_id, now_s=now_s)
        self.reports.forget(node_id)

    def excluded(self, *, now_s: float) -> set[str]:
        """Nodes that get no ranks: excluded ones, and those with a hardware fault.

        A member with a fault keeps its ranks until another node can run them.
        """
        return set(self.failures.excluded(now_s=now_s))

    @property
    def suspects(self) -> set[str]:
        """Nodes that are excluded only because a failure repeated on them."""
        return self.supervisor.suspects - self.reports.faults.keys()

    def bar(self, node_ids: Iterable[str], reason: str, *, now_s: float) -> None:
        for node_id in node_ids:
            self.failures.bar(node_id, reason, now_s=now_s)

    def returns(self, card: NodeCard, *, now_s: float) -> list[JournalEntry]:
        """Records that a node has joined."""
        self.past.returns(card.node_id)
        return self.failures.returns(card, now_s=now_s)

    def evict(self, verdict: Verdict, node_id: str, reason: str, *, now_s: float) -> None:
        is_fault = verdict.kind is VerdictKind.FAILING_NODE
        self.failures.bar(node_id, verdict.text, is_fault=is_fault, now_s=now_s)
        self.incidents.found(verdict, (), self.reports.progress, now_s=now_s)
        self.incidents.acted("evict", reason)

    # --- a generation -------------------------------------------------------------------------

    def take_over(self, plan: GenerationPlan, *, since_s: float) -> None:
        self.past.begins(plan, now_s=since_s)
        self._plan = plan
        self.reports.begin(plan)
        self.supervisor.world_size = plan.world_size

    def begin(self, plan: GenerationPlan, *, now_s: float) -> list[SupervisorCommand]:
        self.take_over(plan, since_s=now_s)
        self.failures.newest = None
        self.orders = LeaderHeartbeat(generation=plan.generation)
        self._exits.clear()
        self._waiting.clear()
        self._problems.clear()
        self._is_boundary_reported = False
        self._rate.begin()
        self._checkpoint_s, self._persist_step = now_s, 0
        self.watching.begin(plan)
        restored = version(*plan.restore) if plan.restore is not None else None
        return self._ask(GenerationStarted(Generation(plan.generation), restored), now_s)

    def note(self, node_id: str, heartbeat: Heartbeat) -> None:
        self.reports.take(node_id, heartbeat)
        if heartbeat.stops:
            self.stop_signal = heartbeat.stop_signal or _SIGTERM

    def heartbeat_received(
        self, node_id: str, heartbeat: Heartbeat, *, now_s: float
    ) -> list[SupervisorCommand]:
        """Records the state of one node; `tick` decides about its failures."""
        is_current = self.reports.take(node_id, heartbeat)
        times = heartbeat.restart if is_current else None
        took_s = self.incidents.stepped(node_id, times, now_s=now_s)
        if took_s is not None:
            self.past.measured(heartbeat.generation, took_s)
        found: list[SupervisorCommand] = []
        while self._stops_handled < heartbeat.stops:
            self._stops_handled += 1
            number = heartbeat.stop_signal or _SIGTERM
            found += self.stop(number, f"a signal on {node_id}", now_s=now_s)
        plan = self._plan
        if plan is None or not is_current:
            return found
        self._note_rate(now_s)
        self._commit(heartbeat)
        self._note_levels(heartbeat, now_s)
        if now_s - self._checkpoint_s >= self._settings.profile.checkpoint.every_s:
            self.name_checkpoint(now_s=now_s)
        known_port = self.orders.moved.get(node_id) or plan.smp_ports.get(node_id)
        if heartbeat.smp_port and heartbeat.smp_port != known_port:
            self._order(moved={**self.orders.moved, node_id: heartbeat.smp_port})
        if heartbeat.problem and node_id not in self._problems:
            self._problems.add(node_id)
            self._take_restore_failure(node_id, heartbeat, now_s)
        if heartbeat.exits:
            self._take_exits(heartbeat.exits, now_s)
        if self.reports.all_at_boundary and not self._is_boundary_reported:
            self._is_boundary_reported = True
            found += self._ask(AllAtBoundary(), now_s)
        return found

    def stop(self, number: int, by: str, *, now_s: float) -> list[SupervisorCommand]:
        self.stop_signal = number
        self._is_boundary_reported = False  # ranks may wait there already, for a reconfiguration
        return self._ask(StopRequested(number, by, self.reports.attached), now_s)

    def lost(self, nodes: Mapping[str, str], *, now_s: float) -> list[SupervisorCommand]:
        """Reports lost members, each with the reason, and their ranks with them."""
        for node_id, reason in sorted(nodes.items()):
            node = self.reports.member(node_id)
            ranks = node.ranks if node is not None else ()
            self._take_exits([node_lost(rank, node_id, reason) for rank in ranks], now_s)
        return self.tick(now_s=now_s) if nodes else []

    def tick(self, *, now_s: float) -> list[SupervisorCommand]:
        """Decides about failures that have waited long enough; advances the supervisor's time."""
        found: list[SupervisorCommand] = []
        self._watch(now_s)
        is_late = now_s >= self._waits_until_s
        is_free = bool(self._waiting) and not self.awaits_notices
        if is_free and (is_late or not self.waits_for_cause or self._is_examined()):
            exits = self._decided_on(now_s)
            self.supervisor.placement = self._placement(now_s)
            found += self._ask(WorkersExited(exits, self.reports.progress), now_s)
        return found + self._ask(Tick(), now_s)

    @property
    def waits_for_cause(self) -> bool:
        """Whether all failures that wait may be consequences of another failure."""
        failed = [one for one in self._waiting if one.kind is not ExitKind.FINISHED]
        return bool(failed) and all(
            one.kind in _ENDS_ITSELF or may_be_a_consequence(one) for one in failed
        )

    @property
    def is_steady(self) -> bool:
        is_running = self.supervisor.state is SupervisorState.RUNNING
        return is_running and self.reports.all_run and not self._exits

    @property
    def are_movable(self) -> bool:
        """Whether other nodes can restore the state of any member, or there is no state."""
        restored = self._plan.restore if self._plan is not None else None
        return self.reports.are_movable(self.orders.committed or restored)

    @property
    def is_stopping(self) -> bool:
        return self.supervisor.state in STOPPING

    # --- orders -------------------------------------------------------------------------------

    def heartbeat(
        self, configuration_id: ConfigurationId, number: int, *, is_suspended: bool
    ) -> LeaderHeartbeat:
        """The leader's heartbeat; `configuration_id` is of the newest plan known to be chosen."""
        self._reported = body = self.orders
        generation, voter_revision = configuration_id
        if body.generation != generation and not body.ended:
            body = LeaderHeartbeat(generation=generation)
        return msgspec.structs.replace(
            body,
            voter_revision=voter_revision,
            number=number,
            is_suspended=is_suspended,
            incidents=self.incidents.count,
        )

    def has_new_orders(self) -> bool:
        return self._reported is not self.orders

    def order_all(self, commands: Sequence[SupervisorCommand]) -> list[StartGeneration | EndRun]:
        """Turns commands for all nodes into orders; returns those that the leader executes."""
        left: list[StartGeneration | EndRun] = []
        for index, command in enumerate(commands):
            match command:
                case KillWorkers():
                    follows = commands[index + 1 :]
                    if not any(isinstance(one, StartGeneration | EndRun) for one in follows):
                        self._order(killed=True, reason=command.reason)
                case RequestFinalSnapshot():
                    self.stop_at_boundary(command.reason)
                case SignalWorkers():
                    count = self.orders.signal_count + 1
                    self._order(signal=command.signal, signal_count=count, reason=command.reason)
                case ExcludeNode():
                    pass  # `_ask` has excluded it
                case StartGeneration() | EndRun():
                    left.append(command)
                case _:
                    assert_never(command)
        return left

    def stop_at_boundary(self, reason: str) -> int:
        """Orders all ranks to take a snapshot at one boundary and wait there; returns its step.

        If a boundary is already ordered, it stays: ranks that wait there would wait forever for a
        later one.
        """
        boundary = self.orders.stop_after_step
        if boundary < 0:
            boundary = self.reports.step + self._ahead(1)
        self._order(stop_after_step=boundary, reason=reason)
        return boundary

    def check_interval(self) -> None:
        """Orders the longest interval that any rank requests, from a step ahead of all ranks."""
        requested, step = self.reports.requested_every(), self.reports.step
        is_settled = step > self.orders.every_from_step
        if requested and is_settled and requested != self.orders.every:
            self._order(every=requested, every_from_step=step + self._ahead(EVERY_AHEAD_STEPS))

    def end(self, command: EndRun, *, now_s: float) -> None:
        is_done = command.exit_code == ExitCode.DONE
        self.incidents.ended(command.reason, self.reports.progress, is_done=is_done, now_s=now_s)
        texts = {"reason": command.reason, "advice": command.advice, "cause": command.cause}
        self._order(ended=True, exit_code=int(command.exit_code), **texts)

    def stopped(self) -> EndRun:
        return EndRun(128 + self.stop_signal, "stopped while no generation was running")

    # --- failures -----------------------------------------------------------------------------

    def _watch(self, now_s: float) -> None:
        has_failed = any(one.kind is not ExitKind.FINISHED for one in self._exits.values())
        if self._plan is None or has_failed or self.supervisor.state is not SupervisorState.RUNNING:
            return
        self.watching.can_replace = can_replace = self._can_replace(self._plan)
        try:
            found = self.watching.poll(self._plan, now_s=now_s)
        except Exception as error:  # noqa: BLE001 - a bug in the monitor must not end the run
            self.watching.went_wrong(error)
            return
        node_id, self.watching.unwanted = self.watching.unwanted, ""
        if node_id and can_replace:
            self.failures.bar(node_id, "it was replaced after a hang", now_s=now_s)
            self.incidents.acted("evict", f"node {node_id} is replaced")
        self._take_exits(found, now_s)

    def _is_examined(self) -> bool:
        current = self.reports.current
        is_whole = self._plan is not None and len(current) == len(self._plan.members)
        return self.orders.examine and is_whole and all(heartbeat.views for heartbeat in current)

    def _decided_on(self, now_s: float) -> tuple[WorkerExit, ...]:
        waiting, self._waiting = tuple(self._waiting), []
        if self._plan is None or self.supervisor.state is not SupervisorState.RUNNING:
            return waiting
        ended = list(self._exits.values())
        try:
            exits = self.watching.with_hidden_cause(waiting, ended, self._plan, now_s=now_s)
            self.watching.failed(exits, self._plan, now_s=now_s)
        except Exception as error:  # noqa: BLE001 - as above
            self.watching.went_wrong(error)
            return waiting
        return exits

    def probes(self, *, now_s: float) -> list[Send]:
        is_running = self._plan is not None and self.supervisor.state is SupervisorState.RUNNING
        return self.watching.probes(self._plan, now_s=now_s) if self._plan and is_running else []

    # --- details ------------------------------------------------------------------------------

    def _can_replace(self, plan: GenerationPlan) -> bool:
        return self.num_spares > 0 or len(plan.members) > self._settings.cluster_size.min_nodes

    def _placement(self, now_s: float) -> Placement:
        assert self._plan is not None
        return Placement(
            node_of=self._plan.node_of,
            can_replace=self._can_replace(self._plan),
            is_protected=self.are_movable,
            num_excluded=len(self.failures.barred_ages_s(now_s=now_s)),
            faults=dict(self.reports.faults),
        )

    def _take_exits(self, exits: Sequence[WorkerExit], now_s: float) -> None:
        new = [one for one in exits if one.rank not in self._exits]
        if any(one.kind is not ExitKind.FINISHED for one in new):
            self.incidents.sign(now_s)
        if new and not self._waiting:
            # On one node all exits are seen together, except those by a broken connection.
            is_alone = self._plan is not None and len(self._plan.members) == 1
            self._waits_until_s = now_s + (0.0 if is_alone else CAUSE_WAIT_S)
        if not self.orders.examine and any(may_be_a_consequence(one) for one in new):
            self._waits_until_s = now_s + EXAMINE_WAIT_S
            self._order(examine=True)
        for one in new:
            self._exits[one.rank] = one
            self._waiting.append(one)

    def _take_restore_failure(self, node_id: str, heartbeat: Heartbeat, now_s: float) -> None:
        """Records a failed restore in place of the exit of a rank that ended because of it."""
        node = self.reports.member(node_id)
        assert node is not None
        waiting = {one.rank for one in self._waiting}
        ranks = [Rank(rank) for rank in node.ranks]
        rank = next((one for one in ranks if one not in self._exits or one in waiting), None)
        if rank is None:
            return  # the supervisor has decided about all of them
        self._waiting = [one for one in self._waiting if one.rank != rank]
        self._exits.pop(rank, None)
        problem, is_link = heartbeat.problem, heartbeat.problem_is_link
        self._take_exits([restore_failed(rank, node_id, problem, is_link=is_link)], now_s)

    def _commit(self, heartbeat: Heartbeat) -> None:
        ready, committed = self.reports.ready_with(heartbeat), self.orders.committed
        known = self.reports.committed
        if known is not None and known[0] == heartbeat.generation:
            # It was ordered by the last leader, and not every node may have received it.
            ready = known if ready is None else max(ready, known)
        if ready is not None and (committed is None or ready > committed):
            take_from = self._alignment.after_commit(self.orders.take_from, self.reports.step)
            self._order(committed=ready, take_from=take_from)
        skipped = max(self.reports.abandoned_step, self.reports.missed_step(heartbeat))
        if skipped > self.orders.abandoned_step:
            take_from, step = self.orders.take_from, self.reports.step
            take_from = self._alignment.after_skip(take_from, skipped, step)
            self._order(abandoned_step=skipped, take_from=take_from)

    def _note_levels(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Announce what is protected and persisted; order a checkpoint that a rank waits for."""
        if levels := self.reports.new_levels(heartbeat, self.orders):
            self._order(**levels)
        committed = self.orders.committed
        is_idle = self.reports.take_checkpoint(self.orders, since_s=now_s - self._checkpoint_s)
        newest = committed[1] if committed is not None else -1
        if is_idle and self._persist_step < heartbeat.persist_step <= newest:
            self._persist_step = newest
            self.name_checkpoint(now_s=now_s)

    def name_checkpoint(self, *, now_s: float) -> None:
        """Orders the newest committed version to be written, if a checkpoint directory exists."""
        committed = self.orders.committed
        if self._settings.orders_checkpoints and committed not in (None, self.orders.checkpoint):
            self._checkpoint_s = now_s
            self._order(checkpoint=committed)

    def _ahead(self, steps: int) -> int:
        """`steps` plus the steps made before every node has received an order."""
        is_alone = self._plan is None or len(self._plan.members) == 1
        return steps if is_alone else steps + self._rate.steps_in(self._settings.same_boundary_s)

    def _note_rate(self, now_s: float) -> None:
        if self._rate.note(self.reports.step, now_s=now_s):
            self.check_interval()
            self.reports.note_protection(self.orders.committed)

    def _order(self, **changes: object) -> None:
        self.orders = msgspec.structs.replace(self.orders, **changes)

    def _ask(self, event: Event, now_s: float) -> list[SupervisorCommand]:
        found = self.supervisor.handle(event, now_s=now_s)
        for command in found:
            if isinstance(command, KillWorkers):
                self.incidents.acted("kill", command.reason)
            elif isinstance(command, StartGeneration):
                self.incidents.acted("respawn", command.reason)
            elif isinstance(command, ExcludeNode):
                node_id, is_fault = command.node_id, command.is_fault
                self.failures.bar(node_id, command.reason, is_fault=is_fault, now_s=now_s)
                self.incidents.acted("evict", command.text)
        return found
