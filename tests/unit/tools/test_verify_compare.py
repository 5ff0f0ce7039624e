"""Two recorded runs are compared event by event, and the reason of a difference is named."""

from pathlib import Path

import msgspec
import pytest

from ftrun.tools.verify import compare
from ftrun.tools.verify.compare import Life, Trace, life_of
from ftrun.tools.verify.findings import find, lines_that_set, random_sources
from ftrun.tools.verify.runs import kills_at, plan_kills
from ftrun.wire.verify_records import (
    ATTACHED,
    BATCH,
    BOUNDARY,
    FORWARD,
    KILLED,
    LOSS,
    OPTIMIZER,
    STARTED,
    VerifyRecord,
)

_FIRST, _REST = range(1), range(1, 9)
_LOCAL = "local /nowhere/train.py|<module>|0|"


def turn(step: int, **differs: str) -> list[VerifyRecord]:
    """The events of one step; `differs` replaces digests by event."""

    def of(event: str, key: str) -> dict[str, str]:
        return {key: differs.get(event, f"{event} {step}")}

    return [
        VerifyRecord(BATCH, step, {**of("batch", "batch"), **of("indices", "indices")}),
        VerifyRecord(FORWARD, step, of("input", "input[0]"), where="/nowhere/train.py:7"),
        VerifyRecord(LOSS, step, of("loss", "loss")),
        VerifyRecord(OPTIMIZER, step, of("gradient", "gradient w"), what="SGD"),
        VerifyRecord(
            BOUNDARY,
            step,
            {**of("tensor", "tensor w"), **of("random", "random torch")}
            | {f"{_LOCAL}x": differs.get("x", f"x {step}"), f"{_LOCAL}t": differs.get("t", "0")},
        ),
    ]


def life(generation: int, first: int, last: int, **differs: str) -> Life:
    """A generation restored at the step before `first`; it differs in its first step."""
    start = first - 1
    state = {"tensor w": differs.pop("restored", f"tensor {start}")}
    state["random torch"] = f"random {start}"
    local = {f"{_LOCAL}x": differs.pop("x", f"x {start}"), f"{_LOCAL}t": differs.pop("t0", "0")}
    records = [
        VerifyRecord(ATTACHED, start, state, what=f"{generation}:{start}" if generation else ""),
        VerifyRecord(STARTED, start, state | local, {f"{_LOCAL}x": "tensor [2]"}),
        *turn(first, **differs),
        *(record for step in range(first + 1, last + 1) for record in turn(step)),
    ]
    return life_of(generation, records)


def killed(of: Life) -> Life:
    of.killed = VerifyRecord(KILLED, of.last_step)
    return of


REFERENCE: Trace = {0: [life(0, 1, 9)]}


def disturbed(second: Life, first: Life | None = None) -> Trace:
    return {0: [killed(first or life(0, 1, 5)), second]}


def kinds(trace: Trace) -> list[str]:
    difference = compare.first_difference(REFERENCE, trace, generations=_REST)
    noise = compare.noise(REFERENCE, trace, generations=_FIRST)
    return [finding.kind for finding in find(REFERENCE, trace, noise, difference)]


def bare(generation: int, first: int, last: int, *, by: int = 0) -> Life:
    """A generation of a script without a session, which counts `by` steps less."""
    records = [record for step in range(first, last + 1) for record in turn(step)]
    return life_of(
        generation, [msgspec.structs.replace(one, step=one.step - by) for one in records]
    )


@pytest.mark.parametrize(
    ("last", "is_complete"),
    [
        (bare(1, 1, 9), True),
        (bare(1, 5, 9, by=4), True),  # by a checkpoint of its own
        (bare(1, 1, 7), False),
        (bare(1, 5, 7, by=4), False),
        (bare(1, 1, 0), False),  # it finds itself finished
    ],
)
def test_a_script_without_a_session_has_to_reach_the_last_step(
    last: Life, is_complete: bool
) -> None:
    reference: Trace = {0: [bare(0, 1, 9)]}
    trace = {0: [killed(bare(0, 1, 5)), last]}
    assert compare.is_complete(reference, trace) is is_complete
    assert compare.first_difference(reference, trace, generations=_REST) is None


def test_a_restart_without_a_kill_is_a_failure_of_the_script() -> None:
    assert compare.own_failures(REFERENCE) == 0
    assert compare.own_failures(disturbed(life(1, 4, 9))) == 0
    trace = {0: [killed(life(0, 1, 5)), life(1, 4, 6), life(2, 5, 9)]}
    assert compare.own_failures(trace) == 1


def test_equal_runs_have_no_difference_and_no_finding() -> None:
    trace = disturbed(life(1, 5, 9))
    assert compare.first_difference(REFERENCE, trace, generations=_REST) is None
    assert kinds(trace) == []
    (restart,) = compare.restarts(trace)
    assert (restart.step, restart.resumed_from, restart.repeated) == (5, 4, 1)
    assert compare.steps_of(trace) == 9


def test_first_difference_is_the_earliest_event_of_all_ranks() -> None:
    both = {0: [life(0, 1, 9)], 1: [life(0, 1, 9)]}
    late = [killed(life(0, 1, 5)), life(1, 5, 9, tensor="other")]
    early = [life(0, 1, 5), life(1, 5, 9, loss="other")]
    found = compare.first_difference(both, {0: late, 1: early}, generations=_REST)
    assert found is not None
    assert (found.rank, found.step, found.event, found.keys) == (1, 5, LOSS, ("loss",))


def test_what_is_no_result_is_no_difference() -> None:
    trace = disturbed(life(1, 5, 9, random="other", gradient="other"))
    assert compare.first_difference(REFERENCE, trace, generations=_REST) is None


def test_difference_before_the_kill_is_of_the_script() -> None:
    trace = disturbed(life(1, 5, 9), life(0, 1, 5, loss="other"))
    found = compare.first_difference(REFERENCE, trace, generations=_FIRST)
    assert found is not None
    assert found.step == 1
    assert random_sources(REFERENCE, trace, found).names == ()


@pytest.mark.parametrize(
    ("differs", "expected"),
    [
        ("x input loss", ["prefetched batch"]),
        ("x", ["variable"]),  # no result differs
        ("restored loss", ["snapshot"]),
        ("batch", ["augmentation"]),  # the same samples with other values
        ("batch indices", ["data order"]),
        ("loss", ["unexplained"]),
    ],
)
def test_what_differs_in_the_first_step_has_a_reason(differs: str, expected: list[str]) -> None:
    second = life(1, 5, 9, **dict.fromkeys(differs.split(), "other"))
    assert kinds(disturbed(second)) == expected


def test_other_variables_next_to_a_batch_are_named_apart() -> None:
    trace = disturbed(life(1, 5, 9, x="other", t0="1", input="other"))
    assert kinds(trace) == ["prefetched batch", "variable"]


def test_variable_that_differs_without_a_failure_is_no_reason() -> None:
    """Such as the time at which the script was started."""
    first = life(0, 1, 5, t="12:00")
    assert kinds(disturbed(life(1, 5, 9, t0="13:00"), first)) == []


def test_state_that_is_changed_after_attach() -> None:
    second = life(1, 5, 9)
    assert second.started is not None
    second.started.digests["tensor w"] = "loaded"
    assert kinds(disturbed(second)) == ["overwritten"]


def test_batches_that_are_loaded_and_dropped_after_a_restart() -> None:
    second = life(1, 5, 9)
    second.turns[5][:0] = [VerifyRecord(BATCH, 5, {"batch": f"skipped {at}"}) for at in range(3)]
    assert compare.first_difference(REFERENCE, disturbed(second), generations=_REST) is None


def test_unattached_optimizer() -> None:
    second = life(1, 5, 9)
    optimizer = next(r for r in second.turns[6] if r.event == OPTIMIZER)
    optimizer.notes["is_attached"] = "0"
    assert kinds(disturbed(second)) == ["unattached optimizer"]


def test_weights_that_a_forward_finds_changed_and_the_optimizer_does_not() -> None:
    swapped = life(0, 1, 9)
    next(r for r in swapped.turns[2] if r.event == FORWARD).notes["changed"] = "w v"
    next(r for r in swapped.turns[2] if r.event == OPTIMIZER).notes["changed"] = "v"
    (finding,) = find({0: [swapped]}, disturbed(life(1, 5, 9)), set(), None)
    assert (finding.kind, finding.names, finding.where) == (
        "weight swap",
        ("w",),
        "/nowhere/train.py:7",
    )


def test_script_without_session_that_resumes_from_its_own_checkpoint() -> None:
    def steps(first: int, last: int, of: str = "tensor") -> list[VerifyRecord]:
        return [
            VerifyRecord(BOUNDARY, at - first + 1, {"tensor w": f"{of} {at}"})
            for at in range(first, last + 1)
        ]

    reference = {0: [life_of(0, steps(1, 9))]}
    first = killed(life_of(0, steps(1, 5)))
    equal = {0: [first, life_of(1, steps(4, 9))]}
    assert compare.first_difference(reference, equal, generations=_REST) is None
    other = {0: [first, life_of(1, steps(4, 9, of="other"))]}
    assert compare.first_difference(reference, other, generations=_REST) is not None


@pytest.mark.parametrize(("steps", "count"), [(2, 1), (10, 1), (20, 2), (5, 4), (100, 7)])
def test_kills_are_inside_the_run_and_some_steps_are_repeated(steps: int, count: int) -> None:
    kills = plan_kills(steps, count)
    assert [kill.step for kill in kills] == sorted({kill.step for kill in kills})
    assert all(0 < kill.step < steps for kill in kills)
    assert kills[0].is_in_step
    if steps >= 10:
        assert any(kill.without_snapshot for kill in kills)


def test_a_kill_leaves_the_snapshots_before_the_last_one() -> None:
    first, second = kills_at([7, 8])
    assert (first.without_snapshot, second.without_snapshot) == (0, 0)


def test_lines_that_set_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "x, y = 1, 2\n"  # 1
        "def f():\n"  # 2
        "    x = 3\n"  # 3
        "    self.best = x\n"  # 4
        "for x in range(3):\n"  # 5
        "    print(x)\n"
    )
    assert lines_that_set(str(file), "x", 0) == [1, 5]
    assert lines_that_set(str(file), "x", 2) == [3]
    assert lines_that_set(str(file), "self.best", 2) == [4]
    assert lines_that_set(str(tmp_path / "none.py"), "x", 0) == []
