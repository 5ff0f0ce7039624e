"""The history of a run: its last restarts, the nodes that were lost or have drained; exclusions.

A leader hands it to the next one, of bounded size, with ages instead of times.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ftrun.monitor.verdicts import Verdict, VerdictKind
from ftrun.records.membership import NodeJoined, NodeLeft, NodeLost, NodeReadmitted
from ftrun.recovery.commands import JournalEntry
from ftrun.recovery.snapshot_coordination import MemberReports
from ftrun.wire.cluster.generation import (
    DepartedNode,
    Exclusion,
    FailureHistory,
    GenerationPlan,
    NodeCard,
    PastRestart,
    SlowEviction,
    VersionPair,
)

MAX_RESTARTS = 10
MAX_SLOW = 64
MAX_GONE = 20
_MAX_TEXT = 200
_LEFT = "it has drained; the run continues without it"


@dataclass(slots=True)
class Restart:
    """One generation that followed another."""

    generation: int
    cause: str
    at_s: float
    restored: VersionPair | None
    downtime_s: float | None = None
    """Downtime of its incident, up to the next step of every rank; None: not known."""


@dataclass(frozen=True, slots=True)
class Departure:
    """A node that was lost, or that has drained."""

    card: NodeCard
    reason: str
    at_s: float
    has_left: bool
    was_asked: bool
    """It was draining, and may have ended before its ranks had moved."""


class DepartingNode(Protocol):
    """The leader's state of a node that ends."""

    card: NodeCard
    has_left: bool
    """The node has drained: other nodes had taken over its ranks before it ended."""


class Past:
    """The last restarts and unreachable nodes, across all leaders of a run."""

    def __init__(self) -> None:
        self._restarts: dict[int, Restart] = {}
        self._gone: dict[str, Departure] = {}

    @property
    def restarts(self) -> list[Restart]:
        return [one for _, one in sorted(self._restarts.items())]

    @property
    def gone(self) -> list[Departure]:
        return sorted(self._gone.values(), key=lambda one: one.at_s)

    def was_asked_to_drain(self, node_id: str) -> bool:
        return node_id in self._gone and self._gone[node_id].was_asked

    # --- what happens -------------------------------------------------------------------------

    def begins(self, plan: GenerationPlan, *, now_s: float) -> None:
        """Records a generation, also one that an earlier leader began and did not record."""
        if plan.generation > 0 and plan.generation not in self._restarts:
            cause = plan.reason[:_MAX_TEXT]
            self._keep([Restart(plan.generation, cause, now_s, plan.restore)])

    def measured(self, generation: int, downtime_s: float) -> None:
        if generation in self._restarts:
            self._restarts[generation].downtime_s = downtime_s

    def record_loss(
        self, peer: DepartingNode, reason: str, *, was_member: bool, now_s: float
    ) -> JournalEntry:
        """Records the end of an agent: drained if its ranks had moved on request, else lost."""
        node_id = peer.card.node_id
        was_asked = self._is_leaving(peer.card)
        peer.has_left = was_asked and not was_member
        reason = _LEFT if peer.has_left else reason[:_MAX_TEXT]
        self._retain_gone(Departure(peer.card, reason, now_s, peer.has_left, was_asked))
        if peer.has_left:
            text = f"node {node_id} has drained"
            return JournalEntry(NodeLeft(text, node_id), announce=True)
        text = f"node {node_id} is lost: {reason}"
        return JournalEntry(NodeLost(text, node_id, was_member), announce=True)

    def leaves(self, card: NodeCard, *, now_s: float) -> None:
        """Records a draining node. The next plan names it: its leader may not see the node end."""
        if not self._is_leaving(card):
            self._retain_gone(Departure(card, _LEFT, now_s, has_left=True, was_asked=True))

    def returns(self, card: NodeCard) -> JournalEntry:
        """Records that a node has joined."""
        self._gone.pop(card.node_id, None)
        text = f"node {card.node_id} has joined"
        return JournalEntry(NodeJoined(text, card.node_id, card.host))

    # --- from leader to leader ----------------------------------------------------------------

    def succeed(
        self, restarts: Iterable[PastRestart], gone: Iterable[DepartedNode], *, known_s: float
    ) -> None:
        """Adds what the last leader knew at `known_s`; own records have priority."""
        older = [
            Restart(one.generation, one.cause, known_s - one.age_s, one.restored, one.downtime_s)
            for one in restarts
            if one.generation not in self._restarts
        ]
        self._keep(older)
        for one in gone:
            if one.card.node_id not in self._gone:
                at_s, has_left = known_s - one.age_s, one.has_left
                self._retain_gone(
                    Departure(one.card, one.reason, at_s, has_left, was_asked=has_left)
                )

    def past_restarts(self, *, now_s: float) -> list[PastRestart]:
        return [
            PastRestart(one.generation, one.cause, now_s - one.at_s, one.restored, one.downtime_s)
            for one in self.restarts
        ]

    def gone_nodes(self, *, now_s: float) -> list[DepartedNode]:
        return [
            DepartedNode(one.card, one.reason, now_s - one.at_s, one.has_left) for one in self.gone
        ]

    def _is_leaving(self, card: NodeCard) -> bool:
        found = self._gone.get(card.node_id)
        return found is not None and found.was_asked and found.card.incarnation == card.incarnation

    def _retain_gone(self, new: Departure) -> None:
        self._gone[new.card.node_id] = new
        for one in self.gone[:-MAX_GONE]:
            del self._gone[one.card.node_id]

    def _keep(self, new: Iterable[Restart]) -> None:
        self._restarts.update({one.generation: one for one in new})
        for one in self.restarts[:-MAX_RESTARTS]:
            del self._restarts[one.generation]


_HOUR_S = 3600.0


class NodeFailures:
    """The exclusions of nodes: lost too often within an hour, barred, or with a hardware fault."""

    def __init__(self, per_hour: int, reports: MemberReports) -> None:
        self.newest: GenerationPlan | None = None
        """A plan of an earlier leader that may have been chosen: its members may run ranks."""
        self._per_hour = per_hour
        self._reports = reports
        self._lost_s: dict[str, list[float]] = {}
        self._barred: dict[str, tuple[float, Exclusion]] = {}
        """Nodes that were excluded while they were present: when, and why."""
        self._past_lost_s: dict[str, list[float]] = {}
        """Losses that an earlier leader recorded."""
        self._past_barred: dict[str, tuple[float, Exclusion]] = {}
        self._slow_s: dict[tuple[int, str], float] = {}
        """When a node was evicted for the slowness of a rank."""
        self._readmitted_s: dict[str, float] = {}
        """When a node last returned after a hardware fault."""

    def succeed(
        self, history: FailureHistory, newest: GenerationPlan | None = None, *, known_s: float
    ) -> None:
        """Takes over what the last leader knew at `known_s`."""
        self.newest = newest
        lost = history.node_failures.items()
        self._past_lost_s = {one: [known_s - age_s for age_s in ages] for one, ages in lost}
        reasons = history.exclusions
        self._past_barred = {
            one: (known_s - age_s, reasons.get(one, Exclusion("a failure")))
            for one, age_s in history.barred.items()
        }
        slow = {(one.rank, one.node_id): known_s - one.age_s for one in history.slow_evictions}
        self._slow_s = slow | self._slow_s
        returned = {one: known_s - age_s for one, age_s in history.readmitted.items()}
        self._readmitted_s = returned | self._readmitted_s

    def add_to(self, history: FailureHistory, *, now_s: float) -> FailureHistory:
        """The history with what the next leader needs of this."""
        slow = self._slow_s.items()
        returned = {one: now_s - at_s for one, at_s in self._readmitted_s.items()}
        return msgspec.structs.replace(
            history,
            node_failures=self.ages_s(now_s=now_s),
            barred=self.barred_ages_s(now_s=now_s),
            exclusions=self.reasons(now_s=now_s),
            slow_evictions=[SlowEviction(*key, now_s - at_s) for key, at_s in slow],
            readmitted={one: age_s for one, age_s in returned.items() if age_s < _HOUR_S},
        )

    def note(self, node_id: str, *, now_s: float) -> None:
        self._lost_s.setdefault(node_id, []).append(now_s)

    def bar(
        self,
        node_id: str,
        reason: str,
        *,
        is_fault: bool = False,
        is_slow: bool = False,
        now_s: float,
    ) -> None:
        """Excludes a node at once; after an hour and a whole check of itself it may return.

        Args:
            is_slow: or it hung: it runs ranks before that if too few other nodes are left.
        """
        node = self._reports.member(node_id)
        incarnation = node.card.incarnation if node is not None else 0
        why = Exclusion(reason[:_MAX_TEXT], incarnation, is_fault, is_slow)
        self._barred[node_id] = (now_s, why)

    def evict(self, verdict: Verdict, node_id: str, ranks: Iterable[int], *, now_s: float) -> None:
        """Excludes the node of a verdict; `ranks` are those that were slow, if it is no fault."""
        if verdict.kind is VerdictKind.FAILING_NODE:
            self.bar(node_id, verdict.text, is_fault=True, now_s=now_s)
            return
        known = {**self._slow_s, **{(rank, node_id): now_s for rank in ranks}}
        self._slow_s = dict(sorted(known.items(), key=lambda one: one[1])[-MAX_SLOW:])
        self.bar(node_id, verdict.text, is_slow=True, now_s=now_s)

    def num_slow(self, *, now_s: float) -> int:
        """Nodes that were evicted for slowness within the last hour."""
        found = {node for (_, node), at_s in self._slow_s.items() if now_s - at_s < _HOUR_S}
        return len(found)

    def follows(self, node_id: str, ranks: Iterable[int]) -> bool:
        """Whether one of these ranks was slow on another node too: the node is not the cause."""
        return any(rank in {*ranks} and node != node_id for rank, node in self._slow_s)

    def returns(self, card: NodeCard, *, now_s: float) -> list[JournalEntry]:
        """Readmits a node on which ftrun was started again after a hardware fault.

        This happens once an hour, because a fault that returns is not repaired. Losses still count.
        """
        node_id = card.node_id
        _, found = self._all_barred(now_s).get(node_id, (0.0, None))
        is_repaired = found is not None and found.is_fault and card.is_first
        if not is_repaired or found is None or card.incarnation == found.incarnation:
            return []
        if now_s - self._readmitted_s.get(node_id, -_HOUR_S) < _HOUR_S:
            return []
        self._readmitted_s[node_id] = now_s
        self._barred.pop(node_id, None)
        self._past_barred.pop(node_id, None)
        return self._readmitted(node_id, "ftrun was started on it after a hardware fault")

    def readmit(self, node_id: str, reason: str, *, now_s: float) -> list[JournalEntry]:
        """Ends an exclusion; the node may run ranks after a whole check of itself."""
        left_s, _ = self.excluded(now_s=now_s).get(node_id, (None, ""))
        if left_s is None:
            return []
        for known in (self._lost_s, self._past_lost_s, self._barred, self._past_barred):
            known.pop(node_id, None)
        return self._readmitted(node_id, reason)

    def _readmitted(self, node_id: str, reason: str) -> list[JournalEntry]:
        text = f"node {node_id} is readmitted: {reason}. It may run ranks when its check passes"
        return [JournalEntry(NodeReadmitted(text, node_id), announce=True)]

    def excluded(self, *, now_s: float) -> dict[str, tuple[float | None, str]]:
        """Seconds until each excluded node may run ranks again, and the reason.

        None: while the node reports a hardware fault. A member with a fault is not excluded.
        """
        found: dict[str, tuple[float | None, str]] = {}
        for node_id, ages_s in self.ages_s(now_s=now_s).items():
            if len(ages_s) >= self._per_hour:
                # The node returns when its number of failures falls below the limit.
                left_s = _HOUR_S - sorted(ages_s)[self._per_hour - 1]
                noun = "failure" if len(ages_s) == 1 else "failures"
                found[node_id] = (left_s, f"{len(ages_s)} {noun} in an hour")
        for node_id, (at_s, one) in self._all_barred(now_s).items():
            left_s, (known_s, _) = _HOUR_S - (now_s - at_s), found.get(node_id, (0.0, ""))
            if left_s >= (known_s or 0.0):
                found[node_id] = (left_s, one.reason)
        for node_id, fault in self._reports.faults.items():
            may_run = self.newest is not None and self.newest.member(node_id) is not None
            if not may_run and self._reports.member(node_id) is None:
                found[node_id] = (None, f"it reports a hardware fault: {fault}")
        return found

    def ages_s(self, *, now_s: float) -> dict[str, list[float]]:
        """Seconds since each loss of the last hour, by node id."""
        found = {}
        for node_id in sorted({*self._past_lost_s, *self._lost_s}):
            times = self._past_lost_s.get(node_id, []) + self._lost_s.get(node_id, [])
            ages_s = [now_s - at_s for at_s in times if now_s - at_s < _HOUR_S]
            if ages_s:
                found[node_id] = ages_s
        return found

    def lately_lost(self, within_s: float, *, now_s: float) -> set[str]:
        return {one for one, ages in self.ages_s(now_s=now_s).items() if min(ages) < within_s}

    def num_excluded(self, *, now_s: float) -> int:
        """Nodes that were excluded within the last hour, except for slowness or a hang."""
        return sum(not one.is_slow for _, one in self._all_barred(now_s).values())

    def usable(self, *, now_s: float) -> set[str]:
        """Nodes that are excluded only for slowness or a hang."""
        ages_s = self.ages_s(now_s=now_s)
        return {
            node_id
            for node_id, (_, one) in self._all_barred(now_s).items()
            if one.is_slow and len(ages_s.get(node_id, ())) < self._per_hour
        }

    def barred_ages_s(self, *, now_s: float) -> dict[str, float]:
        return {one: now_s - at_s for one, (at_s, _) in self._all_barred(now_s).items()}

    def reasons(self, *, now_s: float) -> dict[str, Exclusion]:
        return {one: found for one, (_, found) in self._all_barred(now_s).items()}

    def _all_barred(self, now_s: float) -> dict[str, tuple[float, Exclusion]]:
        known = {**self._past_barred, **self._barred}
        return {one: found for one, found in known.items() if now_s - found[0] < _HOUR_S}
