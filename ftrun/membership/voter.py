"""One agent as a voter and as a follower: what it promises, accepts and executes.

Runs in:  every agent, the leader's included. Pure.
Takes in: the messages of a ballot, and the leader's heartbeats.
Gives:    answers, and commands for the executor of this node.

Rule 1: a promise is given only after the workers of this node are dead or parked: a parked one
        neither communicates nor seals. If a majority has promised a generation, no majority of the
        last generation is running.
Rule 2: an agent that receives from its leader promises no other proposer. An agent that is cut off
        from the leader alone must not end a healthy generation.
Rule 3: an order of a leader counts only for the generation it names. An agent that has promised a
        later generation executes none.
Rule 4: plans that this agent accepted are kept apart from plans that it was only sent. Only an
        acceptance proves what its predecessors knew.
"""

from dataclasses import asdict
from typing import assert_never

import msgspec

from ftrun.ids import version
from ftrun.membership.ballots import VoterState
from ftrun.membership.events import (
    GenerationInstalled,
    NodeChecked,
    PlanPersisted,
    Quiesced,
    RanksStuck,
)
from ftrun.monitor.node_fitness import CheckOutcome, NodeFitness
from ftrun.recovery.commands import (
    AbandonStep,
    Command,
    CommitSnapshot,
    EndRun,
    InspectRanks,
    InstallGeneration,
    KillWorkers,
    PersistPlan,
    Quiesce,
    RepeatNodeCheck,
    RequestFinalSnapshot,
    RunCollectiveCheck,
    Send,
    SetFirstSnapshotStep,
    SetSnapshotInterval,
    ShowLevels,
    SignalWorkers,
    StartRanks,
    UpdatePeerPorts,
    WithdrawFinalSnapshot,
    WriteCapture,
    WriteCheckpointPart,
)
from ftrun.wire.cluster.generation import (
    ConfigurationId,
    GenerationPlan,
    Identity,
    NodeCard,
    VersionPair,
)
from ftrun.wire.cluster.membership import (
    Accept,
    Accepted,
    Heartbeat,
    LeaderHeartbeat,
    Prepare,
    PrepareRejected,
    Promise,
)

_LEFT_CODE = 128 + 15

OwnNews = Quiesced | GenerationInstalled | PlanPersisted | NodeChecked | RanksStuck
"""What the executor of this node has done or found."""


class Voter:
    """State of one agent as a voter and as a node of a generation."""

    def __init__(self, me: NodeCard, kept: GenerationPlan | None, *, is_chosen: bool) -> None:
        self.me = me
        self.vote = VoterState()
        self.plan: GenerationPlan | None = None
        """The newest generation known to be chosen."""
        self.is_member = False
        """This agent runs ranks of that generation."""
        self.is_ended = False
        self.received, self.received_s = 0, 0.0
        """Number of the newest heartbeat of the current leader, and when it arrived."""
        self.plan_since_s: float | None = None
        """When heartbeats first confirmed the newest plan; None: an earlier agent knew it."""
        self._dated: GenerationPlan | None = None
        self._checked: NodeFitness | None = None
        """Result of this node's newest check; None: it makes no checks."""
        self._stuck = ""
        """The ranks of this node that SIGKILL does not end; empty: none."""
        self.committed: VersionPair | None = None
        """The newest commit known here."""
        self.incidents = 0
        """Number of incidents opened in this run, as the leader reports it."""
        self._kept = kept
        """The newest plan that an earlier agent of this node accepted."""
        self._quiesced: Quiesced | None = None
        self._adopted: GenerationInstalled | None = None
        self.agent_lost_s: float | None = None
        """When the last agent of this node ended, if this one succeeds it in the same run."""
        self._joined: ConfigurationId = (-1, 0)
        """The newest voter revision whose acceptance is persisted."""
        self._prepare: tuple[str, Prepare] | None = None
        self._checks_asked = 0
        self._collectives: set[str] = set()
        """Collective checks that were started here."""
        self._done = LeaderHeartbeat(generation=-1)
        """The leader's orders that were executed, in the generation they name."""
        if kept is not None:
            # The last agent of this node may have promised this number to some proposer.
            self.vote.promised = kept.generation
            if is_chosen:
                self._set_plan(kept)

    @property
    def configuration_id(self) -> ConfigurationId:
        return self.plan.configuration_id if self.plan is not None else (-1, 0)

    @property
    def generation(self) -> int:
        return self.configuration_id[0]

    @property
    def is_in_ballot(self) -> bool:
        """It has promised a generation that is not known to be chosen."""
        return self.vote.promised > self.generation

    @property
    def fitness(self) -> NodeFitness | None:
        """Fitness of this node as the leader sees it; ranks that do not die make it unfit."""
        known = self._checked
        if known is None or not self._stuck:
            return known
        problems = (self._stuck, *known.problems)
        return msgspec.structs.replace(known, outcome=CheckOutcome.FAIL, problems=problems)

    @property
    def _newest_accepted(self) -> GenerationPlan | None:
        """The newest plan accepted here, by this agent or an earlier one of this node."""
        plans = [plan for plan in (self.vote.accepted, self._kept) if plan is not None]
        return max(plans, key=lambda plan: plan.generation, default=None)

    @property
    def newest_plan(self) -> GenerationPlan | None:
        """The newest known plan, whether it was chosen or may have been."""
        plans = [plan for plan in (self.plan, self.vote.accepted, self._kept) if plan is not None]
        return max(plans, key=lambda plan: plan.configuration_id, default=None)

    def start_following(self) -> None:
        self.received, self.received_s = 0, 0.0

    def has_happened(self, event: OwnNews) -> list[Command]:
        match event:
            case Quiesced():
                return self.quiesced(event)
            case GenerationInstalled():
                return self.adopted(event)
            case PlanPersisted():
                return self.plan_persisted(event)
            case NodeChecked():
                self._checked = event.fitness  # the next heartbeat reports it to the leader
                return []
            case RanksStuck():
                self._checked = self._checked or NodeFitness(CheckOutcome.PASS)
                self._stuck = event.reason
                return []
            case _:
                assert_never(event)

    def heartbeat(self, here: Heartbeat, number: int, *, now_s: float) -> Heartbeat:
        return msgspec.structs.replace(
            here,
            received_s=self.received_s,
            sent_s=now_s,
            number=number,
            received=self.received,
            promised=self.vote.promised,
            fitness=self.fitness,
        )

    # --- a ballot ---------------------------------------------------------------------------

    def prepare(
        self, sender: str, body: Prepare, leader: NodeCard | None, *, has_leader: bool
    ) -> list[Command]:
        """Promises the ballot, or rejects it after a later promise or under another leader."""
        proposer = body.card.identity
        may = body.generation > self.generation and self.vote.may_promise(body.generation, proposer)
        if has_leader or not may:
            promised = max(self.vote.promised, self.generation)
            received = leader if has_leader else None
            answer = PrepareRejected(body.generation, promised, received, self.generation)
            return [Send(sender, answer)]
        is_new = body.generation > self.vote.promised or self._prepare is None
        self.vote.promise(body.generation, proposer)
        self._prepare = (sender, body)
        if is_new:
            self._quiesced = self._adopted = None
            return [Quiesce(body.generation, body.reason, body.stay, body.failed)]
        return self._promise()

    def quiesced(self, event: Quiesced) -> list[Command]:
        if event.generation != self.vote.promised:
            return []
        self._quiesced = event
        return self._promise()

    def _promise(self) -> list[Command]:
        if self._quiesced is None or self._prepare is None:
            return []
        sender, body = self._prepare
        newest, plan, accepted = self.newest_plan, self.plan, self._newest_accepted
        maybe = newest is not None and newest.configuration_id > self.configuration_id
        answer = Promise(
            generation=body.generation,
            card=self.me,
            effective=plan if plan is not None and plan.configuration_id > body.knows else None,
            accepted=newest if maybe else None,
            knows=accepted.generation if accepted is not None else -1,
            committed=self.committed,
            holdings=self._quiesced.holdings,
            store_port=self._quiesced.store_port,
            smp_port=self._quiesced.smp_port,
            fitness=self.fitness,
            life=accepted.life if accepted is not None else "",
            parked=self._quiesced.parked,
            parked_in=self._quiesced.parked_in,
            stay_problem=self._quiesced.stay_problem,
        )
        return [Send(sender, answer)]

    def announce(self, sender: str, body: Accept, proposer: Identity) -> list[Command]:
        plan = body.plan
        if self._adopted is not None and self._adopted.generation == plan.generation:
            return self._accepted(sender)
        if self.vote.accepted is not None and self.vote.accepted.generation == plan.generation:
            return []  # it is being installed
        if plan.generation <= self.generation or not self.vote.accept(plan, proposer):
            return []
        return [InstallGeneration(plan)]

    def adopted(self, event: GenerationInstalled) -> list[Command]:
        if event.generation != self.vote.promised or self._prepare is None:
            return []
        self._adopted = event
        return self._accepted(self._prepare[0])

    def _accepted(self, sender: str) -> list[Command]:
        assert self._adopted is not None
        return [Send(sender, Accepted(**asdict(self._adopted)))]

    # --- a voter revision -------------------------------------------------------------------

    def adopt_voters(self, sender: str, plan: GenerationPlan, leader: Identity) -> list[Command]:
        is_ours = self.plan is not None and plan.is_of(self.plan)
        if not is_ours or plan.configuration_id <= self.configuration_id:
            return []
        if not self.vote.adopt_voters(plan, leader):
            return []
        if self._joined == plan.configuration_id:
            return [_voters_accepted(sender, plan)]
        return [PersistPlan(plan, is_chosen=False)]

    def plan_persisted(self, event: PlanPersisted) -> list[Command]:
        """Accepts a persisted voter revision, which the next agent of this node will read."""
        accepted = self.vote.accepted
        if accepted is None or accepted.configuration_id != event.configuration_id:
            return []
        if not accepted.voter_revision:
            return []
        self._joined = accepted.configuration_id
        return [_voters_accepted(accepted.leader, accepted)]

    def knows_of(self, body: LeaderHeartbeat) -> bool:
        """Whether the plan that this heartbeat reports as chosen is chosen or accepted here."""
        accepted, reported = self.vote.accepted, (body.generation, body.voter_revision)
        is_accepted = accepted is not None and accepted.configuration_id == reported
        return is_accepted or reported <= self.configuration_id

    # --- a generation -----------------------------------------------------------------------

    def apply_heartbeat(
        self, sender: str, body: LeaderHeartbeat, *, now_s: float = 0.0
    ) -> list[Command]:
        if body.number <= self.received:
            return []  # it is late or a duplicate
        self.received, self.received_s = body.number, now_s
        if self.newest_plan is not self._dated:
            self._dated, self.plan_since_s = self.newest_plan, now_s
        self.incidents = max(self.incidents, body.incidents)
        found = self._learn_of_effect(sender, body) + self._check_again(body)
        if body.ended:
            if not self.is_ended:
                self.is_ended = True
                is_ours = self.is_member and body.generation == self.generation
                if is_ours and body.committed is not None:
                    # The last checkpoint is written from this version.
                    found.append(CommitSnapshot(version(*body.committed)))
                found.append(EndRun(body.exit_code, body.reason, body.cause, body.advice))
            return found
        if body.generation != self.generation:
            return found
        self.committed = body.committed or self.committed
        if self._is_let_go(sender, body):
            reason = "this node has drained; the run continues without it"
            return [*found, EndRun(_LEFT_CODE, reason, run_continues=True)]
        if self.is_in_ballot:
            return found
        if self.is_member:
            found += self._new_orders(body)
        self._done = body
        return found

    def _is_let_go(self, sender: str, body: LeaderHeartbeat) -> bool:
        """Whether this node drains and may end.

        It may have proposed itself while it was cut off, and follows another leader again. A leader
        does not end during its own ballot.
        """
        is_dropped = self.vote.proposer == self.me.identity and sender != self.me.node_id
        needs_no_vote = not self.is_in_ballot or is_dropped
        return self.me.node_id in body.leave and not self.is_member and needs_no_vote

    def _check_again(self, body: LeaderHeartbeat) -> list[Command]:
        ring = body.collective
        if ring is not None and self.me in ring.nodes and ring.check not in self._collectives:
            self._collectives.add(ring.check)
            return [RunCollectiveCheck(ring)]
        wanted, known = body.checks.get(self.me.node_id, 0), self.fitness
        if known is None or wanted <= max(known.number, self._checks_asked):
            return []
        self._checks_asked = wanted
        return [RepeatNodeCheck(wanted)]

    def _learn_of_effect(self, sender: str, body: LeaderHeartbeat) -> list[Command]:
        accepted, reported = self.vote.accepted, (body.generation, body.voter_revision)
        # A leader other than the proposer of the accepted plan has another plan chosen.
        if accepted is None or accepted.leader != sender or accepted.generation != body.generation:
            return []
        if accepted.generation > self.generation:
            return self._apply_chosen(accepted)
        is_new = accepted.configuration_id == reported > self.configuration_id
        return self._other_voters(accepted) if is_new else []

    def _other_voters(self, plan: GenerationPlan) -> list[Command]:
        self.plan = plan
        return [PersistPlan(plan, is_chosen=True)]

    def _apply_chosen(self, plan: GenerationPlan) -> list[Command]:
        self._set_plan(plan)
        # A node that has promised a later ballot has ended its ranks, and starts none.
        runs = self.is_member and not self.is_in_ballot
        return [StartRanks(plan)] if runs else []

    def _set_plan(self, plan: GenerationPlan) -> None:
        self.plan = plan
        node = plan.member(self.me.node_id)
        self.is_member = node is not None and node.card.incarnation == self.me.incarnation
        self._done = LeaderHeartbeat(generation=plan.generation)

    def _snapshot_orders(self, body: LeaderHeartbeat) -> list[Command]:
        done = self._done
        found: list[Command] = []
        if body.take_from > done.take_from:
            found.append(SetFirstSnapshotStep(body.take_from))
        if body.committed is not None and body.committed != done.committed:
            found.append(CommitSnapshot(version(*body.committed)))
        if body.checkpoint is not None and body.checkpoint != done.checkpoint:
            found.append(WriteCheckpointPart(version(*body.checkpoint)))
        if body.capture_from > done.capture_from:
            found.append(WriteCapture(body.capture_from))
        if body.abandoned_step > done.abandoned_step:
            found.append(AbandonStep(body.abandoned_step))
        if body.every and (body.every, body.every_from_step) != (done.every, done.every_from_step):
            found.append(SetSnapshotInterval(body.every, body.every_from_step))
        if (body.protected, body.persisted) != (done.protected, done.persisted):
            found.append(ShowLevels(body.protected, body.persisted))
        return found

    def _new_orders(self, body: LeaderHeartbeat) -> list[Command]:
        done = self._done
        found = self._snapshot_orders(body)
        if body.stop_after_step >= 0 and body.stop_after_step != done.stop_after_step:
            found.append(RequestFinalSnapshot(body.reason, body.stop_after_step))
        if body.stop_after_step < 0 <= done.stop_after_step:
            found.append(WithdrawFinalSnapshot(body.reason))
        if body.signal_count > done.signal_count:
            found.append(SignalWorkers(body.signal, body.reason))
        if body.moved != done.moved:
            found.append(UpdatePeerPorts(body.moved))
        if body.examine and not done.examine:
            found.append(InspectRanks())
        if body.killed and not done.killed:
            found.append(KillWorkers(body.reason))
        return found

    def take_current(self, plan: GenerationPlan) -> list[Command]:
        """Handles the leader's acceptance of this node.

        The plan is a generation without this node, or one that this agent has accepted.
        """
        if plan.configuration_id <= self.configuration_id:
            return []
        if self.plan is not None and plan.is_of(self.plan):
            newest = self.newest_plan
            if newest is None or newest.configuration_id <= plan.configuration_id:
                return self._other_voters(plan)
            self.plan = plan  # a newer plan was accepted, and stays persisted
            return []
        if self.vote.accepted is not None and plan.is_of(self.vote.accepted):
            return self._apply_chosen(plan)
        found: list[Command] = []
        if self.is_member:
            found.append(KillWorkers(f"generation {plan.generation} has started without this node"))
        self._set_plan(plan)
        return found


def _voters_accepted(leader: str, plan: GenerationPlan) -> Send:
    return Send(leader, Accepted(plan.generation, None, voter_revision=plan.voter_revision))
