"""A whole run as values, from its journal alone. What no line says is "not known"."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from ftrun.cli.screen.text import by_number, clean, count, duration, percent
from ftrun.errors import FtrunError
from ftrun.events import Record, SmpExited, StopRequested, WorkersExited, ZygoteExited
from ftrun.records.decode import of_kinds
from ftrun.records.incidents import LifecycleChanged
from ftrun.records.membership import LeaderLost
from ftrun.records.recovery import DisableComponent, EndRun, GenerationStartedRecord, Recovered
from ftrun.records.run import InternalErrorRecord, ProgressRecord, RunEndedRecord, RunStarted
from ftrun.records.snapshots import CheckpointFailedRecord, FreshStartUsed, MemoryAdopted
from ftrun.tools.report.background import RunBackground, background_of
from ftrun.tools.report.costs import losses_of, mtbf_of, snapshots_of
from ftrun.tools.report.facts import IncidentFacts, NodeFacts, RunFacts
from ftrun.tools.report.incident.grouping import cases_of
from ftrun.tools.report.incident.incident import incident_of
from ftrun.tools.report.journal import Line, newest_run, parse, without_single_ends

_MAX_POINTS = 400
_OWN_DEATHS: dict[type[Record], str] = {
    SmpExited: "snapshot manager ended",
    ZygoteExited: "warm process ended",
    MemoryAdopted: "new agent took over",
    LeaderLost: "lead lost",
    DisableComponent: "part of ftrun given up",
    CheckpointFailedRecord: "checkpoint not written",
    FreshStartUsed: "ranks started fresh instead of warm",
    InternalErrorRecord: "bug in ftrun",
}


def run_facts(raw: Iterable[bytes], *, name: str = "", is_alive: bool = False) -> RunFacts:
    """All facts of a report; FtrunError if no line can be read."""
    lines, unreadable = parse(raw)
    if not lines:
        raise FtrunError(
            f"the journal of {name or 'this run'} has no line that can be read "
            f"({count(unreadable, 'line')} of something else)"
        )
    launches, left_out = newest_run(without_single_ends(lines) or lines)
    facts = _facts(launches, name=name, is_alive=is_alive)
    return _with_verdict(replace(facts, unreadable=unreadable, left_out=left_out))


def _facts(launches: Sequence[Sequence[Line]], *, name: str, is_alive: bool) -> RunFacts:
    lines = list(chain.from_iterable(launches))
    background = background_of(lines)
    incidents = tuple(incident_of(case, background) for case in cases_of(lines))
    wall_s = sum(launch[-1].t_s - launch[0].t_s for launch in launches if launch)
    snapshots = snapshots_of(lines)
    losses = losses_of(launches, incidents, background, snapshots)
    useful_s = max(wall_s - sum(one.seconds for one in losses), 0.0)
    state, exit_code, reason = _state(lines, is_alive=is_alive)
    unplanned = [one for one in incidents if not one.is_planned]
    failures = sum(1 for one in unplanned if not one.is_reported)
    runs = of_kinds(lines, RunStarted)
    start = runs[0].record if runs else None
    step = max((step for _, step in _points(lines)), default=None)
    has_trained = bool(step) and wall_s > 0
    progress = of_kinds(lines, ProgressRecord)
    starts = {line.record.generation for line in of_kinds(lines, GenerationStartedRecord)}
    deaths = Counter(type(line.record) for line in lines if type(line.record) in _OWN_DEATHS)
    return RunFacts(
        run_id=clean(start.run_id, 100) if start is not None else name,
        script=clean(start.script, 300) if start is not None else "",
        torch=clean(start.torch, 40) if start is not None else "",
        state=state,
        verdict="",
        began_t_s=lines[0].t_s,
        ended_t_s=lines[-1].t_s,
        wall_s=wall_s,
        exit_code=exit_code,
        why=reason,
        world_size=len(background.world) or None,
        step=step,
        step_s=background.step_s,
        loss=progress[-1].record.loss if progress else None,
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
        other_deaths=tuple(
            f"{_OWN_DEATHS[kind]}: {count(times, 'time')}" for kind, times in deaths.items()
        ),
        launches=len(launches),
        generations=len(starts),
        logs={line.node: line.record.logs for line in runs},
    )


def _state(lines: Sequence[Line], *, is_alive: bool) -> tuple[str, int | None, str]:
    reported = of_kinds(lines, RunEndedRecord, EndRun, RunStarted, GenerationStartedRecord)
    end = reported[-1].record if reported else None
    if not isinstance(end, RunEndedRecord | EndRun):
        return ("running" if is_alive else "no end in the journal"), None, ""
    code, reason = end.exit_code, clean(end.reason, 500)
    if code == 0:
        return "finished", code, reason
    stopped = bool(of_kinds(lines, StopRequested))
    return ("stopped" if stopped and code > 128 else "failed"), code, reason


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
    reported = count(len(happened), "incident") if happened else "no incident"
    if happened:
        last = happened[-1]
        where = "ago" if facts.state == "running" else "before the end"
        reported += f", the last {duration(facts.ended_t_s - last.began_t_s)} {where}"
        if last.recovered_s is not None:
            reported += f" ({duration(last.recovered_s)})"
    return replace(facts, verdict="  ".join([*parts, reported]))


def _points(lines: Sequence[Line]) -> list[tuple[float, int]]:
    found: list[tuple[float, int]] = []
    for line in lines:
        step: int | None = None
        match line.record:
            case WorkersExited(progress=progress) if progress.steps_here:
                step = progress.step
            case GenerationStartedRecord(restored=None, generation=0):
                step = 0
            case GenerationStartedRecord(restored=version) | Recovered(restored=version):
                step = version.step if version is not None else None
            case ProgressRecord(step=reported, steps_here=here) if here:
                step = reported
            case LifecycleChanged(old="check"):
                step = found[-1][1] if found else 0
            case _:
                pass
        if step is not None:
            found.append((line.t_s, step))
    return found


def _progress(lines: Sequence[Line], incidents: Sequence[IncidentFacts]) -> list[tuple[float, int]]:
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
    lines: Sequence[Line], incidents: Sequence[IncidentFacts], background: RunBackground
) -> list[NodeFacts]:
    names = sorted({line.node for line in lines if line.node}, key=by_number)
    starts = Counter(line.node for line in of_kinds(lines, GenerationStartedRecord))
    found = []
    for name in names:
        ranks = tuple(sorted(rank for rank, node in background.node_of.items() if node == name))
        blamed = sum(1 for one in incidents if name in one.nodes and not one.is_planned)
        found.append(NodeFacts(name, ranks, starts[name], blamed))
    return found


def _notes(
    background: RunBackground, lines: Sequence[Line], launches: Sequence[Sequence[Line]]
) -> list[str]:
    found = []
    if not background.has_first_step:
        found.append(
            "start-up counts until the ranks were started: no line reports the first step, so "
            "the script's own set-up counts as training"
        )
    if background.step_s is None:
        found.append("steps done again are not counted as time: a step's duration is not known")
    if not of_kinds(lines, ProgressRecord):
        found.append("snapshot overhead is not counted: the journal has no progress lines")
    if len(launches) > 1:
        found.append(f"{len(launches)} launches; the time between them does not count")
    return found


def incident_by(facts: RunFacts, wanted: str) -> IncidentFacts:
    known = {one.number: one for one in facts.incidents}
    if not known:
        raise FtrunError(f"run {facts.run_id} has had no incident")
    if wanted == "last":
        return facts.incidents[-1]
    if wanted.isdecimal() and len(wanted) < 10 and int(wanted) in known:
        return known[int(wanted)]
    numbers = ", ".join(str(number) for number in list(known)[:20])
    raise FtrunError(f"run {facts.run_id} has no incident {wanted}; it has {numbers}, or `last`")
