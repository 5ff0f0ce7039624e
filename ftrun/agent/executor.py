"""Executes the commands of the control loop on this node.

Runs in:  agent, main thread, inside torch's launcher.
Takes in: commands, one at a time.
Gives:    killed and started ranks, prepared generations; `RunEnded` at the end of the run.
"""

import logging
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

from ftrun import clock
from ftrun.agent.journal_words import Journaled, fields_of
from ftrun.agent.launch.elastic import FtrunElasticAgent
from ftrun.agent.snapshots.smp_client import CHECKPOINT_WAIT_S
from ftrun.agent.snapshots.standing_orders import StandingOrders
from ftrun.errors import ExitCode, PeerError, SnapshotError
from ftrun.membership.events import GenerationInstalled, PlanPersisted, Quiesced, RanksStuck
from ftrun.recovery import commands
from ftrun.wire.cluster.generation import GenerationPlan

if TYPE_CHECKING:
    from ftrun.agent.loop import RunLoop

_log = logging.getLogger(__name__)

_CAUSES = ("NodeLost", "Verdict")
"""Kinds of journal entries that may repeat one failure. The reason of the next generation may
repeat it too."""


class RunEnded(Exception):
    """The supervisor has ended the run; this unwinds torch's launcher."""

    def __init__(self, command: commands.EndRun) -> None:
        super().__init__(command.why)
        self.command = command


class CommandExecutor:
    """Executes commands on one node."""

    def __init__(self, run: "RunLoop") -> None:
        self.is_done = False
        """Every rank has finished."""
        self.has_left = False
        """The run continues without this node."""
        self.awaits_boundary = False
        """The ranks were asked for a final snapshot, and wait at its boundary."""
        self.noticed_s = 0.0
        """When the loop last woke up."""
        self._run = run
        self._agent: FtrunElasticAgent | None = None
        self._failed_s = 0.0
        self._stopped_s = 0.0
        self._stuck = ""
        self._standing = StandingOrders()

    def begin(self, agent: FtrunElasticAgent) -> None:
        self._agent = agent

    def obey(self) -> None:
        """Execute all commands in the queue.

        Raises:
            RunEnded: the run is over, and not because every rank has finished.
        """
        while not self.is_done and (order := self._run.brain.next_order()) is not None:
            self._carry_out(order)

    def _carry_out(self, order: commands.NodeCommand) -> None:  # noqa: C901, PLR0912 - dispatch
        run = self._run
        match order:
            case commands.Quiesce():
                self._quiesce(order)
            case commands.InstallGeneration():
                self._adopt(order.plan)
            case commands.PersistPlan():
                run.generations.keep_plan(order.plan, took_effect=order.took_effect)
                run.brain.tell(PlanPersisted(order.plan.edition))
            case commands.StartRanks():
                self._run_generation()
            case commands.KillWorkers():
                if run.workers.alive():
                    self._note(order)
                self._kill()
            case commands.SuspendRanks() | commands.ResumeRanks():
                self._note(order)  # already done, see ClusterControlLoop
            case commands.InspectRanks():
                run.eyes.examine(run.workers.handles)
                run.tell(is_urgent=True)
            case commands.RequestFinalSnapshot():
                self._note(order)
                self.awaits_boundary = True
                after = -1 if run.generations.is_alone else order.after_step
                run.workers.ask_last_snapshot(after)
            case commands.SignalWorkers():
                self._note(order)
                self.awaits_boundary = False
                # Ranks ignore USR1 and USR2 (see linux.ignore_user_signals), so a stop by one of
                # these signals ends the ranks with SIGTERM.
                is_user = order.signal in (signal.SIGUSR1, signal.SIGUSR2)
                run.workers.signal(signal.SIGTERM if is_user else order.signal)
            case commands.JournalEntry():
                self._say(order)
            case commands.EndRun():
                self._note(order)
                self._end(order)
            case _:
                self._carry_out_beside(order)

    def _say(self, note: commands.JournalEntry) -> None:
        generations = self._run.generations
        self._run.journal.write(note.kind, text=note.text, **note.fields)
        if note.kind == "Generation" and not generations.is_member:
            # No ranks start here, and only their start would clear it.
            generations.announcements.clear()
        is_cause = note.kind in _CAUSES
        if note.say and (not is_cause or generations.announcements.is_new(note.text)):
            _log.warning("%s", note.text)

    def _carry_out_beside(self, order: commands.SnapshotCommand) -> None:
        run = self._run
        match order:
            case commands.CommitSnapshot():
                run.caretaker.last_commit = order.version
                if not run.generations.is_alone:
                    self._tell_smp(order)
            case commands.WriteCheckpointPart():
                run.caretaker.write_part(order.version)
            case commands.AbandonStep():
                self._tell_smp(order)
            case commands.SetFirstSnapshotStep():
                # Alone, the SMP commits by itself. A rank that has skipped a step would wait for a
                # later step to be named, because no report of the skip reaches the leader.
                if not run.generations.is_alone:
                    run.workers.take_from(order.step)
            case commands.SetSnapshotInterval():
                run.workers.set_interval(order.every, order.from_step)
            case commands.UpdatePeerPorts():
                self._note(order)
                run.generations.move_peers(order.ports)

    def repeat(self) -> None:
        """Resend commands that the SMP has not executed; called once per turn of the loop."""
        page, generation = self._run.workers.commands, self._run.generations.number
        if page is not None and self._run.workers.generation == generation:
            for order in self._standing.unheard(page, generation, now_s=clock.now_s()):
                self._tell_smp(order)

    def _tell_smp(self, order: commands.CommitSnapshot | commands.AbandonStep) -> None:
        generation, smp = self._run.generations.number, self._run.smp
        self._standing.keep(order, generation, now_s=clock.now_s())
        with suppress(PeerError):
            if isinstance(order, commands.CommitSnapshot):
                smp.commit(order.version)
            else:
                smp.abandon(generation, order.step)

    def _note(self, order: Journaled) -> None:
        self._run.journal.write(order.journal_kind, **fields_of(order))

    def _kill(self) -> None:
        self._run.eyes.look_at([])
        self._failed_s = self.noticed_s
        self._run.workers.kill()
        self._stopped_s = clock.now_s()
        self.report_stuck()

    def report_stuck(self) -> None:
        """Report to the leader which ranks survive SIGKILL; cheap if there are none."""
        reason = self._run.workers.stuck()
        if reason == self._stuck:
            return
        self._stuck = reason
        text = reason or "the ranks that did not die of SIGKILL have ended"
        self._run.journal.write("RanksStuck", text=text)
        _log.warning("%s", text)
        self._run.brain.tell(RanksStuck(reason))
        self._run.tell(is_urgent=True)

    def _quiesce(self, order: commands.Quiesce) -> None:
        run = self._run
        if run.workers.alive():
            run.journal.write("KillWorkers", why=order.why)
        self._kill()
        run.publish_status()
        run.caretaker.await_smp()
        run.generations.is_over = True
        holdings = run.smp.inventory()
        store_port, smp_port = run.stores.next_port, run.smp.port
        run.brain.tell(Quiesced(order.generation, holdings, store_port, smp_port))

    def _adopt(self, plan: GenerationPlan) -> None:
        assert self._agent is not None
        run = self._run
        run.report.begin()
        self.awaits_boundary = False
        restored, problem, code = None, "", int(ExitCode.STATE_LOST)
        run.publish_status()
        try:
            restored = run.generations.adopt(self._agent, plan)
        except SnapshotError as error:
            problem, code = str(error), error.exit_code
        pair = (restored.generation, restored.step) if restored is not None else None
        generations = run.generations
        run.brain.tell(
            GenerationInstalled(
                plan.generation,
                pair,
                problem,
                generations.checkpoint,
                generations.rejected,
                code,
            )
        )

    def _run_generation(self) -> None:
        assert self._agent is not None
        run = self._run
        run.generations.run(self._agent, noticed_s=self._failed_s, stopped_s=self._stopped_s)
        run.signals.catch()  # torch has installed its own handlers
        run.caretaker.generation_started(clock.now_s())
        run.eyes.look_at(run.workers.handles)
        if run.brain.member.is_held:
            run.workers.hold(True)
            if not run.brain.member.is_held:  # resumed by the other thread just now
                run.workers.hold(False)
        run.tell(is_urgent=True)

    def _end(self, order: commands.EndRun) -> None:
        run = self._run
        self.has_left = order.goes_on
        run.workers.kill()
        run.publish_status()
        run.generations.repeats.conclude()
        if run.onlookers is not None:
            run.onlookers.at_end()
        if run.desk is not None:
            run.desk.pass_lines_on(at_once=True)
        run.signals.forget()
        is_stop = order.exit_code > 128 and order.cause is None
        if not order.goes_on:
            run.caretaker.last_checkpoint(
                run.spec.profile.stop.grace_s if is_stop else CHECKPOINT_WAIT_S,
                is_cancelled=lambda: run.signals.is_end_wished,
            )
        if run.spec.checkpoint_directory is not None and not order.goes_on:
            run.smp.end_checkpoints(int(order.exit_code), order.why, run.spec.command_digest)
        if order.exit_code != ExitCode.DONE:
            raise RunEnded(order)
        self.is_done = True
