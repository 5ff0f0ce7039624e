"""Who votes while a generation runs: spares that have come, in place of those that are lost.

Runs in:  the agent that leads. Pure.
Takes in: who is here beside the generation; acceptances.
Gives:    the plan with another roster; whether it takes effect.
Survives: nothing: the next lead finds the newest roster with whoever accepted it.
Source:   joint majorities as in Raft's change of membership (Ongaro, Ousterhout, 2014), but with
          one lead for the whole generation; see ballots.py, rule 4.

Without it a node that comes back would have no vote until the next generation, and the loss of
another one could leave too few of the old voters, with a warm spare standing by.

Rule 1: it is done only where more nodes may be lost afterwards than before. An even number of
        voters bears no more losses than the odd one below it, and a voter more can be missed.
        No more stand by with a vote than were wished for, so members are not outvoted.
Rule 2: only nodes that have stayed for a while, and are bound to nobody else, are taken in.
Rule 3: it is wanted until it takes effect or the next ballot begins; ranks know nothing of it.
"""

from collections.abc import Collection

import msgspec

from ftrun.recovery.attendance import Peer, Peers
from ftrun.recovery.ballots import carries, electorate, identity
from ftrun.recovery.commands import Command, Note, Send
from ftrun.recovery.settings import ClusterSettings
from ftrun.wire.ballot_messages import Accepted, Announce
from ftrun.wire.plan import Edition, History, Identity, NodeCard, Plan, Voters


class Enrolment:
    """One lead's changes of the roster, one after the other."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.wanted: Plan | None = None
        """What was announced and has not taken effect."""
        self._settings = settings
        self.void: set[Edition] = set()
        """All that were announced and did not take effect: nobody else could bring them about."""
        self._agreed: set[Identity] = set()
        self._look_s = 0.0
        self._asked_s = 0.0

    def reset(self) -> None:
        """Another generation is on its way."""
        self._give_up()

    def _give_up(self) -> None:
        if self.wanted is not None:
            self.void.add(self.wanted.edition)
            self.wanted = None

    def look(self, plan: Plan, peers: Peers, history: History, *, now_s: float) -> list[Command]:
        """Begin a change that is worth it; go on asking for the one that is wanted."""
        if now_s < self._look_s:
            return []
        self._look_s = now_s + self._settings.heartbeat_s / 2
        spares = self._standing_by(plan, peers, now_s)
        voters = electorate([*(node.card for node in plan.members), *spares])
        is_same = self.wanted is not None and electorate(self.wanted.voters) == voters
        if not is_same and _bears(voters, voters) > _bears(electorate(plan.voters), _alive(peers)):
            last = self.wanted.roster if self.wanted is not None else plan.roster
            self._give_up()
            self.wanted = _with_spares(plan, spares, last + 1, history)
            self._agreed.clear()
            self._asked_s = -1e9
        return self._ask(peers, now_s)

    def accepted(self, card: NodeCard, body: Accepted, plan: Plan, peers: Peers) -> Plan | None:
        """The plan that takes effect by this acceptance, if one does.

        Args:
            card: whose it is.
            body: the acceptance.
            plan: the one that is in effect.
            peers: who is here. A successor is proof that an agent votes no more.
        """
        wanted = self.wanted
        if wanted is None or (body.generation, body.roster) != wanted.edition:
            return None
        self._agreed.add(identity(card))
        before, after = electorate(plan.voters), electorate(wanted.voters)
        gone = {who for who in before if peers.has_successor(who)}
        if not (carries(before, self._agreed, gone=gone) and carries(after, self._agreed)):
            return None
        self.wanted = None
        return wanted

    def _ask(self, peers: Peers, now_s: float) -> list[Command]:
        wanted = self.wanted
        if wanted is None or now_s - self._asked_s < 2 * self._settings.heartbeat_s:
            return []
        self._asked_s = now_s
        asked = electorate(wanted.voters) | {
            who for voters in wanted.decided_by for who in voters.who
        }
        return [
            Send(peer.card.node_id, Announce(wanted))
            for peer in peers
            if peer.linked and identity(peer.card) in asked - self._agreed
        ]

    def _standing_by(self, plan: Plan, peers: Peers, now_s: float) -> list[NodeCard]:
        """Who could vote beside the members: the spares of now first."""
        order = [card.node_id for card in plan.spares]
        members = {node.node_id for node in plan.members}
        beside = [peer for peer in peers if peer.card.node_id not in members]
        here = [peer for peer in beside if self._may_vote(peer, plan, now_s)]
        known = [peer.card for peer in here if peer.card.node_id in order]
        new = [peer.card for peer in here if peer.card.node_id not in order]
        known.sort(key=lambda card: order.index(card.node_id))
        found = known + sorted(new, key=lambda card: card.node_id)
        return found[: self._settings.wishes.spares]

    def _may_vote(self, peer: Peer, plan: Plan, now_s: float) -> bool:
        if peer.lost or peer.is_mute or not peer.linked:
            return False
        has_stayed = now_s - peer.met_s >= self._settings.settle_s
        return has_stayed and peer.promised <= plan.generation


def _alive(peers: Peers) -> set[Identity]:
    return {identity(peer.card) for peer in peers if not peer.lost}


def _bears(voters: Collection[Identity], alive: Collection[Identity]) -> int:
    """So many more of these voters may be lost, and the others still decide."""
    return len(set(voters) & set(alive)) - len(voters) // 2 - 1


def _with_spares(plan: Plan, spares: list[NodeCard], roster: int, history: History) -> Plan:
    before = Voters(plan.generation, sorted(electorate(plan.voters)), plan.roster)
    return msgspec.structs.replace(
        plan, spares=spares, roster=roster, decided_by=[before], history=history
    )


def note_of(plan: Plan) -> Note:
    """What the journal should know of a roster that has taken effect."""
    spares = ", ".join(card.node_id for card in plan.spares)
    text = f"{len(plan.voters)} nodes decide about the next generation; standing by: {spares}"
    return Note("Roster", text, {"roster": plan.roster})
