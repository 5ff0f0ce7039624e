"""Divides the wall time of a run into useful time and classes of lost time; its failure rate.

Goodput is useful step time divided by wall time. Useful step time is the wall time minus all
classes of `losses_of`. Each second counts once: repeated steps are not useful time, and PAUSED time
is not part of a restart.
"""

from collections.abc import Sequence

from ftrun.cli.screen.text import count, duration, likely_rates
from ftrun.events import WorkersExited
from ftrun.records.decode import of_kinds
from ftrun.records.recovery import EndRun, GenerationStartedRecord, Recovered
from ftrun.records.run import ProgressRecord, RunEndedRecord, RunStarted
from ftrun.records.snapshots import MemoryAdopted, SmpReady
from ftrun.tools.report.background import RunBackground, start_of
from ftrun.tools.report.facts import IncidentCost, IncidentFacts, LostTime, SnapshotTotals
from ftrun.tools.report.incident.ranks import slow_kind
from ftrun.tools.report.incident.timeline import IncidentTimes
from ftrun.tools.report.journal import Line

GOODPUT_MEANS = (
    "useful step time / wall time. Wall time runs from the first line of the journal to its last, "
    "over all launches; useful is what is left of it without the classes of lost time below"
)
_ENOUGH_FAILURES = 10
HANGS = (
    "hang in computation",
    "hang in communication",
    "device stuck",
    "skipped collective",
    "deadlock",
    "frozen",
    "GIL stuck",
    "busy loop",
)
"""Kinds of verdict on a run that makes no steps."""


def _away(launches: Sequence[Sequence[Line]]) -> float:
    """Seconds from the last line of a lost launcher until another agent took over its memory."""
    away_s = 0.0
    for launch in launches:
        last: Line | None = None
        for line in launch:
            if isinstance(line.record, MemoryAdopted) and last is not None:
                away_s += max(line.t_s - last.t_s, 0.0)
            elif not isinstance(line.record, RunStarted | SmpReady):
                last = line
    return away_s


def losses_of(
    launches: Sequence[Sequence[Line]],
    incidents: Sequence[IncidentFacts],
    background: RunBackground,
    snapshots: SnapshotTotals | None,
) -> list[LostTime]:
    starts = [start_of(launch)[0] or 0.0 for launch in launches]
    over = [one for one in incidents if one.recovered_s is not None]
    detection = sum(one.noticed_s for one in over)
    paused = sum(one.paused_s for one in over)
    restart = sum((one.recovered_s or 0.0) - one.noticed_s for one in over) - paused
    redone = sum((one.steps_lost or 0) * (background.step_s or 0.0) for one in over)
    found = [
        LostTime("start-up", sum(starts), "from the launch to the first step of generation 0"),
        LostTime("detection", detection, "from a fault's first sign until it was known"),
        LostTime("restart", max(restart, 0.0), "from the notice to the first step of every rank"),
        LostTime("paused", paused, "waiting for nodes"),
        LostTime("steps done again", redone, "completed before a failure, and repeated after it"),
        LostTime("snapshots", snapshots.blocked_s if snapshots else 0.0,
             "time for which they blocked the training thread"),
        LostTime("launcher away", _away(launches),
             "from the last word of a lost one until another was there"),
        LostTime("ending", sum(_ending(launch) for launch in launches),
             "from the last rank's end to the launcher's"),
    ]  # fmt: skip
    return [one for one in found if one.seconds > 0]


def _ending(launch: Sequence[Line]) -> float:
    reported = of_kinds(launch, WorkersExited, GenerationStartedRecord, Recovered, ProgressRecord)
    if not reported or not isinstance(reported[-1].record, WorkersExited):
        return 0.0
    has_ended = bool(of_kinds(launch, RunEndedRecord, EndRun))
    return launch[-1].t_s - reported[-1].t_s if has_ended else 0.0


def snapshots_of(lines: Sequence[Line]) -> SnapshotTotals | None:
    """Sums over the run; the progress lines count within one generation.

    All nodes are blocked at the same time, so the largest value counts.
    """
    totals: dict[str, dict[str, float]] = {}
    before: dict[tuple[str, str], float] = {}
    for line in of_kinds(lines, ProgressRecord):
        sums = totals.setdefault(line.node, {})
        for name in ("blocked_s", "taken", "skipped", "discarded"):
            value = max(getattr(line.record, name), 0)
            last = before.get((line.node, name), 0.0)
            sums[name] = sums.get(name, 0.0) + (value - last if value >= last else value)
            before[line.node, name] = value
    if not totals:
        return None

    def most(name: str) -> float:
        return max(sums.get(name, 0.0) for sums in totals.values())

    return SnapshotTotals(
        most("blocked_s"), int(most("taken")), int(most("skipped")), int(most("discarded"))
    )


def mtbf_of(failures: int, over_s: float) -> str:
    """In words, with the range that this number of failures allows."""
    if over_s <= 0:
        return "not known: no time has passed"
    low, high = likely_rates(failures, over_s)
    if failures == 0:
        return (
            f"no failure in {duration(over_s)}. With 95 % confidence it is above "
            f"{duration(1 / high)}; more cannot be said"
        )
    mean = f"{duration(over_s / failures)}: {count(failures, 'failure')} in {duration(over_s)}"
    if failures >= _ENOUGH_FAILURES:
        return f"{mean} (90 % interval {duration(1 / high)} to {duration(1 / low)})"
    return (
        f"{mean}. With so few, the true mean is between {duration(1 / high)} and "
        f"{duration(1 / low)} (90 % interval)"
    )


def cost_of(
    moments: IncidentTimes,
    step: int | None,
    steps_lost: int | None,
    background: RunBackground,
    *,
    kind: str,
) -> IncidentCost | None:
    """The cost of an incident, and of a restart from a checkpoint by figures of this run alone."""
    if slow_kind(kind) and moments.recovered is None:
        return None
    stood = None if moments.recovered is None else moments.recovered - moments.start
    step_s, start_s = background.step_s, background.start_s
    redone = None if steps_lost is None or step_s is None else steps_lost * step_s
    before = [one for one in background.checkpoints if one[0] < moments.start]
    from_step = before[-1][1] if before else 0
    how = []
    total: float | None = None
    if start_s is not None:
        what = "to the first step" if background.has_first_step else "until its ranks were started"
        how.append(f"{duration(start_s)} to start again: what this run's own start took, {what}")
    if step is not None:
        again = max(step - from_step, 0)
        whence = f"since the checkpoint of step {from_step:,}" if before else (
            "since step 0, as no checkpoint is on disk")  # fmt: skip
        takes = "" if step_s is None else f", {duration(step_s)} each: {duration(again * step_s)}"
        how.append(f"{count(again, 'step')} {whence}{takes}")
        if start_s is not None and step_s is not None:
            total = start_s + again * step_s + (moments.noticed - moments.start)
    took_s = moments.noticed - moments.start
    noticed = f"{duration(took_s)} to notice it, as it took here"
    if took_s < 1e-3:
        noticed = "no time to notice it, as here"
    if kind in HANGS:
        noticed += (
            ". Without ftrun it lasts until the process group's own timeout, 10 min (NCCL) or 30 "
            "min (gloo) unless it is set; that is not counted"
        )
    how.append(noticed)
    return IncidentCost(stood, redone, len(background.world) or None, total, tuple(how))
