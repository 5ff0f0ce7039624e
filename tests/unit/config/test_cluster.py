"""Settings of run-level decisions, made from a node's start options."""

import msgspec
import pytest
from made_settings import node

from ftrun.config.cluster import ClusterSize, MembershipSettings, NodesSpec
from ftrun.config.profile import CheckpointConfig, NodesConfig, Profile, SlowConfig, StopConfig

PROFILE = Profile(
    nodes=NodesConfig(heartbeat_interval_s=0.1),
    slow=SlowConfig(action="evict"),
    stop=StopConfig(grace_s=12.0),
    checkpoint=CheckpointConfig(directory="/x"),
)
SIZE = ClusterSize(2, 4, 1)


def made(spec: NodesSpec | None, profile: Profile = PROFILE) -> MembershipSettings:
    return MembershipSettings.of(profile, spec, max_restarts=3, user_env={"A": "1"})


def test_several_nodes_take_the_sections_as_they_are() -> None:
    spec = msgspec.structs.replace(node(SIZE), more_endpoints=[("b.local", 1)])
    found = made(spec)
    assert found.profile is PROFILE
    assert found.times is PROFILE.nodes
    assert (found.cluster_size, found.max_restarts, found.user_env) == (SIZE, 3, {"A": "1"})
    assert found.endpoints == [("a.local", 29400), ("b.local", 1)]
    assert (found.leave_s, found.let_go_s) == (6.0, 10.0)
    assert found.has_checkpoints
    assert found.orders_checkpoints
    assert not found.has_witness


def test_with_a_witness_none_is_looked_for_elsewhere() -> None:
    found = made(msgspec.structs.replace(node(SIZE), etcd=["etcd:2379"]))
    assert found.has_witness
    assert found.endpoints == []


def test_sections_about_other_nodes_mean_nothing_to_one_node() -> None:
    found = made(None)
    assert (found.times, found.profile.slow) == (NodesConfig(), SlowConfig())
    assert found.profile.stop is PROFILE.stop
    assert (found.cluster_size, found.endpoints) == (ClusterSize(1, 1, 0), [])
    assert found.has_checkpoints
    assert not found.orders_checkpoints, "the SMP decides by itself"
    assert found.blank_wait_s == 0.0


@pytest.mark.parametrize("directory", [None, ""])
def test_without_a_directory_there_are_no_checkpoints(directory: str | None) -> None:
    profile = msgspec.structs.replace(PROFILE, checkpoint=CheckpointConfig(directory=directory))
    found = made(node(SIZE), profile)
    assert not found.has_checkpoints
    assert not found.orders_checkpoints


def test_the_wait_for_a_start_has_one_default() -> None:
    assert MembershipSettings().times.join_timeout_s == Profile().nodes.join_timeout_s == 600.0
