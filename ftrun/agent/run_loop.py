"""The hands of an agent: gather what happens on this node, carry out what is to be done here.

Runs in:  agent, main thread, inside torch's launcher.
Takes in: pidfds, signals, what the SMP says, what the cli asks, time; the brain's orders.
Gives:    ended and restarted workers; how things are here; `RunEnded` when it is over.
Survives: the SMP, the zygote, and every worker.

It decides nothing about the run: that is the lead's word, which comes by way of the brain.
"""

import logging
import select
import signal
import socket
from contextlib import suppress
from dataclasses import fields
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from ftrun import clock, events
from ftrun.agent.brain import Brain
from ftrun.agent.caretaker import Caretaker
from ftrun.agent.cluster_desk import ClusterDesk
from ftrun.agent.device_counters import RecentTroubles
from ftrun.agent.elastic import FtrunElasticAgent
from ftrun.agent.eyes import Eyes
from ftrun.agent.fault_desk import FaultDesk
from ftrun.agent.generations import Generations
from ftrun.agent.processes import Child, oom_kills
from ftrun.agent.rendezvous import StorePool
from ftrun.agent.smp_link import CHECKPOINT_WAIT_S, SmpLink
from ftrun.agent.worker_group import WorkerGroup
from ftrun.agent.zygote_link import ZygoteLink
from ftrun.config import RunSpec
from ftrun.errors import ExitCode, PeerError, SnapshotError
from ftrun.journal import Journal
from ftrun.monitor.exits import end_in_words, signal_name
from ftrun.recovery import commands
from ftrun.recovery.happenings import Adopted, HereIs, PlanKept, Quiesced
from ftrun.recovery.own_parts import Parts
from ftrun.wire.heartbeats import Beat
from ftrun.wire.plan import Plan, VersionPair

if TYPE_CHECKING:
    from ftrun.agent.onlookers import Onlookers

_log = logging.getLogger(__name__)

TICK_S = 0.25
EAGER_TICK_S = 0.005
SAME_SIGNAL_S = 0.5
"""Slurm signals every process of a step, and the stub passes on its own: it is one wish."""
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
        stores: StorePool,
        workers: WorkerGroup,
        generations: Generations,
        brain: Brain,
        caretaker: Caretaker,
        desk: ClusterDesk | None,
        eyes: Eyes,
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
        self.troubles = RecentTroubles()
        self.faults = FaultDesk(self) if spec.allow_faults else None
        if desk is not None:
            desk.faults = self.faults
        self.onlookers: Onlookers | None = None
        self.started_s = clock.now_s()
        self.stops_asked: SimpleQueue[str] = SimpleQueue()
        """Who wants the run to stop; from the control thread."""
        self._agent: FtrunElasticAgent | None = None
        self._is_done = False
        self._parts = Parts()
        self._exits: list[events.WorkerExit] = []
        self._stops = 0
        self._stop_signal = 0
        self._told = Beat(generation=-1)
        self._awaits_boundary = False
        self._differs: tuple[str, tuple[int, ...]] = ("", ())
        self._noticed_s = 0.0
        self._failed_s = 0.0
        self._stopped_s = 0.0
        self._oom_kills = oom_kills()
        self._signals: list[int] = []
        self._last_signal, self._last_signal_s = 0, 0.0
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)

    def drive(self, agent: FtrunElasticAgent) -> None:
        """Run until every rank has finished.

        Raises:
            RunEnded: it ends in another way.
        """
        self._agent = agent
        self._catch_signals()
        while not self._is_done:
            self.brain.passing()
            self._obey()
            if self._is_done:
                return
            self._wait()
            if self.faults is not None:
                self.faults.look()
            self._gather()
            if self.caretaker.look_after(clock.now_s()):
                self.generations.tell_new_smp()
            if self.onlookers is not None:
                self.onlookers.look(clock.now_s())
            if self.desk is not None:
                self.desk.pass_lines_on()

    def wake(self) -> None:
        """Have the loop look at what other threads have for it; for those threads."""
        with suppress(BlockingIOError):
            self._wake_write.send(b"\0")

    # --- orders -------------------------------------------------------------------------------

    def _obey(self) -> None:
        while (order := self.brain.next_order()) is not None:
            self._carry_out(order)
            if self._is_done:
                return

    def _carry_out(self, order: commands.NodeCommand) -> None:  # noqa: C901, PLR0912 - dispatch
        match order:
            case commands.Quiesce():
                self._quiesce(order)
            case commands.Adopt():
                self._adopt(order.plan)
            case commands.KeepPlan():
                self.generations.keep_plan(order.plan, took_effect=order.took_effect)
                self.brain.tell(PlanKept(order.plan.edition))
            case commands.RunGeneration():
                self._run_generation()
            case commands.KillWorkers():
                if self.workers.alive():
                    self._note(order)
                self._kill()
            case commands.HoldRanks() | commands.ReleaseRanks():
                self._note(order)  # it is done already, see ClusterBrain
            case commands.ExamineRanks():
                self.eyes.examine(self.workers.handles)
                self._tell(is_urgent=True)
            case commands.AskLastSnapshot():
                self._note(order)
                self._awaits_boundary = True
                after = -1 if self.generations.is_alone else order.after_step
                self.workers.ask_last_snapshot(after)
            case commands.SignalWorkers():
                self._note(order)
                self._awaits_boundary = False
                # Ranks ignore USR1 and USR2, see kernel.ignore_user_signals; a stop by one of
                # them ends them as SIGTERM does.
                is_user = order.signal in (signal.SIGUSR1, signal.SIGUSR2)
                self.workers.signal(signal.SIGTERM if is_user else order.signal)
            case commands.Note():
                self.journal.write(order.kind, text=order.text, **order.fields)
                if order.say:
                    _log.warning("%s", order.text)
            case commands.EndRun():
                self._note(order)
                self._end(order)
            case _:
                self._carry_out_beside(order)

    def _carry_out_beside(self, order: commands.SnapshotCommand) -> None:
        """What the ranks do not notice."""
        match order:
            case commands.Commit():
                self.caretaker.last_commit = order.version
                if not self.generations.is_alone:
                    with suppress(PeerError):
                        self.smp.commit(order.version)
            case commands.Checkpoint():
                self.caretaker.write_part(order.version)
            case commands.Abandon():
                with suppress(PeerError):
                    self.smp.abandon(self.generations.number, order.step)
            case commands.TakeFrom():
                self.workers.take_from(order.step)
            case commands.SetInterval():
                self.workers.set_interval(order.every, order.from_step)
            case commands.MovePeers():
                self._note(order)
                self.generations.move_peers(order.ports)

    def _note(self, order: commands.NodeCommand) -> None:
        self.journal.write(type(order).__name__, **_fields(order))

    def _kill(self) -> None:
        self.eyes.look_at([])
        self._failed_s = self._noticed_s
        self.workers.kill()
        self._stopped_s = clock.now_s()

    def _quiesce(self, order: commands.Quiesce) -> None:
        if self.workers.alive():
            self.journal.write("KillWorkers", why=order.why)
        self._kill()
        self.caretaker.await_smp()
        self.generations.is_over = True
        holdings = self.smp.inventory()
        store_port, smp_port = self.stores.next_port, self.smp.port
        self.brain.tell(Quiesced(order.generation, holdings, store_port, smp_port))

    def _adopt(self, plan: Plan) -> None:
        assert self._agent is not None
        self._exits.clear()
        self._differs = ("", ())
        self._awaits_boundary = False
        try:
            restored = self.generations.adopt(self._agent, plan)
        except SnapshotError as error:
            self.brain.tell(Adopted(plan.generation, None, str(error)))
            return
        pair = (restored.generation, restored.step) if restored is not None else None
        self.brain.tell(Adopted(plan.generation, pair))

    def _run_generation(self) -> None:
        assert self._agent is not None
        self.generations.run(self._agent, noticed_s=self._failed_s, stopped_s=self._stopped_s)
        self._catch_signals()  # torch has put its own handlers in place
        self.caretaker.generation_started(clock.now_s())
        self.eyes.look_at(self.workers.handles)
        if self.brain.member.is_held:
            self.workers.hold(True)
            if not self.brain.member.is_held:  # let go by the other thread just then
                self.workers.hold(False)
        self._tell(is_urgent=True)

    def _end(self, order: commands.EndRun) -> None:
        self.workers.kill()
        if self.onlookers is not None:
            self.onlookers.at_end()
        if self.desk is not None:
            self.desk.pass_lines_on(at_once=True)
        self._signals.clear()
        is_stop = order.exit_code > 128 and order.cause is None
        self.caretaker.last_checkpoint(
            self.spec.profile.stop.grace_s if is_stop else CHECKPOINT_WAIT_S,
            is_cancelled=lambda: bool(self._signals),
        )
        if order.exit_code != ExitCode.DONE:
            raise RunEnded(order)
        self._is_done = True

    # --- events -------------------------------------------------------------------------------

    def _wait(self) -> None:
        poller = select.poll()
        for fd in self._descriptors():
            poller.register(fd, select.POLLIN)
        eager = self._awaits_boundary or self.caretaker.smp_is_starting
        eager |= self.faults is not None and self.faults.is_eager
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

    def _gather(self) -> None:
        """Take in everything that has happened since the last look, and tell the brain."""
        with suppress(BlockingIOError):
            self._wake_read.recv(4096)
        self._take_ends()
        for death in self._own_deaths():
            self.journal.write(type(death).__name__, **_fields(death))
            self._do_without(self._parts.handle(death, now_s=clock.now_s()))
        while self._signals:
            self._on_signal(self._signals.pop(0))
        with suppress(Empty):
            while True:
                self._stop_asked(signal.SIGTERM, self.stops_asked.get_nowait())
        for text in self.troubles.take(self.eyes.troubles, now_s=clock.now_s()):
            self.journal.write("DeviceTrouble", text=text)
        for notice in self.smp.take_notices():
            self.journal.write("smp_" + notice.kind, why=notice.why, nodes=notice.nodes,
                               ranks=notice.ranks)  # fmt: skip
            if notice.kind == "replicas_differ":
                self._differs = (notice.why, tuple(notice.ranks))
        self._tell(is_urgent=False)

    def _tell(self, *, is_urgent: bool) -> None:
        """Say how things are here; at once where it asks for an act."""
        beat = self._here()
        is_urgent |= _what_matters(beat) != _what_matters(self._told)
        self._told = beat
        self.brain.tell(HereIs(beat, is_urgent))

    def _here(self) -> Beat:
        progress = self.workers.progress()
        runs = bool(self.workers.handles) and self.generations.is_member
        return Beat(
            generation=self.generations.number if runs else -1,
            state="held" if self.workers.is_held else "running" if runs else "idle",
            step=progress.step,
            steps_here=progress.steps_here,
            attached=progress.attached,
            exits=tuple(self._exits),
            ready=self._ready(),
            abandoned_step=self.smp.abandoned_step,
            at_boundary=self._awaits_boundary and self.workers.all_at_boundary(),
            wished_every=self.workers.wished_every(),
            stops=self._stops,
            stop_signal=self._stop_signal,
            smp_port=self.smp.port,
            survives=0 if self.generations.is_alone else self.smp.survives,
            problem=self.smp.restore_failed,
            unprotected=self.caretaker.smp_given_up or self.smp.survives_why,
            ranks=self.workers.reports(clock.now_s()),
            p99_s=self.eyes.p99_s,
            views=self.eyes.views,
            sample=self.eyes.sample,
            troubles=self.troubles.recent,
            differs=self._differs[0],
            differing_ranks=self._differs[1],
        )

    def _ready(self) -> VersionPair | None:
        """The newest version that this node holds and protects in this generation."""
        ready = self.smp.ready_version
        if self.desk is not None and self.generations.is_alone:
            ready = self.smp.committed  # its SMP has nobody to wait for, and commits by itself
        return (ready.generation, ready.step) if ready is not None else None

    def _take_ends(self) -> None:
        ended = self.workers.ended()
        if not ended:
            return
        kills = oom_kills()
        before = self._oom_kills
        new = None if kills is None or before is None else max(0, kills - before)
        self._oom_kills = kills
        exits = [self.workers.explain(handle, oom_kills=new) for handle in ended]
        self._exits += exits
        seen = events.WorkersExited(tuple(exits), self.workers.progress())
        self.journal.write("WorkersExited", **_fields(seen))

    def _do_without(self, command: commands.PartCommand) -> None:
        self._note_part(command)
        match command:
            case commands.RespawnSmp():
                self.smp.start()
                self.caretaker.smp_is_starting = True
            case commands.RespawnZygote():
                if self.zygote is not None:
                    self.zygote.start()
            case commands.GoOnWithout(part="zygote"):
                self.workers.starter.zygote = None
                self.zygote = None
            case commands.GoOnWithout():
                self.caretaker.smp_given_up = command.why
                _log.warning("no more snapshots: %s", command.why)

    def _note_part(self, command: commands.PartCommand) -> None:
        self.journal.write(type(command).__name__, **_fields(command))

    def _own_deaths(self) -> list[events.PartEvent]:
        found: list[events.PartEvent] = []
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

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return  # it has woken us; a stopped worker is seen in /proc
        now_s = clock.now_s()
        is_repeated = number == self._last_signal and now_s - self._last_signal_s < SAME_SIGNAL_S
        self._last_signal, self._last_signal_s = number, now_s
        if is_repeated:
            return
        name = signal_name(number)
        forward = self.spec.profile.stop.forward
        if name in forward or name.removeprefix("SIG") in forward or number == signal.SIGUSR2:
            self.journal.write("forwarded", signal=name)
            self.workers.signal(number)
            return
        self._stop_asked(number, f"{name} to ftrun")

    def _stop_asked(self, number: int, by: str) -> None:
        self._stops += 1
        self._stop_signal = number
        asked = events.StopAsked(number, by, self.workers.progress().attached)
        self.journal.write("StopAsked", **_fields(asked))

    def _catch_signals(self) -> None:
        """Handlers only append; the loop handles."""
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        for number in _WAKING_SIGNALS:
            signal.signal(number, lambda found, _frame: self._signals.append(found))

    def _zygote_child(self) -> Child | None:
        return self.zygote.child if self.zygote is not None else None


def _what_matters(beat: Beat) -> tuple[object, ...]:
    """What the lead has to know at once; the rest can wait for the next heartbeat."""
    return (
        beat.generation,
        beat.state,
        len(beat.exits),
        beat.ready,
        beat.abandoned_step,
        beat.at_boundary,
        beat.stops,
        beat.problem,
        beat.smp_port,
    )


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
