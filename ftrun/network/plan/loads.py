"""The load of each link for a given order of nodes.

Runs in:  the agent that leads. Pure.
Takes in: an order of nodes, and a `NetworkModel`: leaf switches, and what is slower than usual.
Gives:    the load of each link for a ring and for trees, and the `OrderCost` of an order.

A load is how many times an all-reduce's bytes pass a link, divided by the link's rate relative to a
usual node: 1 is the time in which a usual node sends them once. A ring passes 2 (n - 1) / n of them
from each node to the next. Trees come in pairs, as in NCCL, each with half of the bytes, which go
up once and down once. An inner node of one tree is a leaf of the other.

Source: NCCL, src/graph/trees.cc (how a rank finds its parent and children).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

DIGITS = 9
"""Digits of a load: equal shares that are added in another order give an equal load."""
DEAD_RATE = 1e-3
"""Rate of a dead path in the cost, relative to a usual node's rate."""

Flow = tuple[int, int, float]
"""Start position, end position, and bytes relative to those of the all-reduce."""


@dataclass(frozen=True, slots=True)
class NetworkModel:
    """What an order of nodes is judged on. Rates are relative to a usual node's; default 1."""

    leaves: Mapping[str, str] = field(default_factory=dict)
    """Switch by node id; each missing node counts as alone on an unnamed switch."""
    above: Mapping[str, str] = field(default_factory=dict)
    """The switch that a switch is attached to."""
    node_rates: Mapping[str, float] = field(default_factory=dict)
    uplink_rates: Mapping[str, float] = field(default_factory=dict)
    """By switch: the rate of all that leaves it, or of all that enters it."""
    road_rates: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By source and destination: paths that are slower than the nodes at both ends."""


@dataclass(frozen=True, slots=True, order=True)
class OrderCost:
    """The cost of an order; less is better, compared field by field."""

    ring: float
    """The largest load of a link in a ring."""
    tree: float
    """Likewise in trees."""
    between: float
    """The sum of loads on uplinks and bad paths, ring and trees together."""


class DirectedLink(NamedTuple):
    """A link that carries flows, in one direction."""

    kind: str
    """`node`, `uplink` or `road`."""
    name: str
    """Name of the node or switch; for a path, its source."""
    way: str
    """`out` or `in`; for a path, its destination."""


@lru_cache(maxsize=8)
def ring_flows(count: int) -> tuple[Flow, ...]:
    share = 2 * (count - 1) / count if count else 0.0
    return tuple((place, (place + 1) % count, share) for place in range(count) if count > 1)


@lru_cache(maxsize=8)
def tree_flows(count: int) -> tuple[Flow, ...]:
    ends = [
        (place, parent)
        for place in range(count)
        for parent in _parents(place, count)
        if parent is not None
    ]
    return tuple(flow for low, high in ends for flow in ((low, high, 0.5), (high, low, 0.5)))


def loads_of(
    order: Sequence[str], flows: Iterable[Flow], network: NetworkModel
) -> dict[DirectedLink, float]:
    loads: dict[DirectedLink, float] = {}
    of_leaf = {leaf: path_of(leaf, network.above) for leaf in {*network.leaves.values(), None}}
    paths = [of_leaf[network.leaves.get(node)] for node in order]
    # Each flow passes two nodes. They are summed by position, because there are thousands.
    sent, received = [0.0] * len(order), [0.0] * len(order)

    def add(kind: str, name: str, way: str, load: float) -> None:
        link = DirectedLink(kind, name, way)
        loads[link] = loads.get(link, 0.0) + load

    for start, end, share in flows:
        sent[start] += share
        received[end] += share
        up, down = paths[start], paths[end]
        if up != down:
            for way, path, other in (("out", up, down), ("in", down, up)):
                for switch in path:
                    if switch not in other:
                        add("uplink", switch, way, share / network.uplink_rates.get(switch, 1.0))
        road = order[start], order[end]
        if road in network.road_rates:
            add("road", *road, share / max(DEAD_RATE, network.road_rates[road]))
    return (
        loads | _of_nodes(order, sent, "out", network) | _of_nodes(order, received, "in", network)
    )


def _of_nodes(
    order: Sequence[str], shares: Sequence[float], way: str, network: NetworkModel
) -> dict[DirectedLink, float]:
    return {
        DirectedLink("node", node, way): share / network.node_rates.get(node, 1.0)
        for node, share in zip(order, shares, strict=True)
        if share > 0
    }


def cost_of(order: Sequence[str], network: NetworkModel) -> OrderCost:
    ring = loads_of(order, ring_flows(len(order)), network)
    tree = loads_of(order, tree_flows(len(order)), network)
    between = sum(
        load for loads in (ring, tree) for link, load in loads.items() if link.kind != "node"
    )
    return OrderCost(_largest(ring), _largest(tree), round(between, DIGITS))


def ring_load(order: Sequence[str], network: NetworkModel) -> float:
    """The first field of the cost alone."""
    return _largest(loads_of(order, ring_flows(len(order)), network))


def path_of(switch: str | None, above: Mapping[str, str]) -> tuple[str, ...]:
    """A switch and those above it, the nearest first; empty if the node's switch is unknown."""
    path: list[str] = []
    while switch is not None and switch not in path:
        path.append(switch)
        switch = above.get(switch)
    return tuple(path)


def _largest(loads: Mapping[DirectedLink, float]) -> float:
    return round(max(loads.values(), default=0.0), DIGITS)


def _parents(place: int, count: int) -> tuple[int | None, int | None]:
    first = _parent(place, count)
    if count % 2:
        second = _parent((place - 1) % count, count)
        return first, None if second is None else (second + 1) % count
    second = _parent(count - 1 - place, count)
    return first, None if second is None else count - 1 - second


def _parent(place: int, count: int) -> int | None:
    """The parent in a tree whose leaves are the odd positions; the root is position 0."""
    if place == 0:
        return None
    bit = place & -place
    up = (place ^ bit) | (bit << 1)
    return up if up < count else place ^ bit
