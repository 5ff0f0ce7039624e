"""The leader: which nodes are present, which are lost, and what follows for the run.

Runs in:  the agent that leads or proposes itself. Pure.
Takes in: connections, promises, heartbeats, time.
Gives:    messages and dials, and through `GenerationMonitor` the decisions of the supervisor.

Rule 1: one ballot at a time. If a node of it is lost, the next has a higher number, and its `stay`.
Rule 2: the loss of a node leads to a ballot first. Only a promised ballot may end the run, because
        the others may continue without a leader that was cut off.
Rule 3: a leader without its voters may have been replaced: it suspends all ranks before that.
Rule 4: if the newest commit and nodes that may hold it are missing, the run waits for these nodes.
"""

from collections.abc import Collection, Mapping

from ftrun.config.cluster import MembershipSettings
from ftrun.errors import ExitCode
from ftrun.membership.ballots import Ballot, position_of, runs_ranks
from ftrun.membership.events import WitnessAnswered
from ftrun.membership.leader.checkpoint_agreement import blocked_nodes, blocked_text, disagreement
from ftrun.membership.leader.draining import NodeDraining
from ftrun.membership.leader.failure_detector import FailureDetector, LeadershipLease, PeerState
from ftrun.membership.leader.pausing import NodeWait, RunShutdown
from ftrun.membership.leader.planning import RestoreStateMissing, make_plan, notes_of
from ftrun.membership.leader.proposer import BallotStage, Proposer
from ftrun.membership.leader.rank_assignment import Admission
from ftrun.membership.leader.reconfiguration import (
    BoundaryReconfiguration,
    VoterReconfiguration,
    note_of,
)
from ftrun.membership.witness import WitnessView
from ftrun.network.failover.path_monitor import PathMonitor
from ftrun.recovery.commands import Command, Connect, EndRun, KillWorkers, Send, SupervisorCommand
from ftrun.recovery.generation_monitor import GenerationMonitor
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard
from ftrun.wire.cluster.membership import (
    Accepted,
    Heartbeat,
    LeaderHeartbeat,
    LeaderInfo,
    LeaderResigned,
    PrepareRejected,
    Promise,
)
from ftrun.wire.cluster.messages import PathReport

_RESTARTED = "its agent was restarted"
_ASK_AGAIN_POSITION = 4
"""Position in the succession whose wait applies before nodes are asked again."""


class Leader:
    """The leadership of one agent, from the moment it proposes itself."""

    def __init__(
        self,
        me: NodeCard,
        settings: MembershipSettings,
        monitor: GenerationMonitor,
        plan: GenerationPlan | None,
        unsure: GenerationPlan | None,
        *,
        links: Mapping[str, int],
        witness: WitnessView,
    ) -> None:
        # `unsure` is the newest plan that this agent has accepted: it may have been chosen.
        # `links` has the incarnations of the connected agents, by node id.
        self.me = me
        self.settings = settings
        self.monitor = monitor
        self.plan = plan
        self.unsure = unsure
        self.known = FailureDetector(me, settings, witness)
        self._links = links
        monitor.watching.slow.clocks = self.known.clocks
        self.pause = NodeWait(settings.times.pause_timeout_s)
        self.shutdown = RunShutdown(self.known)
        self._election = Proposer(me, settings, self.known)
        self._changes = BoundaryReconfiguration(settings, self.known, monitor)
        self._reconfiguration = VoterReconfiguration(settings, self.known)
        self.screening = Admission(settings, self.known, monitor.reports)
        self.paths = PathMonitor(me.node_id, settings, self.known)
        self._history_of = (-1, 0)
        """The newest configuration whose failure history this leader has taken over, or gives."""
        self.draining = NodeDraining(settings, self.known, monitor, self._reconfiguration)
        self._is_chosen = False
        """A generation of this leader has been chosen."""
        self.resignation: LeaderResigned | None = None  # its last order, if it drains
        self._lease = LeadershipLease(settings)
        self._unreported: dict[str, str] = {}
        """Lost members not yet reported to the supervisor, with the reasons."""
        self._next_poll_s = 0.0

    @property
    def ballot(self) -> Ballot | None:
        return self._election.ballot

    @property
    def is_lease_expired(self) -> bool:
        return self._lease.is_on  # another leader may have been chosen

    @property
    def is_settled(self) -> bool:
        """Whether it leads a chosen generation and proposes no other."""
        return self._is_chosen and self.ballot is None and self.shutdown.ending is None

    # --- connections --------------------------------------------------------------------------

    def add(self, card: NodeCard, *, now_s: float, linked: bool, knows: int = -1) -> list[Command]:
        found: list[Command] = []
        old = self.known.get(card.node_id)
        if old is not None and old.card.incarnation != card.incarnation and not old.lost:
            found += self._lose(old, _RESTARTED, now_s)
        if old is None or old.card.incarnation != card.incarnation or old.lost:
            peer = self.known.put(card, now_s=now_s, linked=linked, has_answered=False)
            self.pause.put_off(now_s=now_s)
            found += self.monitor.returns(card, now_s=now_s)
            found += self._election.joined(peer, now_s=now_s)
        return found + self._compare_runs(card, knows, now_s)

    def meet(self, card: NodeCard, *, now_s: float, knows: int = -1) -> list[Command]:
        """Adds an agent that a message named: a voter, or a proposer that knows a generation."""
        if card.node_id == self.me.node_id:
            return []
        peer = self.known.get(card.node_id)
        if peer is not None and (not peer.lost or peer.card.identity == card.identity):
            return self._compare_runs(card, knows, now_s)
        linked = self._links.get(card.node_id) == card.incarnation
        return self.add(card, now_s=now_s, linked=linked, knows=knows)

    def _compare_runs(self, card: NodeCard, knows: int, now_s: float) -> list[Command]:
        """Asks all nodes again if this ballot would start a run, and an agent knows of one."""
        if not self._election.is_concurrent(knows):
            return []
        return self.propose(f"node {card.node_id} has the plan of a run", now_s=now_s)

    def opened(self, node_id: str, incarnation: int, *, now_s: float) -> list[Command]:
        """Handles a new connection; sends the leader's card to a new or lost node."""
        peer = self.known.get(node_id)
        if peer is None:
            return [self._leader_info(node_id)]
        if peer.card.incarnation != incarnation:
            lost = [] if peer.lost else self._lose(peer, _RESTARTED, now_s)
            return [*lost, self._leader_info(node_id)]
        self.known.opened(peer, now_s=now_s)
        if peer.lost:
            return self.back_again(peer, now_s=now_s)
        is_owed = self.shutdown.must_be_notified(node_id)
        reported = [Send(node_id, self._heartbeat(now_s))] if is_owed else []
        return [*self._election.ask(peer, now_s=now_s), *reported]

    def back_again(self, peer: PeerState, *, now_s: float) -> list[Command]:
        """Adds a lost node that sends messages again; the active generation continues."""
        found = self.add(peer.card, now_s=now_s, linked=True)
        return [*found, self._leader_info(peer.card.node_id)]

    def _leader_info(self, node_id: str) -> Send:
        known = self.plan.generation if self.plan is not None else -1
        return Send(node_id, LeaderInfo(self.me, known, self.is_settled))

    def closed(self, node_id: str, *, now_s: float) -> list[Command]:
        peer = self.known.get(node_id)
        if peer is None:
            return []
        peer.linked, peer.closed_s = False, now_s
        if peer.lost:
            return []
        peer.dialled_s = now_s
        return [Connect(peer.card.host, peer.card.port, node_id)]

    def dial_failed(self, node_id: str, *, refused: bool, now_s: float) -> list[Command]:
        peer = self.known.get(node_id)
        if peer is None or peer.linked or not refused:
            return []
        peer.refused = True
        return [] if peer.lost else self._lose(peer, "the connection is refused", now_s)

    def was_paused(self, *, now_s: float) -> None:
        self.known.was_paused(now_s=now_s)
        self._check_lease(now_s)

    def _lose(self, peer: PeerState, reason: str, now_s: float) -> list[Command]:
        node_id = peer.card.node_id
        peer.lost, peer.lost_s = reason, now_s
        self.paths.lost(node_id)
        was_member = runs_ranks(self.plan, peer.card)
        text = f"node {node_id} is lost: {reason}"
        note = self.monitor.past.record_loss(peer, reason, was_member=was_member, now_s=now_s)
        found: list[Command] = [note]
        self.monitor.note_failure(node_id, now_s=now_s, fault_s=peer.closed_s or peer.received_s)
        if self.shutdown.ending is not None:
            return found if not peer.refused else []  # it has received the end, and has ended
        if was_member:
            self._unreported[node_id] = reason
        if self.ballot is not None:
            is_needed = self._election.is_member(node_id)
            self._election.lost(node_id)
            if not is_needed:
                return found + self._check(now_s)
        elif was_member and self.monitor.is_stopping:
            return found + self._decide(self._report_losses(now_s), now_s)
        elif not was_member:
            return found
        return found + self.propose(text, stay=self.ballot is None or None, now_s=now_s)

    # --- a ballot -----------------------------------------------------------------------------

    def succeed(
        self, lost: set[str], reason: str, known_s: float, *, now_s: float
    ) -> list[Command]:
        """Takes over after the nodes `lost`, with a plan known since `known_s`, or begins a run."""
        self._take_history(self.unsure or self.plan, now_s, known_s)
        if self.plan is not None:
            self.paths.know(self.plan.voters)
            self.monitor.take_over(self.plan, since_s=known_s)
            for node_id in sorted(lost):
                if was_member := self.plan.member(node_id) is not None:
                    self._unreported[node_id] = reason
                if (peer := self.known.get(node_id)) is not None:
                    self.monitor.past.record_loss(peer, reason, was_member=was_member, now_s=now_s)
                self.monitor.note_failure(node_id, now_s=now_s)
        return self.propose(reason, stay=True, now_s=now_s)

    def propose(
        self, reason: str, *, stay: bool | None = None, failed: tuple[int, ...] = (), now_s: float
    ) -> list[Command]:
        self._changes.reset()
        self._reconfiguration.reset()
        self.draining.reset()
        known = (self.plan, self.unsure, self._reconfiguration.void)
        stay = stay and not self.monitor.supervisor.join_problem
        return self._election.begin(reason, *known, stay=stay, failed=failed, now_s=now_s)

    def promised(self, body: Promise, *, now_s: float) -> list[Command]:
        if not self._election.promised(body):
            return []
        found: list[Command] = []
        for plan in (body.effective, body.accepted):
            for card in plan.voters if plan is not None else []:
                found += self.meet(card, now_s=now_s)
        return found + self._check(now_s)

    def not_promised(self, body: PrepareRejected, *, now_s: float) -> list[Command]:
        place = position_of(self.me.node_id, self.plan or self.unsure)
        self._election.not_promised(body, place, now_s=now_s)
        return []

    def accepted(self, node_id: str, body: Accepted, *, now_s: float) -> list[Command]:
        if body.voter_revision:
            return self._joined(node_id, body, now_s)
        return self._check(now_s) if self._election.accepted(node_id, body) else []

    def _joined(self, node_id: str, body: Accepted, now_s: float) -> list[Command]:
        peer = self.known.get(node_id)
        if peer is None or self.plan is None or not self.is_settled:
            return []
        plan = self._reconfiguration.accepted(peer.card, body, self.plan)
        if plan is None:
            return []
        self.plan, self.unsure = plan, None
        return [note_of(plan), *self.heartbeat(now_s=now_s)]

    # --- the witness --------------------------------------------------------------------------

    def ask_witness(self, *, now_s: float) -> list[Command]:
        leads = self.is_settled or self.shutdown.is_for_all
        return self._election.renew_witness(self.plan if leads else None, now_s=now_s)

    def witness_answered(self, event: WitnessAnswered, *, now_s: float) -> list[Command]:
        place = position_of(self.me.node_id, self.plan or self.unsure)
        named = self._election.witness_answered(event, place, now_s=now_s)
        return [one for card in named for one in self.meet(card, now_s=now_s)] + self._check(now_s)

    def _check(self, now_s: float) -> list[Command]:
        ballot = self.ballot
        if ballot is None or self.shutdown.ending is not None:
            return []
        match self._election.stage():
            case BallotStage.PROMISED:
                return self._plan_it(ballot, now_s)
            case BallotStage.SHORT:
                return self.pause.begin(ballot.shortage(), now_s=now_s)
            case BallotStage.CARRIED:
                return self._apply_chosen(ballot, now_s)
            case BallotStage.BROKEN:
                return self.propose(ballot.reason, now_s=now_s)
            case _:
                return self._election.postpone(now_s=now_s)

    def _plan_it(self, ballot: Ballot, now_s: float) -> list[Command]:
        if self.monitor.stop_signal:
            return self._end(self.monitor.stopped(), now_s)
        previous = ballot.newest_plan(self.plan, self.unsure)
        self._take_history(previous, now_s, now_s)
        for command in self._report_losses(now_s):
            if isinstance(command, EndRun):
                return self._end(command, now_s)
        here = [promise.card for promise in ballot.promises.values()]
        excluded = self.monitor.excluded(now_s=now_s)
        suspects = self.monitor.suspects(now_s=now_s)
        assignment = self.screening.assign(here, previous, excluded, suspects)
        if isinstance(assignment, str):
            return self.pause.begin(assignment, now_s=now_s)
        if (postponed := self.paths.postpone(here, previous, now_s=now_s)) is not None:
            return postponed
        paths = self.paths.decide(assignment.members, assignment.spares, previous)
        assignment = assignment.along(paths)
        plan = make_plan(
            ballot,
            assignment,
            previous,
            self.settings,
            leader=self.me.node_id,
            history=self.monitor.history(now_s=now_s),
            waited_s=self.pause.waited_s(now_s=now_s),
        )
        if isinstance(plan, RestoreStateMissing):
            # A node's reported holdings may have changed: its SMP completes what it began.
            self._election.restart(ballot.reason, _ASK_AGAIN_POSITION, now_s=now_s)
            return self.pause.begin(plan.reason, now_s=now_s, end=plan.end)
        if isinstance(plan, EndRun):
            return self._end(plan, now_s)
        self.pause.over()
        self._history_of = (plan.generation + 1, -1)  # also of each voter revision of the plan
        return self._election.announce(plan, now_s=now_s)

    def _apply_chosen(self, ballot: Ballot, now_s: float) -> list[Command]:
        plan = self._election.won()
        differ = disagreement(plan, ballot.accepted)
        if differ is not None:
            blind = blocked_nodes(plan, ballot.accepted, differ)
            excluded = self.monitor.excluded(now_s=now_s)
            if blind and self.screening.can_spare(blind, ballot, self.plan, excluded):
                self.monitor.bar(blind, "it cannot load a checkpoint", now_s=now_s)
                return [*blocked_text(blind), *self.propose(ballot.reason, now_s=now_s)]
            if isinstance(differ, EndRun):
                return self._end(differ, now_s)
            self.monitor.supervisor.bad_checkpoints |= differ
            return self.propose(ballot.reason, now_s=now_s)
        self.plan, self.unsure, self._is_chosen = plan, None, True
        self._unreported.clear()
        self.pause.over()
        self._check_lease(now_s)  # acceptances may be old if this process was paused
        self.monitor.begin(plan, now_s=now_s)
        self.paths.begin()
        notes = self.monitor.incidents.drain_journal_entries() + self.screening.compare(plan)
        return [*notes_of(plan), *notes, *self.heartbeat(now_s=now_s)]

    def _take_history(self, plan: GenerationPlan | None, now_s: float, known_s: float) -> None:
        if plan is not None and plan.configuration_id > self._history_of:
            self._history_of = plan.configuration_id
            self.monitor.succeed(plan.history, newest=plan, now_s=now_s, known_s=known_s)
            for card in [peer.card for peer in self.known if not peer.lost]:
                self.monitor.incidents.also(self.monitor.failures.returns(card, now_s=now_s))

    def _report_losses(self, now_s: float) -> list[SupervisorCommand]:
        unreported, self._unreported = self._unreported, {}
        return self.monitor.lost(unreported, now_s=now_s)

    def reported(self, node_id: str, body: PathReport, *, now_s: float) -> list[Command]:
        found = self.paths.reported(node_id, body, self.monitor.watching, now_s=now_s)
        return found + self._check(now_s)

    # --- a generation -------------------------------------------------------------------------

    def heartbeat_received(self, node_id: str, body: Heartbeat, *, now_s: float) -> list[Command]:
        peer = self.known.get(node_id)
        if peer is None or not self.known.heartbeat_received(peer, body, now_s=now_s):
            return []
        if body.state == "ended":
            self.shutdown.has_ended(node_id)
        self.draining.note(peer.card, body, now_s=now_s)
        plan = self.plan if self.is_settled else None
        place = position_of(self.me.node_id, self.plan or self.unsure)
        self._election.note_promise(peer, body.promised, plan, place, now_s=now_s)
        if not self.is_settled or self.is_lease_expired:
            self.monitor.note(node_id, body)  # Rule 3: heartbeats repeat the state
            is_stopped = self.monitor.stop_signal and self.pause.is_on
            return self._give_up(self.monitor.stopped(), now_s) if is_stopped else []
        found = self._decide(self.monitor.heartbeat_received(node_id, body, now_s=now_s), now_s)
        return found + self._continue(now_s)

    def heartbeat(self, *, now_s: float) -> list[Command]:
        body = self._heartbeat(now_s)
        return [Send(one, body) for one in self.known.linked if self.shutdown.must_be_notified(one)]

    def _heartbeat(self, now_s: float) -> LeaderHeartbeat:
        known = self.plan.configuration_id if self.plan is not None else (-1, 0)
        is_suspended = self.is_lease_expired and self.shutdown.ending is None
        number = self.known.next_number(now_s=now_s)
        body = self.monitor.heartbeat(known, number, is_suspended=is_suspended)
        return self.draining.add_drained(self.screening.ask(body))

    def tick(self, *, now_s: float) -> list[Command]:
        found: list[Command] = []
        if now_s >= self._next_poll_s:
            self._next_poll_s = now_s + self.settings.times.heartbeat_interval_s / 2
            found += self._poll_files(now_s)
        again_s = self._election.again_s
        if again_s is not None and now_s >= again_s and self.shutdown.ending is None:
            found += self.propose(self._election.retry_reason, now_s=now_s)
        if self.is_settled:
            found += self._continue(now_s)
        end = self.pause.given_up(now_s=now_s, are_gone=self.known.are_gone)
        if end is not None and self.shutdown.ending is None:
            return found + self._give_up(end, now_s)
        return [*found, *self.shutdown.poll(now_s=now_s)]

    def _poll_files(self, now_s: float) -> list[Command]:
        found: list[Command] = []
        for peer in self.known:
            if peer.card.node_id != self.me.node_id:
                found += self._watch(peer, now_s)
        members = [one.node_id for one in self.plan.members] if self.plan is not None else []
        is_unresponsive = self.known.has_unresponsive(members, now_s=now_s)
        self.monitor.reports.has_unresponsive_member = is_unresponsive
        found += self._drain(now_s)
        found += self.screening.poll(self.monitor.excluded(now_s=now_s), now_s=now_s)
        found += self._election.repeat(now_s=now_s) + self._check(now_s)
        if self._check_lease(now_s):
            return found + self.heartbeat(now_s=now_s)
        if self.is_settled and self._lease.stays(now_s=now_s):
            return found + self.propose("heartbeats from too few voters", now_s=now_s)
        return found

    def _drain(self, now_s: float) -> list[Command]:
        if self.is_lease_expired or self.shutdown.ending is not None:
            return []
        unfit = self.screening.barred(self.monitor.excluded(now_s=now_s))
        notes, stop = self.draining.poll(self.plan, unfit, is_settled=self.is_settled, now_s=now_s)
        return [*notes, *(self._decide(stop, now_s) if stop else [])]

    def _check_lease(self, now_s: float) -> bool:
        """Updates the leadership lease; returns True if it has just expired or been regained."""
        return self._lease.poll(self.plan if self.ballot is None else None, self.known, now_s=now_s)

    def _watch(self, peer: PeerState, now_s: float) -> list[Command]:
        unresponsive_s = self.known.unresponsive_s(peer, now_s=now_s)
        found: list[Command] = []
        if not peer.lost and unresponsive_s >= self.settings.times.failure_timeout_s:
            peer.was_unresponsive = True
            found += self._lose(peer, f"no heartbeat for {unresponsive_s:.1f} s", now_s)
        if (not peer.lost or self.pause.is_on) and self.known.is_to_be_dialled(peer, now_s=now_s):
            found.append(Connect(peer.card.host, peer.card.port, peer.card.node_id))
        return found

    def _continue(self, now_s: float) -> list[Command]:
        # Ranks have failed, perhaps because of a node that has just missed a heartbeat.
        plan = self.plan if self.monitor.waits_for_cause else None
        is_late = plan is not None and self.known.has_late_member(plan, now_s=now_s)
        if self.is_lease_expired or is_late:
            return []
        found = self._decide(self.monitor.tick(now_s=now_s), now_s)
        if self.plan is None or not self.is_settled:
            return found
        excluded = self.screening.barred(self.monitor.excluded(now_s=now_s))
        found += self.paths.poll(self.plan, self.monitor.watching.slow, now_s=now_s)
        self._changes.requested = self.paths.requested
        reason = self._changes.poll(self.plan, excluded, now_s=now_s)
        if reason := self.paths.take_urgent_reason() or reason:
            self.resignation = self.draining.resignation(self.plan, self.me, reason)
            more = [] if self.resignation else self.propose(reason, now_s=now_s)
            return found + self._spread(now_s) + more
        found += [*self.monitor.probes(now_s=now_s), *self.paths.drain_journal_entries()]
        # Spares that have joined get votes, unless they are about to run ranks.
        is_full = len(self.plan.members) >= self.settings.cluster_size.max_nodes
        if self.monitor.is_steady:
            grows = not is_full and not self.draining.is_under_way
            history = self.monitor.history(now_s=now_s)
            found += self._reconfiguration.poll(self.plan, history, grows=grows, now_s=now_s)
        return found + self._spread(now_s)

    def _decide(self, commands: list[SupervisorCommand], now_s: float) -> list[Command]:
        found: list[Command] = []
        for command in self.monitor.order_all(commands):
            if isinstance(command, EndRun):
                found += self._end(command, now_s)
                continue
            stay, failed = command.stay, command.failed
            found += self.propose(command.reason, stay=stay, failed=failed, now_s=now_s)
        return found + self.monitor.incidents.drain_journal_entries() + self._spread(now_s)

    def _spread(self, now_s: float) -> list[Command]:
        return self.heartbeat(now_s=now_s) if self.monitor.has_new_orders() else []

    def _give_up(self, end: EndRun, now_s: float) -> list[Command]:
        """Ends this node and the nodes that promised this leader; a majority may continue."""
        return self._end(end, now_s, self._election.followers | {self.me.node_id})

    def _end(
        self, end: EndRun, now_s: float, recipients: Collection[str] | None = None
    ) -> list[Command]:
        self.shutdown.begin(end, self.is_settled, recipients, now_s=now_s)
        self.pause.over()
        self._election.ballot = None
        self.monitor.end(end, now_s=now_s)
        found: list[Command] = [*self.monitor.incidents.drain_journal_entries()]
        found += [KillWorkers(end.reason)] if end.exit_code != ExitCode.DONE else []
        return [*found, *self.heartbeat(now_s=now_s), *self.shutdown.poll(now_s=now_s)]
