"""Executes the commands of the control loop on this node.

Runs in:  agent, main thread, inside torch's launcher.
Takes in: commands, one at a time.
Gives:    killed and started ranks, prepared generations; `RunEnded` at the end of the run.
"""

import logging
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from ftrun import clock
from ftrun.agent.cluster.control_loop import ControlLoop
from ftrun.agent.launch.elastic import FtrunElasticAgent
from ftrun.agent.launch.generation import GenerationRunner
from ftrun.agent.launch.worker_group import WorkerGroup
from ftrun.agent.maintenance import Maintenance
from ftrun.agent.observe.device_memory import DeviceMemory
from ftrun.agent.observe.ranks import RankObserver
from ftrun.agent.report import NodeReporter
from ftrun.agent.snapshots.smp_client import AgentSmpClient, UnconfirmedCommands
from ftrun.errors import ExitCode, PeerError, SnapshotError
from ftrun.journal import Journal
from ftrun.membership.events import GenerationInstalled, PlanPersisted, Quiesced, RanksStuck
from ftrun.records.run import RanksStuckRecord
from ftrun.recovery import commands
from ftrun.wire.cluster.generation import GenerationPlan

_log = logging.getLogger(__name__)


class RunEnded(Exception):
    """The supervisor has ended the run; this unwinds torch's launcher."""

    def __init__(self, command: commands.EndRun) -> None:
        super().__init__(command.reason)
        self.command = command


class Publishing(Protocol):
    """Publishes the state of this node."""

    def publish_status(self) -> None:
        """Publish the status before a long operation."""

    def before_end(self) -> None:
        """Write the last values, while the pages of the ranks exist."""


class SignalHandlers(Protocol):
    """Signal handlers of the agent that commands install and remove."""

    def catch(self) -> None: ...

    def forget(self) -> None: ...

    @property
    def is_end_requested(self) -> bool: ...


@dataclass
class CommandExecutor:
    """Executes commands on one node."""

    journal: Journal
    control: ControlLoop
    workers: WorkerGroup
    generations: GenerationRunner
    maintenance: Maintenance
    smp: AgentSmpClient
    observer: RankObserver
    report: NodeReporter
    signals: SignalHandlers
    publishing: Publishing
    device_memory: DeviceMemory
    is_done: bool = False
    """Every rank has finished."""
    has_left: bool = False
    """The run continues without this node."""
    noticed_s: float = 0.0
    """Time at which the loop last woke up."""
    _agent: FtrunElasticAgent | None = None
    _failed_s: float = 0.0
    _stopped_s: float = 0.0
    _stuck: str = ""
    _unconfirmed: UnconfirmedCommands = field(default_factory=UnconfirmedCommands)

    def begin(self, agent: FtrunElasticAgent) -> None:
        self._agent = agent

    def execute_queued(self) -> None:
        """Execute all commands in the queue.

        Raises:
            RunEnded: the run is over for another reason than that all ranks have finished.
        """
        while not self.is_done and (command := self.control.next_order()) is not None:
            self._execute(command)

    def _execute(self, command: commands.NodeCommand) -> None:  # noqa: C901, PLR0912 - dispatch
        match command:
            case commands.Quiesce():
                self._quiesce(command)
            case commands.InstallGeneration():
                self._install(command.plan)
            case commands.PersistPlan():
                self.generations.keep_plan(command.plan, is_chosen=command.is_chosen)
                self.control.post(PlanPersisted(command.plan.configuration_id))
            case commands.StartRanks():
                self._start_ranks()
            case commands.KillWorkers():
                if self.workers.alive():
                    self.journal.write(command)
                self._kill()
            case commands.SuspendRanks() | commands.ResumeRanks():
                self.journal.write(command)  # already done, see ClusterControlLoop
                if isinstance(command, commands.SuspendRanks):
                    _log.warning("the ranks of this node wait: %s", command.reason)
            case commands.InspectRanks():
                self.observer.examine(self.workers.handles)
                self.report.send(is_urgent=True)
            case commands.RequestFinalSnapshot():
                self.journal.write(command)
                self.workers.awaits_boundary = True
                self.workers.ask_last_snapshot(
                    -1 if self.generations.is_alone else command.after_step
                )
            case commands.SignalWorkers():
                self.journal.write(command)
                self.workers.awaits_boundary = False
                # Ranks ignore USR1 and USR2 (see linux.ignore_user_signals), so a stop by one of
                # these signals ends the ranks with SIGTERM.
                is_user = command.signal in (signal.SIGUSR1, signal.SIGUSR2)
                self.workers.signal(signal.SIGTERM if is_user else command.signal)
            case commands.JournalEntry():
                self.journal.write(command.record)
                self.generations.announcements.show(command, has_ranks=self.generations.is_member)
            case commands.EndRun():
                self.journal.write(command)
                self._end(command)
            case _:
                self._execute_snapshot(command)

    def _execute_snapshot(self, command: commands.SnapshotCommand) -> None:
        match command:
            case commands.CommitSnapshot():
                self.maintenance.last_commit = command.version
                if not self.generations.is_alone:
                    self._request(command)
            case commands.WriteCheckpointPart():
                self.maintenance.write_part(command.version)
            case commands.AbandonStep():
                self._request(command)
            case commands.SetFirstSnapshotStep():
                # On a single member, the SMP commits without the leader. The leader receives no
                # report of a skipped step, so the rank would wait for a later step forever.
                if not self.generations.is_alone:
                    self.workers.take_from(command.step)
            case commands.SetSnapshotInterval():
                self.workers.set_interval(command.every, command.from_step)
            case commands.UpdatePeerPorts():
                self.journal.write(command)
                self.generations.move_peers(command.ports)

    def repeat_unconfirmed(self) -> None:
        """Resend commands that the SMP has not executed; called once per turn of the loop."""
        page, generation = self.workers.commands, self.generations.number
        if page is not None and self.workers.generation == generation:
            for command in self._unconfirmed.due(page, generation, now_s=clock.now_s()):
                self._request(command)

    def _request(self, command: commands.CommitSnapshot | commands.AbandonStep) -> None:
        generation = self.generations.number
        self._unconfirmed.add(command, generation, now_s=clock.now_s())
        with suppress(PeerError):
            if isinstance(command, commands.CommitSnapshot):
                self.smp.commit(command.version)
            else:
                self.smp.abandon(generation, command.step)

    def _kill(self) -> None:
        self.observer.observe([])
        self._failed_s = self.noticed_s
        self.workers.kill()
        self._stopped_s = clock.now_s()
        self.report_stuck()

    def report_stuck(self) -> None:
        """Report ranks that survive SIGKILL to the leader; cheap if there are none."""
        reason = self.workers.stuck()
        if reason == self._stuck:
            return
        self._stuck = reason
        text = reason or "the ranks that did not end after SIGKILL have ended"
        self.journal.write(RanksStuckRecord(text))
        _log.warning("%s", text)
        self.control.post(RanksStuck(reason))
        self.report.send(is_urgent=True)

    def _quiesce(self, command: commands.Quiesce) -> None:
        if self.workers.alive():
            self.journal.write(commands.KillWorkers(command.reason))
        self._kill()
        zygote, fault = self.workers.starter.zygote, self.report.troubles.fault
        if zygote is not None and fault:
            zygote.unbind(fault)  # the fault may have damaged the contexts of standbys too
        self.publishing.publish_status()
        self.generations.is_over = True
        holdings, store_port, smp_port = self.maintenance.holdings()
        self.control.post(Quiesced(command.generation, holdings, store_port, smp_port))

    def _install(self, plan: GenerationPlan) -> None:
        assert self._agent is not None
        self.report.begin()
        self.workers.awaits_boundary = False
        restored, problem, code = None, "", int(ExitCode.STATE_LOST)
        self.publishing.publish_status()
        generations = self.generations
        try:
            restored = generations.adopt(self._agent, plan)
        except SnapshotError as error:
            problem, code = str(error), error.exit_code
        pair = (restored.generation, restored.step) if restored is not None else None
        checkpoint, rejected = generations.checkpoint, generations.rejected
        self.control.post(
            GenerationInstalled(plan.generation, pair, problem, checkpoint, rejected, code)
        )

    def _start_ranks(self) -> None:
        assert self._agent is not None
        memory_s = self._await_device_memory()
        self.generations.run(
            self._agent, noticed_s=self._failed_s, stopped_s=self._stopped_s, memory_s=memory_s
        )
        self.signals.catch()  # torch has installed its own handlers
        self.maintenance.generation_started(clock.now_s())
        self.observer.observe(self.workers.handles)
        if self.control.member.suspension.is_on:
            self.workers.suspend(True)
            if not self.control.member.suspension.is_on:  # the cluster thread has resumed them
                self.workers.suspend(False)
        self.report.send(is_urgent=True)

    def _await_device_memory(self) -> float:
        """Return the seconds it took."""
        self.device_memory.before_start()
        if not self.workers.used_device:
            return 0.0
        self.workers.used_device = False
        zygote = self.workers.starter.zygote
        holds_device = zygote is not None and zygote.holds_device
        return self.device_memory.wait(since_s=self._stopped_s, standbys_use_it=holds_device)

    def _end(self, command: commands.EndRun) -> None:
        self.has_left = command.run_continues
        self.workers.kill()
        self.publishing.publish_status()
        self.generations.repeats.conclude()
        self.publishing.before_end()
        self.signals.forget()
        if not command.run_continues:
            self.maintenance.end(command, is_cancelled=lambda: self.signals.is_end_requested)
        if command.exit_code != ExitCode.DONE:
            raise RunEnded(command)
        self.is_done = True
