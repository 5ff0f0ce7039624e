"""Waiting: ranks stand still before the run may go on without them."""

from ftrun.membership.fencing import SelfFencing
from tests.unit.recovery.made import settings

SETTINGS = settings(heartbeat_s=0.5, stop_cut_off_s=2.0)


def waiting() -> SelfFencing:
    return SelfFencing(SETTINGS, now_s=100.0)


def test_ranks_wait_once_the_lead_was_not_heard_for_as_long_as_it_may_be_replaced() -> None:
    made = waiting()
    made.heard_s = 101.0
    assert made.why(now_s=102.9) == ""
    assert not made.is_cut_off(now_s=102.9)
    assert made.is_cut_off(now_s=103.0)
    assert made.why(now_s=103.0) == "the lead is not heard"


def test_ranks_wait_where_the_lead_says_so() -> None:
    made = waiting()
    made.lead_says_hold = True
    assert made.why(now_s=100.0) == "the lead does not hear enough nodes"


def test_a_process_that_stood_still_says_for_how_long() -> None:
    made = waiting()
    assert made.stood_still_s(now_s=100.9) == 0.0
    assert made.stood_still_s(now_s=101.8) == 0.0
    assert made.stood_still_s(now_s=102.8) == 1.0


def test_silence_counts_from_when_it_could_hear_again() -> None:
    made = waiting()
    assert made.silent_s(now_s=100.5) == 0.5
    made.stood_still_s(now_s=150.0)
    assert made.silent_s(now_s=151.0) == 1.0
    made.heard_s = 150.5
    assert made.silent_s(now_s=151.0) == 0.5


def test_what_it_missed_in_its_sleep_makes_its_ranks_wait_all_the_same() -> None:
    made = waiting()
    made.stood_still_s(now_s=150.0)
    assert made.is_cut_off(now_s=150.0)


def test_a_question_is_answered_by_its_number_and_not_by_an_older_one() -> None:
    made = waiting()
    first = made.ask()
    second = made.ask()
    assert second > first > 0
    made.heard_s = 100.0
    made.answered(first)
    assert "stood still" in made.why(now_s=100.0)
    made.answered(second)
    assert made.why(now_s=100.0) == ""


def test_the_question_is_the_first_reason() -> None:
    made = waiting()
    made.lead_says_hold = True
    made.ask()
    assert "stood still" in made.why(now_s=200.0)


def test_another_lead_begins_anew() -> None:
    made = waiting()
    made.lead_says_hold = True
    made.ask()
    made.follow(now_s=200.0)
    assert made.why(now_s=200.0) == ""
    assert made.heard_s == 200.0
    # Numbers are not used again: an answer to the old question is none to the next.
    assert made.ask() == 2
