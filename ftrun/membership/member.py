"""One agent's membership: how it finds other agents, which leader it follows, when it leads.

Runs in:  every agent, in the thread of the connections to other agents. Pure.
Takes in: membership events and the time.
Gives:    `Command`s for the network and for the executor of this node.
Survives: its leader, see discovery.py.
Source:   Hashicorp's Lifeguard: a node suspects itself first.

Rule 1: a proposer yields to a settled leader and to its own promise, never to another proposer.
"""

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import assert_never

import msgspec

from ftrun.config.cluster import MembershipSettings
from ftrun.errors import ExitCode
from ftrun.membership.discovery import LeaderDiscovery, MemberRole
from ftrun.membership.events import (
    ConnectFailed,
    ConnectionClosed,
    ConnectionOpened,
    Happening,
    MessageReceived,
    NodeReported,
    Passing,
    RunFinished,
    WitnessAnswered,
)
from ftrun.membership.fencing import RankSuspension
from ftrun.membership.leader.leader import Leader
from ftrun.membership.voter import OwnNews, Voter
from ftrun.membership.witness import WitnessView
from ftrun.records.membership import SteppedDown
from ftrun.recovery.commands import (
    Command,
    Connect,
    EndRun,
    JournalEntry,
    KillWorkers,
    ProbePath,
    Quiesce,
    Send,
    StartRanks,
)
from ftrun.recovery.generation_monitor import GenerationMonitor
from ftrun.wire.cluster import membership as say
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard
from ftrun.wire.cluster.membership import Heartbeat, LeaderHeartbeat
from ftrun.wire.cluster.messages import (
    AnyClusterMessage,
    ProbeLinkResult,
    ProbePathRequest,
    ProbePathResult,
    RailSilent,
)


class Member:
    """The membership state of one agent."""

    def __init__(
        self,
        me: NodeCard,
        settings: MembershipSettings,
        oversight: Callable[[], GenerationMonitor],
        *,
        now_s: float,
        kept: GenerationPlan | None = None,
        took_effect: bool = False,
    ) -> None:
        self.me = me
        self.follower = Voter(me, kept, took_effect=took_effect)
        self.lead: Leader | None = None
        self.witness = WitnessView(is_used=settings.has_witness)
        self.holding = RankSuspension(self.follower, settings)
        self._settings = settings
        self._oversight = oversight
        self._links: dict[str, int] = {me.node_id: me.incarnation}
        self._to_self: deque[AnyClusterMessage] = deque()
        self._here = Heartbeat(generation=-1)
        self._beat_number = 0
        self._leader_numbers = count(1)
        self._now_s = now_s
        self._beat_due_s = self._dial_due_s = now_s
        self._allegiance = LeaderDiscovery(
            me,
            settings,
            self.follower,
            self._links,
            self._take_the_lead,
            witness=self.witness,
            now_s=now_s,
        )

    @property
    def role(self) -> MemberRole:
        return self._allegiance.role

    @property
    def is_held(self) -> bool:
        return self.holding.is_on

    @property
    def lead_card(self) -> NodeCard | None:
        return self._allegiance.lead_card

    @property
    def reach(self) -> str:
        return self._allegiance.reach

    def handle(self, event: Happening, *, now_s: float) -> list[Command]:
        if self._allegiance.is_over:
            return []
        self._now_s = now_s
        found = [*self._mind_the_gap(now_s), *self._handle(event, now_s)]
        done: list[Command] = []
        self._sort(found, done, now_s)
        if not self._allegiance.is_over:
            is_doubtful = self.lead.is_doubtful if self.lead is not None else None
            waiting = self._allegiance.waiting
            held = self.holding.look(waiting, is_doubtful=is_doubtful, now_s=now_s)
            self._sort(held, done, now_s)
        return done

    def _sort(self, commands: list[Command], done: list[Command], now_s: float) -> None:
        """Handles messages to this agent itself; drops messages to nodes without a connection."""
        queue = deque(commands)
        while queue or self._to_self:
            while queue:
                command = queue.popleft()
                if isinstance(command, Send) and command.node_id == self.me.node_id:
                    self._to_self.append(command.message)
                    continue
                if isinstance(command, Send) and command.node_id not in self._links:
                    continue
                if isinstance(command, EndRun):
                    self._allegiance.role = MemberRole.ENDED
                elif isinstance(command, Quiesce | KillWorkers | StartRanks):
                    self.holding.is_on = False
                done.append(command)
            if self._to_self:
                queue.extend(self._hear(self.me.node_id, self._to_self.popleft(), now_s))

    def _handle(self, event: Happening, now_s: float) -> list[Command]:
        if isinstance(event, OwnNews):
            return self.follower.has_happened(event)
        match event:
            case ConnectionOpened():
                return self._opened(event, now_s)
            case ConnectionClosed():
                return self._closed(event.node_id, now_s)
            case ConnectFailed():
                return self._dial_failed(event, now_s)
            case MessageReceived():
                return self._hear(event.node_id, event.message, now_s)
            case NodeReported():
                return self._here_is(event, now_s)
            case WitnessAnswered():
                return self._witness_said(event, now_s)
            case RunFinished(why):
                return [] if self._hears_lead(now_s) else [EndRun(0, why, goes_on=True)]
            case Passing():
                return self._passing(now_s)
            case _:
                assert_never(event)

    # --- connections --------------------------------------------------------------------------

    def _opened(self, event: ConnectionOpened, now_s: float) -> list[Command]:
        node_id = event.node_id
        self._links[node_id] = event.incarnation
        if self.lead is not None:
            return self.lead.opened(node_id, event.incarnation, now_s=now_s)
        if self._follows(node_id):
            if self.lead_card is not None and self.lead_card.incarnation != event.incarnation:
                why = f"the agent of {node_id} was restarted"
                return self._allegiance.seek(why, now_s=now_s)
            return [Send(node_id, self._beat()), *self._join_if_new(node_id)]
        seeks = self.role in (MemberRole.JOINING, MemberRole.SEEKING)
        return [Send(node_id, self._allegiance.join())] if seeks else []

    def _closed(self, node_id: str, now_s: float) -> list[Command]:
        self._links.pop(node_id, None)
        if self.lead is not None:
            return self.lead.closed(node_id, now_s=now_s)
        if self._allegiance.gatherer is not None:
            self._allegiance.gatherer.gone(node_id)
        if self._follows(node_id) and self.lead_card is not None:
            return [Connect(self.lead_card.host, self.lead_card.port, node_id)]
        return []

    def _dial_failed(self, event: ConnectFailed, now_s: float) -> list[Command]:
        if event.node_id in self._links:
            return []
        self._allegiance.answer = event.why
        if event.final and self.role is MemberRole.JOINING:
            return [EndRun(ExitCode.USAGE, event.why)]
        if self.lead is not None:
            return self.lead.dial_failed(event.node_id, refused=event.refused, now_s=now_s)
        card = self.lead_card
        if not event.refused or card is None or card.node_id != event.node_id:
            return []
        if self.role is MemberRole.FOLLOWING:
            why = f"{event.node_id} refuses the connection"
            return self._allegiance.seek(why, now_s=now_s, refused=True)
        if self.role is MemberRole.SEEKING or self.follower.newest_plan is not None:
            return self._allegiance.give_up(now_s=now_s, refused=True)
        return []

    # --- messages -----------------------------------------------------------------------------

    def _hear(self, sender: str, body: AnyClusterMessage, now_s: float) -> list[Command]:
        found = self._lead_hears(sender, now_s) if self.lead is not None else []
        return found + self._take(sender, body, now_s)

    def _take(self, sender: str, body: AnyClusterMessage, now_s: float) -> list[Command]:
        match body:
            case say.Join():
                return self._asked_to_join(sender, body, now_s)
            case say.LeaderInfo():
                return self._told_of_lead(sender, body, now_s)
            case say.JoinPending():
                return self._allegiance.gathers(body, now_s=now_s)
            case say.JoinAccepted():
                return self._taken_in(sender, body, now_s)
            case say.JoinRejected():
                return [EndRun(ExitCode.USAGE, f"{sender} rejects this node: {body.why}")]
            case say.Prepare():
                return self._prepare(sender, body, now_s)
            case say.Accept():
                return self._announced(sender, body, now_s)
            case LeaderHeartbeat():
                return self._lead_beat(sender, body, now_s)
            case ProbePathRequest():
                return [ProbePath(sender, body)]
            case _:
                return self._as_lead(sender, body, now_s)

    def _lead_hears(self, sender: str, now_s: float) -> list[Command]:
        """Adds a lost node again when it sends a message; the active generation continues."""
        assert self.lead is not None
        self.lead.heard(sender, now_s=now_s)
        peer = self.lead.known.get(sender)
        if peer is None or not peer.lost or peer.card.incarnation != self._links.get(sender):
            return []
        return self.lead.back_again(peer, now_s=now_s)

    def _as_lead(self, sender: str, body: AnyClusterMessage, now_s: float) -> list[Command]:
        """Handles messages to a leader; drops them if this agent no longer leads."""
        lead = self.lead
        peer = lead.known.get(sender) if lead is not None else None
        if lead is None or peer is None or peer.card.incarnation != self._links.get(sender):
            return []
        match body:
            case say.Promise():
                return lead.promised(body, now_s=now_s)
            case say.PrepareRejected():
                if (other := self._gives_way_to(lead, body)) is not None:
                    return self._step_down(other, now_s)
                return lead.not_promised(body, now_s=now_s)
            case say.Accepted():
                return lead.accepted(sender, body, now_s=now_s)
            case Heartbeat():
                return lead.beat(sender, body, now_s=now_s)
            case ProbeLinkResult() | ProbePathResult() | RailSilent():
                return lead.told(sender, body, now_s=now_s)
            case _:
                return []

    def _gives_way_to(self, lead: Leader, body: say.PrepareRejected) -> NodeCard | None:
        """The leader that this proposer yields to; None if its node refuses dials."""
        if body.lead is None or lead.is_settled or lead.known.refuses(body.lead.node_id):
            return None
        return body.lead if body.lead_generation >= self.follower.generation else None

    def _prepare(self, sender: str, body: say.Prepare, now_s: float) -> list[Command]:
        is_mine = sender == self.me.node_id
        hears = self._hears_lead(now_s) and not self._follows(sender) and not is_mine
        found = self.follower.prepare(sender, body, self.lead_card, hears_lead=hears)
        vote = self.follower.vote
        is_promised = vote.promised == body.generation and vote.proposer == body.card.identity
        if is_promised and not hears and not is_mine and not self._follows(sender):
            self._follow(body.card, now_s)
        return found

    def _announced(self, sender: str, body: say.Accept, now_s: float) -> list[Command]:
        if self._follows(sender):
            self._allegiance.waiting.heard_s = now_s
            if body.plan.roster:
                return self.follower.enrol(sender, body.plan, (sender, self._links[sender]))
        proposer = self.follower.vote.proposer
        if proposer is None or proposer[0] != sender or body.plan.roster:
            return []
        return self.follower.announce(sender, body, proposer)

    def _lead_beat(self, sender: str, body: LeaderHeartbeat, now_s: float) -> list[Command]:
        if not self._follows(sender):
            return []
        if body.ended and self.lead is not None:
            return []  # it ends after all other nodes have acknowledged the end
        self._allegiance.waiting.heard_s = now_s
        self._allegiance.waiting.lead_says_hold = body.is_held
        found: list[Command] = []
        if not self.follower.knows_of(body):
            found.append(Send(sender, self._allegiance.join()))
        orders = self.follower.obey(sender, body, now_s=now_s)
        if self.follower.is_ended:
            # The leader waits for this acknowledgement before it ends itself.
            found.append(Send(sender, msgspec.structs.replace(self._beat(), state="ended")))
        return found + orders

    def _asked_to_join(self, sender: str, body: say.Join, now_s: float) -> list[Command]:
        if why := self._settings.wishes.refusal(body.nnodes):
            return [Send(sender, say.JoinRejected(why))]
        if self._allegiance.gatherer is not None:
            return self._allegiance.gatherer.join(sender, body, now_s=now_s)
        lead = self.lead
        if lead is not None:
            if not lead.farewell.is_told(sender):
                return []  # the majority may continue without this leader
            found = lead.add(body.card, now_s=now_s, linked=True, knows=body.knows)
            # Unless `add` has ended this leadership, or this node has no plan yet.
            if self.lead is lead and self.follower.plan is not None:
                accepted = say.JoinAccepted(self.follower.plan, body.number, self.me)
                found.append(Send(sender, accepted))
            return found
        known, follows = self.lead_card, self.role is MemberRole.FOLLOWING
        is_told = follows and known is not None and known.node_id != sender
        return [self._lead_is(sender, now_s)] if is_told else []

    def _told_of_lead(self, sender: str, body: say.LeaderInfo, now_s: float) -> list[Command]:
        if body.card.node_id == self.me.node_id or self._follows(body.card.node_id):
            return []
        hears, known = self._hears_lead(now_s), self.follower.generation
        if self.lead is not None and body.is_settled and body.generation >= known + hears:
            return self._step_down(body.card, now_s)
        if hears:
            return [] if body.is_settled else [self._lead_is(sender, now_s)]  # two leaders
        if self.lead is not None:
            # Another proposer: the ballots decide which one yields.
            return self.lead.meet(body.card, now_s=now_s)
        if self.role is MemberRole.FOLLOWING and not body.is_settled:
            return [self._lead_is(sender, now_s)]
        if body.card.node_id in self._allegiance.succession.refused and not body.is_settled:
            return []
        return self._allegiance.go_to(body.card, now_s=now_s)

    def _taken_in(self, sender: str, body: say.JoinAccepted, now_s: float) -> list[Command]:
        plan = body.plan
        if self.lead is not None or plan.generation < self.follower.generation:
            return []
        card = plan.card(sender) or body.lead
        if card is None or plan.lead != sender or card.incarnation != self._links.get(sender):
            return []
        if not self._follows(sender):
            if self._allegiance.is_bound_beyond(plan.generation, now_s=now_s):
                return []
            self._follow(card, now_s)
        self._allegiance.waiting.heard_s = now_s
        self._allegiance.waiting.answered(body.number)
        return self.follower.take_current(plan)

    # --- following and leading ----------------------------------------------------------------

    def _follow(self, card: NodeCard, now_s: float) -> None:
        self.lead = None
        self._allegiance.follow(card, now_s=now_s)

    def _step_down(self, card: NodeCard, now_s: float) -> list[Command]:
        self.lead = None
        note = JournalEntry(SteppedDown(f"node {card.node_id} leads"))
        return [note, *self._allegiance.go_to(card, now_s=now_s)]

    def _take_the_lead(self, now_s: float) -> list[Command]:
        plan = self.follower.newest_plan
        cards = plan.voters if plan is not None else []
        lost = self._allegiance.succession.lost
        why = "the leader is lost" if lost else "the agent was restarted"
        return self._lead_from(cards, now_s, why=why)

    def _lead_from(self, cards: list[NodeCard], now_s: float, *, why: str) -> list[Command]:
        follower, succession = self.follower, self._allegiance.succession
        lead = Leader(
            self.me,
            self._settings,
            self._oversight(),
            follower.plan,
            follower.newest_plan,
            links=self._links,
            witness=self.witness,
        )
        self.lead = lead
        lead.known.numbers, lead.known.has_met = self._leader_numbers, self._allegiance.has_met
        self._allegiance.hand_over(lead.oversight.incidents, now_s=now_s)
        for card in [*(one for one in cards if one.node_id != self.me.node_id), self.me]:
            linked = lead.has_link(card)
            peer = lead.known.put(card, now_s=now_s, linked=linked, has_answered=True)
            peer.refused = card.node_id in succession.refused
            if card.node_id in succession.lost:
                peer.lost, peer.was_silent = "the leader is lost", not peer.refused
        lost = set(succession.lost)
        self._allegiance.lead(now_s=now_s)
        return lead.succeed(lost, why, follower.plan_since_s(now_s=now_s), now_s=now_s)

    # --- time ---------------------------------------------------------------------------------

    def _passing(self, now_s: float) -> list[Command]:
        found: list[Command] = []
        gatherer = self._allegiance.gatherer
        if gatherer is not None and gatherer.is_complete(now_s=now_s):
            cards = list(gatherer.cards.values())
            found += self._lead_from(cards, now_s, why="the run begins")
        found += (self.lead or self._allegiance).passing(now_s=now_s)
        if now_s >= self._dial_due_s:
            self._dial_due_s = now_s + self._settings.redial_s
            found += self._dial_again()
        if now_s >= self._beat_due_s:
            self._beat_due_s = now_s + self._settings.times.heartbeat_s
            found += self._tell(now_s)
            found += (self.lead or self._allegiance).ask_witness(now_s=now_s)
        return found

    def _witness_said(self, event: WitnessAnswered, now_s: float) -> list[Command]:
        if event.is_final:
            return [EndRun(ExitCode.USAGE, event.why)]
        found = self.witness.said(event, now_s=now_s)
        return found + (self.lead or self._allegiance).witness_said(event, now_s=now_s)

    def _dial_again(self) -> list[Command]:
        if self.lead is None:
            return self._allegiance.dial_again()
        newcomer = self.witness.lead
        if newcomer is not None and newcomer.node_id not in self._links:
            return [Connect(newcomer.host, newcomer.port, newcomer.node_id)]
        return [Connect(host, port) for host, port in self.lead.known.endpoints_without_agent()]

    def _tell(self, now_s: float) -> list[Command]:
        if self.lead is not None:
            return [Send(self.me.node_id, self._beat()), *self.lead.heartbeat(now_s=now_s)]
        lead = self.lead_card if self.role is MemberRole.FOLLOWING else None
        return [Send(lead.node_id, self._beat())] if lead is not None else []

    def _here_is(self, event: NodeReported, now_s: float) -> list[Command]:
        beat = self._here = event.beat
        if not event.is_urgent:
            return []
        if self._allegiance.may_end(beat):
            is_new = self.follower.newest_plan is None
            why = "before the run had started" if is_new else "while no generation was running"
            return [EndRun(128 + (beat.stop_signal or 15), f"stopped {why}")]
        if self.lead is not None:
            return [Send(self.me.node_id, self._beat())]
        return self._tell(now_s)

    def _mind_the_gap(self, now_s: float) -> list[Command]:
        gap_s = self._allegiance.waiting.stood_still_s(now_s=now_s)
        if not gap_s:
            return []
        self._allegiance.stood_still(gap_s)
        if self.lead is not None:
            self.lead.stood_still(now_s=now_s)
            return []
        card = self.lead_card
        if self.role is not MemberRole.FOLLOWING or card is None or not self.follower.is_member:
            return []
        return [Send(card.node_id, self._allegiance.join(self._allegiance.waiting.ask()))]

    # --- state and messages -------------------------------------------------------------------

    def _follows(self, node_id: str) -> bool:
        if self.lead is not None:
            return node_id == self.me.node_id
        return self._allegiance.follows(node_id)

    def _hears_lead(self, now_s: float) -> bool:
        if self.lead is not None:
            is_sure = self.lead.is_settled and not self.lead.is_doubtful
            return is_sure or self.lead.farewell.ends_the_run
        return self._allegiance.hears_lead(now_s=now_s)

    def _lead_is(self, node_id: str, now_s: float) -> Send:
        assert self.lead_card is not None
        known, is_led = self.follower.generation, self._hears_lead(now_s)
        return Send(node_id, say.LeaderInfo(self.lead_card, known, is_led))

    def _join_if_new(self, node_id: str) -> list[Command]:
        plan = self.follower.plan
        is_known = plan is not None and plan.card(self.me.node_id) == self.me
        question = self._allegiance.waiting.question
        return [Send(node_id, self._allegiance.join(question))] if question or not is_known else []

    def _beat(self) -> Heartbeat:
        self._beat_number += 1
        return self.follower.beat(self._here, self._beat_number, now_s=self._now_s)
