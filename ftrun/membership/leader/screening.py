"""Who may run ranks: not a node that is unfit, nor one that is set aside, nor one just let back.

Runs in:  the agent that leads. Pure.
Takes in: the results of the nodes' own checks; who is set aside after too many failures.
Gives:    places for those that may; which nodes are to check themselves again; `JournalEntry`s.
Survives: nothing. Who leads next learns of an unfit node from its promise, or its next heartbeat;
          that a node was set aside it finds in the plan's history.
Source:   TRANSOM (arXiv 2310.10046): a node that fails its self-test is replaced by a spare, and
          an evicted one is not chosen again.

Rule 1: a node whose agent makes no checks is taken as it is.
Rule 2: once its hour has passed, a node that was set aside must have made a whole check since it
        was last seen set aside. An agent that was started again has made one, or is asked for it.
"""

import re
from collections.abc import Collection, Sequence

import msgspec

from ftrun.membership.ballots import Ballot
from ftrun.membership.leader.failure_detector import FailureDetector, PeerState
from ftrun.membership.leader.rank_assignment import RankAssignment, TooFewNodes, assign
from ftrun.monitor.node_fitness import far_below
from ftrun.recovery.commands import JournalEntry
from ftrun.recovery.settings import MembershipSettings
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard
from ftrun.wire.cluster.heartbeats import LeaderHeartbeat

_LEAVES = "it was asked to leave"
_FIGURE = re.compile(r"[\d.,]*\d")
_Check = tuple[int, int]
"""Incarnation of an agent, and the number of a check among its own."""


class Admission:
    """One lead's view of who is fit."""

    def __init__(self, settings: MembershipSettings, peers: FailureDetector) -> None:
        self._settings = settings
        self._peers = peers
        self._aside_at: dict[str, _Check] = {}
        """The newest check of each node that was set aside, when it last was."""
        self._asked: dict[str, int] = {}
        """The number of the check that is waited for, by node id."""
        self._told: dict[str, str] = {}
        self._slow_told: dict[str, str] = {}

    @property
    def told(self) -> dict[str, str]:
        """Who may not run ranks and why, with the newest figures; replaced whole."""
        return self._told

    def unfit(self, aside: Collection[str]) -> dict[str, str]:
        """Who must not run ranks though it is not set aside, and why, by node id.

        Args:
            aside: who is set aside now.
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
        """Everyone who must not run ranks now."""
        return {*aside, *self.unfit(aside)}

    def assign(
        self, here: Sequence[NodeCard], previous: GenerationPlan | None, aside: Collection[str]
    ) -> RankAssignment | TooFewNodes:
        """Places for those of these nodes that may have one; see places.py."""
        return assign(here, previous, self._settings.wishes, aside, self.unfit(aside))

    def can_spare(
        self,
        nodes: Collection[str],
        ballot: Ballot,
        previous: GenerationPlan | None,
        aside: Collection[str],
    ) -> bool:
        """Whether enough nodes of this ballot may run ranks without those."""
        here = [promise.card for promise in ballot.promises.values()]
        places = self.assign(here, previous, {*aside, *nodes})
        return not isinstance(places, TooFewNodes)

    def look(self, aside: Collection[str]) -> list[JournalEntry]:
        """Find out who is to be asked for a check, and what is new about who may run ranks."""
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
        """The same heartbeat, with the checks that are waited for."""
        return msgspec.structs.replace(body, checks=self._asked) if self._asked else body

    def compare(self, plan: GenerationPlan) -> list[JournalEntry]:
        """Which nodes of a generation are far slower than the others; each is told once."""
        here = {card.node_id for card in plan.voters}
        figures = {
            peer.card.node_id: peer.fitness.figures
            for peer in self._peers
            if peer.card.node_id in here and peer.fitness is not None
        }
        slow = far_below(figures, self._settings.warn_below)
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
    """An unfit node checks itself again and again; the same with other figures is no news."""
    return _FIGURE.sub("", why)
