"""Finds the current leader, or decides that this agent proposes itself.

Runs in:  every agent. Pure.
Takes in: connections, refused connections, reports of a leader, time.
Gives:    the role of this agent; dials and requests; the decision to propose itself.
Survives: its leader: the next agent in the succession takes over, and every agent has the order.

    JOINING    looks for the run, at the endpoints or at an address from a peer
    GATHERING  listens at the first endpoint itself, and has no record of a run
    FOLLOWING  has a leader: as a member, as a spare, or outside the generation
    SEEKING    has lost its leader, or was restarted, and looks for the current leader
    LEADING    leads, or proposes itself
    ENDED      has learned that the run is over, or has given up

Rule 1: the first generation needs all nodes, and each must report that it has no plan. A
        new agent at the endpoint waits for a leader that may look for it before it starts a run.
        It starts none if a node with a plan of a run has joined it.
Rule 2: with a witness there is no endpoint. Nodes join the agent that holds the claim at the
        witness, for as long as that agent renews it.
Rule 3: every agent has the same order of succession: the voters of the newest plan that it knows,
        without those that do not answer.
"""

from collections.abc import Callable, Mapping
from enum import Enum

from ftrun.config.cluster import MembershipSettings
from ftrun.membership.events import WitnessAnswered
from ftrun.membership.fencing import SelfFencing
from ftrun.membership.gathering import InitialQuorum, JoinTimeout
from ftrun.membership.voter import Voter
from ftrun.membership.witness import WitnessView
from ftrun.records.membership import LeaderLost, SteppedDown
from ftrun.recovery.commands import Command, Connect, JournalEntry, Send, WitnessOperation
from ftrun.recovery.incidents import IncidentLog
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard
from ftrun.wire.cluster.membership import Heartbeat, Join, JoinPending, LeaderResigned

ASKED_AT_ONCE = 8
"""Number of agents that a restarted agent asks for the leader."""


class LeaderSuccession:
    """The search for the next leader."""

    def __init__(self, me: NodeCard) -> None:
        self._me = me
        self.lost: set[str] = set()
        """Nodes that do not answer, or whose kernels report that no agent is running."""
        self.refused: set[str] = set()
        """Nodes of `lost` whose kernels refused the connection."""

    def found(self) -> None:
        self.lost.clear()
        self.refused.clear()

    def lose(self, card: NodeCard | None, *, refused: bool = False) -> None:
        if card is not None and card.node_id != self._me.node_id:
            self.lost.add(card.node_id)
            if refused:
                self.refused.add(card.node_id)

    def next(self, plan: GenerationPlan | None) -> NodeCard | None:
        order = plan.voters if plan is not None else []
        card = next((card for card in order if card.node_id not in self.lost), None)
        return self._me if card is not None and card.node_id == self._me.node_id else card

    def known_nodes(self, plan: GenerationPlan | None) -> list[NodeCard]:
        """The agents to ask for the leader: the last known leader, then the succession."""
        if plan is None:
            return []
        others = [card for card in plan.voters if card.node_id != self._me.node_id]
        return sorted(others, key=lambda card: card.node_id != plan.leader)[:ASKED_AT_ONCE]


class MemberRole(Enum):
    """The state of one agent's search for a leader; see the module docstring."""

    JOINING = "joining"
    GATHERING = "bootstrapping"
    FOLLOWING = "following"
    SEEKING = "electing"
    LEADING = "leading"
    ENDED = "ended"


class LeaderDiscovery:
    """The leader of one agent, or its search for one."""

    def __init__(
        self,
        me: NodeCard,
        settings: MembershipSettings,
        follower: Voter,
        links: Mapping[str, int],
        become_leader: Callable[[float], list[Command]],
        *,
        witness: WitnessView,
        now_s: float,
    ) -> None:
        """Starts in the role that the persisted plan and the endpoint imply.

        `links` has the incarnations of the connected agents, by node id.
        """
        self.role = MemberRole.JOINING
        self.leader_card: NodeCard | None = None
        """The agent that it follows or tries to reach."""
        self.gatherer: InitialQuorum | None = None
        self.waiting = SelfFencing(settings, now_s=now_s)
        self.succession = LeaderSuccession(me)
        self.answer = "no node has answered yet"
        self.has_met = follower.newest_plan is None
        """This agent has followed a leader since it started, or knew no plan then."""
        self._me = me
        self._settings = settings
        self._follower = follower
        self._links = links
        self._become_leader = become_leader
        self._witness = witness
        self._timeout = JoinTimeout(settings, now_s=now_s)
        self._since_s = self._apart_s = self._next_poll_s = now_s
        self._leader_lost_s: float | None = None
        """Time of the last message of a lost leader; None: no leader was lost."""
        self._turn = -1
        """Index of the endpoint that was dialled last."""
        self._is_answered = False
        """An agent reported since the last dial of an endpoint that nodes gather there."""
        if follower.newest_plan is not None:  # an earlier agent of this node took part in the run
            self.role = MemberRole.SEEKING
        elif me.endpoint:
            self.role = MemberRole.GATHERING
            self.gatherer = InitialQuorum(me, settings, now_s=now_s)

    @property
    def reach(self) -> str:
        return self.gatherer.missing() if self.gatherer is not None else self.answer

    def may_end(self, here: Heartbeat) -> bool:
        """Whether this node may end by itself when its operator or scheduler asks for it."""
        if self.role in (MemberRole.JOINING, MemberRole.GATHERING):
            return bool(here.stops) or here.leaves
        # A drained node may hold state that the run needs: only the next leader releases it.
        return self.role is MemberRole.SEEKING and bool(here.stops)

    @property
    def is_over(self) -> bool:
        return self.role is MemberRole.ENDED

    def follows(self, node_id: str) -> bool:
        card = self.leader_card
        return self.role is MemberRole.FOLLOWING and card is not None and card.node_id == node_id

    def has_leader(self, *, now_s: float) -> bool:
        """Whether it receives from the leader of a chosen generation, which it must not desert."""
        if self.role is not MemberRole.FOLLOWING:
            return False  # a closed connection alone proves nothing, see failure_detector.py
        return not self._follower.is_in_ballot and not self.waiting.is_cut_off(now_s=now_s)

    def is_bound_beyond(self, generation: int, *, now_s: float) -> bool:
        """Whether it promised a later generation to a proposer that it still receives from."""
        follower = self._follower
        is_promised = follower.is_in_ballot and follower.vote.promised > generation
        proposer = follower.vote.proposer
        follows = proposer is not None and self.follows(proposer[0])
        return is_promised and follows and not self.waiting.is_cut_off(now_s=now_s)

    # --- the leader ---------------------------------------------------------------------------

    def follow(self, card: NodeCard, *, now_s: float) -> None:
        self.has_met = True
        self._found(card, MemberRole.FOLLOWING, now_s)
        self._apart_s = now_s

    def leader(self, *, now_s: float) -> None:
        self._found(self._me, MemberRole.LEADING, now_s)

    def hand_over(self, incidents: IncidentLog, *, now_s: float) -> None:
        follower = self._follower
        incidents.succeed(follower.incidents)
        if self.succession.lost and self._leader_lost_s is not None:
            incidents.sign(self._leader_lost_s)
        elif follower.agent_lost_s is not None and follower.newest_plan is not None:
            lost_s, follower.agent_lost_s = follower.agent_lost_s, None
            incidents.agent_lost(self._me.node_id, lost_s, now_s=now_s)

    def _found(self, card: NodeCard, role: MemberRole, now_s: float) -> None:
        self.leader_card, self.role, self.gatherer = card, role, None
        self.waiting.follow(now_s=now_s)
        self._follower.start_following()
        self.succession.found()

    def go_to(self, card: NodeCard, *, now_s: float) -> list[Command]:
        self.gatherer = None
        is_new = self.role is not MemberRole.JOINING or self.leader_card != card
        self.role, self.leader_card = MemberRole.JOINING, card
        if is_new:
            self._since_s = now_s
        return self._dial_node(card)

    def resign(self, body: LeaderResigned, *, now_s: float) -> list[Command]:
        """Follow the successor that this leader has named, which learns of it last."""
        last = body.successor.node_id
        others = sorted(self._links.keys() - {self._me.node_id}, key=lambda one: (one == last, one))
        found: list[Command] = [JournalEntry(SteppedDown(f"{body.reason}: node {last} leads"))]
        found += [Send(one, body) for one in others]
        return found + self.go_to(body.successor, now_s=now_s)

    def seek(self, reason: str, *, now_s: float, refused: bool = False) -> list[Command]:
        note = JournalEntry(LeaderLost(f"the leader is lost: {reason}"), announce=True)
        self.role = MemberRole.SEEKING
        self.answer = "no new leader yet"
        self._apart_s = now_s
        self._leader_lost_s = now_s if refused else now_s - self.waiting.unresponsive_s(now_s=now_s)
        return [note, *self.give_up(now_s=now_s, refused=refused)]

    def give_up(self, *, now_s: float, refused: bool = False) -> list[Command]:
        self.succession.lose(self.leader_card, refused=refused)
        self._since_s = now_s
        card = self.succession.next(self._follower.newest_plan)
        if card == self._me:
            return self._become_leader(now_s)
        self.leader_card = card
        if card is not None:
            self.role = MemberRole.SEEKING
            return self._dial_node(card)
        # This node is no voter, and no voter is left that could accept it.
        self.succession.found()
        self.role = MemberRole.JOINING
        return []

    def gathers(self, body: JoinPending, *, now_s: float) -> list[Command]:
        self.answer = f"{len(body.here)} of {body.needed} nodes are present"
        self._is_answered = True
        if self.role is MemberRole.JOINING and self._follower.newest_plan is not None:
            # No agent at the endpoint has a plan of the run, but this agent has.
            return self._become_leader(now_s)
        return []

    # --- the witness --------------------------------------------------------------------------

    def ask_witness(self, *, now_s: float) -> list[Command]:
        """Looks for a leader at the witness, or claims the role of gathering node."""
        is_blank = self._follower.newest_plan is None
        is_on_its_way = self.role is MemberRole.JOINING and self.leader_card is not None
        if is_on_its_way and now_s < self._next_poll_s:
            return []  # thousands of nodes may do so at once
        self._next_poll_s = now_s + self._settings.times.failure_timeout_s
        match self.role:
            case MemberRole.JOINING | MemberRole.GATHERING if is_blank:
                return self._witness.ask(WitnessOperation.CLAIM, now_s=now_s)
            case MemberRole.JOINING | MemberRole.SEEKING:
                return self._witness.ask(WitnessOperation.READ, now_s=now_s)
            case _:
                return []

    def witness_answered(self, event: WitnessAnswered, *, now_s: float) -> list[Command]:
        if not event.is_reached:
            self.answer = event.reason
            return []
        card, may_go = event.leader, self.role in (MemberRole.JOINING, MemberRole.GATHERING)
        if card is None or card == self.leader_card:
            return []
        if card.node_id == self._me.node_id:
            is_blank = card == self._me and self._follower.newest_plan is None
            return self._gather(event, now_s) if may_go and is_blank else []
        may_go |= self.role is MemberRole.SEEKING and card.node_id not in self.succession.lost
        return self.go_to(card, now_s=now_s) if may_go else []

    def _gather(self, event: WitnessAnswered, now_s: float) -> list[Command]:
        if self.gatherer is None:
            self.role, self.leader_card = MemberRole.GATHERING, None
            self.gatherer = InitialQuorum(self._me, self._settings, now_s=now_s)
        plan = event.register.plan if event.register is not None else None
        voters = plan.voters if plan is not None else []
        self.gatherer.remembered = frozenset(card.node_id for card in voters)
        return []

    # --- time ---------------------------------------------------------------------------------

    def was_paused(self, gap_s: float) -> list[Command]:
        self._since_s += gap_s
        if self.gatherer is not None:
            self.gatherer.was_paused(gap_s)
        card = self.leader_card
        if self.role is not MemberRole.FOLLOWING or card is None or not self._follower.is_member:
            return []
        return [Send(card.node_id, self.join(self.waiting.ask()))]

    def tick(self, *, now_s: float) -> list[Command]:
        deadline_s = self._settings.times.failure_timeout_s
        if self.role is MemberRole.FOLLOWING:
            unresponsive_s = self.waiting.unresponsive_s(now_s=now_s)
            if unresponsive_s < deadline_s or self.leader_card is None:
                return []
            reason = f"no heartbeat from {self.leader_card.node_id} for {unresponsive_s:.1f} s"
            return self.seek(reason, now_s=now_s)
        gathers = self.gatherer is not None
        waited_s = now_s - self._apart_s
        found = self._timeout.wait(waited_s, self.reach, gathers=gathers, now_s=now_s)
        if gathers or (now_s - self._since_s < deadline_s and not self._is_only_voter):
            return found
        return found + self._probe_further(now_s)

    @property
    def _is_only_voter(self) -> bool:
        """Whether the last agent of this node led alone, so that no other agent can lead now."""
        plan = self._follower.newest_plan
        is_alone = plan is not None and not self.succession.known_nodes(plan)
        return self.role is MemberRole.SEEKING and is_alone and not self._witness.is_used

    def _probe_further(self, now_s: float) -> list[Command]:
        if self.leader_card is None and self.role is MemberRole.SEEKING:
            # Restarted, and no agent names a leader: the connected agents agree on one.
            for card in self.succession.known_nodes(self._follower.newest_plan):
                if card.node_id not in self._links:
                    self.succession.lose(card)
        if self.role is MemberRole.SEEKING or self._follower.newest_plan is not None:
            return self.give_up(now_s=now_s)
        self.leader_card = None
        return []

    def dial_again(self) -> list[Command]:
        card = self.leader_card
        if self.role is MemberRole.GATHERING:
            return []
        if self.role is MemberRole.FOLLOWING and card is not None:
            is_linked = card.node_id in self._links
            if is_linked and self.waiting.question:
                return [Send(card.node_id, self.join(self.waiting.question))]
            return [] if is_linked else [Connect(card.host, card.port, card.node_id)]
        if card is not None:
            return self._dial_node(card)
        found: list[Command] = []
        if self.role is MemberRole.SEEKING:
            for one in self.succession.known_nodes(self._follower.newest_plan):
                found += self._dial_node(one)
            return found
        others = [one for one in sorted(self._links) if one != self._me.node_id]
        found += [Send(one, self.join()) for one in others]
        return found + self._dial_endpoint(has_others=bool(others))

    def _dial_endpoint(self, *, has_others: bool) -> list[Command]:
        # An agent that dials itself would refuse itself as another node of its name.
        endpoints, me = self._settings.endpoints, self._me
        own = {me.further_endpoint} if me.endpoint or me.further_endpoint else set()
        found = [one for at, one in enumerate(endpoints) if at not in own]
        is_answered, self._is_answered = self._is_answered, False
        if is_answered or not found or (has_others and len(endpoints) == 1):
            return []
        self._turn = (self._turn + 1) % len(found)
        return [Connect(*found[self._turn])]

    # --- requests -----------------------------------------------------------------------------

    def join(self, number: int = 0) -> Join:
        """The request to be accepted in the run; the answer repeats `number`."""
        newest = self._follower.newest_plan
        knows = newest.generation if newest is not None else -1
        return Join(self._me, str(self._settings.cluster_size), knows, number)

    def join_if_new(self, node_id: str) -> list[Command]:
        plan, question = self._follower.plan, self.waiting.question
        is_known = plan is not None and plan.card(self._me.node_id) == self._me
        return [Send(node_id, self.join(question))] if question or not is_known else []

    def _dial_node(self, card: NodeCard) -> list[Command]:
        if card.node_id in self._links:
            return [Send(card.node_id, self.join())]
        return [Connect(card.host, card.port, card.node_id)]
