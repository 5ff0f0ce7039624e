"""Delay matrix: seconds per megabyte from each node to each other node.

Source:   C4's latency matrix (arXiv 2406.04594).

Traffic between ranks of one node has no cell, because no network is between them.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

MAX_SAMPLES = 3
"""Number of samples from which a cell's values are computed."""
LEFT_OUT = 2
"""Samples ignored at a cell's start, because connections are set up and buffers grow."""
LEARNT = 8
"""Number of samples that form a cell's past."""
BULK_BYTES = 1 << 18
"""Minimum bytes of a sample for a rate. With fewer bytes, the time shows the round trip."""


@dataclass(frozen=True, slots=True)
class LinkSample:
    """Traffic of one node's ranks to one address between two samples."""

    to_host: str
    bytes: int
    """Bytes acknowledged by the other side."""
    busy_s: float
    """Time with data in flight, summed over the connections."""
    rtt_s: float
    """Round trip: mean of the connections, weighted by the bytes that each has sent."""
    retransmits: int
    unacked_bytes: int
    """Bytes in flight now."""

    @classmethod
    def together(cls, samples: Sequence["LinkSample"]) -> "LinkSample":
        sent = sum(one.bytes for one in samples)
        weights = [one.bytes / sent if sent else 1 / len(samples) for one in samples]
        return cls(
            to_host=samples[0].to_host,
            bytes=sent,
            busy_s=sum(one.busy_s for one in samples),
            rtt_s=sum(one.rtt_s * weight for one, weight in zip(samples, weights, strict=True)),
            retransmits=sum(one.retransmits for one in samples),
            unacked_bytes=sum(one.unacked_bytes for one in samples),
        )


@dataclass(frozen=True, slots=True)
class NodeTraffic:
    """Traffic sent by one node since its previous sample."""

    node: str
    span_s: float
    """Seconds between the two samples."""
    samples: Sequence[LinkSample]


Pair = tuple[str, str]
"""Sender and receiver."""


@dataclass(frozen=True, slots=True)
class PairDelay:
    """Delay from one node to another, over the last samples."""

    sender: str
    receiver: str
    s_per_mb: float | None
    """None: there are too few samples, or the first samples had fewer than `BULK_BYTES`."""
    rtt_s: float
    busy_share: float
    """Share of the time with data in flight; above 1 with several connections."""
    retransmits: int
    past_s_per_mb: float | None = None
    """Value in the first samples; None if `s_per_mb` is None."""
    past_rtt_s: float | None = None
    """Value in the first samples; None: not known yet. Such a cell is not judged."""
    newest_s_per_mb: float | None = None
    """Of the last sample alone; None as for `s_per_mb`, or if the sample is too small."""

    @property
    def pair(self) -> Pair:
        return (self.sender, self.receiver)


@dataclass
class _Kept:
    observations: deque[tuple[float, LinkSample]] = field(
        default_factory=lambda: deque(maxlen=MAX_SAMPLES)
    )
    count: int = 0
    first_s_per_mb: list[float] = field(default_factory=list)
    first_rtt_s: list[float] = field(default_factory=list)


class DelayMatrix:
    """All pairs of one generation."""

    def __init__(self) -> None:
        self._kept: dict[Pair, _Kept] = {}

    def poll(self, observations: Iterable[NodeTraffic], hosts: Mapping[str, str]) -> None:
        """Add the traffic of some or all nodes.

        Args:
            observations: in order of time for each node.
            hosts: node of each address. Traffic to other addresses is ignored, because ranks read
                data from other hosts too.
        """
        for poll in observations:
            parts: dict[Pair, list[LinkSample]] = {}
            for sample in poll.samples:
                receiver = hosts.get(sample.to_host, poll.node)
                if receiver != poll.node:
                    parts.setdefault((poll.node, receiver), []).append(sample)
            for pair, samples in parts.items():
                self._add(self._kept.setdefault(pair, _Kept()), poll.span_s, samples)

    def cells(self) -> list[PairDelay]:
        seen = (
            one for one in sorted(self._kept.items()) if len(one[1].observations) == MAX_SAMPLES
        )
        return [_cell(pair, kept) for pair, kept in seen]

    def _add(self, kept: _Kept, span_s: float, samples: Sequence[LinkSample]) -> None:
        sample = LinkSample.together(samples)
        kept.observations.append((span_s, sample))
        if sample.bytes == 0 or len(kept.first_rtt_s) == LEARNT:
            return
        kept.count += 1
        if kept.count > LEFT_OUT:
            kept.first_rtt_s.append(sample.rtt_s)
            if sample.bytes >= BULK_BYTES:
                kept.first_s_per_mb.append(_s_per_mb(sample))


def _s_per_mb(sample: LinkSample) -> float:
    return sample.busy_s / (max(1, sample.bytes) / 1e6)


def _cell(pair: Pair, kept: _Kept) -> PairDelay:
    samples = [sample for _, sample in kept.observations]
    all_of_it = LinkSample.together(samples)
    is_learnt = len(kept.first_rtt_s) == LEARNT
    is_bulk = samples[-1].bytes >= BULK_BYTES
    was_bulk = is_learnt and len(kept.first_s_per_mb) > LEARNT // 2
    return PairDelay(
        sender=pair[0],
        receiver=pair[1],
        s_per_mb=median(map(_s_per_mb, samples)) if was_bulk else None,
        rtt_s=median(sample.rtt_s for sample in samples),
        busy_share=all_of_it.busy_s / max(1e-9, sum(span_s for span_s, _ in kept.observations)),
        retransmits=all_of_it.retransmits,
        past_s_per_mb=median(kept.first_s_per_mb) if was_bulk else None,
        past_rtt_s=median(kept.first_rtt_s) if is_learnt else None,
        newest_s_per_mb=_s_per_mb(samples[-1]) if was_bulk and is_bulk else None,
    )
