"""Whom an agent follows; or how it looks for somebody to follow.

Runs in:  every agent. Pure.
Takes in: who is reached, who refuses, who says that somebody leads, time.
Gives:    the role of this agent; dials and requests; the decision to propose itself.
Survives: its lead: the next agent in order takes over, and every agent knows the order.

    JOINING    looks for the run, at the endpoints or at an address from a peer
    GATHERING  listens at the first endpoint itself, and knows of no run
    FOLLOWING  has a lead: as a member, as a spare, or beside the generation
    SEEKING    has lost its lead, or was started again, and looks who leads
    LEADING    leads, or proposes itself
    ENDED      was told that the run is over, or has given up

Rule 1: the first generation needs all nodes, and each must say that it knows no generation. A
        newcomer at the endpoint waits for a lead that looks for it before it begins a run, and
        begins none once it has met a node that knows of one.
Rule 2: with an outside witness there is no endpoint: the first who claims it is the one that the
        others come to, for as long as it renews its claim.
"""

from collections.abc import Callable, Mapping
from enum import Enum

from ftrun.recovery.commands import Command, Dial, Note, Send, Wish
from ftrun.recovery.follower import Follower
from ftrun.recovery.gathering import Gatherer
from ftrun.recovery.happenings import WitnessSaid
from ftrun.recovery.incidents import Incidents
from ftrun.recovery.patience import Patience
from ftrun.recovery.settings import ClusterSettings
from ftrun.recovery.succession import Succession
from ftrun.recovery.waiting import Waiting
from ftrun.recovery.witness import Witness
from ftrun.wire.ballot_messages import Gathering, Join
from ftrun.wire.heartbeats import Beat
from ftrun.wire.plan import NodeCard


class Role(Enum):
    """What an agent is doing about the others."""

    JOINING = "joining"
    GATHERING = "gathering"
    FOLLOWING = "following"
    SEEKING = "seeking"
    LEADING = "leading"
    ENDED = "ended"


TakeTheLead = Callable[[float], list[Command]]
"""Propose ourselves; given the time."""


class Allegiance:
    """One agent's lead, or its search for one."""

    def __init__(
        self,
        me: NodeCard,
        settings: ClusterSettings,
        follower: Follower,
        links: Mapping[str, int],
        take_the_lead: TakeTheLead,
        *,
        witness: Witness,
        now_s: float,
    ) -> None:
        """Begin to look around.

        Args:
            me: this agent.
            settings: of the run.
            follower: what this agent knows and has promised.
            links: incarnations of the agents there are connections to, by node id.
            take_the_lead: what to do where nobody else is to lead.
            witness: the outside one.
            now_s: the time.
        """
        self.role = Role.JOINING
        self.lead_card: NodeCard | None = None
        """Whom it follows, or tries to reach."""
        self.gatherer: Gatherer | None = None
        self.waiting = Waiting(settings, now_s=now_s)
        self.succession = Succession(me)
        self.answer = "nobody has answered yet"
        self.has_met = follower.newest_plan is None
        """It has been with others, or has nobody to miss."""
        self._me = me
        self._settings = settings
        self._follower = follower
        self._links = links
        self._take_the_lead = take_the_lead
        self._witness = witness
        self._patience = Patience(settings, now_s=now_s)
        self._since_s = self._apart_s = self._look_s = now_s
        self._lead_lost_s: float | None = None
        """When the lead that was followed last was heard last, where it was lost."""
        self._turn = -1
        """Which endpoint was dialled last."""
        self._is_answered = False
        """Nodes gather at an agent that has answered since then."""
        if follower.newest_plan is not None:  # an earlier agent of this node had a part in the run
            self.role = Role.SEEKING
        elif me.endpoint:
            self.role = Role.GATHERING
            self.gatherer = Gatherer(me, settings, now_s=now_s)

    @property
    def reach(self) -> str:
        """Whom it has reached so far, in words."""
        return self.gatherer.missing() if self.gatherer is not None else self.answer

    def may_end(self, here: Beat) -> bool:
        """Whether this node ends by itself for what its operator or its scheduler has asked for."""
        if self.role in (Role.JOINING, Role.GATHERING):
            return bool(here.stops) or here.leaves
        # What another one holds of the run may be needed: the next lead lets it go.
        return self.role is Role.SEEKING and bool(here.stops)

    @property
    def is_over(self) -> bool:
        return self.role is Role.ENDED

    def follows(self, node_id: str) -> bool:
        card = self.lead_card
        return self.role is Role.FOLLOWING and card is not None and card.node_id == node_id

    def hears_lead(self, *, now_s: float) -> bool:
        """Somebody leads a generation that has taken effect, and must not be deserted."""
        if self.role is not Role.FOLLOWING:
            return False  # a closed connection alone proves nothing, see attendance.py
        return not self._follower.is_in_ballot and not self.waiting.is_cut_off(now_s=now_s)

    def is_bound_beyond(self, generation: int, *, now_s: float) -> bool:
        """It has promised a later generation, and the proposer of that one is alive."""
        follower = self._follower
        is_promised = follower.is_in_ballot and follower.vote.promised > generation
        is_heard = self.follows(follower.proposer_id) and not self.waiting.is_cut_off(now_s=now_s)
        return is_promised and is_heard

    # --- whom to follow -----------------------------------------------------------------------

    def follow(self, card: NodeCard, *, now_s: float) -> None:
        """There is a lead."""
        self.has_met = True
        self._found(card, Role.FOLLOWING, now_s)
        self._apart_s = now_s

    def lead(self, *, now_s: float) -> None:
        """This agent proposes itself."""
        self._found(self._me, Role.LEADING, now_s)

    def hand_over(self, incidents: Incidents, *, now_s: float) -> None:
        """This agent leads from now on: what it knows of incidents, and of the newest fault."""
        follower = self._follower
        incidents.succeed(follower.incidents)
        if self.succession.lost and self._lead_lost_s is not None:
            incidents.sign(self._lead_lost_s)
        elif follower.agent_lost_s is not None and follower.newest_plan is not None:
            lost_s, follower.agent_lost_s = follower.agent_lost_s, None
            incidents.agent_lost(self._me.node_id, lost_s, now_s=now_s)

    def _found(self, card: NodeCard, role: Role, now_s: float) -> None:
        self.lead_card, self.role, self.gatherer = card, role, None
        self.waiting.follow(now_s=now_s)
        self._follower.begin_to_follow()
        self.succession.found()

    def go_to(self, card: NodeCard, *, now_s: float) -> list[Command]:
        """Ask this agent to take us in."""
        self.gatherer = None
        is_new = self.role is not Role.JOINING or self.lead_card != card
        self.role, self.lead_card = Role.JOINING, card
        if is_new:
            self._since_s = now_s
        return self._reach_out(card)

    def seek(self, why: str, *, now_s: float, refused: bool = False) -> list[Command]:
        """The lead is lost: the next agent in order takes over."""
        note = Note("LeadLost", f"the lead is lost: {why}", say=True)
        self.role = Role.SEEKING
        self._apart_s = now_s
        self._lead_lost_s = now_s if refused else now_s - self.waiting.silent_s(now_s=now_s)
        return [note, *self.give_up(now_s=now_s, refused=refused)]

    def give_up(self, *, now_s: float, refused: bool = False) -> list[Command]:
        """Whoever was to lead does not answer, or is dead: turn to the next in order."""
        self.succession.lose(self.lead_card, refused=refused)
        self._since_s = now_s
        card = self.succession.next(self._follower.newest_plan)
        if card == self._me:
            return self._take_the_lead(now_s)
        self.lead_card = card
        if card is not None:
            self.role = Role.SEEKING
            return self._reach_out(card)
        # Not one of the voters, and none of them is left that could take us in.
        self.succession.found()
        self.role = Role.JOINING
        return []

    def gathers(self, body: Gathering, *, now_s: float) -> list[Command]:
        """Nodes come together at the endpoint for a first generation."""
        self.answer = f"{len(body.here)} of {body.needed} nodes are here"
        self._is_answered = True
        if self.role is Role.JOINING and self._follower.newest_plan is not None:
            # Nobody at the endpoint knows of the run. We do.
            return self._take_the_lead(now_s)
        return []

    # --- the outside witness ------------------------------------------------------------------

    def ask_witness(self, *, now_s: float) -> list[Command]:
        """Look there who leads; be the one the others come to, where nobody is."""
        is_blank = self._follower.newest_plan is None
        is_on_its_way = self.role is Role.JOINING and self.lead_card is not None
        if is_on_its_way and now_s < self._look_s:
            return []  # thousands of nodes may be, at once
        self._look_s = now_s + self._settings.deadline_s
        match self.role:
            case Role.JOINING | Role.GATHERING if is_blank:
                return self._witness.ask(Wish.CLAIM, now_s=now_s)
            case Role.JOINING | Role.SEEKING:
                return self._witness.ask(Wish.LOOK, now_s=now_s)
            case _:
                return []

    def witness_said(self, event: WitnessSaid, *, now_s: float) -> list[Command]:
        """Go to the lead that is known there."""
        if not event.is_reached:
            self.answer = event.why
            return []
        card, may_go = event.lead, self.role in (Role.JOINING, Role.GATHERING)
        if card is None or card == self.lead_card:
            return []
        if card.node_id == self._me.node_id:
            is_blank = card == self._me and self._follower.newest_plan is None
            return self._gather(event, now_s) if may_go and is_blank else []
        may_go |= self.role is Role.SEEKING and card.node_id not in self.succession.lost
        return self.go_to(card, now_s=now_s) if may_go else []

    def _gather(self, event: WitnessSaid, now_s: float) -> list[Command]:
        """This agent is the one that the others come to."""
        if self.gatherer is None:
            self.role, self.lead_card = Role.GATHERING, None
            self.gatherer = Gatherer(self._me, self._settings, now_s=now_s)
        plan = event.register.plan if event.register is not None else None
        voters = plan.voters if plan is not None else []
        self.gatherer.remembered = frozenset(card.node_id for card in voters)
        return []

    # --- time ---------------------------------------------------------------------------------

    def stood_still(self, gap_s: float) -> None:
        """This process could do nothing for so long: nobody else is late for it."""
        self._since_s += gap_s

    def passing(self, *, now_s: float) -> list[Command]:
        """The search for a lead, or the watch over the one there is."""
        deadline_s = self._settings.deadline_s
        if self.role is Role.FOLLOWING:
            silent_s = self.waiting.silent_s(now_s=now_s)
            if silent_s < deadline_s or self.lead_card is None:
                return []
            why = f"{self.lead_card.node_id} is silent for {silent_s:.1f} s"
            return self.seek(why, now_s=now_s)
        gathers = self.gatherer is not None
        waited_s = now_s - self._apart_s
        found = self._patience.wait(waited_s, self.reach, gathers=gathers, now_s=now_s)
        if gathers or (now_s - self._since_s < deadline_s and not self._is_only_voter):
            return found
        return found + self._look_further(now_s)

    @property
    def _is_only_voter(self) -> bool:
        """The last agent of this node led alone, so no other agent can lead now."""
        plan = self._follower.newest_plan
        is_alone = plan is not None and not self.succession.acquaintances(plan)
        return self.role is Role.SEEKING and is_alone and not self._witness.is_used

    def _look_further(self, now_s: float) -> list[Command]:
        """Whoever was asked has not answered within the deadline."""
        if self.lead_card is None and self.role is Role.SEEKING:
            # Started again, and nobody knows a lead: those who are here agree on one.
            for card in self.succession.acquaintances(self._follower.newest_plan):
                if card.node_id not in self._links:
                    self.succession.lose(card)
        if self.role is Role.SEEKING or self._follower.newest_plan is not None:
            return self.give_up(now_s=now_s)
        self.lead_card = None
        return []

    def dial_again(self) -> list[Command]:
        """Keep looking: for the run, for the lead."""
        card = self.lead_card
        if self.role is Role.GATHERING:
            return []
        if self.role is Role.FOLLOWING and card is not None:
            is_linked = card.node_id in self._links
            if is_linked and self.waiting.question:
                return [Send(card.node_id, self.join(self.waiting.question))]
            return [] if is_linked else [Dial(card.host, card.port, card.node_id)]
        if card is not None:
            return self._reach_out(card)
        found: list[Command] = []
        if self.role is Role.SEEKING:
            for one in self.succession.acquaintances(self._follower.newest_plan):
                found += self._reach_out(one)
            return found
        others = [one for one in sorted(self._links) if one != self._me.node_id]
        found += [Send(one, self.join()) for one in others]
        return found + self._dial_endpoint(has_others=bool(others))

    def _dial_endpoint(self, *, has_others: bool) -> list[Command]:
        """The next endpoint in turn, while no agent has answered that nodes gather there."""
        endpoints, me = self._settings.endpoints, self._me
        own = {me.further_endpoint} if me.endpoint or me.further_endpoint else set()
        found = [one for at, one in enumerate(endpoints) if at not in own]
        is_answered, self._is_answered = self._is_answered, False
        if is_answered or not found or (has_others and len(endpoints) == 1):
            return []
        self._turn = (self._turn + 1) % len(found)
        return [Dial(*found[self._turn])]

    # --- small things -------------------------------------------------------------------------

    def join(self, number: int = 0) -> Join:
        """The wish to be taken in.

        Args:
            number: comes back in the answer.
        """
        newest = self._follower.newest_plan
        knows = newest.generation if newest is not None else -1
        return Join(self._me, str(self._settings.wishes), knows, number)

    def _reach_out(self, card: NodeCard) -> list[Command]:
        if card.node_id in self._links:
            return [Send(card.node_id, self.join())]
        return [Dial(card.host, card.port, card.node_id)]
