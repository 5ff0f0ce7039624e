"""Plans: rails, node order, snapshot rail, and correct sentences about them."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.network.detect.leaf_switches import LeafSwitches, leaves_from_labels
from ftrun.network.detect.probe_schedule import NetworkPath
from ftrun.network.plan.planner import PlanningInputs, plan_network
from ftrun.wire.cluster.generation import NetworkPlan
from tests.unit.network.simulated_paths import RATE, SimulatedPaths, leaf_map

TURNS = {f"n{number}": f"sw{number % 2}" for number in range(8)}
"""Two leaves that alternate in the order of names."""


def situation(made: SimulatedPaths, **more: object) -> PlanningInputs:
    given_by = {"leaves": leaves_from_labels(made.leaves)} | more
    return PlanningInputs(made.nodes, made.cards(), made.survey(), **given_by)


def plan(made: SimulatedPaths, **more: object) -> NetworkPlan:
    return plan_network(situation(made, **more))


def test_a_whole_network_has_all_its_rails_and_is_reported() -> None:
    found = plan(SimulatedPaths(TURNS, uplink=0.5))
    assert (found.rails, found.dropped) == (["eth0", "eth1"], {})
    assert found.words == [
        "Training uses eth0 (1,180 MB/s) and eth1 (1,180 MB/s); the rate is that of the slowest "
        "node.",
        "By labels of the nodes, 8 of 8 nodes are attached to 2 leaf switches.",
        f"4 of 8 nodes change positions: the busiest link of a ring carries 1.75 times the bytes "
        f"of an all-reduce, and 7.00 times in the given order. By leaf switch: {reported(found)}.",
        "Erasure groups are spread over the 2 leaf switches, unless labels declare fault domains.",
        f"Snapshots share eth1 with training, limited to {found.snapshot_bytes_per_s / 1e6:.0f} "
        "MB/s for each node: 20% of its rate between leaf switches.",
    ]


def reported(found: NetworkPlan) -> str:
    leaves = list(dict.fromkeys(found.leaves[node] for node in found.order))
    return "; ".join(
        f"{leaf}: {', '.join(node for node in found.order if found.leaves[node] == leaf)}"
        for leaf in leaves
    )


def test_leaves_are_put_together_by_labels_or_by_what_probes_find() -> None:
    made = SimulatedPaths(TURNS, uplink=0.5, noise=0.2)
    for leaves in (leaves_from_labels(made.leaves), LeafSwitches()):
        found = plan(made, leaves=leaves)
        in_order = [made.leaves[node] for node in found.order]
        changes = sum(one != in_order[place - 1] for place, one in enumerate(in_order))
        assert changes == 2
        assert found.leaves_from == (leaves.source or "probes")


def test_a_plan_that_was_followed_moves_no_node() -> None:
    made = SimulatedPaths(TURNS, uplink=0.5)
    first = plan(made)
    again = plan_network(
        PlanningInputs(
            first.order, made.cards(), made.survey(), LeafSwitches(first.leaves, "labels")
        )
    )
    assert again.order == first.order
    assert (
        "Nodes stay in their order: no other order that was tried reduces the load." in again.words
    )


def test_leaves_that_probes_reported_before_are_kept() -> None:
    made = SimulatedPaths(TURNS, uplink=0.5, noise=0.2)
    before = plan(made, leaves=LeafSwitches())
    made.noise, made.uplink = 0.3, 8.0
    after = plan(made, leaves=LeafSwitches(), previous=before)
    assert after.leaves == before.leaves
    assert "Leaf switches of 8 of 8 nodes are from earlier probes." in after.words
    unknown = plan(made, leaves=LeafSwitches(), previous=NetworkPlan())
    assert (unknown.leaves, unknown.leaves_from) == ({}, "")
    unknown_peers = NetworkPlan(leaves={"other": "leaf0"}, leaves_from="probes")
    assert plan(made, leaves=LeafSwitches(), previous=unknown_peers).leaves_from == ""


def test_an_order_that_is_not_to_change_stays_and_the_gain_is_reported() -> None:
    reason = "the user has numbered the nodes"
    found = plan(SimulatedPaths(TURNS, uplink=0.5), keep_order=reason)
    assert found.order == list(TURNS)
    assert any(
        one.startswith(
            f"Nodes stay in their order, because {reason}; another order would be "
            "better: the busiest link"
        )
        for one in found.words
    )
    found = plan(SimulatedPaths(leaf_map(4, 4)), keep_order=reason)
    assert f"Nodes stay in their order, because {reason}." in found.words


def test_of_many_nodes_the_number_is_reported() -> None:
    leaves = {f"n{number}": f"sw{number % 3}" for number in range(24)}
    found = plan(SimulatedPaths(leaves, uplink=0.5))
    line = next(one for one in found.words if "change positions" in one)
    assert "By leaf switch" not in line


# --- rails ----------------------------------------------------------------------------------------


def test_a_rail_on_which_a_node_is_dead_is_left_out() -> None:
    made = SimulatedPaths(leaf_map(4))
    made.slow_node("n2", "eth0", 0.0)
    found = plan(made)
    assert found.rails == ["eth1"]
    reason = "n2 cannot reach or be reached by any other node over eth0: 6 of 6 paths are dead"
    assert found.dropped == {"eth0": reason}
    assert f"Rail eth0 is dropped: {reason}." in found.words


def test_several_dead_places_are_counted() -> None:
    made = SimulatedPaths(leaf_map(5))
    made.paths[NetworkPath("n0", "n1", "eth1")] = made.paths[NetworkPath("n2", "n3", "eth1")] = 0.0
    assert plan(made).dropped["eth1"].endswith(" (1 more location is dead)")
    made.paths[NetworkPath("n3", "n4", "eth1")] = 0.0
    assert plan(made).dropped["eth1"].endswith(" (2 more locations are dead)")


def test_a_rail_whose_slowest_node_would_be_waited_for_is_left_out() -> None:
    made = SimulatedPaths(leaf_map(4))
    made.slow_node("n2", "eth0", 0.1)
    found = plan(made)
    assert found.rails == ["eth1"]
    assert found.dropped["eth0"] == (
        "eth0 of n2 is slow: 118 MB/s at its slowest node, where eth1 has 1,180 MB/s: training "
        "would wait for it"
    )


@pytest.mark.parametrize(
    ("shares", "used"),
    [
        ([1.0, 1.0, 1.0], ["eth0", "eth1", "eth2"]),
        ([1.0, 0.8, 0.1], ["eth0", "eth1"]),
        ([0.1, 0.9, 1.0], ["eth1", "eth2"]),
        ([0.1, 0.5, 1.0], ["eth1", "eth2"]),
        ([0.4, 0.65, 1.0], ["eth0", "eth1", "eth2"]),
        ([0.3, 0.3, 1.0], ["eth2"]),
    ],
)
def test_all_rails_but_those_that_probes_prove_slow(shares: list[float], used: list[str]) -> None:
    made = SimulatedPaths(leaf_map(4), [f"eth{number}" for number in range(3)])
    for rail, share in zip(made.rails, shares, strict=True):
        for node in made.nodes:
            made.slow_node(node, rail, share)
    assert plan(made).rails == used


def test_a_rail_that_some_nodes_lack_is_left_out() -> None:
    made = SimulatedPaths(leaf_map(4))
    cards = made.cards()
    del cards["n1"][1], cards["n3"][1]
    found = [
        one
        for one in made.survey()
        if one.rail == "eth0" or {"n1", "n3"}.isdisjoint({one.source, one.destination})
    ]
    made_plan = plan_network(PlanningInputs(made.nodes, cards, found))
    assert made_plan.rails == ["eth0"]
    assert made_plan.dropped["eth1"] == "n1 and 1 more of 4 nodes have no interface on it"


def test_a_rail_that_one_node_lacks_is_reported_in_the_singular() -> None:
    made = SimulatedPaths(leaf_map(4))
    cards = made.cards()
    del cards["n1"][1]
    found = [
        one
        for one in made.survey()
        if one.rail == "eth0" or "n1" not in (one.source, one.destination)
    ]
    made_plan = plan_network(PlanningInputs(made.nodes, cards, found))
    assert made_plan.dropped["eth1"] == "n1 has no interface on it"


def test_a_busy_machine_throttles_and_drops_nothing() -> None:
    """As in a real run: rates differ randomly by up to a factor of 3, round trips are 15 ms."""
    rates = [52e6, 40e6, 99e6, 35e6, 60e6, 90e6]
    rtts = [0.015, 0.0002, 0.0002, 0.015, 0.06, 0.0003]
    for turn in range(6):
        made = SimulatedPaths(leaf_map(3))
        found = [
            msgspec.structs.replace(
                one, bytes_per_s=rates[(at + turn) % 6], rtt_s=rtts[(2 * at + turn) % 6]
            )
            for at, one in enumerate(made.survey())
        ]
        made_plan = plan_network(PlanningInputs(made.nodes, made.cards(), found))
        assert (made_plan.rails, made_plan.dropped) == (["eth0", "eth1"], {})
        assert made_plan.snapshot_bytes_per_s >= 0.2 * 35e6


@given(
    st.lists(st.sampled_from([0.0002, 0.015, 0.06, 0.4]), min_size=7, max_size=7),
    st.integers(2, 5),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_round_trips_change_no_choice(rtts: list[float], count: int, seed: int) -> None:
    made = SimulatedPaths(leaf_map(count), noise=0.3, seed=seed)
    made.slow_node("n1", "eth1", 0.1)
    even = made.survey()
    odd = [msgspec.structs.replace(one, rtt_s=rtts[at % len(rtts)]) for at, one in enumerate(even)]
    leaves = leaves_from_labels(made.leaves)
    one, other = (
        plan_network(PlanningInputs(made.nodes, made.cards(), of, leaves)) for of in (even, odd)
    )
    assert one == other


@given(st.sampled_from([0.01, 0.1, 0.5]), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_no_single_path_and_no_single_node_sets_the_pace_of_snapshots(
    share: float, seed: int
) -> None:
    made = SimulatedPaths(leaf_map(4), ["eth0"])
    usual = plan(made).snapshot_bytes_per_s
    made.slow_node(made.nodes[seed % 4], "eth0", share)
    made.paths[NetworkPath("n0", "n1", "eth0")] = share
    assert plan(made).snapshot_bytes_per_s == usual


def test_a_rail_that_the_monitor_suspects_is_left_out() -> None:
    reason = "node n3 has waited 8 times as long for it as others"
    found = plan(SimulatedPaths(leaf_map(4)), suspects={"eth0": reason})
    assert (found.rails, found.dropped) == (["eth1"], {"eth0": reason})


def test_with_no_rail_left_the_least_bad_one_is_used() -> None:
    made = SimulatedPaths(leaf_map(4))
    made.slow_node("n0", "eth0", 0.0)
    made.paths[NetworkPath("n1", "n2", "eth1")] = 0.0
    found = plan(made)
    assert found.rails == ["eth1"]
    assert found.words[0] == (
        "No rail works between all nodes; eth1 is the best one: n1 does not reach n2 over eth1: "
        "no answer in 0.1 s."
    )
    places = {node: place for place, node in enumerate(found.order)}
    assert (places["n2"] - places["n1"]) % 4 != 1


def test_with_no_rail_at_all_the_libraries_choose() -> None:
    made = SimulatedPaths(leaf_map(3))
    for node in made.nodes:
        for rail in made.rails:
            made.slow_node(node, rail, 0.0)
    found = plan(made)
    assert found.rails == []
    assert "No rail connects all nodes: the libraries choose the interfaces." in found.words
    assert "Snapshots use the rail of the agents, without a limit." in found.words
    nothing = plan_network(PlanningInputs(made.nodes, {node: [] for node in made.nodes}))
    assert nothing.rails == []


def test_without_probes_training_keeps_to_the_rail_of_the_agents() -> None:
    made = SimulatedPaths(leaf_map(3))
    found = plan_network(PlanningInputs(made.nodes, made.cards()))
    assert (found.rails, found.dropped) == (["eth0"], {"eth1": "no path was probed"})
    assert found.words[0] == "No path was probed: training uses eth0."
    assert found.words[-1] == (
        "Snapshots share eth0 with training, without a limit, because its rate is not known."
    )


def test_a_rail_that_was_not_probed_is_left_out() -> None:
    made = SimulatedPaths(leaf_map(3))
    found = [one for one in made.survey() if one.rail == "eth0"]
    made_plan = plan_network(PlanningInputs(made.nodes, made.cards(), found))
    assert made_plan.dropped == {"eth1": "none of its paths was probed"}


def test_one_node_has_no_paths() -> None:
    made = SimulatedPaths(leaf_map(1))
    assert plan(made) == NetworkPlan(order=["n0"], words=["One node: there are no paths to plan."])


# --- single paths -----------------------------------------------------------------------------


def test_neighbours_in_a_ring_have_no_slow_path_between_them() -> None:
    made = SimulatedPaths(leaf_map(5), ["eth0"])
    made.paths[NetworkPath("n1", "n2", "eth0")] = 0.1
    found = plan(made)
    places = {node: place for place, node in enumerate(found.order)}
    assert (places["n2"] - places["n1"]) % 5 != 1
    assert any("change positions" in one for one in found.words)


# --- snapshots ------------------------------------------------------------------------------------


def test_snapshots_take_a_rail_that_training_leaves_alone() -> None:
    made = SimulatedPaths(leaf_map(4))
    made.slow_node("n2", "eth1", 0.3)
    found = plan(made)
    assert (found.rails, found.snapshot_rail, found.snapshot_bytes_per_s) == (["eth0"], "eth1", 0)
    assert found.words[-1] == "Snapshots use eth1 (354 MB/s), which training does not use."


def test_snapshots_take_no_rail_that_is_too_slow() -> None:
    made = SimulatedPaths(leaf_map(4))
    for node in made.nodes:
        made.slow_node(node, "eth1", 0.01)
    found = plan(made)
    assert (found.rails, found.snapshot_rail) == (["eth0"], "eth0")
    assert found.snapshot_bytes_per_s == int(0.2 * RATE)
    assert found.words[-1] == (
        "Snapshots share eth0 with training, limited to 236 MB/s for each node: 20% of its rate."
    )


# --- the user's variables -------------------------------------------------------------------------


def test_what_the_user_has_set_is_reported_and_counts_as_busy() -> None:
    made = SimulatedPaths(leaf_map(4))
    made.slow_node("n2", "eth1", 0.3)
    found = plan(made, user_env={"NCCL_SOCKET_IFNAME": "eth1", "NCCL_IB_HCA": "mlx5_0", "X": "y"})
    assert found.rails == ["eth0"]
    assert (
        "NCCL_SOCKET_IFNAME=eth1 is set by the user and stays, although the plan drops eth1."
        in found.words
    )
    assert "NCCL_IB_HCA=mlx5_0 is set by the user and stays." in found.words
    assert found.snapshot_rail == "eth0"
    assert found.snapshot_bytes_per_s > 0


def test_flows_are_set_and_reported_unless_the_user_has_set_them() -> None:
    made = SimulatedPaths(TURNS, uplink=0.5)
    cards = {
        node: [msgspec.structs.replace(one, hca="mlx5_0") for one in rails]
        for node, rails in made.cards().items()
    }
    given_by = {"leaves": leaves_from_labels(made.leaves)}
    found = plan_network(PlanningInputs(made.nodes, cards, made.survey(), **given_by))
    assert found.flows == {"NCCL_IB_QPS_PER_CONNECTION": 4}
    assert (
        "NCCL uses 4 queue pairs for each connection, so that its flows spread over the paths "
        "between 2 leaf switches." in found.words
    )
    user = {"NCCL_IB_QPS_PER_CONNECTION": "2"}
    kept = plan_network(
        PlanningInputs(made.nodes, cards, made.again().survey(), user_env=user, **given_by)
    )
    assert not kept.flows
    assert "NCCL_IB_QPS_PER_CONNECTION=2 is set by the user and stays." in kept.words
    assert not any(text.startswith("NCCL uses") for text in kept.words)


# --- any situation --------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(1, 3),
    st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 2), st.sampled_from([0.0, 0.1, 0.6])),
        max_size=4,
    ),
    st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_every_plan_is_whole(
    sizes: list[int], num_rails: int, faults: list[tuple[int, int, float]], seed: int
) -> None:
    rails = [f"eth{number}" for number in range(num_rails)]
    made = SimulatedPaths(leaf_map(*sizes, shuffled=seed), rails, 0.5, 0.3, seed)
    for node, rail, share in faults:
        made.slow_node(f"n{node}", f"eth{rail}", share)
    found = plan(made)
    assert sorted(found.order) == sorted(made.nodes)
    if len(made.nodes) > 1:
        assert sorted([*found.rails, *found.dropped]) == rails
        assert found.snapshot_rail in {"", *rails}
    assert all(one.endswith(".") and len(one) > 10 for one in found.words)
    assert plan(made.again()) == found
    assert msgspec.json.decode(msgspec.json.encode(found), type=NetworkPlan) == found
