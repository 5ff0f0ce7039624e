"""Rank assignment: ranks are stable, and each present node is a member or a spare.

Eligibility: unfit nodes get no ranks, and an excluded node checks itself again.
"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from ftrun.config.cluster import ClusterSize
from ftrun.events import ExitKind
from ftrun.membership.events import NodeChecked, RanksStuck
from ftrun.membership.leader.failure_detector import FailureDetector
from ftrun.membership.leader.rank_assignment import (
    Admission,
    RankAssignment,
    assign,
    first_order,
)
from ftrun.monitor.node_fitness import CheckOutcome, NodeFitness, NodeMeasurements
from ftrun.recovery.commands import JournalEntry, RepeatNodeCheck
from ftrun.recovery.snapshot_coordination import MemberReports
from ftrun.wire.cluster.generation import NodeCard
from ftrun.wire.cluster.membership import LeaderHeartbeat
from tests.unit.membership.agents import Agents
from tests.unit.membership.leader.test_leader import exited, notes, works
from tests.unit.recovery.made import card, cards, plan, settings

CLUSTER_SIZE = ClusterSize(1, 4, 2)


def names(found: tuple[NodeCard, ...]) -> str:
    return "".join(one.node_id for one in found)


def assigned(
    here: str, before: str, cluster_size: ClusterSize = CLUSTER_SIZE, excluded: str = ""
) -> tuple[str, str]:
    """Members and spares; the nodes before `/` ran the last generation, the others were spares."""
    members, _, spares = before.partition("/")
    found = assign(cards(here), plan(3, members, spares), cluster_size, set(excluded))
    assert isinstance(found, RankAssignment)
    return names(found.members), names(found.spares)


nodes = st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1, max_size=8)


@effort(deadline=None)
@given(nodes, nodes, st.integers(1, 6), st.sets(st.sampled_from("abcdefgh"), max_size=3))
def test_every_node_has_one_place_and_one_that_stays_keeps_its_own(
    here: list[str], before: list[str], max_nodes: int, excluded: set[str]
) -> None:
    previous = plan(3, before[:max_nodes], before[max_nodes:])
    found = assign(cards(here), previous, ClusterSize(1, max_nodes, 2), excluded)
    usable = [one for one in here if one not in excluded]
    if isinstance(found, str):
        assert not usable
        return
    members = [one.node_id for one in found.members]
    assert sorted([*members, *(one.node_id for one in found.spares)]) == sorted(here)
    assert not excluded & set(members)
    assert len(members) == min(max_nodes, len(usable))
    ran = before[:max_nodes]
    if len(ran) == len(members):
        for place, node_id in enumerate(ran):
            assert members[place] == node_id or node_id not in usable
    # No spare is assigned before a present member.
    stayed = [one for one in ran if one in usable]
    assert set(stayed[: len(members)]) <= set(members)
    if len(ran) != len(members):
        assert members[: len(stayed)] == stayed[: len(members)]


def test_a_spare_takes_the_place_of_the_node_that_is_lost() -> None:
    assert assigned("acd", "abc/d", ClusterSize(2, 3, 1)) == ("adc", "")


def test_a_node_that_comes_back_gets_its_old_place_if_that_is_free() -> None:
    assert assigned("xcba", "abc", ClusterSize(2, 3, 1)) == ("abc", "x")
    assert assigned("bxca", "axc", ClusterSize(2, 3, 1)) == ("axc", "b")


def test_places_close_up_where_the_number_changes_and_their_order_stays() -> None:
    assert assigned("dba", "abcd") == ("abd", "")
    assert assigned("edcba", "ad/b", ClusterSize(1, 5, 0)) == ("adbce", "")


def test_a_node_that_was_a_spare_comes_before_nodes_that_are_new() -> None:
    assert assigned("abcz", "ab/z", ClusterSize(2, 3, 1)) == ("abz", "c")


def test_a_node_that_is_excluded_is_no_member_and_may_still_vote() -> None:
    assert assigned("abcd", "abc/d", ClusterSize(2, 3, 1), excluded="b") == ("adc", "b")


def test_too_few_nodes_are_counted_and_those_excluded_are_named() -> None:
    few = assign(cards("a"), None, ClusterSize(2, 4, 0))
    assert str(few) == "1 of at least 2 nodes are present"
    excluded = assign(cards("dabc"), None, ClusterSize(3, 4, 0), {"d", "c"})
    assert str(excluded) == (
        "2 of at least 3 nodes are present; excluded (reasons: ftrun status): c, d"
    )


def test_as_many_as_are_needed_are_enough() -> None:
    found = assign(cards("ab"), None, ClusterSize(2, 4, 0))
    assert isinstance(found, RankAssignment)
    assert names(found.members) == "ab"


def test_ranks_follow_one_another() -> None:
    found = RankAssignment(tuple(card(one, num_ranks=n) for one, n in (("a", 4), ("b", 2))), ())
    assert found.first_ranks == [0, 4]


def test_the_first_order_is_the_users_numbers_then_the_endpoint_then_names() -> None:
    here = [
        card("node10"),
        card("node9"),
        card("x", endpoint=True),
        card("q", node_rank=1),
        card("r", node_rank=0),
        card("9node"),
    ]
    order = [one.node_id for one in first_order(here)]
    assert order == ["r", "q", "x", "9node", "node9", "node10"]


@effort(deadline=None)
@given(st.permutations([f"rack{rack}-node{at}" for rack in (1, 2, 10) for at in (9, 10, 100)]))
def test_the_first_order_does_not_depend_on_the_order_of_arrival(given_: list[str]) -> None:
    order = [one.node_id for one in first_order(cards(given_))]
    assert order == [f"rack{rack}-node{at}" for rack in (1, 2, 10) for at in (9, 10, 100)]


def test_requested_sizes_read_as_the_words_of_the_command_line() -> None:
    assert str(ClusterSize(2, 4, 1)) == "2:4+1"


def test_a_new_process_of_a_node_keeps_the_place_of_its_node() -> None:
    again = msgspec.structs.replace(card("b"), incarnation=9)
    found = assign([again, *cards("ca")], plan(3, "abc"), ClusterSize(2, 3, 0))
    assert isinstance(found, RankAssignment)
    assert [(one.node_id, one.incarnation) for one in found.members] == [
        ("a", 1),
        ("b", 9),
        ("c", 1),
    ]


SETTINGS = settings(cluster_size=ClusterSize(2, 3, 1))
FIT = NodeFitness(CheckOutcome.PASS)
STUCK = "rank 1 (pid 7) has not died of SIGKILL"
UNFIT = NodeFitness(CheckOutcome.FAIL, problems=("memory is copied at 3 MB/s",))


def fit(number: int, *, is_whole: bool = True, rate: float = 0.0) -> NodeFitness:
    figures = NodeMeasurements(memory_bytes_per_s=rate)
    return NodeFitness(CheckOutcome.PASS, figures, number=number, is_whole=is_whole)


def made_of(**checks: NodeFitness | None) -> tuple[Admission, FailureDetector]:
    """A leader's record of nodes with these check results."""
    peers = FailureDetector(card("a"), SETTINGS)
    for node_id, fitness in checks.items():
        peers.put(card(node_id), now_s=0.0, linked=True, has_answered=True).fitness = fitness
    return Admission(SETTINGS, peers, MemberReports()), peers


def texts(notes: list[JournalEntry]) -> list[tuple[str, str]]:
    return [(one.record.kind, one.record.text) for one in notes]


def test_a_node_that_has_failed_its_check_is_left_out_and_named() -> None:
    screening, _ = made_of(a=FIT, b=UNFIT, c=None)
    assert screening.unfit(set()) == {"b": "memory is copied at 3 MB/s"}
    assert screening.barred({"z"}) == {"b", "z"}
    found = screening.assign([card("a"), card("b"), card("c")], None, set())
    assert isinstance(found, RankAssignment)
    assert [one.node_id for one in found.members] == ["a", "c"]
    assert [one.node_id for one in found.spares] == ["b"]


def test_too_few_fit_nodes_are_reported_with_the_check() -> None:
    screening, _ = made_of(a=FIT, b=UNFIT)
    found = screening.assign([card("a"), card("b"), card("d")], None, {"d"})
    assert found == (
        "1 of at least 2 nodes are present; excluded (reasons: ftrun status): d; unfit: b "
        "(memory is copied at 3 MB/s)"
    )


def test_it_is_reported_once_and_so_is_that_it_is_over() -> None:
    screening, peers = made_of(a=FIT, b=UNFIT)
    reason = "node b may not run ranks: memory is copied at 3 MB/s"
    assert texts(screening.poll(set(), now_s=0.0)) == [("node_unfit", reason)]
    assert screening.poll(set(), now_s=0.0) == []
    assert screening.reported == {"b": "memory is copied at 3 MB/s"}
    peers.by_id["b"].lost = "gone"
    assert screening.poll(set(), now_s=0.0) == []
    peers.by_id["b"].lost, peers.by_id["b"].fitness = "", FIT
    assert texts(screening.poll(set(), now_s=0.0)) == [("node_fit", "node b is fit to run ranks")]
    assert screening.poll(set(), now_s=0.0) == []
    assert screening.reported == {}


def test_the_same_with_other_figures_is_known_and_not_reported_again() -> None:
    screening, peers = made_of(b=UNFIT)
    screening.poll(set(), now_s=0.0)
    for problems in (("memory is copied at 2.5 MB/s",), ("memory is copied at 1,002.0 MB/s",)):
        peers.by_id["b"].fitness = msgspec.structs.replace(UNFIT, problems=problems)
        assert screening.poll(set(), now_s=0.0) == []
        assert screening.reported == {"b": problems[0]}
    problems = ("memory is copied at 3 MB/s", "8 open files are allowed")
    peers.by_id["b"].fitness = msgspec.structs.replace(UNFIT, problems=problems)
    assert len(screening.poll(set(), now_s=0.0)) == 1


def test_a_node_that_is_forgotten_is_not_fit_again() -> None:
    screening, peers = made_of(b=UNFIT)
    screening.poll(set(), now_s=0.0)
    peers.by_id["b"].fitness = None
    assert screening.poll(set(), now_s=0.0) == []
    del peers.by_id["b"]
    assert screening.poll(set(), now_s=0.0) == []


def test_a_node_that_was_excluded_makes_another_check_first() -> None:
    screening, peers = made_of(a=FIT, b=fit(1))
    screening.poll({"b"}, now_s=0.0)
    heartbeat = LeaderHeartbeat(generation=0)
    assert screening.ask(heartbeat) is heartbeat
    notes = screening.poll(set(), now_s=0.0)
    reason = "node b may not run ranks: it was excluded, and repeats its check"
    assert texts(notes) == [("node_unfit", reason)]
    assert screening.ask(heartbeat).checks == {"b": 2}
    peers.by_id["b"].fitness = fit(2, is_whole=False)
    screening.poll(set(), now_s=0.0)
    assert screening.ask(heartbeat).checks == {"b": 3}
    peers.by_id["b"].fitness = fit(3)
    assert texts(screening.poll(set(), now_s=0.0)) == [("node_fit", "node b is fit to run ranks")]
    assert screening.ask(heartbeat) is heartbeat
    assert screening.unfit(set()) == {}


def test_an_agent_that_was_started_again_has_checked_itself() -> None:
    screening, peers = made_of(b=fit(4))
    screening.poll({"b"}, now_s=0.0)
    again = peers.put(card("b", 2), now_s=0.0, linked=True, has_answered=False)
    assert screening.unfit(set()) == {}  # it has not yet reported whether it makes checks
    again.fitness = fit(1, is_whole=False)
    assert screening.unfit(set()) == {"b": "it was excluded, and repeats its check"}
    again.fitness = fit(1)
    assert screening.unfit(set()) == {}


def test_where_no_checks_are_made_none_is_waited_for() -> None:
    screening, _ = made_of(b=None)
    screening.poll({"b"}, now_s=0.0)
    assert screening.poll(set(), now_s=0.0) == []
    assert screening.unfit(set()) == {}


def test_slow_nodes_are_reported_once() -> None:
    checks = {one: fit(1, rate=8e9) for one in "acd"}
    screening, _ = made_of(**checks, b=fit(1, rate=1e9), e=None)
    found = screening.compare(plan(0, "abc", "d"))
    text = "node b is slow: memory is copied at 1.0 GB/s (other nodes 8.0 GB/s)"
    assert texts(found) == [("node_below_median", text)]
    assert screening.compare(plan(1, "abc", "d")) == []
    assert screening.compare(plan(1, "ac", "d")) == []


# --- among agents -----------------------------------------------------------------------------


def started(node_ids: str, unfit: str, cluster_size: ClusterSize, **changes: object) -> Agents:
    """Agents that have their check results before they connect."""
    made = Agents(node_ids, settings(cluster_size=cluster_size, last_call_timeout_s=2.0, **changes))
    for one in node_ids:
        made.happens(one, NodeChecked(UNFIT if one in unfit else FIT))
    made.passes(10.0)
    return made


def test_a_spare_runs_in_place_of_an_unfit_node_from_the_beginning() -> None:
    made = started("abcd", "b", ClusterSize(3, 3, 1))
    assert made.running() == {"a": 0, "c": 0, "d": 0}
    assert [one.node_id for one in made.plan("a").spares] == ["b"]
    notes = [
        one.record.text
        for one in made["a"].reported(JournalEntry)
        if one.record.kind == "node_unfit"
    ]
    assert notes == ["node b may not run ranks: memory is copied at 3 MB/s"]


def test_an_unfit_endpoint_leads_without_ranks() -> None:
    made = started("abc", "a", ClusterSize(2, 2, 1))
    assert made.leader() == "a"
    assert made.running() == {"b": 0, "c": 0}


def test_too_few_fit_nodes_wait_until_one_passes() -> None:
    made = started("abc", "c", ClusterSize(3, 3, 0))
    assert made.running() == {}
    leader = made["a"].member.leader
    assert leader is not None
    assert "unfit: c (memory is copied at 3 MB/s)" in leader.pause.reason
    made.happens("c", NodeChecked(fit(2)))
    made.passes(5.0)
    assert made.running() == {"a": 0, "b": 0, "c": 0}


def test_a_run_does_not_grow_by_an_unfit_node() -> None:
    made = started("abc", "c", ClusterSize(2, 3, 0))
    assert made.running() == {"a": 0, "b": 0}
    made.passes(20.0)
    assert made.running() == {"a": 0, "b": 0}
    made.happens("c", NodeChecked(fit(2)))
    made.passes(10.0)
    assert made.running() == {"a": 1, "b": 1, "c": 1}


def test_a_node_that_was_excluded_is_asked_once_and_comes_back_when_it_passes() -> None:
    made = started("abc", "", ClusterSize(2, 3, 0), max_failures_per_hour=1)
    made.kill("c")
    made.passes(2.0)
    made.start("c", 2)
    made.happens("c", NodeChecked(FIT))
    made.passes(10.0)
    assert made.running() == {"a": 1, "b": 1}
    assert made["c"].reported(RepeatNodeCheck) == []
    made.passes(3600.0, step_s=0.5)
    assert made["c"].reported(RepeatNodeCheck) == [RepeatNodeCheck(2)]
    assert made.running() == {"a": 1, "b": 1}
    made.happens("c", NodeChecked(msgspec.structs.replace(UNFIT, number=2)))
    made.passes(10.0)
    assert made.running() == {"a": 1, "b": 1}
    made.happens("c", NodeChecked(fit(3)))
    made.passes(10.0)
    assert set(made.running()) == {"a", "b", "c"}


@pytest.mark.parametrize("checked", [None, fit(1)])
def test_a_node_whose_ranks_do_not_die_runs_none_until_they_have(
    checked: NodeFitness | None,
) -> None:
    made = started("abc", "", ClusterSize(2, 2, 1))
    made["b"].member.follower._checked = checked
    works(made, 5, "ab")
    made.happens("b", RanksStuck(STUCK))
    works(made, 5, "b", exits=(exited(1, ExitKind.SIGNAL, -9),))
    made.passes(5.0)
    assert made.running() == {"a": 1, "c": 1}
    assert notes(made, "a", "node_unfit") == [f"node b may not run ranks: {STUCK}"]
    made.happens("b", RanksStuck(""))
    made.passes(5.0)
    assert notes(made, "a", "node_fit") == ["node b is fit to run ranks"]


def test_a_node_that_makes_no_checks_is_asked_for_none() -> None:
    made = started("abc", "", ClusterSize(2, 3, 0))
    made["b"].member.follower._checked = None
    assert (
        made["b"].member.follower.apply_heartbeat(
            "a", LeaderHeartbeat(0, number=10**6, checks={"b": 2})
        )
        == []
    )
