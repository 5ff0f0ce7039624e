"""The lead's view of the other agents: who is there, who is silent, who hears it.

Runs in:  the agent that leads, or that tries to. Pure.
Takes in: connections, heartbeats, time.
Gives:    who is lost, whom to dial, whether this lead may have been replaced.

Rule 1: a closed connection leads to one dial. A node that refuses is lost at once; no answer means
        silent, and silence counts after the deadline. Neither proves that an agent is dead.
Rule 2: who does not hear the lead is as silent as one that is not heard, so every heartbeat is
        answered with its number. What cannot be seen from one side alone, such as a network that
        passes one way only, is seen by both at the same time.
Rule 3: silence counts from when this process could hear; it may have stood still itself. What
        others may have decided meanwhile does not wait for that.
Rule 4: a voter that was started again could not have helped to replace this lead only if it had
        heard the lead until just before. Otherwise it may have, whatever runs on its node now.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ftrun.membership.ballots import electorate_of
from ftrun.membership.witness_votes import WitnessView
from ftrun.monitor.node_fitness import NodeFitness
from ftrun.monitor.slow.clock_offsets import ClockOffset
from ftrun.recovery.settings import MembershipSettings
from ftrun.wire.cluster.generation import GenerationPlan, Identity, NodeCard
from ftrun.wire.cluster.heartbeats import Heartbeat

AWAIT_SILENT_S = 10.0
"""After a good end the lead stays so long for nodes that fell silent shortly before."""

_LONG_AGO_S = -1e9


@dataclass
class PeerState:
    """What the lead knows of another agent, or of its own."""

    card: NodeCard
    heard_s: float
    """When it was last heard."""
    acked_s: float
    """When that heartbeat left which is the newest that it has answered."""
    met_s: float
    """When the connection was made, over whichever rail."""
    here_s: float
    """Since when there is one: another one in its place, over another rail, is no break."""
    linked: bool = False
    closed_s: float = 0.0
    """Since when there is none; 0: there is one, or there never was."""
    refused: bool = False
    """Its kernel says that no agent is there, or a firewall does."""
    was_silent: bool = False
    """It was lost because it was silent: that node or this one may have been cut off."""
    lost: str = ""
    """Why it counts as lost; empty while it does not."""
    lost_s: float = _LONG_AGO_S
    dialled_s: float = _LONG_AGO_S
    asked_s: float = _LONG_AGO_S
    beat_number: int = 0
    promised: int = -1
    """The highest number that it has promised anyone."""
    is_mute: bool = False
    """It is there, but has not answered when it was asked: nobody waits for it."""
    is_leaving: bool = False
    """It was asked to leave, and the run goes on without it."""
    has_left: bool = False
    """It has left: it counts as lost, and as no failure."""
    fitness: NodeFitness | None = None
    """Of its newest check; None: it has made none, or has not said yet."""


@dataclass
class FailureDetector:
    """All agents that the lead knows of, its own included."""

    me: NodeCard
    settings: MembershipSettings
    witness: WitnessView = field(default_factory=WitnessView)
    by_id: dict[str, PeerState] = field(default_factory=dict)
    has_met: bool = True
    """This agent has been with others since it was started."""
    _number: int = 0
    clocks: dict[str, ClockOffset] = field(default_factory=dict)
    """Of each node against ours, by node id."""
    _left_s: dict[int, float] = field(default_factory=dict)
    _awake_s: float = _LONG_AGO_S
    _faithful: set[Identity] = field(default_factory=set)
    """Agents that are dead, and had not stopped hearing this lead."""

    def __iter__(self) -> Iterator[PeerState]:
        return iter(list(self.by_id.values()))

    @property
    def here(self) -> list[NodeCard]:
        """Nodes that are connected and not lost."""
        return [peer.card for peer in self if peer.linked and not peer.lost]

    def is_heard(self, node_id: str, *, now_s: float) -> bool:
        """Its last message is not older than two heartbeats."""
        peer = self.get(node_id)
        if peer is None or peer.lost:
            return False
        is_late = now_s - peer.heard_s >= 2 * self.settings.heartbeat_s
        return node_id == self.me.node_id or not is_late

    def get(self, node_id: str) -> PeerState | None:
        return self.by_id.get(node_id)

    def put(self, card: NodeCard, *, now_s: float, linked: bool, has_answered: bool) -> PeerState:
        """Know this agent from now on, and no other one of its node.

        Args:
            card: of the agent.
            now_s: the time.
            linked: there is a connection to it.
            has_answered: it may be taken for one that hears this lead. Who was lost and is back
                has perhaps promised another one meanwhile, and is not, until it answers.
        """
        old = self.by_id.get(card.node_id)
        if old is not None and old.card.incarnation != card.incarnation:
            self._died(old, now_s)
        acked_s = now_s if has_answered else _LONG_AGO_S
        peer = PeerState(card, now_s, acked_s, met_s=now_s, here_s=now_s, linked=linked)
        self.by_id[card.node_id] = peer
        return peer

    def has_successor(self, who: Identity) -> bool:
        """Another agent runs on its node."""
        peer = self.by_id.get(who[0])
        return peer is not None and peer.card.incarnation != who[1]

    def refuses(self, node_id: str) -> bool:
        peer = self.by_id.get(node_id)
        return peer is not None and peer.refused

    def to_hear_the_end(self, ended_s: float, *, is_done: bool, now_s: float) -> set[str]:
        """Who is still waited for: nodes that are here, and those that were lost shortly before.

        The latter only of a run that is done: their agents may be started again, or were cut off,
        and would look for a run that is over.

        Args:
            ended_s: when its end was said first. Who refuses since then has heard it.
            is_done: nobody is in a hurry to see it end.
            now_s: the time.
        """
        limit_s = 2 * self.settings.deadline_s
        latest_s = ended_s + AWAIT_SILENT_S
        found = set()
        for one in self.by_id.values():
            until_s = ended_s
            if one.linked and not one.lost:
                until_s = min(max(one.here_s, ended_s), latest_s) + limit_s
            elif is_done and one.lost_s > ended_s - limit_s:
                was_here = one.lost_s >= ended_s  # it has heard of the end, and has gone
                dead_until_s = ended_s if was_here else ended_s + limit_s
                until_s = dead_until_s if one.refused else latest_s
            if now_s < until_s:
                found.add(one.card.node_id)
        return found

    def _died(self, peer: PeerState, now_s: float) -> None:
        if now_s - peer.acked_s < self.settings.cut_off_s:
            self._faithful.add(peer.card.identity)

    def opened(self, peer: PeerState, *, now_s: float) -> None:
        if not peer.linked:
            peer.here_s = now_s
        peer.linked, peer.refused, peer.closed_s = True, False, 0.0
        self.has_met = True
        peer.heard_s = peer.met_s = now_s

    def endpoints_without_agent(self) -> list[tuple[str, int]]:
        """Rendezvous endpoints at which no agent that is here listens."""
        cards = [peer.card for peer in self if not peer.lost]
        here = {card.further_endpoint for card in cards if card.endpoint or card.further_endpoint}
        return [one for at, one in enumerate(self.settings.endpoints) if at not in here]

    @property
    def linked(self) -> list[str]:
        return [node_id for node_id, peer in self.by_id.items() if peer.linked]

    @property
    def are_gone(self) -> bool:
        """Nobody of the run is left: it ended while this agent was started again, or cut off.

        The machines of all others say that no agent is there. If this agent has been with them, a
        firewall may say so too, or they may come back. Then one of them must have been silent
        before, and they must be enough to have gone on without it.
        """
        others = [one for one in self if one.card.node_id != self.me.node_id]
        was_apart = len(others) > 1 and any(one.was_silent for one in others)
        could_end = was_apart or not self.has_met
        return bool(others) and could_end and all(one.refused for one in others)

    # --- heartbeats ---------------------------------------------------------------------------

    def next_number(self, *, now_s: float) -> int:
        """The number of the heartbeat that leaves now."""
        self._number += 1
        self._left_s[self._number] = now_s
        limit_s = 2 * self.settings.deadline_s
        while now_s - self._left_s[next(iter(self._left_s))] > limit_s:
            del self._left_s[next(iter(self._left_s))]
        return self._number

    def beat(self, peer: PeerState, beat: Heartbeat, *, now_s: float) -> bool:
        """Whether this heartbeat says something newer than the last one."""
        left_s = self._left_s.get(beat.heard, _LONG_AGO_S)
        peer.acked_s = max(peer.acked_s, left_s)
        if left_s > _LONG_AGO_S and beat.heard_s and beat.number > peer.beat_number:
            clock = self.clocks.setdefault(peer.card.node_id, ClockOffset())
            clock.add(*(round(at_s * 1e9) for at_s in (left_s, beat.heard_s, beat.sent_s, now_s)))
        if beat.number <= peer.beat_number:
            return False
        peer.beat_number = beat.number
        peer.fitness = beat.fitness or peer.fitness
        return True

    def stood_still(self, *, now_s: float) -> None:
        """This process could hear nobody until now."""
        self._awake_s = now_s

    # --- silence ------------------------------------------------------------------------------

    def silent_s(self, peer: PeerState, *, now_s: float) -> float:
        """For how long it was not heard, or has not heard us."""
        since_s = max(min(peer.heard_s, peer.acked_s), peer.met_s, self._awake_s)
        return now_s - since_s

    def is_member_late(self, plan: GenerationPlan, *, now_s: float) -> bool:
        """Whether a node that runs ranks has missed a heartbeat, and may be about to be lost."""
        late_s = 2 * self.settings.heartbeat_s
        members = [self.by_id.get(node.node_id) for node in plan.members]
        return any(
            peer is not None
            and not peer.lost
            and peer.card.node_id != self.me.node_id
            and self.silent_s(peer, now_s=now_s) >= late_s
            for peer in members
        )

    def is_to_be_dialled(self, peer: PeerState, *, now_s: float) -> bool:
        if peer.linked or now_s - peer.dialled_s < self.settings.redial_s:
            return False
        peer.dialled_s = now_s
        return True

    def may_decide_without_me(self, plan: GenerationPlan, *, now_s: float) -> bool:
        """Whether the voters that may have stopped hearing this lead could replace it."""
        limit_s = self.settings.cut_off_s
        unheard = 0
        for card in plan.voters:
            if card.node_id == self.me.node_id or card.identity in self._faithful:
                continue
            peer = self.by_id.get(card.node_id)
            is_here = peer is not None and peer.card.identity == card.identity
            if peer is None or not is_here or now_s - peer.acked_s >= limit_s:
                unheard += 1
            elif peer.promised > plan.generation:
                unheard += 1  # it hears us, and is bound to another proposer
        if plan.witness and not self.witness.holds(plan.witness, limit_s, now_s=now_s):
            unheard += 1
        return 2 * unheard > len(electorate_of(plan))
