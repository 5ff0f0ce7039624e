"""Orders: the best one for few nodes, never worse than the given one, with few moves.

Loads: the load of rings and trees on nodes, uplinks and bad paths.
"""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ftrun.network.plan import node_order as ordering
from ftrun.network.plan.node_order import (
    DirectedLink,
    NetworkModel,
    OrderCost,
    cost_of,
    loads_of,
    order_nodes,
    path_of,
    ring_flows,
    ring_load,
    tree_flows,
)
from tests.unit.network.simulated_paths import leaf_map


def moves(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


@st.composite
def networks(draw: st.DrawFn, least: int, most: int, most_leaves: int = 4) -> NetworkModel:
    """Nodes on leaves, with some bad paths, and switches above some leaves."""
    count = draw(st.integers(least, most))
    nodes = [f"n{number}" for number in range(count)]
    switches = [f"s{number}" for number in range(most_leaves)]
    leaves = {node: draw(st.sampled_from(switches)) for node in nodes}
    for node in draw(st.lists(st.sampled_from(nodes), max_size=1)):
        del leaves[node]
    ends = st.tuples(st.sampled_from(nodes), st.sampled_from(nodes))
    paths = draw(st.dictionaries(ends, st.sampled_from([0.0, 0.1, 0.4]), max_size=4))
    return NetworkModel(
        leaves,
        draw(st.dictionaries(st.sampled_from(switches), st.just("spine"))),
        uplink_rates=draw(st.dictionaries(st.sampled_from(switches), st.sampled_from([0.5, 4.0]))),
        path_rates={path: rate for path, rate in paths.items() if path[0] != path[1]},
    )


def nodes_of(network: NetworkModel) -> list[str]:
    named = {*network.leaves, *(end for path in network.path_rates for end in path)}
    return sorted(named)


@given(networks(2, 5))
@settings(max_examples=30, deadline=None)
def test_of_few_nodes_the_order_is_the_best_with_the_fewest_moves(network: NetworkModel) -> None:
    nodes = nodes_of(network)
    assume(nodes)
    found = order_nodes(nodes, network)
    all_orders = list(itertools.permutations(nodes))
    costs = {order: cost_of(order, network) for order in all_orders}
    best = min(costs.values())
    assert found.cost == best == cost_of(found.order, network)
    assert found.naive == costs[tuple(nodes)]
    fewest = min(moves(order, tuple(nodes)) for order in all_orders if costs[order] == best)
    assert found.moves == fewest == moves(found.order, tuple(nodes))


@pytest.mark.parametrize("count", [6, 7])
def test_of_seven_nodes_too(count: int) -> None:
    leaves = {f"n{number}": f"s{number % 3}" for number in range(count)}
    network = NetworkModel(leaves, path_rates={("n0", "n3"): 0.0, ("n1", "n4"): 0.2})
    best = min(cost_of(order, network) for order in itertools.permutations(leaves))
    assert order_nodes(list(leaves), network).cost == best


@given(networks(2, 24, most_leaves=5))
@settings(max_examples=30, deadline=None)
def test_an_order_is_never_worse_than_the_one_given(network: NetworkModel) -> None:
    nodes = nodes_of(network)
    found = order_nodes(nodes, network)
    assert sorted(found.order) == sorted(nodes)
    assert found.cost <= found.naive == cost_of(nodes, network)
    assert found.moves == moves(found.order, tuple(nodes))
    if found.cost == found.naive:
        assert found.order == tuple(nodes)


@given(networks(2, 6), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_a_relabelled_cluster_has_the_same_load(
    network: NetworkModel, chance: random.Random
) -> None:
    nodes = nodes_of(network)
    other, mapped = relabelled(network, nodes, chance)
    assert order_nodes(mapped, other).cost == order_nodes(nodes, network).cost


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=5),
    st.integers(0, 9),
    st.randoms(use_true_random=False),
)
@settings(max_examples=15, deadline=None)
def test_a_large_relabelled_cluster_has_the_same_load_in_a_ring(
    sizes: list[int], seed: int, chance: random.Random
) -> None:
    network = NetworkModel(leaf_map(*sizes, shuffled=seed))
    nodes = list(network.leaves)
    other, mapped = relabelled(network, nodes, chance)
    load = order_nodes(mapped, other).cost.ring
    assert load == order_nodes(nodes, network).cost.ring
    # No ring needs less: each leaf sends to another one at least once.
    assert load == ring_load(nodes, NetworkModel())


def relabelled(
    network: NetworkModel, nodes: list[str], chance: random.Random
) -> tuple[NetworkModel, list[str]]:
    """The same network with other names for nodes and switches, its nodes in another order."""
    drawn = chance.sample(range(1000), len(nodes))
    names = {node: f"m{number}" for node, number in zip(nodes, drawn, strict=True)}
    switches = sorted(
        {*network.leaves.values(), *network.above, *network.above.values(), *network.uplink_rates}
    )
    drawn = chance.sample(range(1000), len(switches))
    called = {switch: f"t{number}" for switch, number in zip(switches, drawn, strict=True)}
    other = NetworkModel(
        {names[node]: called[leaf] for node, leaf in network.leaves.items()},
        {called[one]: called[up] for one, up in network.above.items()},
        uplink_rates={called[one]: rate for one, rate in network.uplink_rates.items()},
        path_rates={
            (names[one], names[end]): rate for (one, end), rate in network.path_rates.items()
        },
    )
    mapped = [names[node] for node in nodes]
    chance.shuffle(mapped)
    return other, mapped


def test_leaves_that_take_turns_are_put_together_with_two_moves() -> None:
    leaves = {f"n{number}": f"s{number % 2}" for number in range(4)}
    found = order_nodes(list(leaves), NetworkModel(leaves))
    assert [leaves[node] for node in found.order] in (
        ["s0", "s0", "s1", "s1"],
        ["s1", "s1", "s0", "s0"],
        ["s0", "s1", "s1", "s0"],
        ["s1", "s0", "s0", "s1"],
    )
    assert (found.moves, found.naive.ring, found.cost.ring) == (2, 3.0, 1.5)


@given(st.lists(st.integers(1, 6), min_size=2, max_size=5), st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_an_order_that_was_planned_stays(sizes: list[int], seed: int) -> None:
    network = NetworkModel(leaf_map(*sizes, shuffled=seed))
    planned = order_nodes(list(network.leaves), network).order
    assert order_nodes(planned, network).moves == 0


def test_a_spare_of_the_same_leaf_moves_no_node() -> None:
    leaves = leaf_map(8, 8, 8, 8, shuffled=3)
    planned = order_nodes(list(leaves), NetworkModel(leaves)).order
    lost = planned[5]
    order = ["spare" if node == lost else node for node in planned]
    assert order_nodes(order, NetworkModel({**leaves, "spare": leaves[lost]})).moves == 0


def test_a_bad_path_inside_a_leaf_is_not_used() -> None:
    leaves = leaf_map(12, 12)
    network = NetworkModel(leaves, path_rates={("n0", "n1"): 0.0, ("n12", "n13"): 0.1})
    found = order_nodes(list(leaves), network)
    assert found.naive.ring > 1000
    whole = cost_of(list(leaves), NetworkModel(leaves))
    assert found.cost == whole
    assert found.moves <= 8


def test_leaves_under_one_switch_lie_side_by_side() -> None:
    leaves = leaf_map(6, 6, 6, 6, 6, 6, 6, 6)
    above = {f"sw{number}": f"spine{number % 2}" for number in range(8)}
    found = order_nodes(list(leaves), NetworkModel(leaves, above))
    spines = [above[leaves[node]] for node in found.order]
    changes = sum(one != other for one, other in itertools.pairwise(spines))
    assert changes == 1


def test_with_many_nodes_and_bad_paths_the_leaders_time_limits_the_probes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []

    def counted(self: ordering._Mending, order: list[str], *places: int) -> float:
        tried.append(len(places))
        return really(self, order, *places)

    really = ordering._Mending._cost
    monkeypatch.setattr(ordering._Mending, "_cost", counted)
    monkeypatch.setattr(ordering, "MOST_EXCHANGES", 50)
    nodes = [f"n{number}" for number in range(300)]
    bad = dict.fromkeys(itertools.pairwise(nodes), 0.0)
    found = order_nodes(nodes, NetworkModel(dict.fromkeys(nodes, "sw0"), path_rates=bad))
    assert sum(count == 2 for count in tried) == 100, "before and after each exchange"
    assert found.cost < found.naive


def test_rows_of_many_nodes_are_not_all_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    costs: list[int] = []

    def counted(order: Sequence[str], network: NetworkModel) -> float:
        costs.append(len(order))
        return ring_load(order, network)

    monkeypatch.setattr(ordering, "ring_load", counted)
    nodes = [f"n{number}" for number in range(2000)]
    leaves = dict.fromkeys(nodes, "sw0") | {"n7": "sw1"}
    order_nodes(nodes, NetworkModel(leaves))
    assert 0 < sum(costs) <= ordering.MOST_WORK


TWO_LEAVES = {"a": "s1", "b": "s1", "c": "s2", "d": "s2"}


def test_a_ring_passes_nearly_twice_the_bytes_from_each_to_the_next() -> None:
    assert ring_flows(4) == ((0, 1, 1.5), (1, 2, 1.5), (2, 3, 1.5), (3, 0, 1.5))
    assert ring_flows(1) == ring_flows(0) == ()


@given(st.integers(2, 300))
def test_trees_reach_all_and_carry_half_up_and_half_down(count: int) -> None:
    flows = tree_flows(count)
    assert len(flows) == 4 * (count - 1)
    assert sum(share for _, _, share in flows) == 2 * (count - 1)
    reached = {0}
    for _ in range(count.bit_length() + 1):
        reached |= {end for start, end, _ in flows if start in reached}
    assert reached == set(range(count))
    sent = [sum(share for start, _, share in flows if start == place) for place in range(count)]
    assert max(sent) <= 2


def test_leaves_kept_together_cross_once_each_way() -> None:
    loads = loads_of("abcd", ring_flows(4), NetworkModel(TWO_LEAVES))
    assert {link: load for link, load in loads.items() if link.kind == "uplink"} == {
        DirectedLink("uplink", way_of, way): 1.5 for way_of in ("s1", "s2") for way in ("out", "in")
    }
    assert loads[DirectedLink("node", "a", "out")] == loads[DirectedLink("node", "a", "in")] == 1.5


def test_leaves_that_take_turns_cross_at_every_step() -> None:
    assert ring_load("abcd", NetworkModel(TWO_LEAVES)) == 1.5
    assert ring_load("acbd", NetworkModel(TWO_LEAVES)) == 3.0
    assert cost_of("abcd", NetworkModel(TWO_LEAVES)) < cost_of("acbd", NetworkModel(TWO_LEAVES))


def test_a_narrow_uplink_carries_more_load() -> None:
    network = NetworkModel(TWO_LEAVES, uplink_rates={"s1": 0.5})
    assert ring_load("abcd", network) == 3.0


def test_switches_above_leaves_carry_what_leaves_them() -> None:
    above = {"s1": "left", "s2": "left", "s3": "right"}
    network = NetworkModel({"a": "s1", "b": "s2", "c": "s3"}, above)
    loads = loads_of("abc", ring_flows(3), network)
    assert loads[DirectedLink("uplink", "s1", "out")] == pytest.approx(4 / 3)
    assert loads[DirectedLink("uplink", "left", "out")] == pytest.approx(4 / 3)
    assert loads[DirectedLink("uplink", "right", "in")] == pytest.approx(4 / 3)
    assert path_of("s1", above) == ("s1", "left")
    assert path_of(None, above) == ()


def test_switches_that_hang_on_each_other_end_somewhere() -> None:
    assert path_of("x", {"x": "y", "y": "x"}) == ("x", "y")


def test_slow_nodes_and_bad_paths_count_by_their_rates() -> None:
    network = NetworkModel(node_rates={"b": 0.5}, path_rates={("a", "b"): 0.25, ("b", "a"): 0.0})
    loads = loads_of("ab", ring_flows(2), network)
    assert loads[DirectedLink("node", "b", "in")] == 2.0
    assert loads[DirectedLink("path", "a", "b")] == 4.0
    assert loads[DirectedLink("path", "b", "a")] == 1000.0


def test_one_node_costs_nothing() -> None:
    assert cost_of("a", NetworkModel()) == cost_of("", NetworkModel()) == OrderCost(0.0, 0.0, 0.0)


@given(st.lists(st.sampled_from("xyz"), min_size=2, max_size=12), st.randoms())
def test_names_do_not_matter(leaves: list[str], chance: random.Random) -> None:
    nodes = [f"n{number}" for number in range(len(leaves))]
    other = [f"m{number}" for number in range(len(leaves))]
    chance.shuffle(other)
    names = dict(zip("xyz", chance.sample("pqr", 3), strict=True))
    one = NetworkModel(dict(zip(nodes, leaves, strict=True)))
    two = NetworkModel({node: names[leaf] for node, leaf in zip(other, leaves, strict=True)})
    assert cost_of(nodes, one) == cost_of(other, two)
