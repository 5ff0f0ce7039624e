"""Judges an injected fault by the run's journal.

Runs in:  cli. Pure.
Takes in: a trial, and the journal lines from the order to its end.
Gives:    a `FaultResult`; the drill continues when `is_over` is true.

Rule 1: A fault that was not in effect has not passed, whatever the run did.
Rule 2: A verdict that is only likely may be followed by a better verdict for the same rank.
Rule 3: All verdicts between a fault and the next one count for this fault. Any other culprit that
they name is wrong.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ftrun.cli.screen.text import clean
from ftrun.tools.drill.expected import ExpectedOutcome
from ftrun.tools.drill.plan import FaultTrial

DecodedLine = dict[str, Any]

NOTHING = "no incident"


@dataclass(slots=True)
class FaultResult:
    """The observed result of one fault."""

    fault: str
    kind: str
    target: str = ""
    job: str = ""
    nodes: str = ""
    """`2 x 2`: nodes times ranks per node; `+ 1` spares."""
    expected: str = ""
    found: str = ""
    """Kinds of verdict, in order of time."""
    fired: bool = False
    fired_step: int | None = None
    in_effect: bool = False
    detected_s: float | None = None
    """From the fault to the verdict; if none is expected, to the line that proves the fault."""
    detected_steps: int | None = None
    """Steps from the fault to the verdict, as known to the leader.

    None if a step is unknown, or if the run was restored to an earlier step in between.
    """
    recovered_s: float | None = None
    """From the fault to the end of the incident, when every rank exceeds its earlier progress."""
    culprits: list[int] = field(default_factory=list)
    culprit_right: bool | None = None
    """None if no culprit is expected."""
    action: str = ""
    steps_lost: int | None = None
    equal: bool | None = None
    """None if not compared."""
    text: str = ""
    """The verdict in one sentence."""
    passed: bool = False
    problem: str = ""
    run: str = ""
    """Name of the run's folder within the folder of the drill."""

    def fail(self, problem: str) -> None:
        self.problem = "; ".join([self.problem, problem] if self.problem else [problem])
        self.passed = False


def row_of(trial: FaultTrial, job: str, nodes: str) -> FaultResult:
    wanted = " or ".join(trial.expected.verdicts) or NOTHING
    return FaultResult(trial.name, trial.kind, trial.target, job, nodes, expected=wanted)


def fired_at(lines: Sequence[DecodedLine], order_id: str) -> DecodedLine | None:
    """Returns the first journal line that reports this order as fired."""
    return _first(lines, "FaultFired", id=order_id)


def is_over(
    trial: FaultTrial, lines: Sequence[DecodedLine], order_id: str, *, more_steps: bool
) -> bool:
    """Returns whether all expected effects of a trial have occurred.

    Args:
        trial: the ordered fault.
        lines: journal lines of all nodes, in order of time.
        order_id: id of the order.
        more_steps: the steps required between two faults were made after it.
    """
    fired = fired_at(lines, order_id)
    if fired is None:
        return False
    if trial.lasts_s and not _first(lines, "FaultEnded", id=order_id) and _is_taken_back(trial):
        return False
    return is_settled(trial, lines, _time_of(fired), more_steps=more_steps)


def is_settled(
    trial: FaultTrial, lines: Sequence[DecodedLine], since_s: float, *, more_steps: bool
) -> bool:
    """Returns whether all incidents since then are closed, and the expected ones have occurred."""
    later = [line for line in lines if line["mono_s"] >= since_s]
    opened = _incidents(later)
    closed = {line["incident"] for line in later if line["kind"] == "IncidentClosed"}
    if trial.expected.verdicts and not opened:
        return False
    if trial.expected.proof and not _proof(trial.expected, later):
        return False
    return opened <= closed and more_steps


def _is_taken_back(trial: FaultTrial) -> bool:
    """Returns whether the journal reports the end of this fault.

    A fault inside a rank ends with the rank, and the journal has no line for it.
    """
    return trial.rank < 0 or trial.kind == "slow" or not trial.expected.verdicts


def judge(
    trial: FaultTrial,
    row: FaultResult,
    lines: Sequence[DecodedLine],
    *,
    order_id: str = "",
    hit_s: float | None = None,
) -> None:
    """Fills the row; `passed` does not yet include the result of the run.

    Args:
        trial: the ordered fault.
        row: the row to fill.
        lines: journal lines of all nodes, in order of time, up to the next fault.
        order_id: id of the order.
        hit_s: time of a fault that no agent injected.
    """
    problems = [row.problem] if row.problem else []
    fired = fired_at(lines, order_id) if order_id else None
    row.fired = fired is not None or hit_s is not None
    if not row.fired:
        row.problem = "; ".join([*problems, "it has not fired"])
        return
    since_s = _time_of(fired) if fired is not None else float(hit_s or 0.0)
    if fired is not None:
        row.fired_step = fired.get("step")
    later = [line for line in lines if line["mono_s"] >= since_s]
    _in_effect(trial.expected, row, later, since_s, problems)
    _verdicts(trial.expected, row, later, since_s, problems)
    _ends(trial.expected, row, later, problems)
    row.problem = "; ".join(problems)
    row.passed = not problems


def compare(row: FaultResult, trial: FaultTrial, *, difference: str, is_compared: bool) -> None:
    """Records whether the result equals that of an undisturbed run.

    Args:
        row: the judged row.
        trial: the ordered fault.
        difference: description of the first difference; empty if there is none.
        is_compared: the run is complete, and there was a result to compare.
    """
    row.equal = not difference if is_compared else None
    if difference and trial.expected.equal:
        row.fail(difference)


# --- parts of a row ---------------------------------------------------------------------------


def _in_effect(
    expected: ExpectedOutcome,
    row: FaultResult,
    later: Sequence[DecodedLine],
    since_s: float,
    problems: list[str],
) -> None:
    if not expected.proof:
        row.in_effect = True
        return
    proof = _proof(expected, later)
    row.in_effect = proof is not None
    if proof is None:
        text = f" with {expected.proof_text!r}" if expected.proof_text else ""
        problems.append(f"no sign that it was in effect: no line {expected.proof}{text}")
    elif not expected.verdicts:
        row.detected_s = round(proof["mono_s"] - since_s, 3)


def _verdicts(
    expected: ExpectedOutcome,
    row: FaultResult,
    later: Sequence[DecodedLine],
    since_s: float,
    problems: list[str],
) -> None:
    said = [line for line in later if line["kind"] == "Verdict"]
    kinds = list(dict.fromkeys(str(line["verdict"]["kind"]) for line in said))
    row.found = ", ".join(kinds) or ("suspicion" if _incidents(later) else NOTHING)
    if said:
        row.text = clean(str(said[-1]["verdict"]["text"]), 400)
    if not expected.verdicts:
        if _incidents(later):
            problems.append(f"taken for an incident: {row.text or row.found}")
        return
    right = [line for line in said if line["verdict"]["kind"] in expected.verdicts]
    if not right:
        problems.append(f"expected {row.expected}, found {row.found}")
    else:
        row.detected_s = round(right[0]["mono_s"] - since_s, 3)
        told_step = right[0].get("step")
        if row.fired_step is not None and told_step is not None and told_step >= row.fired_step:
            row.detected_steps = told_step - row.fired_step
        if expected.within_steps and (row.detected_steps or 0) > expected.within_steps:
            told = f"named after {row.detected_steps} steps"
            problems.append(f"{told}, {expected.within_steps} allowed")
        if expected.within_s and row.detected_s > expected.within_s:
            problems.append(f"named after {row.detected_s:.1f} s, {expected.within_s:g} s allowed")
        firm = said[said.index(right[0]) :]
        firm += [line for line in said if line["verdict"]["sure"] == "certain"]
        wrong = {line["verdict"]["kind"] for line in firm} - set(expected.verdicts)
        if wrong:
            problems.append(f"also taken for {', '.join(sorted(wrong))}")
    if (count := len(_incidents(later))) > expected.incidents:
        problems.append(f"{count} incidents, {expected.incidents} expected")
    _culprits(expected, row, said, problems)


def _culprits(
    expected: ExpectedOutcome, row: FaultResult, said: Sequence[DecodedLine], problems: list[str]
) -> None:
    if not expected.culprits and not expected.nodes:
        return
    row.culprits = [int(one) for one in said[-1]["verdict"]["culprits"]] if said else []
    named = [line["verdict"] for line in said]
    row.culprit_right = bool(named)
    if expected.culprits:
        wrong = [one for one in named if tuple(one["culprits"]) != expected.culprits]
        if wrong:
            row.culprit_right = False
            problems.append(f"names ranks {wrong[0]['culprits']}, not {list(expected.culprits)}")
    if expected.nodes:
        wrong = [one for one in named if tuple(one["nodes"]) != expected.nodes]
        if wrong:
            row.culprit_right = False
            problems.append(f"names nodes {wrong[0]['nodes']}, not {list(expected.nodes)}")


def _ends(
    expected: ExpectedOutcome, row: FaultResult, later: Sequence[DecodedLine], problems: list[str]
) -> None:
    closed = [line for line in later if line["kind"] == "IncidentClosed"]
    actions = [line["action"] for line in later if line["kind"] == "Action"]
    row.action = str(closed[-1]["action"]) if closed else (actions[-1] if actions else "")
    lost = [line["steps_lost"] for line in closed if line.get("steps_lost") is not None]
    row.steps_lost = sum(lost) if lost else (0 if not closed else None)
    # The downtime that the leader measured, as in status and report.
    took_s = [line["recovered_s"] for line in closed if line.get("recovered_s") is not None]
    row.recovered_s = round(sum(took_s), 3) if took_s else None
    if not closed and expected.verdicts and not expected.ends:
        problems.append("the incident was not closed")
    if expected.verdicts and expected.action and row.action not in expected.action:
        problems.append(f"did {row.action or 'nothing'}, expected {' or '.join(expected.action)}")
    if (
        expected.steps_lost is not None
        and row.steps_lost is not None
        and row.steps_lost > expected.steps_lost
    ):
        problems.append(f"{row.steps_lost} steps lost, {expected.steps_lost} allowed")


# --- lines ------------------------------------------------------------------------------------


def _proof(expected: ExpectedOutcome, later: Sequence[DecodedLine]) -> DecodedLine | None:
    """Returns the first line that exists only because the fault was in effect."""
    for line in later:
        is_kind = re.fullmatch(expected.proof, line["kind"])
        if is_kind and re.search(expected.proof_text, json.dumps(line, ensure_ascii=False)):
            return line
    return None


def _incidents(lines: Sequence[DecodedLine]) -> set[int]:
    kinds = ("Suspected", "Verdict", "Action")
    return {line["incident"] for line in lines if line["kind"] in kinds}


def _time_of(fired: DecodedLine) -> float:
    return float(fired["fired_mono_s"] if "fired_mono_s" in fired else fired["mono_s"])


def _first(lines: Sequence[DecodedLine], kind: str, **fields: object) -> DecodedLine | None:
    for line in lines:
        if line["kind"] == kind and all(line.get(key) == it for key, it in fields.items()):
            return line
    return None
