"""How long a megabyte takes from each node to each other: the delay matrix.

Runs in:  the agent that leads. Pure.
Takes in: `LinkSample`s, which each node's agent has from the kernel (`ftrun.agent.observe.proc`).
Gives:    a `PairDelay` for each pair of nodes that speak, in each direction: seconds per megabyte
          in
          which the sender had something on its way, the round trip, and what both were at first.
Source:   C4's latency matrix (arXiv 2406.04594).

Ranks of one node that speak with each other have no cell: no network lies between them.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

LOOKS = 3
"""That a cell's figures are taken over."""
LEFT_OUT = 2
"""Looks at a cell's beginning: connections are made, buffers grow."""
LEARNT = 8
"""Looks that make a cell's past."""
BULK_BYTES = 1 << 18
"""In one look; with less the time is the round trip's, not the rate's."""


@dataclass(frozen=True, slots=True)
class LinkSample:
    """What one node's ranks have sent to one address between two looks."""

    to_host: str
    bytes: int
    """That the other side has acknowledged."""
    busy_s: float
    """Summed over the connections: time with something on its way."""
    rtt_s: float
    """Round trip, of the connections weighted by what each has sent."""
    retransmits: int
    unacked_bytes: int
    """On its way now."""
    stalled_s: float
    """How long the connection that has waited longest has got nothing acknowledged."""

    @classmethod
    def together(cls, samples: Sequence["LinkSample"]) -> "LinkSample":
        """Several connections to one address, or several addresses of one node, as one."""
        sent = sum(one.bytes for one in samples)
        weights = [one.bytes / sent if sent else 1 / len(samples) for one in samples]
        return cls(
            to_host=samples[0].to_host,
            bytes=sent,
            busy_s=sum(one.busy_s for one in samples),
            rtt_s=sum(one.rtt_s * weight for one, weight in zip(samples, weights, strict=True)),
            retransmits=sum(one.retransmits for one in samples),
            unacked_bytes=sum(one.unacked_bytes for one in samples),
            stalled_s=max(one.stalled_s for one in samples),
        )


@dataclass(frozen=True, slots=True)
class NodeTraffic:
    """What one node has sent since its look before."""

    node: str
    span_s: float
    """Between the two looks."""
    samples: Sequence[LinkSample]


Pair = tuple[str, str]
"""Sender and receiver."""


@dataclass(frozen=True, slots=True)
class PairDelay:
    """From one node to another, over the last looks."""

    sender: str
    receiver: str
    s_per_mb: float | None
    """None: too little was sent in the first looks, or there were not enough of them yet."""
    rtt_s: float
    busy_share: float
    """Of the time; above 1 with several connections."""
    retransmits: int
    stalled_s: float
    past_s_per_mb: float | None = None
    """In the first looks; None where `s_per_mb` is."""
    past_rtt_s: float | None = None
    """None: not known yet; such a cell is not judged."""

    @property
    def pair(self) -> Pair:
        return (self.sender, self.receiver)


@dataclass
class _Kept:
    looks: deque[tuple[float, LinkSample]] = field(default_factory=lambda: deque(maxlen=LOOKS))
    count: int = 0
    first_s_per_mb: list[float] = field(default_factory=list)
    first_rtt_s: list[float] = field(default_factory=list)


class DelayMatrix:
    """All pairs of one generation."""

    def __init__(self) -> None:
        self._kept: dict[Pair, _Kept] = {}

    def look(self, looks: Iterable[NodeTraffic], hosts: Mapping[str, str]) -> None:
        """Take in what nodes have sent.

        Args:
            looks: of some nodes or all; each node's are taken in the order they come.
            hosts: the node of each address. Addresses that are no node's are left out: a rank may
                read its data from anywhere.
        """
        for look in looks:
            parts: dict[Pair, list[LinkSample]] = {}
            for sample in look.samples:
                receiver = hosts.get(sample.to_host, look.node)
                if receiver != look.node:
                    parts.setdefault((look.node, receiver), []).append(sample)
            for pair, samples in parts.items():
                self._add(self._kept.setdefault(pair, _Kept()), look.span_s, samples)

    def cells(self) -> list[PairDelay]:
        """Of each pair that has been seen often enough, in order."""
        seen = (one for one in sorted(self._kept.items()) if len(one[1].looks) == LOOKS)
        return [_cell(pair, kept) for pair, kept in seen]

    def _add(self, kept: _Kept, span_s: float, samples: Sequence[LinkSample]) -> None:
        sample = LinkSample.together(samples)
        kept.looks.append((span_s, sample))
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
    samples = [sample for _, sample in kept.looks]
    all_of_it = LinkSample.together(samples)
    is_learnt = len(kept.first_rtt_s) == LEARNT
    was_bulk = is_learnt and len(kept.first_s_per_mb) > LEARNT // 2
    return PairDelay(
        sender=pair[0],
        receiver=pair[1],
        s_per_mb=median(map(_s_per_mb, samples)) if was_bulk else None,
        rtt_s=median(sample.rtt_s for sample in samples),
        busy_share=all_of_it.busy_s / max(1e-9, sum(span_s for span_s, _ in kept.looks)),
        retransmits=all_of_it.retransmits,
        stalled_s=samples[-1].stalled_s,
        past_s_per_mb=median(kept.first_s_per_mb) if was_bulk else None,
        past_rtt_s=median(kept.first_rtt_s) if is_learnt else None,
    )
