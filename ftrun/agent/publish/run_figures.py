"""Counters of a run: restarts and incidents, time by class, durations of restarts.

Runs in:  agent. `take` and `look` in the main thread (`take` also in threads of hooks); `copy` in
          threads of the metrics server.
Takes in: lines of this node's journal; once per turn of the loop, the lifecycle state of the run.
Gives:    plain counters for /metrics.

All counters begin at 0 in each agent. Prometheus detects such a counter reset.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ftrun import clock
from ftrun.agent.publish.pulse import blocked_s
from ftrun.agent.publish.run_view import RunView
from ftrun.recovery.incidents import Incident
from ftrun.recovery.lifecycle import DETECTION, PRODUCTIVE, LifecycleState, TimeAccounting

DOWNTIME_PARTS = ("total", "detection", "restart", "restore", "first_step")
BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


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

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._figures = RunCounters()
        self._book: TimeAccounting | None = None
        self._began_s: float | None = run.started_s
        """Start of the accounting if this agent leads from the beginning; None after that."""

    def take(self, kind: str, fields: Mapping[str, Any]) -> None:
        with self._lock:
            match kind:
                case "StartGeneration":
                    self._figures.restarts += fields.get("generation", 0) > 0
                case "IncidentClosed":
                    name = str(fields.get("verdict_kind"))
                    self._figures.incidents[name] = self._figures.incidents.get(name, 0) + 1
                case "Downtime":
                    self._add_downtime(fields)
                case "Suspected" if self._book is not None:
                    self._book.move(PRODUCTIVE, DETECTION, float(fields.get("silent_s", 0.0)))
                case "HookFailed":
                    self._figures.hooks_failed += 1
                case _:
                    pass

    def look(self, *, now_s: float) -> None:
        """Account the time since the last turn; only on the leader."""
        brain = self._run.brain
        lead = brain.member.lead
        with self._lock:
            if lead is None:
                self._book = self._began_s = None
                return
            if self._book is None:
                self._book = TimeAccounting(self._began_s or now_s)
            self._began_s = None
            incidents = brain.oversight.incidents
            pages = [place.page for place in self._run.workers.places]
            self._book.turn(
                incidents.life.state.value,
                is_paused=lead.pause.is_on,
                has_stepped=_has_stepped(incidents.life.state, incidents.open),
                blocked_s=blocked_s(pages),
                now_s=now_s,
            )

    def copy(self) -> RunCounters:
        with self._lock:
            known, book = self._figures, self._book
            now_s = clock.now_s()
            return RunCounters(
                restarts=known.restarts,
                hooks_failed=known.hooks_failed,
                incidents=dict(known.incidents),
                recovery={
                    phase: DurationHistogram(list(spread.counts), spread.sum_s)
                    for phase, spread in known.recovery.items()
                },
                seconds=book.counters(now_s) if book is not None else {},
                goodput=book.goodput(now_s) if book is not None else None,
            )

    def _add_downtime(self, fields: Mapping[str, Any]) -> None:
        for phase in DOWNTIME_PARTS:
            if (took_s := fields.get(f"{phase}_s")) is not None:
                self._figures.recovery.setdefault(phase, DurationHistogram()).add(took_s)


def _has_stepped(life: LifecycleState, incident: Incident | None) -> bool:
    return life is LifecycleState.VERIFY and incident is not None and incident.downtime is not None


def cumulated(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative buckets in Prometheus format: (upper bound, count)."""
    found, total = [], 0
    for edge, count in zip([*(str(one) for one in BUCKETS_S), "+Inf"], counts, strict=True):
        total += count
        found.append((edge, float(total)))
    return found
