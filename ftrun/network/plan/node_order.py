"""The order in which nodes get their ranks: the one with the smallest maximum load.

Runs in:  the agent that leads. Pure; the same answer for the same nodes and network.
Takes in: nodes in the order they would have, and a `NetworkModel`.
Gives:    a `NodeOrder`.

Nodes that share a leaf switch, and have no bad path of their own, are interchangeable: an order is
a row of such kinds. If there are at most `MOST_TRIED` different rows (always for up to 7 nodes),
all are tried. Otherwise nodes of a leaf are kept together, and leaves under one switch adjacent. In
a ring, each leaf then sends to one other leaf and receives from one, which is the minimum. Orders
of leaves are tried, and nodes are exchanged until no avoidable bad path is used.

Rule 1: the order is never worse than the given one, which stays if it is as good.
Rule 2: of orders with equal cost, the one that moves the fewest nodes is taken.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ftrun.network.plan.loads import (
    DEAD_RATE,
    Flow,
    NetworkModel,
    OrderCost,
    cost_of,
    path_of,
    ring_flows,
    ring_load,
    tree_flows,
)

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
    """The order with the least cost that was found; the given one if none is better.

    Args:
        nodes: in the order they would have: by their names, or as in the generation before.
        network: the switches and rates.
    """
    naive = cost_of(nodes, network)
    kinds = _kinds(nodes, network)
    if _num_rows(kinds) <= min(MOST_TRIED, MOST_WORK // max(1, len(nodes))):
        tried = (_seated(nodes, kinds, row) for row in _rows(Counter(kinds)))
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
    own = {end for road in network.road_rates for end in road}
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


def _seated(nodes: Sequence[str], kinds: Sequence[Hashable], row: Iterable[Hashable]) -> list[str]:
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
            yield _seated(nodes, leaves, [leaf for leaf in row for _ in range(sizes[leaf])])


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
            below.setdefault(paths[leaf][depth] if depth < len(paths[leaf]) else leaf, []).append(
                leaf
            )
        for of_switch in below.values():
            yield from of_switch if len(of_switch) == 1 else joined(of_switch, depth + 1)

    return list(joined(leaves, 0))


class _Roads:
    """The cost of bad paths, by position."""

    def __init__(self, count: int, network: NetworkModel) -> None:
        self._rates = network.road_rates
        self._flows: list[list[Flow]] = [[] for _ in range(count)]
        """Flows that begin or end at a position."""
        for flow in (*ring_flows(count), *tree_flows(count)):
            self._flows[flow[0]].append(flow)
            self._flows[flow[1]].append(flow)

    def cost(self, order: Sequence[str], *places: int) -> float:
        flows = {flow for place in places for flow in self._flows[place]}
        return sum(
            share / max(DEAD_RATE, self._rates[road])
            for start, end, share in flows
            if (road := (order[start], order[end])) in self._rates
        )


class _Mending:
    """Exchanges nodes of a leaf to avoid bad paths, up to `MOST_EXCHANGES`."""

    def __init__(self, count: int, network: NetworkModel) -> None:
        self._roads = _Roads(count, network)
        self._leaves = network.leaves
        self._ends = {end for road in network.road_rates for end in road}
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
        cost = self._roads.cost
        for other in others:
            if self._left <= 0 or cost(order, place) == 0:
                return
            if place == other:
                continue
            self._left -= 1
            before = cost(order, place, other)
            order[place], order[other] = order[other], order[place]
            if cost(order, place, other) >= before:
                order[place], order[other] = order[other], order[place]
