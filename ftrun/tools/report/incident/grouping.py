"""Which lines of a journal are about the same incident.

Runs in:  cli. Pure.
Takes in: the lines of one run, in the order of time.
Gives:    a `IncidentLines` for each incident, with or without a number of its own.

The lead numbers incidents (`Suspected`, `Verdict`, `Action`, `IncidentClosed`). The lines of a
restart (`WorkersExited` to `Recovered`) are written by every node and carry no number, and older
journals have nothing else.

Rule 1: a restart belongs to the numbered incident that ordered it, or to the one that is told of
        while it is under way.
Rule 2: a failure before anybody has recovered from the last one belongs to that one.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from ftrun.tools.report.facts import RESTARTS
from ftrun.tools.report.journal import JournalLine

_NUMBERED = ("Suspected", "Verdict", "Action", "Also", "Downtime", "IncidentClosed", "Transition")
_FIRED = "FaultFired"
_FIRED_BEFORE_S = 120.0
"""A fault that was ordered, or an agent that was lost, belongs to an incident so soon after."""
_FOLLOWS = ("restore_point", "Generation", "Paused", "smp_restore", "smp_source_set_aside")
_BROKEN = "finished"
GROWTH = "grows from"
UNNUMBERED = 1001


@dataclass(slots=True)
class IncidentLines:
    """One incident's lines."""

    number: int | None = None
    lines: list[JournalLine] = field(default_factory=list)
    is_planned: bool = False
    injected: JournalLine | None = None

    def of(self, *kinds: str) -> list[JournalLine]:
        return [line for line in self.lines if line.kind in kinds]

    def first(self, *kinds: str) -> JournalLine | None:
        return next((line for line in self.lines if line.kind in kinds), None)

    def last(self, *kinds: str) -> JournalLine | None:
        return next((line for line in reversed(self.lines) if line.kind in kinds), None)

    @property
    def has_recovered(self) -> bool:
        return self.first("Recovered") is not None


@dataclass(slots=True)
class _Sorting:
    cases: list[IncidentLines] = field(default_factory=list)
    numbered: dict[int, IncidentLines] = field(default_factory=dict)
    restart: IncidentLines | None = None
    """The one whose restart is under way, or was the last."""
    is_stopping: bool = False
    fired: JournalLine | None = None
    """A fault that was ordered, of which no incident has told yet."""
    adopted: JournalLine | None = None
    """A new agent has taken over memory, and has begun no generation yet."""

    def take(self, line: JournalLine) -> None:
        if line.kind in _NUMBERED and (incident := line.whole("incident")) is not None:
            self._numbered(line, incident)
        elif line.kind in ("StopAsked", "run", "end"):
            self.is_stopping = line.kind == "StopAsked"
            if line.kind != "StopAsked":
                self.restart = None if line.kind == "end" else self.restart
        elif line.kind == _FIRED:
            self.fired = line
        elif line.kind == "adopted":
            self.adopted = line
        elif begins_trouble(line):
            self._trouble(line)
        elif line.kind == "Recovered" and self.restart is not None:
            self.restart.lines.append(line)
        elif line.kind == "RepeatedSteps":
            self._repeated(line)
        elif line.kind in _FOLLOWS and self._is_under_way():
            assert self.restart is not None
            self.restart.lines.append(line)

    def _repeated(self, line: JournalLine) -> None:
        """It belongs to the restart that started its generation, however much later it comes."""
        wanted = line.whole("generation")
        for case in reversed(self.cases):
            if wanted in {one.whole("generation") for one in case.of("StartGeneration")}:
                case.lines.append(line)
                return

    def _is_under_way(self) -> bool:
        return self.restart is not None and not self.restart.has_recovered

    def _trouble(self, line: JournalLine) -> None:
        if self.is_stopping and line.kind != "StartGeneration":
            return
        self.is_stopping = False
        if line.kind == "EndRun" and not self._is_under_way() and not failed(line):
            return
        if not self._is_under_way() and not self._is_late(line):
            self.restart = IncidentLines(is_planned=line.text("why").startswith(GROWTH)
                                or line.text("text").startswith(GROWTH))  # fmt: skip
            self._begin(self.restart, line)
        assert self.restart is not None
        self.restart.lines.append(line)

    def _is_late(self, line: JournalLine) -> bool:
        """Another node tells of a generation that we have heard of already."""
        if self.restart is None or line.kind not in ("StartGeneration", "Ballot"):
            return False
        known = (one.whole("generation") for one in self.restart.of("StartGeneration"))
        return line.whole("generation") in set(known)

    def _numbered(self, line: JournalLine, incident: int) -> None:
        case = self.numbered.get(incident)
        if case is None:
            case = self._case_for(line, incident)
        case.lines.append(line)
        if line.kind == "Action" and line.text("action") in RESTARTS:
            ours = self.restart
            if (
                ours is not None
                and ours is not case
                and ours.number is None
                and (not ours.has_recovered)
            ):
                case.lines += ours.lines
                case.lines.sort(key=lambda one: one.t_s)
                self.cases.remove(ours)
            self.restart = case

    def _begin(self, case: IncidentLines, line: JournalLine) -> None:
        if self.adopted is not None and line.t_s - self.adopted.t_s < _FIRED_BEFORE_S:
            case.lines.append(self.adopted)
        self.adopted = None
        if self.fired is not None and line.t_s - self.fired.t_s < _FIRED_BEFORE_S:
            case.injected = self.fired
        self.fired = None
        self.cases.append(case)

    def _case_for(self, line: JournalLine, incident: int) -> IncidentLines:
        ours = self.restart
        closes = line.kind == "IncidentClosed"
        if ours is not None and ours.number is None and (closes or not ours.has_recovered):
            case = ours
        else:
            case = IncidentLines()
            self._begin(case, line)
        case.number = incident
        self.numbered[incident] = case
        return case


def begins_trouble(line: JournalLine) -> bool:
    """Ranks end, or are about to be ended and started again."""
    match line.kind:
        case "WorkersExited":
            return any(one.get("kind") != _BROKEN for one in line.parts("exits"))
        case "NodeLost":
            return line.fields.get("member") is not False
        case "Ballot" | "StartGeneration":
            return (line.whole("generation") or 0) > 0
        case "LeadLost" | "KillWorkers" | "EndRun":
            return True
        case _:
            return False


def failed(line: JournalLine) -> bool:
    """An `EndRun` by a failure."""
    return (line.whole("exit_code") or 0) != 0


def cases_of(lines: Iterable[JournalLine]) -> list[IncidentLines]:
    """Every incident, in the order of its first line, each with a number.

    Where the lead numbers incidents, one that has none begins with `UNNUMBERED`, so that the next
    one of the lead's does not take its place.
    """
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
