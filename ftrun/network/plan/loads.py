"""How much each link carries when nodes are in a certain order.

Runs in:  the agent that leads. Pure.
Takes in: an order of nodes, and a `NetworkModel`: leaf switches, and what is slower than usual.
Gives:    the load of each link for a ring and for trees, and the `OrderCost` of an order.

A load is how many times an all-reduce's bytes pass a link, by the link's rate beside a usual
node's: 1 is what a usual node takes to send them once. A ring passes 2 (n - 1) / n of them from
each node to the next. Trees come in pairs, as in NCCL, each with half of the bytes, which go up
once and down once; a node that is inside one tree is a tip of the other.

Source: NCCL, src/graph/trees.cc (how a rank finds its parent and children).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

DIGITS = 9
"""Of a load: the same shares, added up in another order, are one load."""
DEAD_RATE = 1e-3
"""What a dead road is counted as, beside a usual node's rate."""

Flow = tuple[int, int, float]
"""From which place to which, and bytes by those of the all-reduce."""


@dataclass(frozen=True, slots=True)
class NetworkModel:
    """What an order of nodes is judged on. A rate is by a usual node's; 1 where none is given."""

    leaves: Mapping[str, str] = field(default_factory=dict)
    """Switch by node id; nodes that are not there are on a switch of nobody else's, unnamed."""
    above: Mapping[str, str] = field(default_factory=dict)
    """The switch that a switch hangs on."""
    node_rates: Mapping[str, float] = field(default_factory=dict)
    uplink_rates: Mapping[str, float] = field(default_factory=dict)
    """By switch: of all that leaves it, or all that enters."""
    road_rates: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By source and destination: roads that are slower than the nodes at both ends."""


@dataclass(frozen=True, slots=True, order=True)
class OrderCost:
    """What an order costs; the less the better, what comes first counts first."""

    ring: float
    """The largest load of a link in a ring."""
    tree: float
    """Likewise in trees."""
    between: float
    """All that passes from switch to switch, ring and trees together."""


class DirectedLink(NamedTuple):
    """One thing that carries flows, in one direction."""

    kind: str
    """`node`, `uplink` or `road`."""
    name: str
    """Of a node or a switch; of a road, where it begins."""
    way: str
    """`out` or `in`; of a road, where it ends."""


@lru_cache(maxsize=8)
def ring_flows(count: int) -> tuple[Flow, ...]:
    """What an all-reduce passes on in a ring of so many nodes."""
    share = 2 * (count - 1) / count if count else 0.0
    return tuple((place, (place + 1) % count, share) for place in range(count) if count > 1)


@lru_cache(maxsize=8)
def tree_flows(count: int) -> tuple[Flow, ...]:
    """What it passes on in a pair of trees."""
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
    """The load of each link that something passes."""
    loads: dict[DirectedLink, float] = {}
    of_leaf = {leaf: path_of(leaf, network.above) for leaf in {*network.leaves.values(), None}}
    paths = [of_leaf[network.leaves.get(node)] for node in order]
    # Each flow passes two nodes: these are added up by place, thousands at a time.
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
    """What an order costs on a network."""
    ring = loads_of(order, ring_flows(len(order)), network)
    tree = loads_of(order, tree_flows(len(order)), network)
    between = sum(
        load for loads in (ring, tree) for link, load in loads.items() if link.kind != "node"
    )
    return OrderCost(_largest(ring), _largest(tree), round(between, DIGITS))


def ring_load(order: Sequence[str], network: NetworkModel) -> float:
    """What comes first in the cost, by itself."""
    return _largest(loads_of(order, ring_flows(len(order)), network))


def path_of(switch: str | None, above: Mapping[str, str]) -> tuple[str, ...]:
    """A switch and those above it, the nearest first; none for a node whose switch is unknown."""
    path: list[str] = []
    while switch is not None and switch not in path:
        path.append(switch)
        switch = above.get(switch)
    return tuple(path)


def _largest(loads: Mapping[DirectedLink, float]) -> float:
    return round(max(loads.values(), default=0.0), DIGITS)


def _parents(place: int, count: int) -> tuple[int | None, int | None]:
    """Of a place in both trees."""
    first = _parent(place, count)
    if count % 2:
        second = _parent((place - 1) % count, count)
        return first, None if second is None else (second + 1) % count
    second = _parent(count - 1 - place, count)
    return first, None if second is None else count - 1 - second


def _parent(place: int, count: int) -> int | None:
    """Of a place in a tree whose tips are the odd places; the root is place 0."""
    if place == 0:
        return None
    bit = place & -place
    up = (place ^ bit) | (bit << 1)
    return up if up < count else place ^ bit
