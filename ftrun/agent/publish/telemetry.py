"""OpenTelemetry: one trace for each incident, and the figures of /metrics, sent by OTLP.

Runs in:  agent, a thread of its own; `take` runs in any thread that writes the journal.
Takes in: journal records of the leader; the published status.
Gives:    exports through `ftrun.agent.publish.otlp`, the only module that imports opentelemetry.
Survives: a collector that is unreachable, slow or wrong, and a missing library. Each is a
          `hook_failed` line and a warning, and the run continues.

Rule 1: the thread alone imports the library and waits for the collector. The queue is bounded.
Rule 2: phases of one incident follow each other without a gap from the fault to the next step.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Protocol

from ftrun import clock
from ftrun.config.profile import OtelConfig
from ftrun.events import Record
from ftrun.journal import Journal
from ftrun.records.incidents import (
    IncidentClosed,
    IncidentNote,
    LifecycleChanged,
    SuspicionRaised,
    VerdictRecord,
)
from ftrun.records.membership import BallotStarted
from ftrun.records.recovery import DowntimeRecord
from ftrun.records.run import HookFailed

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
             "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")  # fmt: skip
INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
INTERVAL_S = 60.0
"""OpenTelemetry's default of that variable."""
MAX_WAITING = 16
MISSING = "opentelemetry is not installed: pip install 'ftrun[otel]'"

_AFTER_A_BALLOT = ("recover", "verify", "check")
"""States of `ftrun.recovery.lifecycle` that follow a ballot."""
_ATTRIBUTES = (
    "verdict_kind", "text", "culprits", "nodes", "error_class", "action", "actions", "steps_lost",
    "restored", "generations", "recovered_s",
)  # fmt: skip

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_log = logging.getLogger("ftrun")


@dataclass(frozen=True, slots=True)
class IncidentSpan:
    """One phase, in seconds on the monotonic clock of the leader's node."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class IncidentTrace:
    """The whole incident, and its phases in order."""

    incident: IncidentSpan
    phases: tuple[IncidentSpan, ...]
    attributes: Mapping[str, object]


@dataclass(slots=True)
class _Round:
    """One fault of an incident, up to the next step of every rank."""

    marks: list[tuple[str, float]] = field(default_factory=list)
    """The phase that began, and when."""
    end: DowntimeRecord | None = None


class IncidentTracer:
    """Collects the phases of the open incident from the records of the leader."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._rounds: list[_Round] = []
        self._ballot_s: float | None = None
        """When the first ballot since the last start of ranks began."""

    def take(self, record: Record, *, now_s: float) -> IncidentTrace | None:
        """Returns the trace of an incident that this record closes."""
        if isinstance(record, BallotStarted):
            self._ballot_s = now_s if self._ballot_s is None else self._ballot_s
            return None
        if not isinstance(record, IncidentNote | LifecycleChanged | DowntimeRecord):
            return None
        ballot_s = self._ballot_s
        if isinstance(record, LifecycleChanged) and record.new in _AFTER_A_BALLOT:
            self._ballot_s = None
        if record.incident is None:
            return None
        if record.incident != self._number:
            self._number, self._rounds = record.incident, [_Round()]
        if isinstance(record, IncidentClosed):
            return self._trace(record, now_s)
        self._mark(record, now_s if ballot_s is None else ballot_s, now_s=now_s)
        return None

    def _mark(self, record: Record, ballot_s: float, *, now_s: float) -> None:
        """Adds the phase that this record begins, if it begins one."""
        marks = self._rounds[-1].marks
        match record:
            case DowntimeRecord():
                self._rounds[-1].end = record
                self._rounds.append(_Round())
            case LifecycleChanged(new="recover"):
                # After the loss of a node the verdict is written when the ballot has succeeded.
                marks[:] = [(name, min(at_s, ballot_s)) for name, at_s in marks]
                marks.append(("stop", ballot_s))
            case LifecycleChanged(new="verify"):
                marks.append(("respawn", now_s))
            case SuspicionRaised() | VerdictRecord() if not marks:
                marks.append(("diagnose", now_s))
            case _:
                pass

    def _trace(self, closed: IncidentClosed, now_s: float) -> IncidentTrace:
        start_s = now_s - closed.open_s
        phases: list[IncidentSpan] = []
        restore_s = first_step_s = 0.0  # of earlier rounds, which the records contain
        for number, one in enumerate(self._rounds):
            if not one.marks and one.end is None:
                continue
            fault_s = one.end.fault_s if one.end is not None else None
            if fault_s is None:
                fault_s = start_s if number == 0 or not one.marks else one.marks[0][1]
            marks = [("detect", fault_s), *one.marks]
            end_s = now_s
            if one.end is not None:
                end_s = one.end.stepped_s or now_s
                first_s = end_s - ((one.end.first_step_s or 0.0) - first_step_s)
                begin_s = first_s - ((one.end.restore_s or 0.0) - restore_s)
                marks += [("restore", begin_s), ("first step", first_s)]
                restore_s, first_step_s = one.end.restore_s or 0.0, one.end.first_step_s or 0.0
            phases += _adjacent(marks, end_s)
        found = {f"ftrun.{name}": getattr(closed, name) for name in _ATTRIBUTES}
        start_s = min([start_s, *(phase.start_s for phase in phases)])  # open_s is rounded
        whole = IncidentSpan(f"incident {closed.verdict_kind}", start_s, now_s)
        self._number, self._rounds = None, []
        return IncidentTrace(whole, tuple(phases), {"ftrun.incident": closed.incident, **found})


def _adjacent(marks: list[tuple[str, float]], end_s: float) -> list[IncidentSpan]:
    """Phases that begin at the marks; each ends where the next one begins: rule 2."""
    starts, latest_s = [], -math.inf
    for _, at_s in marks:
        latest_s = max(latest_s, min(at_s, end_s))
        starts.append(latest_s)
    ends = [*starts[1:], end_s]
    spans = zip(marks, starts, ends, strict=True)
    return [IncidentSpan(name, *times) for (name, _), *times in spans]


# --- export -----------------------------------------------------------------------------------


class Exporter(Protocol):
    """What `ftrun.agent.publish.otlp` gives. Both return the reason of a failure, or nothing."""

    def send_trace(self, trace: IncidentTrace, *, wall_minus_s: float) -> str: ...

    def send_metrics(self, families: "Iterable[Metric]") -> str: ...


OpenExporter = Callable[[str | None, Mapping[str, str]], Exporter]


def is_wanted(settings: OtelConfig, variables: Mapping[str, str]) -> bool:
    if variables.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return bool(settings.endpoint) or any(variables.get(name) for name in ENDPOINTS)


def interval_s(variables: Mapping[str, str]) -> float:
    """Seconds between two exports of metrics: at least 1."""
    try:
        return max(1.0, float(variables.get(INTERVAL, "")) / 1000)
    except ValueError:
        return INTERVAL_S


def open_otlp(endpoint: str | None, facts: Mapping[str, str]) -> Exporter:
    """Imported here: it costs 0.3 s and memory, and the library is an extra."""
    from ftrun.agent.publish.otlp import OtlpExporter

    return OtlpExporter(endpoint, facts)


class Telemetry:
    """Sends traces and metrics of one agent in a thread of its own."""

    def __init__(
        self,
        settings: OtelConfig,
        journal: Journal,
        *,
        facts: Mapping[str, str],
        families: "Callable[[], Iterable[Metric]]",
        every_s: float = INTERVAL_S,
        open_exporter: OpenExporter = open_otlp,
    ) -> None:
        self._endpoint = settings.endpoint
        self._journal = journal
        self._facts = facts
        self._families = families
        self._every_s = every_s
        self._open = open_exporter
        self._tracer = IncidentTracer()
        self._lock = threading.Lock()
        self._are_metrics_sent = True
        self._waiting: Queue[tuple[IncidentTrace, float] | None] = Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="ftrun-otel", daemon=True)
        self._thread.start()

    def take(self, record: Record) -> None:
        """Queues the trace of an incident that this record closes; never blocks."""
        now_s = clock.now_s()
        with self._lock:
            trace = self._tracer.take(record, now_s=now_s)
        if trace is None:
            return
        try:
            self._waiting.put_nowait((trace, clock.wall_s() - now_s))
        except Full:
            reason = f"the queue is full: {MAX_WAITING} traces are waiting"
            self._failed(reason, "trace", trace.attributes["ftrun.incident"])

    def close(self, give_up_s: float) -> None:
        """Sends what is left, until this monotonic time."""
        with suppress(Full):
            self._waiting.put(None, timeout=max(0.0, give_up_s - clock.now_s()))
        self._thread.join(max(0.0, give_up_s - clock.now_s()))

    def _run(self) -> None:
        try:
            exporter = self._open(self._endpoint, self._facts)
        except ImportError:
            self._failed(MISSING, "start")
            return self._discard()
        except Exception as error:  # noqa: BLE001 - nothing that the library does ends a run
            self._failed(f"{type(error).__name__}: {error}", "start")
            return self._discard()
        due_s = clock.now_s() + self._every_s
        while True:
            try:
                item = self._waiting.get(timeout=max(0.0, due_s - clock.now_s()))
            except Empty:
                due_s = clock.now_s() + self._every_s
                self._send_metrics(exporter)
                continue
            if item is None:
                return self._send_metrics(exporter)
            self._send_trace(exporter, *item)

    def _discard(self) -> None:
        """Empties the queue until the end, so that one failure is reported once."""
        while self._waiting.get() is not None:
            pass

    def _send_trace(self, exporter: Exporter, trace: IncidentTrace, wall_minus_s: float) -> None:
        try:
            reason = exporter.send_trace(trace, wall_minus_s=wall_minus_s)
        except Exception as error:  # noqa: BLE001 - the same
            reason = f"{type(error).__name__}: {error}"
        if reason:
            self._failed(reason, "trace", trace.attributes["ftrun.incident"])

    def _send_metrics(self, exporter: Exporter) -> None:
        """Reports only the first failure in a row."""
        try:
            reason = exporter.send_metrics(self._families())
        except Exception as error:  # noqa: BLE001 - the same
            reason = f"{type(error).__name__}: {error}"
        if reason and self._are_metrics_sent:
            self._failed(reason, "metrics")
        self._are_metrics_sent = not reason

    def _failed(self, reason: str, event: str, incident: object = None) -> None:
        number = incident if isinstance(incident, int) else None
        self._journal.write(HookFailed("otel", number, event, reason))
        _log.warning("OpenTelemetry (%s) failed: %s", event, reason)
