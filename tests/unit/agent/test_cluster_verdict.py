"""The summary line of status, made from real members of a run, matches their state."""

from types import SimpleNamespace
from typing import Any

import msgspec

from ftrun.agent.publish.cluster_status import cluster_status
from ftrun.config.cluster import ClusterSize
from ftrun.events import ExitKind
from ftrun.monitor.verdicts import Confidence, Verdict, VerdictKind
from ftrun.recovery.suspicions import HangFinding
from ftrun.wire.cluster.membership import Heartbeat, RankReport
from ftrun.wire.messages.status import ClusterStatus
from tests.unit.membership.agents import Agents
from tests.unit.membership.leader.test_leader import exited, hold, started, works


def status(made: Agents, node_id: str = "a") -> ClusterStatus:
    member = made[node_id].member
    leader = member.leader
    control_loop: Any = SimpleNamespace(
        plan=member.follower.plan,
        member=member,
        settings=made.settings,
        monitor=leader.monitor if leader is not None else None,
        leads=leader is not None,
    )
    return cluster_status(control_loop)


def verdict(made: Agents, node_id: str = "a") -> str:
    return status(made, node_id).summary


def protected(members: str, spares: int, *, least: int = 0, **changes: object) -> Agents:
    """A run whose newest snapshot tolerates one lost node; it can continue with `least` nodes."""
    count = len(members)
    names = "abcdefgh"[: count + spares]
    made = started(names, cluster_size=ClusterSize(least or count, count, spares), **changes)
    hold(made, 8, members)
    works(made, 9, members, survives=1, ready=(0, 8))
    return made


def test_a_lost_spare_has_no_vote_and_still_counts_among_all() -> None:
    made = protected("ab", 2)
    assert "running at step 9 on 2 nodes and 2 spares" in verdict(made)
    assert "survives any 1 node, back to step 8" in verdict(made)
    made.kill("d")
    # 3 of 4 voters are left; after another loss 2 would be left, which is no majority.
    assert made["a"].member.leader is not None
    assert len(made.plan("a").voters) == 4
    assert "on 2 nodes and 1 spare" in verdict(made)
    assert "the next lost node pauses the run" in verdict(made)


def test_an_unreachable_witness_does_not_vote() -> None:
    made = protected("ab", 0, least=1, etcd=["etcd:2379"])
    assert made.plan("a").witness
    assert "survives any 1 node, back to step 8" in verdict(made)
    made.outside.unreachable.update("ab")
    made.passes(5.0)
    assert not made["a"].member.witness.is_reached
    assert "the next lost node pauses the run" in verdict(made)


def test_if_no_node_may_be_lost_the_next_loss_pauses_the_run() -> None:
    made = protected("abc", 0)
    assert "the next lost node pauses the run" in verdict(made)
    works(made, 10, "abc", survives=0, ready=(0, 8))
    assert "the state of a lost node cannot be rebuilt" in verdict(made)


def test_a_restored_version_is_protected_where_it_is_until_this_generation_protects_it() -> None:
    made = protected("abc", 2)
    works(made, 9, "b", exits=(exited(1, ExitKind.SIGNAL, -9),))
    made.passes(3.0)
    assert made.running() == {"a": 1, "b": 1, "c": 1}
    assert "survives any 1 node, back to step 8, as protected in generation 0" in verdict(made)
    assert status(made).tolerated_losses == 1
    works(made, 9, "ab", survives=1, ready=(0, 8))
    assert "as protected in generation 0" in verdict(made)
    works(made, 9, "c", survives=1, ready=(0, 8))
    assert "survives any 1 node, back to step 8, generation" not in verdict(made)
    assert "as protected" not in verdict(made)


def test_a_lost_node_counts_among_the_losses_that_the_restored_version_tolerates() -> None:
    made = protected("abc", 2)
    made.kill("b")
    made.passes(1.0)
    assert made.running() == {"a": 1, "c": 1, "d": 1}
    unprotected = "the state of a lost node cannot be rebuilt until this generation has protected"
    assert unprotected in verdict(made)
    works(made, 9, "acd", survives=1, ready=(0, 8))
    assert "survives any 1 node, back to step 8" in verdict(made)


def test_a_run_that_stops_or_ends_is_not_running() -> None:
    made = protected("abc", 1)
    made.here_is("a", Heartbeat(generation=0, state="running", attached=True, step=9, stops=1))
    assert verdict(made).startswith("stopping at step 9 on 3 nodes and 1 spare")
    assert status(made).state == "stopping"
    for rank, one in enumerate("abc"):
        works(made, 9, one, exits=(exited(rank, ExitKind.FINISHED, 0),), stops=1)
    leader = made["a"].member.leader
    assert leader is not None
    assert leader.shutdown.ending is not None
    assert verdict(made).startswith("ending at step 9 on ")
    assert status(made).state == "ending"


def test_a_suspected_hang_is_named_before_and_after_its_verdict() -> None:
    made = protected("abc", 1)
    leader = made["a"].member.leader
    assert leader is not None
    incidents = leader.monitor.incidents
    progress = leader.monitor.reports.progress
    incidents.suspected(
        HangFinding(unresponsive_s=30.0, deadline_s=5.0), progress, now_s=made.now_s
    )
    unresponsive = "NO STEP for "
    assert verdict(made).startswith(unresponsive)
    assert "on 3 nodes and 1 spare: a hang is suspected" in verdict(made)
    found = Verdict(
        kind=VerdictKind.BUSY_LOOP,
        culprits=(1,),
        text="rank 1 makes no progress",
        confidence=Confidence.LIKELY,
    )
    incidents.named(found, (), now_s=made.now_s)
    assert "on 3 nodes and 1 spare: rank 1 makes no progress" in verdict(made)


def test_without_a_step_of_this_generation_the_run_is_starting() -> None:
    made = protected("abc", 1)
    made.kill("b")
    made.passes(1.0)
    assert verdict(made).startswith("starting from step 8 on 3 nodes, no step yet, generation 1")
    assert verdict(made).endswith("; lost: b")


def test_the_step_is_not_known_until_a_rank_has_made_one() -> None:
    made = protected("abc", 1)
    first = RankReport(rank=0, pid=10, state="running", step=0, age_s=-1.0)
    works(made, 0, "a", ranks=(first,))
    node = next(one for one in status(made).nodes if one.node_id == "a")
    assert (node.step, node.ranks[0].step, node.ranks[0].heartbeat_age_s) == (None, None, None)
    works(made, 9, "a", ranks=(msgspec.structs.replace(first, step=9, age_s=0.1),))
    node = next(one for one in status(made).nodes if one.node_id == "a")
    assert (node.step, node.ranks[0].step, node.ranks[0].heartbeat_age_s) == (9, 9, 0.1)


def test_nodes_of_a_paused_run_do_not_run() -> None:
    made = started("abc")
    made.cut("b")
    made.cut("c")
    made.passes(10.0)
    found = status(made)
    assert found.summary.startswith("PAUSED: too few of the voters (3 nodes)")
    assert {node.node_id: node.state for node in found.nodes} == {
        "a": "idle", "b": "unknown", "c": "unknown",
    }  # fmt: skip


def test_a_node_that_follows_names_its_leader() -> None:
    assert verdict(started("abc"), "b") == "following a"
