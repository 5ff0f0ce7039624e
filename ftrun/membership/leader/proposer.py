"""The attempts of one agent to have a generation chosen, one ballot at a time.

Runs in:  the agent that leads, or that proposes itself. Pure.
Takes in: answers to its ballot, lost nodes, time.
Gives:    prepare and accept requests; the `BallotStage` of the ballot.
Source:   see ballots.py.

Rule 1: all present nodes must answer before a plan is announced, because any of them may hold the
        state to restore. A node that does not answer for `answer_s` is skipped. The members of an
        announced plan have no such limit while they send messages: they may be reading a
        checkpoint.
Rule 2: a request is repeated until it is answered.
Rule 3: a rejected proposer gives the other proposer time, and doubles it with each rejection.
Rule 4: a plan that this proposer has announced and given up cannot be chosen any more, because only
        its proposer counts acceptances. Its voters need not agree to later plans.
Rule 5: the witness is asked like a node, but awaited only while it is known to be reachable.
"""

from collections.abc import Collection
from enum import Enum, auto

from ftrun.config.cluster import MembershipSettings
from ftrun.membership.ballots import Ballot, electorate_of, runs_ranks
from ftrun.membership.events import WitnessAnswered
from ftrun.membership.leader.failure_detector import FailureDetector, PeerState
from ftrun.records.membership import BallotStarted, WaitingForNodes
from ftrun.recovery.commands import Command, Connect, JournalEntry, Send, WitnessOperation
from ftrun.wire.cluster.generation import ConfigurationId, GenerationPlan, NodeCard
from ftrun.wire.cluster.membership import Accept, Accepted, Prepare, PrepareRejected, Promise

WITNESS_WAIT_S = 2.0
"""Seconds to wait for the witness; longer than the thread that asks it tries to reach it."""

_TIMEOUT_S, _TIMEOUT_BY_POSITION_S, _MAX_DOUBLINGS = 0.2, 0.5, 4


class BallotStage(Enum):
    """The progress of a ballot."""

    ASKED = auto()
    """Some nodes have not answered yet."""
    PROMISED = auto()
    """All present nodes have promised, and are a quorum: a plan can be announced."""
    SHORT = auto()
    """All present nodes have promised, and are no quorum."""
    ANNOUNCED = auto()
    """Some nodes have not accepted yet."""
    CARRIED = auto()
    """The plan is chosen."""
    BROKEN = auto()
    """The plan cannot be chosen any more."""


class Proposer:
    """The ballots of one proposer."""

    def __init__(self, me: NodeCard, settings: MembershipSettings, peers: FailureDetector) -> None:
        self.ballot: Ballot | None = None
        self.highest = -1
        """The highest number known to be promised to any proposer."""
        self.followers: set[str] = set()
        """Nodes that have promised a ballot of this proposer since its last chosen generation."""
        self._me = me
        self._settings = settings
        self._peers = peers
        self._awaited: dict[str, float] = {}
        """Nodes that have not answered yet, and since when they have been asked."""
        self._needed: set[str] = set()
        """Members of the announced plan that have not accepted."""
        self._given_up: list[GenerationPlan] = []
        """Plans that this proposer announced and that were not chosen."""
        self._slow: list[str] = []
        """Members that were already reported as slow to get ready."""
        self._refusals = 0
        self._witness_asked_s: float | None = None
        """When the unanswered request was sent to the witness; None: none is awaited."""
        self._ask_witness_s = 0.0
        self.again_s: float | None = None
        """When to begin another ballot; None: not scheduled."""
        self.retry_reason = ""

    # --- asking -------------------------------------------------------------------------------

    def begin(
        self,
        reason: str,
        plan: GenerationPlan | None,
        unsure: GenerationPlan | None,
        void: Collection[ConfigurationId] = (),
        *,
        stay: bool | None = None,
        failed: Collection[int] = (),
        now_s: float,
    ) -> list[Command]:
        """Starts a ballot: asks all nodes for a promise.

        Args:
            plan: the newest generation known to be chosen.
            unsure: a newer one that may have been chosen.
            void: voter revisions that only this agent could have had chosen, and has given up.
            stay: with `restart.survivors`, ranks that may stay are parked; None: as in the ballot
                that this one replaces.
            failed: ranks that do not stay, in addition to those of that ballot.
        """
        known = plan.configuration_id if plan is not None else (-1, 0)
        before = self.ballot
        if before is not None and before.plan is not None:
            self._given_up.append(before.plan)
        self._given_up = [one for one in self._given_up if one.configuration_id > known]
        if unsure is not None and unsure.configuration_id <= known:
            unsure = None
        self.highest = max(self.highest, known[0], unsure.generation if unsure else -1) + 1
        needs = {known: electorate_of(plan)} if plan is not None else {}
        given_up = tuple(self._given_up)
        self.ballot = Ballot(self.highest, reason, known, needs, frozenset(void), given_up)
        if plan is not None:
            self.ballot.lives[electorate_of(plan)] = plan.life
        begins = plan is None and unsure is None
        self.ballot.needs_witness = begins and self._peers.witness.is_used
        self.ballot.stay = before is not None and before.stay if stay is None else stay
        self.ballot.stay &= self._settings.profile.restart.survivors == "on"
        self.ballot.failed = {*failed, *(before.failed if before is not None else ())}
        if unsure is not None:
            self.ballot.mind(unsure)
        self.again_s = self._witness_asked_s = None
        self._awaited = {peer.card.node_id: now_s for peer in self._peers if not peer.lost}
        self._needed.clear()
        found: list[Command] = [JournalEntry(BallotStarted(reason, self.highest))]
        for peer in self._peers:
            found += self.ask(peer, now_s=now_s)
        return found + self._ask_witness(now_s, waits=True)

    def announce(self, plan: GenerationPlan, *, now_s: float) -> list[Command]:
        assert self.ballot is not None
        self.ballot.announce(plan)
        self._refusals = 0
        self.again_s = None  # nothing is missing any more, so no further ballot is due
        self._awaited = dict.fromkeys(self.ballot.promises, now_s)
        self._needed, self._slow = {node.node_id for node in plan.members}, []
        found: list[Command] = [Send(one, Accept(plan)) for one in self.ballot.promises]
        return found + self._ask_witness(now_s, waits=True)

    def joined(self, peer: PeerState, *, now_s: float) -> list[Command]:
        if self.ballot is not None and self.ballot.plan is None:
            self._awaited[peer.card.node_id] = now_s
        return self.ask(peer, now_s=now_s)

    def ask(self, peer: PeerState, *, now_s: float) -> list[Command]:
        """Sends the request that this agent must answer for the ballot to continue."""
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
        if self.ballot is None:
            return []
        for node_id, since_s in list(self._awaited.items()):
            is_late = now_s - since_s >= self._settings.answer_s and node_id != self._me.node_id
            if is_late and node_id not in self._needed:
                del self._awaited[node_id]
                self._peers.by_id[node_id].is_unresponsive = True
        if self._witness_asked_s is not None and now_s - self._witness_asked_s >= WITNESS_WAIT_S:
            self._witness_asked_s = None
        found: list[Command] = self._ask_witness(now_s) if now_s >= self._ask_witness_s else []
        for peer in self._peers:
            if now_s - peer.asked_s < 2 * self._settings.times.heartbeat_interval_s:
                continue
            if peer.card.node_id in self._awaited:
                found += self.ask(peer, now_s=now_s)
            elif peer.lost and peer.linked and self.ballot.plan is None:
                # A lost node may be alive and have no reason to send. Any answer readmits it.
                found += self._prepare(self.ballot, peer, now_s)
        return found

    # --- answers ------------------------------------------------------------------------------

    def promised(self, body: Promise) -> bool:
        """Records a promise; returns whether it counts."""
        ballot = self.ballot
        peer = self._peers.by_id.get(body.card.node_id)
        if peer is not None:
            peer.is_unresponsive = False  # even if it is late: the run may grow by this node
        if peer is None or ballot is None or ballot.plan is not None:
            return False
        if body.generation != ballot.generation:
            return False
        ballot.take_promise(body)
        self.followers.add(body.card.node_id)
        peer.fitness = body.fitness or peer.fitness
        self._awaited.pop(body.card.node_id, None)
        return True

    def renew_witness(self, plan: GenerationPlan | None, *, now_s: float) -> list[Command]:
        """Renews the lease at the witness, so that it promises no other proposer.

        `plan` is the active one of a settled leader. In a ballot, the lease protects an announced
        plan. While a promised ballot waits for nodes, it also lets restarted agents find this agent
        at the witness.
        """
        witness, ballot = self._peers.witness, self.ballot
        if plan is not None:
            return witness.record_leader(plan, now_s=now_s)
        if ballot is None or not ballot.witness:
            return []
        if ballot.plan is None and self.stage() is not BallotStage.PROMISED:
            return []  # the ballot itself asks; without a quorum it must not block others
        return witness.ask(WitnessOperation.RENEW, generation=ballot.generation, now_s=now_s)

    def witness_answered(
        self, event: WitnessAnswered, position: int, *, now_s: float
    ) -> list[NodeCard]:
        """Handles an answer of the witness to this ballot; returns the agents that it names."""
        ballot, asked, register = self.ballot, event.asked, event.register
        if ballot is None:
            return []
        found = [event.leader] if event.leader is not None else []
        is_promise = asked.operation is WitnessOperation.PROMISE
        is_ours = is_promise or asked.operation is WitnessOperation.ACCEPT
        if is_ours and asked.generation == ballot.generation:
            self._witness_asked_s = None
            self._answered(ballot, event, position, now_s)
            if is_promise and register is not None and register.plan is not None:
                found += register.plan.voters
        return found

    def _answered(
        self, ballot: Ballot, event: WitnessAnswered, position: int, now_s: float
    ) -> None:
        register = event.register
        if event.asked.operation is WitnessOperation.ACCEPT:
            ballot.is_witnessed = ballot.is_witnessed or event.granted
        elif event.granted and ballot.plan is None and register is not None:
            ballot.take_witness(register.life, register.plan)
        elif register is not None and not event.granted and event.leader in (None, self._me):
            # Another proposer has the promise of this number, or of a higher one.
            self.highest = max(self.highest, register.promised)
            self.restart(ballot.reason, position, now_s=now_s)

    def _ask_witness(self, now_s: float, *, waits: bool = False) -> list[Command]:
        """Sends the request that the ballot needs; with `waits`, awaits a reachable witness."""
        ballot, witness = self.ballot, self._peers.witness
        assert ballot is not None
        self._ask_witness_s = now_s + 2 * self._settings.times.heartbeat_interval_s
        number, plan, begins = ballot.generation, ballot.plan, ballot.needs_witness
        if plan is None and not ballot.witness:
            operation = WitnessOperation.PROMISE
        elif plan is not None and ballot.witness and not ballot.is_witnessed:
            operation, begins = WitnessOperation.ACCEPT, False
        else:
            return []
        found = witness.ask(operation, generation=number, plan=plan, begins=begins, now_s=now_s)
        if waits and found and witness.is_reached:
            self._witness_asked_s = now_s
        return found

    def not_promised(self, body: PrepareRejected, position: int, *, now_s: float) -> None:
        """Handles a rejection: a higher number is promised, or this one to another proposer."""
        self.highest = max(self.highest, body.promised)
        if self.ballot is not None and body.generation == self.ballot.generation:
            self.restart(self.ballot.reason, position, now_s=now_s)

    def restart(self, reason: str, position: int, *, now_s: float) -> None:
        """Schedules another ballot; the wait depends on the position, so two proposers differ."""
        if self.again_s is None:
            timeout_s = _TIMEOUT_S + _TIMEOUT_BY_POSITION_S * position
            self.again_s = now_s + timeout_s * 2.0 ** min(self._refusals, _MAX_DOUBLINGS)
            self.retry_reason = reason
            self._refusals += 1

    def is_concurrent(self, generation: int) -> bool:
        """Whether this ballot would start a run although a node has reported `generation`."""
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
        position: int,
        *,
        now_s: float,
    ) -> None:
        """Starts another ballot if a member of the active `plan` has promised a later one."""
        peer.promised = promised
        self.highest = max(self.highest, promised)
        if plan is not None and promised > plan.generation and runs_ranks(plan, peer.card):
            reason = f"node {peer.card.node_id} has promised generation {promised}"
            self.restart(reason, position, now_s=now_s)
        ballot = self.ballot
        is_needed = peer.card.node_id in self._needed
        if ballot is not None and is_needed and promised > ballot.generation:
            # It can never accept the announced plan.
            self.restart(ballot.reason, position, now_s=now_s)

    def accepted(self, node_id: str, body: Accepted) -> bool:
        """Records an acceptance; returns whether it counts."""
        ballot = self.ballot
        if ballot is None or ballot.plan is None or body.generation != ballot.generation:
            return False
        if node_id not in ballot.promises:
            return False
        if body.problem and not self.is_member(node_id):
            return False  # a spare that has persisted nothing
        ballot.accepted[node_id] = body
        self._awaited.pop(node_id, None)
        self._needed.discard(node_id)
        return True

    def postpone(self, *, now_s: float) -> list[Command]:
        """Reports once which members take longer than `answer_s` to get ready."""
        since_s = now_s - self._settings.answer_s
        slow = sorted(one for one in self._needed if self._awaited.get(one, now_s) <= since_s)
        if self.ballot is None or not slow or slow == self._slow:
            return []
        self._slow = slow
        text = f"generation {self.ballot.generation} waits for {', '.join(slow)}"
        text += ", which may be reading a checkpoint"
        return [JournalEntry(WaitingForNodes(text), announce=True)]

    def lost(self, node_id: str) -> None:
        self._awaited.pop(node_id, None)
        self.followers.discard(node_id)
        if self.ballot is not None and self.ballot.plan is None:
            self.ballot.promises.pop(node_id, None)

    def is_member(self, node_id: str) -> bool:
        plan = self.ballot.plan if self.ballot is not None else None
        return plan is not None and plan.member(node_id) is not None

    def won(self) -> GenerationPlan:
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
        # With the base, voters omit plans that are not newer.
        failed = tuple(sorted(ballot.failed))
        body = Prepare(ballot.generation, self._me, ballot.reason, ballot.base, ballot.stay, failed)
        return [Send(peer.card.node_id, body)]
