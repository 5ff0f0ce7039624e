"""The lead's view of a running generation: what all nodes report, put before the supervisor.

Runs in:  the agent that leads. Pure.
Takes in: heartbeats of the members, lost nodes.
Gives:    the supervisor's commands; the orders that stand in the lead's own heartbeat.
Survives: the lead: `History` goes into each plan, and the next lead begins from it.

Rule 1: what a heartbeat says counts for the generation it names.
Rule 2: ranks that failed by an exception wait a moment for the failure it may have followed from:
        a killed peer, or a node that is only found lost when it does not answer.
Rule 3: a version is committed when every member says that it holds and protects just that one.
"""

import math
from collections.abc import Sequence

import msgspec

from ftrun.events import (
    AllAtBoundary,
    Event,
    GenerationStarted,
    Kind,
    Progress,
    StopAsked,
    Tick,
    WorkerExit,
    WorkersExited,
)
from ftrun.ids import Generation, Rank, Step, version
from ftrun.recovery.commands import (
    AskLastSnapshot,
    EndRun,
    KillWorkers,
    SignalWorkers,
    StartGeneration,
    SupervisorCommand,
)
from ftrun.recovery.settings import ClusterSettings
from ftrun.recovery.supervisor import Policy, State, Supervisor
from ftrun.wire.cluster import Beat, History, LeadBeat, Plan

CAUSE_WAIT_S = 0.15
"""A peer's death and the exceptions it leads to are reported within this of each other."""

EVERY_AHEAD_STEPS = 64
"""A new interval takes effect so many steps ahead, further than ranks drift apart."""

_ENDS_ITSELF = (Kind.EXCEPTION, Kind.EXIT_CODE)
_NODE_LOST_CODE = 76
_SIGTERM = 15
_HOUR_S = 3600.0


class Oversight:
    """One run, as its lead sees it."""

    def __init__(self, policy: Policy, settings: ClusterSettings) -> None:
        self.supervisor = Supervisor(policy, world_size=0)
        self.orders = LeadBeat(generation=-1)
        self.beats: dict[str, Beat] = {}
        self._settings = settings
        self._plan: Plan | None = None
        self._exits: dict[Rank, WorkerExit] = {}
        self._waiting: list[WorkerExit] = []
        self._waits_until_s = 0.0
        self._stops_handled = 0
        self._failures_s: dict[str, list[float]] = {}
        self._problems: set[str] = set()
        self._at_boundary_told = False
        self._rate = 0.0
        self._checkpoint_s = 0.0
        self._rate_from: tuple[float, int] | None = None

    def succeed(self, history: History, *, now_s: float) -> None:
        """Go on from what the last lead knew."""
        self.supervisor.succeed(history, now_s=now_s)
        for node_id, ages_s in history.node_failures.items():
            self._failures_s[node_id] = [now_s - age_s for age_s in ages_s]

    def history(self, *, now_s: float) -> History:
        failures = {
            node_id: [now_s - at_s for at_s in times if now_s - at_s < _HOUR_S]
            for node_id, times in self._failures_s.items()
        }
        kept = {node_id: ages for node_id, ages in failures.items() if ages}
        return msgspec.structs.replace(self.supervisor.history(now_s=now_s), node_failures=kept)

    def set_aside(self, *, now_s: float) -> set[str]:
        """Nodes that were lost too often to be believed again."""
        limit = self._settings.failures_per_hour
        return {
            node_id
            for node_id, times in self._failures_s.items()
            if sum(now_s - at_s < _HOUR_S for at_s in times) >= limit
        }

    # --- a generation's life ------------------------------------------------------------------

    def begin(self, plan: Plan, *, now_s: float) -> list[SupervisorCommand]:
        """This generation has taken effect."""
        self._plan = plan
        self.orders = LeadBeat(generation=plan.generation)
        self._exits.clear()
        self._waiting.clear()
        self._problems.clear()
        self._at_boundary_told = False
        self._rate_from = None
        self._checkpoint_s = now_s
        self.supervisor.world_size = plan.world_size
        restored = version(*plan.restore) if plan.restore is not None else None
        return self._ask(GenerationStarted(Generation(plan.generation), restored), now_s)

    def beat(self, node_id: str, beat: Beat, *, now_s: float) -> list[SupervisorCommand]:
        """Take in how things are on one node."""
        self.beats[node_id] = beat
        plan = self._plan
        found: list[SupervisorCommand] = []
        stops = max(has.stops for has in self.beats.values())
        while self._stops_handled < stops:
            self._stops_handled += 1
            number = beat.stop_signal or _SIGTERM
            # Whether ranks can take a last snapshot is not the word of a spare, which has none.
            attached = self.progress().attached
            found += self._ask(StopAsked(number, f"a signal on {node_id}", attached), now_s)
        if plan is None or beat.generation != plan.generation or plan.member(node_id) is None:
            return found
        self._note_rate(now_s)
        self._commit(plan)
        self._name_checkpoint(now_s)
        self._agree_interval(plan)
        self._note_port(plan, node_id, beat.smp_port)
        self._take_exits(beat.exits, now_s)
        if beat.problem and node_id not in self._problems:
            self._problems.add(node_id)
            self._take_exits([self._restore_failed(plan, node_id, beat.problem)], now_s)
        if all(has.at_boundary for has in self._members()) and not self._at_boundary_told:
            self._at_boundary_told = True
            found += self._ask(AllAtBoundary(), now_s)
        return found + self.passing(now_s=now_s)

    def lost(self, node_id: str, why: str, *, now_s: float) -> list[SupervisorCommand]:
        """A member of the running generation is gone, and its ranks with it."""
        self.beats.pop(node_id, None)
        self._failures_s.setdefault(node_id, []).append(now_s)
        node = self._plan.member(node_id) if self._plan is not None else None
        if node is None:
            return []
        text = f"node {node_id} is lost: {why}"
        self._take_exits(
            [
                WorkerExit(
                    Rank(rank), Kind.NODE_LOST, _NODE_LOST_CODE, text, fingerprint=f"node {node_id}"
                )
                for rank in node.ranks
                if rank not in self._exits
            ],
            now_s,
        )
        return self.passing(now_s=now_s)

    def passing(self, *, now_s: float) -> list[SupervisorCommand]:
        """Decide about what has waited long enough; let the supervisor see the time."""
        found: list[SupervisorCommand] = []
        hasty = all(exit_.kind in _ENDS_ITSELF for exit_ in self._failed())
        if self._waiting and not (hasty and self._failed() and now_s < self._waits_until_s):
            exits, self._waiting = tuple(self._waiting), []
            found += self._ask(WorkersExited(exits, self.progress()), now_s)
        return found + self._ask(Tick(), now_s)

    def progress(self) -> Progress:
        members = self._members()
        step = max((beat.step for beat in members), default=0)
        here = max((beat.steps_here for beat in members), default=0)
        return Progress(Step(step), here, any(beat.attached for beat in members))

    def stands_for(self, commands: list[SupervisorCommand]) -> list[SupervisorCommand]:
        """Put what all nodes are to do into the orders; what is left is the lead's own to do."""
        left: list[SupervisorCommand] = []
        for index, command in enumerate(commands):
            match command:
                case KillWorkers():
                    follows = commands[index + 1 :]
                    if not any(isinstance(one, StartGeneration | EndRun) for one in follows):
                        self._order(killed=True, why=command.why)
                case AskLastSnapshot():
                    self._order(stop_after_step=self._common_boundary(), why=command.why)
                case SignalWorkers():
                    count = self.orders.signal_count + 1
                    self._order(signal=command.signal, signal_count=count, why=command.why)
                case StartGeneration() | EndRun():
                    left.append(command)
        return left

    # --- details ------------------------------------------------------------------------------

    def _members(self) -> list[Beat]:
        plan = self._plan
        if plan is None:
            return []
        found = [self.beats.get(node.node_id) for node in plan.members]
        return [
            beat if beat is not None and beat.generation == plan.generation else Beat(-1)
            for beat in found
        ]

    def _take_exits(self, exits: Sequence[WorkerExit], now_s: float) -> None:
        new = [one for one in exits if one.rank not in self._exits]
        if new and not self._waiting:
            # On one node all are seen together.
            is_alone = self._plan is not None and len(self._plan.members) == 1
            self._waits_until_s = now_s + (0.0 if is_alone else CAUSE_WAIT_S)
        for one in new:
            self._exits[one.rank] = one
            self._waiting.append(one)

    def _failed(self) -> list[WorkerExit]:
        return [one for one in self._waiting if one.kind is not Kind.FINISHED]

    def _restore_failed(self, plan: Plan, node_id: str, why: str) -> WorkerExit:
        node = plan.member(node_id)
        assert node is not None
        text = f"node {node_id} could not get its state back: {why}"
        first = next((Rank(r) for r in node.ranks if r not in self._exits), Rank(node.first_rank))
        return WorkerExit(first, Kind.RESTORE_FAILED, 77, text, fingerprint=f"restore {node_id}")

    def _commit(self, plan: Plan) -> None:
        ready = {beat.ready for beat in self._members()}
        newest = next(iter(ready)) if len(ready) == 1 else None
        if newest is not None and newest != self.orders.committed:
            self._order(committed=newest)
        abandoned = max((beat.abandoned_step for beat in self._members()), default=-1)
        if abandoned > self.orders.abandoned_step:
            self._order(abandoned_step=abandoned)

    def _name_checkpoint(self, now_s: float) -> None:
        """Now and then the newest committed version goes to disk, on all nodes the same."""
        every_s, committed = self._settings.checkpoint_every_s, self.orders.committed
        is_due = every_s > 0 and now_s - self._checkpoint_s >= every_s
        if is_due and committed is not None and committed != self.orders.checkpoint:
            self._checkpoint_s = now_s
            self._order(checkpoint=committed)

    def _note_port(self, plan: Plan, node_id: str, port: int) -> None:
        known = {**plan.smp_ports, **self.orders.moved}
        if port and port != known.get(node_id):
            self._order(moved={**self.orders.moved, node_id: port})

    def _agree_interval(self, plan: Plan) -> None:
        """The longest interval that any rank wishes for, named ahead of time."""
        wished = max((beat.wished_every for beat in self._members()), default=0)
        step = self.progress().step
        is_settled = step > self.orders.every_from_step
        if wished and is_settled and wished != self.orders.every:
            self._order(every=wished, every_from_step=step + self._ahead(EVERY_AHEAD_STEPS))

    def _common_boundary(self) -> int:
        return self.progress().step + self._ahead(1)

    def _ahead(self, steps: int) -> int:
        """So many steps, and those that are made before every node has heard of it."""
        if self._plan is None or len(self._plan.members) == 1:
            return steps
        return steps + math.ceil(self._rate * self._settings.same_boundary_s)

    def _note_rate(self, now_s: float) -> None:
        step = self.progress().step
        if self._rate_from is None:
            self._rate_from = (now_s, step)
        since_s, first = self._rate_from
        if now_s - since_s >= self._settings.heartbeat_s:
            self._rate = max(0.0, (step - first) / (now_s - since_s))
            self._rate_from = (now_s, step)

    def _order(self, **changes: object) -> None:
        self.orders = msgspec.structs.replace(self.orders, **changes)

    def _ask(self, event: Event, now_s: float) -> list[SupervisorCommand]:
        return self.supervisor.handle(event, now_s=now_s)

    @property
    def is_stopping(self) -> bool:
        return self.supervisor.state in (State.LAST_SNAPSHOT, State.SIGNALLED, State.KILLED)

    def end(self, command: EndRun) -> None:
        """From now on the lead's heartbeat says that it is over."""
        self._order(
            ended=True,
            exit_code=int(command.exit_code),
            why=command.why,
            advice=command.advice,
            cause=command.cause,
        )
