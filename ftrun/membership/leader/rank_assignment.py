"""Decides which nodes are admitted, and which node runs which ranks.

Rule 1: ranks are stable. A node that stays keeps its position, a node that returns gets its old
        position if that is free, and a spare takes the position of a lost node.
Rule 2: positions close up only if the number of nodes changes; their order stays.
Rule 3: an excluded or unfit node never is a member, even if too few nodes are left, except one
        that was excluded only because a failure repeated on it, it was slow, or it hung. An
        excluded node may still vote.
Rule 4: a node whose agent makes no checks is admitted.
Rule 5: after its exclusion, a node must have completed a whole check since it was last seen
        excluded. A restarted agent has made one, or is asked for it.

Survives: nothing. The next leader learns of an unfit node from its promise or next heartbeat, and
          of an excluded node from the plan's history.
Source:   TRANSOM (arXiv 2310.10046): a node that fails its self-test is replaced by a spare, and
          an evicted one is not chosen again.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec

from ftrun.config.cluster import ClusterSize, MembershipSettings
from ftrun.membership.ballots import Ballot
from ftrun.membership.leader.failure_detector import FailureDetector, PeerState
from ftrun.membership.leader.ring_orders import RingOrders
from ftrun.monitor.node_fitness import far_below
from ftrun.records.membership import NodeBelowMedian, NodeFit, NodeUnfit
from ftrun.recovery.commands import JournalEntry
from ftrun.recovery.snapshot_coordination import MemberReports
from ftrun.wire.cluster.generation import GenerationPlan, NetworkPlan, NodeCard
from ftrun.wire.cluster.membership import LeaderHeartbeat


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """Members in the order of their ranks, and the spares."""

    members: tuple[NodeCard, ...]
    spares: tuple[NodeCard, ...]
    paths: NetworkPlan | None = None
    """How the paths between them are used; None: as the user's libraries choose."""

    @property
    def first_ranks(self) -> list[int]:
        found, rank = [], 0
        for card in self.members:
            found.append(rank)
            rank += card.num_ranks
        return found

    def along(self, paths: NetworkPlan | None) -> "RankAssignment":
        if paths is None:
            return self
        by_id = {card.node_id: card for card in self.members}
        return replace(self, members=tuple(by_id[one] for one in paths.order), paths=paths)


def assign(
    here: Sequence[NodeCard],
    previous: GenerationPlan | None,
    cluster_size: ClusterSize,
    excluded: Collection[str] = (),
    unfit: Mapping[str, str] = MappingProxyType({}),
) -> RankAssignment | str:
    """Gives each of these nodes ranks, or makes it a spare, as excluded and unfit nodes are.

    If too few nodes are left, returns that in words.
    """
    usable = [card for card in here if card.node_id not in excluded and card.node_id not in unfit]
    num_members = min(cluster_size.max_nodes, len(usable))
    if num_members < cluster_size.min_nodes:
        ids = sorted(card.node_id for card in here)
        text = f"{len(usable)} of at least {cluster_size.min_nodes} nodes are present"
        if away := [one for one in ids if one in excluded]:
            text += f"; excluded (reasons: ftrun status): {', '.join(away)}"
        if reasons := [f"{one} ({unfit[one]})" for one in ids if one in unfit]:
            text += f"; unfit: {'; '.join(reasons)}"
        return text
    order = _in_order(usable, previous)
    if previous is not None and num_members == len(previous.members):
        members = _same_places(order, previous)
    else:
        members = order[:num_members]
    chosen = {card.node_id for card in members}
    spares = [card for card in _in_order(here, previous) if card.node_id not in chosen]
    return RankAssignment(tuple(members), tuple(spares))


def first_order(cards: Sequence[NodeCard]) -> list[NodeCard]:
    """The order of a first generation: the user's node ranks, the endpoint's node, then by name.

    Numbers in names are compared as numbers.
    """
    return sorted(
        cards,
        key=lambda card: (
            card.node_rank if card.node_rank >= 0 else 1 << 30,
            not card.endpoint,
            _natural(card.node_id),
        ),
    )


def _in_order(cards: Sequence[NodeCard], previous: GenerationPlan | None) -> list[NodeCard]:
    """Members of the last generation by position, then its spares, then new nodes."""
    if previous is None:
        return first_order(cards)
    at = {card.node_id: index for index, card in enumerate(previous.voters)}
    known = [card for card in cards if card.node_id in at]
    new = [card for card in cards if card.node_id not in at]
    return sorted(known, key=lambda card: at[card.node_id]) + first_order(new)


def _same_places(order: Sequence[NodeCard], previous: GenerationPlan) -> list[NodeCard]:
    """As many members as before: earlier members stay in their positions, others fill the gaps."""
    by_id = {card.node_id: card for card in order}
    member_ids = [node.node_id for node in previous.members]
    fillers = iter([card for card in order if card.node_id not in member_ids])
    return [by_id.get(node_id) or next(fillers) for node_id in member_ids]


def _natural(text: str) -> tuple[tuple[int, str], ...]:
    parts = re.split(r"(\d+)", text)
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)


_LEAVES = "it is draining"
_FIGURE = re.compile(r"[\d.,]*\d")
_Check = tuple[int, int]
"""Incarnation of an agent, and the number of one of its checks."""


class Admission:
    """One leader's view of the fitness of nodes."""

    def __init__(
        self, settings: MembershipSettings, peers: FailureDetector, reports: MemberReports
    ) -> None:
        self.rings = RingOrders(settings, peers, reports)
        self._settings = settings
        self._peers = peers
        self._excluded_at: dict[str, _Check] = {}
        """The newest check of each excluded node, when it was last seen excluded."""
        self._asked: dict[str, int] = {}
        """The number of the awaited check, by node id."""
        self.reported: dict[str, str] = {}
        """Reasons why nodes may not run ranks, with the newest measurements; replaced whole."""
        self._slow_reported: dict[str, str] = {}

    def unfit(self, excluded: Collection[str]) -> dict[str, str]:
        """Reasons why nodes that are not excluded must not run ranks, by node id."""
        found: dict[str, str] = {}
        for peer in self._peers:
            node_id, fitness = peer.card.node_id, peer.fitness
            if node_id in excluded:
                self._excluded_at[node_id] = (peer.card.incarnation, _number(peer))
            elif peer.is_leaving and not peer.lost:
                found[node_id] = _LEAVES
            elif fitness is None or peer.lost:
                continue
            elif not fitness.is_fit:
                found[node_id] = "; ".join(fitness.problems)
            elif self._awaits_check(peer):
                found[node_id] = "it was excluded, and repeats its check"
            else:
                self._excluded_at.pop(node_id, None)
        return found

    def barred(self, excluded: Collection[str]) -> set[str]:
        return {*excluded, *self.unfit(excluded)}

    def assign(
        self,
        here: Sequence[NodeCard],
        previous: GenerationPlan | None,
        excluded: Collection[str],
        suspects: Collection[str] = (),
    ) -> RankAssignment | str:
        """Assigns the ranks.

        Args:
            suspects: excluded nodes that run ranks if too few other nodes are left.
        """
        size, unfit = self._settings.cluster_size, self.unfit(excluded)
        found = assign(here, previous, size, excluded, unfit)
        if isinstance(found, str) and suspects:
            return assign(here, previous, size, {*excluded} - {*suspects}, unfit)
        return found

    def can_spare(
        self,
        nodes: Collection[str],
        ballot: Ballot,
        previous: GenerationPlan | None,
        excluded: Collection[str],
    ) -> bool:
        """Whether enough nodes of this ballot may run ranks without `nodes`."""
        here = [promise.card for promise in ballot.promises.values()]
        return not isinstance(self.assign(here, previous, {*excluded, *nodes}), str)

    def poll(self, excluded: Collection[str], *, now_s: float) -> list[JournalEntry]:
        """Updates the requested checks; returns what has changed about the nodes."""
        unfit = self.unfit(excluded)
        self._asked = {
            peer.card.node_id: _number(peer) + 1
            for peer in self._peers
            if peer.card.node_id in unfit and self._awaits_check(peer)
        }
        found = [
            JournalEntry(NodeUnfit(f"node {one} may not run ranks: {reason}", one), announce=True)
            for one, reason in sorted(unfit.items())
            if _without_figures(self.reported.get(one, "")) != _without_figures(reason)
        ]
        found += [
            JournalEntry(NodeFit(f"node {one} is fit to run ranks", one), announce=True)
            for one in sorted(self.reported)
            if self._is_fit(one)
        ]
        kept = {one: reason for one, reason in self.reported.items() if not self._is_fit(one)}
        self.reported = {**kept, **unfit}
        return found + self.rings.poll({*excluded, *unfit}, now_s=now_s)

    def ask(self, body: LeaderHeartbeat) -> LeaderHeartbeat:
        if not self._asked and self.rings.order is None:
            return body
        return msgspec.structs.replace(body, checks=self._asked, collective=self.rings.order)

    def compare(self, plan: GenerationPlan) -> list[JournalEntry]:
        """Nodes of a generation that are far slower than the others; each is reported once."""
        self.rings.begin(plan)
        here = {card.node_id for card in plan.voters}
        figures = {
            peer.card.node_id: peer.fitness.figures
            for peer in self._peers
            if peer.card.node_id in here and peer.fitness is not None
        }
        slow = far_below(figures, self._settings.profile.preflight.warn_below_median)
        for peer in self._peers:
            peer.is_below_median = peer.card.node_id in slow
        new = {one: what for one, what in slow.items() if self._slow_reported.get(one) != what}
        self._slow_reported.update(new)
        return [
            JournalEntry(NodeBelowMedian(f"node {one} is slow: {what}", one), announce=True)
            for one, what in sorted(new.items())
        ]

    def _is_fit(self, node_id: str) -> bool:
        peer = self._peers.get(node_id)
        if peer is None or peer.lost or peer.is_leaving:
            return False
        if peer.fitness is None:
            return self.reported.get(node_id) == _LEAVES
        return peer.fitness.is_fit and not self._awaits_check(peer)

    def _awaits_check(self, peer: PeerState) -> bool:
        before, fitness = self._excluded_at.get(peer.card.node_id), peer.fitness
        if before is None or fitness is None or not fitness.is_fit:
            return False
        incarnation, number = before
        is_same = peer.card.incarnation == incarnation
        return not fitness.is_whole or (is_same and fitness.number <= number)


def _number(peer: PeerState) -> int:
    return peer.fitness.number if peer.fitness is not None else 0


def _without_figures(reason: str) -> str:
    """Removes measurements: an unfit node repeats its check, and new numbers are no news."""
    return _FIGURE.sub("", reason)
