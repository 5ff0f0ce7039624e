"""Builds the report of this node for its heartbeats.

Runs in the main thread.
"""

from typing import TYPE_CHECKING

from ftrun import clock, events
from ftrun.agent.launch.process import oom_kills
from ftrun.agent.observe.devices import RecentDeviceErrors
from ftrun.agent.observe.evidence import PressureReader
from ftrun.agent.publish.versions import held_versions
from ftrun.ids import Version
from ftrun.membership.events import NodeReported
from ftrun.records.run import DeviceError
from ftrun.records.snapshots import OF_NOTICE
from ftrun.wire.cluster.generation import VersionPair
from ftrun.wire.cluster.membership import Heartbeat, HeldVersion
from ftrun.wire.shared_memory.pages import HeartbeatField, most

if TYPE_CHECKING:
    from ftrun.agent.launcher import Run

_VERSIONS_EVERY_S = 1.0


class NodeReporter:
    """Reports the state of one node to the leader."""

    def __init__(self, run: "Run") -> None:
        self.troubles = RecentDeviceErrors(run.generations.fault)
        self._run = run
        self._last = Heartbeat(generation=-1)
        self._exits: list[events.WorkerExit] = []
        self._differs: tuple[str, tuple[int, ...]] = ("", ())
        self._oom_kills = oom_kills()
        self._pressure = PressureReader()
        self._versions: tuple[HeldVersion, ...] = ()
        self._versions_due_s = 0.0

    def begin(self) -> None:
        """Drop the reports of the last generation."""
        self._exits.clear()
        self._differs, self._versions_due_s = ("", ()), 0.0

    def collect_exits(self) -> None:
        workers = self._run.workers
        ended = workers.ended()
        if not ended:
            return
        kills = oom_kills()
        before = self._oom_kills
        new = None if kills is None or before is None else max(0, kills - before)
        self._oom_kills = kills
        exits = workers.explain(ended, oom_kills=new)
        self._exits += exits
        self._run.journal.write(events.WorkersExited(tuple(exits), workers.progress()))

    def collect_notices(self) -> None:
        run = self._run
        new = self.troubles.take(run.rank_observer.troubles, now_s=clock.now_s())
        run.generations.keep_fault(self.troubles.fault)  # before journal and leader receive it
        for text in new:
            run.journal.write(DeviceError(text))
        for notice in run.smp.drain_notices():
            nodes, ranks = tuple(notice.nodes), tuple(notice.ranks)
            run.journal.write(OF_NOTICE[notice.kind](notice.reason, nodes, ranks))
            if notice.kind == "replicas_differ":
                self._differs = (notice.reason, ranks)

    def send(self, *, is_urgent: bool) -> None:
        heartbeat = self._heartbeat(clock.now_s())
        is_urgent |= _what_matters(heartbeat) != _what_matters(self._last)
        self._last = heartbeat
        self._run.control_loop.post(NodeReported(heartbeat, is_urgent))

    def _heartbeat(self, now_s: float) -> Heartbeat:
        run, signals, observer = self._run, self._run.signals, self._run.rank_observer
        workers, smp, generations = run.workers, run.smp, run.generations
        progress = workers.progress()
        # Read seals before `committed()`: a rank seals a version only after the page shows the
        # previous commit. In the other order, an old commit could be paired with a new seal.
        sealed = workers.sealed()
        runs = bool(workers.handles) and generations.is_member
        is_running = any(one.parked is None for one in workers.alive())
        return Heartbeat(
            generation=generations.number if runs else -1,
            state="held" if workers.is_suspended else "running" if is_running else "idle",
            step=progress.step,
            steps_here=progress.steps_here,
            attached=progress.attached,
            exits=tuple(self._exits),
            ready=self._ready(),
            abandoned_step=smp.abandoned_step,
            sealed=sealed,
            committed=workers.committed(),
            at_boundary=workers.awaits_boundary and workers.all_at_boundary(),
            requested_every=workers.requested_every(),
            stops=signals.stops,
            stop_signal=signals.stop_signal,
            leaves=signals.leaves,
            smp_port=smp.port,
            survives=0 if generations.is_alone else smp.survives,
            problem=smp.restore_failed,
            problem_is_link=smp.restore_lost_links,
            unreachable=smp.unreachable,
            unprotected=run.maintenance.smp_given_up
            or workers.unprotected_reason()
            or smp.unprotected_reason,
            ranks=workers.reports(now_s),
            p99_s=observer.p99_s,
            views=observer.views,
            sample=observer.sample,
            troubles=self.troubles.recent,
            fault=self.troubles.fault,
            differs=self._differs[0],
            differing_ranks=self._differs[1],
            repeat_warning=generations.repeats.warning,
            capture_warning=workers.slow_capture(),
            checkpoint=_pair(run.maintenance.checkpoints.newest_order),
            num_writes=smp.num_writes,
            pressure=self._pressure.poll(now_s),
            restart=generations.restart_times(now_s) if runs else None,
            versions=self._held_versions(now_s),
            file_warning=smp.files.warning,
            persisted=smp.persisted,
            persist_step=most(workers.pages, HeartbeatField.PERSIST_STEP),
            stay_problem=workers.stay_problem(),
        )

    def _held_versions(self, now_s: float) -> tuple[HeldVersion, ...]:
        """For status; read once a second, because it reads the headers of all arenas."""
        run = self._run
        if run.rpc is not None and now_s >= self._versions_due_s:
            self._versions_due_s = now_s + _VERSIONS_EVERY_S
            self._versions = held_versions(run.smp.memory, run.generations.number)
        return self._versions

    def _ready(self) -> VersionPair | None:
        """The newest version that this node holds and protects in this generation."""
        run = self._run
        ready = run.smp.ready_version
        if run.rpc is not None and run.generations.is_alone:
            ready = run.smp.committed  # the SMP of a single member commits without the leader
        return _pair(ready)


def _pair(found: Version | None) -> VersionPair | None:
    return (found.generation, found.step) if found is not None else None


def _what_matters(heartbeat: Heartbeat) -> tuple[object, ...]:
    """Fields whose changes the leader needs at once, without waiting for the next heartbeat."""
    return (
        heartbeat.generation,
        heartbeat.state,
        len(heartbeat.exits),
        heartbeat.ready,
        heartbeat.abandoned_step,
        heartbeat.at_boundary,
        heartbeat.stops,
        heartbeat.leaves,
        heartbeat.problem,
        heartbeat.smp_port,
        heartbeat.checkpoint,
        heartbeat.num_writes,
        heartbeat.restart is None,
        heartbeat.persisted,
        heartbeat.persist_step,
    )
