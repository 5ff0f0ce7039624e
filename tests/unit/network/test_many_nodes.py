"""Up to 4,096 nodes: the modelled duration of a survey, its coverage, and its findings.

The model of a round: the leader's message to all nodes, then each probe's connection, its round
trips and its bytes at the rate that is left if flows share an uplink. A probe over a dead path ends
at its deadline. The round takes as long as its longest probe.
"""

import math
from collections import Counter

import pytest

from ftrun.network.detect.findings import judge
from ftrun.network.detect.leaf_switches import LeafSwitches
from ftrun.network.detect.probe_schedule import ProbeSchedule, schedule
from ftrun.network.plan.planner import PlanningInputs, plan_network
from ftrun.wire.cluster.generation import PathMeasurement
from tests.unit.network.simulated_paths import PROBE_BYTES, TIMEOUT_S, SimulatedPaths, leaf_map

WORD_S = 0.02
"""The leader's message to all nodes, and their messages at the end of a round."""
ROUND_TRIPS = 7
"""One round trip to connect, five to measure, one for the answer to the last byte."""


def probe_s(found: PathMeasurement) -> float:
    if found.problem:
        return TIMEOUT_S
    return ROUND_TRIPS * found.rtt_s + PROBE_BYTES / found.bytes_per_s


def surveyed(made: SimulatedPaths, plan: ProbeSchedule) -> tuple[float, list[PathMeasurement]]:
    """The duration of all rounds, and their results."""
    taken_s, found = 0.0, []
    for one in plan.rounds:
        of_round = made.round(one)
        taken_s += WORD_S + max(map(probe_s, of_round))
        found += of_round
    return taken_s, found


def planned(made: SimulatedPaths, most_rounds: int = 120) -> ProbeSchedule:
    rails = {rail: set(made.nodes) for rail in made.rails}
    return schedule(made.nodes, rails, most_rounds=most_rounds)


def test_eight_nodes_with_two_rails_are_surveyed_in_three_seconds_even_with_dead_paths() -> None:
    made = SimulatedPaths(leaf_map(4, 4), uplink=1.0, noise=0.3)
    made.slow_node("n3", "eth1", 0.1)
    made.slow_node("n6", "eth0", 0.0)
    plan = planned(made)
    taken_s, _ = surveyed(made, plan)
    assert plan.coverage == 1.0
    assert taken_s < 3.0


@pytest.mark.parametrize("count", [64, 256, 1024])
def test_rounds_grow_as_the_logarithm_at_the_most(count: int) -> None:
    made = SimulatedPaths(leaf_map(*[32] * (count // 32)))
    wanted = 4 * 2 * math.ceil(math.log2(count)) + 24
    assert len(planned(made, most_rounds=wanted).rounds) <= wanted
    assert len(planned(made, most_rounds=28).rounds) <= 28
    assert len(planned(made).rounds) <= 120


many = pytest.mark.parametrize(
    "count", [512, pytest.param(4096, marks=(pytest.mark.slow, pytest.mark.full))]
)


@many
def test_many_nodes_are_surveyed_in_half_a_minute_and_faults_of_interfaces_are_found(
    count: int,
) -> None:
    made = SimulatedPaths(leaf_map(*[32] * (count // 32)), uplink=8.0, noise=0.3)
    slow = {("n7", "eth0"), ("n100", "eth1"), (f"n{count - 1}", "eth0")}
    dead = {("n8", "eth0"), ("n222", "eth1")}
    for node, rail in slow:
        made.slow_node(node, rail, 0.1)
    for node, rail in dead:
        made.slow_node(node, rail, 0.0)
    made.slow_node("n300", "eth0", 0.0, ["in"])

    plan = planned(made)
    taken_s, found = surveyed(made, plan)
    assert taken_s < 30.0
    assert len(plan.rounds) <= 120
    assert plan.coverage == pytest.approx(29 / count, rel=0.05)
    sent = Counter((path.source, path.rail) for one in plan.rounds for path in one)
    assert len(sent) == 2 * count
    assert min(sent.values()) >= 20

    findings = judge(made.cards(), found, made.leaves)
    assert {
        (one.kind.value, one.nodes[0], one.rail, one.direction)
        for one in findings.found
        if len(one.nodes) == 1
    } == {
        *(("slow", node, rail, "") for node, rail in slow),
        *(("dead", node, rail, "") for node, rail in dead),
        ("dead", "n300", "eth0", "in"),
    }
    # Shared uplinks change the rates between leaves, so that hardly any path is reported as slow.
    assert sum(len(one.nodes) == 2 for one in findings.found) < 0.001 * len(found)


@many
def test_many_nodes_are_planned_in_a_ring_that_leaves_each_switch_once(count: int) -> None:
    switches = count // 32
    leaves = leaf_map(*[32] * switches, shuffled=1)
    above = {f"sw{number}": f"spine{number // 8}" for number in range(switches)}
    made = SimulatedPaths(leaves, uplink=8.0, noise=0.3)
    made.slow_node("n9", "eth0", 0.1)
    found = made.survey(planned(made, most_rounds=28))
    plan = plan_network(
        PlanningInputs(made.nodes, made.cards(), found, LeafSwitches(leaves, "slurm", above))
    )
    ring = [leaves[node] for node in plan.order]
    assert sum(one != ring[place - 1] for place, one in enumerate(ring)) == switches
    spines = [above[leaf] for leaf in ring]
    assert sum(one != spines[place - 1] for place, one in enumerate(spines)) == switches // 8
    assert plan.rails == ["eth1"]
    assert plan.dropped["eth0"].startswith("eth0 of n9 is slow: ")
