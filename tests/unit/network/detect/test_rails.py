"""Rails: interfaces of one network are one rail, then those of one name, then of one position.

Variables for the libraries: only those that the user has not set.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.network.detect.rails import VARIABLES, env_for, match_rails, rails_named, rails_of_node
from ftrun.wire.cluster.generation import NetworkPlan, Rail


def rail(name: str, host: str = "10.0.0.1", bits: int = 0) -> Rail:
    return Rail(name, host, bits)


def names(rails: dict[str, list[Rail]]) -> dict[str, dict[str, str]]:
    """Interface of each node, by rail."""
    matched = match_rails(rails)
    return {name: {node: one.name for node, one in on.items()} for name, on in matched.items()}


def test_one_name_is_one_rail() -> None:
    assert names({"a": [rail("eth0"), rail("ib0")], "b": [rail("eth0"), rail("ib0")]}) == {
        "eth0": {"a": "eth0", "b": "eth0"},
        "ib0": {"a": "ib0", "b": "ib0"},
    }


def test_one_network_is_one_rail_whatever_its_interfaces_are_called() -> None:
    rails = {
        "a": [rail("eth0", "10.1.0.1", 24), rail("eth1", "10.2.0.1", 24)],
        "b": [rail("eth0", "10.1.0.2", 24), rail("eth1", "10.2.0.2", 24)],
        "c": [rail("ens7", "10.2.0.3", 24), rail("ens1", "10.1.0.3", 24)],
    }
    assert names(rails) == {
        "eth0": {"a": "eth0", "b": "eth0", "c": "ens1"},
        "eth1": {"a": "eth1", "b": "eth1", "c": "ens7"},
    }


def test_names_that_are_exchanged_on_one_node_do_not_mislead() -> None:
    rails = {
        node: [rail("eth0", f"10.1.0.{i}", 24), rail("eth1", f"10.2.0.{i}", 24)]
        for i, node in enumerate("abc", 1)
    }
    rails["d"] = [rail("eth0", "10.2.0.9", 24), rail("eth1", "10.1.0.9", 24)]
    assert names(rails)["eth0"]["d"] == "eth1"
    assert names(rails)["eth1"]["d"] == "eth0"


def test_two_interfaces_in_one_network_stay_apart_by_name() -> None:
    rails = {
        node: [rail("eth0", f"10.1.0.{i}", 16), rail("eth1", f"10.1.1.{i}", 16)]
        for i, node in enumerate("ab", 1)
    }
    rails["c"] = [rail("ens0", "10.1.0.9", 16), rail("ens1", "10.1.1.9", 16)]
    assert names(rails) == {
        "eth0": {"a": "eth0", "b": "eth0", "c": "ens0"},
        "eth1": {"a": "eth1", "b": "eth1", "c": "ens1"},
    }


def test_with_a_network_for_each_cable_names_identify_the_rail() -> None:
    rails = {
        node: [rail("eth0", f"10.1.{i}.1", 30), rail("eth1", f"10.2.{i}.1", 30)]
        for i, node in enumerate("abc")
    }
    assert names(rails)["eth1"] == {"a": "eth1", "b": "eth1", "c": "eth1"}


def test_a_name_that_one_node_has_counts_for_the_rail_that_it_lacks() -> None:
    rails = {node: [rail("eth0"), rail("ib0")] for node in "ab"}
    rails["c"] = [rail("eth0"), rail("ibp1")]
    assert names(rails)["ib0"]["c"] == "ibp1"


def test_what_is_on_one_node_only_is_a_rail_of_one_node() -> None:
    rails = {node: [rail("eth0")] for node in "ab"}
    rails["c"] = [rail("eth0"), rail("eth1")]
    assert names(rails)["eth1"] == {"c": "eth1"}


def test_a_second_interface_in_a_network_where_others_have_one_is_a_rail_of_its_own() -> None:
    rails = {node: [rail("a0", f"10.1.0.{i}", 24)] for i, node in enumerate("xy", 1)}
    rails["c"] = [rail("b0", "10.1.0.3", 24), rail("b1", "10.1.0.4", 24)]
    assert names(rails) == {"a0": {"x": "a0", "y": "a0", "c": "b0"}, "b1": {"c": "b1"}}


def test_an_interface_for_which_no_name_is_left_is_in_no_rail() -> None:
    one = [rail("b", "10.0.0.1", 24), rail("c", "10.0.2.1", 24), rail("a", "10.0.2.2", 24)]
    rails = {"x": [rail("a", "10.0.1.1", 24)], "y": one}
    assert names(rails) == {"a": {"x": "a", "y": "b"}, "c": {"y": "c"}}


def test_rails_of_a_node_go_by_the_run_s_names() -> None:
    matched = match_rails({"a": [rail("eth0"), rail("ib0")], "b": [rail("eth0")]})
    assert list(rails_of_node(matched, "b")) == ["eth0"]
    assert list(rails_of_node(matched, "a")) == ["eth0", "ib0"]
    assert rails_of_node(matched, "stranger") == {}


def test_without_nodes_there_are_no_rails() -> None:
    assert match_rails({}) == {}


interfaces = st.builds(
    rail,
    st.sampled_from(["eth0", "eth1", "ens1", "ib0"]),
    st.sampled_from(["10.1.0.1", "10.1.0.2", "10.2.0.1", "10.3.0.1"]),
    st.sampled_from([0, 24, 16]),
)


@given(
    st.dictionaries(
        st.sampled_from("abcde"), st.lists(interfaces, max_size=4, unique_by=lambda one: one.name)
    )
)
def test_no_interface_is_in_two_rails_and_each_node_once_on_a_rail(
    rails: dict[str, list[Rail]],
) -> None:
    matched = match_rails(rails)
    for node, of_node in rails.items():
        mine = [on[node].name for on in matched.values() if node in on]
        assert len(set(mine)) == len(mine)
        assert set(mine) <= {one.name for one in of_node}
    assert all(matched.values())


RAILS = match_rails(
    {
        "a": [Rail("eth0", "10.1.0.1", 24), Rail("ib0", "10.2.0.1", 24, hca="mlx5_0")],
        "b": [Rail("eth0", "10.1.0.2", 24), Rail("ib0", "10.2.0.2", 24, hca="mlx5_0")],
        "c": [Rail("eth0", "10.1.0.3", 24), Rail("ibp7", "10.2.0.3", 24, hca="mlx5_3")],
    }
)


def env(node: str, rails: list[str], user: dict[str, str] | None = None) -> dict[str, str]:
    return env_for(NetworkPlan(rails=rails), rails_of_node(RAILS, node), user or {})


def test_each_node_gets_its_own_names() -> None:
    assert env("a", ["ib0"]) == {
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "=ib0",
        "NCCL_IB_HCA": "=mlx5_0",
    }
    assert env("c", ["ib0"]) == {
        "GLOO_SOCKET_IFNAME": "ibp7",
        "NCCL_SOCKET_IFNAME": "=ibp7",
        "NCCL_IB_HCA": "=mlx5_3",
    }


def test_adapters_are_named_only_where_each_rail_has_one() -> None:
    assert env("a", ["ib0", "eth0"]) == {
        "GLOO_SOCKET_IFNAME": "ib0,eth0",
        "NCCL_SOCKET_IFNAME": "=ib0,eth0",
    }


FLOWS = {"NCCL_IB_QPS_PER_CONNECTION": 2, "NCCL_SOCKET_NTHREADS": 3, "NCCL_NSOCKS_PERTHREAD": 5}


@pytest.mark.parametrize("name", VARIABLES)
def test_what_the_user_has_set_is_not_touched(name: str) -> None:
    plan = NetworkPlan(rails=["ib0"], flows=FLOWS | {"PATH": 1})
    sockets = {"NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"}
    for value in ("mlx5_9", ""):
        reported = env_for(plan, rails_of_node(RAILS, "a"), {name: value, "PATH": "/bin"})
        assert set(reported) == {*VARIABLES} - (sockets if name in sockets else {name})


def test_flows_of_the_plan_are_set_on_each_node() -> None:
    for node in "abc":
        found = env_for(NetworkPlan(rails=["ib0"], flows=FLOWS), rails_of_node(RAILS, node), {})
        assert {name: found[name] for name in FLOWS} == {k: str(v) for k, v in FLOWS.items()}
    assert not env_for(NetworkPlan(flows=FLOWS), rails_of_node(RAILS, "a"), {})


def test_a_user_that_has_set_all_gets_no_message() -> None:
    assert env("a", ["ib0"], dict.fromkeys(VARIABLES, "x")) == {}


def test_without_rails_nothing_is_set() -> None:
    assert env("a", []) == {}
    assert env("stranger", ["eth0"]) == {}
    assert env("a", ["eth0", "eth7"]) == {}


@pytest.mark.parametrize(
    ("name", "value", "rails"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", {"eth0"}),
        ("GLOO_SOCKET_IFNAME", "eth", set()),
        ("GLOO_SOCKET_IFNAME", "ibp7,eth0", {"eth0", "ib0"}),
        ("NCCL_SOCKET_IFNAME", "eth", {"eth0"}),
        ("NCCL_SOCKET_IFNAME", "=ib", set()),
        ("NCCL_SOCKET_IFNAME", "^eth", {"ib0"}),
        ("NCCL_SOCKET_IFNAME", "^=eth0", {"ib0"}),
        ("NCCL_SOCKET_IFNAME", "", set()),
        ("NCCL_IB_HCA", "mlx5_0:1", {"ib0"}),
        ("NCCL_IB_HCA", "mlx5_1", set()),
        ("NCCL_SOCKET_NTHREADS", "eth0", set()),
        ("PATH", "eth0", set()),
    ],
)
def test_which_rails_a_variable_counts_for(name: str, value: str, rails: set[str]) -> None:
    assert rails_named(name, value, RAILS) == rails
