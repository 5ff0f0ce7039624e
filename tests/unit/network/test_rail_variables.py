"""Variables for the libraries: only where the user has set none."""

import pytest

from ftrun.network.detect.rails import VARIABLES, env_for, match_rails, rails_named, rails_of_node
from ftrun.wire.cluster.generation import NetworkPlan, Rail

RAILS = match_rails(
    {
        "a": [Rail("eth0", "10.1.0.1", 24), Rail("ib0", "10.2.0.1", 24, hca="mlx5_0")],
        "b": [Rail("eth0", "10.1.0.2", 24), Rail("ib0", "10.2.0.2", 24, hca="mlx5_0")],
        "c": [Rail("eth0", "10.1.0.3", 24), Rail("ibp7", "10.2.0.3", 24, hca="mlx5_3")],
    }
)


def env(node: str, rails: list[str], user: dict[str, str] | None = None) -> dict[str, str]:
    return env_for(NetworkPlan(rails=rails), rails_of_node(RAILS, node), user or {})


def test_each_node_is_told_its_own_names() -> None:
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


@pytest.mark.parametrize("name", VARIABLES)
def test_what_the_user_has_set_is_not_touched(name: str) -> None:
    for value in ("mlx5_9", ""):
        told = env("a", ["ib0"], {name: value, "PATH": "/bin"})
        assert set(told) == {*VARIABLES} - {name}


def test_a_user_who_has_set_all_is_told_nothing() -> None:
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
        ("PATH", "eth0", set()),
    ],
)
def test_which_rails_a_variable_stands_for(name: str, value: str, rails: set[str]) -> None:
    assert rails_named(name, value, RAILS) == rails
