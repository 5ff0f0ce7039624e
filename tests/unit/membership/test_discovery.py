"""Succession: every agent knows the same order of the next leaders."""

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from ftrun.membership.ballots import position_of
from ftrun.membership.discovery import ASKED_AT_ONCE, LeaderSuccession
from tests.unit.recovery.made import card, plan

PLAN = plan(1, "abc", spares="de")


@effort(deadline=None)
@given(st.sets(st.sampled_from("abcde")))
def test_all_nodes_that_know_the_same_losses_turn_to_the_same_agent(lost: set[str]) -> None:
    left = [one for one in "abcde" if one not in lost]
    for me in left:
        made = LeaderSuccession(card(me))
        for one in lost:
            made.lose(card(one))
        found = made.next(PLAN)
        assert found is not None
        assert found.node_id == left[0]


def test_a_new_process_of_a_node_leads_as_itself() -> None:
    again = card("a", 9)
    assert LeaderSuccession(again).next(PLAN) is again


def test_where_none_is_left_there_is_none() -> None:
    made = LeaderSuccession(card("z"))
    assert made.next(None) is None
    for one in "abcde":
        made.lose(card(one))
    assert made.next(PLAN) is None


def test_no_node_loses_itself() -> None:
    made = LeaderSuccession(card("a"))
    made.lose(card("a"), refused=True)
    made.lose(None, refused=True)
    assert (made.lost, made.refused) == (set(), set())


def test_a_node_that_is_refused_is_lost_and_a_leader_that_is_found_ends_it() -> None:
    made = LeaderSuccession(card("c"))
    made.lose(card("a"))
    made.lose(card("b"), refused=True)
    assert (made.lost, made.refused) == ({"a", "b"}, {"b"})
    made.found()
    assert (made.lost, made.refused) == (set(), set())


@pytest.mark.parametrize("leader", ["a", "d"])
def test_the_last_leader_is_asked_first_and_then_the_others_in_order(leader: str) -> None:
    made = LeaderSuccession(card("b"))
    found = [one.node_id for one in made.known_nodes(plan(1, "abc", spares="de", leader=leader))]
    assert found == [leader, *(one for one in "acde" if one != leader)]


def test_of_many_some_are_asked() -> None:
    big = plan(1, [f"n{at}" for at in range(100)], leader="n99")
    found = [one.node_id for one in LeaderSuccession(card("n0")).known_nodes(big)]
    assert found == ["n99", *(f"n{at}" for at in range(1, ASKED_AT_ONCE))]
    assert LeaderSuccession(card("n0")).known_nodes(None) == []


def test_a_node_that_has_no_place_comes_after_all_others() -> None:
    assert [position_of(one, PLAN) for one in "aex"] == [0, 4, 5]
    assert position_of("a", None) == 0
