"""How a generation is agreed on: a ballot, and what a voter has promised.

Runs in:  every agent. Pure.
Takes in: prepares, promises, acceptances.
Gives:    whether to promise; whether a ballot is carried.
Survives: nothing: an agent that is started again is a new incarnation and has no vote.
Source:   Lamport, "Paxos Made Simple" (2001); a configuration decides about its successor as in
          Lamport, Malkhi, Zhou, "Vertical Paxos" (2009).

A generation's number is its ballot's number. Unlike a register's, a superseded generation's
value need not be kept: a later one starts from what the snapshots hold. What must hold is that
of two generations that take effect the later one's proposer knows of the earlier one, and that
the earlier one's ranks cannot go on.

Rule 1: a voter promises each number to one proposer, and never a lower number after a higher.
Rule 2: a generation takes effect with the acceptances of a majority of the voters of the last
        one. Was another accepted in between, then of its voters too: it may have taken effect.
Rule 3: a voter is a node id and an incarnation. Its successor in the same node is another one,
        and proof that the first can vote no more.
Rule 4: where no voter is left that could be part of another majority, none is needed. So a run
        whose agents were all started again goes on from what they have kept.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ftrun.wire.cluster import Accepted, NodeCard, Plan, Promise

Identity = tuple[str, int]
"""Node id and incarnation."""

Electorate = frozenset[Identity]


def identity(card: NodeCard) -> Identity:
    return (card.node_id, card.incarnation)


def electorate(cards: Iterable[NodeCard]) -> Electorate:
    return frozenset(identity(card) for card in cards)


def carries(
    voters: Electorate, agreed: Collection[Identity], dead: Collection[Identity], *, refused: bool
) -> bool:
    """Whether those who agree may decide for all voters.

    Args:
        voters: all of them.
        agreed: who has said yes.
        dead: incarnations that are known to be no more, because their successor is here.
        refused: the other one of two voters is gone as well: its kernel has said so.
    """
    yes = voters & set(agreed)
    if 2 * len(yes) > len(voters):
        return True
    left = voters - yes - set(dead)
    return not left or (refused and len(voters) == 2 and len(yes) == 1)


@dataclass
class Vote:
    """One agent's promises."""

    promised: int = -1
    proposer: Identity | None = None
    accepted: Plan | None = None

    def may_promise(self, generation: int, proposer: Identity) -> bool:
        if generation == self.promised:
            return proposer == self.proposer
        return generation > self.promised

    def promise(self, generation: int, proposer: Identity) -> None:
        if generation > self.promised:
            self.promised, self.proposer = generation, proposer

    def accept(self, plan: Plan, proposer: Identity) -> bool:
        """Whether this plan is the one that was promised; kept if so."""
        if plan.generation != self.promised or proposer != self.proposer:
            return False
        self.accepted = plan
        return True


@dataclass
class Ballot:
    """One attempt to bring about a generation, as its proposer sees it."""

    generation: int
    why: str
    base_generation: int
    """The newest generation that is known to have taken effect; -1: none has."""
    base: Electorate
    """Its voters."""
    begun_s: float
    promises: dict[str, Promise] = field(default_factory=dict)
    accepted: dict[str, Accepted] = field(default_factory=dict)
    plan: Plan | None = None
    """What was announced, once it was."""
    maybe: dict[int, Electorate] = field(default_factory=dict)
    """Voters of plans that may have taken effect without our knowledge, by generation."""

    def take_promise(self, promise: Promise) -> None:
        self.promises[promise.card.node_id] = promise
        effective, accepted = promise.effective, promise.accepted
        if effective is not None and effective.generation > self.base_generation:
            # Newer than what we knew: its voters decide, and those before it no more.
            self.base_generation = effective.generation
            self.base = electorate(effective.voters)
        if accepted is not None:
            self.maybe[accepted.generation] = electorate(accepted.voters)
        self.maybe = {at: who for at, who in self.maybe.items() if at > self.base_generation}

    def newest_plan(self) -> Plan | None:
        """The newest plan that somebody brought, whether it has taken effect or may have."""
        found = [p for has in self.promises.values() for p in (has.effective, has.accepted) if p]
        return max(found, key=lambda plan: plan.generation, default=None)

    def is_promised(self, *, refused: bool) -> bool:
        return self._is_carried({identity(has.card) for has in self.promises.values()}, refused)

    def is_accepted(self, *, refused: bool) -> bool:
        """Whether it takes effect: carried, and kept by each of its members."""
        if self.plan is None:
            return False
        agreed = {identity(self.promises[node_id].card) for node_id in self.accepted}
        members = {node.node_id for node in self.plan.members}
        return members <= self.accepted.keys() and self._is_carried(agreed, refused)

    def _is_carried(self, agreed: Collection[Identity], refused: bool) -> bool:
        at = {self.base_generation: self.base, **self.maybe}
        return all(
            carries(who, agreed, self._dead(who, generation), refused=refused)
            for generation, who in at.items()
        )

    def _dead(self, voters: Electorate, generation: int) -> set[Identity]:
        """Voters whose successor is here and has kept what they knew.

        One that knows nothing (its node was switched off) proves that its predecessor is gone,
        but not what that had accepted.
        """
        here = {
            has.card.node_id: has.card.incarnation
            for has in self.promises.values()
            if has.knows >= generation
        }
        return {who for who in voters if here.get(who[0], who[1]) != who[1]}
