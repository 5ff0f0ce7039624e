"""Collective checks: which nodes take part, and what follows from wrong sums and slow links."""

from typing import Any

import msgspec
import pytest

from ftrun.config.cluster import ClusterSize
from ftrun.config.profile import PreflightConfig
from ftrun.membership.events import NodeChecked
from ftrun.membership.leader.ring_orders import LIMIT_S, MAX_TRIES
from ftrun.monitor.node_fitness import CheckOutcome, NodeFitness, NodeMeasurements
from ftrun.monitor.slow.collective_check import (
    MAX_NODES,
    CollectiveResult,
    HopResult,
    WrongSum,
    lane_value,
    sum_factor,
)
from ftrun.recovery.commands import RunCollectiveCheck
from ftrun.wire.cluster.generation import NodeCard
from ftrun.wire.cluster.membership import CollectiveRing
from tests.unit.membership.agents import Agents
from tests.unit.membership.leader.test_leader import notes, works
from tests.unit.recovery.made import settings

FIT = NodeFitness(CheckOutcome.PASS)
GOOD = 1e9


def begun(node_ids: str, *, members: int, fitness: NodeFitness | None = FIT, **more: Any) -> Agents:
    """A run that has begun; the nodes beyond `members` are spares."""
    size = ClusterSize(2, members, len(node_ids) - members)
    made = Agents(node_ids, settings(cluster_size=size, last_call_timeout_s=2.0, **more))
    if fitness is not None:
        for one in node_ids:
            made.happens(one, NodeChecked(fitness))
    made.passes(5.0)
    assert made.leader() == "a"
    return made


def rings(made: Agents, node_id: str) -> list[CollectiveRing]:
    return [one.ring for one in made[node_id].reported(RunCollectiveCheck)]


def names(ring: CollectiveRing) -> str:
    return "".join(card.node_id for card in ring.nodes)


def wrong(is_as_sent: bool = True) -> WrongSum:
    right = lane_value(0) * sum_factor(3, 1, 0, 1)  # equal in rings of any size
    return WrongSum(1, 0, 1, 0, right + 1, right, is_as_sent)


def answer(
    made: Agents,
    ring: CollectiveRing,
    *,
    rate: dict[str, float] | None = None,
    hops: dict[str, WrongSum] | None = None,
    problem: str = "",
    without: str = "",
) -> None:
    """The nodes report their results; `rate` and `hops` by sender and receiver, as "bc"."""
    count = len(ring.nodes)
    for at, card in enumerate(ring.nodes):
        if card.node_id in without or card.node_id not in made.all:
            continue

        def hop(sender: NodeCard, receiver: str = card.node_id) -> HopResult:
            pair = sender.node_id + receiver
            found = (rate or {}).get(pair, GOOD)
            return HopResult(sender.identity, 10_000_000, found, (hops or {}).get(pair))

        both = (hop(ring.nodes[at - 1]), hop(ring.nodes[(at + 1) % count]))
        result = CollectiveResult(ring.check, count, both, wait_share=0.0, problem=problem)
        reports(made, card.node_id, result)
    made.passes(2.0)


def reports(made: Agents, node_id: str, result: CollectiveResult) -> None:
    figures = NodeMeasurements(collective=result)
    made.happens(node_id, NodeChecked(msgspec.structs.replace(FIT, figures=figures)))


def finished(made: Agents) -> list[str]:
    return notes(made, "a", "collective_finished")


def test_new_nodes_are_checked_once_while_their_ranks_start() -> None:
    made = begun("abcd", members=3)
    (ring,) = rings(made, "a")
    assert names(ring) == "abcd"
    assert ring.num_bytes == 64_000_000
    assert all(rings(made, one) == [ring] for one in "bcd")
    answer(made, ring)
    text = (
        "collective check of a, b, c, d: 20 MB received by each, the slowest link carries 1.0 GB/s"
    )
    assert finished(made) == [text]
    made.kill("b")
    made.passes(5.0)
    assert set(made.running()) == set("acd")
    assert len(rings(made, "a")) == 1, "a restart of ranks is no start of a node"


def test_none_is_made_if_it_is_switched_off_or_nodes_make_no_checks() -> None:
    made = begun("abc", members=3, preflight=PreflightConfig(collective_mb=0))
    assert rings(made, "a") == []
    assert rings(begun("abc", members=3, fitness=None), "a") == []
    partly = NodeFitness(CheckOutcome.PASS, is_whole=False)  # agents that were restarted in place
    assert rings(begun("abc", members=3, fitness=partly), "a") == []


def test_the_ranks_of_a_node_with_a_wrong_sum_move_to_the_spare() -> None:
    made = begun("abcd", members=3)
    works(made, 0, "abc", attached=False)
    answer(made, rings(made, "a")[0], hops={"bc": wrong(), "ba": wrong()})
    assert set(made.running()) == set("acd")
    (text,) = notes(made, "a", "wrong_sum_found")
    assert text.startswith("node b: it computed a wrong sum, found by a (round 1, 1 nodes: ")
    assert "; sums were wrong" in finished(made)[0]
    assert "node b is evicted: node b has a hardware fault" in made.plan("a").reason
    leader = made["a"].member.leader
    assert leader is not None
    assert leader.monitor.excluded(now_s=made.now_s + 7200.0) == {"b"}, "while its agent runs"
    made.kill("a")
    made.passes(10.0)
    assert set(made.running()) == set("cd"), "the next leader reads the results too"
    assert len(rings(made, "c")) == 1


def test_without_a_spare_it_keeps_its_ranks_and_is_reported() -> None:
    made = begun("ab", members=2)
    works(made, 0, "ab", attached=False)
    answer(made, rings(made, "a")[0], hops={"ba": wrong()})
    assert set(made.running()) == set("ab")
    assert len(notes(made, "a", "wrong_sum_found")) == 1


def test_without_a_spare_an_elastic_run_shrinks() -> None:
    made = begun("abc", members=3)
    works(made, 0, "abc", attached=False)
    answer(made, rings(made, "a")[0], hops={"ba": wrong(), "bc": wrong()})
    assert set(made.running()) == set("ac")


def test_a_link_that_changes_bytes_is_reported_once_and_no_node_is_excluded() -> None:
    made = begun("abcd", members=3)
    works(made, 0, "abc", attached=False)
    ring = rings(made, "a")[0]
    answer(made, ring, hops={"bc": wrong(is_as_sent=False)})
    made.passes(2.0)
    (text,) = notes(made, "a", "wrong_sum_found")
    assert text.startswith("collective check: bytes have changed between b and c (")
    assert set(made.running()) == set("abc")


def test_a_node_that_joins_is_checked_with_spares_first() -> None:
    made = begun("abc", members=2)
    answer(made, rings(made, "a")[0])
    made.start("d")
    made.happens("d", NodeChecked(FIT))
    made.passes(2.0)
    (ring,) = rings(made, "d")
    assert names(ring) == "dca"
    assert ring.check != rings(made, "b")[0].check
    answer(made, ring)
    assert len(finished(made)) == 2
    assert len(rings(made, "a")) == 2


def test_a_node_alone_is_checked_with_nobody() -> None:
    size = ClusterSize(1, 2, 0)
    made = Agents("a", settings(cluster_size=size, last_call_timeout_s=2.0))
    made.happens("a", NodeChecked(FIT))
    made.passes(5.0)
    assert made.running() == {"a": 0}
    assert rings(made, "a") == []


def test_many_nodes_are_checked_in_several_rings() -> None:
    node_ids = "abcdefghijklmnopqr"
    made = begun(node_ids, members=len(node_ids))
    (ring,) = rings(made, "a")
    assert len(ring.nodes) == MAX_NODES
    answer(made, ring)
    (rest,) = rings(made, "r")
    assert names(rest) == "qra", "filled up, so that two nodes check the sums of each"
    answer(made, rest)
    assert rings(made, "b") == [ring]


def test_the_evidence_of_one_neighbour_or_on_several_nodes_is_a_report_only() -> None:
    for hops, count in ({"bc": wrong()}, 1), ({"bc": wrong(), "ba": wrong(), "da": wrong()}, 3):
        made = begun("abcd", members=3)
        works(made, 0, "abc", attached=False)
        answer(made, rings(made, "a")[0], hops=hops)
        made.passes(2.0)
        found = notes(made, "a", "wrong_sum_found")
        assert len(found) == count
        assert all(one.endswith("; no node is excluded for it") for one in found)
        assert set(made.running()) == set("abc")


def test_a_node_with_the_evidence_of_one_neighbour_is_checked_a_second_time() -> None:
    made = begun("abcd", members=3)
    works(made, 0, "abc", attached=False)
    answer(made, rings(made, "a")[0], hops={"bc": wrong()})
    second = rings(made, "b")[1]
    assert names(second) == "bda", "with spares first"
    answer(made, second, hops={"bd": wrong(), "ba": wrong()})
    assert set(made.running()) == set("acd")
    made.passes(10.0)
    assert len(rings(made, "b")) == MAX_TRIES


def test_a_second_named_node_counts_although_its_evidence_arrives_later() -> None:
    made = begun("abcd", members=3)
    works(made, 0, "abc", attached=False)
    ring = rings(made, "a")[0]
    hops = {"bc": wrong(), "ba": wrong(), "cd": wrong()}
    answer(made, ring, hops=hops, without="d")
    assert notes(made, "a", "wrong_sum_found") == []
    answer(made, ring, hops=hops)
    assert set(made.running()) == set("abc")
    assert len(notes(made, "a", "wrong_sum_found")) == 3


def test_a_node_that_was_found_stays_found_if_the_evidence_is_gone() -> None:
    made = begun("ab", members=2)
    works(made, 0, "ab", attached=False)
    answer(made, rings(made, "a")[0], hops={"ba": wrong()})
    leader = made["a"].member.leader
    assert leader is not None
    assert list(leader.monitor.reports.wrong_sums) == ["b"]
    reports(made, "a", CollectiveResult("another check", 2))
    made.passes(2.0)
    assert list(leader.monitor.reports.wrong_sums) == ["b"]
    assert len(notes(made, "a", "wrong_sum_found")) == 1


def test_a_node_that_was_found_takes_part_in_no_later_check() -> None:
    made = begun("ab", members=2)
    works(made, 0, "ab")
    answer(made, rings(made, "a")[0], hops={"ba": wrong()})
    assert set(made.running()) == set("ab"), "it is a member until its ranks can move"
    made.start("d")
    made.happens("d", NodeChecked(FIT))
    made.passes(2.0)
    assert names(rings(made, "d")[0]) == "da"


def test_a_result_of_another_leaders_check_ends_no_check() -> None:
    made = begun("abc", members=3)
    (ring,) = rings(made, "a")
    other = msgspec.structs.replace(ring, leader=("b", 7))
    assert other.number == ring.number
    answer(made, other)
    assert finished(made) == []
    answer(made, ring)
    assert len(finished(made)) == 1


def test_the_next_leader_uses_numbers_again_and_its_order_is_another_one() -> None:
    made = begun("abcd", members=3)
    (first,) = rings(made, "b")
    made.kill("a")
    made.passes(10.0)
    found = rings(made, "b")
    assert [one.number for one in found] == [1, 1], "each leader counts its own"
    assert len({one.check for one in found}) == 2
    assert found[1].leader == made[made.leader()].member.me.identity
    assert found[1].generation > first.generation


def test_an_incomplete_check_is_repeated_once_without_the_lost_node() -> None:
    made = begun("abcd", members=3)
    (ring,) = rings(made, "a")
    made.kill("b")
    answer(made, ring, problem="b has ended the check")
    assert "a: b has ended the check" in finished(made)[0]
    assert "b has sent no result" in finished(made)[0]
    again = rings(made, "a")[1]
    assert names(again) == "acd"
    answer(made, again, problem="no more")
    made.passes(10.0)
    assert len(rings(made, "a")) == MAX_TRIES
    assert notes(made, "a", "wrong_sum_found") == []


def test_a_node_without_a_result_does_not_hold_up_the_next_check() -> None:
    made = begun("abc", members=3)
    (ring,) = rings(made, "a")
    answer(made, ring, without="c")
    assert finished(made) == []
    made.passes(LIMIT_S)
    assert finished(made) == ["collective check of a, b, c: not completed (c has sent no result)"]
    made.passes(5.0)
    assert names(rings(made, "c")[1]) == "cab", "the other two have a result"


SLOW = {"ba": 1e6, "bc": 1e6, "bd": 1e6}


def test_a_slow_node_is_a_warning_and_keeps_its_ranks() -> None:
    made = begun("abcd", members=3)
    works(made, 0, "abc", attached=False)
    answer(made, rings(made, "a")[0], rate=SLOW)
    made.passes(5.0)
    assert set(made.running()) == set("abc")
    (text,) = notes(made, "a", "node_below_median")
    assert text == "node b is slow: 1.0 MB/s in the collective check (others 1000)"


def test_a_check_that_is_not_done_in_time_names_the_slow_node_too() -> None:
    made = begun("abcd", members=3)
    answer(made, rings(made, "a")[0], rate=SLOW, problem="b was not done in time")
    assert len(notes(made, "a", "node_below_median")) == 1


def test_heartbeats_without_new_results_cost_no_judgement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = begun("abcd", members=3)
    answer(made, rings(made, "a")[0])
    judged: list[int] = []
    monkeypatch.setattr(
        "ftrun.membership.leader.ring_orders.wrong_hops", lambda found: judged.append(len(found))
    )
    made.passes(20.0)
    assert judged == []


def test_a_bug_costs_the_checks_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made = begun("abc", members=3)
    monkeypatch.setattr("ftrun.membership.leader.ring_orders.wrong_hops", lambda _: 1 / 0)
    answer(made, rings(made, "a")[0])
    text = "no collective check, by a bug in ftrun: ZeroDivisionError: division by zero"
    assert finished(made) == [text]
    assert set(made.running()) == set("abc")
