"""The order in which nodes get their ranks: the order with the smallest maximum load of a link.

Nodes of one leaf switch are interchangeable if they have no bad path of their own. They are one
kind, and an order is a sequence of kinds. If there are at most `MOST_TRIED` different sequences
(always for up to 7 nodes), all are tried. Otherwise the nodes of a leaf switch are adjacent in the
order, and so are the leaf switches under one switch. In a ring, each leaf switch then sends to one
leaf switch and receives from one, which is the minimum. Several orders of leaf switches are tried,
and nodes are exchanged until the order uses no avoidable bad path.

The load of a link is the number of times that the bytes of an all-reduce pass it, divided by its
rate relative to a usual node. Load 1 is the time in which a usual node sends these bytes once. A
ring passes 2 (n - 1) / n of the bytes from each node to the next. As in NCCL, trees come in pairs.
Each tree carries half of the bytes, once up and once down. An inner node of one tree is a leaf of
the other tree.

Rule 1: the chosen order is never worse than the given order, which stays if it is as good.
Rule 2: of orders with equal cost, the one that moves the fewest nodes is chosen.

Source: NCCL, src/graph/trees.cc (how a rank finds its parent and children).
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
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
    path_rates: Mapping[tuple[str, str], float] = field(default_factory=dict)
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
    """`node`, `uplink` or `path`."""
    name: str
    """Name of the node or switch; for a path, its source."""
    direction: str
    """`out` or `in`; for a path, its destination."""


@lru_cache(maxsize=8)
def ring_flows(count: int) -> tuple[Flow, ...]:
    share = 2 * (count - 1) / count if count else 0.0
    return tuple((place, (place + 1) % count, share) for place in range(count) if count > 1)


@lru_cache(maxsize=8)
def tree_flows(count: int) -> tuple[Flow, ...]:
    ends = [(low, high) for low in range(count) for high in _parents(low, count)]
    known = [(low, high) for low, high in ends if high is not None]
    return tuple(flow for low, high in known for flow in ((low, high, 0.5), (high, low, 0.5)))


def loads_of(
    order: Sequence[str], flows: Iterable[Flow], network: NetworkModel
) -> dict[DirectedLink, float]:
    loads: dict[DirectedLink, float] = {}
    of_leaf = {leaf: path_of(leaf, network.above) for leaf in {*network.leaves.values(), None}}
    paths = [of_leaf[network.leaves.get(node)] for node in order]
    # Each flow passes two nodes. They are summed by position, because there are thousands.
    sent, received = [0.0] * len(order), [0.0] * len(order)

    def add(kind: str, name: str, direction: str, load: float) -> None:
        link = DirectedLink(kind, name, direction)
        loads[link] = loads.get(link, 0.0) + load

    for start, end, share in flows:
        sent[start] += share
        received[end] += share
        up, down = paths[start], paths[end]
        if up != down:
            for direction, path, other in (("out", up, down), ("in", down, up)):
                for switch in path:
                    if switch not in other:
                        load = share / network.uplink_rates.get(switch, 1.0)
                        add("uplink", switch, direction, load)
        pair = order[start], order[end]
        if pair in network.path_rates:
            add("path", *pair, share / max(DEAD_RATE, network.path_rates[pair]))
    outward = _of_nodes(order, sent, "out", network)
    return loads | outward | _of_nodes(order, received, "in", network)


def _of_nodes(
    order: Sequence[str], shares: Sequence[float], direction: str, network: NetworkModel
) -> dict[DirectedLink, float]:
    return {
        DirectedLink("node", node, direction): share / network.node_rates.get(node, 1.0)
        for node, share in zip(order, shares, strict=True)
        if share > 0
    }


def cost_of(order: Sequence[str], network: NetworkModel) -> OrderCost:
    ring = loads_of(order, ring_flows(len(order)), network)
    tree = loads_of(order, tree_flows(len(order)), network)
    both = [*ring.items(), *tree.items()]
    between = sum(load for link, load in both if link.kind != "node")
    return OrderCost(_largest(ring), _largest(tree), round(between, DIGITS))


def ring_load(order: Sequence[str], network: NetworkModel) -> float:
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


MOST_TRIED = 5040
"""The orders of 7 different nodes."""
MOST_LEAVES = 6
"""Up to this number of leaves, every order is tried, 720 in all."""
MOST_WORK = 40_000
"""Limit of nodes times orders: with many nodes fewer orders, because the leader does nothing else
then."""
MOST_EXCHANGES = 8_000
"""Exchanges of two nodes tried over all orders; the first orders use them first."""


@dataclass(frozen=True, slots=True)
class NodeOrder:
    """An order, and its cost compared with the given one."""

    order: tuple[str, ...]
    cost: OrderCost
    naive: OrderCost
    """Cost of the given order."""
    moves: int
    """Nodes whose position differs from the given order."""


def order_nodes(nodes: Sequence[str], network: NetworkModel) -> NodeOrder:
    naive = cost_of(nodes, network)
    kinds = _kinds(nodes, network)
    if _num_rows(kinds) <= min(MOST_TRIED, MOST_WORK // max(1, len(nodes))):
        tried = (_placed(nodes, kinds, row) for row in _rows(Counter(kinds)))
    else:
        mend = _Mending(len(nodes), network)
        tried = (mend.mended(order) for order in _by_leaves(nodes, network))
    best, least, moves = tuple(nodes), naive, 0
    for order in tried:
        if ring_load(order, network) > least.ring:
            continue
        cost = cost_of(order, network)
        moved = sum(one != other for one, other in zip(nodes, order, strict=True))
        if (cost, moved) < (least, moves):
            best, least, moves = tuple(order), cost, moved
    return NodeOrder(best, least, naive, moves)


# --- all orders that differ -----------------------------------------------------------------------


def _kinds(nodes: Sequence[str], network: NetworkModel) -> list[Hashable]:
    """The kind of each node: an exchange of two nodes of one kind changes no cost."""
    own = {end for pair in network.path_rates for end in pair}
    return [
        node
        if node in own or node not in network.leaves
        else (network.leaves[node], network.node_rates.get(node, 1.0))
        for node in nodes
    ]


def _num_rows(kinds: Sequence[Hashable]) -> int:
    rows, placed = 1, 0
    for count in Counter(kinds).values():
        for number in range(1, count + 1):
            placed += 1
            rows = rows * placed // number
        if rows > MOST_TRIED:
            break
    return rows


def _rows(left: Counter[Hashable]) -> Iterator[list[Hashable]]:
    row: list[Hashable] = []

    def on() -> Iterator[list[Hashable]]:
        if not +left:
            yield row
            return
        for kind in list(+left):
            left[kind] -= 1
            row.append(kind)
            yield from on()
            row.pop()
            left[kind] += 1

    yield from on()


def _placed(nodes: Sequence[str], kinds: Sequence[Hashable], row: Iterable[Hashable]) -> list[str]:
    """Places nodes in a row of kinds: nodes in a position of their kind stay, others fill it."""
    row = list(row)
    movers: dict[Hashable, list[str]] = {}
    for node, kind, wanted in zip(nodes, kinds, row, strict=True):
        if kind != wanted:
            movers.setdefault(kind, []).append(node)
    fillers = {kind: iter(of) for kind, of in movers.items()}
    return [
        node if kind == wanted else next(fillers[wanted])
        for node, kind, wanted in zip(nodes, kinds, row, strict=True)
    ]


# --- leaves kept together -------------------------------------------------------------------------


def _by_leaves(nodes: Sequence[str], network: NetworkModel) -> Iterator[list[str]]:
    leaves = [network.leaves.get(node, "") for node in nodes]
    sizes = Counter(leaves)
    seen: set[tuple[str, ...]] = set()
    most = max(3, MOST_WORK // len(nodes))
    for wanted in itertools.islice(_leaf_orders(leaves, network), most):
        row = tuple(_together(wanted, network.above))
        if row not in seen:
            seen.add(row)
            yield _placed(nodes, leaves, [leaf for leaf in row for _ in range(sizes[leaf])])


def _leaf_orders(leaves: Sequence[str], network: NetworkModel) -> Iterator[Sequence[str]]:
    """Leaf orders: by mean position, by first position, by size and uplink; if few, every order."""
    sizes = Counter(leaves)
    middles = dict.fromkeys(sizes, 0.0)
    for place, leaf in enumerate(leaves):
        middles[leaf] += place / sizes[leaf]
    yield sorted(sizes, key=lambda leaf: middles[leaf])
    yield list(sizes)
    yield sorted(sizes, key=lambda leaf: (-sizes[leaf], -network.uplink_rates.get(leaf, 1.0)))
    if len(sizes) <= MOST_LEAVES:
        yield from itertools.permutations(sizes)


def _together(leaves: Sequence[str], above: Mapping[str, str]) -> list[str]:
    paths = {leaf: path_of(leaf, above)[::-1] for leaf in leaves}

    def joined(some: Sequence[str], depth: int) -> Iterator[str]:
        below: dict[str, list[str]] = {}
        for leaf in some:
            switch = paths[leaf][depth] if depth < len(paths[leaf]) else leaf
            below.setdefault(switch, []).append(leaf)
        for of_switch in below.values():
            yield from of_switch if len(of_switch) == 1 else joined(of_switch, depth + 1)

    return list(joined(leaves, 0))


class _Mending:
    """Exchanges nodes of a leaf to avoid bad paths, up to `MOST_EXCHANGES`."""

    def __init__(self, count: int, network: NetworkModel) -> None:
        self._rates = network.path_rates
        self._flows: list[list[Flow]] = [[] for _ in range(count)]
        """Flows that begin or end at a position."""
        for flow in (*ring_flows(count), *tree_flows(count)):
            self._flows[flow[0]].append(flow)
            self._flows[flow[1]].append(flow)
        self._leaves = network.leaves
        self._ends = {end for pair in network.path_rates for end in pair}
        self._left = MOST_EXCHANGES

    def mended(self, order: Sequence[str]) -> list[str]:
        order = list(order)
        if not self._ends:
            return order
        places: dict[str | None, list[int]] = {}
        for place, node in enumerate(order):
            places.setdefault(self._leaves.get(node), []).append(place)
        for place in [place for place, node in enumerate(order) if node in self._ends]:
            self._mend(order, place, places[self._leaves.get(order[place])])
        return order

    def _mend(self, order: list[str], place: int, others: Sequence[int]) -> None:
        """Exchanges the node at a position with others while it has a bad path there."""
        for other in others:
            if self._left <= 0 or self._cost(order, place) == 0:
                return
            if place == other:
                continue
            self._left -= 1
            before = self._cost(order, place, other)
            order[place], order[other] = order[other], order[place]
            if self._cost(order, place, other) >= before:
                order[place], order[other] = order[other], order[place]

    def _cost(self, order: Sequence[str], *places: int) -> float:
        """The cost of the bad paths of these positions."""
        flows = {flow for place in places for flow in self._flows[place]}
        return sum(
            share / max(DEAD_RATE, self._rates[pair])
            for start, end, share in flows
            if (pair := (order[start], order[end])) in self._rates
        )
