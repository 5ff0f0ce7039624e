"""The history of a run outlives its leaders: restarts, lost nodes, nodes that have left.

Nodes that were lost too often, or evicted, run no ranks for an hour.
"""

import msgspec
import pytest

from ftrun import clock
from ftrun.config.cluster import ClusterSize
from ftrun.config.profile import PreflightConfig
from ftrun.membership.events import MessageReceived, NodeChecked
from ftrun.membership.leader.draining import NOTICE_S
from ftrun.membership.leader.failure_detector import FailureDetector
from ftrun.monitor.node_fitness import NodeFitness, NodeMeasurements, judge
from ftrun.recovery.past import MAX_GONE, MAX_RESTARTS, NodeFailures, Past
from ftrun.recovery.snapshot_coordination import MemberReports
from ftrun.wire.cluster.generation import FailureHistory
from ftrun.wire.cluster.membership import Heartbeat
from ftrun.wire.cluster.messages import ReadmitNode
from tests.unit.agent.test_cluster_verdict import status, verdict
from tests.unit.membership.agents import Agents
from tests.unit.membership.leader.test_draining import ask, at_boundary, protected_again
from tests.unit.membership.leader.test_leader import hold, notes, started, with_spares, works
from tests.unit.recovery.made import SETTINGS, card, meet, plan


def places(made: Agents, node_id: str) -> dict[str, str]:
    return {node.node_id: node.role for node in status(made, node_id).nodes}


def drained(made: Agents, node_id: str, *, members: str = "abc", after: str = "adc") -> None:
    """A member drains: it ends once a spare has its ranks."""
    works(made, 5, members)
    ask(made, node_id)
    made.passes(NOTICE_S + 0.5)
    at = at_boundary(made, members, node_id)
    made.passes(0.5)
    protected_again(made, after, at)
    made.kill(node_id)
    made.passes(1.0)


def test_a_node_that_was_drained_has_left_and_is_not_lost() -> None:
    made = with_spares()
    drained(made, "b")
    assert notes(made, "a", "node_lost") == []
    assert notes(made, "a", "node_left") == ["node b has drained"]
    assert places(made, "a")["b"] == "left"
    assert "lost:" not in verdict(made)
    assert made["a"].member.leader is not None
    assert made["a"].member.leader.monitor.history(now_s=made.now_s).node_failures == {}


def test_a_node_that_was_asked_to_drain_and_dies_with_its_ranks_is_lost_but_has_not_failed() -> (
    None
):
    made = with_spares()
    works(made, 5)
    ask(made, "b")
    made.passes(NOTICE_S + 0.5)
    made.kill("b")
    made.passes(1.0)
    assert made.running() == {"a": 1, "c": 1, "d": 1}
    assert len(notes(made, "a", "node_lost")) == 1
    assert places(made, "a")["b"] == "lost"
    assert made["a"].member.leader is not None
    assert made["a"].member.leader.monitor.history(now_s=made.now_s).node_failures == {}


def test_a_new_leader_knows_restarts_lost_nodes_and_nodes_that_have_left() -> None:
    made = with_spares("abcdef")
    drained(made, "b")  # generation 1 is of a, d, c
    hold(made, 9, "adc", 1)
    made.kill("d")
    made.passes(1.0)
    assert set(made.running().values()) == {2}
    hold(made, 12, "aec", 2)
    made.passes(30.0)
    before = status(made, "a").restarts
    assert [one.generation for one in before] == [1, 2]
    made.kill("a")
    made.passes(6.0)
    leader = made.leader()
    assert leader not in ("", "a")
    assert set(made.running().values()) == {3}
    found = status(made, leader)
    assert {one: place for one, place in places(made, leader).items() if one in "abd"} == {
        "a": "lost", "b": "left", "d": "lost",
    }  # fmt: skip
    assert found.summary.endswith("lost: a, d")
    assert [one.generation for one in found.restarts] == [1, 2, 3]
    first, second, _ = found.restarts
    assert first.cause == "draining b"
    assert second.cause == "node d is lost: the connection is refused"
    # Its age is that of the event, not of the new leader. (Status uses the real clock.)
    assert second.age_s == pytest.approx(before[1].age_s, abs=1.5)
    failures = made[leader].member.leader
    assert failures is not None
    assert set(failures.monitor.history(now_s=made.now_s).node_failures) == {"a", "d"}


def test_a_leader_that_was_drained_has_not_failed() -> None:
    made = with_spares()
    drained(made, "a", after="bcd")
    made.passes(5.0)
    assert made.leader() == "b"
    assert places(made, "b")["a"] == "left"
    assert "lost:" not in verdict(made, "b")
    leader = made["b"].member.leader
    assert leader is not None
    assert leader.monitor.history(now_s=made.now_s).node_failures == {}


def test_a_node_that_has_returned_is_not_lost() -> None:
    made = started("abc")
    made.kill("c")
    made.passes(1.0)
    leader = made["a"].member.leader
    assert leader is not None
    assert [one.card.node_id for one in leader.monitor.past.gone] == ["c"]
    made.start("c", incarnation=2)
    made.passes(10.0)
    assert leader.monitor.past.gone == []
    assert places(made, "a")["c"] != "lost"


def test_what_is_kept_has_a_bound() -> None:
    made, peers = Past(), FailureDetector(card("me"), SETTINGS)
    for number in range(50):
        made.begins(plan(number, "ab", reason="x" * 1000), now_s=float(number))
        peer = meet(peers, f"n{number}")
        made.record_loss(peer, "y" * 1000, was_member=True, now_s=float(number))
    restarts, gone = made.past_restarts(now_s=60.0), made.gone_nodes(now_s=60.0)
    assert [one.generation for one in restarts] == list(range(50 - MAX_RESTARTS, 50))
    assert len(gone) == MAX_GONE
    assert max(len(one.cause) for one in restarts) == max(len(one.reason) for one in gone) == 200
    assert gone[-1].card.node_id == "n49"
    assert gone[-1].age_s == 11.0


def test_what_a_leader_has_seen_itself_stays() -> None:
    first, second, peers = Past(), Past(), FailureDetector(card("me"), SETTINGS)
    for made, reason, at_s in ((first, "old", 10.0), (second, "new", 30.0)):
        made.begins(plan(1, "ab", reason=reason), now_s=at_s)
        made.record_loss(meet(peers, "c"), reason, was_member=True, now_s=at_s)
    first.measured(1, 0.5)
    first.measured(7, 0.5)
    first.begins(plan(2, "ab", reason="later"), now_s=12.0)
    second.succeed(first.past_restarts(now_s=20.0), first.gone_nodes(now_s=20.0), known_s=20.0)
    assert [(one.cause, one.at_s, one.downtime_s) for one in second.restarts] == [
        ("new", 30.0, None), ("later", 12.0, None),
    ]  # fmt: skip
    assert [one.reason for one in second.gone] == ["new"]
    third = Past()
    third.succeed(first.past_restarts(now_s=20.0), first.gone_nodes(now_s=20.0), known_s=20.0)
    assert [(one.cause, one.at_s, one.downtime_s) for one in third.restarts] == [
        ("old", 10.0, 0.5), ("later", 12.0, None),
    ]  # fmt: skip
    assert not third.was_asked_to_drain("c")


def test_another_agent_of_a_node_that_has_left_is_lost_like_any_other() -> None:
    made, peers = Past(), FailureDetector(card("me"), SETTINGS)
    peer = meet(peers, "c")
    made.leaves(peer.card, now_s=1.0)
    made.leaves(peer.card, now_s=2.0)
    assert made.gone[0].at_s == 1.0
    made.record_loss(peer, "refused", was_member=False, now_s=3.0)
    assert peer.has_left
    again = meet(peers, card("c", 2))
    made.record_loss(again, "refused", was_member=False, now_s=4.0)
    assert not again.has_left
    assert made.gone[0].reason == "refused"
    made.returns(card("c", 2))
    made.returns(card("c", 2))
    assert made.gone == []


def failures(per_hour: int = 3) -> NodeFailures:
    return NodeFailures(per_hour, MemberReports())


def history(made: NodeFailures, now_s: float) -> FailureHistory:
    """What the next leader reads in a plan."""
    return made.add_to(FailureHistory(), now_s=now_s)


def test_losses_of_an_hour_are_counted_next_to_those_of_the_last_leader() -> None:
    made = failures()
    made.succeed(FailureHistory(node_failures={"a": [1000.0], "b": [10.0]}), known_s=2000.0)
    made.note("a", now_s=2100.0)
    made.note("a", now_s=2200.0)
    assert made.ages_s(now_s=2200.0) == {"a": [1200.0, 100.0, 0.0], "b": [210.0]}
    assert made.excluded(now_s=2200.0) == {"a": (2400.0, "3 failures in an hour")}
    assert made.excluded(now_s=4600.0) == {}
    assert made.ages_s(now_s=6000.0) == {}


def test_a_node_returns_when_few_enough_of_its_failures_are_left() -> None:
    made = failures(2)
    for at_s in (100.0, 400.0, 900.0):
        made.note("a", now_s=at_s)
    assert made.excluded(now_s=1000.0) == {"a": (3000.0, "3 failures in an hour")}
    assert made.excluded(now_s=3999.0) == {"a": (1.0, "2 failures in an hour")}
    assert made.excluded(now_s=4000.0) == {}
    once = failures(1)
    once.note("a", now_s=0.0)
    assert once.excluded(now_s=0.0) == {"a": (3600.0, "1 failure in an hour")}


def test_a_barred_node_stays_excluded_for_an_hour_also_under_the_next_leader() -> None:
    made, successor = failures(), failures()
    made.bar("a", "slow", now_s=100.0)
    assert made.excluded(now_s=200.0) == {"a": (3500.0, "slow")}
    successor.succeed(history(made, 200.0), known_s=50.0)
    assert successor.excluded(now_s=3549.0) == {"a": (1.0, "slow")}
    assert successor.excluded(now_s=3550.0) == {}
    successor.succeed(FailureHistory(barred={"b": 0.0}), known_s=60.0)
    assert successor.excluded(now_s=61.0) == {"b": (3599.0, "a failure")}
    successor.succeed(FailureHistory(), known_s=60.0)
    assert successor.excluded(now_s=61.0) == {}


def test_the_later_end_of_two_exclusions_counts() -> None:
    made = failures(1)
    made.note("a", now_s=0.0)
    made.bar("a", "slow", now_s=100.0)
    made.bar("b", "slow", now_s=0.0)
    made.note("b", now_s=100.0)
    assert made.excluded(now_s=200.0) == {
        "a": (3500.0, "slow"), "b": (3500.0, "1 failure in an hour"),
    }  # fmt: skip


def test_what_is_kept_of_a_barred_node_does_not_grow_with_the_limit() -> None:
    """A limit of 100,000 made each plan 0.9 MB larger, and agents too slow for their heartbeats."""
    made = failures(100_000)
    made.bar("a", "x" * 1000, now_s=1.0)
    assert set(made.excluded(now_s=2.0)) == {"a"}
    assert len(msgspec.msgpack.encode(history(made, 2.0))) < 700


def test_a_fault_excludes_while_it_is_reported_and_not_a_member() -> None:
    reports = MemberReports()
    made = NodeFailures(3, reports)
    reports.take("b", Heartbeat(generation=-1, fault="GPU 2 is lost"))
    reason = "it reports a hardware fault: GPU 2 is lost"
    assert made.excluded(now_s=1e6) == {"b": (None, reason)}
    made.succeed(FailureHistory(), plan(0, "ac"), known_s=0.0)
    assert set(made.excluded(now_s=1.0)) == {"b"}
    made.succeed(FailureHistory(), plan(0, "ab"), known_s=0.0)
    assert made.excluded(now_s=1.0) == {}, "its ranks may be running"
    made.newest = None
    reports.begin(plan(0, "ab"))
    assert made.excluded(now_s=1.0) == {}
    reports.forget("b")
    reports.begin(plan(0, "ac"))
    assert made.excluded(now_s=1.0) == {}


def test_a_node_that_was_started_again_after_a_hardware_fault_is_readmitted() -> None:
    reports = MemberReports()
    reports.begin(plan(0, "ab"))
    made = NodeFailures(3, reports)
    made.bar("b", "GPU 2 is lost", is_fault=True, now_s=0.0)
    again = card("b", 2, is_first=True)
    assert made.returns(card("b", 1, is_first=True), now_s=9.0) == [], "the same agent"
    assert made.returns(card("b", 2), now_s=9.0) == [], "another agent of the same stub"
    assert set(made.excluded(now_s=9.0)) == {"b"}
    successor = failures()
    successor.succeed(history(made, 9.0), known_s=9.0)
    for one in (made, successor):
        (found,) = one.returns(again, now_s=10.0)
        assert found.record.text.startswith("node b is readmitted: ftrun was started on it")
        assert one.excluded(now_s=10.0) == {}
        assert one.returns(again, now_s=11.0) == []


def test_a_fault_that_returns_within_an_hour_excludes_in_spite_of_a_restart() -> None:
    reports = MemberReports()
    reports.begin(plan(0, "ab"))
    made = NodeFailures(3, reports)
    for at_s in (0.0, 100.0):
        made.bar("b", "GPU 2 is lost", is_fault=True, now_s=at_s)
        made.returns(card("b", 2 + int(at_s), is_first=True), now_s=at_s + 10.0)
    left_s, _ = made.excluded(now_s=110.0)["b"]
    assert left_s == 3590.0
    successor = failures()
    successor.succeed(history(made, 110.0), known_s=110.0)
    assert successor.returns(card("b", 900, is_first=True), now_s=120.0) == []
    assert successor.returns(card("b", 900, is_first=True), now_s=3611.0) != []


def test_a_restart_after_a_hardware_fault_does_not_forget_the_losses() -> None:
    reports = MemberReports()
    reports.begin(plan(0, "ab"))
    made = NodeFailures(2, reports)
    made.note("b", now_s=0.0)
    made.bar("b", "GPU 2 is lost", is_fault=True, now_s=0.0)
    assert made.returns(card("b", 2, is_first=True), now_s=10.0) != []
    assert made.excluded(now_s=10.0) == {}
    made.note("b", now_s=20.0)
    assert made.excluded(now_s=20.0) == {"b": (3580.0, "2 failures in an hour")}


def test_a_request_ends_only_an_exclusion_that_exists() -> None:
    reports = MemberReports()
    made = NodeFailures(2, reports)
    made.note("b", now_s=0.0)
    assert made.readmit("b", "requested", now_s=1.0) == []
    assert made.ages_s(now_s=1.0) == {"b": [1.0]}, "its loss still counts"
    reports.take("b", Heartbeat(generation=-1, fault="GPU 2 is lost"))
    assert made.readmit("b", "requested", now_s=1.0) == [], "it still reports a fault"


def test_a_node_that_was_slow_or_hung_is_usable_until_it_fails() -> None:
    made, successor = failures(1), failures(1)
    made.bar("a", "slow", is_slow=True, now_s=0.0)
    made.bar("b", "a failure", now_s=0.0)
    successor.succeed(history(made, 10.0), known_s=10.0)
    for one in (made, successor):
        assert set(one.excluded(now_s=10.0)) == {"a", "b"}
        assert one.usable(now_s=10.0) == {"a"}
        assert one.num_excluded(now_s=10.0) == 1
        one.note("a", now_s=20.0)
        assert one.usable(now_s=20.0) == set()


def test_a_node_that_was_excluded_for_failures_is_readmitted_on_request_only() -> None:
    reports = MemberReports()
    reports.begin(plan(0, "ab"))
    made = NodeFailures(2, reports)
    made.bar("b", "slow", now_s=0.0)
    made.note("a", now_s=0.0)
    made.note("a", now_s=0.0)
    for one in "ab":
        assert made.returns(card(one, 2, is_first=True), now_s=9.0) == []
    assert set(made.excluded(now_s=9.0)) == {"a", "b"}
    for one in "ab":
        (found,) = made.readmit(one, "an operator has requested it", now_s=9.0)
        assert found.announce
    assert made.excluded(now_s=9.0) == {}
    made.note("a", now_s=10.0)
    assert made.excluded(now_s=10.0) == {}, "earlier failures count no longer"


def test_a_request_reaches_the_leader_and_a_check_precedes_the_return() -> None:
    made = started("abc", cluster_size=ClusterSize(2, 2, 1))
    leader = made["a"].member.leader
    assert leader is not None
    outside = next(one for one in "bc" if one not in made.running())
    made.happens(outside, NodeChecked(judged(number=1)))
    made.passes(1.0)
    leader.monitor.failures.bar(outside, "slow", now_s=clock.now_s())  # status uses that clock
    made.passes(1.0)
    (shown,) = status(made, "a").exclusions
    assert (shown.node_id, shown.reason) == (outside, "slow")
    for sender in ("b", "a"):
        made.happens("a", MessageReceived(sender, ReadmitNode(outside)))
    assert leader.monitor.excluded(now_s=made.now_s) == set()
    assert len(notes(made, "a", "node_readmitted")) == 1, "the second request finds it readmitted"
    made.passes(1.0)
    assert "repeats its check" in leader.screening.unfit(set())[outside]
    made.happens(outside, NodeChecked(judged(number=2)))
    made.passes(1.0)
    assert leader.screening.unfit(set()) == {}


def test_the_next_leader_excludes_the_same_nodes_for_the_rest_of_their_time() -> None:
    made = with_spares("abcdef")
    leader = made["a"].member.leader
    assert leader is not None
    leader.monitor.failures.bar("b", "it was slow", now_s=made.now_s)
    made.kill("c")  # the next plan has the exclusion
    made.passes(1.0)
    assert set(made.running()) == set("ade")
    made.passes(600.0)
    made.kill("a")
    made.passes(10.0)
    successor = made[made.leader()].member.leader
    assert successor is not None
    assert successor is not leader
    left_s, reason = successor.monitor.failures.excluded(now_s=made.now_s)["b"]
    assert left_s == pytest.approx(3600.0 - 611.0, abs=2.0)
    assert reason == "it was slow"
    assert "b" not in made.running()


def judged(number: int) -> NodeFitness:
    return judge(NodeMeasurements(), PreflightConfig(), number=number)
