"""Which repeated steps are compared with which earlier ones, and the report."""

from typing import Any

import pytest

from ftrun.ids import Version, version
from ftrun.monitor.repeat_check import (
    KEPT,
    KEPT_STEPS,
    LATE_STEPS,
    BoundaryRecord,
    Execution,
    RankRecords,
    Repeat,
    RepeatCheck,
    RepeatOutcome,
)

NAMES = ("model.first", "model.last")
SAVED = version(0, 10)
EQUAL = "losses and parameter samples bitwise equal"


def record(loss: int | None, first: int = 1, last: int = 1) -> BoundaryRecord:
    return BoundaryRecord(loss, 0b11, first.to_bytes(4, "little") + last.to_bytes(4, "little"))


class Node:
    """One agent's node, generation after generation."""

    def __init__(self) -> None:
        self.check = RepeatCheck()
        self.number = -1

    def start(
        self,
        restored: Version | None = None,
        *,
        ranks: tuple[int, ...] = (0,),
        world_size: int = 2,
        skipped: int = 0,
        is_resized: bool = False,
        generation: int | None = None,
    ) -> None:
        self.number = self.number + 1 if generation is None else generation
        self.check.begin(
            Execution(
                self.number,
                restored,
                world_size,
                skipped,
                is_resized,
                {rank: RankRecords() for rank in ranks},
            )
        )

    def repeat(
        self, restored: Version | None, last: int, *, extra: int = 0, since: int = 0
    ) -> None:
        """Starts from a version, and makes the steps up to `last`."""
        self.start(restored)
        self.steps(restored.step + 1 if restored else 1, last, extra=extra, since=since)

    def steps(
        self, first: int, last: int, *, rank: int = 0, extra: int = 0, since: int = 0
    ) -> None:
        """Records these steps; from `since` on they differ by `extra`."""
        more = {step: extra if step >= since else 0 for step in range(first, last + 1)}
        records = {step: record(100 * step + add, 1 + add) for step, add in more.items()}
        self.put(records, rank=rank)

    def put(
        self, records: dict[int, BoundaryRecord], *, rank: int = 0, names: tuple[str, ...] = NAMES
    ) -> None:
        assert self.check.current is not None
        self.check.current.ranks[rank].add(names, records)

    @property
    def result(self) -> Repeat:
        return self.check.result(attached=True)


@pytest.fixture
def node() -> Node:
    """One rank of two; its first generation has passed step 12."""
    made = Node()
    made.start()
    made.steps(1, 12)
    return made


def test_equal_steps(node: Node) -> None:
    node.start(SAVED)
    assert not node.check.is_over()
    node.steps(11, 11)
    assert not node.check.is_over()
    assert node.result.text == f"repeated 1 step: {EQUAL}"
    node.steps(12, 12)
    assert node.check.is_over()
    assert node.result == Repeat(RepeatOutcome.EQUAL, f"repeated 2 steps: {EQUAL}", 2, 2)
    assert not node.result.is_warning


def test_the_first_different_loss_is_named(node: Node) -> None:
    node.repeat(SAVED, 14, extra=1, since=12)
    assert node.check.is_over()
    result = node.result
    assert result.outcome is RepeatOutcome.DIFFERS
    assert (result.step, result.rank, result.what) == (12, 0, "loss")
    assert result.text.startswith(
        "repeated steps differ from the first execution: first at step 12 in loss on rank 0; either"
    )
    assert result.is_warning


def test_a_loss_that_differs_alone_is_reported(node: Node) -> None:
    node.start(SAVED)
    node.put({11: BoundaryRecord(7)})
    assert not node.result.text.endswith("parameters are equal")
    node.put({12: record(7)})
    assert node.result.text.endswith("; the sampled parameters are equal")
    node.put({12: record(7, 2)})
    assert not node.result.text.endswith("parameters are equal")


def test_the_first_different_parameter_is_named(node: Node) -> None:
    node.start(SAVED)
    node.put({11: record(1100), 12: record(1200, 1, 2)})
    assert "first at step 12 in model.last on rank 0" in node.result.text


def test_loss_comes_before_parameters_and_lower_ranks_before_higher() -> None:
    node = Node()
    node.start(ranks=(0, 1))
    node.steps(1, 12)
    node.steps(1, 12, rank=1)
    node.start(SAVED, ranks=(0, 1))
    node.put({11: record(1100, 5), 12: record(1200)})
    node.put({11: record(7, 5), 12: record(7)}, rank=1)
    assert "first at step 11 in loss on rank 1" in node.result.text


@pytest.mark.parametrize(
    ("first", "second", "outcome", "text"),
    [
        # Two equal repeats point to lost state.
        ((SAVED, 12, 1), (SAVED, 12, 1), RepeatOutcome.STATE_LOST,
         "first at step 11 in loss on rank 0; two repeats are equal"),
        # A repeat that did not come as far proves nothing.
        ((SAVED, 11, 0), (SAVED, 12, 1, 12), RepeatOutcome.DIFFERS, "first at step 12"),
        # Repeats that differ show that the script is not deterministic.
        ((SAVED, 12, 1), (SAVED, 12, 2), RepeatOutcome.NOT_DETERMINISTIC,
         "repeated steps differ in each repeat: first at step 11 in loss on rank 0; the script is "
         "not deterministic"),
        # One repeat that is equal does not make the script deterministic.
        ((SAVED, 12, 1), (SAVED, 12, 0), RepeatOutcome.NOT_DETERMINISTIC, "in each repeat"),
        # First executions after the same restored version are repeats.
        ((SAVED, 20, 0), (SAVED, 20, 1, 15), RepeatOutcome.NOT_DETERMINISTIC, "first at step 15"),
        # From the beginning, a difference is the script's own.
        (None, (None, 12, 1), RepeatOutcome.NOT_DETERMINISTIC, "no snapshot was restored"),
        # A version of a repeat is compared with that repeat.
        ((SAVED, 16, 1), (version(1, 14), 16, 1), RepeatOutcome.EQUAL,
         f"repeated 2 steps: {EQUAL}"),
        # Steps before a difference are not compared with steps after it.
        ((version(0, 5), 8, 1), (version(1, 8), 12, 1), RepeatOutcome.NOT_COMPARED,
         "not compared: no step was repeated"),
        # A version that no known generation took is compared with the newest.
        ((SAVED, 20, 0), (version(-1, 15), 20, 0), RepeatOutcome.EQUAL,
         f"repeated 5 steps: {EQUAL}"),
    ],
)  # fmt: skip
def test_a_second_repeat(
    node: Node, first: tuple[Any, ...] | None, second: tuple[Any, ...],
    outcome: RepeatOutcome, text: str,
) -> None:  # fmt: skip
    """A repeat is a restored version, the last step, and the difference from a step on."""
    for restored, last, extra, *since in filter(None, (first, second)):
        node.repeat(restored, last, extra=extra, since=since[0] if since else 0)
    assert node.result.outcome is outcome
    found = node.result.text
    assert found == text if text.startswith(("repeated", "not compared")) else text in found


@pytest.mark.parametrize(("generation", "text"), [(-1, "no step was repeated"), (1, "no step was")])
def test_a_resize_ends_what_can_be_compared(node: Node, generation: int, text: str) -> None:
    node.start(version(0, 5), world_size=4, is_resized=True)
    node.steps(6, 8, extra=9)
    node.start(version(generation, 8), is_resized=True)
    node.steps(9, 12, extra=9)
    assert text in node.result.text


@pytest.mark.parametrize(("world_size", "words"), [(1, "1 rank"), (4, "4 ranks")])
def test_another_world_size_is_reported(node: Node, world_size: int, words: str) -> None:
    node.start(SAVED, world_size=world_size, is_resized=True)
    assert node.check.is_over()
    node.steps(11, 12)
    assert node.result.text == f"not compared: {words} instead of 2"
    assert not node.result.is_warning


@pytest.mark.parametrize(
    ("count", "text"), [(1, "1 batch was left out"), (3, "3 batches were left out")]
)
def test_batches_that_were_left_out_are_reported(node: Node, count: int, text: str) -> None:
    node.start(SAVED, skipped=count)
    node.steps(11, 12, extra=1)
    assert node.result.text == f"not compared: {text}"


def test_repeats_that_leave_out_the_same_batches_are_compared(node: Node) -> None:
    for _ in range(2):
        node.start(SAVED, skipped=3)
        node.steps(11, 12, extra=1)
    assert node.result.outcome is RepeatOutcome.EQUAL
    node.start(SAVED, skipped=3)
    assert node.result.text == "not compared: no step was repeated"
    node.start(SAVED, skipped=4)
    node.steps(11, 12)
    assert node.result.text == "not compared: 4 batches were left out"


def test_a_repeat_without_left_out_batches_is_compared_with_the_first(node: Node) -> None:
    node.start(SAVED, skipped=3)
    node.steps(11, 14, extra=1)
    node.repeat(SAVED, 14)
    assert node.result.text == f"repeated 2 steps: {EQUAL}"


def test_nothing_attached(node: Node) -> None:
    node.start(SAVED)
    assert node.check.result(attached=False).text == "not compared: nothing attached"


def test_no_step_was_repeated(node: Node) -> None:
    node.start(version(0, 12))
    assert node.check.is_over()
    assert node.result.text == "not compared: no step was repeated"
    node.start(SAVED)
    assert node.result.text == "not compared: no step was repeated"


def test_an_agent_without_a_record_is_reported() -> None:
    node = Node()
    node.start(SAVED, generation=1)
    node.steps(11, 12)
    assert node.result.text == "not compared: this node has no record of earlier steps"
    node.repeat(SAVED, 12)
    assert node.result.text == f"repeated 2 steps: {EQUAL}"


def test_a_rank_that_was_on_another_node_is_named(node: Node) -> None:
    node.start(SAVED, ranks=(0, 1, 3), world_size=2)
    for rank in (0, 1, 3):
        node.steps(11, 12, rank=rank)
    assert node.result.text == (f"repeated 2 steps: {EQUAL}; this node has no record of ranks 1, 3")


def test_a_rank_that_was_a_step_behind_is_not_missed() -> None:
    node = Node()
    node.start(ranks=(0, 1))
    node.steps(1, 11)
    node.steps(1, 10, rank=1)
    node.start(SAVED, ranks=(0, 1))
    node.steps(11, 11)
    assert node.check.is_over()
    assert node.result.text == f"repeated 1 step: {EQUAL}"


def test_steps_that_were_not_recorded_twice_are_not_counted() -> None:
    node = Node()
    node.start()
    node.steps(11, 12)
    node.start(version(0, 8))
    node.steps(9, 12)
    assert node.result.text == f"repeated 4 steps, 2 compared: {EQUAL}"


def test_values_that_only_one_side_knows_are_not_compared() -> None:
    nothing, lost = BoundaryRecord(None), record(None)
    node = Node()
    node.start()
    node.put({1: nothing, 2: nothing, 3: lost, 4: lost})
    node.start()
    node.put({1: nothing, 2: record(5)})
    assert node.result.text == "not compared: no value of the 2 steps was recorded twice"
    node.put({3: record(5), 4: record(6)})
    assert node.result.text == "repeated 4 steps, 2 compared: parameter samples bitwise equal"


def test_losses_alone_are_named_as_such() -> None:
    node = Node()
    node.start()
    node.put({1: BoundaryRecord(5), 2: BoundaryRecord(6)})
    node.start()
    node.put({1: BoundaryRecord(5), 2: BoundaryRecord(6)})
    assert node.result.text == "repeated 2 steps: losses bitwise equal"


def test_a_late_value_is_awaited_for_some_steps(node: Node) -> None:
    node.start(version(0, 11))
    node.put({12: record(None)})
    assert not node.check.is_over()
    node.put({12: BoundaryRecord(1200, 0b01, bytes(8))})
    assert not node.check.is_over()
    node.put({11 + LATE_STEPS: record(None)})
    assert not node.check.is_over()
    node.put({12 + LATE_STEPS: record(None)})
    assert node.check.is_over()


def test_only_parameters_with_the_same_name_are_compared(node: Node) -> None:
    node.start(SAVED)
    node.put({11: record(1100), 12: record(1200)}, names=("model.last", "model.new"))
    assert node.result.text == f"repeated 2 steps: {EQUAL}"
    node.put({12: record(1200, 9)}, names=("model.last", "model.new"))
    assert "first at step 12 in model.last on rank 0" in node.result.text


def test_another_choice_of_parameters_removes_older_records() -> None:
    known = RankRecords()
    known.add(NAMES, {1: record(1)})
    known.add(NAMES[:1], {2: record(1)})
    assert known.steps.keys() == {2}


def test_what_is_kept_is_bounded() -> None:
    known = RankRecords()
    known.add(NAMES, {step: record(step) for step in range(1, 2 * KEPT_STEPS)})
    assert min(known.steps) == KEPT_STEPS
    node = Node()
    for _ in range(KEPT + 3):
        node.start(SAVED)
        node.steps(11, 12)
    node.start(SAVED)
    kept = [one.generation for one in node.check._earlier]
    assert kept == [0, KEPT, KEPT + 1, KEPT + 2]
