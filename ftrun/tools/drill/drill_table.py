"""Formats the results of a drill as a terminal table, and as Markdown with a line per fault.

Runs in: cli. Pure.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ftrun.cli.screen.text import count, duration
from ftrun.tools.drill.judge import FaultResult

HEAD = ("fault", "on", "nodes", "detected", "culprit", "action", "steps lost", "equal", "passed")


def cells(row: FaultResult) -> tuple[str, ...]:
    return (
        row.fault, row.target, row.nodes, detected(row), yes_or_no(row.culprit_right),
        row.action or "-", "-" if row.steps_lost is None else str(row.steps_lost),
        yes_or_no(row.equal), "yes" if row.passed else "NO",
    )  # fmt: skip


def line(row: FaultResult) -> str:
    said = f"{row.fault:16} {row.target:8} {row.nodes:9} {detected(row):>17}  "
    lost = "-" if row.steps_lost is None else row.steps_lost
    told = f"{row.found}; {row.action or 'no action'}; {lost} steps lost; equal: " + yes_or_no(
        row.equal
    )
    return said + (told if row.passed else f"FAILED: {row.problem}")


def summary(rows: Sequence[FaultResult]) -> str:
    passed = sum(row.passed for row in rows)
    named = [row.culprit_right for row in rows if row.culprit_right is not None]
    wrong = sum(not one for one in named)
    if passed == len(rows):
        said = f"all {len(rows)} faults passed"
    else:
        said = f"{len(rows) - passed} of {len(rows)} faults failed"
    return f"{said}; {wrong} wrong culprits in {len(named)} that had to be named"


def markdown(rows: Sequence[FaultResult]) -> str:
    """Formats one line per kind of fault: median times, and the worst of all other values."""
    lines = [
        "| fault | trials | verdict | detected in (median) | culprit right | action | steps lost "
        "| bitwise equal | passed |",
        "|---|--:|---|--:|---|---|--:|---|---|",
    ]
    for group in grouped(rows):
        passed = f"{group.passed} of {group.count}"
        lines.append(
            f"| `{group.fault}` | {group.count} | {_escaped(group.found)} | "
            f"{detected(group)} | {group.culprit} | {group.action} | {group.lost} | "
            f"{group.equal} | {passed if group.passed < group.count else 'yes'} |"
        )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class FaultSummary:
    """All rows of one fault."""

    fault: str
    count: int
    found: str
    detected_s: float | None
    detected_steps: float | None
    culprit: str
    action: str
    lost: str
    equal: str
    passed: int


def grouped(rows: Sequence[FaultResult]) -> list[FaultSummary]:
    """Groups rows by kind, in the order of first occurrence."""
    found = []
    for kind in dict.fromkeys(row.kind for row in rows):
        own = [row for row in rows if row.kind == kind]
        times_s = [row.detected_s for row in own if row.detected_s is not None]
        steps = [row.detected_steps for row in own if row.detected_steps is not None]
        lost = [row.steps_lost for row in own if row.steps_lost is not None]
        found.append(
            FaultSummary(
                fault=own[0].fault,
                count=len(own),
                found=", ".join(dict.fromkeys(row.found for row in own if row.found)),
                detected_s=statistics.median(times_s) if times_s else None,
                detected_steps=statistics.median(steps) if steps else None,
                culprit=_share([row.culprit_right for row in own]),
                action=", ".join(dict.fromkeys(row.action or "none" for row in own)),
                lost=str(max(lost)) if lost else "-",
                equal=_share([row.equal for row in own]),
                passed=sum(row.passed for row in own),
            )
        )
    return found


def _share(said: Sequence[bool | None]) -> str:
    known = [one for one in said if one is not None]
    if not known:
        return "-"
    return "yes" if all(known) else f"{sum(known)} of {len(known)}"


def yes_or_no(value: bool | None) -> str:
    return "-" if value is None else ("yes" if value else "NO")


def seconds(value: float | None) -> str:
    return "-" if value is None else duration(value)


def detected(it: "FaultResult | FaultSummary") -> str:
    """Formats the detection time; steps are included only if some were made."""
    steps = round(it.detected_steps or 0)
    return seconds(it.detected_s) + (f", {count(steps, 'step')}" if steps else "")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
