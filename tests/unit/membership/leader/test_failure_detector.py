"""A missing heartbeat counts from both sides, and only while this process could receive.

Lease: a leader suspends ranks before another leader may have replaced it.
"""

import pytest

from ftrun.membership.leader.failure_detector import (
    MAX_LOST_SHOWN,
    SHOWN_S,
    FailureDetector,
    LeadershipLease,
    PeerState,
)
from ftrun.wire.cluster.membership import Heartbeat
from tests.unit.recovery.made import card, meet, plan, settings

SETTINGS = settings(failure_timeout_s=3.0, self_fencing_timeout_s=2.0, redial_s=0.5)


def peers() -> tuple[FailureDetector, PeerState]:
    """The leader's view of itself and of b, which has just connected."""
    made = FailureDetector(card("a"), SETTINGS)
    meet(made, card("a"), now_s=100.0, linked=True)
    return made, meet(made, card("b"), now_s=100.0, linked=True)


def test_there_is_one_agent_of_a_node() -> None:
    made, _ = peers()
    again = meet(made, card("b", 2), now_s=101.0, linked=False)
    assert list(made) == [made.get("a"), again]
    assert made.get("b") is again
    assert made.get("c") is None
    assert made.linked == ["a"]


def test_a_connection_shows_that_the_agent_is_there_after_all() -> None:
    made, b = peers()
    b.linked, b.refused = False, True
    assert made.linked == ["a"]
    made.opened(b, now_s=110.0)
    assert (made.linked, b.refused) == (["a", "b"], False)
    assert made.unresponsive_s(b, now_s=111.0) == 1.0


def test_another_rail_is_no_break_in_being_here_and_a_closed_connection_is_one() -> None:
    made, b = peers()
    made.opened(b, now_s=103.0)
    assert (b.met_s, b.here_s) == (103.0, 100.0)
    b.linked = False
    made.opened(b, now_s=104.0)
    assert (b.met_s, b.here_s) == (104.0, 104.0)


# --- rule 2: no heartbeat, seen from both sides -----------------------------------------------


def test_a_node_that_does_not_respond_is_unresponsive() -> None:
    made, b = peers()
    number = made.next_number(now_s=105.0)
    made.heartbeat_received(b, Heartbeat(generation=1, number=1, received=number), now_s=200.0)
    b.received_s = 103.0
    assert made.unresponsive_s(b, now_s=106.0) == 3.0


def test_a_node_that_does_not_receive_from_the_leader_is_as_unresponsive() -> None:
    made, b = peers()
    numbers = [made.next_number(now_s=now_s) for now_s in (101.0, 102.0, 103.0)]
    assert numbers == [1, 2, 3]
    b.received_s = 106.0
    assert made.unresponsive_s(b, now_s=106.0) == 6.0
    made.heartbeat_received(b, Heartbeat(generation=1, number=1, received=2), now_s=200.0)
    assert made.unresponsive_s(b, now_s=106.0) == 4.0
    # An answer to an older heartbeat does not revert that, and an unknown number is no answer.
    made.heartbeat_received(b, Heartbeat(generation=1, number=2, received=1), now_s=200.0)
    made.heartbeat_received(b, Heartbeat(generation=1, number=3, received=99), now_s=200.0)
    assert made.unresponsive_s(b, now_s=106.0) == 4.0


def test_an_answer_to_a_heartbeat_that_is_too_old_is_ignored() -> None:
    made, b = peers()
    b.acked_s = b.met_s = b.received_s = 0.0
    first = made.next_number(now_s=100.0)
    made.next_number(now_s=106.0)
    made.heartbeat_received(b, Heartbeat(generation=1, number=1, received=first), now_s=200.0)
    assert b.acked_s == 100.0
    b.acked_s = 0.0
    made.next_number(now_s=106.1)
    made.heartbeat_received(b, Heartbeat(generation=1, number=2, received=first), now_s=200.0)
    assert b.acked_s == 0.0


def test_a_heartbeat_that_is_late_or_came_twice_changes_nothing() -> None:
    made, b = peers()
    assert made.heartbeat_received(b, Heartbeat(generation=1, number=2), now_s=200.0)
    assert not made.heartbeat_received(b, Heartbeat(generation=1, number=2), now_s=200.0)
    assert not made.heartbeat_received(b, Heartbeat(generation=1, number=1), now_s=200.0)
    assert made.heartbeat_received(b, Heartbeat(generation=1, number=3), now_s=200.0)


# --- rule 3: this process was paused ----------------------------------------------------------


def test_time_without_heartbeat_counts_from_when_this_process_could_receive() -> None:
    made, b = peers()
    made.was_paused(now_s=150.0)
    assert made.unresponsive_s(b, now_s=151.0) == 1.0
    assert made.may_decide_without_me(plan(1, "ab", spares="c"), now_s=151.0), "they do not wait"


def test_time_without_heartbeat_counts_from_when_the_connection_was_made() -> None:
    made, b = peers()
    b.received_s = b.acked_s = 0.0
    assert made.unresponsive_s(b, now_s=101.0) == 1.0


# --- dials ------------------------------------------------------------------------------------


def test_a_node_that_is_not_connected_is_dialled_now_and_then() -> None:
    made, b = peers()
    assert not made.is_to_be_dialled(b, now_s=200.0)
    b.linked = False
    assert made.is_to_be_dialled(b, now_s=200.0)
    assert not made.is_to_be_dialled(b, now_s=200.4)
    assert made.is_to_be_dialled(b, now_s=200.5)


# --- nodes that may decide without this leader ------------------------------------------------


@pytest.mark.parametrize(
    ("missed", "may"),
    [("", False), ("b", False), ("bc", False), ("bcd", True), ("bcde", True)],
)
@pytest.mark.parametrize("how", ["late", "unknown"])
def test_a_majority_that_may_not_receive_from_this_leader_may_replace_it(
    missed: str, may: bool, how: str
) -> None:
    made = FailureDetector(card("a"), SETTINGS)
    for one in "abcde":
        if how == "unknown" and one in missed:
            continue
        peer = meet(made, card(one), now_s=100.0, linked=True)
        peer.acked_s = 98.0 if one in missed else 98.1
    assert made.may_decide_without_me(plan(1, "abcd", spares="e"), now_s=100.0) is may


def test_half_of_the_voters_decide_nothing() -> None:
    made, b = peers()
    b.acked_s = 0.0
    assert not made.may_decide_without_me(plan(1, "ab"), now_s=100.0)


def test_a_node_that_is_back_may_have_decided_with_others_until_it_answers() -> None:
    made, _ = peers()
    back = made.put(card("b"), now_s=100.0, linked=True, has_answered=False)
    number = made.next_number(now_s=100.0)
    assert made.unresponsive_s(back, now_s=101.0) == 1.0, "it has a deadline like all nodes"
    assert made.may_decide_without_me(plan(1, "ab", spares="c"), now_s=100.0)
    made.heartbeat_received(back, Heartbeat(generation=1, number=1, received=number), now_s=200.0)
    assert not made.may_decide_without_me(plan(1, "ab", spares="c"), now_s=100.0)


@pytest.mark.parametrize(("no_progress_s", "may"), [(1.9, False), (2.0, True)])
def test_a_restarted_node_has_decided_nothing_if_it_received_from_this_leader_to_the_end(
    no_progress_s: float, may: bool
) -> None:
    """Its successor is the proof; c receives nothing from this leader."""
    made = FailureDetector(card("a"), SETTINGS)
    for one in "abc":
        meet(made, one, now_s=0.0, linked=False)
    b = made.get("b")
    assert b is not None
    b.acked_s = 100.0 - no_progress_s
    meet(made, card("b", 2), now_s=100.0)
    assert made.may_decide_without_me(plan(1, "abc"), now_s=200.0) is may


def test_another_connection_of_the_same_agent_is_no_death() -> None:
    made, b = peers()
    b.acked_s = 100.0
    meet(made, "b", now_s=100.0)
    assert made.may_decide_without_me(plan(1, "ab", spares="c"), now_s=200.0)


def test_a_node_responds_for_two_heartbeats_and_this_one_always() -> None:
    made, b = peers()
    limit_s = 2 * SETTINGS.times.heartbeat_interval_s
    assert made.is_responding("b", now_s=100.0 + limit_s - 0.1)
    assert not made.is_responding("b", now_s=100.0 + limit_s)
    assert made.is_responding("a", now_s=200.0)
    assert not made.is_responding("c", now_s=100.0)
    assert [one.node_id for one in made.here] == ["a", "b"]
    b.lost = "no heartbeat"
    assert not made.is_responding("b", now_s=100.0)
    assert [one.node_id for one in made.here] == ["a"]


SETTINGS_OF_LEASE = settings(failure_timeout_s=3.0, self_fencing_timeout_s=2.0)
PLAN = plan(1, "abc")


def test_a_replaced_node_is_shown_for_a_day_and_a_lost_voter_as_long_as_it_votes() -> None:
    made, other = peers()
    voter = meet(made, card("c"), now_s=100.0, linked=False)
    for peer, lost_s in ((other, 200.0), (voter, 200.0)):
        peer.lost, peer.lost_s = "no heartbeat", lost_s
    of = plan(1, "ac")
    assert len(made.shown(of, now_s=200.0 + SHOWN_S - 1)) == 3
    left = made.shown(of, now_s=200.0 + SHOWN_S)
    assert [peer.card.node_id for peer in left] == ["a", "c"]
    assert [peer.card.node_id for peer in made.shown(None, now_s=200.0 + SHOWN_S)] == ["a"]
    again = meet(made, card("b", 2), now_s=300.0 + SHOWN_S, linked=True)
    assert again in made.shown(of, now_s=300.0 + SHOWN_S)


def test_of_many_replaced_nodes_the_last_ones_are_shown() -> None:
    made, _ = peers()
    for at in range(MAX_LOST_SHOWN + 5):
        peer = meet(made, card(f"n{at}"), now_s=100.0 + at, linked=False)
        peer.lost = "the leader is lost"  # without a time of its own
    found = {peer.card.node_id for peer in made.shown(plan(1, "ab"), now_s=1000.0)}
    assert found == {"a", "b", *(f"n{at}" for at in range(5, MAX_LOST_SHOWN + 5))}


def peers_of_lease() -> FailureDetector:
    made = FailureDetector(card("a"), SETTINGS_OF_LEASE)
    for one in "abcd":
        meet(made, one, now_s=100.0)
    return made


def test_it_starts_when_nodes_that_may_not_receive_from_the_leader_could_replace_it() -> None:
    made, known = LeadershipLease(SETTINGS_OF_LEASE), peers_of_lease()
    assert not made.poll(PLAN, known, now_s=101.9)
    assert made.poll(PLAN, known, now_s=102.0), "the loss is reported"
    assert made.is_on
    assert not made.poll(PLAN, known, now_s=102.5)
    meet(known, "b", now_s=102.5)
    assert made.poll(PLAN, known, now_s=102.5), "and its end is reported"
    assert not made.is_on


def test_where_there_is_nothing_to_be_replaced_there_is_no_expired_lease() -> None:
    made, known = LeadershipLease(SETTINGS_OF_LEASE), peers_of_lease()
    made.poll(PLAN, known, now_s=200.0)
    made.poll(None, known, now_s=200.0)
    assert not made.is_on


def test_a_voter_that_is_bound_to_another_proposer_counts_as_one_that_does_not_receive() -> None:
    made, known = LeadershipLease(SETTINGS_OF_LEASE), peers_of_lease()
    for one in "bc":
        meet(known, one, now_s=110.0).promised = 2
    assert made.poll(PLAN, known, now_s=110.0)
    assert made.is_on


def test_it_stays_when_it_has_lasted_as_long_as_a_node_may_be_unresponsive() -> None:
    made, known = LeadershipLease(SETTINGS_OF_LEASE), peers_of_lease()
    assert not made.stays(now_s=1e6)
    made.poll(PLAN, known, now_s=105.0)
    made.poll(PLAN, known, now_s=106.0)
    assert not made.stays(now_s=107.9)
    assert made.stays(now_s=108.0)
