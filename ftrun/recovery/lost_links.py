"""Finds pairs of nodes that cannot reach each other, from the reports of both ends.

Rule 1: a link counts as lost only if both of its ends report it. A frozen or dead SMP reports
        nothing, so its links do not count.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ftrun.config.profile import HangConfig
from ftrun.monitor.connections import others_carry_data, stalled_connections
from ftrun.monitor.verdicts import Confidence, Verdict, VerdictKind, ranks_text
from ftrun.recovery.commands import Send
from ftrun.recovery.snapshot_coordination import MemberReports
from ftrun.wire.cluster.generation import FailureHistory, GenerationPlan
from ftrun.wire.cluster.membership import Heartbeat
from ftrun.wire.cluster.messages import ProbePathResult

_FIRST_STEP_FACTOR = 3.0
_PAIR = 2
_KEPT = 16
"""Earlier hangs that are remembered."""

Pair = tuple[str, str]


class PairFinder(Protocol):
    """Finds pairs of members that cannot connect to each other while ranks make no steps."""

    cut: frozenset[Pair]

    def begin(self) -> None:
        """Starts again: another generation runs, or ranks make steps."""

    def poll(self, plan: GenerationPlan, *, now_s: float) -> list[Send]:
        """Requests to send; called while ranks make no steps."""
        ...

    def tried(self, sender: str, body: ProbePathResult, *, now_s: float) -> list[Send]:
        """Records the result of one member's attempt to connect to another."""
        ...


@dataclass(frozen=True, slots=True)
class LostLinks:
    """The lost links of one observation; at least one pair, in the order of the plan's members."""

    pairs: tuple[Pair, ...]

    @property
    def words(self) -> str:
        if len(self.pairs) == 1:
            one, other = self.pairs[0]
            return f"the link between nodes {one} and {other} carries no data"
        links = ", ".join(f"{one} and {other}" for one, other in self.pairs)
        return f"the links between nodes {links} carry no data"


def lost_links(
    heartbeats: Mapping[str, Heartbeat], plan: GenerationPlan, cut: Collection[Pair] = ()
) -> LostLinks | None:
    """The links between members that both ends report as lost, and the pairs in `cut`."""
    members = [node.node_id for node in plan.members]
    unreachable = {
        one: heartbeats[one].unreachable
        for one in members
        if one in heartbeats and heartbeats[one].generation == plan.generation
    }
    pairs = tuple(
        (one, other)
        for at, one in enumerate(members)
        for other in members[at + 1 :]
        if (one, other) in cut
        or (other in unreachable.get(one, ()) and one in unreachable.get(other, ()))
    )
    return LostLinks(pairs) if pairs else None


def with_lost_links(verdict: Verdict | None, lost: LostLinks, ranks: Sequence[int]) -> Verdict:
    """The verdict on the hang of `ranks`, with the lost link as its cause if it names no other."""
    if verdict is not None and not _is_explained(verdict, lost):
        return verdict
    seen = () if verdict is None else (verdict.text, *verdict.evidence)
    verb = "waits" if len(ranks) == 1 else "wait"
    return _verdict(lost, f"{lost.words}, and {ranks_text(ranks)} {verb} for it", seen, ranks)


def _is_explained(verdict: Verdict, lost: LostLinks) -> bool:
    if verdict.kind is VerdictKind.HANG_IN_COMMUNICATION:
        return True
    is_idle = verdict.kind is VerdictKind.HANG_IN_COMPUTATION and not verdict.counter_evidence
    return is_idle and set(verdict.nodes) <= {node for pair in lost.pairs for node in pair}


class HungLinks:
    """Hangs in communication across generations, as one leader sees them."""

    def __init__(self, settings: HangConfig) -> None:
        self._settings = settings
        self.nodes: tuple[str, ...] = ()
        """Nodes named by the last hang in communication, until a step is made."""
        self.longest_s = 0.0
        """Longest time of a generation up to its first step, in seconds; 0: unknown."""
        self.pairs: tuple[tuple[str, ...], ...] = ()
        """Nodes of the earlier hangs of this run whose link was named, the newest last."""
        self._started_s: float | None = None
        self._lost_s: float | None = None
        self._has_stepped = False

    def succeed(self, history: FailureHistory) -> None:
        self.nodes = tuple(history.hung_nodes)
        self.longest_s = max(self.longest_s, history.longest_start_s)
        self.pairs = tuple(map(tuple, history.hung_pairs))

    def begin(self) -> None:
        self._started_s = self._lost_s = None
        self._has_stepped = False

    def for_s(self, *, now_s: float) -> float:
        if self._started_s is None:
            self._started_s = now_s
        return now_s - self._started_s

    def poll(
        self,
        plan: GenerationPlan,
        reports: MemberReports,
        *,
        cut: Collection[Pair] = (),
        can_replace: bool,
        now_s: float,
    ) -> Verdict | None:
        """The verdict that ends a generation before its first step; None to let it run.

        Before a first step there is no deadline, because the script may compile. There is one if
        both ends of a link report it lost, and after a hang in communication.
        """
        for_s = self.for_s(now_s=now_s)
        if reports.steps_here > 0:
            if not self._has_stepped:
                self.longest_s = max(self.longest_s, for_s)
                self._has_stepped, self.nodes = True, ()
            return None
        if self._settings.action == "report":
            return None
        lost = lost_links(reports.heartbeats, plan, cut)
        if lost is None:
            self._lost_s = None
            limit_s = max(self._settings.kill_after_s, _FIRST_STEP_FACTOR * self.longest_s)
            if not self.nodes:
                return self._of_restart(plan, reports, for_s, limit_s)
            if for_s < limit_s:
                return None
            nodes = ", ".join(self.nodes)
            what = f"the restart after a hang between nodes {nodes} did not help"
            return _no_first_step(what, plan, for_s, None)
        if self._lost_s is None:
            self._lost_s = now_s
        limit_s = self._settings.suspect_after_s if can_replace else self._settings.kill_after_s
        if now_s - self._lost_s < limit_s:
            return None
        return _no_first_step(lost.words, plan, for_s, lost)

    def _of_restart(
        self, plan: GenerationPlan, reports: MemberReports, for_s: float, limit_s: float
    ) -> Verdict | None:
        """No link or node is suspected. Work after the last loop makes no step either."""
        ranks = [rank for heartbeat in reports.current for rank in heartbeat.ranks]
        works = any(one.phase not in ("", "train") or one.state == "finished" for one in ranks)
        limit_s = max(self._settings.phase_timeout_s, limit_s)
        if works or not self.longest_s or for_s < limit_s:
            return None
        what = f"an earlier generation made its first step after {self.longest_s:.0f} s"
        kind = VerdictKind.HANG_IN_COMPUTATION
        found = _no_first_step(what, plan, for_s, None)
        return msgspec.structs.replace(
            found, kind=kind, nodes=(), fingerprint=f"{kind.value} start"
        )

    def node_out(
        self,
        verdict: Verdict,
        plan: GenerationPlan,
        reports: MemberReports,
        cut: Collection[Pair],
    ) -> str:
        """The node to replace for this hang; empty: none.

        If neither a link is lost nor the verdict has proof, or if other connections between the two
        nodes carry data, the same nodes are restarted first. If no step follows, or if one of the
        nodes was in an earlier hang of this run, it is replaced.
        """
        before, self.nodes = self.nodes, verdict.nodes
        earlier = Counter(node for pair in self.pairs for node in pair)
        if 0 < len(verdict.nodes) <= _PAIR:
            self.pairs = (*self.pairs, verdict.nodes)[-_KEPT:]
        lost = lost_links(reports.heartbeats, plan, cut)
        if lost is not None:
            return _node_out(lost.pairs, plan.leader, earlier)
        is_link = verdict.act_immediately and (
            any(earlier[node] for node in verdict.nodes) or not self._others_carry(plan, reports)
        )
        nodes = [
            one for one in (verdict.nodes if is_link else before)
            if plan.member(one) is not None and (is_link or one != plan.leader)
        ]  # fmt: skip
        return _node_out([tuple(nodes)], plan.leader, earlier)

    def _others_carry(self, plan: GenerationPlan, reports: MemberReports) -> bool:
        views = {view.rank: view for heartbeat in reports.current for view in heartbeat.views}
        limit_s = self._settings.no_activity_s
        return others_carry_data(stalled_connections(views, plan.node_of, limit_s=limit_s), views)


def _no_first_step(
    what: str, plan: GenerationPlan, for_s: float, lost: LostLinks | None
) -> Verdict:
    ranks = tuple(rank for node in plan.members for rank in node.ranks)
    text = f"{what}, and no rank has made a step in {for_s:.0f} s of generation {plan.generation}"
    if lost is not None:
        return _verdict(lost, text, (), ranks)
    kind = VerdictKind.HANG_IN_COMMUNICATION
    return Verdict(
        kind=kind,
        culprits=(),
        nodes=tuple(node.node_id for node in plan.members),
        victims=ranks,
        text=text,
        confidence=Confidence.POSSIBLE,
        fingerprint=f"{kind.value} no first step",
    )


def _verdict(lost: LostLinks, text: str, seen: Sequence[str], ranks: Sequence[int]) -> Verdict:
    said = [
        f"nodes {one} and {other} both report that they cannot reach each other"
        for one, other in lost.pairs
    ]
    nodes = tuple(dict.fromkeys(node for pair in lost.pairs for node in pair))
    return Verdict(
        kind=VerdictKind.HANG_IN_COMMUNICATION,
        culprits=(),
        nodes=nodes,
        victims=tuple(sorted(ranks)),
        text=text,
        evidence=(*said, *seen),
        confidence=Confidence.CERTAIN,
        act_immediately=True,
        fingerprint=f"{VerdictKind.HANG_IN_COMMUNICATION.value} {' '.join(nodes)}",
    )


def _node_out(pairs: Sequence[tuple[str, ...]], leader: str, earlier: Mapping[str, int]) -> str:
    """The node with the most lost links; of equals that in the most earlier hangs, then not the
    leader's, then the later one. Empty: no pair has a node.
    """  # noqa: D205 - one sentence
    counts = Counter(node for pair in pairs for node in pair)
    order = {node: at for at, node in enumerate(counts)}
    return max(
        counts,
        key=lambda node: (counts[node], earlier.get(node, 0), node != leader, order[node]),
        default="",
    )
