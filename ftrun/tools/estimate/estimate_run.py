"""Measures the costs of ftrun in one run, for an estimate of a larger run.

Runs in:  cli. Pure.
Takes in: the facts that `ftrun report` derives from a run.
Gives:    values for assumptions, each with its method. A value that the journal does not contain
          stays at its default.

The failure rate of the run is not used, because a few failures have little significance; the report
of the run shows the interval. Failures injected by `ftrun inject-fault` count, because they cost
the same as others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ftrun.cli.screen.text import count
from ftrun.tools.report.facts import IncidentFacts, RunFacts
from ftrun.tools.report.incident.ranks import slow_kind
from ftrun.tools.report.report_cost import HANGS

_NODES_LOST = ("node lost", "lead lost")


@dataclass(frozen=True, slots=True)
class MeasuredValue:
    """A value and its method, as words that follow `of run X:`."""

    value: float
    how: str


def measured_in(facts: RunFacts) -> dict[str, MeasuredValue]:
    """Returns the fields of `Assumptions` that the run measures."""
    found: dict[str, MeasuredValue] = {}
    if facts.step_s:
        found["step_s"] = MeasuredValue(facts.step_s, "median of its steps")
    if (snapshots := facts.snapshots) is not None and snapshots.taken > 0:
        each_s = snapshots.blocked_s / snapshots.taken
        how = f"mean of {count(snapshots.taken, 'snapshot')}: training stood still"
        found["snapshot_cost_s"] = MeasuredValue(each_s, how)
    over = [one for one in facts.incidents if _counts(one)]
    hung = [one for one in over if one.kind in HANGS]
    lost = [one for one in over if one.kind in _NODES_LOST]
    ended = [one for one in over if one not in hung and one not in lost]
    for name, incidents, what in (
        ("crash_detect_s", ended, "ended rank"),
        ("hang_detect_s", hung, "hang"),
        ("node_detect_s", lost, "lost node"),
    ):
        # 0: the journal has no line from before the detection.
        if took_s := [one.noticed_s for one in incidents if one.noticed_s > 0]:
            found[name] = MeasuredValue(median(took_s), f"median of {count(len(took_s), what)}")
    # The restart of a lost node includes the fetch of its state, which is a separate assumption.
    if restarted := ended + hung or lost:
        how = f"median of {count(len(restarted), 'restart')}"
        found["restart_s"] = MeasuredValue(median(_restart_s(one) for one in restarted), how)
        found["restart_more_s"] = MeasuredValue(0.0, "is in --restart, as that run had it")
    return found


def _counts(one: IncidentFacts) -> bool:
    is_over = one.recovered_s is not None and not one.is_reported
    return is_over and not one.is_planned and not slow_kind(one.kind)


def _restart_s(one: IncidentFacts) -> float:
    return max((one.recovered_s or 0.0) - one.noticed_s - one.paused_s, 0.0)


def nothing_measured(facts: RunFacts, found: Sequence[str]) -> str:
    """Describes what this run does not measure; empty if it measures all that matters."""
    missing = {
        "snapshot_cost_s": "what a snapshot costs (no Pulse line, or none was taken)",
        "restart_s": "what a restart costs (no failure was survived)",
    }
    words = [what for name, what in missing.items() if name not in found]
    return f"run {facts.run_id} does not tell {' or '.join(words)}" if words else ""
