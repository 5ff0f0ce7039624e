"""Self-fencing: ranks are suspended before the run may continue without them.

The lease of ranks ends before other ranks take their place. A single node has no lease.
"""

import pytest

from ftrun.config.cluster import ClusterSize
from ftrun.membership.fencing import SelfFencing
from tests.unit.membership.agents import STEP_S, Agents
from tests.unit.recovery.made import settings

SETTINGS = settings(heartbeat_interval_s=0.5, self_fencing_timeout_s=2.0)


def waiting() -> SelfFencing:
    return SelfFencing(SETTINGS, now_s=100.0)


def test_ranks_wait_once_the_leader_was_unresponsive_for_as_long_as_it_may_be_replaced() -> None:
    made = waiting()
    made.received_s = 101.0
    assert made.reason(now_s=102.9) == ""
    assert not made.is_cut_off(now_s=102.9)
    assert made.is_cut_off(now_s=103.0)
    assert made.reason(now_s=103.0) == "no heartbeat from the leader"


def test_ranks_wait_where_the_leader_requests_it() -> None:
    made = waiting()
    made.leader_suspends = True
    assert made.reason(now_s=100.0) == "the leader receives from too few nodes"


def test_a_process_that_was_paused_reports_for_how_long() -> None:
    made = waiting()
    assert made.paused_s(now_s=100.9) == 0.0
    assert made.paused_s(now_s=101.8) == 0.0
    assert made.paused_s(now_s=102.8) == 1.0


def test_time_without_heartbeat_counts_from_when_it_could_receive_again() -> None:
    made = waiting()
    assert made.unresponsive_s(now_s=100.5) == 0.5
    made.paused_s(now_s=150.0)
    assert made.unresponsive_s(now_s=151.0) == 1.0
    made.received_s = 150.5
    assert made.unresponsive_s(now_s=151.0) == 0.5


def test_what_it_missed_in_its_sleep_makes_its_ranks_wait_all_the_same() -> None:
    made = waiting()
    made.paused_s(now_s=150.0)
    assert made.is_cut_off(now_s=150.0)


def test_a_question_is_answered_by_its_number_and_not_by_an_older_one() -> None:
    made = waiting()
    first = made.ask()
    second = made.ask()
    assert second > first > 0
    made.received_s = 100.0
    made.answered(first)
    assert "was paused" in made.reason(now_s=100.0)
    made.answered(second)
    assert made.reason(now_s=100.0) == ""


def test_the_question_is_the_first_reason() -> None:
    made = waiting()
    made.leader_suspends = True
    made.ask()
    assert "was paused" in made.reason(now_s=200.0)


def test_another_leader_restarts() -> None:
    made = waiting()
    made.leader_suspends = True
    made.ask()
    made.follow(now_s=200.0)
    assert made.reason(now_s=200.0) == ""
    assert made.received_s == 200.0
    # Numbers are not reused: an answer to the old request is no answer to the next one.
    assert made.ask() == 2


TICK_S = STEP_S


def started(cluster_size: ClusterSize) -> Agents:
    """A run of three nodes, led by a, that has begun."""
    made = Agents("abc", settings(cluster_size=cluster_size, last_call_timeout_s=5.0))
    made.passes(20.0)
    assert made.leader() == "a"
    return made


def successors_start_s(made: Agents, lost: str) -> float:
    """Time at which the next generation is chosen on the other nodes."""
    give_up_s = made.now_s + 60.0
    while not any(
        generation > 0 for node_id, generation in made.running().items() if node_id != lost
    ):
        assert made.now_s < give_up_s
        made.passes(TICK_S)
    return made.now_s


@pytest.mark.parametrize("phase", range(8))
@pytest.mark.parametrize("lost", ["a", "b"])
def test_lease_of_a_frozen_agent_ends_before_its_successors_start(lost: str, phase: int) -> None:
    made = started(ClusterSize(2, 2, 1))
    made.passes(phase * TICK_S)
    made[lost].is_frozen = True
    lease_s = made[lost].member.suspension.lease_s
    assert lease_s is not None
    assert made.now_s < lease_s <= made.now_s + 1.0
    assert lease_s < successors_start_s(made, lost)
    assert made[lost].member.suspension.lease_s == lease_s


@pytest.mark.parametrize("lost", ["a", "b"])
def test_lease_is_not_renewed_by_an_agent_that_is_cut_off(lost: str) -> None:
    made = started(ClusterSize(2, 2, 1))
    made.cut(lost)
    last_s = 0.0
    give_up_s = made.now_s + 60.0
    while not any(new > 0 for one, new in made.running().items() if one != lost):
        assert made.now_s < give_up_s
        made.passes(TICK_S)
        last_s = max(last_s, made[lost].member.suspension.lease_s or 0.0)
    assert 0.0 < last_s < made.now_s


def test_lease_is_renewed_when_the_leader_responds_again() -> None:
    made = started(ClusterSize(2, 3, 0))
    made.cut("c")
    made.passes(2.5)
    assert made["c"].member.suspension.is_on
    assert made["c"].member.suspension.lease_s == 0.0
    made.heal()
    made.passes(0.5)
    lease_s = made["c"].member.suspension.lease_s
    assert lease_s is not None
    assert lease_s > made.now_s


def test_a_node_that_nothing_can_replace_needs_no_lease() -> None:
    made = Agents("a", settings(cluster_size=ClusterSize(1, 1, 0)))
    made.passes(20.0)
    assert made.running() == {"a": 0}
    assert made["a"].member.suspension.lease_s is None
