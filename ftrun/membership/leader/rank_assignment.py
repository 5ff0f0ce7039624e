"""Decides which node runs which ranks.

Runs in:  the agent that leads. Pure.
Takes in: the nodes that are present, and the last generation.
Gives:    a `RankAssignment`, or how many nodes are missing.

Rule 1: ranks are stable. A node that stays keeps its position, a node that returns gets its old
        position if that is free, and a spare takes the position of a lost node.
Rule 2: positions close up only if the number of nodes changes; their order stays.
Rule 3: an excluded or unfit node never is a member, even if too few nodes are left; it may still
        vote.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ftrun.config.cluster import ClusterSize
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard
from ftrun.wire.cluster.rails import NetworkPlan


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """Members in the order of their ranks, and the spares."""

    members: tuple[NodeCard, ...]
    spares: tuple[NodeCard, ...]
    roads: NetworkPlan | None = None
    """How the paths between them are used; None: as the user's libraries choose."""

    @property
    def first_ranks(self) -> list[int]:
        found, rank = [], 0
        for card in self.members:
            found.append(rank)
            rank += card.num_ranks
        return found

    def along(self, roads: NetworkPlan | None) -> "RankAssignment":
        """The same assignment in the node order of a network plan, with that plan."""
        if roads is None:
            return self
        by_id = {card.node_id: card for card in self.members}
        return replace(self, members=tuple(by_id[one] for one in roads.order), roads=roads)


@dataclass(frozen=True, slots=True)
class TooFewNodes:
    """Too few nodes for the smallest generation that the run may have."""

    here: int
    needed: int
    set_aside: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()
    """Nodes whose own check failed, each with the reason."""

    def __str__(self) -> str:
        text = f"{self.here} of at least {self.needed} nodes are here"
        if self.set_aside:
            text += f"; set aside after too many failures: {', '.join(self.set_aside)}"
        if self.unfit:
            text += f"; not fit: {'; '.join(self.unfit)}"
        return text


def assign(
    here: Sequence[NodeCard],
    previous: GenerationPlan | None,
    wishes: ClusterSize,
    aside: Collection[str] = (),
    unfit: Mapping[str, str] = MappingProxyType({}),
) -> RankAssignment | TooFewNodes:
    """Gives each of these nodes ranks, or makes it a spare.

    Args:
        here: the nodes.
        previous: the last generation.
        wishes: the requested size of the run.
        aside: nodes that are excluded after too many failures.
        unfit: reasons why a node cannot run ranks, by node id.
    """
    usable = [card for card in here if card.node_id not in aside and card.node_id not in unfit]
    num_members = min(wishes.max_nodes, len(usable))
    if num_members < wishes.min_nodes:
        away = tuple(sorted(card.node_id for card in here if card.node_id in aside))
        why = {card.node_id: unfit[card.node_id] for card in here if card.node_id in unfit}
        words = tuple(f"{node_id} ({why[node_id]})" for node_id in sorted(why))
        return TooFewNodes(len(usable), wishes.min_nodes, away, words)
    order = _in_order(usable, previous)
    if previous is not None and num_members == len(previous.members):
        members = _same_places(order, previous)
    else:
        members = order[:num_members]
    chosen = {card.node_id for card in members}
    spares = [card for card in _in_order(here, previous) if card.node_id not in chosen]
    return RankAssignment(tuple(members), tuple(spares))


def first_order(cards: Sequence[NodeCard]) -> list[NodeCard]:
    """Sorts the nodes of a first generation by the node rank that the user gave, if any; then the
    node of the endpoint, then by name, with numbers in names compared as numbers.
    """  # noqa: D205 - one sentence
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
