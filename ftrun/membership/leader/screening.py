"""Admission: excludes unfit nodes, excluded nodes, and nodes readmitted without a new check.

Runs in:  the agent that leads. Pure.
Takes in: results of the nodes' own checks; nodes that are excluded after too many failures.
Gives:    ranks for the admitted nodes; which nodes must repeat their check; `JournalEntry`s.
Survives: nothing. The next leader learns of an unfit node from its promise or next heartbeat, and
          of an excluded node from the plan's history.
Source:   TRANSOM (arXiv 2310.10046): a node that fails its self-test is replaced by a spare, and
          an evicted one is not chosen again.

Rule 1: a node whose agent makes no checks is admitted.
Rule 2: after its hour of exclusion, a node must have completed a whole check since it was last seen
        excluded. A restarted agent has made one, or is asked for it.
"""

import re
from collections.abc import Collection, Sequence

import msgspec

from ftrun.config.cluster import MembershipSettings
from ftrun.membership.ballots import Ballot
from ftrun.membership.leader.failure_detector import FailureDetector, PeerState
from ftrun.membership.leader.rank_assignment import RankAssignment, TooFewNodes, assign
from ftrun.monitor.node_fitness import far_below
from ftrun.recovery.commands import JournalEntry
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard
from ftrun.wire.cluster.heartbeats import LeaderHeartbeat

_LEAVES = "it was asked to leave"
_FIGURE = re.compile(r"[\d.,]*\d")
_Check = tuple[int, int]
"""Incarnation of an agent, and the number of one of its checks."""


class Admission:
    """One leader's view of the fitness of nodes."""

    def __init__(self, settings: MembershipSettings, peers: FailureDetector) -> None:
        self._settings = settings
        self._peers = peers
        self._aside_at: dict[str, _Check] = {}
        """The newest check of each excluded node, when it was last seen excluded."""
        self._asked: dict[str, int] = {}
        """The number of the awaited check, by node id."""
        self._told: dict[str, str] = {}
        self._slow_told: dict[str, str] = {}

    @property
    def told(self) -> dict[str, str]:
        """Reasons why nodes may not run ranks, with the newest measurements; replaced whole."""
        return self._told

    def unfit(self, aside: Collection[str]) -> dict[str, str]:
        """Reasons why nodes that are not excluded must not run ranks, by node id.

        Args:
            aside: nodes that are excluded now.
        """
        found: dict[str, str] = {}
        for peer in self._peers:
            node_id, fitness = peer.card.node_id, peer.fitness
            if node_id in aside:
                self._aside_at[node_id] = (peer.card.incarnation, _number(peer))
            elif peer.is_leaving and not peer.lost:
                found[node_id] = _LEAVES
            elif fitness is None or peer.lost:
                continue
            elif not fitness.is_fit:
                found[node_id] = "; ".join(fitness.problems)
            elif self._awaits_check(peer):
                found[node_id] = "it was set aside, and checks itself again"
            else:
                self._aside_at.pop(node_id, None)
        return found

    def barred(self, aside: Collection[str]) -> set[str]:
        return {*aside, *self.unfit(aside)}

    def assign(
        self, here: Sequence[NodeCard], previous: GenerationPlan | None, aside: Collection[str]
    ) -> RankAssignment | TooFewNodes:
        return assign(here, previous, self._settings.wishes, aside, self.unfit(aside))

    def can_spare(
        self,
        nodes: Collection[str],
        ballot: Ballot,
        previous: GenerationPlan | None,
        aside: Collection[str],
    ) -> bool:
        """Whether enough nodes of this ballot may run ranks without `nodes`."""
        here = [promise.card for promise in ballot.promises.values()]
        places = self.assign(here, previous, {*aside, *nodes})
        return not isinstance(places, TooFewNodes)

    def look(self, aside: Collection[str]) -> list[JournalEntry]:
        """Updates the requested checks; returns what has changed about unfit nodes."""
        unfit = self.unfit(aside)
        self._asked = {
            peer.card.node_id: _number(peer) + 1
            for peer in self._peers
            if peer.card.node_id in unfit and self._awaits_check(peer)
        }
        found = [
            JournalEntry("Unfit", f"node {one} may not run ranks: {why}", {"about": one}, say=True)
            for one, why in sorted(unfit.items())
            if _without_figures(self._told.get(one, "")) != _without_figures(why)
        ]
        found += [
            JournalEntry("FitAgain", f"node {one} is fit to run ranks", {"about": one}, say=True)
            for one in sorted(self._told)
            if self._is_fit(one)
        ]
        kept = {one: why for one, why in self._told.items() if not self._is_fit(one)}
        self._told = {**kept, **unfit}
        return found

    def ask(self, body: LeaderHeartbeat) -> LeaderHeartbeat:
        return msgspec.structs.replace(body, checks=self._asked) if self._asked else body

    def compare(self, plan: GenerationPlan) -> list[JournalEntry]:
        """Nodes of a generation that are far slower than the others; each is reported once."""
        here = {card.node_id for card in plan.voters}
        figures = {
            peer.card.node_id: peer.fitness.figures
            for peer in self._peers
            if peer.card.node_id in here and peer.fitness is not None
        }
        slow = far_below(figures, self._settings.profile.preflight.warn_below)
        new = {one: what for one, what in slow.items() if self._slow_told.get(one) != what}
        self._slow_told.update(new)
        return [
            JournalEntry("SlowNode", f"node {one} is slow: {what}", {"about": one}, say=True)
            for one, what in sorted(new.items())
        ]

    def _is_fit(self, node_id: str) -> bool:
        peer = self._peers.get(node_id)
        if peer is None or peer.lost or peer.is_leaving:
            return False
        if peer.fitness is None:
            return self._told.get(node_id) == _LEAVES
        return peer.fitness.is_fit and not self._awaits_check(peer)

    def _awaits_check(self, peer: PeerState) -> bool:
        before, fitness = self._aside_at.get(peer.card.node_id), peer.fitness
        if before is None or fitness is None or not fitness.is_fit:
            return False
        incarnation, number = before
        is_same = peer.card.incarnation == incarnation
        return not fitness.is_whole or (is_same and fitness.number <= number)


def _number(peer: PeerState) -> int:
    return peer.fitness.number if peer.fitness is not None else 0


def _without_figures(why: str) -> str:
    """Removes measurements: an unfit node repeats its check, and new numbers are no news."""
    return _FIGURE.sub("", why)
