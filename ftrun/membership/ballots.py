"""Agreement on a generation: a ballot, and the promises of one voter.

Runs in:  every agent. Pure.
Takes in: prepares, promises, acceptances.
Gives:    whether to promise; whether a ballot has its quorum.
Survives: nothing: a restarted agent is a new incarnation and has no vote.
Source:   Lamport, "Paxos Made Simple" (2001); a configuration decides about its successor as in
          Lamport, Malkhi, Zhou, "Vertical Paxos" (2009).

The number of a generation is the number of its ballot. Unlike the value of a Paxos register, the
value of a superseded generation need not be kept: a later generation starts from the snapshots.
The required property concerns any two chosen generations. The proposer of the later one learns of
the earlier one, and the ranks of the earlier one cannot continue.

Rule 1: a voter promises each number to one proposer, and never a lower number after a higher one.
Rule 2: a generation is chosen when a majority of the voters of the last chosen one accepts it. If
        another plan was accepted in between, it may have been chosen: a majority of its voters is
        needed too. The same holds for each voter set whose majority that plan needed, because a
        plan before it may have been chosen.
        Of two such plans with one number, both majorities are needed.
Rule 3: a voter is a node id and an incarnation. Its successor on the same node is another voter,
        and proves that the first one can vote no more. What the first one accepted is known only
        if the successor has its persisted plan. A plan of a second run (rule 7) is none.
Rule 4: the leader of a generation may change its spares while the ranks run. This needs the
        acceptances of a majority of the voters before the change and of those after it. Rule 2
        treats that voter revision like a generation: the next proposer gets it from a voter.
Rule 5: if no voter is left that could be part of another majority, no majority is needed. A run
        whose agents were all restarted therefore resumes from what they have persisted.
Rule 6: the witness is one of the voters. It has a vote if the number of voting nodes is even. It
        thus decides between two halves, and without it a majority needs as many nodes as if it had
        no vote. The first generation needs its promise in addition to all nodes.
Rule 7: agents without memory that cannot reach the run may have begun a second run. If the second
        run is not known to be chosen and has made no version, the first run is continued.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ftrun.wire.cluster.generation import (
    WITNESS,
    ConfigurationId,
    GenerationPlan,
    Identity,
    NodeCard,
    VoterSet,
)
from ftrun.wire.cluster.membership import Accepted, Promise

Electorate = frozenset[Identity]


def runs_ranks(plan: GenerationPlan | None, card: NodeCard) -> bool:
    """Whether this incarnation of the agent runs ranks of the generation."""
    node = plan.member(card.node_id) if plan is not None else None
    return node is not None and node.card.identity == card.identity


def electorate(cards: Iterable[NodeCard]) -> Electorate:
    return frozenset(card.identity for card in cards)


def electorate_of(plan: GenerationPlan) -> Electorate:
    """The voters that decide about the successor of this plan, with the witness if it votes."""
    outside = [(WITNESS, plan.witness)] if plan.witness else []
    return electorate(plan.voters) | frozenset(outside)


def carries(
    voters: Electorate,
    agreed: Collection[Identity],
    *,
    dead: Collection[Identity] = (),
    gone: Collection[Identity] = (),
) -> bool:
    """Whether the voters that agree may decide for all voters.

    Without a majority, each voter must agree or be known to be dead: then no other decision can be
    made from now on. Nor was one made before, unknown to this agent, if the voters that agree and
    those whose accepted plan is known are at least half.

    Args:
        dead: incarnations that have ended, and what they had accepted is known.
        gone: incarnations that have ended, and what they had accepted is not known.
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
    """The promises and the acceptance of one agent."""

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
        """Returns whether this plan matches the promise; if so, it is the accepted plan."""
        if plan.generation != self.promised or proposer != self.proposer:
            return False
        self.accepted = plan
        return True

    def adopt_voters(self, plan: GenerationPlan, leader: Identity) -> bool:
        """Accepts this voter revision of the leader of its generation; returns whether it may."""
        accepted = self.accepted
        if accepted is not None and accepted.configuration_id >= plan.configuration_id:
            return accepted == plan
        # None: an earlier agent of this node has promised it, and accepted the plan.
        is_bound = self.promised == plan.generation and self.proposer not in (None, leader)
        if is_bound or self.promised > plan.generation:
            return False
        self.promised, self.proposer = plan.generation, leader
        self.accepted = plan
        return True


@dataclass
class Ballot:
    """One attempt to have a generation chosen, as its proposer sees it."""

    generation: int
    reason: str
    base: ConfigurationId
    """Configuration id of the newest plan known to be chosen; generation -1: none is."""
    needs: dict[ConfigurationId, Electorate]
    """The voter sets whose majorities the ballot needs: that of the base, and those of plans that
    may have been chosen. Empty while no generation is known."""
    void: frozenset[ConfigurationId] = frozenset()
    """Voter revisions that only this proposer could have had chosen, and has given up."""
    given_up: Sequence[GenerationPlan] = ()
    """Plans that this proposer announced and gave up. No other agent can have them chosen."""
    promises: dict[str, Promise] = field(default_factory=dict)
    accepted: dict[str, Accepted] = field(default_factory=dict)
    plan: GenerationPlan | None = None
    """The announced plan; None until it is announced."""
    witness: int = 0
    """Incarnation of the witness register that promised; 0: no promise."""
    remembered: GenerationPlan | None = None
    """The newest plan that the witness returned with its promise."""
    is_witnessed: bool = False
    """The witness has accepted the plan."""
    needs_witness: bool = False
    """No plan can be announced without the promise of the witness."""
    concurrent: set[tuple[ConfigurationId, Electorate]] = field(default_factory=set)
    """Further voter sets: those of plans with a number that is already in `needs`. They are of a
    second run, or of a proposer that used the same number."""
    known: GenerationPlan | None = None
    """The newest plan that a promise reported as chosen. Other voters omit it from then on, and the
    promise itself is removed if its node is lost."""
    lives: dict[Electorate, str] = field(default_factory=dict)
    """The run in which each voter set decides; none for the voters of a first generation."""
    stay: bool = False
    """Its voters park the ranks that may stay."""
    failed: set[int] = field(default_factory=set)
    """Ranks that do not stay."""

    def take_promise(self, promise: Promise) -> None:
        self.promises[promise.card.node_id] = promise
        effective, accepted = promise.effective, promise.accepted
        if effective is not None and effective.configuration_id > self.base:
            # A newer base: its voters decide, and voters of older configurations no longer count.
            self.base, self.known = effective.configuration_id, effective
            self.needs[effective.configuration_id] = electorate_of(effective)
            self.lives.setdefault(electorate_of(effective), effective.life)
        if accepted is not None and accepted.configuration_id > self.base:
            # Otherwise it is of a second run: its voters must not replace those of the base.
            self.mind(accepted)
        self._leave_out_older()

    def take_witness(self, life: int, remembered: GenerationPlan | None) -> None:
        """Records a promise of the witness; the plan in its register may be chosen."""
        self.witness, self.remembered = life, remembered
        if remembered is not None:
            self.mind(remembered)
            self._leave_out_older()

    def _leave_out_older(self) -> None:
        self.needs = {at: identity for at, identity in self.needs.items() if at >= self.base}
        self.concurrent = {one for one in self.concurrent if one[0] > self.base}

    def _need(self, at: ConfigurationId, voters: Electorate, life: str = "") -> None:
        if life:
            self.lives.setdefault(voters, life)
        known = self.needs.setdefault(at, voters)
        if known != voters and at >= (0, 0):
            self.concurrent.add((at, voters))

    def mind(self, plan: GenerationPlan) -> None:
        """Records that this plan, or one in its `decided_by`, may have been chosen."""
        if plan.configuration_id not in self.void and plan not in self.given_up:
            self._need(plan.configuration_id, electorate_of(plan), plan.life)
        for voters in plan.decided_by:
            self._need(voters.configuration_id, frozenset(voters.identities), plan.life)

    def newest_plan(
        self, plan: GenerationPlan | None = None, unsure: GenerationPlan | None = None
    ) -> GenerationPlan | None:
        """The plan of the previous generation, from which the next generation continues.

        The candidates are the plans that this agent knows and the plans in the promises. The newest
        candidate is returned, unless rule 7 applies. Of several candidates with the same number, a
        chosen one is returned.

        Args:
            plan: the newest generation that this agent knows to be chosen.
            unsure: a newer one that may have been chosen.
        """
        has = self.promises.values()
        chosen = [plan, self.known, *(one.effective for one in has)]
        maybe = [*(one.accepted for one in has), self.remembered, unsure]
        found = [one for one in (*chosen, *maybe) if one is not None]
        newest = max(found, key=lambda plan: plan.configuration_id, default=None)
        base = next((one for one in found if one.configuration_id == self.base), None)
        if newest is None or base is None or base.life == newest.life:
            return newest
        second = [has for has in self.promises.values() if _accepted_life(has) == newest.life]
        first = [has for has in self.promises.values() if has not in second]
        # A member holds what its run has committed.
        is_known = any(newest.member(has.card.node_id) is not None for has in second)
        is_void = is_known and not any(map(_holds_version, second))
        has_base = any(_holds_version(has) or _is_committed(has) for has in first)
        return base if is_void and has_base else newest

    def decided_by(self) -> list[VoterSet]:
        """The voter sets whose majorities are needed; for a first generation all that promised."""
        first = {(-1, 0): electorate(has.card for has in self.promises.values())}
        needs = [*(self.needs or first).items(), *self.concurrent]
        found = [VoterSet(at[0], sorted(identities), at[1]) for at, identities in needs]
        return sorted(found, key=lambda voters: (voters.configuration_id, voters.identities))

    def shortage(self) -> str:
        if self.needs_witness and not self.witness:
            return f"{WITNESS} has not answered, and no run starts without it"
        voters = {node_id for node_id, _ in self.needs[max(self.needs)]}
        here = {*self.promises, WITNESS} if self.witness else self.promises.keys()
        missing = sorted(voters - here)
        outside = f" and {WITNESS}" if WITNESS in voters else ""
        of = f"the voters ({len(voters - {WITNESS})} nodes{outside})"
        if not missing:
            return f"too many of {of} were restarted without the plan of the run"
        return f"too few of {of} are present; missing: {', '.join(missing)}"

    def announce(self, plan: GenerationPlan) -> None:
        self.plan = plan
        self.needs, self.concurrent = {}, set()
        for voters in plan.decided_by:
            self._need(voters.configuration_id, frozenset(voters.identities))

    def is_promised(self) -> bool:
        if self.needs_witness and not self.witness:
            return False
        agreed = {has.card.identity for has in self.promises.values()}
        if self.witness:
            agreed.add((WITNESS, self.witness))
        return self._is_carried(agreed)

    def is_accepted(self) -> bool:
        """Whether the plan is chosen: a quorum and each of its members have accepted it."""
        if self.plan is None:
            return False
        agreed = {self.promises[node_id].card.identity for node_id in self.accepted}
        if self.is_witnessed:
            agreed.add((WITNESS, self.witness))
        members = {node.node_id for node in self.plan.members}
        return members <= self.accepted.keys() and self._is_carried(agreed)

    def _is_carried(self, agreed: Collection[Identity]) -> bool:
        return all(
            carries(identity, agreed, dead=dead, gone=gone)
            for (generation, _), identity in (*self.needs.items(), *self.concurrent)
            for dead, gone in [self._no_more(identity, generation)]
        )

    def _no_more(self, voters: Electorate, generation: int) -> tuple[set[Identity], set[Identity]]:
        """Ended incarnations among the voters: those whose accepted plan is known, and the others.

        Only a successor proves that an incarnation has ended. A refused connection does not,
        because a firewall refuses connections too.
        """
        dead: set[Identity] = set()
        gone: set[Identity] = set()
        life = self.lives.get(voters, "")
        for identity in voters:
            here = self.promises.get(identity[0])
            if here is not None and here.card.incarnation != identity[1]:
                knows = here.knows >= max(generation, 0) and life in ("", here.life)
                (dead if knows else gone).add(identity)
        return dead, gone


def _accepted_life(promise: Promise) -> str:
    """The run of the newest plan in this promise; empty if it names none."""
    plan = promise.accepted or promise.effective
    return plan.life if plan is not None else ""


def _holds_version(promise: Promise) -> bool:
    """Whether this node holds a version that a generation made; a checkpoint's has number -1."""
    made_in = [offer.generation for offer in promise.holdings.offers]
    made_in += [part.generation for part in promise.holdings.protected]
    return max(made_in, default=-1) >= 0


def _is_committed(promise: Promise) -> bool:
    return promise.committed is not None and promise.committed[0] >= 0


def position_of(node_id: str, plan: GenerationPlan | None) -> int:
    """Position of a node in the succession; after all others if it has none."""
    order = [card.node_id for card in plan.voters] if plan is not None else []
    return order.index(node_id) if node_id in order else len(order)
