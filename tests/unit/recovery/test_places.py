"""Places: ranks are stable, and everyone who is here has a place or stands by."""

import msgspec
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from ftrun.config.cluster import ClusterSize
from ftrun.membership.leader.rank_assignment import RankAssignment, TooFewNodes, assign, first_order
from ftrun.wire.cluster.generation import NodeCard
from tests.unit.recovery.made import card, cards, plan

WISHES = ClusterSize(1, 4, 2)


def names(found: tuple[NodeCard, ...]) -> str:
    return "".join(one.node_id for one in found)


def assigned(
    here: str, before: str, wishes: ClusterSize = WISHES, aside: str = ""
) -> tuple[str, str]:
    """Members and spares; the members before `/` ran the last generation, the others stood by."""
    members, _, spares = before.partition("/")
    found = assign(cards(here), plan(3, members, spares), wishes, set(aside))
    assert isinstance(found, RankAssignment)
    return names(found.members), names(found.spares)


nodes = st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1, max_size=8)


@effort(deadline=None)
@given(nodes, nodes, st.integers(1, 6), st.sets(st.sampled_from("abcdefgh"), max_size=3))
def test_everyone_has_one_place_and_whoever_stays_keeps_its_own(
    here: list[str], before: list[str], max_nodes: int, aside: set[str]
) -> None:
    previous = plan(3, before[:max_nodes], before[max_nodes:])
    found = assign(cards(here), previous, ClusterSize(1, max_nodes, 2), aside)
    usable = [one for one in here if one not in aside]
    if isinstance(found, TooFewNodes):
        assert not usable
        return
    members = [one.node_id for one in found.members]
    assert sorted([*members, *(one.node_id for one in found.spares)]) == sorted(here)
    assert not aside & set(members)
    assert len(members) == min(max_nodes, len(usable))
    ran = before[:max_nodes]
    if len(ran) == len(members):
        for place, node_id in enumerate(ran):
            assert members[place] == node_id or node_id not in usable
    # Of the spares no one takes a place before a member that is here does.
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


def test_who_was_a_spare_comes_before_who_is_new() -> None:
    assert assigned("abcz", "ab/z", ClusterSize(2, 3, 1)) == ("abz", "c")


def test_a_node_that_is_set_aside_is_no_member_and_may_still_vote() -> None:
    assert assigned("abcd", "abc/d", ClusterSize(2, 3, 1), aside="b") == ("adc", "b")


def test_too_few_nodes_are_counted_and_those_set_aside_are_named() -> None:
    few = assign(cards("a"), None, ClusterSize(2, 4, 0))
    assert str(few) == "1 of at least 2 nodes are here"
    aside = assign(cards("dabc"), None, ClusterSize(3, 4, 0), {"d", "c"})
    assert str(aside) == ("2 of at least 3 nodes are here; set aside after too many failures: c, d")


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
def test_the_first_order_does_not_depend_on_who_came_first(given_: list[str]) -> None:
    order = [one.node_id for one in first_order(cards(given_))]
    assert order == [f"rack{rack}-node{at}" for rack in (1, 2, 10) for at in (9, 10, 100)]


def test_wishes_read_as_the_words_of_the_command_line() -> None:
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
