"""What a run's journal says about a fault that was ordered: a row of the drill's table.

Runs in:  cli. Pure.
Takes in: a trial, and the journal lines from the order to the time when it was over.
Gives:    a `FaultResult`; `is_over`, so that a drill knows when to go on.

Rule 1: a fault that was not in effect has not been passed, whatever the run did.
Rule 2: a verdict that is only likely may be followed by a better one of the same rank.
Rule 3: what is said between this fault and the next is about this fault. Whoever else is named
        there is named wrongly.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ftrun.cli.screen.report_clean import clean
from ftrun.tools.drill.expected import ExpectedOutcome
from ftrun.tools.drill.plan import FaultTrial

DecodedLine = dict[str, Any]

NOTHING = "no incident"


@dataclass(slots=True)
class FaultResult:
    """What one fault has shown."""

    fault: str
    kind: str
    target: str = ""
    job: str = ""
    nodes: str = ""
    """`2 x 2`: nodes times ranks on each; `+ 1` spares."""
    expected: str = ""
    found: str = ""
    """Kinds of verdict, in the order of time."""
    fired: bool = False
    fired_step: int | None = None
    in_effect: bool = False
    detected_s: float | None = None
    """From the fault to the verdict; where none is to be given, to the line that proves it."""
    detected_steps: int | None = None
    """Steps that were made between the two, as the lead knew of them; None where no step is known,
    and where the run was set back in between."""
    recovered_s: float | None = None
    """From the fault to the end of the incident: every rank is further than before."""
    culprits: list[int] = field(default_factory=list)
    culprit_right: bool | None = None
    """None: nobody had to be named."""
    action: str = ""
    steps_lost: int | None = None
    equal: bool | None = None
    """None: not compared."""
    text: str = ""
    """The verdict in one sentence."""
    passed: bool = False
    problem: str = ""
    run: str = ""
    """Folder of the run below that of the drill."""

    def fail(self, problem: str) -> None:
        """Add what is not as it should be."""
        self.problem = "; ".join([self.problem, problem] if self.problem else [problem])
        self.passed = False


def row_of(trial: FaultTrial, job: str, nodes: str) -> FaultResult:
    """Of a fault that has not been made yet."""
    wanted = " or ".join(trial.expected.verdicts) or NOTHING
    return FaultResult(trial.name, trial.kind, trial.target, job, nodes, expected=wanted)


def fired_at(lines: Sequence[DecodedLine], order_id: str) -> DecodedLine | None:
    """The line that says that this order has fired, the first of several."""
    return _first(lines, "FaultFired", id=order_id)


def is_over(
    trial: FaultTrial, lines: Sequence[DecodedLine], order_id: str, *, more_steps: bool
) -> bool:
    """Whether all that can follow has followed.

    Args:
        trial: what was ordered.
        lines: of all nodes, in the order of time.
        order_id: of the order.
        more_steps: as many steps as shall lie between two faults were made after it.
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
    """Every incident since then is closed, and there was one if there had to be one."""
    later = [line for line in lines if line["mono_s"] >= since_s]
    opened = _incidents(later)
    closed = {line["incident"] for line in later if line["kind"] == "IncidentClosed"}
    if trial.expected.verdicts and not opened:
        return False
    if trial.expected.proof and not _proof(trial.expected, later):
        return False
    return opened <= closed and more_steps


def _is_taken_back(trial: FaultTrial) -> bool:
    """What a rank does to itself ends with the rank, and nothing is told of it."""
    return trial.rank < 0 or trial.kind == "slow" or not trial.expected.verdicts


def judge(
    trial: FaultTrial,
    row: FaultResult,
    lines: Sequence[DecodedLine],
    *,
    order_id: str = "",
    hit_s: float | None = None,
) -> None:
    """Fill the row; `passed` is only what can be said without the result of the run.

    Args:
        trial: what was ordered.
        row: of it.
        lines: of all nodes, in the order of time, up to the next fault.
        order_id: of the order.
        hit_s: when it was done, where no agent was asked to do it.
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
    """Put into the row whether the result is that of an undisturbed run.

    Args:
        row: already judged.
        trial: what was ordered.
        difference: the first one, in words; empty: there is none.
        is_compared: the run came to its end, and there was something to compare.
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
    # The downtime as the leader has measured it: the same figure as in status and report.
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
    """The first line that only stands there because the fault was in effect."""
    for line in later:
        is_kind = re.fullmatch(expected.proof, line["kind"])
        if is_kind and re.search(expected.proof_text, json.dumps(line, ensure_ascii=False)):
            return line
    return None


def _incidents(lines: Sequence[DecodedLine]) -> set[int]:
    """Numbers of those that are spoken of."""
    kinds = ("Suspected", "Verdict", "Action")
    return {line["incident"] for line in lines if line["kind"] in kinds}


def _time_of(fired: DecodedLine) -> float:
    return float(fired["fired_mono_s"] if "fired_mono_s" in fired else fired["mono_s"])


def _first(lines: Sequence[DecodedLine], kind: str, **fields: object) -> DecodedLine | None:
    for line in lines:
        if line["kind"] == kind and all(line.get(key) == it for key, it in fields.items()):
            return line
    return None
