"""Addresses of the SMPs of other nodes: every node derives the same ones from one plan."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from ftrun.agent.snapshots.smp_client import AgentSmpClient
from ftrun.agent.snapshots.topology import CheckpointSource, begin_generation, sources_of
from ftrun.config.profile import Profile
from ftrun.config.run_spec import RunSpec
from ftrun.wire.cluster.generation import (
    GenerationPlan,
    NetworkPlan,
    NodeCard,
    PlanMember,
    Rail,
    RestoreSource,
)
from ftrun.wire.messages.smp import BeginGeneration
from ftrun.wire.run_environment import RunFolder

NAMES = ("a", "b", "c")


def card(number: int, *, second: str = "eth1") -> NodeCard:
    rails = [
        Rail("eth0", f"10.0.0.{number}", 24, 29400),
        Rail(second, f"10.0.1.{number}", 24, 29400),
    ]
    return NodeCard(NAMES[number], number, rails[0].host, 29400, 1, rails=rails)


def plan(*cards: NodeCard, paths: NetworkPlan | None = None) -> GenerationPlan:
    members = [PlanMember(one, rank) for rank, one in enumerate(cards)]
    return GenerationPlan(
        generation=3,
        leader="a",
        reason="a test",
        members=members,
        spares=[],
        restore=None,
        restore_reason="",
        store_host="",
        store_port=0,
        groups=[[one.node_id for one in cards]],
        parity=1,
        smp_ports={one.node_id: 4000 for one in cards},
        paths=paths,
    )


@pytest.fixture
def started(tmp_path: Path) -> Callable[[GenerationPlan, str], BeginGeneration]:
    spec = RunSpec(
        run_id="run", script="train.py", torchrun_argv=[], log_folder="/nowhere", cwd=str(tmp_path)
    )
    smp = AgentSmpClient(RunFolder(tmp_path), 1.0)
    return lambda made, node_id: begin_generation(
        made, node_id, spec, None, smp, previous_world_size=0
    )


Started = Callable[[GenerationPlan, str], BeginGeneration]


def hosts(body: BeginGeneration) -> list[list[str]]:
    return [[rail.host for rail in slot.rails] for slot in body.group]


def test_the_rail_of_the_address_is_dialled_first(started: Started) -> None:
    made = plan(card(0), card(1), card(2))
    body = started(made, "a")
    assert hosts(body) == [[f"10.0.0.{number}", f"10.0.1.{number}"] for number in range(3)]
    assert [slot.host for slot in body.group] == [f"10.0.0.{number}" for number in range(3)]
    assert body.pace_bytes_s == 0
    assert started(made, "b").group == body.group, "it is the name of their session"


def test_the_rail_for_snapshots_is_dialled_first_whatever_a_node_calls_it(started: Started) -> None:
    paths = NetworkPlan(snapshot_rail="eth1", snapshot_bytes_per_s=40_000_000)
    made = plan(card(0), card(1, second="enp3"), card(2), paths=paths)
    body = started(made, "a")
    assert hosts(body) == [[f"10.0.1.{number}", f"10.0.0.{number}"] for number in range(3)]
    assert body.group[1].host == "10.0.1.1"
    assert body.pace_bytes_s == 40e6


def test_a_node_with_one_rail_is_where_it_was(started: Started) -> None:
    one = card(1)
    alone = msgspec.structs.replace(one, rails=one.rails[:1])
    before = msgspec.structs.replace(card(2), rails=[])
    body = started(plan(card(0), alone, before, paths=NetworkPlan(snapshot_rail="eth1")), "a")
    assert hosts(body) == [["10.0.1.0", "10.0.0.0"], [], []]
    assert [slot.host for slot in body.group] == ["10.0.1.0", "10.0.0.1", "10.0.0.2"]


def test_a_node_without_a_group_gets_its_place_to_fetch_what_others_hold(started: Started) -> None:
    alone = msgspec.structs.replace(plan(card(0)), groups=[])
    body = started(alone, "a")
    assert body.group == []
    assert body.own is not None
    assert body.own.smp_port == 4000
    assert started(plan(card(0), card(1)), "a").own is None, "it is in the group"


LIFE = "1f2e3d"


def spec(slot: Path, *, resume: str, directory: str | None = "saved") -> RunSpec:
    profile = Profile()
    requested = {"directory": directory, "resume": resume}
    checkpoint = replace(profile.checkpoint, **requested)
    return RunSpec(
        run_id="r",
        script="train.py",
        torchrun_argv=["train.py"],
        max_restarts=None,
        log_folder=str(slot / "logs"),
        cwd=str(slot),
        profile=replace(profile, checkpoint=checkpoint),
    )


def test_auto_takes_whatever_is_there(tmp_path: Path) -> None:
    (found,) = sources_of(spec(tmp_path, resume="auto"), LIFE, has_committed=True)
    assert found == CheckpointSource(str(tmp_path / "saved"))
    assert not sources_of(spec(tmp_path, resume="auto", directory=None), LIFE, has_committed=False)


def test_never_takes_what_the_run_has_written(tmp_path: Path) -> None:
    (found,) = sources_of(spec(tmp_path, resume="never"), LIFE, has_committed=False)
    assert found == CheckpointSource(str(tmp_path / "saved"), life=LIFE)
    assert "this run has written no checkpoint" in found.no_metrics_reason


def test_a_path_comes_after_what_the_run_has_written(tmp_path: Path) -> None:
    old = tmp_path / "old" / "step-00000003-g0"
    old.mkdir(parents=True)
    own = CheckpointSource(str(tmp_path / "saved"), life=LIFE)
    found = sources_of(spec(tmp_path, resume="old"), LIFE, has_committed=True)
    assert found == [own, CheckpointSource(str(tmp_path / "old"))]
    (old / "index.json").touch()
    (tmp_path / "old" / "latest").symlink_to(old.name)
    for requested in ("old/latest", "old/step-00000003-g0/"):
        found = sources_of(spec(tmp_path, resume=requested), LIFE, has_committed=True)
        assert found == [own, CheckpointSource(str(tmp_path / "old"), only=old.name)]


@pytest.mark.parametrize("has_committed", [False, True])
def test_without_a_directory_a_path_is_only_where_the_run_begins(
    tmp_path: Path, has_committed: bool
) -> None:
    wanted = spec(tmp_path, resume="old", directory=None)
    found = sources_of(wanted, LIFE, has_committed=has_committed)
    assert found == ([] if has_committed else [CheckpointSource(str(tmp_path / "old"))])


def test_a_url_shows_by_its_last_part_whether_it_is_one_checkpoint(tmp_path: Path) -> None:
    for requested, found in (
        ("ftp://me:pw@h/run", CheckpointSource("ftp://me:pw@h/run")),
        ("ftp://me:pw@h/run/latest", CheckpointSource("ftp://me:pw@h/run", only="latest")),
        (
            "s3://b/r/step-00000003-g0-0-1/",
            CheckpointSource("s3://b/r", only="step-00000003-g0-0-1"),
        ),
    ):
        wanted = spec(tmp_path, resume=requested, directory="gs://b/own")
        assert sources_of(wanted, LIFE, has_committed=True) == [
            CheckpointSource("gs://b/own", life=LIFE),
            found,
        ]
    assert "pw" not in CheckpointSource("ftp://me:pw@h/run").no_metrics_reason


def test_a_ring_is_named_in_the_group_and_in_the_source_of_a_restore(started: Started) -> None:
    source = RestoreSource(["a", "b", "c"], [[0], [1], [2]], 1, 2, is_ring=True)
    made = replace(plan(card(0), card(1), card(2)), is_ring=True, sources=[source])
    assert started(made, "a").is_ring
    assert not started(plan(card(0), card(1), card(2)), "a").is_ring
