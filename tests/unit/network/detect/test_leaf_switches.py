"""Leaves from probes: right where figures separate, and not known where they do not."""

import random

import pytest

from ftrun.network.detect.leaf_switches import leaves_from_probes
from ftrun.network.detect.probe_schedule import NetworkPath, schedule
from ftrun.wire.cluster.generation import PathMeasurement
from tests.unit.network.made_roads import MadeRoads, leaf_map, same_leaves

NOISE = 0.3
NARROW = 0.5
"""Of an interface's rate: a leaf's uplink, whatever number of nodes share it."""


def mistakes(truth: dict[str, str], told: dict[str, str]) -> int:
    """Pairs of nodes that are put together or apart against the truth."""
    nodes = sorted(told)
    return sum(
        (told[one] == told[other]) != (truth[one] == truth[other])
        for place, one in enumerate(nodes)
        for other in nodes[:place]
    )


def drawn(seed: int, *, least: int, uplink: float) -> MadeRoads:
    """Two to four leaves of some nodes, mixed in the order of ranks, in noise."""
    chance = random.Random(seed)
    sizes = [chance.randint(least, 6) for _ in range(chance.randint(2, 4))]
    return MadeRoads(leaf_map(*sizes, shuffled=seed), uplink=uplink, noise=NOISE, seed=seed)


def test_leaves_behind_narrow_uplinks_are_found_in_noise() -> None:
    for seed in range(60):
        made = drawn(seed, least=3, uplink=NARROW)
        assert same_leaves(made.leaves, leaves_from_probes(made.nodes, made.survey()).of), seed


@pytest.mark.parametrize("uplink", [0.7, 1.0, 2.0])
def test_where_uplinks_are_hardly_narrow_it_is_right_or_not_known(uplink: float) -> None:
    wrong = []
    for seed in range(40):
        made = drawn(seed, least=2, uplink=uplink)
        leaves = leaves_from_probes(made.nodes, made.survey())
        if mistakes(made.leaves, dict(leaves.of)):
            wrong.append(seed)
    # Two leaves of two nodes can look like one: each road had the uplink to itself.
    assert len(wrong) <= 1, wrong


def test_noise_alone_makes_no_leaves() -> None:
    for seed in range(120):
        rails = ["eth0", "eth1", "eth2"][: 1 + seed % 3]
        made = MadeRoads(leaf_map(2 + seed % 15), rails, noise=NOISE, seed=seed)
        leaves = leaves_from_probes(made.nodes, made.survey())
        assert not leaves.is_known, seed
        assert "not known" in leaves.words


@pytest.mark.parametrize("seed", range(20))
def test_some_roads_that_are_missing_or_dead_do_not_mislead(seed: int) -> None:
    made = MadeRoads(leaf_map(4, 4, shuffled=seed), uplink=NARROW, noise=NOISE, seed=seed)
    chance = random.Random(seed)
    for one, other in (chance.sample(made.nodes, 2) for _ in range(4)):
        made.roads[NetworkPath(one, other, "eth0")] = 0.0
    found = [one for one in made.survey() if chance.random() > 0.1]
    leaves = leaves_from_probes(made.nodes, found)
    assert same_leaves(made.leaves, leaves.of)


def test_a_slow_node_is_put_where_it_hangs() -> None:
    made = MadeRoads(leaf_map(4, 4), uplink=0.25, noise=0.1)
    for rail in made.rails:
        made.slow_node("n1", rail, 0.4)
    assert same_leaves(made.leaves, leaves_from_probes(made.nodes, made.survey()).of)


@pytest.mark.parametrize("slow", [{"n1"}, {"n1", "n5"}])
def test_nodes_that_are_slow_to_all_alike_have_no_leaf(slow: set[str]) -> None:
    made = MadeRoads(leaf_map(4, 4), uplink=NARROW, noise=NOISE)
    for node in slow:
        for rail in made.rails:
            made.slow_node(node, rail, 0.02)
    leaves = leaves_from_probes(made.nodes, made.survey())
    assert set(leaves.of) == {*made.nodes} - slow
    assert leaves.words.startswith(
        f"By rates of the probes, {8 - len(slow)} of 8 nodes hang on 2 leaf switches:"
    )


def test_a_node_that_is_dead_has_no_leaf_and_spoils_none() -> None:
    made = MadeRoads(leaf_map(4, 4), uplink=NARROW, noise=NOISE)
    for rail in made.rails:
        made.slow_node("n5", rail, 0.0)
    leaves = leaves_from_probes(made.nodes, made.survey())
    assert set(leaves.of) == {*made.nodes} - {"n5"}


def test_with_most_nodes_slow_nothing_is_said() -> None:
    made = MadeRoads(leaf_map(4, 4), uplink=NARROW, noise=NOISE)
    for node in made.nodes[2:]:
        for rail in made.rails:
            made.slow_node(node, rail, 0.02 * (1 + int(node[1:])))
    assert not leaves_from_probes(made.nodes, made.survey()).is_known


def test_far_leaves_are_told_by_round_trips_where_rates_are_alike() -> None:
    made = MadeRoads(leaf_map(4, 4))
    found = [
        PathMeasurement(one.source, one.destination, one.rail, rtt_s, one.bytes_per_s)
        for one in made.survey()
        for rtt_s in [0.0002 if made.leaves[one.source] == made.leaves[one.destination] else 0.02]
    ]
    leaves = leaves_from_probes(made.nodes, found)
    assert same_leaves(made.leaves, leaves.of)
    assert leaves.words.startswith("By round trips of the probes, 8 of 8 nodes")


def test_leaves_between_which_nothing_was_probed_are_not_told_apart() -> None:
    made = MadeRoads(leaf_map(4, 4, 4), uplink=NARROW)
    unseen = {"sw0", "sw2"}
    found = [
        one
        for one in made.survey()
        if {made.leaves[one.source], made.leaves[one.destination]} != unseen
    ]
    assert not leaves_from_probes(made.nodes, found).is_known


def test_leaves_are_named_in_the_order_in_which_they_are_met() -> None:
    made = MadeRoads({"a": "x", "b": "y", "c": "y", "d": "x"}, uplink=NARROW)
    found = [*made.survey(), PathMeasurement("a", "stranger", "eth0", 0.001, 1e9)]
    leaves = leaves_from_probes(made.nodes, found)
    assert leaves.of == {"a": "leaf0", "b": "leaf1", "c": "leaf1", "d": "leaf0"}


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_of_very_few_nodes_nothing_can_be_known(count: int) -> None:
    made = MadeRoads(leaf_map(*[1] * count), uplink=0.1)
    assert not leaves_from_probes(made.nodes, made.survey()).is_known


def test_a_sample_of_many_nodes_is_enough_where_leaves_lie_side_by_side() -> None:
    made = MadeRoads(leaf_map(16, 16, 16, 16), uplink=NARROW, noise=NOISE)
    plan = schedule(made.nodes, dict.fromkeys(made.rails, made.nodes), most_rounds=120)
    assert plan.coverage < 0.6
    leaves = leaves_from_probes(made.nodes, made.survey(plan))
    assert same_leaves(made.leaves, leaves.of)


def test_many_nodes_with_too_few_partners_are_not_put_in_clusters() -> None:
    made = MadeRoads(leaf_map(35, 35), uplink=1.0)
    few = schedule(made.nodes, dict.fromkeys(made.rails, made.nodes), most_rounds=8)
    leaves = leaves_from_probes(made.nodes, made.survey(few))
    assert not leaves.is_known
    assert "too few others" in leaves.words
