"""One agent's membership: how it finds the others, whom it follows, and when it leads itself.

Runs in:  every agent, in the thread that speaks with the others. Pure.
Takes in: `Happening`s and the time.
Gives:    `Command`s for the network and for this node's hands.
Survives: its lead: the next agent in order takes over, and every agent knows the order.
Source:   the design's membership section; Hashicorp's Lifeguard for doubting oneself first.

    JOINING    looks for the run, at the endpoint or at an address it was told
    GATHERING  listens at the endpoint itself, and knows of no run
    FOLLOWING  has a lead: as a member, as a spare, or beside the generation
    SEEKING    has lost its lead, or was started again, and looks who leads
    LEADING    leads, or proposes itself
    ENDED      was told that the run is over, or has given up

Rule 1: the first generation needs all nodes, and each must say that it knows no generation. A
        newcomer at the endpoint waits for a lead that looks for it before it begins a run, and
        begins none once it has met a node that knows of one.
Rule 2: a proposer gives way to a lead that is settled, and to the promise it has itself given;
        never to another proposer's word alone, or two could give way to each other.
"""

from collections import deque
from collections.abc import Callable
from enum import Enum

from ftrun.errors import ExitCode
from ftrun.recovery.ballots import identity
from ftrun.recovery.commands import (
    Command,
    Dial,
    EndRun,
    HoldRanks,
    KillWorkers,
    Note,
    Quiesce,
    ReleaseRanks,
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
    PlanKept,
    Quiesced,
)
from ftrun.recovery.lead import Lead
from ftrun.recovery.oversight import Oversight
from ftrun.recovery.patience import Patience
from ftrun.recovery.settings import ClusterSettings
from ftrun.recovery.succession import Succession
from ftrun.recovery.waiting import Waiting
from ftrun.wire import cluster as say


class Role(Enum):
    """What an agent is doing about the others."""

    JOINING = "joining"
    GATHERING = "gathering"
    FOLLOWING = "following"
    SEEKING = "seeking"
    LEADING = "leading"
    ENDED = "ended"


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
        self.is_held = False
        self._reach = "nobody has answered yet"
        self._settings = settings
        self._oversight = oversight
        self._links: dict[str, int] = {me.node_id: me.incarnation}
        self._to_self: deque[say.AnyClusterMessage] = deque()
        self._here = say.Beat(generation=-1)
        self._beat_number = 0
        self._gatherer: Gatherer | None = None
        self._waiting = Waiting(settings, now_s=now_s)
        self._patience = Patience(settings, now_s=now_s)
        self._succession = Succession(me)
        self._since_s = self._apart_s = now_s
        self._beat_due_s = self._dial_due_s = now_s
        if kept is not None:
            self.role = Role.SEEKING
        elif me.endpoint:
            self.role = Role.GATHERING
            self._gatherer = Gatherer(me, settings, now_s=now_s)

    @property
    def reach(self) -> str:
        """Whom it has reached so far, in words."""
        return self._gatherer.missing() if self._gatherer is not None else self._reach

    def handle(self, event: Happening, *, now_s: float) -> list[Command]:
        """Take in one happening; what follows from it, in order."""
        if self._is_over:
            return []
        found = self._mind_the_gap(now_s)
        found += self._handle(event, now_s)
        done: list[Command] = []
        self._sort(found, done, now_s)
        if not self._is_over:
            self._sort(self._hold_or_release(now_s), done, now_s)
        return done

    def _sort(self, commands: list[Command], done: list[Command], now_s: float) -> None:
        """Carry out what this agent says to itself; leave out what reaches nobody."""
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
                    self.role = Role.ENDED
                elif isinstance(command, Quiesce | KillWorkers | RunGeneration):
                    self.is_held = False
                done.append(command)
            if self._to_self:
                queue.extend(self._hear(self.me.node_id, self._to_self.popleft(), now_s))

    def _handle(self, event: Happening, now_s: float) -> list[Command]:
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
            case PlanKept():
                return self.follower.plan_kept(event)
            case HereIs():
                return self._here_is(event, now_s)
            case Passing():
                return self._passing(now_s)

    # --- connections --------------------------------------------------------------------------

    def _opened(self, event: Opened, now_s: float) -> list[Command]:
        node_id = event.node_id
        self._links[node_id] = event.incarnation
        if self.lead is not None:
            return self.lead.opened(node_id, event.incarnation, now_s=now_s)
        if self._follows(node_id):
            assert self.lead_card is not None
            if self.lead_card.incarnation != event.incarnation:
                return self._seek(f"the agent of {node_id} was started again", now_s)
            return [Send(node_id, self._beat()), *self._join_if_new(node_id)]
        if self.role in (Role.JOINING, Role.SEEKING):
            return [Send(node_id, self._join())]
        return []

    def _closed(self, node_id: str, now_s: float) -> list[Command]:
        self._links.pop(node_id, None)
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
        card = self.lead_card
        if not event.refused or card is None or card.node_id != event.node_id:
            return []
        if self.role is Role.FOLLOWING:
            why = f"{event.node_id} is dead: the connection is refused"
            return self._seek(why, now_s, refused=True)
        if self.role is Role.SEEKING or self.follower.newest_plan is not None:
            return self._give_up_on_lead(now_s, refused=True)
        return []

    # --- messages -----------------------------------------------------------------------------

    def _hear(self, sender: str, body: say.AnyClusterMessage, now_s: float) -> list[Command]:
        found: list[Command] = []
        if self.lead is not None:
            found = self._lead_hears(sender, now_s)
        return found + self._take(sender, body, now_s)

    def _take(self, sender: str, body: say.AnyClusterMessage, now_s: float) -> list[Command]:
        match body:
            case say.Join():
                return self._asked_to_join(sender, body, now_s)
            case say.LeadIs():
                return self._told_of_lead(sender, body, now_s)
            case say.Gathering():
                return self._gathers(body, now_s)
            case say.Current():
                return self._taken_in(sender, body, now_s)
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

    def _lead_hears(self, sender: str, now_s: float) -> list[Command]:
        """Whoever was lost and is heard again comes in anew, beside what has gone on."""
        assert self.lead is not None
        self.lead.heard(sender, now_s=now_s)
        peer = self.lead.peers.get(sender)
        if peer is None or not peer.lost or peer.card.incarnation != self._links.get(sender):
            return []
        return self.lead.back_again(peer, now_s=now_s)

    def _as_lead(self, sender: str, body: say.AnyClusterMessage, now_s: float) -> list[Command]:
        """What only a lead is told; what is late, for one that is none any more, is dropped."""
        lead = self.lead
        peer = lead.peers.get(sender) if lead is not None else None
        if lead is None or peer is None or peer.card.incarnation != self._links.get(sender):
            return []
        match body:
            case say.Promise():
                return lead.promised(body, now_s=now_s)
            case say.NotPromised():
                is_newer = body.lead_generation >= self.follower.generation
                if body.lead is not None and is_newer and not lead.is_settled:
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
        found = self.follower.prepare(sender, body, self.lead_card, hears_lead=hears)
        vote = self.follower.vote
        is_promised = vote.promised == body.generation and vote.proposer == identity(body.card)
        if is_promised and not hears and not is_mine and not self._follows(sender):
            self._follow(body.card, now_s)
        return found

    def _announced(self, sender: str, body: say.Announce, now_s: float) -> list[Command]:
        if self._follows(sender):
            self._waiting.heard_s = now_s
            if body.plan.roster:
                return self.follower.enrol(sender, body.plan, (sender, self._links[sender]))
        proposer = self.follower.vote.proposer
        if proposer is None or proposer[0] != sender or body.plan.roster:
            return []
        return self.follower.announce(sender, body, proposer)

    def _lead_beat(self, sender: str, body: say.LeadBeat, now_s: float) -> list[Command]:
        if not self._follows(sender):
            return []
        if body.ended and self.lead is not None:
            return []  # it waits until all others know
        self._waiting.heard_s = now_s
        self._waiting.lead_says_hold = body.is_held
        found: list[Command] = []
        if not self.follower.knows_of(body):
            found.append(Send(sender, self._join()))
        orders = self.follower.obey(sender, body)
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
            return self._gatherer.join(sender, body, now_s=now_s)
        lead = self.lead
        if lead is not None:
            found = lead.add(body.card, now_s=now_s, linked=True)
            # Unless that has ended our leadership, or our place in the run.
            if self.lead is lead and self.follower.plan is not None:
                found.append(Send(sender, say.Current(self.follower.plan, body.number)))
            return found
        known = self.lead_card
        if known is None or self.role is not Role.FOLLOWING or known.node_id == sender:
            return []
        return [self._lead_is(sender, now_s)]

    def _told_of_lead(self, sender: str, body: say.LeadIs, now_s: float) -> list[Command]:
        if body.card.node_id == self.me.node_id or self._follows(body.card.node_id):
            return []
        if self._hears_lead(now_s):
            # Two who lead: the other one is to know.
            return [] if body.is_settled else [self._lead_is(sender, now_s)]
        if self.lead is not None:
            if body.is_settled and body.generation >= self.follower.generation:
                return self._step_down(body.card, now_s)
            # Another proposer: the ballots decide which of us gives way.
            return self.lead.meet(body.card, now_s=now_s)
        if self.role is Role.FOLLOWING and not body.is_settled:
            return [self._lead_is(sender, now_s)]
        if body.card.node_id in self._succession.refused and not body.is_settled:
            return []
        return self._go_to(body.card, now_s)

    def _gathers(self, body: say.Gathering, now_s: float) -> list[Command]:
        self._reach = f"{len(body.here)} of {body.needed} nodes are here"
        if self.role is Role.JOINING and self.follower.newest_plan is not None:
            # Nobody at the endpoint knows of the run. We do.
            return self._take_the_lead(now_s)
        return []

    def _taken_in(self, sender: str, body: say.Current, now_s: float) -> list[Command]:
        plan = body.plan
        if self.lead is not None or plan.generation < self.follower.generation:
            return []
        card = plan.card(sender)
        if card is None or plan.lead != sender or card.incarnation != self._links.get(sender):
            return []
        if not self._follows(sender):
            self._follow(card, now_s)
        self._waiting.heard_s = now_s
        self._waiting.answered(body.number)
        return self.follower.take_current(plan)

    # --- whom to follow -----------------------------------------------------------------------

    def _follow(self, card: say.NodeCard, now_s: float) -> None:
        self.lead_card, self.role, self.lead = card, Role.FOLLOWING, None
        self._gatherer = None
        self._waiting.follow(now_s=now_s)
        self.follower.begin_to_follow()
        self._succession.found()
        self._apart_s = now_s

    def _step_down(self, card: say.NodeCard, now_s: float) -> list[Command]:
        """Another one leads a generation as new as ours: go there."""
        self.lead = None
        note = Note("SteppedDown", f"node {card.node_id} leads")
        return [note, *self._go_to(card, now_s)]

    def _go_to(self, card: say.NodeCard, now_s: float) -> list[Command]:
        """Ask this agent to take us in."""
        self._gatherer = None
        is_new = self.role is not Role.JOINING or self.lead_card != card
        self.role, self.lead_card = Role.JOINING, card
        if is_new:
            self._since_s = now_s
        return self._reach_out(card)

    def _reach_out(self, card: say.NodeCard) -> list[Command]:
        if card.node_id in self._links:
            return [Send(card.node_id, self._join())]
        return [Dial(card.host, card.port, card.node_id)]

    def _seek(self, why: str, now_s: float, *, refused: bool = False) -> list[Command]:
        """The lead is lost: the next agent in order takes over."""
        note = Note("LeadLost", f"the lead is lost: {why}", say=True)
        self.role = Role.SEEKING
        self._apart_s = now_s
        return [note, *self._give_up_on_lead(now_s, refused=refused)]

    def _give_up_on_lead(self, now_s: float, *, refused: bool = False) -> list[Command]:
        self._succession.lose(self.lead_card, refused=refused)
        return self._next_in_order(now_s)

    def _next_in_order(self, now_s: float) -> list[Command]:
        self._since_s = now_s
        card = self._succession.next(self.follower.newest_plan)
        if card == self.me:
            return self._take_the_lead(now_s)
        self.lead_card = card
        if card is not None:
            self.role = Role.SEEKING
            return self._reach_out(card)
        # Not one of the voters, and none of them is left that could take us in.
        self._succession.found()
        self.role = Role.JOINING
        return []

    def _take_the_lead(self, now_s: float) -> list[Command]:
        plan = self.follower.newest_plan
        cards = plan.voters if plan is not None else []
        return self._lead_from(cards, now_s, why="the lead is lost")

    def _lead_from(self, cards: list[say.NodeCard], now_s: float, *, why: str) -> list[Command]:
        """Propose ourselves to these."""
        follower, succession = self.follower, self._succession
        lead = Lead(
            self.me,
            self._settings,
            self._oversight(),
            follower.plan,
            follower.newest_plan,
            links=self._links,
        )
        self.lead, self.role, self.lead_card = lead, Role.LEADING, self.me
        self._gatherer = None
        for card in [*(one for one in cards if one.node_id != self.me.node_id), self.me]:
            linked = lead.has_link(card)
            peer = lead.known.put(card, now_s=now_s, linked=linked, has_answered=True)
            if card.node_id in succession.lost:
                peer.lost = "the lead is lost"
            peer.refused = card.node_id in succession.refused
        lost = set(succession.lost)
        succession.found()
        self._waiting.follow(now_s=now_s)
        follower.begin_to_follow()
        return lead.succeed(lost, why, now_s=now_s)

    # --- time ---------------------------------------------------------------------------------

    def _passing(self, now_s: float) -> list[Command]:
        found: list[Command] = []
        if self._gatherer is not None and self._gatherer.is_complete(now_s=now_s):
            cards = list(self._gatherer.cards.values())
            found += self._lead_from(cards, now_s, why="the run begins")
        found += self._look_for_lead(now_s)
        if now_s >= self._dial_due_s:
            self._dial_due_s = now_s + self._settings.redial_s
            found += self._dial_again(now_s)
        if now_s >= self._beat_due_s:
            self._beat_due_s = now_s + self._settings.heartbeat_s
            found += self._tell(now_s)
        return found

    def _look_for_lead(self, now_s: float) -> list[Command]:
        """What is due of the lead's duties, or of the search for one."""
        if self.lead is not None:
            return self.lead.passing(now_s=now_s)
        deadline_s = self._settings.deadline_s
        if self.role is Role.FOLLOWING:
            silent_s = self._waiting.silent_s(now_s=now_s)
            if silent_s < deadline_s or self.lead_card is None:
                return []
            return self._seek(f"{self.lead_card.node_id} is silent for {silent_s:.1f} s", now_s)
        gathers = self._gatherer is not None
        waited_s = now_s - self._apart_s
        found = self._patience.wait(waited_s, self.reach, gathers=gathers, now_s=now_s)
        if gathers or now_s - self._since_s < deadline_s:
            return found
        return found + self._look_further(now_s)

    def _look_further(self, now_s: float) -> list[Command]:
        """Whoever was asked has not answered within the deadline."""
        if self.lead_card is None and self.role is Role.SEEKING:
            # Started again, and nobody knows a lead: those who are here agree on one.
            for card in self._succession.acquaintances(self.follower.newest_plan):
                if card.node_id not in self._links:
                    self._succession.lose(card)
        if self.role is Role.SEEKING or self.follower.newest_plan is not None:
            return self._give_up_on_lead(now_s)
        self.lead_card = None
        return []

    def _dial_again(self, now_s: float) -> list[Command]:
        """Keep looking: for the run, for the lead, for a newcomer at the endpoint."""
        host, port = self._settings.endpoint
        endpoint = [Dial(host, port)] if port else []
        if self.lead is not None:
            return [] if self.lead.knows_endpoint() else list(endpoint)
        if self.role is Role.GATHERING:
            return []
        card = self.lead_card
        found: list[Command] = []
        if self.role is Role.FOLLOWING and card is not None:
            is_linked = card.node_id in self._links
            if is_linked and self._waiting.question:
                return [Send(card.node_id, self._join(self._waiting.question))]
            return [] if is_linked else [Dial(card.host, card.port, card.node_id)]
        if card is not None:
            return self._reach_out(card)
        if self.role is Role.SEEKING:
            for one in self._succession.acquaintances(self.follower.newest_plan):
                found += self._reach_out(one)
            return found
        others = [one for one in sorted(self._links) if one != self.me.node_id]
        found += [Send(one, self._join()) for one in others]
        return found or list(endpoint)

    def _tell(self, now_s: float) -> list[Command]:
        if self.lead is not None:
            return [Send(self.me.node_id, self._beat()), *self.lead.heartbeat(now_s=now_s)]
        if self.role is Role.FOLLOWING and self.lead_card is not None:
            return [Send(self.lead_card.node_id, self._beat())]
        return []

    def _here_is(self, event: HereIs, now_s: float) -> list[Command]:
        self._here = event.beat
        beat = event.beat
        if not event.is_urgent:
            return []
        if beat.stops and self.role in (Role.JOINING, Role.GATHERING, Role.SEEKING):
            return [EndRun(128 + (beat.stop_signal or 15), "stopped before the run had begun")]
        if self.lead is not None:
            return [Send(self.me.node_id, self._beat())]
        return self._tell(now_s)

    # --- holding ranks ------------------------------------------------------------------------

    def _hold_or_release(self, now_s: float) -> list[Command]:
        """Stop this node's ranks while the run may go on without them."""
        follower, plan = self.follower, self.follower.plan
        if not follower.is_member or plan is None or follower.is_in_ballot:
            return []
        why = "" if len(plan.voters) == 1 else self._why_to_hold(now_s)
        if why and not self.is_held:
            self.is_held = True
            return [HoldRanks(why), Note("Held", f"the ranks of this node wait: {why}", say=True)]
        if self.is_held and not why:
            self.is_held = False
            return [ReleaseRanks("the lead is heard again")]
        return []

    def _why_to_hold(self, now_s: float) -> str:
        if self.lead is not None:
            return "too few of the other nodes are heard" if self.lead.is_doubtful else ""
        return self._waiting.why(now_s=now_s)

    def _mind_the_gap(self, now_s: float) -> list[Command]:
        """Whether this process itself has stood still."""
        gap_s = self._waiting.stood_still_s(now_s=now_s)
        if not gap_s:
            return []
        self._since_s += gap_s
        if self.lead is not None:
            self.lead.stood_still(now_s=now_s)
            return []
        card = self.lead_card
        if self.role is not Role.FOLLOWING or card is None or not self.follower.is_member:
            return []
        return [Send(card.node_id, self._join(self._waiting.ask()))]

    # --- small things -------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self.role is Role.ENDED

    def _follows(self, node_id: str) -> bool:
        if self.lead is not None:
            return node_id == self.me.node_id
        card = self.lead_card
        return self.role is Role.FOLLOWING and card is not None and card.node_id == node_id

    def _hears_lead(self, now_s: float) -> bool:
        """Somebody leads a generation that has taken effect, and must not be deserted."""
        if self.lead is not None:
            is_sure = self.lead.is_settled and not self.lead.is_doubtful
            return is_sure or self.lead.ending is not None
        card = self.lead_card
        if self.role is not Role.FOLLOWING or card is None or card.node_id not in self._links:
            return False
        return not self.follower.is_in_ballot and not self._waiting.is_cut_off(now_s=now_s)

    def _lead_is(self, node_id: str, now_s: float) -> Send:
        assert self.lead_card is not None
        settled = self._hears_lead(now_s)
        return Send(node_id, say.LeadIs(self.lead_card, self.follower.generation, settled))

    def _join(self, number: int = 0) -> say.Join:
        newest = self.follower.newest_plan
        knows = newest.generation if newest is not None else -1
        return say.Join(self.me, str(self._settings.wishes), knows, number)

    def _join_if_new(self, node_id: str) -> list[Command]:
        plan = self.follower.plan
        is_known = plan is not None and plan.card(self.me.node_id) == self.me
        if self._waiting.question:
            return [Send(node_id, self._join(self._waiting.question))]
        return [] if is_known else [Send(node_id, self._join())]

    def _beat(self) -> say.Beat:
        self._beat_number += 1
        return say.beat(
            self._here,
            number=self._beat_number,
            heard=self.follower.heard,
            promised=self.follower.vote.promised,
        )
