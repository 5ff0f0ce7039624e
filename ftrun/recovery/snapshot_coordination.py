"""What the members report about steps and snapshots; the next snapshot, and the next checkpoint.

Runs in:  the agent that leads. Pure.
Takes in: heartbeats.
Gives:    the furthest step, the version all are ready with, whether all wait at a boundary; a step
          that no rank has reached yet, so that all ranks take the same snapshot; the version that
          every node writes to disk.

The cost of one heartbeat does not depend on the number of nodes, because sums are updated in place.
Only rare queries, such as the longest requested interval, go through all nodes.

A commit or an abandoned step allows the ranks to take the next snapshot. The nodes receive it one
after the other, and ranks may make a step in between. The leader therefore names the step together
with it. How far ahead that must be depends on the network and on the steps: the distance is
learned.

Rule 1: the step only increases. Ranks that receive it too late skip it and report that. The others
        then discard their snapshot, and all start again further ahead.
Rule 2: the distance grows by half with each step that was named and skipped. A report may take
        longer than hundreds of short steps, and does not cover later steps.
Rule 3: nothing new is committed while a member misses heartbeats. The commit frees the version
        before it. If two nodes of one group are lost at once, only that version may have survived.
Rule 4: a checkpoint that is due by time requests a snapshot, and each node writes the first capture
        from the requested step on. If that is abandoned, a later step is requested. If nothing from
        it is committed in time, the newest committed version is ordered instead.
Rule 5: a checkpoint that is due by steps is a committed version. It is ordered only if each member
        has received all earlier orders, and writes fewer than `MAX_WRITES` checkpoints. Otherwise
        it is skipped, because a part without the others is of no use.
"""

import math
from collections import Counter

from ftrun.config.profile import CheckpointConfig
from ftrun.events import Progress
from ftrun.ids import Step
from ftrun.wire.cluster.generation import GenerationPlan, PlanMember, VersionPair
from ftrun.wire.cluster.membership import Heartbeat, LeaderHeartbeat


class MemberReports:
    """The newest heartbeat of every node, and sums over those of the running generation."""

    def __init__(self) -> None:
        self.heartbeats: dict[str, Heartbeat] = {}
        """By node id, of any generation."""
        self.wrong_sums: dict[str, str] = {}
        """Nodes that computed wrong sums in a collective check, in words, by node id."""
        self._reported_faults: dict[str, str] = {}
        self.step = 0
        """The largest step boundary that any rank has passed."""
        self.steps_here = 0
        self.attached = False
        self.abandoned_step = -1
        self.sealed_step = -1
        """The newest step that any rank has sealed."""
        self.committed: VersionPair | None = None
        """The newest version that any node reports as committed."""
        self.has_unresponsive_member = False
        """A member misses heartbeats: rule 3."""
        self._protected: VersionPair | None = None
        """The newest committed version that was seen protected against the loss of any member."""
        self._generation = -1
        self._members: dict[str, PlanMember] = {}
        self._current: set[str] = set()
        self._ready: Counter[VersionPair] = Counter()
        self._num_at_boundary = 0
        self._num_safe = 0
        """Members whose version survives the loss of a node of their group."""

    def begin(self, plan: GenerationPlan) -> None:
        self._generation = plan.generation
        self._members = {node.node_id: node for node in plan.members}
        self._current.clear()
        self._ready.clear()
        self.step = self.steps_here = self._num_at_boundary = self._num_safe = 0
        self.attached = False
        self.abandoned_step = self.sealed_step = -1
        self.committed = None
        for node_id, heartbeat in self.heartbeats.items():
            self._count(node_id, heartbeat)

    def member(self, node_id: str) -> PlanMember | None:
        return self._members.get(node_id)

    def take(self, node_id: str, heartbeat: Heartbeat) -> bool:
        """Records a heartbeat; returns whether it is of a member and the running generation."""
        before = self.heartbeats.get(node_id)
        if before is not None and node_id in self._current:
            self._current.discard(node_id)
            self._num_at_boundary -= before.at_boundary
            self._num_safe -= before.survives > 0
            if (ready := _ready(before)) is not None:
                self._ready[ready] -= 1
        self.heartbeats[node_id] = heartbeat
        if heartbeat.fault:
            self._reported_faults[node_id] = heartbeat.fault
        else:
            self._reported_faults.pop(node_id, None)
        return self._count(node_id, heartbeat)

    def forget(self, node_id: str) -> None:
        if node_id in self.heartbeats:
            self.take(node_id, Heartbeat(generation=-1))
            del self.heartbeats[node_id]

    def _count(self, node_id: str, heartbeat: Heartbeat) -> bool:
        if heartbeat.generation != self._generation or node_id not in self._members:
            return False
        self._current.add(node_id)
        self._num_at_boundary += heartbeat.at_boundary
        self._num_safe += heartbeat.survives > 0
        if (ready := _ready(heartbeat)) is not None:
            self._ready[ready] += 1
        self.step = max(self.step, heartbeat.step)
        self.steps_here = max(self.steps_here, heartbeat.steps_here)
        self.attached |= heartbeat.attached
        self.abandoned_step = max(self.abandoned_step, heartbeat.abandoned_step)
        if heartbeat.sealed is not None:
            self.sealed_step = max(self.sealed_step, heartbeat.sealed[1])
        if heartbeat.committed is not None:
            self.committed = max(self.committed or heartbeat.committed, heartbeat.committed)
        return True

    @property
    def faults(self) -> dict[str, str]:
        """Hardware faults that nodes report, or that others have found, in words, by node id."""
        return {**self.wrong_sums, **self._reported_faults}

    @property
    def current(self) -> list[Heartbeat]:
        return [self.heartbeats[node_id] for node_id in sorted(self._current)]

    # --- over all members ---------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        return Progress(Step(self.step), self.steps_here, self.attached)

    @property
    def all_run(self) -> bool:
        return len(self._current) == len(self._members) > 0

    @property
    def all_at_boundary(self) -> bool:
        return self._num_at_boundary == len(self._members) > 0

    def ready_with(self, heartbeat: Heartbeat) -> VersionPair | None:
        """The version of this heartbeat, if every member is ready with it."""
        ready = _ready(heartbeat)
        if ready is None or self.has_unresponsive_member:
            return None
        return ready if self._ready[ready] == len(self._members) else None

    def missed_step(self, heartbeat: Heartbeat) -> int:
        """The step up to which nothing can be committed any more, by this node's seals; or -1.

        A rank here holds an uncommitted version, and another rank has sealed a later one. That rank
        has passed the step without a snapshot, because it received a new interval late: a rank
        holds one version beyond the committed one. Its node does not report the skipped step.
        """
        if heartbeat.sealed is None or heartbeat.sealed[0] >= self.sealed_step:
            return -1
        pending = (heartbeat.generation, heartbeat.sealed[0])
        is_committed = self.committed is not None and pending <= self.committed
        return -1 if is_committed else self.sealed_step - 1

    def are_protected(self) -> bool:
        """Whether any one member can be lost without losing the version it is ready with."""
        return self.all_run and self._num_safe == len(self._members)

    def new_levels(self, heartbeat: Heartbeat, orders: LeaderHeartbeat) -> dict[str, VersionPair]:
        """Newer versions to announce as `persisted` and `protected` after this heartbeat."""
        found = {}
        persisted, committed = heartbeat.persisted, orders.committed
        if persisted is not None and (orders.persisted is None or persisted > orders.persisted):
            found["persisted"] = persisted
        is_new = committed is not None and committed != orders.protected
        if committed and is_new and self.ready_with(heartbeat) == committed:
            found |= {"protected": committed} if self.are_protected() else {}
        return found

    def note_protection(self, committed: VersionPair | None) -> None:
        if self.are_protected():
            self._protected = committed

    def are_movable(self, newest: VersionPair | None) -> bool:
        """Whether other nodes can restore this version without any one of its members.

        Before a new generation protects what it has restored, the last protection counts. Without a
        version there is nothing to lose.
        """
        return newest in (None, self._protected) or self.are_protected()

    def requested_every(self) -> int:
        """In steps; 0: no rank requests an interval."""
        return max((heartbeat.requested_every for heartbeat in self.current), default=0)


def _ready(heartbeat: Heartbeat) -> VersionPair | None:
    """The version a node is ready with; None if its state was found incomplete since."""
    return None if heartbeat.problem else heartbeat.ready


_NEARER_AFTER = 4
"""Commits without a skipped step after which the distance shrinks."""


class StepRate:
    """Steps per second of the running generation, measured once in `every_s`."""

    def __init__(self, every_s: float) -> None:
        self.per_s = 0.0
        self._every_s = every_s
        self._from: tuple[float, int] | None = None

    def begin(self) -> None:
        self._from = None

    def steps_in(self, seconds: float) -> int:
        return math.ceil(self.per_s * seconds)

    def note(self, step: int, *, now_s: float) -> bool:
        """Records the newest step; returns whether the rate was measured."""
        if self._from is None:
            self._from = (now_s, step)
        since_s, first = self._from
        if now_s - since_s < self._every_s:
            return False
        self.per_s = max(0.0, (step - first) / (now_s - since_s))
        self._from = (now_s, step)
        return True


class SnapshotAlignment:
    """How many steps ahead the next snapshot must be named."""

    def __init__(self) -> None:
        self._ahead = 1
        self._num_good = 0

    def after_commit(self, take_from: int, step: int) -> int:
        """The step from which the next snapshot is taken, after a commit; `take_from` may be -1."""
        self._num_good += 1
        if self._num_good % _NEARER_AFTER == 0:
            self._ahead -= self._ahead // 3
        return max(take_from, step + self._ahead)

    def after_skip(self, take_from: int, skipped: int, step: int) -> int:
        """The step from which the next one is taken, after a rank took none at `skipped`."""
        if skipped < take_from:
            return take_from  # an older step: no rank takes a snapshot before take_from
        self._num_good = 0
        self._ahead = max(self._ahead + 1, self._ahead * 3 // 2, 2 * (step - skipped))
        return max(take_from, max(step, skipped) + self._ahead)


MAX_WRITES = 2
"""Checkpoints that a node writes at the same time. A later one removes all but the newest of the
unfinished ones before it (`ftrun.smp.checkpoint.storage`)."""


class CheckpointSchedule:
    """Which versions are written to disk; `poll` returns changes of the leader's orders."""

    def __init__(self, settings: CheckpointConfig, *, is_on: bool) -> None:
        self._settings = settings
        self._is_on = is_on
        self._written_s = 0.0
        self._give_up_s: float | None = None
        """When the requested snapshot is not awaited any more; None: none is."""
        self._polled: VersionPair | None = None
        self._ordered: list[VersionPair] = []
        """The newest orders of this generation, which a member may not have received."""
        self._persist_step = 0
        """Newest step for which a checkpoint was ordered because a rank waits for it."""

    def begin(self, *, now_s: float) -> None:
        self._written_s, self._give_up_s = now_s, None
        self._polled, self._persist_step = None, 0
        self._ordered.clear()

    def order_committed(self, orders: LeaderHeartbeat, *, now_s: float) -> dict[str, object]:
        """Order the committed version now, if there is a newer one than the last."""
        committed = orders.committed
        if not self._is_on or committed in (None, orders.checkpoint):
            return {}
        assert committed is not None
        self._written_s, self._give_up_s = now_s, None
        self._ordered = [*self._ordered[1 - MAX_WRITES :], committed]
        return {"checkpoint": committed}

    def poll(
        self,
        orders: LeaderHeartbeat,
        reports: MemberReports,
        ahead: int,
        awaited: int,
        *,
        now_s: float,
    ) -> dict[str, object]:
        """Changes of the orders.

        Args:
            ahead: steps that may be made before every rank has received an order.
            awaited: a rank waits for a checkpoint of this step or a later one; 0: none does.
        """
        settings = self._settings
        if not self._is_on:
            return {}
        if self._take_awaited(orders, reports, awaited):
            return self.order_committed(orders, now_s=now_s)
        if settings.every_steps:
            return self._poll_steps(orders, reports, now_s=now_s)
        if self._give_up_s is not None:
            return self._poll_request(orders, reports, ahead=ahead, now_s=now_s)
        if now_s - self._written_s < settings.every_s:
            return {}
        if not reports.attached or not settings.live_capture_timeout_s:
            return self.order_committed(orders, now_s=now_s)
        two_steps_s = 2 * max((one.p99_s for one in reports.current), default=0.0)
        self._written_s = now_s
        self._give_up_s = now_s + two_steps_s + settings.live_capture_timeout_s
        return {"capture_from": max(orders.take_from, reports.step + ahead)}

    def _take_awaited(self, orders: LeaderHeartbeat, reports: MemberReports, awaited: int) -> bool:
        """Whether the committed version must be written now; true once for each awaited step."""
        committed, persisted = orders.committed, orders.persisted
        if committed is None or not self._persist_step < awaited <= committed[1]:
            return False
        is_written = persisted is not None and persisted >= (orders.generation, awaited)
        if is_written or not self._has_room(reports):
            return False
        self._persist_step = committed[1]
        return True

    def _poll_request(
        self, orders: LeaderHeartbeat, reports: MemberReports, *, ahead: int, now_s: float
    ) -> dict[str, object]:
        assert self._give_up_s is not None
        committed = orders.committed
        if committed is not None and committed >= (orders.generation, orders.capture_from):
            self._give_up_s = None
        elif now_s >= self._give_up_s:
            self._give_up_s = None
            return self.order_committed(orders, now_s=now_s)
        elif orders.abandoned_step >= orders.capture_from:
            return {"capture_from": max(orders.take_from, reports.step + ahead)}
        return {}

    def _poll_steps(
        self, orders: LeaderHeartbeat, reports: MemberReports, *, now_s: float
    ) -> dict[str, object]:
        committed = orders.committed
        if committed is None or committed == self._polled:
            return {}
        self._polled = committed
        if committed[1] % self._settings.every_steps or not self._has_room(reports):
            return {}
        return self.order_committed(orders, now_s=now_s)

    def _has_room(self, reports: MemberReports) -> bool:
        """Whether every member may begin another write."""
        return reports.all_run and all(
            one.num_writes + self._num_unknown(one.checkpoint) < MAX_WRITES
            for one in reports.current
        )

    def _num_unknown(self, newest: VersionPair | None) -> int:
        return sum(newest is None or one > newest for one in self._ordered)
