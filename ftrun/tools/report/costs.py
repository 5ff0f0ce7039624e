"""Where the time of a run has gone, and how often it fails.

Runs in:  cli. Pure.
Takes in: the launches of a run and its incidents.
Gives:    goodput, the time lost by class, the mean time between failures.

Goodput is useful step time over wall time. Useful is what is left of the wall time when every
class below is taken off. A second is counted once: steps that are done again are not also useful,
and time that is PAUSED is no part of a restart.
"""

from collections.abc import Sequence

from ftrun.cli.screen.text import count, duration, likely_rates
from ftrun.tools.report.background import RunBackground, start_of
from ftrun.tools.report.facts import IncidentFacts, LostTime, SnapshotTotals
from ftrun.tools.report.journal import JournalLine

GOODPUT_MEANS = (
    "useful step time / wall time. Wall time runs from the first line of the journal to its last, "
    "over all launches; useful is what is left of it without the classes of lost time below"
)
_ENOUGH_FAILURES = 10


def wall_of(launches: Sequence[Sequence[JournalLine]]) -> tuple[float, float]:
    """(seconds in launches, seconds between them in which nobody had ended the run)."""
    inside = sum(launch[-1].t_s - launch[0].t_s for launch in launches if launch)
    return inside, _away(launches)


def _away(launches: Sequence[Sequence[JournalLine]]) -> float:
    """An agent took over memory of one that had said nothing of an end: its launcher was gone.

    From the last word of the one until the other was there; what follows is an incident's.
    """
    away_s = 0.0
    for launch in launches:
        last: JournalLine | None = None
        for line in launch:
            if line.kind == "adopted" and last is not None:
                away_s += max(line.t_s - last.t_s, 0.0)
            elif line.kind not in ("run", "smp_up"):
                last = line
    return away_s


def losses_of(
    launches: Sequence[Sequence[JournalLine]],
    incidents: Sequence[IncidentFacts],
    background: RunBackground,
    snapshots: SnapshotTotals | None,
) -> list[LostTime]:
    """The classes, the empty ones left out."""
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
             "time for which the training thread stood still for them"),
        LostTime("launcher away", _away(launches),
             "from the last word of a lost one until another was there"),
        LostTime("ending", sum(_ending(launch) for launch in launches),
             "from the last rank's end to the launcher's"),
    ]  # fmt: skip
    return [one for one in found if one.seconds > 0]


def _ending(launch: Sequence[JournalLine]) -> float:
    kinds = ("WorkersExited", "StartGeneration", "Recovered", "Pulse")
    last = next((line for line in reversed(launch) if line.kind in kinds), None)
    if last is None or last.kind != "WorkersExited":
        return 0.0
    has_ended = any(line.kind in ("end", "EndRun") for line in launch)
    return launch[-1].t_s - last.t_s if has_ended else 0.0


def snapshots_of(lines: Sequence[JournalLine]) -> SnapshotTotals | None:
    """Sums over the run: the pulses count within one generation, and begin anew in the next.

    Nodes stand still together, so that of the blocked time the largest counts; snapshots are of
    all ranks.
    """
    totals: dict[str, dict[str, float]] = {}
    before: dict[tuple[str, str], float] = {}
    for line in lines:
        if line.kind != "Pulse":
            continue
        sums = totals.setdefault(line.node, {})
        for name in ("blocked_s", "taken", "skipped", "discarded"):
            value = line.number(name)
            if value is None or value < 0:
                continue
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
    """In words, with what so few failures can tell."""
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
