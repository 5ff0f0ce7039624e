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
    ClockTick,
    ConnectFailed,
    ConnectionClosed,
    ConnectionOpened,
    Happening,
    MessageReceived,
    NodeReported,
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
from ftrun.wire.cluster import membership as messages
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard
from ftrun.wire.cluster.membership import Heartbeat, LeaderHeartbeat, LeaderOrder
from ftrun.wire.cluster.messages import (
    AnyClusterMessage,
    ProbeLinkResult,
    ProbePathRequest,
    ProbePathResult,
    RailUnresponsive,
    ReadmitNode,
)


class Member:
    """The membership state of one agent."""

    def __init__(
        self,
        me: NodeCard,
        settings: MembershipSettings,
        monitor: Callable[[], GenerationMonitor],
        *,
        now_s: float,
        kept: GenerationPlan | None = None,
        is_chosen: bool = False,
    ) -> None:
        self.me = me
        self.follower = Voter(me, kept, is_chosen=is_chosen)
        self.leader: Leader | None = None
        self.witness = WitnessView(is_used=settings.has_witness)
        self.suspension = RankSuspension(self.follower, settings)
        self._settings = settings
        self._monitor = monitor
        self._links: dict[str, int] = {me.node_id: me.incarnation}
        self._to_self: deque[AnyClusterMessage] = deque()
        self._here = Heartbeat(generation=-1)
        self._heartbeat_number = 0
        self._leader_numbers = count(1)
        self._now_s = now_s
        self._heartbeat_due_s = self._dial_due_s = now_s
        self.discovery = LeaderDiscovery(
            me,
            settings,
            self.follower,
            self._links,
            self._become_leader,
            witness=self.witness,
            now_s=now_s,
        )

    @property
    def role(self) -> MemberRole:
        return self.discovery.role

    @property
    def leader_card(self) -> NodeCard | None:
        return self.discovery.leader_card

    def handle(self, event: Happening, *, now_s: float) -> list[Command]:
        if self.discovery.is_over:
            return []
        self._now_s = now_s
        found = [*self._mind_the_gap(now_s), *self._handle(event, now_s)]
        done: list[Command] = []
        self._sort(found, done, now_s)
        if not self.discovery.is_over:
            is_lease_expired = self.leader.is_lease_expired if self.leader is not None else None
            waiting = self.discovery.waiting
            held = self.suspension.poll(waiting, is_lease_expired=is_lease_expired, now_s=now_s)
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
                    self.discovery.role = MemberRole.ENDED
                elif isinstance(command, Quiesce | KillWorkers | StartRanks):
                    self.suspension.is_on = False
                done.append(command)
            if self._to_self:
                queue.extend(self._receive(self.me.node_id, self._to_self.popleft(), now_s))

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
                return self._receive(event.node_id, event.message, now_s)
            case NodeReported():
                return self._here_is(event, now_s)
            case WitnessAnswered():
                return self._witness_answered(event, now_s)
            case RunFinished(reason):
                return [] if self._has_leader(now_s) else [EndRun(0, reason, run_continues=True)]
            case ClockTick():
                return self._tick(now_s)
            case _:
                assert_never(event)

    # --- connections --------------------------------------------------------------------------

    def _opened(self, event: ConnectionOpened, now_s: float) -> list[Command]:
        node_id = event.node_id
        self._links[node_id] = event.incarnation
        if self.leader is not None:
            return self.leader.opened(node_id, event.incarnation, now_s=now_s)
        if self._follows(node_id):
            if self.leader_card is not None and self.leader_card.incarnation != event.incarnation:
                reason = f"the agent of {node_id} was restarted"
                return self.discovery.seek(reason, now_s=now_s)
            return [Send(node_id, self._heartbeat()), *self.discovery.join_if_new(node_id)]
        seeks = self.role in (MemberRole.JOINING, MemberRole.SEEKING)
        return [Send(node_id, self.discovery.join())] if seeks else []

    def _closed(self, node_id: str, now_s: float) -> list[Command]:
        self._links.pop(node_id, None)
        if self.leader is not None:
            return self.leader.closed(node_id, now_s=now_s)
        if self.discovery.gatherer is not None:
            self.discovery.gatherer.gone(node_id)
        if self._follows(node_id) and self.leader_card is not None:
            return [Connect(self.leader_card.host, self.leader_card.port, node_id)]
        return []

    def _dial_failed(self, event: ConnectFailed, now_s: float) -> list[Command]:
        if event.node_id in self._links:
            return []
        self.discovery.answer = event.reason
        if event.final and self.role is MemberRole.JOINING:
            return [EndRun(ExitCode.USAGE, event.reason)]
        if self.leader is not None:
            return self.leader.dial_failed(event.node_id, refused=event.refused, now_s=now_s)
        card = self.leader_card
        if not event.refused or card is None or card.node_id != event.node_id:
            return []
        if self.role is MemberRole.FOLLOWING:
            reason = f"{event.node_id} refuses the connection"
            return self.discovery.seek(reason, now_s=now_s, refused=True)
        if self.role is MemberRole.SEEKING or self.follower.newest_plan is not None:
            return self.discovery.give_up(now_s=now_s, refused=True)
        return []

    # --- messages -----------------------------------------------------------------------------

    def _receive(self, sender: str, body: AnyClusterMessage, now_s: float) -> list[Command]:
        found = self._leader_receives(sender, now_s) if self.leader is not None else []
        return found + self._take(sender, body, now_s)

    def _take(self, sender: str, body: AnyClusterMessage, now_s: float) -> list[Command]:
        match body:
            case messages.Join():
                return self._asked_to_join(sender, body, now_s)
            case messages.LeaderInfo():
                return self._leader_reported(sender, body, now_s)
            case messages.JoinPending():
                return self.discovery.gathers(body, now_s=now_s)
            case messages.JoinAccepted():
                return self._taken_in(sender, body, now_s)
            case messages.JoinRejected():
                return [EndRun(ExitCode.USAGE, f"{sender} rejects this node: {body.reason}")]
            case messages.Prepare():
                return self._prepare(sender, body, now_s)
            case messages.Accept():
                return self._announced(sender, body, now_s)
            case LeaderHeartbeat() | messages.LeaderResigned():
                return self._from_leader(sender, body, now_s)
            case ProbePathRequest():
                return [ProbePath(sender, body)]
            case _:
                return self._as_leader(sender, body, now_s)

    def _leader_receives(self, sender: str, now_s: float) -> list[Command]:
        """Adds a lost node again when it sends a message; the active generation continues."""
        assert self.leader is not None
        peer = self.leader.known.received(sender, now_s=now_s)
        if peer is None or not peer.lost or peer.card.incarnation != self._links.get(sender):
            return []
        return self.leader.back_again(peer, now_s=now_s)

    def _as_leader(self, sender: str, body: AnyClusterMessage, now_s: float) -> list[Command]:
        """Handles messages to a leader; drops them if this agent no longer leads."""
        leader = self.leader
        incarnation = self._links.get(sender)
        if leader is None or incarnation is None:
            return []
        peer = leader.known.get(sender)
        if peer is None or peer.card.incarnation != incarnation:
            # It follows an earlier proposal of this node, which does not know it any more.
            is_unknown = peer is None and isinstance(body, Heartbeat)
            return leader.opened(sender, incarnation, now_s=now_s) if is_unknown else []
        match body:
            case messages.Promise():
                return leader.promised(body, now_s=now_s)
            case messages.PrepareRejected():
                if (other := self._yields_to(leader, body)) is not None:
                    return self._step_down(other, now_s)
                return leader.not_promised(body, now_s=now_s)
            case messages.Accepted():
                return leader.accepted(sender, body, now_s=now_s)
            case Heartbeat():
                return leader.heartbeat_received(sender, body, now_s=now_s)
            case ProbeLinkResult() | ProbePathResult() | RailUnresponsive():
                return leader.reported(sender, body, now_s=now_s)
            case ReadmitNode():
                failures, reason = leader.monitor.failures, "an operator has requested it"
                return [*failures.readmit(body.node_id, reason, now_s=now_s)]
            case _:
                return []

    def _yields_to(self, leader: Leader, body: messages.PrepareRejected) -> NodeCard | None:
        """The leader that this proposer yields to; None if its node refuses dials."""
        if body.leader is None or leader.is_settled or leader.known.refuses(body.leader.node_id):
            return None
        return body.leader if body.leader_generation >= self.follower.generation else None

    def _prepare(self, sender: str, body: messages.Prepare, now_s: float) -> list[Command]:
        is_mine = sender == self.me.node_id
        receives = self._has_leader(now_s) and not self._follows(sender) and not is_mine
        found = self.follower.prepare(sender, body, self.leader_card, has_leader=receives)
        vote = self.follower.vote
        is_promised = vote.promised == body.generation and vote.proposer == body.card.identity
        if is_promised and not receives and not is_mine and not self._follows(sender):
            self._follow(body.card, now_s)
        return found

    def _announced(self, sender: str, body: messages.Accept, now_s: float) -> list[Command]:
        if self._follows(sender):
            self.discovery.waiting.received_s = now_s
            if body.plan.voter_revision:
                return self.follower.adopt_voters(sender, body.plan, (sender, self._links[sender]))
        proposer = self.follower.vote.proposer
        if proposer is None or proposer[0] != sender or body.plan.voter_revision:
            return []
        return self.follower.announce(sender, body, proposer)

    def _from_leader(self, sender: str, body: LeaderOrder, now_s: float) -> list[Command]:
        if not self._follows(sender):
            return []
        if isinstance(body, messages.LeaderResigned):
            return self._leader_resigned(body, now_s)
        if body.ended and self.leader is not None:
            return []  # it ends after all other nodes have acknowledged the end
        self.discovery.waiting.received_s = now_s
        self.discovery.waiting.leader_suspends = body.is_suspended
        found: list[Command] = []
        if not self.follower.knows_of(body):
            found.append(Send(sender, self.discovery.join()))
        orders = self.follower.apply_heartbeat(sender, body, now_s=now_s)
        if self.follower.is_ended:
            # The leader waits for this acknowledgement before it ends itself.
            found.append(Send(sender, msgspec.structs.replace(self._heartbeat(), state="ended")))
        return found + orders

    def _asked_to_join(self, sender: str, body: messages.Join, now_s: float) -> list[Command]:
        if reason := self._settings.cluster_size.refusal(body.nnodes):
            return [Send(sender, messages.JoinRejected(reason))]
        if self.discovery.gatherer is not None:
            return self.discovery.gatherer.join(sender, body, now_s=now_s)
        leader = self.leader
        if leader is not None:
            if not leader.shutdown.must_be_notified(sender):
                return []  # the majority may continue without this leader
            found = leader.add(body.card, now_s=now_s, linked=True, knows=body.knows)
            # Unless `add` has ended this leadership, or this node has no plan yet.
            if self.leader is leader and self.follower.plan is not None:
                accepted = messages.JoinAccepted(self.follower.plan, body.number, self.me)
                found.append(Send(sender, accepted))
            return found
        follows = self.role is MemberRole.FOLLOWING and not self._follows(sender)
        return [self._leader_info(sender, now_s)] if follows else []

    def _leader_reported(
        self, sender: str, body: messages.LeaderInfo, now_s: float
    ) -> list[Command]:
        if body.card.node_id == self.me.node_id or self._follows(body.card.node_id):
            # A leader sends this to a node that it does not know.
            return [Send(sender, self.discovery.join())] if self._follows(sender) else []
        receives, known = self._has_leader(now_s), self.follower.generation
        if self.leader is not None and body.is_settled and body.generation >= known + receives:
            return self._step_down(body.card, now_s)
        if receives:
            return [] if body.is_settled else [self._leader_info(sender, now_s)]  # two leaders
        if self.leader is not None:
            # Another proposer: the ballots decide which one yields.
            return self.leader.meet(body.card, now_s=now_s, knows=body.generation)
        if self.role is MemberRole.FOLLOWING and not body.is_settled:
            return [self._leader_info(sender, now_s)]
        if body.card.node_id in self.discovery.succession.refused and not body.is_settled:
            return []
        return self.discovery.go_to(body.card, now_s=now_s)

    def _taken_in(self, sender: str, body: messages.JoinAccepted, now_s: float) -> list[Command]:
        plan = body.plan
        if self.leader is not None or plan.generation < self.follower.generation:
            return []
        card = plan.card(sender) or body.leader
        if card is None or plan.leader != sender or card.incarnation != self._links.get(sender):
            return []
        if not self._follows(sender):
            if self.discovery.is_bound_beyond(plan.generation, now_s=now_s):
                return []
            self._follow(card, now_s)
        self.discovery.waiting.received_s = now_s
        self.discovery.waiting.answered(body.number)
        return self.follower.take_current(plan)

    # --- following and leading ----------------------------------------------------------------

    def _follow(self, card: NodeCard, now_s: float) -> None:
        self.leader = None
        self.discovery.follow(card, now_s=now_s)

    def _step_down(self, card: NodeCard, now_s: float) -> list[Command]:
        self.leader = None
        note = JournalEntry(SteppedDown(f"node {card.node_id} leads"))
        return [note, *self.discovery.go_to(card, now_s=now_s)]

    def _become_leader(self, now_s: float) -> list[Command]:
        plan = self.follower.newest_plan
        cards = plan.voters if plan is not None else []
        lost = self.discovery.succession.lost
        reason = "the leader is lost" if lost else "the agent was restarted"
        return self._leader_from(cards, now_s, reason=reason)

    def _leader_resigned(self, body: messages.LeaderResigned, now_s: float) -> list[Command]:
        plan = self.follower.plan
        if self.leader is not None or plan is None or body.generation != plan.generation:
            return []
        if body.successor.identity != self.me.identity:
            return self.discovery.go_to(body.successor, now_s=now_s)
        found = self._leader_from(plan.voters, now_s, reason=body.reason)
        assert self.leader is not None
        self.leader.draining.inherit(body.leaving, now_s=now_s)
        return found

    def _leader_from(self, cards: list[NodeCard], now_s: float, *, reason: str) -> list[Command]:
        follower, succession = self.follower, self.discovery.succession
        leader = Leader(
            self.me,
            self._settings,
            self._monitor(),
            follower.plan,
            follower.newest_plan,
            links=self._links,
            witness=self.witness,
        )
        self.leader, self._dial_due_s = leader, now_s  # the endpoint may begin another run
        leader.known.numbers, leader.known.has_met = self._leader_numbers, self.discovery.has_met
        self.discovery.hand_over(leader.monitor.incidents, now_s=now_s)
        lost, known_s = set(succession.lost), follower.plan_since_s
        leader.known.begin(cards, self._links, lost, succession.refused, now_s=now_s)
        self.discovery.leader(now_s=now_s)
        return leader.succeed(lost, reason, now_s if known_s is None else known_s, now_s=now_s)

    # --- time ---------------------------------------------------------------------------------

    def _tick(self, now_s: float) -> list[Command]:
        found: list[Command] = []
        gatherer = self.discovery.gatherer
        if gatherer is not None and gatherer.is_complete(now_s=now_s):
            cards = list(gatherer.cards.values())
            found += self._leader_from(cards, now_s, reason="the run begins")
        found += (self.leader or self.discovery).tick(now_s=now_s)
        if self.leader is not None and (resignation := self.leader.resignation) is not None:
            self.leader = None
            found += self.discovery.resign(resignation, now_s=now_s)
        if now_s >= self._dial_due_s:
            self._dial_due_s = now_s + self._settings.redial_s
            found += self._dial_again()
        if now_s >= self._heartbeat_due_s:
            self._heartbeat_due_s = now_s + self._settings.times.heartbeat_interval_s
            found += self._send(now_s)
            found += (self.leader or self.discovery).ask_witness(now_s=now_s)
        return found

    def _witness_answered(self, event: WitnessAnswered, now_s: float) -> list[Command]:
        if event.is_final:
            return [EndRun(ExitCode.USAGE, event.reason)]
        found = self.witness.answered(event, now_s=now_s)
        return found + (self.leader or self.discovery).witness_answered(event, now_s=now_s)

    def _dial_again(self) -> list[Command]:
        if self.leader is None:
            return self.discovery.dial_again()
        is_joining = self.witness.leader
        if is_joining is not None and is_joining.node_id not in self._links:
            return [Connect(is_joining.host, is_joining.port, is_joining.node_id)]
        return [Connect(host, port) for host, port in self.leader.known.endpoints_without_agent()]

    def _send(self, now_s: float) -> list[Command]:
        if self.leader is not None:
            return [Send(self.me.node_id, self._heartbeat()), *self.leader.heartbeat(now_s=now_s)]
        leader = self.leader_card if self.role is MemberRole.FOLLOWING else None
        return [Send(leader.node_id, self._heartbeat())] if leader is not None else []

    def _here_is(self, event: NodeReported, now_s: float) -> list[Command]:
        heartbeat = self._here = event.heartbeat
        if not event.is_urgent:
            return []
        if self.discovery.may_end(heartbeat):
            has_run = self.follower.newest_plan is not None
            reason = "while no generation was running" if has_run else "before the run had started"
            return [EndRun(128 + (heartbeat.stop_signal or 15), f"stopped {reason}")]
        if self.leader is not None:
            return [Send(self.me.node_id, self._heartbeat())]
        return self._send(now_s)

    def _mind_the_gap(self, now_s: float) -> list[Command]:
        gap_s = self.discovery.waiting.paused_s(now_s=now_s)
        if not gap_s:
            return []
        if self.leader is not None:
            self.leader.was_paused(now_s=now_s)
        return self.discovery.was_paused(gap_s)

    # --- state and messages -------------------------------------------------------------------

    def _follows(self, node_id: str) -> bool:
        if self.leader is not None:
            return node_id == self.me.node_id
        return self.discovery.follows(node_id)

    def _has_leader(self, now_s: float) -> bool:
        if self.leader is not None:
            is_sure = self.leader.is_settled and not self.leader.is_lease_expired
            return is_sure or self.leader.shutdown.ends_the_run
        return self.discovery.has_leader(now_s=now_s)

    def _leader_info(self, node_id: str, now_s: float) -> Send:
        assert self.leader_card is not None
        known, is_led = self.follower.generation, self._has_leader(now_s)
        return Send(node_id, messages.LeaderInfo(self.leader_card, known, is_led))

    def _heartbeat(self) -> Heartbeat:
        self._heartbeat_number += 1
        return self.follower.heartbeat(self._here, self._heartbeat_number, now_s=self._now_s)
