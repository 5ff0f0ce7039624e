"""Without measured rates a plan keeps its rails, except for the dead ones."""

from ftrun.network.detect.rails import match_rails
from ftrun.network.plan.rail_choice import keep_rails
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
