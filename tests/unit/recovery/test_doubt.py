"""Doubt: a lead has ranks wait before it may have been replaced."""

from ftrun.membership.leader.doubt import LeadershipLease
from ftrun.membership.leader.failure_detector import FailureDetector
from tests.unit.recovery.made import card, meet, plan, settings

SETTINGS = settings(deadline_s=3.0, stop_cut_off_s=2.0)
PLAN = plan(1, "abc")


def peers() -> FailureDetector:
    made = FailureDetector(card("a"), SETTINGS)
    for one in "abcd":
        meet(made, one, now_s=100.0)
    return made


def test_it_begins_when_those_who_may_not_hear_the_lead_could_replace_it() -> None:
    made, known = LeadershipLease(SETTINGS), peers()
    assert not made.look(PLAN, known, now_s=101.9)
    assert made.look(PLAN, known, now_s=102.0), "that is news"
    assert made.is_on
    assert not made.look(PLAN, known, now_s=102.5)
    meet(known, "b", now_s=102.5)
    assert made.look(PLAN, known, now_s=102.5), "and that it is over"
    assert not made.is_on


def test_where_there_is_nothing_to_be_replaced_there_is_no_doubt() -> None:
    made, known = LeadershipLease(SETTINGS), peers()
    made.look(PLAN, known, now_s=200.0)
    made.look(None, known, now_s=200.0)
    assert not made.is_on


def test_a_voter_that_is_bound_to_another_proposer_counts_as_one_that_does_not_hear() -> None:
    made, known = LeadershipLease(SETTINGS), peers()
    for one in "bc":
        meet(known, one, now_s=110.0).promised = 2
    assert made.look(PLAN, known, now_s=110.0)
    assert made.is_on


def test_it_stays_when_it_has_lasted_as_long_as_a_node_may_be_silent() -> None:
    made, known = LeadershipLease(SETTINGS), peers()
    assert not made.stays(now_s=1e6)
    made.look(PLAN, known, now_s=105.0)
    made.look(PLAN, known, now_s=106.0)
    assert not made.stays(now_s=107.9)
    assert made.stays(now_s=108.0)
