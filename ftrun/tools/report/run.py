"""A whole run as values, from its journal alone.

Runs in:  cli. Pure.
Takes in: the raw lines of the journal, torn ones and all.
Gives:    `RunFacts`. A kind of line that is not known is skipped, a field that is not there is
          "not known".
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from ftrun.cli.screen.text import by_number, count, duration, percent
from ftrun.errors import FtrunError
from ftrun.tools.report.background import RunBackground, background_of, progress_in
from ftrun.tools.report.costs import losses_of, mtbf_of, snapshots_of, wall_of
from ftrun.tools.report.facts import IncidentFacts, NodeFacts, RunFacts
from ftrun.tools.report.incident.grouping import cases_of, failed
from ftrun.tools.report.incident.incident import incident_of
from ftrun.tools.report.journal import JournalLine, newest_run, parse

_MAX_POINTS = 400
_OWN_DEATHS = {
    "SmpExited": "snapshot manager ended",
    "ZygoteExited": "warm process ended",
    "adopted": "new agent took over",
    "LeadLost": "lead lost",
    "GoOnWithout": "part of ftrun given up",
    "checkpoint_not_written": "checkpoint not written",
    "fresh_start": "ranks started fresh instead of warm",
    "bug": "bug in ftrun",
}


def run_facts(raw: Iterable[bytes], *, name: str = "", is_alive: bool = False) -> RunFacts:
    """Everything a report says.

    Args:
        raw: lines of one journal, or of several that overlap.
        name: of the run, where the journal does not say it.
        is_alive: somebody knows that the run is going on.

    Raises:
        FtrunError: no line of it can be read.
    """
    lines, unreadable = parse(raw)
    if not lines:
        raise FtrunError(
            f"the journal of {name or 'this run'} has no line that can be read "
            f"({count(unreadable, 'line')} of something else)"
        )
    launches, left_out = newest_run(lines)
    facts = _facts(launches, name=name, is_alive=is_alive)
    return _with_verdict(replace(facts, unreadable=unreadable, left_out=left_out))


def _facts(launches: Sequence[Sequence[JournalLine]], *, name: str, is_alive: bool) -> RunFacts:
    lines = list(chain.from_iterable(launches))
    background = background_of(lines)
    incidents = tuple(incident_of(case, background) for case in cases_of(lines))
    wall_s, _ = wall_of(launches)
    snapshots = snapshots_of(lines)
    losses = losses_of(launches, incidents, background, snapshots)
    useful_s = max(wall_s - sum(one.seconds for one in losses), 0.0)
    state, exit_code, why = _state(lines, is_alive=is_alive)
    unplanned = [one for one in incidents if not one.is_planned]
    failures = sum(1 for one in unplanned if not one.is_reported)
    began = next((line for line in lines if line.kind == "run"), lines[0])
    step = max((step for _, step in _points(lines)), default=None)
    has_trained = bool(step) and wall_s > 0
    pulses = [line.number("loss") for line in lines if line.kind == "Pulse"]
    starts = {line.whole("generation") for line in lines if line.kind == "StartGeneration"}
    return RunFacts(
        run_id=began.text("run_id", 100) or name,
        script=began.text("script", 300),
        torch=began.text("torch", 40),
        state=state,
        verdict="",
        began_t_s=lines[0].t_s,
        ended_t_s=lines[-1].t_s,
        wall_s=wall_s,
        exit_code=exit_code,
        why=why,
        world_size=len(background.world) or None,
        step=step,
        step_s=background.step_s,
        loss=pulses[-1] if pulses else None,
        goodput=useful_s / wall_s if has_trained else None,
        useful_s=useful_s if has_trained else None,
        losses=tuple(losses),
        notes=tuple(_notes(background, lines, launches)),
        failures=failures,
        mtbf=mtbf_of(failures, wall_s),
        incidents=incidents,
        nodes=tuple(_nodes(lines, incidents, background)),
        snapshots=snapshots,
        checkpoints=len(background.checkpoints),
        progress=tuple(_progress(lines, incidents)),
        marks=tuple((one.began_t_s, str(one.number)) for one in unplanned),
        other_deaths=tuple(_own_deaths(lines)),
        launches=len(launches),
        generations=len(starts),
        logs={line.node: line.text("logs") for line in lines if line.kind == "run"},
    )


def _state(lines: Sequence[JournalLine], *, is_alive: bool) -> tuple[str, int | None, str]:
    end = next((line for line in reversed(lines) if line.kind in ("end", "EndRun", "run",
                "StartGeneration")), None)  # fmt: skip
    if end is None or end.kind in ("run", "StartGeneration"):
        return ("running" if is_alive else "no end in the journal"), None, ""
    code, why = end.whole("exit_code"), end.text("why", 500)
    if not failed(end):
        return "finished", code, why
    stopped = any(line.kind == "StopAsked" for line in lines)
    return ("stopped" if stopped and (code or 0) > 128 else "failed"), code, why


def _with_verdict(facts: RunFacts) -> RunFacts:
    parts = [facts.state.upper()]
    if facts.state == "failed":
        parts[0] += f" with exit code {facts.exit_code}"
    if facts.step is not None:
        parts.append(f"step {facts.step:,}")
    if facts.step_s:
        parts.append(f"{1 / facts.step_s:.3g} steps/s")
    if facts.goodput is not None:
        parts.append(f"goodput {percent(facts.goodput)}")
    happened = [one for one in facts.incidents if not one.is_planned]
    told = count(len(happened), "incident") if happened else "no incident"
    if happened:
        last = happened[-1]
        took = last.recovered_s
        where = "ago" if facts.state == "running" else "before the end"
        told += f", the last {duration(facts.ended_t_s - last.began_t_s)} {where}" + (
            f" ({duration(took)})" if took is not None else "")  # fmt: skip
    return replace(facts, verdict="  ".join([*parts, told]))


def _points(lines: Sequence[JournalLine]) -> list[tuple[float, int]]:
    found: list[tuple[float, int]] = []
    for line in lines:
        if line.kind == "WorkersExited":
            step, _ = progress_in(line)
        elif line.kind == "StartGeneration":
            step = _step_of(line.text("restored"))
            step = 0 if step is None and line.whole("generation") == 0 else step
        elif line.kind == "Recovered":
            step = _step_of(line.text("restored"))
        elif line.kind == "Pulse":
            step = line.whole("step")
        elif line.kind == "Transition" and line.text("old") == "check":
            step = found[-1][1] if found else 0
        else:
            continue
        if step is not None:
            found.append((line.t_s, step))
    return found


def _step_of(text: str) -> int | None:
    words = text.split()
    return int(words[1]) if len(words) > 1 and words[1].isdecimal() and len(words[1]) < 16 else None


def _progress(
    lines: Sequence[JournalLine], incidents: Sequence[IncidentFacts]
) -> list[tuple[float, int]]:
    """Few enough points to draw; every turn downwards is kept."""
    last_good = [(one.began_t_s, one.step) for one in incidents if one.step is not None]
    points = sorted([*_points(lines), *last_good], key=lambda point: point[0])
    if len(points) <= _MAX_POINTS:
        return points
    every = len(points) // (_MAX_POINTS // 2) + 1
    turns = {i for i in range(1, len(points)) if points[i][1] < points[i - 1][1]}
    if len(turns) > _MAX_POINTS // 4:
        turns = set()
    kept = turns | {i - 1 for i in turns} | set(range(0, len(points), every)) | {len(points) - 1}
    return [points[i] for i in sorted(kept)]


def _nodes(
    lines: Sequence[JournalLine], incidents: Sequence[IncidentFacts], background: RunBackground
) -> list[NodeFacts]:
    names = sorted({line.node for line in lines if line.node}, key=by_number)
    starts = Counter(line.node for line in lines if line.kind == "StartGeneration")
    found = []
    for name in names:
        ranks = tuple(sorted(rank for rank, node in background.node_of.items() if node == name))
        blamed = sum(1 for one in incidents if name in one.nodes and not one.is_planned)
        found.append(NodeFacts(name, ranks, starts[name], blamed))
    return found


def _own_deaths(lines: Sequence[JournalLine]) -> list[str]:
    counted: dict[str, int] = {}
    for line in lines:
        if line.kind in _OWN_DEATHS:
            counted[line.kind] = counted.get(line.kind, 0) + 1
    return [f"{_OWN_DEATHS[kind]}: {count(times, 'time')}" for kind, times in counted.items()]


def _notes(
    background: RunBackground,
    lines: Sequence[JournalLine],
    launches: Sequence[Sequence[JournalLine]],
) -> list[str]:
    found = []
    if not background.has_first_step:
        found.append(
            "start-up counts until the ranks were started: no line tells of the first step, so "
            "the script's own set-up counts as training"
        )
    if background.step_s is None:
        found.append("steps done again are not counted as time: a step's duration is not known")
    if not any(line.kind == "Pulse" for line in lines):
        found.append("snapshot overhead is not counted: the journal has no Pulse lines")
    if len(launches) > 1:
        found.append(f"{len(launches)} launches; the time between them does not count")
    return found


def incident_by(facts: RunFacts, wanted: str) -> IncidentFacts:
    """The incident of this number, or the `last` one.

    Raises:
        FtrunError: there is none.
    """
    known = {one.number: one for one in facts.incidents}
    if not known:
        raise FtrunError(f"run {facts.run_id} has had no incident")
    if wanted == "last":
        return facts.incidents[-1]
    if wanted.isdecimal() and len(wanted) < 10 and int(wanted) in known:
        return known[int(wanted)]
    numbers = ", ".join(str(number) for number in list(known)[:20])
    raise FtrunError(f"run {facts.run_id} has no incident {wanted}; it has {numbers}, or `last`")
