"""Which lines of a journal are about the same incident.

The leader numbers incidents. The lines of a restart (`workers_exited` to `recovered`) are written
by every node and carry no number; if the leader was lost too, there are no others.

Rule 1: a restart belongs to the numbered incident that ordered it, or to the one that is reported
        during it.
Rule 2: a failure before any node has recovered from the last one belongs to that one.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from ftrun.events import ExitKind, Record, StopRequested, WorkersExited
from ftrun.records.decode import JournalLine, of_kinds
from ftrun.records.faults import FaultInjected
from ftrun.records.incidents import (
    ActionTaken,
    AdditionalFinding,
    IncidentClosed,
    LifecycleChanged,
    SuspicionRaised,
    VerdictRecord,
)
from ftrun.records.membership import (
    BallotStarted,
    GenerationChosen,
    LeaderLost,
    NodeLost,
    RanksStayed,
    RunPaused,
)
from ftrun.records.recovery import (
    DowntimeRecord,
    EndRun,
    GenerationStartedRecord,
    KillWorkers,
    RanksParked,
    Recovered,
    RepeatedStepsRecord,
    RestorePointChosen,
)
from ftrun.records.run import RunEndedRecord, RunStarted
from ftrun.records.snapshots import MemoryAdopted, SmpRestoreSource, SmpSourceRejected
from ftrun.tools.report.facts import RESTARTS
from ftrun.tools.report.journal import Line

R = TypeVar("R", bound=Record)

_NUMBERED = (
    SuspicionRaised, VerdictRecord, ActionTaken, AdditionalFinding, DowntimeRecord, IncidentClosed,
    LifecycleChanged,
)  # fmt: skip
_BEFORE_S = 120.0
"""Seconds; a fault that was ordered, or an adopted memory, belongs to an incident that follows
within this time."""
_FOLLOWS = (
    RestorePointChosen, GenerationChosen, RanksParked, RanksStayed, RunPaused, SmpRestoreSource,
    SmpSourceRejected,
)  # fmt: skip
PLANNED = ("draining ", "grows from ")
UNNUMBERED = 1001


@dataclass(slots=True)
class IncidentLines:
    """One incident's lines."""

    number: int | None = None
    lines: list[Line] = field(default_factory=list)
    is_planned: bool = False
    injected: JournalLine[FaultInjected] | None = None

    def of(self, *kinds: type[R]) -> list[JournalLine[R]]:
        return of_kinds(self.lines, *kinds)

    def first(self, *kinds: type[R]) -> JournalLine[R] | None:
        return next(iter(self.of(*kinds)), None)

    def last(self, *kinds: type[R]) -> JournalLine[R] | None:
        return next(reversed(self.of(*kinds)), None)

    @property
    def generations(self) -> set[int]:
        """Generations that were started because of it."""
        return {one.record.generation for one in self.of(GenerationStartedRecord)}

    @property
    def has_recovered(self) -> bool:
        return self.first(Recovered) is not None


@dataclass(slots=True)
class _Sorting:
    cases: list[IncidentLines] = field(default_factory=list)
    numbered: dict[int, IncidentLines] = field(default_factory=dict)
    restart: IncidentLines | None = None
    """The one whose restart is under way, or was the last."""
    is_stopping: bool = False
    fired: JournalLine[FaultInjected] | None = None
    """A fault that was ordered, and that no incident follows yet."""
    adopted: Line | None = None
    """A new agent has taken over memory, and has begun no generation yet."""

    def take(self, line: Line) -> None:
        record = line.record
        if isinstance(record, _NUMBERED) and record.incident is not None:
            self._numbered(line, record.incident)
        elif isinstance(record, StopRequested | RunStarted | RunEndedRecord):
            self.is_stopping = isinstance(record, StopRequested)
            self.restart = None if isinstance(record, RunEndedRecord) else self.restart
        elif isinstance(record, FaultInjected):
            self.fired = JournalLine(line.t_s, line.node, line.monotonic_s, record)
        elif isinstance(record, MemoryAdopted):
            self.adopted = line
        elif starts_incident(record):
            self._trouble(line)
        elif isinstance(record, Recovered) and self.restart is not None:
            self.restart.lines.append(line)
        elif isinstance(record, RepeatedStepsRecord):
            self._repeated(line, record.generation)
        elif isinstance(record, _FOLLOWS) and self._is_under_way():
            assert self.restart is not None
            self.restart.lines.append(line)

    def _repeated(self, line: Line, generation: int) -> None:
        """It belongs to the restart that started its generation, however much later it comes."""
        for case in reversed(self.cases):
            if generation in case.generations:
                case.lines.append(line)
                return

    def _is_under_way(self) -> bool:
        return self.restart is not None and not self.restart.has_recovered

    def _trouble(self, line: Line) -> None:
        record = line.record
        if self.is_stopping and not isinstance(record, GenerationStartedRecord):
            return
        self.is_stopping = False
        if isinstance(record, EndRun) and not self._is_under_way() and not record.exit_code:
            return
        if not self._is_under_way() and not self._is_late(line):
            self.restart = IncidentLines(is_planned=words_of(record).startswith(PLANNED))
            self._begin(self.restart, line)
        assert self.restart is not None
        self.restart.lines.append(line)

    def _is_late(self, line: Line) -> bool:
        """Another node reports a generation that is known already."""
        return (
            self.restart is not None
            and isinstance(line.record, GenerationStartedRecord | BallotStarted)
            and line.record.generation in self.restart.generations
        )

    def _numbered(self, line: Line, incident: int) -> None:
        case = self.numbered.get(incident)
        if case is None:
            case = self._case_for(line, incident)
        case.lines.append(line)
        if isinstance(line.record, ActionTaken) and line.record.action in RESTARTS:
            ours = self.restart
            is_open = ours is not None and ours.number is None and not ours.has_recovered
            if ours is not None and ours is not case and is_open:
                case.lines += ours.lines
                case.lines.sort(key=lambda one: one.t_s)
                self.cases.remove(ours)
            self.restart = case

    def _begin(self, case: IncidentLines, line: Line) -> None:
        if self.adopted is not None and line.t_s - self.adopted.t_s < _BEFORE_S:
            case.lines.append(self.adopted)
        self.adopted = None
        if self.fired is not None and line.t_s - self.fired.t_s < _BEFORE_S:
            case.injected = self.fired
        self.fired = None
        self.cases.append(case)

    def _case_for(self, line: Line, incident: int) -> IncidentLines:
        ours = self.restart
        closes = isinstance(line.record, IncidentClosed)
        if ours is not None and ours.number is None and (closes or not ours.has_recovered):
            case = ours
        else:
            case = IncidentLines()
            self._begin(case, line)
        case.number = incident
        self.numbered[incident] = case
        return case


def words_of(record: Record) -> str:
    return getattr(record, "reason", "") or getattr(record, "text", "")


def starts_incident(record: Record) -> bool:
    """Whether ranks end, or are about to be ended and restarted."""
    match record:
        case WorkersExited(exits=exits):
            return any(one.kind is not ExitKind.FINISHED for one in exits)
        case NodeLost():
            return record.was_member
        case BallotStarted() | GenerationStartedRecord():
            return record.generation > 0
        case _:
            return isinstance(record, LeaderLost | KillWorkers | EndRun)


def cases_of(lines: Iterable[Line]) -> list[IncidentLines]:
    """All incidents in the order of their first lines; those without a number get the next ones."""
    sorting = _Sorting()
    for line in lines:
        sorting.take(line)
    cases = sorted((one for one in sorting.cases if one.lines), key=lambda one: one.lines[0].t_s)
    taken = {case.number for case in cases}
    is_old = taken <= {None}
    free = itertools.count(1 if is_old else UNNUMBERED)
    for case in cases:
        if case.number is None:
            case.number = next(free)
    return cases
