"""Ranks that grow until memory runs out."""

import pytest

from ftrun.monitor.slow.memory_trend import MemoryTrend
from ftrun.monitor.slow.samples import NodeSample, RankSample


def sample(at_s: float, held: list[int], left: int) -> NodeSample:
    ranks = tuple(RankSample(r, 1, (), resident_bytes=b) for r, b in enumerate(held))
    return NodeSample(int(at_s), at_s, 1.0, ranks, (), left)


def test_memory_that_runs_out_is_reported_in_time() -> None:
    made = MemoryTrend()
    found = []
    for second in range(0, 200, 5):
        held = [1 << 30, (1 << 30) + second * (10 << 20)]
        left = (6 << 30) - second * (10 << 20)
        one = made.poll([("a", sample(second, held, left))])
        found += [one] if one is not None else []
    assert len(found) == 1
    assert (found[0].culprits, found[0].nodes) == ((1,), ("a",))
    assert "rank 1 on a grows by 629 MB per minute" in found[0].text


@pytest.mark.parametrize(
    ("rate", "left"), [(0, 1 << 30), (10 << 20, 0), (10 << 20, 1 << 40), (1 << 18, 1 << 30)]
)
def test_memory_that_suffices(rate: int, left: int) -> None:
    made = MemoryTrend()
    for second in range(0, 200, 5):
        assert made.poll([("a", sample(second, [(1 << 30) + second * rate], left))]) is None


def test_one_large_allocation_is_no_trend() -> None:
    made = MemoryTrend()
    for second in range(0, 200, 5):
        held = (1 << 30) if second < 100 else (5 << 30)
        assert made.poll([("a", sample(second, [held], 1 << 30))]) is None
