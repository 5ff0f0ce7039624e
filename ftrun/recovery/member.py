"""One agent's membership: how it finds the others, whom it follows, and when it leads itself.

Runs in:  every agent, in the thread that speaks with the others. Pure.
Takes in: `Happening`s and the time.
Gives:    `Command`s for the network and for this node's hands.
Survives: its lead: the next agent in order takes over, and every agent knows the order.
Source:   the design's membership section; Hashicorp's Lifeguard for doubting oneself first.

Rule 1: the first generation needs all nodes, and each must say that it knows no generation. A
        newcomer at the endpoint waits for a lead that looks for it before it begins a run.
Rule 2: an agent that does not hear its lead stops its ranks before it may have been replaced.
Rule 3: an agent that has stood still doubts itself, not the others: silence counts from when it
        could hear again, and its ranks wait until its lead is heard.
"""

from collections import deque
from collections.abc import Callable

from ftrun.errors import ExitCode
from ftrun.recovery.ballots import identity
from ftrun.recovery.commands import (
    Command,
    Dial,
    EndRun,
    Note,
    RunGeneration,
    Send,
)
from ftrun.recovery.follower import Follower
from ftrun.recovery.gathering import Gatherer
from ftrun.recovery.happenings import (
    Adopted,
    Closed,
    DialFailed,
    Happening,
    Heard,
    HereIs,
    Opened,
    Passing,
    Quiesced,
)
from ftrun.recovery.holding import Hold
from ftrun.recovery.lead import Lead, Peer
from ftrun.recovery.oversight import Oversight
from ftrun.recovery.patience import Patience
from ftrun.recovery.roles import Role
from ftrun.recovery.settings import ClusterSettings
from ftrun.wire import cluster as say


class Member:
    """One agent among the others."""

    def __init__(
        self,
        me: say.NodeCard,
        settings: ClusterSettings,
        oversight: Callable[[], Oversight],
        *,
        now_s: float,
        kept: say.Plan | None = None,
        took_effect: bool = False,
    ) -> None:
        self.me = me
        self.role = Role.JOINING
        self.follower = Follower(me, kept, took_effect=took_effect)
        self.lead: Lead | None = None
        self.lead_card: say.NodeCard | None = None
        self._hold = Hold()
        self._settings = settings
        self._oversight = oversight
        self._links: set[str] = {me.node_id}
        self._to_self: deque[say.AnyClusterMessage] = deque()
        self._here = say.Beat(generation=-1)
        self._gatherer: Gatherer | None = None
        self._heard_s = self._since_s = self._last_s = now_s
        self._beat_due_s = self._dial_due_s = now_s
        self._patience = Patience(settings, now_s=now_s)
        self._lost: set[str] = set()
        self._reach = "nobody has answered yet"
        if kept is not None:
            self.role = Role.SEEKING
        elif me.endpoint:
            self.role = Role.GATHERING
            self._gatherer = Gatherer(me, settings, now_s=now_s)

    @property
    def is_held(self) -> bool:
        """The ranks of this node are stopped until it is clear who leads."""
        return self._hold.is_on

    @property
    def reach(self) -> str:
        """Whom it has reached so far, in words."""
        return self._gatherer.missing() if self._gatherer is not None else self._reach

    def handle(self, event: Happening, *, now_s: float) -> list[Command]:
        """Take in one happening; what follows from it, in order."""
        found = self._mind_the_gap(now_s)
        found += self._handle(event, now_s)
        done: list[Command] = []
        queue = deque(found)
        while queue or self._to_self:
            while queue:
                command = queue.popleft()
                if isinstance(command, Send) and command.node_id == self.me.node_id:
                    self._to_self.append(command.message)
                elif isinstance(command, EndRun):
                    self.role = Role.ENDED
                    done.append(command)
                elif not isinstance(command, Send) or command.node_id in self._links:
                    done.append(command)
            if self._to_self:
                queue.extend(self._hear(self.me.node_id, self._to_self.popleft(), now_s))
        return done

    def _handle(self, event: Happening, now_s: float) -> list[Command]:
        if self.role is Role.ENDED:
            return []
        match event:
            case Opened():
                return self._opened(event, now_s)
            case Closed():
                return self._closed(event.node_id, now_s)
            case DialFailed():
                return self._dial_failed(event, now_s)
            case Heard():
                return self._hear(event.node_id, event.message, now_s)
            case Quiesced():
                return self.follower.quiesced(event)
            case Adopted():
                return self.follower.adopted(event)
            case HereIs():
                return self._here_is(event, now_s)
            case Passing():
                return self._passing(now_s)

    # --- connections --------------------------------------------------------------------------

    def _opened(self, event: Opened, now_s: float) -> list[Command]:
        node_id = event.node_id
        self._links.add(node_id)
        if self.lead is not None:
            peer = self.lead.peers.get(node_id)
            is_same = peer is not None and peer.card.incarnation == event.incarnation
            if peer is not None and is_same and not peer.lost:
                return self.lead.opened(node_id, now_s=now_s)
            # Whoever listens at the endpoint now, or was lost, may not know that there is a run.
            return [Send(node_id, say.LeadIs(self.me, self.follower.generation))]
        if self._follows(node_id):
            return [Send(node_id, self._beat()), *self._join_if_new(node_id)]
        if self.role in (Role.JOINING, Role.SEEKING):
            return [Send(node_id, self._join())]
        return []

    def _closed(self, node_id: str, now_s: float) -> list[Command]:
        self._links.discard(node_id)
        if self.lead is not None:
            return self.lead.closed(node_id, now_s=now_s)
        if self._gatherer is not None:
            self._gatherer.gone(node_id)
        if self._follows(node_id) and self.lead_card is not None:
            return [Dial(self.lead_card.host, self.lead_card.port, node_id)]
        return []

    def _dial_failed(self, event: DialFailed, now_s: float) -> list[Command]:
        if event.node_id in self._links:
            return []
        self._reach = event.why
        if event.final and self.role is Role.JOINING:
            return [EndRun(ExitCode.USAGE, event.why)]
        if self.lead is not None:
            refused = event.refused
            return self.lead.dial_failed(event.node_id, refused=refused, now_s=now_s)
        if event.refused and self._follows(event.node_id):
            return self._seek(f"{event.node_id} is dead: the connection is refused", now_s)
        if event.refused and self.role is Role.SEEKING and event.node_id:
            self._lost.add(event.node_id)
            return self._next_in_order(now_s)
        return []

    # --- messages -----------------------------------------------------------------------------

    def _hear(self, sender: str, body: say.AnyClusterMessage, now_s: float) -> list[Command]:
        if self.lead is not None:
            self.lead.heard(sender, now_s=now_s)
        match body:
            case say.Join():
                return self._asked_to_join(sender, body, now_s)
            case say.LeadIs():
                return self._told_of_lead(sender, body, now_s)
            case say.Gathering():
                self._reach = f"{len(body.here)} of {body.needed} nodes are here"
                return []
            case say.Current():
                return self._taken_in(sender, body.plan, now_s)
            case say.TurnedAway():
                return [EndRun(ExitCode.USAGE, f"{sender} turns this node away: {body.why}")]
            case say.Prepare():
                return self._prepare(sender, body, now_s)
            case say.Announce():
                return self._announced(sender, body, now_s)
            case say.LeadBeat():
                return self._lead_beat(sender, body, now_s)
            case _:
                return self._as_lead(sender, body, now_s)

    def _as_lead(self, sender: str, body: say.AnyClusterMessage, now_s: float) -> list[Command]:
        """What only a lead is told; what is late, for one that is none any more, is dropped."""
        lead = self.lead
        if lead is None:
            return []
        peer = lead.peers.get(sender)
        if peer is not None and peer.lost:
            return self._back_again(peer, now_s)
        match body:
            case say.Promise():
                return lead.promised(body, now_s=now_s)
            case say.NotPromised():
                if body.lead is not None and body.lead_generation >= self.follower.generation:
                    return self._step_down(body.lead, now_s)
                return lead.not_promised(body, now_s=now_s)
            case say.Accepted():
                return lead.accepted(sender, body, now_s=now_s)
            case say.Beat():
                return lead.beat(sender, body, now_s=now_s)
            case _:
                return []

    def _prepare(self, sender: str, body: say.Prepare, now_s: float) -> list[Command]:
        is_mine = sender == self.me.node_id
        hears = self._hears_lead(now_s) and not self._follows(sender) and not is_mine
        found = self.follower.prepare(sender, body, self._lead(), hears_lead=hears)
        vote = self.follower.vote
        is_promised = vote.promised == body.generation and vote.proposer == identity(body.card)
        if is_promised and not hears and not is_mine:
            self._follow(body.card, now_s)
        return found

    def _announced(self, sender: str, body: say.Announce, now_s: float) -> list[Command]:
        self._mark_heard(sender, now_s)
        proposer = self.follower.vote.proposer
        if proposer is None or proposer[0] != sender:
            return []
        return self.follower.announce(sender, body, proposer)

    def _lead_beat(self, sender: str, body: say.LeadBeat, now_s: float) -> list[Command]:
        if not self._follows(sender):
            return []
        self._mark_heard(sender, now_s)
        found: list[Command] = []
        accepted = self.follower.vote.accepted
        is_known = accepted is not None and accepted.generation == body.generation
        if body.generation > self.follower.generation and not is_known:
            found.append(Send(sender, self._join()))
        if self.is_held and not self._must_hold(now_s):
            found += self._hold.take_off()
        orders = self.follower.obey(body)
        if any(isinstance(order, RunGeneration) for order in orders):
            self._hold.is_on = False
        if self.follower.is_ended:
            # The lead waits for this word before it ends itself.
            found.append(Send(sender, say.with_state(self._beat(), "ended")))
        return found + orders

    def _asked_to_join(self, sender: str, body: say.Join, now_s: float) -> list[Command]:
        wished = str(self._settings.wishes)
        if body.nnodes != wished:
            why = (
                f"it was started with --nnodes/--spares {body.nnodes}, and this run with {wished}. "
                "Give the same to every node"
            )
            return [Send(sender, say.TurnedAway(why))]
        if self._gatherer is not None:
            return self._gather(sender, body, now_s)
        lead = self.lead
        if lead is None:
            known = self._lead()
            if known is None or self.role is not Role.FOLLOWING or known.node_id == sender:
                return []
            return [Send(sender, say.LeadIs(known, self.follower.generation))]
        found = lead.add(body.card, now_s=now_s, linked=True)
        # Unless that has ended our leadership, or our place in the run.
        if self.lead is lead and self.follower.plan is not None:
            found.append(Send(sender, say.Current(self.follower.plan)))
        return found

    def _told_of_lead(self, sender: str, body: say.LeadIs, now_s: float) -> list[Command]:
        if self._hears_lead(now_s) or body.card.node_id == self.me.node_id:
            return []
        if self.role is Role.LEADING and body.generation < self.follower.generation:
            return []
        self._gatherer = None
        if self.lead is not None:
            return self._step_down(body.card, now_s)
        self.role, self.lead_card, self._since_s = Role.JOINING, body.card, now_s
        return self._reach_out(body.card)

    def _taken_in(self, sender: str, plan: say.Plan, now_s: float) -> list[Command]:
        if self.lead is not None or plan.generation < self.follower.generation:
            return []
        card = plan.card(sender)
        if card is None or plan.lead != sender:
            return []
        self._gatherer = None
        self._follow(card, now_s)
        return self.follower.take_current(plan)

    def _back_again(self, peer: Peer, now_s: float) -> list[Command]:
        """A node that was lost is heard again: it comes in anew, beside what has gone on."""
        assert self.lead is not None
        found = self.lead.add(peer.card, now_s=now_s, linked=True)
        if self.follower.plan is not None:
            found.append(Send(peer.card.node_id, say.Current(self.follower.plan)))
        return found

    # --- whom to follow -----------------------------------------------------------------------

    def _follow(self, card: say.NodeCard, now_s: float) -> None:
        self.lead_card, self.role, self.lead = card, Role.FOLLOWING, None
        self._gatherer = None
        self._heard_s = now_s
        self._lost.clear()

    def _step_down(self, card: say.NodeCard, now_s: float) -> list[Command]:
        """Another one leads a generation as new as ours: go there."""
        self.lead = None
        self.role, self.lead_card, self._since_s = Role.JOINING, card, now_s
        return [Note("SteppedDown", f"node {card.node_id} leads"), *self._reach_out(card)]

    def _reach_out(self, card: say.NodeCard) -> list[Command]:
        if card.node_id in self._links:
            return [Send(card.node_id, self._join())]
        return [Dial(card.host, card.port, card.node_id)]

    def _seek(self, why: str, now_s: float) -> list[Command]:
        """The lead is lost: the next agent in order takes over."""
        if self.lead_card is not None:
            self._lost.add(self.lead_card.node_id)
        self.role = Role.SEEKING
        found: list[Command] = [Note("LeadLost", f"the lead is lost: {why}", say=True)]
        return found + self._next_in_order(now_s)

    def _next_in_order(self, now_s: float) -> list[Command]:
        self._since_s = now_s
        plan = self.follower.newest_plan
        order = plan.voters if plan is not None else []
        for card in order:
            if card.node_id == self.me.node_id:
                return self._take_the_lead(now_s)
            if card.node_id not in self._lost:
                self.lead_card = card
                return self._reach_out(card)
        # Not one of the voters, and none of them is left that could take us in.
        self._lost.clear()
        self.role = Role.JOINING
        self.lead_card = None
        return []

    def _take_the_lead(self, now_s: float) -> list[Command]:
        plan = self.follower.newest_plan
        known = {card.node_id: card for card in (plan.voters if plan is not None else [])}
        return self._lead_from(known, now_s, why="the lead is lost")

    def _lead_from(
        self, cards: dict[str, say.NodeCard], now_s: float, *, why: str
    ) -> list[Command]:
        """Propose ourselves to these."""
        plan, newest = self.follower.plan, self.follower.newest_plan
        self.lead = Lead(self.me, self._settings, self._oversight(), plan, newest)
        self.role, self.lead_card = Role.LEADING, self.me
        self._gatherer = None
        for node_id, card in {**cards, self.me.node_id: self.me}.items():
            peer = Peer(card, now_s, linked=node_id in self._links)
            if node_id in self._lost:
                peer.lost, peer.refused = "the lead is lost", True
            self.lead.peers[node_id] = peer
        found = self.lead.succeed(self._lost, why, now_s=now_s)
        self._lost.clear()
        return found

    def _gather(self, sender: str, body: say.Join, now_s: float) -> list[Command]:
        assert self._gatherer is not None
        if body.knows is not None:
            # There is a run, and it is gone on with.
            self.follower.learn(body.knows)
        return self._gatherer.join(sender, body.card, now_s=now_s)

    # --- time ---------------------------------------------------------------------------------

    def _passing(self, now_s: float) -> list[Command]:
        found: list[Command] = []
        if self._gatherer is not None and self._gatherer.is_complete(now_s=now_s):
            cards = self._gatherer.cards
            found += self._lead_from(cards, now_s, why="the run begins")
        if self.role in (Role.JOINING, Role.GATHERING):
            found += self._wait_to_begin(now_s)
        if self.lead is not None:
            found += self.lead.passing(now_s=now_s)
        elif self.role is Role.FOLLOWING:
            found += self._watch_lead(now_s)
        elif self.role is Role.SEEKING and now_s - self._since_s >= self._settings.deadline_s:
            if self.lead_card is not None:
                self._lost.add(self.lead_card.node_id)
            found += self._next_in_order(now_s)
        found += self._dial_if_due(now_s)
        if self._must_hold(now_s) and not self.is_held:
            found += self._hold.put_on("the other nodes are not heard")
        elif self.is_held and self.lead is not None and not self._must_hold(now_s):
            found += self._hold.take_off()
        if now_s >= self._beat_due_s:
            self._beat_due_s = now_s + self._settings.heartbeat_s
            found += self._tell(now_s)
        return found

    def _watch_lead(self, now_s: float) -> list[Command]:
        silent_s = now_s - self._heard_s
        if silent_s < self._settings.deadline_s:
            return []
        assert self.lead_card is not None
        return self._seek(f"{self.lead_card.node_id} is silent for {silent_s:.1f} s", now_s)

    def _dial_if_due(self, now_s: float) -> list[Command]:
        """Keep looking: for the run, for the lead, for a newcomer at the endpoint."""
        if now_s < self._dial_due_s:
            return []
        self._dial_due_s = now_s + self._settings.redial_s
        host, port = self._settings.endpoint
        if self.lead is not None:
            peers = self.lead.peers.values()
            is_here = any(peer.card.endpoint and not peer.lost for peer in peers)
            return [Dial(host, port)] if port and not is_here else []
        if self.role is not Role.JOINING:
            card = self.lead_card
            missed = card is not None and card.node_id not in self._links
            return [Dial(card.host, card.port, card.node_id)] if card and missed else []
        waited_s = now_s - self._since_s
        card = self.lead_card
        if card is not None and waited_s < self._settings.deadline_s:
            return self._reach_out(card)
        self.lead_card = None
        joined: list[Command] = [Send(one, self._join()) for one in sorted(self._links)]
        return [*joined, Dial(host, port)] if port else joined

    def _wait_to_begin(self, now_s: float) -> list[Command]:
        return self._patience.wait(
            now_s - self._since_s, self.reach, gathers=self._gatherer is not None, now_s=now_s
        )

    def _tell(self, now_s: float) -> list[Command]:
        if self.lead is not None:
            return [Send(self.me.node_id, self._beat()), *self.lead.heartbeat()]
        if self.role is Role.FOLLOWING and self.lead_card is not None:
            return [Send(self.lead_card.node_id, self._beat())]
        return []

    def _here_is(self, event: HereIs, now_s: float) -> list[Command]:
        self._here = event.beat
        return self._tell_change(event.beat, now_s) if event.is_urgent else []

    def _tell_change(self, beat: say.Beat, now_s: float) -> list[Command]:
        if beat.stops and self.role in (Role.JOINING, Role.GATHERING, Role.SEEKING):
            return [EndRun(128 + (beat.stop_signal or 15), "stopped before the run had begun")]
        if self.lead is not None and self.lead.paused_since_s is not None and beat.stops:
            return [EndRun(128 + (beat.stop_signal or 15), "stopped while the run was paused")]
        if self.lead is not None:
            return [Send(self.me.node_id, self._beat())]
        return self._tell(now_s)

    # --- holding ranks ------------------------------------------------------------------------

    def _must_hold(self, now_s: float) -> bool:
        plan = self.follower.plan
        if not self.follower.is_member or plan is None or len(plan.voters) == 1:
            return False
        if self.lead is not None:
            return self.lead.ballot is None and self.lead.may_be_replaced(now_s=now_s)
        return now_s - self._heard_s >= self._settings.cut_off_s

    def _mind_the_gap(self, now_s: float) -> list[Command]:
        """Whether this process itself has stood still."""
        gap_s = now_s - self._last_s
        self._last_s = now_s
        if gap_s < 2 * self._settings.heartbeat_s:
            return []
        self._heard_s += gap_s
        self._since_s += gap_s
        if self.lead is not None:
            self.lead.missed(gap_s)
        plan = self.follower.plan
        is_one_of_many = self.follower.is_member and plan is not None and len(plan.voters) > 1
        if gap_s < self._settings.cut_off_s or not is_one_of_many:
            return []
        return self._hold.put_on(f"this node stood still for {gap_s:.1f} s")

    # --- small things -------------------------------------------------------------------------

    def _lead(self) -> say.NodeCard | None:
        return self.me if self.lead is not None else self.lead_card

    def _follows(self, node_id: str) -> bool:
        if self.lead is not None:
            return node_id == self.me.node_id
        card = self.lead_card
        return self.role is Role.FOLLOWING and card is not None and card.node_id == node_id

    def _hears_lead(self, now_s: float) -> bool:
        """Somebody leads whom this agent must not desert."""
        if self.lead is not None:
            stands = self.lead.ballot is None or self.lead.paused_since_s is None
            return stands and not self.lead.may_be_replaced(now_s=now_s)
        card = self.lead_card
        if self.role is not Role.FOLLOWING or card is None or card.node_id not in self._links:
            return False
        return now_s - self._heard_s < self._settings.cut_off_s

    def _mark_heard(self, sender: str, now_s: float) -> None:
        if self._follows(sender):
            self._heard_s = now_s

    def _join(self) -> say.Join:
        return say.Join(self.me, str(self._settings.wishes), self.follower.newest_plan)

    def _join_if_new(self, node_id: str) -> list[Command]:
        plan = self.follower.plan
        is_known = plan is not None and plan.card(self.me.node_id) == self.me
        return [] if is_known else [Send(node_id, self._join())]

    def _beat(self) -> say.Beat:
        return say.with_promise(self._here, self.follower.vote.promised)
