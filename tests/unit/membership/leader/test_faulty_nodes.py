"""Nodes with a fault: their ranks move to another node before the run is given up."""

import msgspec
import pytest

from ftrun.config.cluster import ClusterSize
from ftrun.errors import ExitCode
from ftrun.events import ExitKind
from ftrun.membership.leader.reconfiguration import FAULT_LIMIT_S
from ftrun.recovery.commands import EndRun, RequestFinalSnapshot
from ftrun.wire.cluster.membership import Heartbeat
from tests.unit.membership.agents import Agents
from tests.unit.membership.leader.test_draining import at_boundary, commits
from tests.unit.membership.leader.test_leader import (
    exited,
    hold,
    notes,
    started,
    with_spares,
    works,
)
from tests.unit.recovery.made import settings

XID = "GPU 2 has reported XID 79"


def works_with_fault(made: Agents, step: int, node_ids: str = "abc", **changes: object) -> None:
    """Protected ranks of these nodes are at a step; b has a fault."""
    for one in node_ids:
        works(made, step, one, survives=1, fault=XID if one == "b" else "", **changes)


def crash(made: Agents, step: int, rank: int, node_ids: str = "abc", **changes: object) -> None:
    """A rank raises an exception; its node is the one of this index."""
    works(made, step, node_ids, survives=1, **changes)
    made.passes(0.5)
    one = node_ids[rank]
    exits = (exited(rank, ExitKind.EXCEPTION, 1),)
    works(made, step, one, survives=1, exits=exits, **changes)
    made.passes(3.0)


def test_a_node_on_which_a_rank_fails_repeatedly_is_replaced() -> None:
    made = with_spares()
    hold(made, 5, "abc")
    crash(made, 7, 1)
    assert set(made.running()) == set("abc")
    crash(made, 7, 1)
    assert set(made.running()) == set("acd")
    assert made.plan("a").reason == (
        "node b is excluded: the same failure occurred on it 2 times without progress"
    )
    crash(made, 7, 1, "adc")
    (end,) = made["a"].reported(EndRun)
    assert end.exit_code == ExitCode.DO_NOT_RESTART
    assert "on node b, and on d too" in end.advice


def test_a_node_with_a_hardware_fault_leaves_at_a_boundary() -> None:
    made = with_spares()
    hold(made, 5, "abc")
    works_with_fault(made, 6)
    made.passes(1.0)
    reason = f"node b is evicted: node b has a hardware fault: {XID}"
    assert made["a"].reported(RequestFinalSnapshot)[0].reason == reason
    at = at_boundary(made, "abc", "")
    works_with_fault(made, at[1], at_boundary=True, ready=at)
    made.passes(1.0)
    assert set(made.running()) == set("acd")
    assert made.plan("a").restore == at
    assert notes(made, "a", "verdict") == [f"node b has a hardware fault: {XID}"]
    commits(made, "acd", at[1] + 1)
    leader = made["a"].member.leader
    assert leader is not None
    later_s = made.now_s + 2 * 3600.0
    made.here_is("b", Heartbeat(generation=-1, fault=XID))
    made.passes(1.0)
    assert leader.monitor.excluded(now_s=later_s) == {"b"}, "while it reports the fault"
    made.here_is("b", Heartbeat(generation=-1))
    made.passes(1.0)
    assert leader.monitor.excluded(now_s=later_s) == set()


def test_a_spare_that_is_lost_before_the_boundary_replaces_no_faulty_node() -> None:
    made = started("abcd", cluster_size=ClusterSize(3, 3, 1))
    hold(made, 5, "abc")
    works_with_fault(made, 6)
    made.passes(1.0)
    assert made["a"].reported(RequestFinalSnapshot)
    made.kill("d")
    made.passes(4.0)
    at = at_boundary(made, "abc", "")
    works_with_fault(made, at[1], at_boundary=True, ready=at)
    made.passes(1.0)
    assert set(made.running()) == set("abc")
    assert "no spare is left to replace" in made.plan("a").reason, made.plan("a").reason
    assert made.plan("a").restore == at


def test_a_node_with_a_fault_that_reaches_no_boundary_is_replaced_nevertheless() -> None:
    made = with_spares()
    hold(made, 5, "abc")
    works_with_fault(made, 6)
    made.passes(FAULT_LIMIT_S)
    assert set(made.running()) == set("abc")
    made.passes(2.0)
    assert set(made.running()) == set("acd")
    assert "without a snapshot at step" in made.plan("a").reason


def test_without_a_spare_an_elastic_run_shrinks() -> None:
    made = started("abc")
    hold(made, 5, "abc")
    works_with_fault(made, 6)
    made.passes(FAULT_LIMIT_S + 2.0)
    assert set(made.running()) == set("ac")


def test_a_node_whose_state_is_not_protected_keeps_its_ranks() -> None:
    made = with_spares()
    hold(made, 5, "abc")
    for one in "abc":
        works(made, 6, one, survives=0, fault=XID if one == "b" else "")
    made.passes(FAULT_LIMIT_S + 2.0)
    assert set(made.running()) == set("abc")
    assert not made["a"].reported(RequestFinalSnapshot)


def test_without_another_node_the_run_ends_when_the_ranks_fail_again() -> None:
    made = started("abc", cluster_size=ClusterSize(3, 3, 0))
    hold(made, 5, "abc")
    works_with_fault(made, 6)
    made.passes(FAULT_LIMIT_S + 2.0)
    assert not made["a"].reported(RequestFinalSnapshot)
    for count in (1, 2):
        works_with_fault(made, 6)
        works_with_fault(made, 6, "b", exits=(exited(1, ExitKind.EXCEPTION, 1),))
        made.passes(3.0)
        assert len(made["a"].reported(EndRun)) == count - 1
    (end,) = made["a"].reported(EndRun)
    assert end.exit_code == ExitCode.NOT_ENOUGH_NODES
    assert end.reason == f"node b has a hardware fault, and no spare is free: {XID}"
    assert made.plan("a").reason.endswith("and keeps its ranks: no spare is free")


def test_a_suspected_node_runs_ranks_again_if_too_few_others_are_left() -> None:
    made = started("abcd", cluster_size=ClusterSize(3, 3, 1))
    hold(made, 5, "abc")
    crash(made, 7, 1)
    crash(made, 7, 1)
    assert set(made.running()) == set("acd")
    made.kill("d")
    made.passes(3.0)
    assert set(made.running()) == set("abc")


@pytest.mark.parametrize("dies", ["d", "a"], ids=["spare", "leader"])
def test_a_slow_node_runs_ranks_again_if_too_few_others_are_left(dies: str) -> None:
    made = started("abcde", cluster_size=ClusterSize(3, 3, 2))
    hold(made, 5, "abc")
    leader = made["a"].member.leader
    assert leader is not None
    leader.monitor.failures.bar("b", "it was slow", is_slow=True, now_s=made.now_s)
    made.kill("c")
    made.passes(3.0)
    assert set(made.running()) == set("ade"), "a spare comes first"
    hold(made, 7, "ade", 1)
    made.kill(dies)
    made.passes(15.0)
    assert set(made.running()) == set("abde") - {dies}


def test_a_node_with_a_hardware_fault_runs_none_even_then() -> None:
    made = started("abcd", cluster_size=ClusterSize(3, 3, 1))
    hold(made, 5, "abc")
    works_with_fault(made, 6)
    made.passes(FAULT_LIMIT_S + 2.0)
    assert set(made.running()) == set("acd")
    made.here_is("b", Heartbeat(generation=-1, fault=XID))
    made.passes(1.0)
    made.kill("d")
    made.passes(3.0)
    assert made.running() == {}


def test_deaths_of_an_agent_on_a_faulty_node_do_not_end_the_run() -> None:
    made = started("abc", cluster_size=ClusterSize(3, 3, 0))
    hold(made, 5, "abc")
    for count in (1, 2):
        made["c"].is_frozen = True  # the ballot waits for c, and the next agent of b reports
        made.start_again("b")
        for _ in range(4):
            made.here_is("b", Heartbeat(generation=-1, fault=XID))
            made.passes(0.25)
        made.thaw("c")
        made.passes(10.0)
        assert not made["a"].reported(EndRun), count
        assert set(made.running()) == set("abc"), count


def test_a_leader_that_dies_before_its_ranks_start_leaves_a_faulty_member_its_ranks() -> None:
    made = Agents("abc", settings(cluster_size=ClusterSize(3, 3, 0), last_call_timeout_s=5.0))
    made.reads["a"] = None  # the plan is accepted by the others, and is never chosen
    made.passes(5.0)
    accepted = made["b"].member.follower.newest_plan
    assert accepted is not None
    assert made["b"].member.follower.plan is None
    made.reads.clear()
    made.start_again("a")
    for _ in range(40):
        made.here_is("c", msgspec.structs.replace(made["c"].heartbeat, fault=XID))
        made.passes(0.5)
    assert set(made.running()) == set("abc")
    assert not any(made[one].reported(EndRun) for one in "abc")
