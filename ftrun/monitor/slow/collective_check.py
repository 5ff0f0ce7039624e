"""Judges an all-reduce of known integers among nodes: which node computes wrong sums or is slow.

The nodes form a ring. Every value is known in advance, so each receiver compares each partial sum
that it receives, and continues with the right one. The first wrong hop of a sum is therefore the
only wrong one, and integers make the comparison exact. Rounds alternate between both directions:
two nodes receive from each node, and it receives from two.

Source:   the warm-up stage of TRANSOM's task life cycle (arXiv 2310.10046): a collective among the
          nodes before the training starts.

Rule 1: A node that reports a wrong sum sends the value, and this module computes the right one
        again. If the reporting node expected another value, that node is the wrong one.
Rule 2: A sender adds a digest of what it sends. If the received bytes do not match it, they were
        changed on the way, and the link is named. A node is named only if both of its links change
        bytes, and the links of no other node do.
Rule 3: A rate is used only if it is known that neither end waited long for a CPU. A node is slow if
        all links to it, or all links from it, are slow, in comparison with at least two other
        nodes. One check cannot exclude another cause, so a low rate is a warning only.
Rule 4: A node that sends no result, or ends in the middle, is neither wrong nor slow.
Rule 5: A wrong sum counts against a node only if both of its neighbours are at the other end, or
        the only one in a ring of two, and no other node is named in the same check. If several are
        named, the check itself may be at fault.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

LANES = 1 << 15
PIECE_BYTES = 8 * LANES
"""One piece of a chunk: LANES unsigned integers of 64 bits."""
MAX_NODES = 16
"""Of one ring: a larger ring would take longer, and the end of one node would cost more checks."""
SLOW_PART = 0.1
"""A node is slow below this part of the median rate of the other nodes."""
MIN_OTHERS = 2
"""With fewer other nodes, the comparison cannot show which node is the slow one."""
MAX_WAIT_SHARE = 0.3
MIN_PIECES = 4
"""From fewer pieces, a rate is not known."""
MAX_EARLIER = 4
"""Earlier results with wrong sums that a node keeps."""
MOST_BYTES_PER_S = 2.5e9
"""Upper bound of a reported rate; above it, the check measures the processor."""

_MULTIPLIER, _POSITION, _ROUND, _CHUNK, _MODULUS = 2654435761, 7919, 104729, 1299709, 65521

NodeIdentity = tuple[str, int]
"""Node id and incarnation."""
Position = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class WrongSum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first wrong value that a node has received over one hop."""

    number: int
    """Of the round."""
    chunk: Position
    terms: Count
    """Number of nodes whose contributions the sum must hold."""
    lane: Position
    received: int
    expected: int
    """What the receiver has computed."""
    is_as_sent: bool
    """The received bytes match the digest of the sender."""


class HopResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one node has received from one neighbour in the ring."""

    sender: NodeIdentity
    num_bytes: int = 0
    bytes_per_s: float = 0.0
    """Median over the pieces, each from its first to its last byte; 0: not known."""
    wrong: WrongSum | None = None


class CollectiveResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of one node in one collective check."""

    check: str
    """Digest of the leader's order."""
    count: Count
    """Number of nodes of the ring."""
    hops: tuple[HopResult, ...] = ()
    took_s: float = 0.0
    wait_share: float | None = None
    """Share of that time in which the process was ready and waited for a CPU; None: not known."""
    problem: str = ""
    """Why the check was not completed."""
    earlier: tuple["CollectiveResult", ...] = ()
    """Results of earlier checks in which this node has found wrong sums, the newest first."""

    def after(self, before: "CollectiveResult | None") -> "CollectiveResult":
        """This result, with what the node has found before."""
        if before is None:
            return self
        wrong = tuple(hop for hop in before.hops if hop.wrong is not None)
        kept = (msgspec.structs.replace(before, hops=wrong, earlier=()),) if wrong else ()
        earlier = (*self.earlier, *kept, *before.earlier)[:MAX_EARLIER]
        return msgspec.structs.replace(self, earlier=earlier)


def lane_value(lane: int) -> int:
    """The integer of this lane in the block that all contributions are multiples of."""
    return (lane + 1) * _MULTIPLIER % (1 << 32)


def factor(position: int, number: int, chunk: int) -> int:
    """Factor of one node's contribution, under 2**16: sums of 16 nodes stay under 2**52."""
    return 1 + (position * _POSITION + number * _ROUND + chunk * _CHUNK) % _MODULUS


def sum_factor(count: int, number: int, chunk: int, terms: int) -> int:
    """Factor of a partial sum: that of chunk C starts at the node in position C."""
    order = range(min(terms, MAX_NODES))  # another node has reported `terms`
    return sum(factor((chunk + at) % count, number, chunk) for at in order)


@dataclass(frozen=True, slots=True)
class WrongHop:
    """Where a wrong value has arisen: on one node, or on a link."""

    nodes: tuple[NodeIdentity, ...]
    """The node, or both ends of the link."""
    other: NodeIdentity
    """The other end, if one node is named."""
    text: str
    check: str
    count: int
    """Number of nodes of the ring."""


def wrong_hops(results: Mapping[NodeIdentity, CollectiveResult]) -> list[WrongHop]:
    """Every hop with a wrong value, each judged without the others; by node of the receiver."""
    return [
        _judged(node, hop.sender, hop.wrong, one)
        for node, result in sorted(results.items())
        for one in (result, *result.earlier)
        for hop in one.hops
        if hop.wrong is not None
    ]


def wrong_nodes(hops: Iterable[WrongHop]) -> dict[NodeIdentity, str]:
    """Nodes that have computed, or transferred, wrong values; the reasons in words."""
    by_check: dict[str, list[WrongHop]] = {}
    for hop in hops:
        by_check.setdefault(hop.check, []).append(hop)
    found: dict[NodeIdentity, str] = {}
    for one in by_check.values():
        for node, text in _wrong_nodes(one).items():
            found.setdefault(node, text)
    return found


def _wrong_nodes(hops: list[WrongHop]) -> dict[NodeIdentity, str]:
    """At most one, of one check: Rule 5."""
    others: dict[NodeIdentity, set[NodeIdentity]] = {}
    partners: dict[NodeIdentity, set[NodeIdentity]] = {}
    for hop in hops:
        if len(hop.nodes) == 1:
            others.setdefault(hop.nodes[0], set()).add(hop.other)
        else:
            for one, other in (hop.nodes, hop.nodes[::-1]):
                partners.setdefault(one, set()).add(other)
    with_both = [one for one, found in partners.items() if len(found) > 1]
    named = {*others, *(with_both if len(with_both) == 1 else ())}
    if len(named) != 1:
        return {}
    (node,) = named
    if node not in others:
        ends = " and ".join(sorted(node_id for node_id, _ in partners[node]))
        return {node: f"bytes change between it and {ends}"}
    hop = next(hop for hop in hops if hop.nodes == (node,))
    return {node: hop.text} if len(others[node]) >= min(2, hop.count - 1) else {}


def _judged(
    receiver: NodeIdentity, sender: NodeIdentity, wrong: WrongSum, result: CollectiveResult
) -> WrongHop:
    check, count = result.check, result.count
    right = lane_value(wrong.lane) * sum_factor(count, wrong.number, wrong.chunk, wrong.terms)
    values = f"round {wrong.number}, {wrong.terms} nodes: {wrong.received} instead of {right}"
    if wrong.expected != right or wrong.received == right:
        expected = f"it expected {wrong.expected}" if wrong.expected != right else "it differs"
        text = f"it compares wrongly ({values}; {expected})"
        return WrongHop((receiver,), sender, text, check, count)
    if wrong.is_as_sent:
        text = f"it computed a wrong sum, found by {receiver[0]} ({values})"
        return WrongHop((sender,), receiver, text, check, count)
    text = f"bytes have changed between {sender[0]} and {receiver[0]} ({values})"
    return WrongHop((sender, receiver), receiver, text, check, count)


def slow_nodes(results: Mapping[NodeIdentity, CollectiveResult]) -> dict[NodeIdentity, str]:
    """Nodes with a rate far below that of the others, in words; `results` is a complete ring."""
    to: dict[NodeIdentity, float] = {}
    from_: dict[NodeIdentity, float] = {}
    for sender, receiver, rate in _rates(results):
        from_[sender] = max(rate, from_.get(sender, 0.0))
        to[receiver] = max(rate, to.get(receiver, 0.0))
    rates = {one: min(to[one], from_[one]) for one in results if one in to and one in from_}
    found = {}
    for one, rate in rates.items():
        others = sorted(other for node, other in rates.items() if node != one)
        if len(others) >= MIN_OTHERS and rate < SLOW_PART * (half := others[len(others) // 2]):
            found[one] = f"{rate / 1e6:.1f} MB/s in the collective check (others {half / 1e6:.0f})"
    return found


def slowest_rate(results: Mapping[NodeIdentity, CollectiveResult]) -> float:
    """Bytes per second of the slowest hop; 0: not known."""
    rates = [hop.bytes_per_s for result in results.values() for hop in result.hops]
    return min((rate for rate in rates if rate > 0), default=0.0)


def _rates(
    results: Mapping[NodeIdentity, CollectiveResult],
) -> Iterator[tuple[NodeIdentity, NodeIdentity, float]]:
    idle = {
        one
        for one, has in results.items()
        if has.wait_share is not None and has.wait_share <= MAX_WAIT_SHARE
    }
    for receiver, result in results.items():
        for hop in result.hops:
            is_known = hop.bytes_per_s > 0 and hop.num_bytes >= MIN_PIECES * PIECE_BYTES
            if is_known and {receiver, hop.sender} <= idle:
                yield hop.sender, receiver, hop.bytes_per_s
