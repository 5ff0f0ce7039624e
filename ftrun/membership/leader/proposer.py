"""One agent's attempts to bring a generation about, one ballot at a time.

Runs in:  the agent that leads, or that tries to. Pure.
Takes in: answers to its ballot, lost nodes, time.
Gives:    prepares and announcements; at which `BallotStage` the ballot is.
Source:   see ballots.py.

Rule 1: whoever is here is heard before anything is announced, as it may hold what is to be
        restored; unless it does not answer for `answer_s`. Members of an announced plan are waited
        for as long as they are heard: they may be reading a checkpoint.
Rule 2: what was asked is asked again until it is answered.
Rule 3: a proposer that is refused gives the other one time, and more of it each time.
Rule 4: a plan that this proposer has announced and given up cannot take effect any more: only its
        proposer counts acceptances. Its voters need not agree to what follows.
Rule 5: the outside witness is asked as they are, and waited for only while it is known to be there.
"""

from collections.abc import Collection
from enum import Enum, auto

from ftrun.membership.ballots import Ballot, electorate_of, runs_ranks
from ftrun.membership.events import WitnessAnswered
from ftrun.membership.leader.failure_detector import FailureDetector, PeerState
from ftrun.recovery.commands import Command, Connect, JournalEntry, Send, WitnessOperation
from ftrun.recovery.settings import MembershipSettings
from ftrun.wire.cluster.generation import Edition, GenerationPlan, NodeCard
from ftrun.wire.cluster.membership import Accept, Accepted, Prepare, PrepareRejected, Promise

WITNESS_WAIT_S = 2.0
"""Longer than whoever asks the outside witness tries to reach it."""

_PATIENCE_S, _PATIENCE_BY_PLACE_S, _MAX_DOUBLINGS = 0.2, 0.5, 4


class BallotStage(Enum):
    """How far a ballot is."""

    ASKED = auto()
    """Some have not answered yet."""
    PROMISED = auto()
    """All who are here have, and they may decide: a plan can be announced."""
    SHORT = auto()
    """All who are here have, and they may not decide."""
    ANNOUNCED = auto()
    """Some have not accepted yet."""
    CARRIED = auto()
    """It takes effect."""
    BROKEN = auto()
    """It cannot take effect any more."""


class Proposer:
    """The ballots of one proposer."""

    def __init__(self, me: NodeCard, settings: MembershipSettings, peers: FailureDetector) -> None:
        self.ballot: Ballot | None = None
        self.highest = -1
        """The highest number that anybody is known to have promised."""
        self.followers: set[str] = set()
        """Nodes that have promised a ballot of this proposer since its last generation began."""
        self._me = me
        self._settings = settings
        self._peers = peers
        self._awaited: dict[str, float] = {}
        """Who has not answered yet, and since when."""
        self._needed: set[str] = set()
        """Members of the announced plan that have not accepted."""
        self._given_up: list[GenerationPlan] = []
        """Announced by this proposer, and not carried."""
        self._slow: list[str] = []
        """Of which that was said."""
        self._refusals = 0
        self._witness_asked_s: float | None = None
        """When the outside witness was asked what it has not answered; None: it has."""
        self._ask_witness_s = 0.0
        self.again_s: float | None = None
        """When to begin another ballot."""
        self.again_why = ""

    # --- asking -------------------------------------------------------------------------------

    def begin(
        self,
        why: str,
        *,
        plan: GenerationPlan | None,
        unsure: GenerationPlan | None,
        void: Collection[Edition] = (),
        now_s: float,
    ) -> list[Command]:
        """Ask everyone for a promise.

        Args:
            why: in words.
            plan: the newest generation that is known to have taken effect.
            unsure: a newer one that may have.
            void: rosters that only this agent could bring into effect, and does not.
            now_s: the time.
        """
        known = plan.edition if plan is not None else (-1, 0)
        if self.ballot is not None and self.ballot.plan is not None:
            self._given_up.append(self.ballot.plan)
        self._given_up = [one for one in self._given_up if one.edition > known]
        if unsure is not None and unsure.edition <= known:
            unsure = None
        self.highest = max(self.highest, known[0], unsure.generation if unsure else -1) + 1
        needs = {known: electorate_of(plan)} if plan is not None else {}
        given_up = tuple(self._given_up)
        self.ballot = Ballot(self.highest, why, known, needs, frozenset(void), given_up)
        begins = plan is None and unsure is None
        self.ballot.needs_witness = begins and self._peers.witness.is_used
        if unsure is not None:
            self.ballot.mind(unsure)
        self.again_s = self._witness_asked_s = None
        self._awaited = {peer.card.node_id: now_s for peer in self._peers if not peer.lost}
        self._needed.clear()
        found: list[Command] = [JournalEntry("Ballot", why, {"generation": self.highest})]
        for peer in self._peers:
            found += self.ask(peer, now_s=now_s)
        return found + self._ask_witness(now_s, waits=True)

    def announce(self, plan: GenerationPlan, *, now_s: float) -> list[Command]:
        """Ask everyone who has promised to accept this."""
        assert self.ballot is not None
        self.ballot.announce(plan)
        self._refusals = 0
        self.again_s = None  # what was missing, and to be asked for again, is not any more
        self._awaited = dict.fromkeys(self.ballot.promises, now_s)
        self._needed, self._slow = {node.node_id for node in plan.members}, []
        found: list[Command] = [Send(one, Accept(plan)) for one in self.ballot.promises]
        return found + self._ask_witness(now_s, waits=True)

    def joined(self, peer: PeerState, *, now_s: float) -> list[Command]:
        """Another agent is here."""
        if self.ballot is not None and self.ballot.plan is None:
            self._awaited[peer.card.node_id] = now_s
        return self.ask(peer, now_s=now_s)

    def ask(self, peer: PeerState, *, now_s: float) -> list[Command]:
        """Whatever this agent has to answer for the ballot to go on."""
        ballot, node_id = self.ballot, peer.card.node_id
        if ballot is None or node_id not in self._awaited:
            return []
        if not peer.linked:
            dials = self._peers.is_to_be_dialled(peer, now_s=now_s)
            return [Connect(peer.card.host, peer.card.port, node_id)] if dials else []
        if ballot.plan is None:
            return self._prepare(ballot, peer, now_s)
        peer.asked_s = now_s
        return [Send(node_id, Accept(ballot.plan))]

    def repeat(self, *, now_s: float) -> list[Command]:
        """Ask again what was not answered, and give up what has waited for too long."""
        if self.ballot is None:
            return []
        for node_id, since_s in list(self._awaited.items()):
            is_late = now_s - since_s >= self._settings.answer_s and node_id != self._me.node_id
            if is_late and node_id not in self._needed:
                del self._awaited[node_id]
                self._peers.by_id[node_id].is_mute = True
        if self._witness_asked_s is not None and now_s - self._witness_asked_s >= WITNESS_WAIT_S:
            self._witness_asked_s = None
        found: list[Command] = self._ask_witness(now_s) if now_s >= self._ask_witness_s else []
        for peer in self._peers:
            if now_s - peer.asked_s < 2 * self._settings.heartbeat_s:
                continue
            if peer.card.node_id in self._awaited:
                found += self.ask(peer, now_s=now_s)
            elif peer.lost and peer.linked and self.ballot.plan is None:
                # It may be there and have nothing to say to us. Any answer brings it back.
                found += self._prepare(self.ballot, peer, now_s)
        return found

    # --- answers ------------------------------------------------------------------------------

    def promised(self, body: Promise) -> bool:
        """Whether this promise counts."""
        ballot = self.ballot
        peer = self._peers.by_id.get(body.card.node_id)
        if peer is not None:
            peer.is_mute = False  # also if it answers too late: the run may grow by it
        if (
            peer is None
            or ballot is None
            or body.generation != ballot.generation
            or ballot.plan is not None
        ):
            return False
        ballot.take_promise(body)
        self.followers.add(body.card.node_id)
        peer.fitness = body.fitness or peer.fitness
        self._awaited.pop(body.card.node_id, None)
        return True

    def keep_witness(self, plan: GenerationPlan | None, *, now_s: float) -> list[Command]:
        """Have the outside witness promise nobody else anything for now.

        Args:
            plan: the one in effect, of a settled lead. In a ballot what was announced is kept; and
                the place where nodes are waited for that come back as somebody else.
            now_s: the time.
        """
        witness, ballot = self._peers.witness, self.ballot
        if plan is not None:
            return witness.say_who_leads(plan, now_s=now_s)
        if ballot is None or not ballot.witness:
            return []
        if ballot.plan is None and self.stage() is not BallotStage.PROMISED:
            return []  # the ballot asks by itself; who is short of votes is in nobody's way
        return witness.ask(WitnessOperation.KEEP, generation=ballot.generation, now_s=now_s)

    def witness_said(self, event: WitnessAnswered, place: int, *, now_s: float) -> list[NodeCard]:
        """What the outside witness has answered to this ballot; whom it has named."""
        ballot, asked, register = self.ballot, event.asked, event.register
        if ballot is None:
            return []
        found = [event.lead] if event.lead is not None else []
        if asked.generation == ballot.generation and asked.wish in (
            WitnessOperation.PROMISE,
            WitnessOperation.ACCEPT,
        ):
            self._witness_asked_s = None
            self._answered(ballot, event, place, now_s)
            if (
                asked.wish is WitnessOperation.PROMISE
                and register is not None
                and register.plan is not None
            ):
                found += register.plan.voters
        return found

    def _answered(self, ballot: Ballot, event: WitnessAnswered, place: int, now_s: float) -> None:
        register = event.register
        if event.asked.wish is WitnessOperation.ACCEPT:
            ballot.is_witnessed = ballot.is_witnessed or event.granted
        elif event.granted and ballot.plan is None and register is not None:
            ballot.take_witness(register.life, register.plan)
        elif register is not None and not event.granted and event.lead in (None, self._me):
            # Somebody else has taken this number, or a higher one.
            self.highest = max(self.highest, register.promised)
            self.begin_again(ballot.why, place, now_s=now_s)

    def _ask_witness(self, now_s: float, *, waits: bool = False) -> list[Command]:
        """Whatever the outside witness has to answer for the ballot to go on.

        Args:
            now_s: the time.
            waits: its answer is waited for, where it has answered before.
        """
        ballot, witness = self.ballot, self._peers.witness
        assert ballot is not None
        self._ask_witness_s = now_s + 2 * self._settings.heartbeat_s
        number = ballot.generation
        if ballot.plan is None and not ballot.witness:
            begins = ballot.needs_witness
            found = witness.ask(
                WitnessOperation.PROMISE, generation=number, begins=begins, now_s=now_s
            )
        elif ballot.plan is not None and ballot.witness and not ballot.is_witnessed:
            plan = ballot.plan
            found = witness.ask(WitnessOperation.ACCEPT, generation=number, plan=plan, now_s=now_s)
        else:
            return []
        if waits and found and witness.is_reached:
            self._witness_asked_s = now_s
        return found

    def not_promised(self, body: PrepareRejected, place: int, *, now_s: float) -> None:
        """Somebody has promised a higher number, or this one to another proposer."""
        self.highest = max(self.highest, body.promised)
        if self.ballot is not None and body.generation == self.ballot.generation:
            self.begin_again(self.ballot.why, place, now_s=now_s)

    def begin_again(self, why: str, place: int, *, now_s: float) -> None:
        """Begin another ballot a little later; two proposers wait for different times."""
        if self.again_s is None:
            patience_s = _PATIENCE_S + _PATIENCE_BY_PLACE_S * place
            self.again_s = now_s + patience_s * 2.0 ** min(self._refusals, _MAX_DOUBLINGS)
            self.again_why = why
            self._refusals += 1

    def is_beside(self, generation: int) -> bool:
        """Whether this ballot begins a run although a node knows another generation.

        Args:
            generation: the newest one that a node knows.
        """
        ballot = self.ballot
        if ballot is None or ballot.base != (-1, 0) or generation < ballot.generation:
            return False
        self.highest = max(self.highest, generation)
        return True

    def note_promise(
        self,
        peer: PeerState,
        promised: int,
        plan: GenerationPlan | None,
        place: int,
        *,
        now_s: float,
    ) -> None:
        """A member that has promised a later generation to another has no ranks any more.

        Args:
            peer: who it is.
            promised: the highest number that it has promised anyone.
            plan: the one in effect, of a settled lead; None: it is not.
            place: of this agent in the succession.
            now_s: the time.
        """
        peer.promised = promised
        self.highest = max(self.highest, promised)
        if plan is not None and promised > plan.generation and runs_ranks(plan, peer.card):
            why = f"node {peer.card.node_id} has promised generation {promised} to another"
            self.begin_again(why, place, now_s=now_s)
        ballot = self.ballot
        is_needed = peer.card.node_id in self._needed
        if ballot is not None and is_needed and promised > ballot.generation:
            # It can never accept what was announced.
            self.begin_again(ballot.why, place, now_s=now_s)

    def accepted(self, node_id: str, body: Accepted) -> bool:
        """Whether this acceptance counts."""
        ballot = self.ballot
        if ballot is None or ballot.plan is None or body.generation != ballot.generation:
            return False
        if node_id not in ballot.promises:
            return False
        if body.problem and not self.is_member(node_id):
            return False  # it stands by, and has kept nothing
        ballot.accepted[node_id] = body
        self._awaited.pop(node_id, None)
        self._needed.discard(node_id)
        return True

    def hold_up(self, *, now_s: float) -> list[Command]:
        """Say which members have been getting ready for an announced plan for long; once."""
        since_s = now_s - self._settings.answer_s
        slow = sorted(one for one in self._needed if self._awaited.get(one, now_s) <= since_s)
        if self.ballot is None or not slow or slow == self._slow:
            return []
        self._slow = slow
        text = f"generation {self.ballot.generation} waits for {', '.join(slow)} to get ready"
        return [JournalEntry("Waiting", f"{text}, as where a checkpoint is read", say=True)]

    def lost(self, node_id: str) -> None:
        """This agent answers nothing any more."""
        self._awaited.pop(node_id, None)
        self.followers.discard(node_id)
        if self.ballot is not None and self.ballot.plan is None:
            self.ballot.promises.pop(node_id, None)

    def is_member(self, node_id: str) -> bool:
        """Whether the plan that was announced counts on this node."""
        plan = self.ballot.plan if self.ballot is not None else None
        return plan is not None and plan.member(node_id) is not None

    def won(self) -> GenerationPlan:
        """The plan that takes effect; the ballot is over."""
        assert self.ballot is not None
        assert self.ballot.plan is not None
        plan, self.ballot = self.ballot.plan, None
        self._awaited.clear()
        self.followers.clear()
        self._witness_asked_s = None
        return plan

    def stage(self) -> BallotStage:
        ballot = self.ballot
        assert ballot is not None
        if ballot.plan is None:
            if self._awaited or self._witness_asked_s is not None:
                return BallotStage.ASKED
            return BallotStage.PROMISED if ballot.is_promised() else BallotStage.SHORT
        if not self._needed and ballot.is_accepted():
            return BallotStage.CARRIED
        waits = self._awaited or self._witness_asked_s is not None
        return BallotStage.ANNOUNCED if waits else BallotStage.BROKEN

    def _prepare(self, ballot: Ballot, peer: PeerState, now_s: float) -> list[Command]:
        peer.asked_s = now_s
        # Nobody need send a plan that is as old as the base.
        body = Prepare(ballot.generation, self._me, ballot.why, ballot.base)
        return [Send(peer.card.node_id, body)]
