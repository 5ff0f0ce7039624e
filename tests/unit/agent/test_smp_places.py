"""Where the SMPs of other nodes are: every node makes the same places out of one plan."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ftrun.agent.snapshots.smp_client import AgentSmpClient
from ftrun.agent.snapshots.topology import begin_generation
from ftrun.config.run_spec import RunSpec
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard, PlanMember
from ftrun.wire.cluster.rails import NetworkPlan, Rail
from ftrun.wire.messages.smp import BeginGeneration
from ftrun.wire.run_environment import RunFolder

NAMES = ("a", "b", "c")


def card(number: int, *, second: str = "eth1") -> NodeCard:
    rails = [
        Rail("eth0", f"10.0.0.{number}", 24, 29400),
        Rail(second, f"10.0.1.{number}", 24, 29400),
    ]
    return NodeCard(NAMES[number], number, rails[0].host, 29400, 1, rails=rails)


def plan(*cards: NodeCard, roads: NetworkPlan | None = None) -> GenerationPlan:
    members = [PlanMember(one, rank) for rank, one in enumerate(cards)]
    return GenerationPlan(
        generation=3,
        lead="a",
        why="a test",
        members=members,
        spares=[],
        restore=None,
        restore_why="",
        store_host="",
        store_port=0,
        groups=[[one.node_id for one in cards]],
        parity=1,
        smp_ports={one.node_id: 4000 for one in cards},
        roads=roads,
    )


@pytest.fixture
def begun(tmp_path: Path) -> Callable[[GenerationPlan, str], BeginGeneration]:
    spec = RunSpec(
        run_id="run", script="train.py", torchrun_argv=[], log_folder="/nowhere", cwd=str(tmp_path)
    )
    smp = AgentSmpClient(RunFolder(tmp_path), 1.0)
    return lambda made, node_id: begin_generation(made, node_id, spec, None, smp, old_world_size=0)


Begun = Callable[[GenerationPlan, str], BeginGeneration]


def hosts(body: BeginGeneration) -> list[list[str]]:
    return [[rail.host for rail in place.rails] for place in body.group]


def test_the_rail_of_the_address_is_dialled_first(begun: Begun) -> None:
    made = plan(card(0), card(1), card(2))
    body = begun(made, "a")
    assert hosts(body) == [[f"10.0.0.{number}", f"10.0.1.{number}"] for number in range(3)]
    assert [place.host for place in body.group] == [f"10.0.0.{number}" for number in range(3)]
    assert body.pace_bytes_s == 0
    assert begun(made, "b").group == body.group, "it is the name of their session"


def test_the_rail_for_snapshots_is_dialled_first_whatever_a_node_calls_it(begun: Begun) -> None:
    roads = NetworkPlan(snapshot_rail="eth1", snapshot_bytes_per_s=40_000_000)
    made = plan(card(0), card(1, second="enp3"), card(2), roads=roads)
    body = begun(made, "a")
    assert hosts(body) == [[f"10.0.1.{number}", f"10.0.0.{number}"] for number in range(3)]
    assert body.group[1].host == "10.0.1.1"
    assert body.pace_bytes_s == 40e6


def test_a_node_with_one_rail_is_where_it_was(begun: Begun) -> None:
    one = card(1)
    alone = msgspec.structs.replace(one, rails=one.rails[:1])
    before = msgspec.structs.replace(card(2), rails=[])
    body = begun(plan(card(0), alone, before, roads=NetworkPlan(snapshot_rail="eth1")), "a")
    assert hosts(body) == [["10.0.1.0", "10.0.0.0"], [], []]
    assert [place.host for place in body.group] == ["10.0.1.0", "10.0.0.1", "10.0.0.2"]


def test_a_node_without_a_group_is_told_its_place_to_fetch_what_others_hold(begun: Begun) -> None:
    alone = msgspec.structs.replace(plan(card(0)), groups=[])
    body = begun(alone, "a")
    assert body.group == []
    assert body.own is not None
    assert body.own.smp_port == 4000
    assert begun(plan(card(0), card(1)), "a").own is None, "it is in the group"
