"""The leader's view of the other agents, and its lease: whether it may have been replaced.

Runs in:  the agent that leads, or that proposes itself. Pure.
Takes in: connections, heartbeats, time.
Gives:    which nodes are lost, which to dial, whether this leader may have been replaced.

Rule 1: a closed connection leads to one dial. A node that refuses is lost at once. A node that does
        not answer is lost after the deadline. Neither proves that an agent is dead.
Rule 2: a node that cannot receive from the leader counts as failed too. Each heartbeat therefore
        acknowledges the number of the last leader heartbeat it received. A fault that one side
        alone cannot see, such as a network that passes one direction only, is seen by both sides
        at the same time.
Rule 3: the time without a heartbeat counts only while this process could receive, because it may
        have been paused itself. Decisions of other agents during that pause do not wait for it.
Rule 4: a restarted voter cannot have helped to replace this leader only if its last incarnation had
        acknowledged the leader until shortly before. Otherwise it may have helped, whatever runs
        on its node now.
Rule 5: the lease expires before any agent could have replaced this leader. Until the lease is
        valid again, the leader makes no decisions.
Rule 6: if the lease stays expired, only a ballot restores it: the nodes do not return, or their
        agents were restarted and cannot report what their predecessors promised.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from ftrun.config.cluster import MembershipSettings
from ftrun.membership.ballots import electorate_of
from ftrun.membership.witness import WitnessView
from ftrun.monitor.node_fitness import NodeFitness
from ftrun.monitor.slow.samples import ClockOffset
from ftrun.wire.cluster.generation import GenerationPlan, Identity, NodeCard
from ftrun.wire.cluster.membership import Heartbeat

AWAIT_UNRESPONSIVE_S = 10.0
"""Seconds that a leader waits after a good end for nodes that were lost shortly before."""

SHOWN_S = 24 * 3600.0
MAX_LOST_SHOWN = 100
"""Replaced nodes are shown for a day, and this number of them, the last ones."""

_LONG_AGO_S = -1e9


@dataclass
class PeerState:
    """The leader's state of one agent, its own included."""

    card: NodeCard
    received_s: float
    """Time of its last message."""
    acked_s: float
    """When this leader sent the newest heartbeat that the agent has acknowledged."""
    met_s: float
    """When the current connection was made, over any rail."""
    here_s: float
    """Time since which it is connected; a connection over another rail that replaces it is no
    break."""
    linked: bool = False
    closed_s: float = 0.0
    """Time since which it is not connected; 0: it is, or never was."""
    refused: bool = False
    """Its kernel, or a firewall, reports that no agent is listening."""
    was_unresponsive: bool = False
    """It was lost for missing heartbeats: that node or this one may have been cut off."""
    lost: str = ""
    """Why it counts as lost; empty if it does not."""
    lost_s: float = _LONG_AGO_S
    dialled_s: float = _LONG_AGO_S
    asked_s: float = _LONG_AGO_S
    heartbeat_number: int = 0
    promised: int = -1
    """The highest number that it has promised to any proposer."""
    is_unresponsive: bool = False
    """It is connected but did not answer a prepare or accept in time: no ballot waits for it."""
    is_leaving: bool = False
    """It is draining, and the run continues without it."""
    has_left: bool = False
    """It has drained: it counts as lost, but not as failed."""
    fitness: NodeFitness | None = None
    """Result of its newest check; None: no check, or not reported yet."""
    is_below_median: bool = False
    """Its figures are far below those of the other nodes of the generation."""


@dataclass
class FailureDetector:
    """All agents known to the leader, its own included."""

    me: NodeCard
    settings: MembershipSettings
    witness: WitnessView = field(default_factory=WitnessView)
    by_id: dict[str, PeerState] = field(default_factory=dict)
    has_met: bool = True
    """This agent has been connected to others since it started."""
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    """Numbers of the leader heartbeats. An agent that leads again continues them: a node that did
    not follow another leader in between ignores heartbeats that are not newer."""
    clocks: dict[str, ClockOffset] = field(default_factory=dict)
    """Clock offset of each node against this one, by node id."""
    _left_s: dict[int, float] = field(default_factory=dict)
    _awake_s: float = _LONG_AGO_S
    _acknowledged: set[Identity] = field(default_factory=set)
    """Ended agents that acknowledged this leader until shortly before they ended."""

    def __iter__(self) -> Iterator[PeerState]:
        return iter(list(self.by_id.values()))

    @property
    def here(self) -> list[NodeCard]:
        return [peer.card for peer in self if peer.linked and not peer.lost]

    def shown(self, plan: GenerationPlan | None, *, now_s: float) -> list[PeerState]:
        """All agents, without the nodes that were lost long ago and are no voters any more."""
        voters = {card.node_id for card in plan.voters} if plan is not None else set()
        replaced = [peer for peer in self if peer.lost and peer.card.node_id not in voters]
        # A node that was lost with the last leader has no time of its own.
        lost_s = {peer.card.node_id: max(peer.lost_s, peer.received_s) for peer in replaced}
        newest = sorted(lost_s, key=lambda one: lost_s[one])[-MAX_LOST_SHOWN:]
        kept = {one for one in newest if now_s - lost_s[one] < SHOWN_S}
        return [
            peer for peer in self if peer.card.node_id in kept or peer.card.node_id not in lost_s
        ]

    def is_responding(self, node_id: str, *, now_s: float) -> bool:
        """Whether its last message is less than two heartbeat periods old."""
        peer = self.get(node_id)
        if peer is None or peer.lost:
            return False
        is_late = now_s - peer.received_s >= 2 * self.settings.times.heartbeat_interval_s
        return node_id == self.me.node_id or not is_late

    def get(self, node_id: str) -> PeerState | None:
        return self.by_id.get(node_id)

    def put(self, card: NodeCard, *, now_s: float, linked: bool, has_answered: bool) -> PeerState:
        """Adds this agent, in place of any earlier agent of its node.

        If `has_answered`, it counts as acknowledging this leader from now on. A node that was lost
        and has returned may have promised another proposer in between. It does not count until it
        acknowledges a heartbeat.
        """
        old = self.by_id.get(card.node_id)
        has_ended = old is not None and old.card.incarnation != card.incarnation
        if old and has_ended and now_s - old.acked_s < self.settings.times.self_fencing_timeout_s:
            self._acknowledged.add(old.card.identity)
        acked_s = now_s if has_answered else _LONG_AGO_S
        peer = PeerState(card, now_s, acked_s, met_s=now_s, here_s=now_s, linked=linked)
        self.by_id[card.node_id] = peer
        return peer

    def has_successor(self, identity: Identity) -> bool:
        peer = self.by_id.get(identity[0])
        return peer is not None and peer.card.incarnation != identity[1]

    def refuses(self, node_id: str) -> bool:
        peer = self.by_id.get(node_id)
        return peer is not None and peer.refused

    def to_receive_the_end(self, ended_s: float, *, is_done: bool, now_s: float) -> set[str]:
        """The nodes that must still acknowledge the end: connected ones, and recently lost ones.

        Lost nodes are awaited only if the run is done. Their agents may be restarting or were cut
        off, and would look for a run that is over. A node that refuses since `ended_s` has received
        the end.
        """
        limit_s = 2 * self.settings.times.failure_timeout_s
        latest_s = ended_s + AWAIT_UNRESPONSIVE_S
        found = set()
        for one in self.by_id.values():
            until_s = ended_s
            if one.linked and not one.lost:
                until_s = min(max(one.here_s, ended_s), latest_s) + limit_s
            elif is_done and one.lost_s > ended_s - limit_s:
                was_here = one.lost_s >= ended_s  # it has received the end, and ended
                dead_until_s = ended_s if was_here else ended_s + limit_s
                until_s = dead_until_s if one.refused else latest_s
            if now_s < until_s:
                found.add(one.card.node_id)
        return found

    def opened(self, peer: PeerState, *, now_s: float) -> None:
        if not peer.linked:
            peer.here_s = now_s
        peer.linked, peer.refused, peer.closed_s = True, False, 0.0
        self.has_met = True
        peer.received_s = peer.met_s = now_s

    def endpoints_without_agent(self) -> list[tuple[str, int]]:
        cards = [peer.card for peer in self if not peer.lost]
        here = {card.further_endpoint for card in cards if card.endpoint or card.further_endpoint}
        return [one for at, one in enumerate(self.settings.endpoints) if at not in here]

    @property
    def linked(self) -> list[str]:
        return [node_id for node_id, peer in self.by_id.items() if peer.linked]

    @property
    def are_gone(self) -> bool:
        """Whether all others have ended: the run ended while this agent restarted or was cut off.

        The machines of all others refuse the connection. If this agent has been connected to them,
        a firewall may refuse as well, or they may return. In that case, one of them must have been
        lost for missing heartbeats, and there must be at least two, so that they could have
        continued without it.
        """
        others = [one for one in self if one.card.node_id != self.me.node_id]
        was_apart = len(others) > 1 and any(one.was_unresponsive for one in others)
        could_end = was_apart or not self.has_met
        return bool(others) and could_end and all(one.refused for one in others)

    # --- heartbeats ---------------------------------------------------------------------------

    def next_number(self, *, now_s: float) -> int:
        number = next(self.numbers)
        self._left_s[number] = now_s
        limit_s = 2 * self.settings.times.failure_timeout_s
        while now_s - self._left_s[next(iter(self._left_s))] > limit_s:
            del self._left_s[next(iter(self._left_s))]
        return number

    def begin(
        self,
        cards: Collection[NodeCard],
        links: Mapping[str, int],
        lost: Collection[str],
        refused: Collection[str],
        *,
        now_s: float,
    ) -> None:
        """Adds the agents that a new leader knows of; some of them are lost with their leader."""
        for card in [*(one for one in cards if one.node_id != self.me.node_id), self.me]:
            linked = links.get(card.node_id) == card.incarnation
            peer = self.put(card, now_s=now_s, linked=linked, has_answered=True)
            peer.refused = card.node_id in refused
            if card.node_id in lost:
                peer.lost, peer.was_unresponsive = "the leader is lost", not peer.refused

    def received(self, node_id: str, *, now_s: float) -> PeerState | None:
        peer = self.get(node_id)
        if peer is not None and not peer.lost:
            peer.received_s = now_s
        return peer

    def heartbeat_received(self, peer: PeerState, heartbeat: Heartbeat, *, now_s: float) -> bool:
        """Records a heartbeat; returns whether it is newer than the last one."""
        left_s = self._left_s.get(heartbeat.received, _LONG_AGO_S)
        peer.acked_s = max(peer.acked_s, left_s)
        if heartbeat.number <= peer.heartbeat_number:
            return False
        if left_s > _LONG_AGO_S and heartbeat.received_s:
            clock = self.clocks.setdefault(peer.card.node_id, ClockOffset())
            times_s = (left_s, heartbeat.received_s, heartbeat.sent_s, now_s)
            clock.add(*(round(at_s * 1e9) for at_s in times_s))
        peer.heartbeat_number = heartbeat.number
        peer.fitness = heartbeat.fitness or peer.fitness
        return True

    def was_paused(self, *, now_s: float) -> None:
        self._awake_s = now_s

    # --- time without heartbeats --------------------------------------------------------------

    def unresponsive_s(self, peer: PeerState, *, now_s: float) -> float:
        """Seconds without its messages or without its acknowledgements."""
        since_s = max(min(peer.received_s, peer.acked_s), peer.met_s, self._awake_s)
        return now_s - since_s

    def has_late_member(self, plan: GenerationPlan, *, now_s: float) -> bool:
        """Whether a member has missed a heartbeat, and may soon be lost."""
        late_s = 2 * self.settings.times.heartbeat_interval_s
        others = {one.node_id for one in plan.members} - {self.me.node_id}
        here = [peer for peer in self if not peer.lost and peer.card.node_id in others]
        return any(self.unresponsive_s(peer, now_s=now_s) >= late_s for peer in here)

    def has_unresponsive(self, node_ids: Iterable[str], *, now_s: float) -> bool:
        """Whether one of these nodes that is not lost has sent nothing for two heartbeat periods.

        A node on a slow link may acknowledge late forever. It counts as late, not as unresponsive.
        """
        here = [one for one in node_ids if one in self.by_id and not self.by_id[one].lost]
        return any(not self.is_responding(one, now_s=now_s) for one in here)

    def is_to_be_dialled(self, peer: PeerState, *, now_s: float) -> bool:
        if peer.linked or now_s - peer.dialled_s < self.settings.redial_s:
            return False
        peer.dialled_s = now_s
        return True

    def may_decide_without_me(self, plan: GenerationPlan, *, now_s: float) -> bool:
        """Whether the voters that may not receive from this leader could replace it."""
        limit_s = self.settings.times.self_fencing_timeout_s
        missed = 0
        for card in plan.voters:
            if card.node_id == self.me.node_id or card.identity in self._acknowledged:
                continue
            peer = self.by_id.get(card.node_id)
            is_here = peer is not None and peer.card.identity == card.identity
            if peer is None or not is_here or now_s - peer.acked_s >= limit_s:
                missed += 1
            elif peer.promised > plan.generation:
                # It receives our heartbeats but has promised a higher ballot, so it may vote for
                # another leader.
                missed += 1
        if plan.witness and not self.witness.holds(plan.witness, limit_s, now_s=now_s):
            missed += 1
        return 2 * missed > len(electorate_of(plan))


class LeadershipLease:
    """The lease of one leader; `is_on` means expired."""

    def __init__(self, settings: MembershipSettings) -> None:
        self.is_on = False
        self._settings = settings
        self._since_s = 0.0

    def poll(self, plan: GenerationPlan | None, peers: FailureDetector, *, now_s: float) -> bool:
        """Updates the lease; returns whether its state has changed.

        Without an active plan there is no leadership that could be replaced.
        """
        is_on = plan is not None and peers.may_decide_without_me(plan, now_s=now_s)
        if is_on == self.is_on:
            return False
        self.is_on, self._since_s = is_on, now_s
        return True

    def stays(self, *, now_s: float) -> bool:
        return self.is_on and now_s - self._since_s >= self._settings.times.failure_timeout_s
