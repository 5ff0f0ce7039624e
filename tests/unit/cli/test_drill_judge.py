"""A row of the drill's table matches the journal; recorded journals, and generated ones."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ftrun.records.decode import decode
from ftrun.records.faults import FaultAcceptedRecord
from ftrun.records.incidents import IncidentClosed, VerdictRecord
from ftrun.tools.drill.expected import ExpectedOutcome, expected_of
from ftrun.tools.drill.jobs import Outcome, difference, outcome_of
from ftrun.tools.drill.judge import FaultResult, Line, is_over, judge, row_of
from ftrun.tools.drill.plan import FaultTrial
from ftrun.tools.drill.series import batches, compare_all
from ftrun.wire.fault_catalog import FAULTS

RECORDED = Path(__file__).parent / "journals" / "drill.jsonl"


def trial(kind: str, rank: int = -1, **more: object) -> FaultTrial:
    expected = replace(expected_of(kind, rank=rank), **more)  # type: ignore[arg-type]
    return FaultTrial(kind, rank, -1, 0, None, None, expected)


def lines_of(fault: str) -> tuple[str, list[Line]]:
    """The order's id, and the lines from its order up to the next one."""
    lines = [found for line in RECORDED.read_bytes().splitlines() if (found := decode(line))]
    starts = [at for at, one in enumerate(lines) if isinstance(one.record, FaultAcceptedRecord)]
    for at, end in itertools.pairwise([*starts, len(lines)]):
        order = lines[at].record
        if isinstance(order, FaultAcceptedRecord) and order.fault == fault:
            return order.id, lines[at:end]
    raise AssertionError(fault)


def with_step(lines: list[Line], step: int | None) -> list[Line]:
    """The same lines; their verdicts name this step."""
    return [
        replace(line, record=msgspec.structs.replace(line.record, step=step))
        if isinstance(line.record, VerdictRecord)
        else line
        for line in lines
    ]


def judged(it: FaultTrial, lines: list[Line], order_id: str) -> FaultResult:
    row = row_of(it, "ddp", "1 x 2")
    judge(it, row, lines, order_id=order_id)
    return row


def test_every_fault_of_the_catalogue_has_an_expectation() -> None:
    for name, kind in FAULTS.items():
        found = expected_of(name, rank=1)
        assert bool(found.culprits) == (kind.by_rank and name not in ("nan", "spike"))
        assert found.within_s == 0 or found.within_s > kind.within_s


def test_rank_that_died_and_was_named() -> None:
    order_id, lines = lines_of("segv")
    (at,) = [at for at, line in enumerate(lines) if isinstance(line.record, IncidentClosed)]
    closed = msgspec.structs.replace(lines[at].record, recovered_s=1.04)  # type: ignore[type-var]
    lines[at] = replace(lines[at], record=closed)
    row = judged(trial("segv", 0), lines, order_id)
    assert row.passed, row.problem
    assert (row.found, row.culprits, row.culprit_right) == ("crash", [0], True)
    assert (row.action, row.steps_lost, row.fired_step) == ("respawn", 1, 68)
    assert row.detected_s == pytest.approx(0.101, abs=0.001)
    assert row.recovered_s == 1.04, "as in status and report, not from the injection on"


def test_steps_that_were_made_until_the_verdict_are_counted() -> None:
    order_id, lines = lines_of("segv")
    reported = with_step(lines, 80)
    assert judged(trial("segv", 0, within_steps=12), reported, order_id).detected_steps == 12
    late = judged(trial("segv", 0, within_steps=11), reported, order_id)
    assert late.problem == "named after 12 steps, 11 allowed"
    set_back = with_step(lines, 60)
    assert judged(trial("segv", 0), set_back, order_id).detected_steps is None
    unknown = with_step(lines, None)
    assert judged(trial("segv", 0), unknown, order_id).detected_steps is None


def test_hang_is_over_when_its_incident_is_closed() -> None:
    order_id, lines = lines_of("hang")
    it = trial("hang", 0)
    assert is_over(it, lines, order_id)
    unfinished = [line for line in lines if not isinstance(line.record, IncidentClosed)]
    assert not is_over(it, unfinished, order_id)
    assert judged(it, lines, order_id).passed


def test_another_rank_than_the_one_that_was_broken_is_a_wrong_culprit() -> None:
    order_id, lines = lines_of("hang")
    row = judged(trial("hang", 1), lines, order_id)
    assert row.culprit_right is False
    assert row.problem == "names ranks [0], not [1]"


def test_what_was_not_in_effect_has_not_passed() -> None:
    order_id, lines = lines_of("segv")
    row = judged(trial("abort", 0), lines, order_id)
    assert not row.in_effect
    assert row.problem == "no sign that it was active: no line workers_exited with 'SIGABRT'"
    row = judged(trial("segv", 0), lines, "another")
    assert (row.fired, row.problem) == (False, "it has not fired")


def test_another_verdict_is_not_right_even_about_the_right_rank() -> None:
    order_id, lines = lines_of("collective-skip")
    row = judged(trial("collective-skip", 0), lines, order_id)
    assert row.culprit_right
    assert row.problem.startswith(
        "expected skipped collective or replicas differ or crash, found hang in computation"
    )


def test_nothing_may_be_taken_for_an_incident_where_only_the_smp_died() -> None:
    order_id, lines = lines_of("smp-kill")
    it = trial("smp-kill")
    row = judged(it, lines, order_id)
    assert row.passed, row.problem
    assert (row.found, row.culprit_right, row.steps_lost) == ("no incident", None, 0)
    assert row.detected_s == pytest.approx(0.009, abs=0.002)
    _, others = lines_of("hang")
    row = judged(it, [*lines, *(replace(line, monotonic_s=1e9) for line in others)], order_id)
    assert row.problem.startswith("taken for an incident: rank 0 on")


def test_limits_of_time_and_steps() -> None:
    order_id, lines = lines_of("hang")
    row = judged(trial("hang", 0, within_s=5.0, steps_lost=0, action=("evict",)), lines, order_id)
    assert row.problem.split("; ") == [
        "named after 9.5 s, 5 s allowed",
        "did respawn, expected evict",
        "1 steps lost, 0 allowed",
    ]


def rows_at(*steps: int) -> list[FaultResult]:
    return [
        FaultResult("f", "f", fired=True, fired_step=step, in_effect=True, passed=True)
        for step in steps
    ]


def test_a_step_that_differs_is_the_fault_before_it_and_all_after() -> None:
    right: list[Outcome] = [{1: "a", 5: "b", 9: "c", "digest": "d"}]
    trials = [trial("segv", 0)] * 3
    rows = rows_at(2, 4, 8)
    assert compare_all(rows, trials, right, [{**right[0], 5: "x"}]) == rows[1:]
    assert [row.equal for row in rows] == [True, False, False]
    assert rows[1].problem == "the loss of step 5 of rank 0 is x, undisturbed b"
    rows = rows_at(2, 4, 8)
    assert compare_all(rows, trials, right, [{**right[0], "digest": "x"}]) == rows[2:]
    rows = rows_at(2, 4, 8)
    assert compare_all(rows, trials, right, right) == []
    assert all(row.equal for row in rows)
    rows = rows_at(2, 4, 8)
    assert compare_all(rows, trials, [], []) == []
    assert [row.equal for row in rows] == [None] * 3


def test_where_nothing_was_run_undisturbed_nothing_is_compared() -> None:
    trials = [trial("slow", rank=1)]
    rows = [row_of(one, "gpt", "1 x 2") for one in trials]
    rows[0].passed = True
    assert compare_all(rows, trials, [], [{1: "0x1p+0", "digest": "a"}]) == []
    assert (rows[0].equal, rows[0].passed) == (None, True)


def test_a_step_done_twice_with_two_results_equals_nothing(tmp_path: Path) -> None:
    notes = [
        {"kind": "step", "step": 1, "loss": "a"}, {"kind": "step", "step": 2, "loss": "b"},
        {"kind": "step", "step": 2, "loss": "c"}, {"kind": "end", "digest": "d"},
    ]  # fmt: skip
    path = tmp_path / "notes"
    path.write_text("".join(json.dumps(line) + "\n" for line in notes) + '{"step": 3, "lo')
    found = outcome_of(path)
    assert found == {1: "a", 2: "b and c", "digest": "d"}
    assert "step 2 of rank 0" in difference([{1: "a", 2: "b", "digest": "d"}], [found])


def test_what_must_be_alone_gets_a_run_of_its_own() -> None:
    both, one = trial("segv", 0), trial("nan", 0)
    assert one.expected.alone
    found = list(batches([both, both, one, both, both, both], 2))
    assert [len(batch) for batch in found] == [2, 1, 2, 1]
    assert found[1] == [one]
    assert list(batches([], 2)) == []
    assert ExpectedOutcome().verdicts == ()
