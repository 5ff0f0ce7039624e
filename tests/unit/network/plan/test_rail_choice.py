"""Without measured rates a plan keeps its rails, except for the dead ones."""

import pytest

from ftrun.network.detect.rails import match_rails
from ftrun.network.plan.rail_choice import choose_flows, keep_rails
from ftrun.wire.cluster.generation import NetworkPlan, Rail

ALL = match_rails(
    {node: [Rail(f"eth{i}", f"10.{i}.0.{node}", 24) for i in range(3)] for node in "12"}
)
BEFORE = NetworkPlan(
    order=["2", "1"],
    rails=["eth0"],
    dropped={"eth1": "slow", "eth2": "slower"},
    snapshot_rail="eth1",
)


def test_nothing_is_left_without_a_reason() -> None:
    made = keep_rails(BEFORE, ["1", "2"], ALL, {"eth2": "dead"})
    assert (made.rails, made.order, made.dropped) == (["eth0"], ["1", "2"], BEFORE.dropped)


def test_a_dead_rail_is_left_for_one_that_all_are_on() -> None:
    made = keep_rails(BEFORE, ["1", "2"], ALL, {"eth0": "It is dead."})
    assert made.rails == ["eth1"]
    assert made.dropped == {"eth0": "It is dead.", "eth2": "slower"}
    assert (made.snapshot_rail, made.snapshot_bytes_per_s) == ("eth1", 0)


def test_snapshots_leave_a_dead_rail_too_and_keep_a_sound_one() -> None:
    both = keep_rails(BEFORE, ["1", "2"], ALL, {"eth0": "dead", "eth1": "dead"})
    assert (both.rails, both.snapshot_rail) == (["eth2"], "eth2")
    last = NetworkPlan(rails=["eth0", "eth1"], snapshot_rail="eth2", snapshot_bytes_per_s=7)
    made = keep_rails(last, ["1", "2"], ALL, {"eth0": "dead"})
    assert (made.rails, made.snapshot_rail, made.snapshot_bytes_per_s) == (["eth1"], "eth2", 7)


def test_where_none_is_whole_the_plan_stays() -> None:
    assert keep_rails(BEFORE, ["2", "1"], ALL, dict.fromkeys(ALL, "dead")) == BEFORE


def test_an_address_that_is_none_costs_no_rail() -> None:
    odd = {"1": [Rail("eth0", "what?", 24)], "2": [Rail("eth0", "10.0.0.2", 99)]}
    assert match_rails(odd)["eth0"].keys() == {"1", "2"}


def cards(hca: str = "", speed_mbit: int = 0, first_mbit: int = 0) -> dict[str, list[Rail]]:
    """Two nodes with one rail; `first_mbit`: another speed of the first node."""
    return {
        node: [Rail("eth0", f"10.0.0.{node}", 24, speed_mbit=speed or speed_mbit, hca=hca)]
        for node, speed in (("1", first_mbit), ("2", 0))
    }


TWO_LEAVES, ONE_LEAF = {"1": "a", "2": "b"}, {"1": "a", "2": "a"}
SOCKETS = {"NCCL_SOCKET_NTHREADS": 4, "NCCL_NSOCKS_PERTHREAD": 4}


@pytest.mark.parametrize(
    ("rails", "leaves", "flows"),
    [
        (cards("mlx5_0", 400_000), TWO_LEAVES, {"NCCL_IB_QPS_PER_CONNECTION": 4}),
        (cards("mlx5_0"), TWO_LEAVES, {"NCCL_IB_QPS_PER_CONNECTION": 4}),
        (cards("mlx5_0", 400_000), ONE_LEAF, {}),
        (cards("mlx5_0", 400_000), {}, {}),
        (cards("", 100_000), ONE_LEAF, SOCKETS),
        (cards("", 400_000, first_mbit=25_000), ONE_LEAF, {}),
        (cards("", 25_000), TWO_LEAVES, {}),
        (cards(""), TWO_LEAVES, {}),
        ({"1": cards("mlx5_0", 100_000)["1"], "2": cards("", 100_000)["2"]}, TWO_LEAVES, {}),
    ],
)
def test_connections_have_several_flows_where_one_cannot_use_the_network(
    rails: dict[str, list[Rail]], leaves: dict[str, str], flows: dict[str, int]
) -> None:
    matched = match_rails(rails)
    found, words = choose_flows(["eth0"], ["1", "2"], matched, leaves)
    assert found == flows
    assert len(words) == bool(flows)
    kept = keep_rails(NetworkPlan(rails=["ib9"], leaves=leaves), ["1", "2"], matched, {})
    assert (kept.flows, set(words) <= set(kept.words)) == (flows, True)
    assert choose_flows([], ["1"], matched, leaves) == ({}, [])
