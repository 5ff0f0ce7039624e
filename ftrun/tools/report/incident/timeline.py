"""When what happened in one incident: the moments, and the bars between them.

Runs in:  cli. Pure.
Takes in: the lines of one incident.
Gives:    `IncidentTimes`, and the bars of its timeline.

Every time is one that the journal holds. A phase that no line tells of has no bar.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ftrun.cli.screen.text import number, numbers, size, whole, with_commas
from ftrun.tools.report.facts import RESTARTS, TimelineBar
from ftrun.tools.report.incident.grouping import IncidentLines
from ftrun.tools.report.journal import JournalLine, first_step_at

_SILENT = re.compile(r"silent for ([\d.]+) s")
_FETCHED = re.compile(r"fetched (\d+) bytes in ([\d.]+) s")
_MAX_DETECT_S = 86_400.0

PHASES = (
    ("fork", "start the processes", "starting"),
    ("rendezvous", "meet (process group)", "starting"),
    ("build", "the script's own set-up", "starting"),
    ("restore", "restore", "restoring"),
    ("first_step", "first step", "training"),
)


@dataclass(frozen=True, slots=True)
class IncidentTimes:
    """Points of time of one incident, as wall times; None: not known, or it did not happen."""

    began: float
    """The fault's first sign."""
    suspected: float | None
    judged: float | None
    """The last verdict before something was done."""
    noticed: float
    """Known to be a failure."""
    acted: float | None
    """Ranks are ended."""
    slowest: JournalLine | None
    """The `Recovered` line of the node that was last."""
    recovered: float | None
    """Every rank has made its first step."""
    ended: float
    """The last that is known."""


def moments_of(case: IncidentLines) -> IncidentTimes:
    first = case.lines[0].t_s
    down = case.last("Downtime")
    acts = [one for one in case.of("Action") if one.text("action") in RESTARTS]
    kill = case.first("KillWorkers")
    acted = min((one.t_s for one in (*acts[:1], *((kill,) if kill else ()))), default=None)
    suspected = case.first("Suspected")
    judged = _judged(case, acted)
    exits = case.first("WorkersExited", "NodeLost", "LeadLost")
    told = [one.t_s for one in (suspected, judged) if one is not None]
    seen = exits.t_s if exits is not None and (acted is None or exits.t_s <= acted) else None
    noticed = min((one for one in (seen, judged.t_s if judged else None) if one is not None),
                  default=min(told, default=first))  # fmt: skip
    began = min([first, noticed, *_first_signs(case, suspected, judged)])
    slowest, recovered = _slowest(case.of("Recovered"))
    read = slowest.at_mono("noticed_s") if slowest is not None else None
    if read is not None and read < noticed < read + 1.0:
        # The clock was read a moment before the line was written.
        noticed, began = read, min(began, read)
    if down is not None and down.at_mono("fault_s") is not None:
        began = first_fault = case.of("Downtime")[0].at_mono("fault_s") or began
        noticed = first_fault + (down.number("detection_s") or 0.0)
        recovered = down.at_mono("stepped_s") or recovered
    else:
        recovered = recovered or _by_closing(case)
    return IncidentTimes(
        began=max(began, noticed - _MAX_DETECT_S),
        suspected=None if suspected is None else suspected.t_s,
        judged=None if judged is None else judged.t_s,
        noticed=noticed,
        acted=acted,
        slowest=slowest,
        recovered=recovered,
        ended=max(case.lines[-1].t_s, recovered or 0.0),
    )


def _by_closing(case: IncidentLines) -> float | None:
    """When training went on, by a journal that has no line for it."""
    closed, verdict = case.first("IncidentClosed"), case.first("Verdict")
    took_s = closed.number("recovered_s") if closed is not None else None
    return None if took_s is None or verdict is None else verdict.t_s + took_s


def _judged(case: IncidentLines, acted: float | None) -> JournalLine | None:
    verdicts = case.of("Verdict")
    before = [one for one in verdicts if acted is None or one.t_s <= acted + 1e-3]
    return before[-1] if before else next(iter(verdicts), None)


def _first_signs(
    case: IncidentLines, suspected: JournalLine | None, judged: JournalLine | None
) -> Iterable[float]:
    """Times at which the fault showed first, by what was told later."""
    closed = case.first("IncidentClosed")
    verdict = case.first("Verdict")
    if closed is not None and verdict is not None and closed.number("detected_s") is not None:
        yield verdict.t_s - (closed.number("detected_s") or 0.0)
    if suspected is not None:
        yield suspected.t_s - (suspected.number("silent_s") or 0.0)
    for line in case.of("NodeLost"):
        if found := _SILENT.search(line.text("text")):
            yield line.t_s - (number(float(found[1])) or 0.0)
    if judged is not None and suspected is None:
        culprits = numbers(judged.part("verdict").get("culprits"))
        silent = (number(one.get("silent_s")) for one in judged.parts("ranks")
                  if whole(one.get("rank")) in culprits)  # fmt: skip
        yield from (judged.t_s - one for one in silent if one is not None)


def _slowest(recovered: list[JournalLine]) -> tuple[JournalLine | None, float | None]:
    """The `Recovered` line of the node whose first step was last, and when that was."""
    found: tuple[JournalLine | None, float | None] = (None, None)
    for line in recovered:
        at = first_step_at(line)
        done = line.t_s if at is None else at
        if found[1] is None or done > found[1]:
            found = (line, done)
    return found


def bars_of(case: IncidentLines, moments: IncidentTimes) -> list[TimelineBar]:
    """The timeline, from the first sign; its zero is `moments.began`."""
    zero = moments.began
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
        stopping = moments.slowest.at_mono("noticed_s") if moments.slowest is not None else None
        end = moments.acted if stopping is None else min(moments.acted, stopping)
        add("decide to act", moments.judged, end, "hung", _why_acted(case))
    if (paused := case.first("Paused")) is not None:
        start = next((one for one in case.of("StartGeneration", "EndRun")
                      if one.t_s > paused.t_s), None)  # fmt: skip
        add("PAUSED", paused.t_s, start.t_s if start else moments.ended, "waiting", "too few nodes")
    if moments.slowest is None:
        if moments.acted is not None and moments.recovered is None:
            add("not recovered", moments.acted, moments.ended, "dead")
        return found
    _restart(case, moments.slowest, moments, add)
    for line in case.of("smp_restore"):
        if seen := _FETCHED.search(line.text("why")):
            num_bytes, took_s = int(seen[1][:15]), number(float(seen[2])) or 0.0
            rate = f", {size(num_bytes / took_s)}/s" if took_s > 0 else ""
            sources = line.fields.get("nodes")
            whom = ", ".join(str(one) for one in sources) if isinstance(sources, list) else ""
            note = f"{size(num_bytes)}{rate}{f', from {whom}' if whom else ''}"
            add(f"fetch on {line.node}" if line.node else "fetch", line.t_s - took_s, line.t_s,
                "restoring", note)  # fmt: skip
    return sorted(found, key=lambda bar: bar.begin_s)


def _restart(
    case: IncidentLines, line: JournalLine, moments: IncidentTimes, add: Callable[..., None]
) -> None:
    where = f"slowest on {line.node}" if line.node else ""
    is_new_agent = case.first("adopted") is not None
    noticed, stopped = line.at_mono("noticed_s"), line.at_mono("stopped_s")
    decided = line.at_mono("decided_s")
    if noticed is not None and moments.noticed < noticed - 0.5 and moments.judged is None:
        add("another agent starts" if is_new_agent else "an attempt that failed", moments.noticed,
            noticed, "dead")  # fmt: skip
    add("stop the ranks", noticed, stopped, "dead", "SIGKILL, and each end is waited for")
    add(
        "agree, choose what to restore",
        stopped,
        decided,
        "dead",
        with_commas(line.text("restored", 100)),
    )
    at, phases = decided, line.part("phases_s")
    for key, name, style in PHASES:
        took_s = number(phases.get(key))
        if at is None or took_s is None:
            return
        add(name, at, at + max(took_s, 0.0), style, where)
        at += max(took_s, 0.0)
        where = ""


def _how_noticed(case: IncidentLines) -> str:
    if case.first("Suspected") is not None:
        return "no step for so long"
    match case.first("WorkersExited", "NodeLost", "LeadLost", "Verdict"):
        case JournalLine(kind="NodeLost", fields=fields) if "silent" in str(fields.get("text")):
            return "no heartbeat of the node"
        case JournalLine(kind="WorkersExited"):
            return "the kernel tells at once when a process ends"
        case JournalLine(kind="NodeLost" | "LeadLost"):
            return "the connection was closed or refused"
        case _:
            return ""


def _why_acted(case: IncidentLines) -> str:
    action = next((one for one in case.of("Action") if one.text("action") in RESTARTS), None)
    verdict = case.last("Verdict")
    told = action.text("why", 120) if action is not None else ""
    is_told = verdict is not None and verdict.text("text", 40)[:40] in told
    return "" if is_told else told
