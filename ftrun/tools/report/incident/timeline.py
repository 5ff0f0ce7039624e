"""When what happened in one incident: the moments, and the bars between them.

Every time is one that the journal holds. A phase without a line has no bar.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ftrun.cli.screen.text import clean, size, with_commas
from ftrun.events import WorkersExited
from ftrun.records.decode import JournalLine
from ftrun.records.incidents import ActionTaken, IncidentClosed, SuspicionRaised, VerdictRecord
from ftrun.records.membership import LeaderLost, NodeLost, RunPaused
from ftrun.records.recovery import (
    DowntimeRecord,
    EndRun,
    GenerationStartedRecord,
    KillWorkers,
    Recovered,
)
from ftrun.records.snapshots import MemoryAdopted, SmpRestoreSource
from ftrun.tools.report.facts import RESTARTS, TimelineBar
from ftrun.tools.report.incident.grouping import IncidentLines
from ftrun.tools.report.journal import first_step_at

_UNRESPONSIVE = re.compile(r"no heartbeat for ([\d.]+) s")
_FETCHED = re.compile(r"fetched (\d+) bytes in ([\d.]+) s")
_MAX_DETECT_S = 86_400.0

PHASES = {
    "device_memory": ("wait for device memory", "starting"),
    "fork": ("start the processes", "starting"),
    "device": ("imports and device", "starting"),
    "rendezvous": ("meet (process group)", "starting"),
    "build": ("the script's own set-up", "starting"),
    "restore": ("restore", "restoring"),
    "first_step": ("first step", "training"),
}
"""Names and styles of the phases after the decision; a record has them in their order."""


@dataclass(frozen=True, slots=True)
class IncidentTimes:
    """Points of time of one incident, as wall times; None: not known, or it did not happen."""

    start: float
    """The fault's first sign."""
    suspected: float | None
    judged: float | None
    """The last verdict before something was done."""
    noticed: float
    """Known to be a failure."""
    acted: float | None
    """Ranks are ended."""
    slowest: JournalLine[Recovered] | None
    """The line of the node that was last."""
    recovered: float | None
    """Every rank has made its first step."""
    ended: float
    """The last that is known."""


def moments_of(case: IncidentLines) -> IncidentTimes:
    first = case.lines[0].t_s
    down = case.of(DowntimeRecord)
    acts = [one.t_s for one in case.of(ActionTaken) if one.record.action in RESTARTS]
    kills = [one.t_s for one in case.of(KillWorkers)]
    acted = min((*acts[:1], *kills[:1]), default=None)
    suspected = case.first(SuspicionRaised)
    judged = _judged(case, acted)
    exits = case.first(WorkersExited, NodeLost, LeaderLost)
    reported = [one.t_s for one in (suspected, judged) if one is not None]
    seen = exits.t_s if exits is not None and (acted is None or exits.t_s <= acted) else None
    noticed = min((one for one in (seen, judged.t_s if judged else None) if one is not None),
                  default=min(reported, default=first))  # fmt: skip
    start = min([first, noticed, *_first_signs(case, suspected, judged)])
    slowest, recovered = _slowest(case.of(Recovered))
    read = slowest.at(slowest.record.noticed_s) if slowest is not None else None
    if read is not None and read < noticed < read + 1.0:
        # The clock was read a moment before the line was written.
        noticed, start = read, min(start, read)
    if down and down[-1].at(down[-1].record.fault_s) is not None:
        start = first_fault = down[0].at(down[0].record.fault_s) or start
        noticed = first_fault + (down[-1].record.detection_s or 0.0)
        recovered = down[-1].at(down[-1].record.stepped_s) or recovered
    else:
        recovered = recovered or _by_closing(case)
    return IncidentTimes(
        start=max(start, noticed - _MAX_DETECT_S),
        suspected=None if suspected is None else suspected.t_s,
        judged=None if judged is None else judged.t_s,
        noticed=noticed,
        acted=acted,
        slowest=slowest,
        recovered=recovered,
        ended=max(case.lines[-1].t_s, recovered or 0.0),
    )


def _by_closing(case: IncidentLines) -> float | None:
    """When training continued, if the line of its first step is missing."""
    closed, verdict = case.first(IncidentClosed), case.first(VerdictRecord)
    took_s = closed.record.recovered_s if closed is not None else None
    return None if took_s is None or verdict is None else verdict.t_s + took_s


def _judged(case: IncidentLines, acted: float | None) -> JournalLine[VerdictRecord] | None:
    verdicts = case.of(VerdictRecord)
    before = [one for one in verdicts if acted is None or one.t_s <= acted + 1e-3]
    return before[-1] if before else next(iter(verdicts), None)


def _first_signs(
    case: IncidentLines,
    suspected: JournalLine[SuspicionRaised] | None,
    judged: JournalLine[VerdictRecord] | None,
) -> Iterable[float]:
    """Times at which the fault showed first, by what was reported later."""
    closed, verdict = case.first(IncidentClosed), case.first(VerdictRecord)
    if closed is not None and verdict is not None and closed.record.detected_s is not None:
        yield verdict.t_s - closed.record.detected_s
    if suspected is not None:
        yield suspected.t_s - suspected.record.unresponsive_s
    for line in case.of(NodeLost):
        if found := _UNRESPONSIVE.search(line.record.text):
            yield line.t_s - float(found[1])
    if judged is not None and suspected is None:
        culprits = judged.record.verdict.culprits
        yield from (judged.t_s - one.unresponsive_s for one in judged.record.ranks
                    if one.rank in culprits)  # fmt: skip


def _slowest(
    recovered: Sequence[JournalLine[Recovered]],
) -> tuple[JournalLine[Recovered] | None, float | None]:
    found = [(at if (at := first_step_at(line)) is not None else line.t_s, line)
             for line in recovered]  # fmt: skip
    if not found:
        return None, None
    done, line = max(found, key=lambda one: one[0])
    return line, done


def bars_of(case: IncidentLines, moments: IncidentTimes) -> list[TimelineBar]:
    """The timeline, from the first sign; its zero is `moments.start`."""
    zero = moments.start
    found: list[TimelineBar] = []

    def add(name: str, begin: float | None, end: float | None, style: str, note: str = "") -> None:
        if begin is not None and end is not None and end >= begin:
            found.append(TimelineBar(name, begin - zero, end - zero, style, note))

    suspected = moments.suspected
    add("detect", zero, suspected if suspected is not None else moments.noticed, "hung",
        _how_noticed(case))  # fmt: skip
    if suspected is not None and moments.judged is not None:
        add("diagnose", suspected, moments.judged, "hung", "stacks and collectives are read")
    if moments.acted is not None and moments.judged is not None:
        slowest = moments.slowest
        stopping = slowest.at(slowest.record.noticed_s) if slowest is not None else None
        end = moments.acted if stopping is None else min(moments.acted, stopping)
        add("decide to act", moments.judged, end, "hung", _action_reason(case))
    if (paused := case.first(RunPaused)) is not None:
        start = next((one for one in case.of(GenerationStartedRecord, EndRun)
                      if one.t_s > paused.t_s), None)  # fmt: skip
        add("PAUSED", paused.t_s, start.t_s if start else moments.ended, "waiting", "too few nodes")
    if moments.slowest is None:
        if moments.acted is not None and moments.recovered is None:
            add("not recovered", moments.acted, moments.ended, "dead")
        return found
    _restart(case, moments.slowest, moments, add)
    for line in case.of(SmpRestoreSource):
        if seen := _FETCHED.search(line.record.reason):
            num_bytes, took_s = int(seen[1][:15]), float(seen[2])
            rate = f", {size(num_bytes / took_s)}/s" if took_s > 0 else ""
            sources = ", ".join(line.record.nodes)
            note = f"{size(num_bytes)}{rate}{f', from {sources}' if sources else ''}"
            add(f"fetch on {line.node}" if line.node else "fetch", line.t_s - took_s, line.t_s,
                "restoring", note)  # fmt: skip
    return sorted(found, key=lambda bar: bar.begin_s)


def _restart(
    case: IncidentLines,
    line: JournalLine[Recovered],
    moments: IncidentTimes,
    add: Callable[..., None],
) -> None:
    where = f"slowest on {line.node}" if line.node else ""
    record = line.record
    is_new_agent = case.first(MemoryAdopted) is not None
    noticed, stopped = line.at(record.noticed_s), line.at(record.stopped_s)
    decided = line.at(record.decided_s)
    if noticed is not None and moments.noticed < noticed - 0.5 and moments.judged is None:
        add("another agent starts" if is_new_agent else "an attempt that failed", moments.noticed,
            noticed, "dead")  # fmt: skip
    add("stop the ranks", noticed, stopped, "dead", "SIGKILL, and each end is waited for")
    restored = with_commas(str(record.restored or ""))
    add("agree, choose what to restore", stopped, decided, "dead", restored)
    at = decided
    for key, took_s in (record.phases_s or {}).items():
        if at is None or key not in PHASES:
            continue
        name, style = PHASES[key]
        add(name, at, at + max(took_s, 0.0), style, where)
        at += max(took_s, 0.0)
        where = ""


def _how_noticed(case: IncidentLines) -> str:
    if case.first(SuspicionRaised) is not None:
        return "no step within the limit"
    first = case.first(WorkersExited, NodeLost, LeaderLost, VerdictRecord)
    match first.record if first is not None else None:
        case NodeLost(text=text) if "no heartbeat" in text:
            return "no heartbeat of the node"
        case WorkersExited():
            return "the kernel reports at once when a process ends"
        case NodeLost() | LeaderLost():
            return "the connection was closed or refused"
        case _:
            return ""


def _action_reason(case: IncidentLines) -> str:
    actions = [one.record for one in case.of(ActionTaken) if one.record.action in RESTARTS]
    reported = clean(actions[0].text, 120) if actions else ""
    verdict = case.last(VerdictRecord)
    is_reported = verdict is not None and verdict.record.text[:40] in reported
    return "" if is_reported else reported
