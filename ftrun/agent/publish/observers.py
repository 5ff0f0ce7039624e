"""Observers of a run: progress log, metrics, hooks, OpenTelemetry and `network.json`.

Runs in the main thread; observers that may block have threads of their own, and `RunMetrics.copy`
runs in those of the metrics server. Failures of observers do not affect the run.

All counters begin at 0 in each agent. Prometheus detects such a counter reset.
"""

import ipaddress
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ftrun import __version__, clock
from ftrun.agent.launch.worker_group import WorkerGroup
from ftrun.agent.publish.cluster_status import lateness_of
from ftrun.agent.publish.hooks import END_S, Hooks
from ftrun.agent.publish.status import StatusBuilder
from ftrun.agent.publish.telemetry import Telemetry, interval_s, is_wanted
from ftrun.errors import PeerError
from ftrun.events import Record
from ftrun.journal import NETWORK_NAME, Journal
from ftrun.monitor.page_values import quantile_s
from ftrun.records.incidents import IncidentClosed, SuspicionRaised
from ftrun.records.membership import GenerationChosen, NetworkPlanRecord, PathsProbed
from ftrun.records.recovery import DowntimeRecord, GenerationStartedRecord
from ftrun.records.run import HookFailed, MetricsDisabled, ProgressRecord
from ftrun.recovery.lifecycle import DETECTION, PRODUCTIVE, LifecycleState, TimeAccounting
from ftrun.wire.shared_memory.pages import (
    HeartbeatField,
    blocked_s,
    loss_in,
    most,
    step_counts,
)

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from ftrun.agent.launcher import Run
    from ftrun.agent.publish.metrics import MetricsServer

PROGRESS_EVERY_S = 10.0
_AFTER_WHICH_IT_DIFFERS = (PathsProbed, NetworkPlanRecord, GenerationChosen)
"""Records after which the network may have changed."""

DOWNTIME_PARTS = ("total", "detection", "restart", "restore", "first_step")
BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

_log = logging.getLogger("ftrun")


class Observers:
    """All observers of one agent."""

    def __init__(self, run: "Run") -> None:
        self.status = StatusBuilder(run)
        self._run = run
        self._node_id = run.control_loop.member.me.node_id
        self._progress = ProgressLog(run.journal, run.workers)
        self._metrics = RunMetrics(run)
        self._hooks = Hooks(
            run.spec.profile.hooks, run.journal, facts=self._facts, cwd=run.spec.cwd
        )
        self._network = NetworkFile(run)
        self._server: MetricsServer | None = None
        self._telemetry: Telemetry | None = None
        run.journal.watch(self._metrics.take)
        run.journal.watch(self._hooks.take)
        run.journal.watch(self._network.take)

    def start(self) -> None:
        self._start_telemetry()
        settings = self._run.spec.profile.metrics
        if not settings.port:
            return
        # Imported here, because the library costs memory and some milliseconds, and most runs do
        # not use it.
        from ftrun.agent.publish.metrics import MetricsServer, read_token, text_of

        where = f"{settings.host} port {settings.port}"
        try:
            token = read_token(settings.token_file) if settings.token_file else None
            self._server = MetricsServer(
                settings.host,
                settings.port,
                text=lambda: text_of(self._node_id, self.status.of_node(), self._metrics.copy()),
                token=token,
            )
        except (OSError, ValueError) as error:
            self._run.journal.write(MetricsDisabled(f"{where}: {error}"))
            _log.warning("no metrics are served at %s: %s", where, error)
            return
        self._server.start()
        self.status.metrics_address = self._server.address
        if token is None and not _is_loopback(settings.host):
            _log.warning(
                "any host that reaches %s can read the metrics; set metrics.token_file", where
            )

    def _start_telemetry(self) -> None:
        settings = self._run.spec.profile.otel
        if not is_wanted(settings, os.environ):
            return
        spec = self._run.spec
        self._telemetry = Telemetry(
            settings,
            self._run.journal,
            facts={
                "ftrun.run_id": spec.run_id,
                "ftrun.script": spec.script,
                "ftrun.node": self._node_id,
                "service.version": __version__,
            },
            families=self._families,
            every_s=interval_s(os.environ),
        )
        self._run.journal.watch(self._telemetry.take)

    def _families(self) -> "Iterable[Metric]":
        from ftrun.agent.publish.metrics import families

        return families(self._node_id, self.status.of_node(), self._metrics.copy())

    def poll(self, now_s: float) -> None:
        self.status.poll(now_s)
        self._metrics.poll(now_s=now_s)
        self._progress.poll(self._lateness_s(), now_s=now_s)

    def at_end(self) -> None:
        """Write the last values; called when the ranks have ended and their pages still exist."""
        self._progress.write(self._lateness_s())
        self._network.keep()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        give_up_s = clock.now_s() + END_S
        self._hooks.close(give_up_s)
        if self._telemetry is not None:
            self._telemetry.close(give_up_s)

    def _lateness_s(self) -> Mapping[int, float]:
        """Lateness by rank; in a run on several nodes the control loop publishes it."""
        rpc = self._run.rpc
        if rpc is None:
            return lateness_of(self._run.control_loop)
        try:
            return rpc.control_loop.last().value.lateness_s
        except PeerError:  # no status was built, which must not affect the run
            return {}

    def _facts(self) -> dict[str, object]:
        run = self._run
        return {
            "run_id": run.spec.run_id,
            "script": run.spec.script,
            "node": self._node_id,
            "generation": run.generations.number,
        }


class ProgressLog:
    """Writes the progress of one node every 10 s."""

    def __init__(self, journal: Journal, workers: WorkerGroup) -> None:
        self._journal = journal
        self._workers = workers
        self._due_s: float | None = None

    def poll(self, lateness_s: Mapping[int, float], *, now_s: float) -> None:
        if self._due_s is None:
            self._due_s = now_s + PROGRESS_EVERY_S
        elif now_s >= self._due_s:
            self._due_s = now_s + PROGRESS_EVERY_S
            self.write(lateness_s)

    def write(self, lateness_s: Mapping[int, float]) -> None:
        slots, pages = self._workers.slots, self._workers.pages
        if not slots:
            return
        progress = self._workers.progress()
        counts = step_counts(pages)
        late_s = {rank: round(seconds, 6) for rank, seconds in lateness_s.items()}
        self._journal.write(
            ProgressRecord(
                step=progress.step,
                steps_here=progress.steps_here,
                p50_s=quantile_s(counts, 0.5),
                p99_s=quantile_s(counts, 0.99),
                blocked_s=round(blocked_s(pages), 6),
                taken=most(pages, HeartbeatField.SEALED_COUNT),
                skipped=most(pages, HeartbeatField.SKIPPED_COUNT),
                discarded=most(pages, HeartbeatField.DISCARDED_COUNT),
                committed=self._workers.committed(),
                loss=loss_in(pages),
                ranks=tuple(
                    (int(slot.rank), slot.page.get(HeartbeatField.STEP), late_s.get(slot.rank))
                    for slot in slots
                ),
            )
        )


class NetworkFile:
    """Writes `network.json` for `ftrun network`. A full disk costs the file, never the run."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._path = Path(run.spec.log_folder) / NETWORK_NAME

    def take(self, record: Record) -> None:
        if isinstance(record, _AFTER_WHICH_IT_DIFFERS):
            self.keep()

    def keep(self) -> None:
        """Write the present state; do nothing if this node is not the leader."""
        if self._run.rpc is None:
            return
        try:
            decided = self._run.rpc.control_loop.read().value
        except PeerError:
            return
        network = decided.cluster.network if decided.cluster is not None else None
        if not decided.leads or network is None:
            return
        draft = self._path.with_suffix(".tmp")
        try:
            draft.write_bytes(msgspec.json.encode(network))
            draft.replace(self._path)
        except OSError as error:
            _log.debug("%s is not kept: %s", self._path, error)


@dataclass
class DurationHistogram:
    """Histogram of durations in seconds, over BUCKETS_S and +Inf."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        at = next((i for i, edge in enumerate(BUCKETS_S) if seconds <= edge), len(BUCKETS_S))
        self.counts[at] += 1
        self.sum_s += seconds


@dataclass
class RunCounters:
    """Counters of one agent; `RunMetrics.copy` returns copies for other threads."""

    restarts: int = 0
    hooks_failed: int = 0
    incidents: dict[str, int] = field(default_factory=dict)
    """Number of closed incidents by verdict kind."""
    recovery: dict[str, DurationHistogram] = field(default_factory=dict)
    """Downtime of incidents by phase, including `total`."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by class; empty if this node is not the leader."""
    goodput: float | None = None


class RunMetrics:
    """Collects the counters of one agent."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._lock = threading.Lock()
        self._counters = RunCounters()
        self._book: TimeAccounting | None = None
        self._started_s: float | None = run.started_s
        """Start of the accounting if this agent leads from the beginning; None after that."""

    def take(self, record: Record) -> None:
        with self._lock:
            match record:
                case GenerationStartedRecord():
                    self._counters.restarts += record.generation > 0
                case IncidentClosed(verdict_kind=name):
                    self._counters.incidents[name] = self._counters.incidents.get(name, 0) + 1
                case DowntimeRecord():
                    for phase in DOWNTIME_PARTS:
                        if (took_s := getattr(record, f"{phase}_s")) is not None:
                            known = self._counters.recovery
                            known.setdefault(phase, DurationHistogram()).add(took_s)
                case SuspicionRaised() if self._book is not None:
                    self._book.move(PRODUCTIVE, DETECTION, record.unresponsive_s)
                case HookFailed():
                    self._counters.hooks_failed += 1
                case _:
                    pass

    def poll(self, *, now_s: float) -> None:
        control_loop = self._run.control_loop
        leader = control_loop.member.leader
        with self._lock:
            if leader is None:
                self._book = self._started_s = None
                return
            if self._book is None:
                self._book = TimeAccounting(self._started_s or now_s)
            self._started_s = None
            incidents = control_loop.monitor.incidents
            is_new = incidents.life is LifecycleState.VERIFY and incidents.has_jumped
            life = LifecycleState.RUN if is_new else incidents.life
            pages = self._run.workers.pages
            self._book.turn(
                life.value,
                is_paused=leader.pause.is_on,
                has_stepped=life is LifecycleState.VERIFY and incidents.has_stepped,
                blocked_s=blocked_s(pages),
                now_s=now_s,
            )

    def copy(self) -> RunCounters:
        with self._lock:
            found, book, now_s = deepcopy(self._counters), self._book, clock.now_s()
            if book is not None:
                found.seconds, found.goodput = book.counters(now_s), book.goodput(now_s)
            return found


def cumulated(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative buckets in Prometheus format: (upper bound, count)."""
    found, total = [], 0
    for edge, count in zip([*(str(one) for one in BUCKETS_S), "+Inf"], counts, strict=True):
        total += count
        found.append((edge, float(total)))
    return found


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
