"""Runs with an outside witness: nodes find each other there, and it breaks ties if reachable."""

import pytest

from ftrun.config.cluster import ClusterSize
from ftrun.errors import ExitCode
from ftrun.membership.discovery import MemberRole
from ftrun.membership.events import NodeReported, WitnessAnswered
from ftrun.recovery.commands import (
    EndRun,
    JournalEntry,
    QueryWitness,
    SuspendRanks,
    WitnessOperation,
)
from ftrun.wire.cluster.membership import Heartbeat
from tests.unit.membership.agents import Agents
from tests.unit.recovery.made import card, plan, settings

CLUSTER_SIZE = {
    "etcd": ["etcd:2379"],
    "cluster_size": ClusterSize(1, 2, 0),
    "last_call_timeout_s": 2.0,
    "blank_wait_s": 1.0,
    "pause_timeout_s": 100.0,
}


def meet(node_ids: str = "ab", **changes: object) -> Agents:
    """These nodes are started, and look for each other at the witness."""
    return Agents(node_ids, settings(**{**CLUSTER_SIZE, **changes}))


def started(node_ids: str = "ab", **changes: object) -> Agents:
    made = meet(node_ids, **changes)
    made.passes(6.0)
    assert set(made.running()) <= set(node_ids)
    assert len(set(made.running().values())) == 1
    return made


def notes(made: Agents, node_id: str, kind: str) -> list[str]:
    return [
        one.record.text for one in made[node_id].reported(JournalEntry) if one.record.kind == kind
    ]


# --- finding the run --------------------------------------------------------------------------


def test_first_to_claim_gathers_and_the_others_come_to_it() -> None:
    made = meet()
    made.passes(0.5)
    assert (made.role("a"), made.role("b")) == (MemberRole.GATHERING, MemberRole.JOINING)
    made.passes(2.0)
    assert made.running() == {"a": 0, "b": 0}
    assert made.outside.register is not None
    assert made.plan("a").witness == made.outside.register.life
    assert made.outside.leader == made["a"].card
    assert notes(made, "a", "two_voters_warning") == []


def test_another_one_gathers_if_the_first_is_lost() -> None:
    made = meet("abc", cluster_size=ClusterSize(2, 2, 0))
    made.cut("a")
    made.passes(0.5)
    assert made.role("a") is MemberRole.GATHERING
    made.kill("a")
    made.passes(8.0)
    assert made.running() == {"b": 0, "c": 0}


def test_a_node_that_finds_that_another_gathers_goes_to_it() -> None:
    made = meet(cluster_size=ClusterSize(2, 2, 0))
    made.cut("a")
    made.outside.unreachable.add("a")
    made.passes(0.5)
    assert made.role("a") is MemberRole.JOINING
    assert made["a"].member.discovery.reach == "etcd is out of reach"
    assert made.role("b") is MemberRole.GATHERING
    made.outside.unreachable = {"b"}
    made.passes(4.0)
    assert (made.role("a"), made.role("b")) == (MemberRole.GATHERING, MemberRole.GATHERING)
    made.heal()
    made.outside.unreachable.clear()
    made.passes(4.0)
    assert made.running() == {"a": 0, "b": 0}


def test_no_run_begins_without_its_promise() -> None:
    made = meet()
    made.passes(1.0)
    made.outside.unreachable = {"a", "b"}
    made.passes(5.0)
    assert made.running() == {}
    assert "no run starts without it" in notes(made, "a", "run_paused")[-1]
    made.outside.unreachable.clear()
    made.passes(3.0)
    assert made.running() == {"a": 0, "b": 0}


def test_run_that_is_remembered_is_not_restarted_by_a_part_of_it() -> None:
    made = started()
    made.kill("a", "b")
    made.start("b", 2)
    made.passes(20.0)
    assert made.running() == {}
    assert made.role("b") is MemberRole.GATHERING
    assert "which a may resume" in made["b"].member.discovery.reach
    made.start("a", 2)
    made.passes(5.0)
    assert made.running() == {"a": 0, "b": 0}
    assert made.plan("a").witness not in (0, 71)


def test_agent_that_was_started_again_gets_the_leader() -> None:
    made = started("abc", cluster_size=ClusterSize(2, 2, 1))
    made.cut("c", "b")
    made.start_again("c")
    made.passes(4.0)
    assert made.role("c") is MemberRole.FOLLOWING
    assert made.leader() == "a"


def test_agent_that_was_started_again_where_no_node_leads_continues_looking() -> None:
    made = started("abc", cluster_size=ClusterSize(2, 2, 1))
    made.cut("c")
    made.outside.unreachable = {"a", "b"}
    made.outside.ends_s = 0.0
    made.start_again("c")
    made.passes(1.0)
    assert made.role("c") is MemberRole.SEEKING
    assert made.outside.leader is None
    made.heal()
    made.passes(6.0)
    assert made.role("c") is MemberRole.FOLLOWING


@pytest.mark.parametrize("away_s", [0.5, 20.0])
def test_a_returned_node_finds_the_node_that_waits_for_it(away_s: float) -> None:
    """It returns without memory, and its address at the witness may have expired."""
    made = started(cluster_size=ClusterSize(2, 2, 0))
    made.cut("a")
    made.kill("a")
    made.passes(away_s)
    made.heal()
    made.start("a", 2, port=31000)
    made.passes(12.0)
    assert made.running().keys() == {"a", "b"}
    assert made.plan("a").generation > 0


def test_a_node_that_is_asked_to_leave_ends() -> None:
    made = meet()
    final = WitnessAnswered(
        QueryWitness(WitnessOperation.CLAIM, 1.0), True, reason="taken", is_final=True
    )
    made.happens("a", final)
    assert made["a"].reported(EndRun) == [EndRun(ExitCode.USAGE, "taken")]


def test_run_that_is_over_is_forgotten() -> None:
    made = started()
    for one in "ab":
        made.happens(
            one, NodeReported(Heartbeat(generation=0, state="running", stops=1, stop_signal=15))
        )
    made.passes(8.0)
    for one in "ab":
        made.happens(
            one, NodeReported(Heartbeat(generation=-1, state="idle", stops=1, stop_signal=15))
        )
    made.passes(60.0)
    if made.role("a") is MemberRole.ENDED:
        assert (made.outside.register, made.outside.leader) == (None, None)


# --- ties -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["a", "b"])
def test_survivor_of_two_continues_when_the_other_is_unresponsive(lost: str) -> None:
    made = started()
    left = "b" if lost == "a" else "a"
    made.cut(lost)
    made.outside.unreachable.add(lost)
    made.passes(8.0)
    assert made[lost].reported(SuspendRanks), "it suspends before it may have been replaced"
    assert made[left].runs == 1
    assert [one.node_id for one in made.plan(left).members] == [left]
    made.heal()
    made.outside.unreachable.clear()
    made.passes(15.0)
    assert set(made.running()) == {"a", "b"}
    assert len(set(made.running().values())) == 1


def test_of_two_ranks_that_both_reach_it_the_leader_continues() -> None:
    made = started()
    made.cut("a")
    made.passes(10.0)
    assert made.running() == {"a": 1}
    assert "missing: a, the witness" in notes(made, "b", "run_paused")[-1]
    made.heal()
    made.passes(12.0)
    assert set(made.running()) == {"a", "b"}


def test_without_it_the_survivor_of_two_pauses_until_it_returns() -> None:
    made = started()
    made.outside.unreachable = {"a", "b"}
    made.kill("b")
    made.cuts.add(frozenset("ab"))
    made.start("b", 2)
    made["b"].is_frozen = True
    made.passes(1.5)
    made.cut("b")
    made.passes(6.0)
    assert made.running() == {}
    assert "PAUSED" in notes(made, "a", "run_paused")[-1]


def test_half_of_four_continues_with_it() -> None:
    made = started("abcd", cluster_size=ClusterSize(2, 2, 2))
    assert made.plan("a").witness
    for one in "ac":
        made.cut(one)
    made.outside.unreachable = {"a", "c"}
    made.passes(12.0)
    assert set(made.running()) == {"b", "d"}


def test_odd_number_of_nodes_decides_without_it() -> None:
    made = started("abc", cluster_size=ClusterSize(2, 2, 1))
    assert made.plan("a").witness == 0
    made.outside.unreachable = set("abc")
    made.cut("a")
    made.passes(8.0)
    assert set(made.running()) == {"b", "c"}


# --- an unreachable witness returns -----------------------------------------------------------


def test_its_vote_is_removed_while_it_is_unreachable_and_restored() -> None:
    made = started()
    made.outside.unreachable = {"a", "b"}
    made.passes(8.0)
    assert made.running() == {"a": 0, "b": 0}
    assert made.plan("b").configuration_id == (0, 1)
    assert made.plan("b").witness == 0
    made.outside.unreachable.clear()
    made.passes(8.0)
    assert made.plan("b").configuration_id == (0, 2)
    assert made.plan("b").witness
    assert made.outside.register is not None
    assert made.outside.register.plan == made.plan("a")
    assert made.running() == {"a": 0, "b": 0}


def test_one_that_has_lost_its_memory_votes_as_another_one() -> None:
    made = started()
    before = made.plan("a").witness
    made.outside.register, made.outside.leader = None, None
    made.passes(8.0)
    assert made.plan("b").witness not in (0, before)
    assert made.running() == {"a": 0, "b": 0}


def test_number_that_another_one_took_there_is_not_taken_again() -> None:
    made = started()
    asked = QueryWitness(WitnessOperation.PROMISE, made.now_s, 7)
    made.outside.leader = None
    made.outside.ask(card("x"), asked, made.now_s)
    made.outside.ends_s = made.now_s
    made.kill("b")
    made.passes(8.0)
    assert made.running() == {"a": 8}
    assert made.outside.register is not None
    assert made.outside.register.promised == 8


def test_joining_node_that_has_the_claim_is_called_by_the_leader() -> None:
    made = started("ab", cluster_size=ClusterSize(1, 3, 0), last_call_timeout_s=2.0)
    made.outside.unreachable = {"a", "b"}
    made.passes(4.0)
    made.start("c")
    made.passes(1.0)
    assert made.role("c") is MemberRole.GATHERING
    made.outside.unreachable.clear()
    made.passes(6.0)
    assert set(made.running()) == {"a", "b", "c"}
    assert plan(0, "a").witness == 0
