"""Ranks that grow until memory runs out."""

from collections.abc import Callable

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


GIB, MIB = 1 << 30, 1 << 20


@pytest.mark.parametrize(
    ("held", "left"),
    [
        (lambda second: GIB, GIB),
        (lambda second: GIB + second * 10 * MIB, 0),
        (lambda second: GIB + second * 10 * MIB, 1 << 40),
        (lambda second: GIB + second * MIB // 4, GIB),
        (lambda second: GIB if second < 100 else 5 * GIB, GIB),  # one large allocation is no trend
    ],
)
def test_memory_that_suffices(held: Callable[[int], int], left: int) -> None:
    made = MemoryTrend()
    for second in range(0, 200, 5):
        assert made.poll([("a", sample(second, [held(second)], left))]) is None
