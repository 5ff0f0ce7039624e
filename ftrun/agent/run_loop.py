"""The loop of a run on this node: gather events, ask the supervisor, carry out its commands.

Runs in:  agent, main thread, inside torch's launcher.
Takes in: pidfds, signals, what the SMP says, what the cli asks, and time.
Gives:    ended and restarted workers; `RunEnded` when it is over.
Survives: the SMP, the zygote, and every worker.

It decides nothing: what to do about an event is the supervisor's word.
"""

import logging
import select
import signal
import socket
from contextlib import suppress
from dataclasses import fields
from queue import Empty, SimpleQueue

from ftrun import clock, events
from ftrun.agent.caretaker import Caretaker
from ftrun.agent.elastic import FtrunElasticAgent
from ftrun.agent.generations import Generations
from ftrun.agent.processes import Child, oom_kills
from ftrun.agent.smp_link import CHECKPOINT_WAIT_S, SmpLink
from ftrun.agent.worker_group import WorkerGroup
from ftrun.agent.zygote_link import ZygoteLink
from ftrun.config import RunSpec
from ftrun.errors import ExitCode, PeerError
from ftrun.ids import Generation
from ftrun.journal import Journal
from ftrun.monitor.exits import end_in_words, signal_name
from ftrun.recovery import commands
from ftrun.recovery.supervisor import State, Supervisor

_log = logging.getLogger(__name__)

TICK_S = 0.25
EAGER_TICK_S = 0.005
_WAKING_SIGNALS = (
    signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT,
    signal.SIGCHLD,
)  # fmt: skip


class RunEnded(Exception):
    """The supervisor has ended the run; unwinds torch's launcher."""

    def __init__(self, command: commands.EndRun) -> None:
        super().__init__(command.why)
        self.command = command


class RunLoop:
    """One run on one node; its parts are public for status."""

    def __init__(  # noqa: PLR0913 - the parts of a run
        self,
        spec: RunSpec,
        *,
        journal: Journal,
        smp: SmpLink,
        zygote: ZygoteLink | None,
        workers: WorkerGroup,
        generations: Generations,
        supervisor: Supervisor,
        caretaker: Caretaker,
    ) -> None:
        self.spec = spec
        self.journal = journal
        self.smp = smp
        self.zygote = zygote
        self.workers = workers
        self.generations = generations
        self.supervisor = supervisor
        self.caretaker = caretaker
        self.started_s = clock.now_s()
        self.asks: SimpleQueue[events.Event] = SimpleQueue()
        """Events from the control thread."""
        self._agent: FtrunElasticAgent | None = None
        self._is_done = False
        self._noticed_s = 0.0
        self._failed_s = 0.0
        self._stopped_s = 0.0
        self._oom_kills = oom_kills()
        self._signals: list[int] = []
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)

    def drive(self, agent: FtrunElasticAgent) -> None:
        """Run until every rank has finished.

        Raises:
            RunEnded: it ends in another way.
        """
        self._agent = agent
        world_size = agent.worker_group.spec.local_world_size
        self.supervisor.world_size = self.generations.world_size = world_size
        self._catch_signals()
        self._carry_out(commands.StartGeneration("the run begins"))
        while not self._is_done:
            self._wait()
            for event in self._gather():
                self._handle(event)
            if self.caretaker.look_after(clock.now_s()):
                self.generations.tell_smp()

    def wake(self) -> None:
        """Have the loop look at `asks` now; for the control thread."""
        with suppress(BlockingIOError):
            self._wake_write.send(b"\0")

    def _handle(self, event: events.Event) -> None:
        if not isinstance(event, events.Tick):
            self.journal.write(type(event).__name__, **_fields(event))
        for command in self.supervisor.handle(event, now_s=clock.now_s()):
            self._carry_out(command)

    def _carry_out(self, command: commands.Command) -> None:  # noqa: C901 - dispatch
        if not isinstance(command, commands.StartGeneration):
            self.journal.write(type(command).__name__, **_fields(command))
        match command:
            case commands.KillWorkers():
                self._failed_s = self._noticed_s
                self.workers.kill()
                self._stopped_s = clock.now_s()
            case commands.StartGeneration():
                self._start_generation(command.why)
            case commands.RespawnSmp():
                self.smp.start()
                self.caretaker.smp_is_starting = True
            case commands.RespawnZygote():
                if self.zygote is not None:
                    self.zygote.start()
            case commands.GoOnWithout():
                self._go_on_without(command)
            case commands.AskLastSnapshot():
                self.workers.ask_last_snapshot()
            case commands.SignalWorkers():
                self.workers.signal(command.signal)
            case commands.EndRun():
                self.workers.kill()
                self._signals.clear()
                is_stop = command.exit_code > 128 and command.cause is None
                self.caretaker.last_checkpoint(
                    self.spec.profile.stop.grace_s if is_stop else CHECKPOINT_WAIT_S,
                    is_cancelled=lambda: bool(self._signals),
                )
                if command.exit_code != ExitCode.DONE:
                    raise RunEnded(command)
                self._is_done = True

    def _start_generation(self, why: str) -> None:
        assert self._agent is not None
        restored = self.generations.start(
            self._agent, why, noticed_s=self._failed_s, stopped_s=self._stopped_s
        )
        self._catch_signals()  # torch has put its own handlers in place
        self.caretaker.generation_started(clock.now_s())
        self._handle(events.GenerationStarted(Generation(self.generations.number), restored))

    def _go_on_without(self, command: commands.GoOnWithout) -> None:
        if command.part == "zygote":
            self.workers.starter.zygote = None
            self.zygote = None
        else:
            self.caretaker.smp_given_up = command.why
            _log.warning("no more snapshots: %s", command.why)

    # --- events -------------------------------------------------------------------------------

    def _wait(self) -> None:
        poller = select.poll()
        for fd in self._descriptors():
            poller.register(fd, select.POLLIN)
        eager = self.supervisor.state is State.LAST_SNAPSHOT or self.caretaker.smp_is_starting
        poller.poll((EAGER_TICK_S if eager else TICK_S) * 1000)
        self._noticed_s = clock.now_s()

    def _descriptors(self) -> list[int]:
        found = [self._wake_read.fileno()]
        children = [handle.child for handle in self.workers.alive()]
        children += [child for child in (self.smp.child, self._zygote_child()) if child]
        found += [child.pidfd for child in children if child.status is None]
        if self.smp.channel is not None:
            found.append(self.smp.channel.fileno())
        return found

    def _gather(self) -> list[events.Event]:
        """Everything that has happened since the last look; workers' ends first."""
        with suppress(BlockingIOError):
            self._wake_read.recv(4096)
        found = self._ends() + self._own_deaths()
        while self._signals:
            found += self._on_signal(self._signals.pop(0))
        with suppress(Empty):
            while True:
                found.append(self.asks.get_nowait())
        if self.supervisor.state is State.LAST_SNAPSHOT and self.workers.all_at_boundary():
            found.append(events.AllAtBoundary())
        return [*found, events.Tick()]

    def _ends(self) -> list[events.Event]:
        ended = self.workers.ended()
        if not ended:
            return []
        kills = oom_kills()
        new = None if kills is None or self._oom_kills is None else kills - self._oom_kills
        self._oom_kills = kills
        exits = tuple(self.workers.explain(handle, oom_kills=new) for handle in ended)
        return [events.WorkersExited(exits, self.workers.progress())]

    def _own_deaths(self) -> list[events.Event]:
        found: list[events.Event] = []
        zygote = self._zygote_child()
        if zygote is not None and zygote.status is None and zygote.reap():
            found.append(events.ZygoteExited(f"the zygote {end_in_words(zygote.ended_with)}"))
        try:
            self.smp.collect()
        except PeerError:
            self.smp.lost()
            # One of our own is told by its exit status, an adopted one only by this.
            if self.smp.child is None:
                found.append(events.SmpExited("the SMP has closed its connection"))
        child = self.smp.child
        if child is not None and child.status is None and child.reap():
            self.smp.lost()
            found.append(events.SmpExited(f"the SMP {end_in_words(child.ended_with)}"))
        return found

    def _on_signal(self, number: int) -> list[events.Event]:
        if number == signal.SIGCHLD:
            return []  # it has woken us; a stopped worker is seen in /proc
        name = signal_name(number)
        forward = self.spec.profile.stop.forward
        if name in forward or name.removeprefix("SIG") in forward or number == signal.SIGUSR2:
            self.journal.write("forwarded", signal=name)
            self.workers.signal(number)
            return []
        attached = self.workers.progress().attached
        return [events.StopAsked(number, f"{name} to ftrun", attached)]

    def _catch_signals(self) -> None:
        """Handlers only append; the loop handles."""
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        for number in _WAKING_SIGNALS:
            signal.signal(number, lambda found, _frame: self._signals.append(found))

    def _zygote_child(self) -> Child | None:
        return self.zygote.child if self.zygote is not None else None


def _fields(value: object) -> dict[str, object]:
    """A value's fields as the journal writes them: text where they are not plain."""
    found: dict[str, object] = {}
    for field in fields(value):  # type: ignore[arg-type]
        content = getattr(value, field.name)
        plain = isinstance(content, str | int | float | bool) or content is None
        found[field.name] = content if plain else _in_words(content)
    return found


def _in_words(content: object) -> object:
    if isinstance(content, tuple):
        return [_in_words(part) for part in content]
    if isinstance(content, events.WorkerExit):
        return {"rank": content.rank, "kind": content.kind.value, "text": content.text}
    return str(content)
