"""Leaf switches by what people have written: labels, a topology file, Slurm's topology.conf."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.erasure.groups import make_groups
from ftrun.errors import UsageError
from ftrun.network.detect.leaves import (
    LeafSwitches,
    group_domains,
    leaves_from_file,
    leaves_from_labels,
    leaves_from_slurm,
    names_of_list,
)

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
    assert leaves.words == "By labels of the nodes, 2 of 3 nodes hang on 2 leaf switch(es)."


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


def test_a_file_that_names_no_node_of_the_run_tells_nothing() -> None:
    assert leaves_from_file({"sw1": ["x"]}, ["a"]).source == ""


@pytest.mark.parametrize("topology", [[], "sw1", {"sw1": "a"}, {"sw1": {"sw2": None}}])
def test_a_file_of_another_form_is_refused(topology: object) -> None:
    with pytest.raises(UsageError, match="switches, each with a list of nodes"):
        leaves_from_file(topology, ["a"])


def test_a_node_on_two_switches_is_refused() -> None:
    with pytest.raises(UsageError, match="node a hangs on switches sw1 and sw2"):
        leaves_from_file({"sw1": ["a"], "sw2": ["a"]}, ["a"])


def test_a_switch_below_two_is_refused() -> None:
    with pytest.raises(UsageError, match="switch sw1 hangs on switches x and y"):
        leaves_from_file({"x": {"sw1": ["a"]}, "y": {"sw1": ["b"]}}, ["a"])


def test_slurm() -> None:
    hosts = {"n0": "node01", "n1": "node05", "n2": "gpu7", "n3": "elsewhere"}
    leaves = leaves_from_slurm(SLURM, hosts)
    assert leaves.of == {"n0": "leaf1", "n1": "leaf2", "n2": "leaf1"}
    assert leaves.source == "slurm"
    assert leaves.above == {"leaf1": "spine", "leaf2": "spine"}


def test_slurm_of_another_cluster_tells_nothing() -> None:
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
    with pytest.raises(UsageError, match="is no list of names"):
        names_of_list(text)


def test_a_list_without_end_is_refused() -> None:
    with pytest.raises(UsageError, match="more than 65,536 names"):
        names_of_list("n[0-999999999]")


# --- what fails as one ----------------------------------------------------------------------------


def test_labels_of_all_nodes_say_what_fails_as_one() -> None:
    labels = {"a": "r1", "b": "r2"}
    assert group_domains(["a", "b"], labels, {"a": "s1", "b": "s1"}) == labels


def test_else_leaf_switches_do() -> None:
    leaves = {"a": "s1", "b": "s2", "other": "s3"}
    assert group_domains(["a", "b"], {"a": "r1"}, leaves) == {"a": "s1", "b": "s2"}
    assert group_domains(["a", "b"], {"a": "r1", "b": "r1"}, leaves) == {"a": "s1", "b": "s2"}


def test_one_switch_for_all_tells_nothing() -> None:
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
