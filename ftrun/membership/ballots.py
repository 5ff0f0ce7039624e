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
        And of whose majorities that one needed: what came before it may have taken effect.
Rule 3: a voter is a node id and an incarnation. Its successor in the same node is another one,
        and proof that the first can vote no more. What the first had accepted is known only
        where the successor has its memory.
Rule 4: a generation's lead may change its spares while the ranks run, by the acceptances of a
        majority of the voters before the change and of those after it. That roster counts like
        a generation in rule 2: whoever proposes next finds one who knows of it.
Rule 5: where no voter is left that could be part of another majority, none is needed. So a run
        whose agents were all started again goes on from what they have kept.
Rule 6: the outside witness is a voter among the others, with a vote where the nodes that vote are
        even in number: so it decides between two halves, and without it as many nodes are a
        majority as if it had none. A first generation needs its promise beside all nodes.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ftrun.wire.cluster.generation import (
    WITNESS,
    Edition,
    GenerationPlan,
    Identity,
    NodeCard,
    VoterSet,
)
from ftrun.wire.cluster.membership import Accepted, Promise

Electorate = frozenset[Identity]


def runs_ranks(plan: GenerationPlan | None, card: NodeCard) -> bool:
    """This agent is one of those that run the generation's ranks."""
    node = plan.member(card.node_id) if plan is not None else None
    return node is not None and node.card.identity == card.identity


def electorate(cards: Iterable[NodeCard]) -> Electorate:
    return frozenset(card.identity for card in cards)


def electorate_of(plan: GenerationPlan) -> Electorate:
    """Who decides about what follows this plan: its nodes, and perhaps the outside witness."""
    outside = [(WITNESS, plan.witness)] if plan.witness else []
    return electorate(plan.voters) | frozenset(outside)


def carries(
    voters: Electorate,
    agreed: Collection[Identity],
    *,
    dead: Collection[Identity] = (),
    gone: Collection[Identity] = (),
) -> bool:
    """Whether those who agree may decide for all voters.

    Without a majority it needs all: each voter agrees, or is known to be no more. Then nobody can
    decide otherwise from now on; and nobody has done so unknown to us, as long as those who agree
    and those whose memory is here are at least half.

    Args:
        voters: all of them.
        agreed: who has said yes.
        dead: incarnations that are no more, and what they had accepted is known.
        gone: incarnations that are no more, and it is not known.
    """
    yes = voters & set(agreed)
    if 2 * len(yes) > len(voters):
        return True
    known = yes | (voters & set(dead))
    left = voters - known
    if not left:
        return True
    return bool(yes) and left <= set(gone) and 2 * len(known) >= len(voters)


@dataclass
class VoterState:
    """One agent's promises."""

    promised: int = -1
    proposer: Identity | None = None
    accepted: GenerationPlan | None = None

    def may_promise(self, generation: int, proposer: Identity) -> bool:
        if generation == self.promised:
            return proposer == self.proposer
        return generation > self.promised

    def promise(self, generation: int, proposer: Identity) -> None:
        if generation > self.promised:
            self.promised, self.proposer = generation, proposer

    def accept(self, plan: GenerationPlan, proposer: Identity) -> bool:
        """Whether this plan is the one that was promised; kept if so."""
        if plan.generation != self.promised or proposer != self.proposer:
            return False
        self.accepted = plan
        return True

    def enrol(self, plan: GenerationPlan, lead: Identity) -> bool:
        """Whether this roster may be accepted from the lead of its generation; kept if so."""
        accepted = self.accepted
        if accepted is not None and accepted.edition >= plan.edition:
            return accepted == plan
        # None: an earlier agent of this node has promised it, and accepted the plan.
        is_bound = self.promised == plan.generation and self.proposer not in (None, lead)
        if is_bound or self.promised > plan.generation:
            return False
        self.promised, self.proposer = plan.generation, lead
        self.accepted = plan
        return True


@dataclass
class Ballot:
    """One attempt to bring about a generation, as its proposer sees it."""

    generation: int
    why: str
    base: Edition
    """The newest that is known to have taken effect; generation -1: none has."""
    needs: dict[Edition, Electorate]
    """Whose majorities it needs: the base's, and those of plans that may have taken effect. Empty
    while nobody knows of any generation."""
    void: frozenset[Edition] = frozenset()
    """Rosters that only its proposer could have brought into effect, and has not."""
    given_up: Sequence[GenerationPlan] = ()
    """Plans that its proposer has announced and not brought into effect: no other agent can."""
    promises: dict[str, Promise] = field(default_factory=dict)
    accepted: dict[str, Accepted] = field(default_factory=dict)
    plan: GenerationPlan | None = None
    """What was announced, once it was."""
    witness: int = 0
    """The life of the outside witness that has promised; 0: none has."""
    remembered: GenerationPlan | None = None
    """The newest plan that it has brought."""
    is_witnessed: bool = False
    """It has accepted, too."""
    needs_witness: bool = False
    """Nothing can be announced without it."""

    def take_promise(self, promise: Promise) -> None:
        self.promises[promise.card.node_id] = promise
        effective, accepted = promise.effective, promise.accepted
        if effective is not None and effective.edition > self.base:
            # Newer than what we knew: its voters decide, and those before it no more.
            self.base = effective.edition
            self.needs[effective.edition] = electorate_of(effective)
        if accepted is not None:
            self.mind(accepted)
        self._leave_out_older()

    def take_witness(self, life: int, remembered: GenerationPlan | None) -> None:
        """The outside witness has promised; what it remembers may have taken effect."""
        self.witness, self.remembered = life, remembered
        if remembered is not None:
            self.mind(remembered)
            self._leave_out_older()

    def _leave_out_older(self) -> None:
        self.needs = {at: who for at, who in self.needs.items() if at >= self.base}

    def mind(self, plan: GenerationPlan) -> None:
        """This plan may have taken effect, or any that it was to follow."""
        if plan.edition not in self.void and plan not in self.given_up:
            self.needs[plan.edition] = electorate_of(plan)
        for voters in plan.decided_by:
            self.needs.setdefault(voters.edition, frozenset(voters.who))

    def newest_plan(self) -> GenerationPlan | None:
        """The newest plan that somebody brought, whether it has taken effect or may have."""
        found = [p for has in self.promises.values() for p in (has.effective, has.accepted) if p]
        found += [self.remembered] if self.remembered is not None else []
        return max(found, key=lambda plan: plan.edition, default=None)

    def decided_by(self) -> list[VoterSet]:
        """Whose majorities it needs; of the first generation those who are here are the voters."""
        first = {(-1, 0): electorate(has.card for has in self.promises.values())}
        needs = sorted((self.needs or first).items())
        return [VoterSet(generation, sorted(who), roster) for (generation, roster), who in needs]

    def shortage(self) -> str:
        """Why those who have promised may not decide, in words."""
        if self.needs_witness and not self.witness:
            return f"{WITNESS} has not answered, and no run begins without it"
        voters = {node_id for node_id, _ in self.needs[max(self.needs)]}
        here = {*self.promises, WITNESS} if self.witness else self.promises.keys()
        missing = sorted(voters - here)
        beside = f" beside {WITNESS}" if WITNESS in voters else ""
        of = f"the {len(voters - {WITNESS})} nodes that decide{beside}"
        if not missing:
            return f"too many of {of} have lost their memory"
        return f"too few of {of} are here; missing: {', '.join(missing)}"

    def announce(self, plan: GenerationPlan) -> None:
        self.plan = plan
        self.needs = {voters.edition: frozenset(voters.who) for voters in plan.decided_by}

    def is_promised(self) -> bool:
        """Whether it may be announced."""
        if self.needs_witness and not self.witness:
            return False
        agreed = {has.card.identity for has in self.promises.values()}
        if self.witness:
            agreed.add((WITNESS, self.witness))
        return self._is_carried(agreed)

    def is_accepted(self) -> bool:
        """Whether it takes effect: carried, and kept by each of its members."""
        if self.plan is None:
            return False
        agreed = {self.promises[node_id].card.identity for node_id in self.accepted}
        if self.is_witnessed:
            agreed.add((WITNESS, self.witness))
        members = {node.node_id for node in self.plan.members}
        return members <= self.accepted.keys() and self._is_carried(agreed)

    def _is_carried(self, agreed: Collection[Identity]) -> bool:
        return all(
            carries(who, agreed, dead=dead, gone=gone)
            for (generation, _), who in self.needs.items()
            for dead, gone in [self._no_more(who, generation)]
        )

    def _no_more(self, voters: Electorate, generation: int) -> tuple[set[Identity], set[Identity]]:
        """Voters that are no more: whose memory is here, and whose is not.

        Only a successor is proof. A refused connection is none: firewalls refuse as well.
        """
        dead: set[Identity] = set()
        gone: set[Identity] = set()
        for who in voters:
            here = self.promises.get(who[0])
            if here is not None and here.card.incarnation != who[1]:
                (dead if here.knows >= max(generation, 0) else gone).add(who)
        return dead, gone
