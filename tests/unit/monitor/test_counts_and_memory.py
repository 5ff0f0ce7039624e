"""Ranks that leave out a collective in silence; ranks that grow; samples small enough to send."""

import pytest

from ftrun.monitor.slow.memory_trend import MemoryTrend
from ftrun.monitor.slow.samples import KEPT_CALLS, RUN, NodeSample, RankSample, thinned
from ftrun.monitor.slow.skipped_collectives import KEPT, CollectiveCounts
from ftrun.monitor.verdicts import Confidence, Verdict, VerdictKind

NODES = {0: "a", 1: "a", 2: "b", 3: "b"}


def counted(
    made: CollectiveCounts, step: int, counts: list[int], world_size: int | None = None
) -> Verdict | None:
    told = [(rank, ((step, calls),)) for rank, calls in enumerate(counts)]
    return made.look(told, world_size or len(counts), NODES)


def test_equal_counts_say_nothing() -> None:
    made = CollectiveCounts()
    for step in range(1, 3 * KEPT):
        assert counted(made, step, [3 * step] * 4) is None


def test_a_rank_that_leaves_one_out_is_named() -> None:
    made = CollectiveCounts()
    for step in (8, 16, 24):
        counted(made, step, [3 * step] * 4)
    found = counted(made, 32, [96, 96, 93, 96])
    assert found is not None
    assert (found.kind, found.culprits) == (VerdictKind.SKIPPED_COLLECTIVE, (2,))
    assert (found.sure, found.nodes, found.victims) == (Confidence.CERTAIN, ("b",), (0, 1, 3))
    assert "between steps 24 and 32" in found.text
    assert "rank 2 has called 3 fewer" in found.evidence[1]
    assert not found.acts_at_once
    assert counted(made, 40, [120, 120, 117, 120]) is None, "said once"


def test_of_two_the_one_with_fewer() -> None:
    made = CollectiveCounts()
    for step in (8, 16, 24):
        counted(made, step, [step, step])
    found = counted(made, 32, [32, 31])
    assert found is not None
    assert (found.culprits, found.sure) == ((1,), Confidence.LIKELY)


def test_one_that_calls_more() -> None:
    made = CollectiveCounts()
    for step in (8, 16, 24):
        counted(made, step, [step] * 3)
    found = counted(made, 32, [32, 32, 33])
    assert found is not None
    assert "rank 2 has called 1 more" in found.evidence[1]


def test_stages_of_a_pipeline_call_differently_by_design() -> None:
    made = CollectiveCounts()
    for step in (8, 16, 24, 32):
        assert counted(made, step, [step, 2 * step]) is None


def test_a_rank_that_has_not_told_yet_is_waited_for() -> None:
    made = CollectiveCounts()
    for step in (8, 16, 24):
        counted(made, step, [step] * 2)
    assert made.look([(0, ((32, 32),))], 2, NODES) is None
    assert made.look([(1, ((32, 30),))], 2, NODES) is not None


def test_one_rank_has_nobody_to_differ_from() -> None:
    assert counted(CollectiveCounts(), 8, [8]) is None


def sample(at_s: float, held: list[int], left: int) -> NodeSample:
    ranks = tuple(RankSample(r, 1, (), resident_bytes=b) for r, b in enumerate(held))
    return NodeSample(int(at_s), at_s, 1.0, ranks, (), left)


def test_memory_that_runs_out_is_told_in_time() -> None:
    made = MemoryTrend()
    found = []
    for second in range(0, 200, 5):
        held = [1 << 30, (1 << 30) + second * (10 << 20)]
        left = (6 << 30) - second * (10 << 20)
        one = made.look([("a", sample(second, held, left))])
        found += [one] if one is not None else []
    assert len(found) == 1
    assert (found[0].culprits, found[0].nodes) == ((1,), ("a",))
    assert "rank 1 on a grows by 629 MB a minute" in found[0].text


@pytest.mark.parametrize(
    ("rate", "left"), [(0, 1 << 30), (10 << 20, 0), (10 << 20, 1 << 40), (1 << 18, 1 << 30)]
)
def test_memory_that_suffices(rate: int, left: int) -> None:
    made = MemoryTrend()
    for second in range(0, 200, 5):
        assert made.look([("a", sample(second, [(1 << 30) + second * rate], left))]) is None


def test_one_large_allocation_is_no_trend() -> None:
    made = MemoryTrend()
    for second in range(0, 200, 5):
        held = (1 << 30) if second < 100 else (5 << 30)
        assert made.look([("a", sample(second, [held], 1 << 30))]) is None


def test_thinned_samples_agree_on_what_is_left() -> None:
    one = thinned([("0", seq, 0.0) for seq in range(1, 200)] + [("1", 5, 0.0)])
    other = thinned([("0", seq, 0.0) for seq in range(7, 190)])
    assert len([entry for entry in one if entry[0] == "0"]) <= KEPT_CALLS + RUN
    common = {entry[1] for entry in one} & {entry[1] for entry in other}
    assert len(common) >= KEPT_CALLS // 3
    assert ("1", 5, 0.0) in one
    steps = {entry[1] // 2 for entry in one if entry[0] == "0"}
    whole = [step for step in steps if {2 * step, 2 * step + 1} <= {entry[1] for entry in one}]
    assert len(whole) >= len(steps) - 8, "both collectives of a step are kept"
