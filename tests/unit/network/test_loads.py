"""Loads: what rings and trees of nodes put on nodes, uplinks and bad roads."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.network.plan.node_order import (
    DirectedLink,
    NetworkModel,
    OrderCost,
    cost_of,
    loads_of,
    path_of,
    ring_flows,
    ring_load,
    tree_flows,
)

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


def test_slow_nodes_and_bad_roads_count_by_their_rates() -> None:
    network = NetworkModel(node_rates={"b": 0.5}, road_rates={("a", "b"): 0.25, ("b", "a"): 0.0})
    loads = loads_of("ab", ring_flows(2), network)
    assert loads[DirectedLink("node", "b", "in")] == 2.0
    assert loads[DirectedLink("road", "a", "b")] == 4.0
    assert loads[DirectedLink("road", "b", "a")] == 1000.0


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
