"""Judges an injected fault by the run's journal, from its order to its end.

Rule 1: A fault that was not active has not passed, whatever the run did.
Rule 2: A verdict that is only likely may be followed by a better verdict for the same rank.
Rule 3: All verdicts between a fault and the next one count for this fault. Any other culprit that
they name is wrong.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ftrun.cli.screen.text import clean
from ftrun.events import Record
from ftrun.monitor.verdicts import Confidence, Verdict
from ftrun.records.decode import JournalLine, of_kinds
from ftrun.records.faults import FaultInjected, FaultReverted
from ftrun.records.incidents import ActionTaken, IncidentClosed, SuspicionRaised, VerdictRecord
from ftrun.records.recovery import DowntimeRecord
from ftrun.tools.drill.expected import ExpectedOutcome
from ftrun.tools.drill.plan import FaultTrial

Line = JournalLine[Record]
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
    training_again_s: float | None = None
    """From the fault until every rank has completed its next step; None: training did not stop."""
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
    return FaultResult(trial.kind, trial.kind, trial.target, job, nodes, expected=wanted)


def fired_at(lines: Sequence[Line], order_id: str) -> FaultInjected | None:
    injected = (line.record for line in of_kinds(lines, FaultInjected))
    return next((one for one in injected if one.id == order_id), None)


def is_over(trial: FaultTrial, lines: Sequence[Line], order_id: str) -> bool:
    """Whether all expected incidents have occurred, and all since the fault are closed."""
    fired = fired_at(lines, order_id)
    if fired is None:
        return False
    # A fault inside a rank ends with the rank, and the journal has no line for its end.
    is_taken_back = trial.rank < 0 or trial.kind == "slow" or not trial.expected.verdicts
    reverted = (line.record.id for line in of_kinds(lines, FaultReverted))
    if trial.lasts_s and order_id not in reverted and is_taken_back:
        return False
    later = [line for line in lines if line.monotonic_s >= fired.fired_s]
    opened = _incidents(later)
    closed = {line.record.incident for line in of_kinds(later, IncidentClosed)}
    if trial.expected.verdicts and not opened:
        return False
    if trial.expected.proof and not _proof(trial.expected, later):
        return False
    return opened <= closed


def judge(
    trial: FaultTrial,
    row: FaultResult,
    lines: Sequence[Line],
    *,
    order_id: str = "",
    hit_s: float | None = None,
) -> None:
    """Fills the row, without the result of the run; `hit_s`: time of a fault made from outside."""
    fired = fired_at(lines, order_id) if order_id else None
    row.fired = fired is not None or hit_s is not None
    if not row.fired:
        row.fail("it has not fired")
        return
    since_s = fired.fired_s if fired is not None else float(hit_s or 0.0)
    if fired is not None:
        row.fired_step = fired.step
    later = [line for line in lines if line.monotonic_s >= since_s]
    _in_effect(trial.expected, row, later, since_s)
    _verdicts(trial.expected, row, later, since_s)
    _ends(trial.expected, row, later)
    recovered = (line.record.stepped_s for line in of_kinds(later, DowntimeRecord))
    stepped_s = [at_s for at_s in recovered if at_s is not None]
    row.training_again_s = round(max(stepped_s) - since_s, 3) if stepped_s else None
    row.passed = not row.problem


def compare(row: FaultResult, trial: FaultTrial, *, difference: str, is_compared: bool) -> None:
    """Records whether the result equals that of an undisturbed run; empty `difference`: it does."""
    row.equal = not difference if is_compared else None
    if difference and trial.expected.equal:
        row.fail(difference)


def _in_effect(
    expected: ExpectedOutcome, row: FaultResult, later: Sequence[Line], since_s: float
) -> None:
    if not expected.proof:
        row.in_effect = True
        return
    proof = _proof(expected, later)
    row.in_effect = proof is not None
    if proof is None:
        text = f" with {expected.proof_text!r}" if expected.proof_text else ""
        row.fail(f"no sign that it was active: no line {expected.proof}{text}")
    elif not expected.verdicts:
        row.detected_s = round(proof.monotonic_s - since_s, 3)


def _verdicts(
    expected: ExpectedOutcome, row: FaultResult, later: Sequence[Line], since_s: float
) -> None:
    printed = of_kinds(later, VerdictRecord)
    verdicts = [line.record.verdict for line in printed]
    kinds = list(dict.fromkeys(one.kind.value for one in verdicts))
    row.found = ", ".join(kinds) or ("suspicion" if _incidents(later) else NOTHING)
    if verdicts:
        row.text = clean(verdicts[-1].text, 400)
    if not expected.verdicts:
        if _incidents(later):
            row.fail(f"taken for an incident: {row.text or row.found}")
        return
    fitting = (line for line in printed if line.record.verdict.kind.value in expected.verdicts)
    right = next(fitting, None)
    if right is None:
        row.fail(f"expected {row.expected}, found {row.found}")
    else:
        row.detected_s = round(right.monotonic_s - since_s, 3)
        fired, reported = row.fired_step, right.record.step
        if fired is not None and reported is not None and reported >= fired:
            row.detected_steps = reported - fired
        if expected.within_steps and (row.detected_steps or 0) > expected.within_steps:
            row.fail(f"named after {row.detected_steps} steps, {expected.within_steps} allowed")
        if expected.within_s and row.detected_s > expected.within_s:
            row.fail(f"named after {row.detected_s:.1f} s, {expected.within_s:g} s allowed")
        firm = verdicts[printed.index(right) :]
        firm += [one for one in verdicts if one.confidence is Confidence.CERTAIN]
        wrong = {one.kind.value for one in firm} - set(expected.verdicts)
        if wrong:
            row.fail(f"also taken for {', '.join(sorted(wrong))}")
    if (count := len(_incidents(later))) > expected.incidents:
        row.fail(f"{count} incidents, {expected.incidents} expected")
    _culprits(expected, row, verdicts)


def _culprits(expected: ExpectedOutcome, row: FaultResult, named: Sequence[Verdict]) -> None:
    if not expected.culprits and not expected.nodes:
        return
    row.culprits = list(named[-1].culprits) if named else []
    row.culprit_right = bool(named)
    wanted: dict[str, tuple[object, ...]] = {"ranks": expected.culprits, "nodes": expected.nodes}
    for what, right in wanted.items():
        found = [one.culprits if what == "ranks" else one.nodes for one in named]
        wrong = [one for one in found if right and one != right]
        if wrong:
            row.culprit_right = False
            row.fail(f"names {what} {list(wrong[0])}, not {list(right)}")


def _ends(expected: ExpectedOutcome, row: FaultResult, later: Sequence[Line]) -> None:
    closed = [line.record for line in of_kinds(later, IncidentClosed)]
    actions = [line.record.action for line in of_kinds(later, ActionTaken)]
    row.action = closed[-1].action if closed else (actions[-1] if actions else "")
    lost = [one.steps_lost for one in closed if one.steps_lost is not None]
    row.steps_lost = sum(lost) if lost else (0 if not closed else None)
    # The downtime that the leader measured, as in status and report.
    took_s = [one.recovered_s for one in closed if one.recovered_s is not None]
    row.recovered_s = round(sum(took_s), 3) if took_s else None
    if not closed and expected.verdicts and not expected.ends:
        row.fail("the incident was not closed")
    if expected.verdicts and expected.action and row.action not in expected.action:
        row.fail(f"did {row.action or 'nothing'}, expected {' or '.join(expected.action)}")
    if (
        expected.steps_lost is not None
        and row.steps_lost is not None
        and row.steps_lost > expected.steps_lost
    ):
        row.fail(f"{row.steps_lost} steps lost, {expected.steps_lost} allowed")


def _proof(expected: ExpectedOutcome, later: Sequence[Line]) -> Line | None:
    """Returns the first line that exists only because the fault was active."""
    for line in later:
        is_kind = re.fullmatch(expected.proof, line.record.kind)
        if is_kind and re.search(expected.proof_text, msgspec.json.encode(line.record).decode()):
            return line
    return None


def _incidents(lines: Sequence[Line]) -> set[int]:
    return {
        line.record.incident
        for line in lines
        if isinstance(line.record, SuspicionRaised | VerdictRecord | ActionTaken)
    }
