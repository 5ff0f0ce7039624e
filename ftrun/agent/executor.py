"""Executes the commands of the control loop on this node.

Runs in the main thread, inside torch's launcher.
"""

import logging
import signal
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ftrun import clock
from ftrun.agent.launch.elastic import FtrunElasticAgent
from ftrun.agent.launch.parking import RankParking, parked_ranks
from ftrun.agent.report import NodeReporter
from ftrun.agent.snapshots.smp_client import UnconfirmedCommands
from ftrun.errors import ExitCode, PeerError, PeerLost, SnapshotError
from ftrun.ids import Version
from ftrun.membership.events import GenerationInstalled, PlanPersisted, Quiesced, RanksStuck
from ftrun.records.recovery import RanksParked
from ftrun.records.run import RanksStuckRecord
from ftrun.records.snapshots import SmpUnreachable
from ftrun.recovery import commands
from ftrun.wire.cluster.generation import GenerationPlan
from ftrun.wire.shared_memory.pages import NEVER_STEP

if TYPE_CHECKING:
    from ftrun.agent.launcher import Run

_log = logging.getLogger(__name__)


class RunEnded(Exception):
    """The supervisor has ended the run; this unwinds torch's launcher."""

    def __init__(self, command: commands.EndRun) -> None:
        super().__init__(command.reason)
        self.command = command


class CommandExecutor:
    """Executes commands on one node."""

    def __init__(self, run: "Run", report: NodeReporter) -> None:
        self.is_done = False
        self.has_left = False
        """The run continues without this node."""
        self.noticed_s = 0.0
        """Time at which the loop last woke up."""
        self._run = run
        self._report = report
        self._agent: FtrunElasticAgent | None = None
        self._failed_s = self._stopped_s = 0.0
        self._stuck = ""
        self._unconfirmed = UnconfirmedCommands()

    def begin(self, agent: FtrunElasticAgent) -> None:
        self._agent = agent

    def execute_queued(self) -> None:
        """Execute the queue; RunEnded, unless the run ends because all ranks have finished."""
        while not self.is_done and (command := self._run.control_loop.next_order()) is not None:
            self._execute(command)

    def _execute(self, command: commands.NodeCommand) -> None:  # noqa: C901, PLR0912 - dispatch
        run = self._run
        match command:
            case commands.Quiesce():
                self._quiesce(command)
            case commands.InstallGeneration():
                self._install(command.plan)
            case commands.PersistPlan():
                run.generations.keep_plan(command.plan, is_chosen=command.is_chosen)
                run.control_loop.post(PlanPersisted(command.plan.configuration_id))
            case commands.StartRanks():
                self._start_ranks()
            case commands.KillWorkers():
                if run.workers.alive():
                    run.journal.write(command)
                self._kill()
            case commands.SuspendRanks() | commands.ResumeRanks():
                run.journal.write(command)  # already done, see ClusterControlLoop
                if isinstance(command, commands.SuspendRanks):
                    _log.warning("the ranks of this node wait: %s", command.reason)
            case commands.InspectRanks():
                run.rank_observer.examine(run.workers.handles)
                self._report.send(is_urgent=True)
            case commands.RequestFinalSnapshot():
                run.journal.write(command)
                run.workers.awaits_boundary = True
                run.workers.ask_last_snapshot(
                    -1 if run.generations.is_alone else command.after_step
                )
            case commands.WithdrawFinalSnapshot():
                run.journal.write(command)
                run.workers.awaits_boundary = False
                run.workers.ask_last_snapshot(NEVER_STEP)
            case commands.SignalWorkers():
                run.journal.write(command)
                run.workers.awaits_boundary = False
                # Ranks ignore USR1 and USR2 (see linux.ignore_user_signals), so a stop by one of
                # these signals ends the ranks with SIGTERM.
                is_user = command.signal in (signal.SIGUSR1, signal.SIGUSR2)
                run.workers.signal(signal.SIGTERM if is_user else command.signal)
            case commands.JournalEntry():
                run.journal.write(command.record)
                run.generations.announcements.show(command, has_ranks=run.generations.is_member)
            case commands.EndRun():
                run.journal.write(command)
                self._end(command)
            case _:
                self._execute_snapshot(command)

    def _show_levels(self, command: commands.ShowLevels) -> None:
        if self._run.workers.commands is not None:
            self._run.workers.commands.show_levels(command.protected, command.persisted)

    def _execute_snapshot(self, command: commands.SnapshotCommand) -> None:
        run = self._run
        match command:
            case commands.CommitSnapshot():
                run.maintenance.checkpoints.committed(command.version)
                self._request(command)
            case commands.WriteCheckpointPart():
                run.maintenance.checkpoints.write_part(command.version)
            case commands.WriteCapture():
                run.maintenance.checkpoints.write_capture(command.from_step)
            case commands.ShowLevels():
                self._show_levels(command)
            case commands.AbandonStep():
                self._request(command)
            case commands.SetFirstSnapshotStep():
                # On a single member, the SMP commits without the leader. The leader receives no
                # report of a skipped step, so the rank would wait for a later step forever.
                if not run.generations.is_alone:
                    run.workers.take_from(command.step)
            case commands.SetSnapshotInterval():
                run.workers.set_interval(command.every, command.from_step)
            case commands.UpdatePeerPorts():
                run.journal.write(command)
                run.generations.move_peers(command.ports)

    def repeat_unconfirmed(self) -> None:
        run = self._run
        page, generation = run.workers.commands, run.generations.number
        if page is not None and run.workers.generation == generation:
            for command in self._unconfirmed.due(page, generation, now_s=clock.now_s()):
                self._request(command)

    def _request(self, command: commands.CommitSnapshot | commands.AbandonStep) -> None:
        run = self._run
        generation = run.generations.number
        if isinstance(command, commands.CommitSnapshot) and run.generations.is_alone:
            return  # the SMP of a single member commits without the leader
        self._unconfirmed.add(command, generation, now_s=clock.now_s())
        with suppress(PeerError):
            if isinstance(command, commands.CommitSnapshot):
                run.smp.commit(command.version)
            else:
                run.smp.abandon(generation, command.step)

    def _kill(self) -> None:
        self._run.rank_observer.keep_calls(self._run.workers.handles)
        self._run.rank_observer.observe([])
        self._failed_s = self.noticed_s
        self._run.workers.kill()
        self._stopped_s = clock.now_s()
        self.report_stuck()

    def _park(self, command: commands.Quiesce) -> RankParking | None:
        """Park the ranks that may stay; None if there are none, because none has started."""
        run = self._run
        if not run.workers.handles:
            return None
        run.rank_observer.observe([])
        self._failed_s = self.noticed_s
        parking = run.workers.park(failed=command.failed)
        self._stopped_s = clock.now_s()
        ranks = tuple(handle.slot.rank for handle in run.workers.parked)
        run.journal.write(RanksParked(parking.generation, ranks, tuple(parking.notes)))
        self.report_stuck()
        return parking

    def report_stuck(self) -> None:
        """Report ranks that survive SIGKILL to the leader; cheap if there are none."""
        run = self._run
        reason = run.workers.stuck()
        if reason == self._stuck:
            return
        self._stuck = reason
        text = reason or "the ranks that did not end after SIGKILL have ended"
        run.journal.write(RanksStuckRecord(text))
        _log.warning("%s", text)
        run.control_loop.post(RanksStuck(reason))
        self._report.send(is_urgent=True)

    def _quiesce(self, command: commands.Quiesce) -> None:
        run = self._run
        if run.workers.alive():
            run.journal.write(commands.KillWorkers(command.reason))
        run.rehearsals.end_unfinished()
        parking = self._park(command) if command.stay else None
        if parking is None:
            self._kill()
        zygote, fault = run.workers.starter.zygote, self._report.troubles.fault
        if zygote is not None and fault:
            zygote.unbind(fault)  # the fault may have damaged the contexts of standbys too
        run.publish_status()
        run.generations.is_over = True
        holdings, store_port, smp_port = run.maintenance.holdings()
        found = Quiesced(command.generation, holdings, store_port, smp_port)
        if parking is not None:
            parked = parked_ranks(run.workers.handles) or parked_ranks(run.rehearsals.handles)
            found = replace(
                found, parked=parked, parked_in=parking.generation, stay_problem=parking.problem
            )
        run.control_loop.post(found)

    def _install(self, plan: GenerationPlan) -> None:
        run = self._run
        assert self._agent is not None
        self._report.begin()
        run.workers.awaits_boundary = False
        restored, problem, code = None, "", int(ExitCode.STATE_LOST)
        run.publish_status()
        generations = run.generations
        try:
            restored = self._adopt(self._agent, plan)
        except SnapshotError as error:
            problem, code = str(error), error.exit_code
        pair = (restored.generation, restored.step) if restored is not None else None
        checkpoint, rejected = generations.checkpoint, generations.rejected
        run.control_loop.post(
            GenerationInstalled(plan.generation, pair, problem, checkpoint, rejected, code)
        )

    def _adopt(self, agent: FtrunElasticAgent, plan: GenerationPlan) -> Version | None:
        """If the SMP ends, as while it loads a checkpoint, the next one repeats it, but not twice.

        On several nodes the others know the port of the SMP that has ended. Raises as
        `GenerationRunner.adopt`.
        """
        run = self._run
        try:
            return run.generations.adopt(agent, plan)
        except PeerLost as error:
            if len(plan.members) > 1:
                raise
            run.journal.write(SmpUnreachable(str(error)))
            run.maintenance.await_next_smp()
            return run.generations.adopt(agent, plan)

    def _start_ranks(self) -> None:
        run = self._run
        assert self._agent is not None
        memory_s = self._await_device_memory()
        run.generations.run(
            self._agent, noticed_s=self._failed_s, stopped_s=self._stopped_s, memory_s=memory_s
        )
        run.signals.catch()  # torch has installed its own handlers
        run.maintenance.generation_started(clock.now_s())
        run.rank_observer.observe(run.workers.handles)
        if run.control_loop.member.suspension.is_on:
            run.workers.suspend(True)
            if not run.control_loop.member.suspension.is_on:  # the cluster thread has resumed them
                run.workers.suspend(False)
        self._report.send(is_urgent=True)

    def _await_device_memory(self) -> float:
        """Seconds that it took."""
        run = self._run
        run.device_memory.before_start()
        if not run.workers.used_device or run.workers.starter.parked:
            return 0.0  # the ranks that stay use the devices
        run.workers.device_awaited()
        zygote = run.workers.starter.zygote
        holds_device = zygote is not None and zygote.holds_device
        return run.device_memory.wait(since_s=self._stopped_s, standbys_use_it=holds_device)

    def _end(self, command: commands.EndRun) -> None:
        run = self._run
        self.has_left = command.run_continues
        run.workers.kill()
        run.rehearsals.end()
        run.publish_status()
        run.generations.repeats.conclude()
        run.before_end()
        run.signals.forget()
        is_cancelled = lambda: run.signals.is_end_requested  # noqa: E731
        if not command.run_continues:
            run.maintenance.end(command, is_cancelled=is_cancelled)
        run.maintenance.finish_files(command, is_cancelled=is_cancelled)
        if command.exit_code != ExitCode.DONE:
            raise RunEnded(command)
        self.is_done = True
