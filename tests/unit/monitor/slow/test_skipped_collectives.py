"""Ranks that omit a collective without an error."""

import pytest

from ftrun.monitor.slow.skipped_collectives import KEPT, CollectiveCounts
from ftrun.monitor.verdicts import Confidence, Verdict, VerdictKind

NODES = {0: "a", 1: "a", 2: "b", 3: "b"}


def counted(
    made: CollectiveCounts, step: int, counts: list[int], world_size: int | None = None
) -> Verdict | None:
    reported = [(rank, ((step, calls),)) for rank, calls in enumerate(counts)]
    return made.poll(reported, world_size or len(counts), NODES)


def agreed(num_ranks: int, calls: int = 1) -> CollectiveCounts:
    """All ranks have made this number of calls in each step up to step 24."""
    made = CollectiveCounts()
    for step in (8, 16, 24):
        counted(made, step, [calls * step] * num_ranks)
    return made


def test_equal_counts_report_nothing() -> None:
    made = CollectiveCounts()
    for step in range(1, 3 * KEPT):
        assert counted(made, step, [3 * step] * 4) is None


def test_a_rank_that_leaves_one_out_is_named() -> None:
    made = agreed(4, calls=3)
    found = counted(made, 32, [96, 96, 93, 96])
    assert found is not None
    assert (found.kind, found.culprits) == (VerdictKind.SKIPPED_COLLECTIVE, (2,))
    assert (found.confidence, found.nodes, found.victims) == (Confidence.CERTAIN, ("b",), (0, 1, 3))
    assert "between steps 24 and 32" in found.text
    assert "rank 2 has called 3 fewer" in found.evidence[1]
    assert not found.act_immediately
    assert counted(made, 40, [120, 120, 117, 120]) is None, "reported once"


@pytest.mark.parametrize(
    ("counts", "culprit", "confidence", "how"),
    [
        ([32, 31], 1, Confidence.LIKELY, "rank 1 has called 1 fewer"),
        ([32, 32, 33], 2, Confidence.CERTAIN, "rank 2 has called 1 more"),
    ],
)
def test_of_two_the_one_with_fewer_and_of_three_the_one_that_differs(
    counts: list[int], culprit: int, confidence: Confidence, how: str
) -> None:
    found = counted(agreed(len(counts)), 32, counts)
    assert found is not None
    assert (found.culprits, found.confidence) == ((culprit,), confidence)
    assert how in found.evidence[1]


def test_stages_of_a_pipeline_call_differently_by_design() -> None:
    made = CollectiveCounts()
    for step in (8, 16, 24, 32):
        assert counted(made, step, [step, 2 * step]) is None


def test_a_rank_that_has_not_reported_yet_is_waited_for() -> None:
    made = agreed(2)
    assert made.poll([(0, ((32, 32),))], 2, NODES) is None
    assert made.poll([(1, ((32, 30),))], 2, NODES) is not None


def test_one_rank_has_no_other_to_differ_from() -> None:
    assert counted(CollectiveCounts(), 8, [8]) is None
