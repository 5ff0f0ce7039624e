"""Pausing: the missing part is reported once, and the wait for it ends."""

from ftrun.errors import ExitCode
from ftrun.membership.leader.pausing import GONE_S, PUT_OFF_S, NodeWait
from ftrun.records.membership import RunPaused
from ftrun.recovery.commands import EndRun, JournalEntry


def test_it_reports_the_missing_part_and_repeats_the_report_if_it_changes() -> None:
    made = NodeWait(100.0)
    assert made.begin("b is missing", now_s=0.0) == [
        JournalEntry(RunPaused("PAUSED: b is missing; gives up after 100 s"), announce=True)
    ]
    assert made.begin("b is missing", now_s=1.0) == []
    assert len(made.begin("c is missing", now_s=2.0)) == 1
    assert made.reason == "c is missing"


def test_the_limit_counts_from_the_first_reason_and_the_end_is_the_last_ones() -> None:
    made = NodeWait(100.0)
    made.begin("b is missing", now_s=0.0)
    lost = EndRun(ExitCode.STATE_LOST, "", None, "bring it back")
    made.begin("the state is lost", now_s=60.0, end=lost)
    assert made.given_up(now_s=99.9) is None
    assert made.given_up(now_s=100.0) == EndRun(
        ExitCode.STATE_LOST, "the state is lost, for 100 s", None, "bring it back"
    )
    made.begin("b is missing", now_s=101.0)
    found = made.given_up(now_s=101.0)
    assert found is not None
    assert found.exit_code == ExitCode.NOT_ENOUGH_NODES


def test_a_run_that_continues_waits_for_nothing() -> None:
    made = NodeWait(100.0)
    assert made.given_up(now_s=1e6) is None
    made.begin("b is missing", now_s=0.0)
    assert made.is_on
    made.over()
    assert not made.is_on
    assert made.given_up(now_s=1e6) is None
    assert len(made.begin("b is missing", now_s=0.0)) == 1, "it is reported again"


def test_with_no_node_left_it_waits_a_minute_for_restarted_nodes() -> None:
    made = NodeWait(900.0)
    assert made.given_up(now_s=0.0, are_gone=True) is None
    made.begin("1 of 3 nodes is here", now_s=10.0)
    assert made.given_up(now_s=10.0 + GONE_S - 0.1, are_gone=True) is None
    assert made.given_up(now_s=10.0 + GONE_S, are_gone=False) is None
    end = made.given_up(now_s=10.0 + GONE_S, are_gone=True)
    assert end is not None
    assert end.exit_code == ExitCode.TRY_AGAIN
    assert "no other node of this run is left" in end.reason
    short = NodeWait(5.0)
    short.begin("1 of 3 nodes is here", now_s=0.0)
    assert short.given_up(now_s=5.0, are_gone=True) is not None


def test_a_node_that_has_come_gets_the_time_to_make_the_run_continue() -> None:
    made = NodeWait(100.0)
    made.put_off(now_s=0.0)
    made.begin("b is missing", now_s=0.0)
    made.put_off(now_s=99.0)
    assert made.given_up(now_s=99.0 + PUT_OFF_S - 0.1) is None
    assert made.given_up(now_s=99.0 + PUT_OFF_S) is not None
    for now_s in range(100, 200):
        made.put_off(now_s=now_s)
    assert made.given_up(now_s=160.0) is not None, "not forever, for nodes that join and leave"
