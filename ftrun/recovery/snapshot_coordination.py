"""What the members report about steps and snapshots, and the step of the next snapshot.

Runs in:  the agent that leads. Pure.
Takes in: heartbeats.
Gives:    the furthest step, the version all are ready with, whether all wait at a boundary; a step
          that no rank has reached yet, so that all ranks take the same snapshot.

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
"""

import math
from collections import Counter

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

    def take_checkpoint(self, orders: LeaderHeartbeat, *, since_s: float) -> bool:
        """Whether each member takes an order for another checkpoint, because it writes none.

        `since_s`: time since the last order. A part that could not be written ends that checkpoint.
        """
        if orders.checkpoint is None:
            return True
        if orders.persisted is not None and orders.persisted >= orders.checkpoint:
            return True
        is_received = since_s >= _CHECKPOINT_BEGINS_S
        return is_received and not any(one.writes_checkpoint for one in self.current)

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


_CHECKPOINT_BEGINS_S = 10.0
"""Time within which each node reports that it writes the checkpoint that was ordered."""

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
