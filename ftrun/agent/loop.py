"""The loop of one agent: collects events on this node and executes commands here.

Runs in:  agent, main thread, inside torch's launcher.
Takes in: pidfds, signals, messages of the SMP, requests of the CLI, time; commands of the control
          loop.
Gives:    ended and restarted workers; reports of this node; `RunEnded` at the end of the run.
Survives: the SMP, the zygote, and every worker.

The loop makes no run-level decisions. The leader makes them, and the control loop delivers them as
commands. Other modules implement the parts of one turn: `executor.py` (commands), `run_signals.py`,
`part_deaths.py` and `report.py` (events, and the reports about them).
"""

import select
from typing import TYPE_CHECKING

from ftrun import clock
from ftrun.agent.cluster.control_loop import ControlLoop
from ftrun.agent.cluster.finished_watch import FinishedWatch
from ftrun.agent.cluster.rpc import ClusterRpc
from ftrun.agent.executor import CommandExecutor, RunEnded
from ftrun.agent.faults.controller import FaultController
from ftrun.agent.launch.elastic import FtrunElasticAgent
from ftrun.agent.launch.generation import GenerationRunner
from ftrun.agent.launch.rendezvous import StorePool
from ftrun.agent.launch.worker_group import WorkerGroup
from ftrun.agent.launch.zygote_link import ZygoteClient
from ftrun.agent.maintenance import Maintenance
from ftrun.agent.observe.ranks import RankObserver
from ftrun.agent.part_deaths import ChildExits
from ftrun.agent.report import NodeReporter
from ftrun.agent.run_signals import RunSignals
from ftrun.agent.snapshots.smp_client import AgentSmpClient
from ftrun.config.run_spec import RunSpec
from ftrun.journal import Journal
from ftrun.linux import name_process

if TYPE_CHECKING:
    from ftrun.agent.publish.observers import Observers

TICK_S = 0.25
EAGER_TICK_S = 0.005


class RunLoop:
    """One run on one node; its attributes are public for the other modules of the main thread."""

    def __init__(  # noqa: PLR0913 - the parts of a run
        self,
        spec: RunSpec,
        *,
        journal: Journal,
        smp: AgentSmpClient,
        zygote: ZygoteClient | None,
        stores: StorePool,
        workers: WorkerGroup,
        generations: GenerationRunner,
        brain: ControlLoop,
        caretaker: Maintenance,
        desk: ClusterRpc | None,
        eyes: RankObserver,
    ) -> None:
        self.spec = spec
        self.journal = journal
        self.smp = smp
        self.zygote = zygote
        self.stores = stores
        self.workers = workers
        self.generations = generations
        self.brain = brain
        self.caretaker = caretaker
        self.desk = desk
        self.eyes = eyes
        self.signals = RunSignals(spec, journal=journal, workers=workers)
        self.orders = CommandExecutor(self)
        self.parts = ChildExits(self)
        self.report = NodeReporter(self)
        self.finished = FinishedWatch(spec, brain)
        self.faults = FaultController(self) if spec.allow_faults else None
        if desk is not None:
            desk.faults = self.faults
        self.onlookers: Observers | None = None
        self.started_s = clock.now_s()

    def drive(self, agent: FtrunElasticAgent) -> None:
        """Run until every rank has finished.

        Raises:
            RunEnded: the run ends in another way.
        """
        name_process("ftrun-agent")  # torch has set another name
        self.orders.begin(agent)
        self.signals.catch()
        try:
            self._turn_until_done()
        except RunEnded:
            raise
        except Exception:
            # Otherwise torch waits 30 s for suspended ranks, and delays the next agent by that.
            self.workers.kill()
            raise

    def _turn_until_done(self) -> None:
        while not self.orders.is_done:
            self.brain.passing()
            self.orders.obey()
            if self.orders.is_done:
                return
            self._wait()
            if self.faults is not None:
                self.faults.look()
            self._gather()
            self.orders.repeat()
            if self.caretaker.look_after(clock.now_s()):
                self.generations.tell_new_smp()
            self.finished.look(now_s=clock.now_s())
            if self.onlookers is not None:
                self.onlookers.look(clock.now_s())
            if self.desk is not None:
                self.desk.pass_lines_on()

    def wake(self) -> None:
        """Wake the loop so that it handles what other threads have for it; for those threads."""
        self.signals.wake()

    def publish_status(self) -> None:
        """Publish before a long operation, because nothing newer is published until it ends."""
        if self.onlookers is not None:
            self.onlookers.status.publish()

    def tell(self, *, is_urgent: bool) -> None:
        self.report.tell(now_s=clock.now_s(), is_urgent=is_urgent)

    def _wait(self) -> None:
        poller = select.poll()
        for fd in self._descriptors():
            poller.register(fd, select.POLLIN)
        eager = self.orders.awaits_boundary or self.caretaker.smp_is_starting
        eager |= self.faults is not None and self.faults.is_eager
        poller.poll((EAGER_TICK_S if eager else TICK_S) * 1000)
        self.orders.noticed_s = clock.now_s()

    def _descriptors(self) -> list[int]:
        found = [self.signals.fileno()]
        children = [handle.child for handle in self.workers.alive()]
        found += [child.pidfd for child in children if child.status is None]
        found += [child.pidfd for child in self.parts.children]
        if self.smp.channel is not None:
            found.append(self.smp.channel.fileno())
        return found

    def _gather(self) -> None:
        self.signals.awake()
        self.report.take_ends()
        self.parts.look()
        self.orders.report_stuck()
        self.signals.handle()
        self.report.take_notices(now_s=clock.now_s())
        self.generations.repeats.look()
        self.tell(is_urgent=False)
