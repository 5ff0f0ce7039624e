"""Gathering: a first generation begins with all nodes, or with enough once no more nodes join.

Waiting: the wait reports what it waits for, and ends with what to check.
"""

import msgspec
import pytest

from ftrun.config.cluster import ClusterSize
from ftrun.errors import ExitCode
from ftrun.membership.gathering import REPORT_EVERY_S, InitialQuorum, JoinTimeout
from ftrun.records.membership import WaitingForNodes
from ftrun.recovery.commands import EndRun, JournalEntry, Send
from ftrun.wire.cluster.generation import NodeCard
from ftrun.wire.cluster.membership import Join, JoinPending, JoinRejected
from tests.unit.recovery.made import card, settings

SETTINGS = settings(cluster_size=ClusterSize(2, 3, 1), last_call_timeout_s=5.0, blank_wait_s=2.0)


def gatherer() -> InitialQuorum:
    return InitialQuorum(card("a"), SETTINGS, now_s=100.0)


def join(
    made: InitialQuorum, joining: NodeCard, *, now_s: float = 100.0, knows: int = -1
) -> JoinPending | JoinRejected:
    (found,) = made.join(joining.node_id, Join(joining, "2:3+1", knows), now_s=now_s)
    assert isinstance(found, Send)
    assert found.node_id == joining.node_id
    assert isinstance(found.message, JoinPending | JoinRejected)
    return found.message


def test_with_all_that_were_requested_it_begins_once_a_leader_would_have_come() -> None:
    made = gatherer()
    for one in "dc":
        join(made, card(one), now_s=110.0)
        assert not made.is_complete(now_s=110.0), "no node has settled"
    assert join(made, card("b"), now_s=110.0) == JoinPending(["a", "b", "c", "d"], 4)
    assert made.is_complete(now_s=110.0)


def test_it_waits_for_a_leader_that_may_look_for_it() -> None:
    made = gatherer()
    for one in "bcd":
        join(made, card(one))
    assert not made.is_complete(now_s=101.9)
    assert made.is_complete(now_s=102.0)


def test_with_enough_it_begins_once_no_node_has_come_for_a_while() -> None:
    made = gatherer()
    join(made, card("b"), now_s=110.0)
    assert not made.is_complete(now_s=114.9)
    assert made.is_complete(now_s=115.0)
    join(made, card("c"), now_s=115.0)
    assert not made.is_complete(now_s=119.9)
    # A second join of a present node is no new node.
    join(made, card("c"), now_s=119.9)
    assert made.is_complete(now_s=120.0)


def test_with_too_few_it_never_begins() -> None:
    made = gatherer()
    assert not made.is_complete(now_s=1e6)
    assert made.missing() == "a is present, and 2 nodes are needed"
    join(made, card("b"))
    made.gone("b")
    made.gone("b")
    assert not made.is_complete(now_s=1e6)
    join(made, card("b"))
    assert made.missing() == "a, b are present, and 2 nodes are needed"


def test_where_one_knows_of_a_run_none_is_begun() -> None:
    made = gatherer()
    join(made, card("b"), knows=0)
    for one in "cd":
        join(made, card(one))
    assert not made.is_complete(now_s=1e6)
    made.gone("b")
    assert made.is_complete(now_s=1e6)


def test_two_nodes_of_one_name_are_distinguished() -> None:
    made = gatherer()
    mine = msgspec.structs.replace(card("a", 2), host="x.local")
    answer = join(made, mine)
    assert isinstance(answer, JoinRejected)
    assert "a.local and x.local are both named a" in answer.reason
    join(made, card("b"))
    other = msgspec.structs.replace(card("b", 2), host="x.local")
    answer = join(made, other)
    assert isinstance(answer, JoinRejected)
    assert "b.local and x.local are both named b" in answer.reason
    assert made.cards["b"] == card("b")


def test_an_agent_that_was_started_again_takes_the_place_of_the_first() -> None:
    made = gatherer()
    join(made, card("b"))
    assert isinstance(join(made, card("b", 2), now_s=110.0), JoinPending)
    assert made.cards["b"] == card("b", 2)
    assert not made.is_complete(now_s=114.9), "it has just joined"
    # The same process over another path is the same process.
    moved = msgspec.structs.replace(card("b", 2), host="x.local")
    assert isinstance(join(made, moved), JoinPending)


def test_no_run_begins_while_one_may_continue_that_the_witness_remembers() -> None:
    made = gatherer()
    made.remembered = frozenset("abd")
    for one in "bc":
        join(made, card(one))
    assert not made.is_complete(now_s=1e6)
    assert "A run of this id exists, which d may resume" in made.missing()
    join(made, card("d"))
    assert made.missing().endswith("2 nodes are needed")
    assert made.is_complete(now_s=1e6)


TIMEOUT_SETTINGS = settings(join_timeout_s=100.0)


def test_it_reports_now_and_then_what_is_waited_for() -> None:
    made = JoinTimeout(TIMEOUT_SETTINGS, now_s=50.0)
    said_s = []
    for now_s in range(50, 100):
        found = made.wait(now_s - 50.0, "a is here", gathers=True, now_s=float(now_s))
        if found:
            assert found == [
                JournalEntry(
                    WaitingForNodes(f"waiting for {now_s - 50} s: a is here"), announce=True
                )
            ]
            said_s.append(now_s - 50)
    assert said_s == [REPORT_EVERY_S, 2 * REPORT_EVERY_S, 3 * REPORT_EVERY_S]


def test_a_wait_that_has_just_begun_reports_nothing() -> None:
    made = JoinTimeout(TIMEOUT_SETTINGS, now_s=50.0)
    assert made.wait(0.0, "4 of 4 nodes are present", gathers=True, now_s=200.0) == []


@pytest.mark.parametrize(
    ("gathers", "code", "advice"),
    [
        (True, ExitCode.NOT_ENOUGH_NODES, "port 29400 of this node is open"),
        (False, ExitCode.TRY_AGAIN, "runs on a.local"),
    ],
)
def test_it_gives_up_after_the_limit_with_what_to_check(
    gathers: bool, code: ExitCode, advice: str
) -> None:
    made = JoinTimeout(TIMEOUT_SETTINGS, now_s=0.0)
    before = made.wait(99.9, "no node", gathers=gathers, now_s=99.9)
    assert not any(isinstance(one, EndRun) for one in before)
    (end,) = made.wait(100.0, "no node", gathers=gathers, now_s=100.0)
    assert isinstance(end, EndRun)
    assert end.exit_code == code
    assert "within 100 s: no node" in end.reason
    assert advice in end.reason


@pytest.mark.parametrize("gathers", [True, False])
def test_with_a_witness_the_report_says_to_check_it(gathers: bool) -> None:
    made = JoinTimeout(settings(join_timeout_s=100.0, etcd=["etcd:2379"]), now_s=0.0)
    (end,) = made.wait(100.0, "no node", gathers=gathers, now_s=100.0)
    assert isinstance(end, EndRun)
    assert (
        "within 100 s: no node. Check that ftrun runs on the others, with the same etcd"
        in end.reason
    )
