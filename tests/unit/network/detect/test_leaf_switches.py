"""Leaf switches: from configuration, and from probes, where measurements separate them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.erasure.groups import make_groups
from ftrun.errors import UsageError
from ftrun.network.detect.leaf_switches import (
    LeafSwitches,
    group_domains,
    leaves_from_file,
    leaves_from_labels,
    leaves_from_probes,
    leaves_from_slurm,
    names_of_list,
)
from ftrun.network.detect.probe_schedule import NetworkPath, schedule
from ftrun.wire.cluster.generation import PathMeasurement
from tests.unit.network.simulated_paths import SimulatedPaths, leaf_map, same_leaves

SLURM = """
# two leaves and a spine
SwitchName=leaf1 Nodes=node[01-03],gpu7   # the old rack
switchname=leaf2 nodes=node[04-06] LinkSpeed=1
SwitchName=spine Switches=leaf[1-2]
"""


def test_labels() -> None:
    leaves = leaves_from_labels({"a": "rack1", "b": "rack2", "c": ""})
    assert leaves.of == {"a": "rack1", "b": "rack2"}
    assert leaves.source == "labels"
    assert leaves.words == "By labels of the nodes, 2 of 3 nodes are attached to 2 leaf switches."


def test_without_labels_nothing_is_known() -> None:
    leaves = leaves_from_labels({"a": "", "b": ""})
    assert not leaves.is_known
    assert leaves == LeafSwitches(words="No node has a label.")


def test_a_file_of_switches_with_nodes() -> None:
    leaves = leaves_from_file({"sw1": ["a", "b"], "sw2": ["c", "other"]}, ["a", "b", "c", "d"])
    assert leaves.of == {"a": "sw1", "b": "sw1", "c": "sw2"}
    assert (leaves.source, leaves.above) == ("file", {})


def test_a_file_of_switches_below_switches() -> None:
    topology = {"core": {"spine": {"sw1": ["a"], "sw2": [7]}}, "sw3": ["b"]}
    leaves = leaves_from_file(topology, ["a", "7", "b"])
    assert leaves.of == {"a": "sw1", "7": "sw2", "b": "sw3"}
    assert leaves.above == {"sw1": "spine", "sw2": "spine", "spine": "core"}


def test_a_file_that_names_no_node_of_the_run_yields_nothing() -> None:
    assert leaves_from_file({"sw1": ["x"]}, ["a"]).source == ""


@pytest.mark.parametrize("topology", [[], "sw1", {"sw1": "a"}, {"sw1": {"sw2": None}}])
def test_a_file_of_another_form_is_refused(topology: object) -> None:
    with pytest.raises(UsageError, match="switches, each with a list of nodes"):
        leaves_from_file(topology, ["a"])


def test_a_node_on_two_switches_is_refused() -> None:
    with pytest.raises(UsageError, match="node a is attached to two switches: sw1 and sw2"):
        leaves_from_file({"sw1": ["a"], "sw2": ["a"]}, ["a"])


def test_a_switch_below_two_is_refused() -> None:
    with pytest.raises(UsageError, match="switch sw1 is attached to two switches: x and y"):
        leaves_from_file({"x": {"sw1": ["a"]}, "y": {"sw1": ["b"]}}, ["a"])


def test_slurm() -> None:
    hosts = {"n0": "node01", "n1": "node05", "n2": "gpu7", "n3": "elsewhere"}
    leaves = leaves_from_slurm(SLURM, hosts)
    assert leaves.of == {"n0": "leaf1", "n1": "leaf2", "n2": "leaf1"}
    assert leaves.source == "slurm"
    assert leaves.above == {"leaf1": "spine", "leaf2": "spine"}


def test_slurm_of_another_cluster_yields_nothing() -> None:
    assert not leaves_from_slurm(SLURM, {"n0": "x"}).is_known


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("a", ["a"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12],m3", ["n08", "n09", "n10", "n12", "m3"]),
        ("r[1-2]n[01-02]x", ["r1n01x", "r1n02x", "r2n01x", "r2n02x"]),
    ],
)
def test_lists_of_names(text: str, names: list[str]) -> None:
    assert names_of_list(text) == names


@pytest.mark.parametrize("text", ["n[a-b]", "n[]", "n[1-2-3]"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a list of names"):
        names_of_list(text)


def test_a_list_without_end_is_refused() -> None:
    with pytest.raises(UsageError, match="more than 65,536 names"):
        names_of_list("n[0-999999999]")


# --- fault domains ----------------------------------------------------------------------------


def test_labels_of_all_nodes_report_what_fails_as_one() -> None:
    labels = {"a": "r1", "b": "r2"}
    assert group_domains(["a", "b"], labels, {"a": "s1", "b": "s1"}) == labels


def test_else_leaf_switches_do() -> None:
    leaves = {"a": "s1", "b": "s2", "other": "s3"}
    assert group_domains(["a", "b"], {"a": "r1"}, leaves) == {"a": "s1", "b": "s2"}
    assert group_domains(["a", "b"], {"a": "r1", "b": "r1"}, leaves) == {"a": "s1", "b": "s2"}


def test_one_switch_for_all_yields_nothing() -> None:
    assert group_domains(["a", "b"], {"a": "r1"}, {"a": "s1", "b": "s1"}) == {"a": "r1"}
    assert group_domains(["a", "b"], {}, {}) == {}


@given(st.lists(st.integers(0, 3), min_size=8, max_size=40))
def test_groups_are_spread_over_leaf_switches(places: list[int]) -> None:
    leaves = {f"n{number}": f"s{place}" for number, place in enumerate(places)}
    domains = group_domains(list(leaves), {}, leaves)
    groups = make_groups(list(leaves), data=None, parity=1, domains=domains)
    for switch in set(leaves.values()):
        held = [sum(leaves[node] == switch for node in group.nodes) for group in groups]
        assert max(held) - min(held) <= 1


# --- from probes ---

NOISE = 0.3
NARROW = 0.5
"""Rate of a leaf's uplink, in units of an interface's rate; the nodes of the leaf share it."""


def mistakes(truth: dict[str, str], reported: dict[str, str]) -> int:
    """Number of pairs of nodes that are wrongly grouped or separated."""
    nodes = sorted(reported)
    return sum(
        (reported[one] == reported[other]) != (truth[one] == truth[other])
        for place, one in enumerate(nodes)
        for other in nodes[:place]
    )


def drawn(seed: int, *, least: int, uplink: float) -> SimulatedPaths:
    """Two to four leaves of some nodes, mixed in the order of ranks, in noise."""
    chance = random.Random(seed)
    sizes = [chance.randint(least, 6) for _ in range(chance.randint(2, 4))]
    return SimulatedPaths(leaf_map(*sizes, shuffled=seed), uplink=uplink, noise=NOISE, seed=seed)


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
    # Two leaves of two nodes can look like one: each path had the uplink to itself.
    assert len(wrong) <= 1, wrong


def test_noise_alone_makes_no_leaves() -> None:
    for seed in range(120):
        rails = ["eth0", "eth1", "eth2"][: 1 + seed % 3]
        made = SimulatedPaths(leaf_map(2 + seed % 15), rails, noise=NOISE, seed=seed)
        leaves = leaves_from_probes(made.nodes, made.survey())
        assert not leaves.is_known, seed
        assert "not known" in leaves.words


@pytest.mark.parametrize("seed", range(20))
def test_some_paths_that_are_missing_or_dead_do_not_mislead(seed: int) -> None:
    made = SimulatedPaths(leaf_map(4, 4, shuffled=seed), uplink=NARROW, noise=NOISE, seed=seed)
    chance = random.Random(seed)
    for one, other in (chance.sample(made.nodes, 2) for _ in range(4)):
        made.paths[NetworkPath(one, other, "eth0")] = 0.0
    found = [one for one in made.survey() if chance.random() > 0.1]
    leaves = leaves_from_probes(made.nodes, found)
    assert same_leaves(made.leaves, leaves.of)


def test_a_slow_node_is_put_where_it_hangs() -> None:
    made = SimulatedPaths(leaf_map(4, 4), uplink=0.25, noise=0.1)
    for rail in made.rails:
        made.slow_node("n1", rail, 0.4)
    assert same_leaves(made.leaves, leaves_from_probes(made.nodes, made.survey()).of)


@pytest.mark.parametrize("slow", [{"n1"}, {"n1", "n5"}])
def test_nodes_that_are_slow_to_all_alike_have_no_leaf(slow: set[str]) -> None:
    made = SimulatedPaths(leaf_map(4, 4), uplink=NARROW, noise=NOISE)
    for node in slow:
        for rail in made.rails:
            made.slow_node(node, rail, 0.02)
    leaves = leaves_from_probes(made.nodes, made.survey())
    assert set(leaves.of) == {*made.nodes} - slow
    assert leaves.words.startswith(
        f"By rates of the probes, {8 - len(slow)} of 8 nodes are attached to 2 leaf switches:"
    )


def test_a_node_that_is_dead_has_no_leaf_and_spoils_none() -> None:
    made = SimulatedPaths(leaf_map(4, 4), uplink=NARROW, noise=NOISE)
    for rail in made.rails:
        made.slow_node("n5", rail, 0.0)
    leaves = leaves_from_probes(made.nodes, made.survey())
    assert set(leaves.of) == {*made.nodes} - {"n5"}


def test_with_most_nodes_slow_nothing_is_reported() -> None:
    made = SimulatedPaths(leaf_map(4, 4), uplink=NARROW, noise=NOISE)
    for node in made.nodes[2:]:
        for rail in made.rails:
            made.slow_node(node, rail, 0.02 * (1 + int(node[1:])))
    assert not leaves_from_probes(made.nodes, made.survey()).is_known


def test_far_leaves_are_reported_by_round_trips_where_rates_are_alike() -> None:
    made = SimulatedPaths(leaf_map(4, 4))
    found = [
        PathMeasurement(one.source, one.destination, one.rail, rtt_s, one.bytes_per_s)
        for one in made.survey()
        for rtt_s in [0.0002 if made.leaves[one.source] == made.leaves[one.destination] else 0.02]
    ]
    leaves = leaves_from_probes(made.nodes, found)
    assert same_leaves(made.leaves, leaves.of)
    assert leaves.words.startswith("By round trips of the probes, 8 of 8 nodes")


def test_leaves_between_which_nothing_was_probed_are_not_distinguished() -> None:
    made = SimulatedPaths(leaf_map(4, 4, 4), uplink=NARROW)
    unseen = {"sw0", "sw2"}
    found = [
        one
        for one in made.survey()
        if {made.leaves[one.source], made.leaves[one.destination]} != unseen
    ]
    assert not leaves_from_probes(made.nodes, found).is_known


def test_leaves_are_named_in_the_order_in_which_they_are_met() -> None:
    made = SimulatedPaths({"a": "x", "b": "y", "c": "y", "d": "x"}, uplink=NARROW)
    found = [*made.survey(), PathMeasurement("a", "stranger", "eth0", 0.001, 1e9)]
    leaves = leaves_from_probes(made.nodes, found)
    assert leaves.of == {"a": "leaf0", "b": "leaf1", "c": "leaf1", "d": "leaf0"}


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_of_very_few_nodes_nothing_can_be_known(count: int) -> None:
    made = SimulatedPaths(leaf_map(*[1] * count), uplink=0.1)
    assert not leaves_from_probes(made.nodes, made.survey()).is_known


def test_a_sample_of_many_nodes_is_enough_if_leaves_are_contiguous() -> None:
    made = SimulatedPaths(leaf_map(16, 16, 16, 16), uplink=NARROW, noise=NOISE)
    plan = schedule(made.nodes, dict.fromkeys(made.rails, made.nodes), most_rounds=120)
    assert plan.coverage < 0.6
    leaves = leaves_from_probes(made.nodes, made.survey(plan))
    assert same_leaves(made.leaves, leaves.of)


def test_many_nodes_with_too_few_partners_are_not_put_in_clusters() -> None:
    made = SimulatedPaths(leaf_map(35, 35), uplink=1.0)
    few = schedule(made.nodes, dict.fromkeys(made.rails, made.nodes), most_rounds=8)
    leaves = leaves_from_probes(made.nodes, made.survey(few))
    assert not leaves.is_known
    assert "too few others" in leaves.words
