"""In which order nodes get their ranks: the one with the least largest load.

Runs in:  the agent that leads. Pure; the same answer for the same nodes and network.
Takes in: nodes in the order they would have, and a `NetworkModel`.
Gives:    an `NodeOrder`.

Nodes that share a leaf, and have no bad road of their own, are alike: an order is a row of such
kinds. Where there are at most `MOST_TRIED` different rows (always so for up to 7 nodes) all are
tried. Else leaves are kept together, those under one switch side by side: in a ring each leaf then
sends to one other and receives from one, which is the least there can be. Orders of leaves are
tried, and nodes are exchanged until no road is bad that need not be.

Rule 1: an order is never worse than the one that was given, which stays if it is as good.
Rule 2: of orders that cost the same, the one is taken that moves the fewest nodes.
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
"""Orders of 7 nodes that all differ."""
MOST_LEAVES = 6
"""So many are tried in every order, 720 in all."""
MOST_WORK = 40_000
"""Nodes times orders that are tried: of many nodes fewer, as the lead does nothing else then."""
MOST_EXCHANGES = 8_000
"""Of two nodes, that are tried in all orders together; the first orders are mended first."""


@dataclass(frozen=True, slots=True)
class NodeOrder:
    """An order, and what it costs beside the one there was."""

    order: tuple[str, ...]
    cost: OrderCost
    naive: OrderCost
    """Of the order that was given."""
    moves: int
    """Nodes that are in another place than in the order that was given."""


def order_nodes(nodes: Sequence[str], network: NetworkModel) -> NodeOrder:
    """The order with the least cost that was found; the given one where none is better.

    Args:
        nodes: in the order they would have: by their names, or as in the generation before.
        network: what they hang on.
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
    """What each node is to an order: nodes of one kind can be exchanged without any change."""
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
    """Every row of these kinds, each once."""
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
    """Nodes in a row of kinds: who has a place of its kind stays, the others fill the rest."""
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
    """Orders in which each switch's nodes are together."""
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
    """Leaves as their nodes lie, as they are first met, by what they have; if few, every order."""
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
    """The same, with those that hang on one switch side by side, at each height."""
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
    """What bad roads cost, place by place."""

    def __init__(self, count: int, network: NetworkModel) -> None:
        self._rates = network.road_rates
        self._flows: list[list[Flow]] = [[] for _ in range(count)]
        """Those that begin or end at a place."""
        for flow in (*ring_flows(count), *tree_flows(count)):
            self._flows[flow[0]].append(flow)
            self._flows[flow[1]].append(flow)

    def cost(self, order: Sequence[str], *places: int) -> float:
        """Of the flows that begin or end at these places."""
        flows = {flow for place in places for flow in self._flows[place]}
        return sum(
            share / max(DEAD_RATE, self._rates[road])
            for start, end, share in flows
            if (road := (order[start], order[end])) in self._rates
        )


class _Mending:
    """Exchanges nodes of a leaf, so that fewer bad roads are used; no more often than it may."""

    def __init__(self, count: int, network: NetworkModel) -> None:
        self._roads = _Roads(count, network)
        self._leaves = network.leaves
        self._ends = {end for road in network.road_rates for end in road}
        self._left = MOST_EXCHANGES

    def mended(self, order: Sequence[str]) -> list[str]:
        """The order with its bad roads avoided, as far as that was found."""
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
        """Exchange the node at a place with others as long as it has a bad road there."""
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
