"""Predicts that memory runs out before the run ends, from the growth of ranks.

A training grows in its first steps and then stays constant. Only growth over a long time counts.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from ftrun.monitor.slow.samples import NodeSample
from ftrun.monitor.verdicts import Confidence, Verdict, VerdictKind

SOON_S = 600.0
WATCHED_S = 60.0
"""Minimum duration of the growth in seconds, with growth in each half."""

LEAST_BYTES = 256 << 20
"""Smaller total growth is ignored."""

EVERY_S = 5.0


@dataclass
class _Track:
    points: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=64))

    def add(self, at_s: float, value: int) -> None:
        if not self.points or at_s - self.points[-1][0] >= EVERY_S:
            self.points.append((at_s, value))

    def rate(self) -> float:
        """Bytes per second, if memory has grown in both halves of the time; otherwise 0."""
        if len(self.points) < 4 or self.points[-1][0] - self.points[0][0] < WATCHED_S:
            return 0.0
        (started_s, first), (end_s, last) = self.points[0], self.points[-1]
        middle = self.points[len(self.points) // 2]
        if last - first < LEAST_BYTES or not first < middle[1] < last:
            return 0.0
        steps = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(self.points)]
        # The median, because one large allocation is not a trend.
        return min((last - first) / (end_s - started_s), max(0.0, median(steps)))


class MemoryTrend:
    """State of one generation."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Track] = {}
        self._reported: set[str] = set()

    def poll(self, samples: Iterable[tuple[str, NodeSample]]) -> Verdict | None:
        """Add the newest sample of each node. A verdict is returned only once per node."""
        found: Verdict | None = None
        for node, sample in samples:
            for rank in sample.ranks:
                track = self._ranks.setdefault(rank.rank, _Track())
                track.add(sample.at_s, rank.resident_bytes)
            if node in self._reported or not sample.available_bytes:
                continue
            rates = {one.rank: self._ranks[one.rank].rate() for one in sample.ranks}
            total = sum(rates.values())
            if total > 0 and sample.available_bytes / total < SOON_S:
                self._reported.add(node)
                found = _verdict(node, sample, rates)
        return found


def _verdict(node: str, sample: NodeSample, rates: dict[int, float]) -> Verdict:
    rank = max(rates, key=lambda one: rates[one])
    held = next(one.resident_bytes for one in sample.ranks if one.rank == rank)
    left_s = sample.available_bytes / sum(rates.values())
    return Verdict(
        kind=VerdictKind.MEMORY_GROWTH,
        culprits=(rank,),
        nodes=(node,),
        text=f"rank {rank} on {node} grows by {_mb(rates[rank] * 60)} MB per minute; memory is "
        f"exhausted in about {max(1, round(left_s / 60))} min",
        evidence=(
            f"rank {rank} holds {_mb(held)} MB",
            f"{_mb(sample.available_bytes)} MB are free on {node}",
            *(f"rank {one}: {_mb(rate * 60)} MB per minute" for one, rate in rates.items() if rate),
        ),
        counter_evidence=("growth may stop by itself, as when a cache is full",),
        confidence=Confidence.LIKELY,
        fingerprint=f"memory {node}",
    )


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.0f}"
