"""The loop of one agent: collects events on this node and executes commands here.

Runs in:  agent, main thread, inside torch's launcher; `RunSignals.ask_stop` and `wake` in any.
Takes in: pidfds, signals, `ftrun stop`, messages of the SMP, time; commands of the control loop.
Gives:    ended and restarted workers; reports of this node; `RunEnded` at the end of the run.
Survives: the SMP, the zygote, and every worker.

The loop makes no run-level decisions. The leader makes them, and the control loop delivers them as
commands, which `executor.py` executes.

Rule 1: signal handlers only append; the loop handles.
Rule 2: on several nodes SIGTERM may be for this node alone. The leader decides whether this node
        drains or the run stops. Everything else, and a second SIGTERM, is for the run. A notice is
        for this node alone, and the machine that it names sends the first SIGTERM when it ends.
"""

import logging
import select
import signal
import socket
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from ftrun import clock, events
from ftrun.agent.cluster.control_loop import FinishedWatch
from ftrun.agent.executor import CommandExecutor, RunEnded
from ftrun.agent.faults.controller import FaultController
from ftrun.agent.launch.elastic import UNUSED_SIGNAL, FtrunElasticAgent
from ftrun.agent.launch.worker_group import WorkerGroup
from ftrun.agent.report import NodeReporter
from ftrun.config.run_spec import RunSpec
from ftrun.journal import Journal
from ftrun.linux import name_process
from ftrun.monitor.worker_exits import signal_name
from ftrun.records.run import LeaveRequested, SignalForwarded

if TYPE_CHECKING:
    from ftrun.agent.launcher import Run

_log = logging.getLogger(__name__)

TICK_S = 0.25
EAGER_TICK_S = 0.005

SAME_SIGNAL_S = 0.5
"""Equal signals within this time are one request, because Slurm signals every process of a step and
the stub forwards its own copy."""

_WISHES = (
    signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT,
)  # fmt: skip


class RunSignals:
    """The signals that this agent has received."""

    def __init__(self, spec: RunSpec, *, journal: Journal, workers: WorkerGroup) -> None:
        self.stops = 0
        self.stop_signal = 0
        self.leaves = False
        """This node was asked to drain."""
        self._spec = spec
        self._journal = journal
        self._workers = workers
        self._asked: SimpleQueue[tuple[str, bool]] = SimpleQueue()
        """Origin of a request, and whether only this node shall leave."""
        self._had_sigterm = False
        self._signals: list[tuple[int, float]] = []
        """With the times of their arrival, because the main thread may be busy for minutes."""
        self._last, self._last_s = 0, 0.0
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)

    # --- any thread ---------------------------------------------------------------------------

    def wake(self) -> None:
        with suppress(BlockingIOError):
            self._wake_write.send(b"\0")

    def ask_stop(self, by: str) -> None:
        self._asked.put((by, False))
        self.wake()

    def ask_leave(self, by: str) -> None:
        """Have this node leave the run; a run on one node stops."""
        self._asked.put((by, True))
        self.wake()

    # --- main thread --------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._wake_read.fileno()

    def catch(self) -> None:
        """Install the handlers; again after torch has installed its own."""
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        for number in _WISHES:
            signal.signal(number, self._note)
        # It only wakes the loop; /proc shows whether a worker is stopped.
        signal.signal(signal.SIGCHLD, lambda _found, _frame: None)
        # A terminal sends it when its size changes, and torch's handler would end the ranks.
        signal.signal(UNUSED_SIGNAL, signal.SIG_DFL)

    def awake(self) -> None:
        with suppress(BlockingIOError):
            self._wake_read.recv(4096)

    @property
    def is_end_requested(self) -> bool:
        return not all(self._is_for_ranks(number) for number, _ in self._signals)

    def forget(self) -> None:
        self._signals.clear()

    def handle(self) -> None:
        while self._signals:
            self._on_signal(*self._signals.pop(0))
        with suppress(Empty):
            while True:
                by, leaves = self._asked.get_nowait()
                if not leaves or self._spec.nodes is None:
                    self._stop_asked(signal.SIGTERM, by)
                elif not self.leaves:
                    self._leave(by)

    def _note(self, number: int, _frame: object) -> None:
        self._signals.append((number, clock.now_s()))

    def _on_signal(self, number: int, at_s: float) -> None:
        is_repeated = number == self._last and at_s - self._last_s < SAME_SIGNAL_S
        self._last, self._last_s = number, at_s
        if is_repeated:
            return
        name = signal_name(number)
        if self._is_for_ranks(number):
            self._journal.write(SignalForwarded(name))
            self._workers.signal(number)
        elif number == signal.SIGTERM and self._spec.nodes is not None and not self._had_sigterm:
            # Also the end of a machine that a notice has named: it says nothing about the run.
            self._had_sigterm = True
            if not self.leaves:
                self._leave(f"{name} to ftrun")
        else:
            self._stop_asked(number, f"{name} to ftrun")

    def _leave(self, by: str) -> None:
        self.leaves = True
        self._journal.write(LeaveRequested(by))
        _log.warning("this node leaves the run: %s", by)

    def _is_for_ranks(self, number: int) -> bool:
        name, forward = signal_name(number), self._spec.profile.stop.forward_signals
        return name in forward or name.removeprefix("SIG") in forward or number == signal.SIGUSR2

    def _stop_asked(self, number: int, by: str) -> None:
        self.stops += 1
        self.stop_signal = number
        self._journal.write(events.StopRequested(number, by, self._workers.progress().attached))


class RunLoop:
    """One run on one node."""

    def __init__(self, run: "Run", faults: FaultController | None) -> None:
        self._run = run
        self._faults = faults
        self._report = NodeReporter(run)
        self.executor = CommandExecutor(run, self._report)
        self._finished = FinishedWatch(run.spec, run.control_loop)

    def drive(self, agent: FtrunElasticAgent) -> None:
        """Run until every rank has finished; RunEnded if the run ends in another way."""
        name_process("ftrun-agent")  # torch has set another name
        self.executor.begin(agent)
        self._run.signals.catch()
        try:
            self._turn_until_done()
        except RunEnded:
            raise
        except Exception:
            # Otherwise torch waits 30 s for suspended ranks, and delays the next agent by that.
            self._run.workers.kill()
            raise

    def _turn_until_done(self) -> None:
        run = self._run
        while not self.executor.is_done:
            run.control_loop.tick()
            self.executor.execute_queued()
            if self.executor.is_done:
                return
            self._wait()
            if self._faults is not None:
                self._faults.poll()
            self._collect()
            self.executor.repeat_unconfirmed()
            run.maintenance.check_processes(clock.now_s())
            self._finished.poll(now_s=clock.now_s())
            run.observe(clock.now_s())

    def _wait(self) -> None:
        run = self._run
        poller = select.poll()
        ranks = run.workers.descriptors
        for fd in (run.signals.fileno(), *ranks, *run.maintenance.descriptors):
            poller.register(fd, select.POLLIN)
        eager = run.workers.awaits_boundary or run.maintenance.smp_is_starting
        eager |= self._faults is not None and self._faults.is_eager
        poller.poll((EAGER_TICK_S if eager else TICK_S) * 1000)
        self.executor.noticed_s = clock.now_s()

    def _collect(self) -> None:
        run = self._run
        run.signals.awake()
        self._report.collect_exits()
        run.maintenance.handle_exits()
        self.executor.report_stuck()
        run.signals.handle()
        self._report.collect_notices()
        self._report.send(is_urgent=False)
