"""Generation monitor: node reports become the supervisor's events and the leader's orders."""

import msgspec
import pytest
from unit.recovery.test_suspicions import hang

from ftrun.config.profile import CheckpointConfig
from ftrun.events import ExitKind, WorkerExit
from ftrun.ids import Rank
from ftrun.network.failover.pair_check import PairCheck
from ftrun.recovery.commands import (
    EndRun,
    KillWorkers,
    RequestFinalSnapshot,
    SignalWorkers,
    StartGeneration,
    SupervisorCommand,
)
from ftrun.recovery.generation_monitor import CAUSE_WAIT_S, EVERY_AHEAD_STEPS, GenerationMonitor
from ftrun.recovery.supervisor import SupervisorState
from ftrun.wire.cluster.generation import FailureHistory, GenerationPlan
from ftrun.wire.cluster.membership import Heartbeat, LeaderHeartbeat
from tests.unit.recovery.made import card, plan, settings

SETTINGS = settings(heartbeat_interval_s=0.5, same_boundary_s=1.0, max_failures_per_hour=3)
TWO = plan(1, [card("a", num_ranks=2), card("b", num_ranks=2)], spares="s", smp_ports={"b": 7})
ONE = plan(1, "a")


def monitor(of: GenerationPlan = TWO, **changes: object) -> GenerationMonitor:
    made = GenerationMonitor(settings(**changes) if changes else SETTINGS, pairs=PairCheck())
    assert made.begin(of, now_s=0.0) == []
    return made


def heartbeat(**changes: object) -> Heartbeat:
    """Status of a rank that has made a step."""
    found = Heartbeat(generation=1, attached=True, step=5, steps_here=5)
    return msgspec.structs.replace(found, **changes)


def exited(rank: int, kind: ExitKind = ExitKind.EXCEPTION, code: int = 1) -> WorkerExit:
    return WorkerExit(Rank(rank), kind, code, f"rank {rank}: {kind.value}", "", "mark")


def starts(commands: list[SupervisorCommand]) -> list[str]:
    return [one.reason for one in commands if isinstance(one, StartGeneration)]


# --- rule 1: the generation of a report -------------------------------------------------------


def test_a_heartbeat_counts_for_the_generation_it_names() -> None:
    made = monitor()
    late = heartbeat(
        generation=0, exits=(exited(0, ExitKind.SIGNAL, -9),), at_boundary=True, ready=(0, 5)
    )
    for node_id in "ab":
        assert made.heartbeat_received(node_id, late, now_s=1.0) == []
    assert starts(made.tick(now_s=9.0)) == []
    assert made.orders == LeaderHeartbeat(generation=1)
    assert made.reports.step == 0


def test_a_node_that_is_no_member_reports_nothing_of_the_generation() -> None:
    made = monitor()
    made.heartbeat_received(
        "s", heartbeat(exits=(exited(0, ExitKind.SIGNAL, -9),), problem="x"), now_s=1.0
    )
    assert starts(made.tick(now_s=9.0)) == []


def test_before_any_generation_nothing_follows_from_a_heartbeat() -> None:
    made = GenerationMonitor(SETTINGS, pairs=PairCheck())
    assert made.heartbeat_received("a", heartbeat(ready=(1, 5)), now_s=1.0) == []
    assert made.orders == LeaderHeartbeat(generation=-1)
    assert made.reports.heartbeats == {"a": heartbeat(ready=(1, 5))}


def test_a_new_generation_begins_with_no_orders_and_no_failures() -> None:
    made = monitor()
    made.heartbeat_received("a", heartbeat(exits=(exited(0),), problem="x"), now_s=1.0)
    made.stop_at_boundary("grows")
    made.begin(plan(2, "ab"), now_s=2.0)
    assert made.orders == LeaderHeartbeat(generation=2)
    assert not made.waits_for_cause
    for node_id in "ab":
        made.heartbeat_received(node_id, heartbeat(generation=2), now_s=2.0)
    assert made.is_steady
    # What failed before may fail again.
    assert starts(made.tick(now_s=9.0)) == []
    made.heartbeat_received("a", heartbeat(generation=2, problem="x"), now_s=9.0)
    assert starts(made.tick(now_s=9.2))


# --- rule 2: failures and their consequences --------------------------------------------------


def test_an_exception_waits_a_moment_for_the_kill_it_followed_from() -> None:
    made = monitor()
    made.heartbeat_received("a", heartbeat(exits=(exited(0),)), now_s=1.0)
    assert made.waits_for_cause
    assert not made.is_steady
    assert starts(made.tick(now_s=1.0 + CAUSE_WAIT_S / 2)) == []
    made.heartbeat_received(
        "b", heartbeat(exits=(exited(2, ExitKind.SIGNAL, -9),)), now_s=1.0 + CAUSE_WAIT_S / 2
    )
    assert not made.waits_for_cause
    assert starts(made.tick(now_s=1.0 + CAUSE_WAIT_S / 2)) == ["rank 2: signal"]


def test_an_exception_that_nothing_else_explains_is_the_cause() -> None:
    made = monitor()
    made.heartbeat_received("a", heartbeat(exits=(exited(1),)), now_s=1.0)
    # A later failure does not extend the wait.
    made.heartbeat_received(
        "a", heartbeat(exits=(exited(1), exited(0))), now_s=1.0 + CAUSE_WAIT_S / 2
    )
    assert starts(made.tick(now_s=1.0 + CAUSE_WAIT_S)) == ["rank 0: exception"]


def test_on_one_node_nothing_is_waited_for() -> None:
    made = monitor(ONE)
    made.heartbeat_received("a", heartbeat(exits=(exited(0),)), now_s=1.0)
    assert starts(made.tick(now_s=1.0)) == ["rank 0: exception"]


def test_a_rank_fails_once() -> None:
    made = monitor()
    for now_s in (1.0, 2.0):
        made.heartbeat_received(
            "a", heartbeat(exits=(exited(0, ExitKind.SIGNAL, -9),)), now_s=now_s
        )
        found = made.tick(now_s=now_s)
        assert len(starts(found)) == (1 if now_s == 1.0 else 0)


def test_every_rank_that_finished_ends_the_run() -> None:
    made = monitor()
    done = [exited(rank, ExitKind.FINISHED, 0) for rank in range(4)]
    made.heartbeat_received("a", heartbeat(exits=tuple(done[:2])), now_s=1.0)
    assert not made.waits_for_cause
    assert made.tick(now_s=1.0) == []
    made.heartbeat_received("b", heartbeat(exits=tuple(done[2:])), now_s=1.0)
    assert made.tick(now_s=1.0) == [EndRun(0, "every rank has finished")]


def test_the_ranks_of_a_lost_node_are_lost_at_once() -> None:
    made = monitor()
    made.heartbeat_received("a", heartbeat(exits=(exited(0),)), now_s=1.0)
    made.heartbeat_received("b", heartbeat(exits=(exited(2),)), now_s=1.0)
    found = made.lost({"b": "refused"}, now_s=1.0)
    assert starts(found) == ["node b is lost: refused"]
    assert made.lost({}, now_s=1.0) == []


def test_a_lost_node_that_ran_nothing_is_no_failure() -> None:
    made = monitor()
    assert starts(made.lost({"s": "no heartbeat"}, now_s=1.0)) == []


def test_a_node_that_cannot_get_its_state_back_fails_once() -> None:
    made = monitor()
    for _ in range(2):
        made.heartbeat_received("b", heartbeat(problem="no source"), now_s=1.0)
    assert starts(made.tick(now_s=1.0)) == ["node b could not restore its state: no source"]
    made.heartbeat_received("b", heartbeat(problem="no source"), now_s=2.0)
    assert starts(made.tick(now_s=2.0)) == []


def test_a_fetch_that_failed_for_lost_connections_never_ends_with_93() -> None:
    made = monitor()
    lost = "node a has reset the connection"
    for generation in range(2, 7):
        now_s = 100.0 * generation
        made.heartbeat_received(
            "b",
            heartbeat(generation=generation - 1, problem=lost, problem_is_link=True),
            now_s=now_s,
        )
        found = made.tick(now_s=now_s) + made.tick(now_s=now_s + 90.0)
        assert [type(one) for one in made.order_all(found)] == [StartGeneration]
        made.begin(plan(generation, "ab"), now_s=now_s + 90.0)


def test_a_problem_is_the_cause_of_the_exit_next_to_it() -> None:
    made = monitor()
    made.heartbeat_received("b", heartbeat(exits=(exited(2),), problem="no source"), now_s=1.0)
    assert starts(made.tick(now_s=1.0)) == ["node b could not restore its state: no source"]


def test_a_problem_takes_the_place_of_an_exit_that_still_waits_for_its_cause() -> None:
    made = monitor()
    made.heartbeat_received("b", heartbeat(exits=(exited(2), exited(3))), now_s=1.0)
    made.heartbeat_received(
        "b", heartbeat(exits=(exited(2), exited(3)), problem="no source"), now_s=1.05
    )
    assert starts(made.tick(now_s=1.1)) == ["node b could not restore its state: no source"]


def test_a_problem_that_is_reported_after_the_decision_changes_nothing() -> None:
    made = monitor()
    made.heartbeat_received("b", heartbeat(exits=(exited(2), exited(3))), now_s=1.0)
    assert made.tick(now_s=2.0)
    made.heartbeat_received(
        "b", heartbeat(exits=(exited(2), exited(3)), problem="no source"), now_s=2.1
    )
    assert starts(made.tick(now_s=3.0)) == []


# --- rule 3: commits --------------------------------------------------------------------------


def test_a_version_is_committed_once_all_are_ready_with_just_that_one() -> None:
    made = monitor()
    made.heartbeat_received("a", heartbeat(ready=(1, 5)), now_s=1.0)
    assert made.orders.committed is None
    made.heartbeat_received("b", heartbeat(ready=(1, 4)), now_s=1.0)
    assert made.orders.committed is None
    made.heartbeat_received("b", heartbeat(ready=(1, 5)), now_s=1.0)
    assert made.orders.committed == (1, 5)


def test_no_older_version_is_committed_after_a_newer() -> None:
    made = monitor()
    for ready in ((1, 5), (1, 4)):
        for node_id in "ab":
            made.heartbeat_received(node_id, heartbeat(ready=ready), now_s=1.0)
    assert made.orders.committed == (1, 5)
    for node_id in "ab":
        made.heartbeat_received(node_id, heartbeat(ready=(1, 6)), now_s=1.0)
    assert made.orders.committed == (1, 6)


def test_a_step_that_one_rank_has_abandoned_is_abandoned_by_all() -> None:
    made = monitor()
    made.heartbeat_received("a", heartbeat(abandoned_step=6), now_s=1.0)
    made.heartbeat_received("b", heartbeat(abandoned_step=4), now_s=1.0)
    assert made.orders.abandoned_step == 6


def test_a_step_that_a_rank_has_passed_without_a_word_is_abandoned() -> None:
    """Each of two nodes would wait forever for the other to seal what it holds."""
    made = monitor()
    made.heartbeat_received("a", heartbeat(sealed=(5, 5), step=6), now_s=1.0)
    assert made.orders.abandoned_step == -1
    made.heartbeat_received("b", heartbeat(sealed=(8, 8), step=8), now_s=1.0)
    made.heartbeat_received("a", heartbeat(sealed=(5, 5), step=8), now_s=1.0)
    assert made.orders.abandoned_step == 7
    assert made.orders.take_from > 8


def test_what_another_node_knows_to_be_committed_is_not_abandoned() -> None:
    """A new leader may not know it yet, and node a has not received it."""
    made = monitor()
    made.heartbeat_received("b", heartbeat(sealed=(8, 8), committed=(1, 5), step=8), now_s=1.0)
    made.heartbeat_received("a", heartbeat(sealed=(5, 5), step=8), now_s=1.0)
    assert made.orders.abandoned_step == -1


def test_a_commit_of_the_leader_before_is_ordered_again() -> None:
    """Node a has not received it, and node b is already ready with a later version."""
    made = monitor()
    made.heartbeat_received("a", heartbeat(ready=(1, 5), sealed=(5, 5)), now_s=1.0)
    made.heartbeat_received(
        "b", heartbeat(ready=(1, 8), sealed=(8, 8), committed=(1, 5)), now_s=1.0
    )
    assert made.orders.committed == (1, 5)


def test_the_restored_version_is_committed_again_when_all_nodes_protect_it() -> None:
    made = monitor()
    made.heartbeat_received("a", heartbeat(committed=(0, 5)), now_s=1.0)
    assert made.orders.committed is None


def test_the_next_snapshot_is_named_where_no_rank_has_been_yet() -> None:
    made = monitor()
    made.heartbeat_received("a", heartbeat(ready=(1, 5), step=7), now_s=1.0)
    assert made.orders.take_from == -1
    made.heartbeat_received("b", heartbeat(ready=(1, 5), step=6), now_s=1.0)
    assert made.orders.take_from == 8
    made.heartbeat_received("b", heartbeat(ready=(1, 5), step=9, abandoned_step=8), now_s=1.0)
    assert made.orders.take_from > 9


def test_now_and_then_the_newest_commit_goes_to_disk() -> None:
    made = monitor(orders_checkpoints=True, checkpoint=CheckpointConfig(every_s=10.0))
    made.begin(TWO, now_s=100.0)

    def commits(step: int, now_s: float) -> tuple[int, int] | None:
        for node_id in "ab":
            made.heartbeat_received(node_id, heartbeat(ready=(1, step)), now_s=now_s)
        return made.orders.checkpoint

    assert commits(5, 109.9) is None
    assert commits(5, 110.0) == (1, 5)
    assert commits(5, 125.0) == (1, 5)
    assert commits(6, 126.0) == (1, 6), "it was due, and there was nothing new"
    assert commits(7, 135.9) == (1, 6)
    assert commits(7, 136.0) == (1, 7)


def test_a_leader_that_orders_no_checkpoint_names_none() -> None:
    made = monitor(orders_checkpoints=False)
    for node_id in "ab":
        made.heartbeat_received(node_id, heartbeat(ready=(1, 5)), now_s=1e6)
    assert made.orders.checkpoint is None


# --- orders -----------------------------------------------------------------------------------


def test_an_order_is_new_until_a_heartbeat_has_reported_it() -> None:
    made = monitor()
    assert made.heartbeat((1, 3), 4, is_suspended=True) == LeaderHeartbeat(
        generation=1, voter_revision=3, number=4, is_suspended=True
    )
    assert not made.has_new_orders()
    made.stop_at_boundary("grows")
    assert made.has_new_orders()
    assert made.heartbeat((1, 0), 5, is_suspended=False).reason == "grows"
    assert not made.has_new_orders()


def test_orders_for_another_generation_are_not_reported_except_the_end() -> None:
    made = monitor()
    made.stop_at_boundary("grows")
    assert made.heartbeat((2, 0), 5, is_suspended=False) == LeaderHeartbeat(generation=2, number=5)
    cause = exited(0)
    made.end(EndRun(3, "over", cause, "mend it"), now_s=1.0)
    found = made.heartbeat((2, 0), 6, is_suspended=False)
    assert (found.ended, found.exit_code, found.reason) == (True, 3, "over")
    assert (found.advice, found.cause) == ("mend it", cause)


def test_a_boundary_is_named_as_far_ahead_as_ranks_get_before_they_receive_it() -> None:
    made = monitor()
    made.heartbeat_received("a", heartbeat(step=100), now_s=1.0)
    made.heartbeat_received("a", heartbeat(step=105), now_s=1.5)  # ten steps a second
    assert made.stop_at_boundary("grows") == 105 + 1 + 10
    # They already wait there.
    made.heartbeat_received("a", heartbeat(step=110), now_s=2.0)
    assert made.stop_at_boundary("stops") == 116
    assert made.orders.stop_after_step == 116


def test_on_one_node_the_next_boundary_is_soon_enough() -> None:
    made = monitor(ONE)
    made.heartbeat_received("a", heartbeat(step=100), now_s=1.0)
    made.heartbeat_received("a", heartbeat(step=105), now_s=1.5)
    assert made.stop_at_boundary("stops") == 106


def test_the_rate_is_not_measured_over_too_short_a_time_nor_below_zero() -> None:
    made = monitor()
    made.heartbeat_received("a", heartbeat(step=100), now_s=1.0)
    made.heartbeat_received("a", heartbeat(step=104), now_s=1.4)
    assert made.stop_at_boundary("stops") == 105
    made = monitor()
    made.heartbeat_received("a", heartbeat(step=100), now_s=1.0)
    made.note_failure("a", now_s=1.0)
    made.take_over(TWO, since_s=0.0)
    made.heartbeat_received("b", heartbeat(step=10), now_s=2.0)
    assert made.stop_at_boundary("stops") == 11


def test_the_longest_requested_interval_becomes_the_interval_of_all() -> None:
    made = monitor()
    for now_s in (1.0, 2.0):
        made.heartbeat_received("a", heartbeat(step=10, requested_every=4), now_s=now_s)
        made.heartbeat_received("b", heartbeat(step=10, requested_every=6), now_s=now_s)
    assert (made.orders.every, made.orders.every_from_step) == (6, 10 + EVERY_AHEAD_STEPS)


def test_an_interval_is_not_changed_before_the_last_one_has_begun() -> None:
    made = monitor()
    made.heartbeat_received("a", heartbeat(step=10, requested_every=4), now_s=1.0)
    made.heartbeat_received("a", heartbeat(step=10, requested_every=4), now_s=1.5)
    first = made.orders
    assert first.every == 4
    made.heartbeat_received(
        "a", heartbeat(step=first.every_from_step, requested_every=9), now_s=1.5
    )
    made.check_interval()
    assert made.orders.every == 4
    made.heartbeat_received(
        "a", heartbeat(step=first.every_from_step + 1, requested_every=9), now_s=1.5
    )
    made.check_interval()
    assert made.orders.every == 9
    # A repeated request is not reported, and a missing one is no request.
    last = made.orders
    made.heartbeat_received("a", heartbeat(step=9999, requested_every=9), now_s=1.5)
    made.check_interval()
    made.heartbeat_received("a", heartbeat(step=9999), now_s=1.5)
    made.check_interval()
    assert made.orders is last


@pytest.mark.parametrize("port", [0, 7])
def test_an_smp_that_listens_where_it_did_has_not_moved(port: int) -> None:
    made = monitor()
    made.heartbeat_received("b", heartbeat(smp_port=port), now_s=1.0)
    assert made.orders.moved == {}


def test_an_smp_that_was_started_again_is_found_at_its_new_port() -> None:
    made = monitor()
    made.heartbeat_received("b", heartbeat(smp_port=8), now_s=1.0)
    made.heartbeat_received("a", heartbeat(smp_port=9), now_s=1.0)
    assert made.orders.moved == {"a": 9, "b": 8}
    reported = made.orders
    made.heartbeat_received("b", heartbeat(smp_port=8), now_s=1.0)
    assert made.orders is reported


# --- requests of the supervisor ---------------------------------------------------------------


def test_what_all_nodes_are_to_do_goes_into_the_orders() -> None:
    made = monitor()
    assert made.order_all([RequestFinalSnapshot("SIGTERM")]) == []
    assert (made.orders.stop_after_step, made.orders.reason) == (1, "SIGTERM")
    for count in (1, 2):
        assert made.order_all([SignalWorkers(15, "now")]) == []
        assert (made.orders.signal, made.orders.signal_count) == (15, count)
    assert not made.orders.killed
    assert made.order_all([KillWorkers("twice")]) == []
    assert (made.orders.killed, made.orders.reason) == (True, "twice")


@pytest.mark.parametrize("last", [StartGeneration("again"), EndRun(1, "over")])
def test_ranks_that_a_ballot_or_the_end_will_kill_are_not_ordered_dead(
    last: SupervisorCommand,
) -> None:
    made = monitor()
    assert made.order_all([KillWorkers("failed"), last]) == [last]
    assert not made.orders.killed


# --- a stop -----------------------------------------------------------------------------------


def test_a_stop_asks_for_a_last_snapshot_and_signals_once_all_wait() -> None:
    made = monitor()
    made.heartbeat_received("a", heartbeat(), now_s=1.0)
    assert made.heartbeat_received("b", heartbeat(stops=1, stop_signal=2), now_s=1.0) == [
        RequestFinalSnapshot("a signal on b")
    ]
    assert made.is_stopping
    assert made.stop_signal == 2
    assert made.heartbeat_received("a", heartbeat(at_boundary=True), now_s=2.0) == []
    found = made.heartbeat_received("b", heartbeat(stops=1, at_boundary=True), now_s=2.0)
    assert [type(one) for one in found] == [SignalWorkers]
    # It is reported once.
    assert made.heartbeat_received("a", heartbeat(at_boundary=True), now_s=2.0) == []


def test_each_generation_comes_to_a_boundary_of_its_own() -> None:
    made = monitor()
    for node_id in "ab":
        made.heartbeat_received(node_id, heartbeat(at_boundary=True), now_s=1.0)
    made.begin(msgspec.structs.replace(TWO, generation=2), now_s=2.0)
    made.heartbeat_received("a", heartbeat(generation=2, stops=1), now_s=3.0)
    made.heartbeat_received("a", heartbeat(generation=2, stops=1, at_boundary=True), now_s=3.0)
    found = made.heartbeat_received("b", heartbeat(generation=2, at_boundary=True), now_s=3.0)
    assert [type(one) for one in found] == [SignalWorkers]


def test_the_same_signal_on_every_node_is_one_stop_and_another_one_kills() -> None:
    made = monitor()
    made.heartbeat_received("a", heartbeat(stops=1), now_s=1.0)
    assert made.stop_signal == 15, "the default is SIGTERM"
    assert made.heartbeat_received("b", heartbeat(stops=1), now_s=1.0) == []
    assert [type(one) for one in made.heartbeat_received("b", heartbeat(stops=2), now_s=1.0)] == [
        KillWorkers
    ]
    assert made.is_stopping


def test_two_signals_that_come_at_once_are_two() -> None:
    made = monitor()
    found = made.heartbeat_received("a", heartbeat(stops=2), now_s=1.0)
    assert [type(one) for one in found] == [RequestFinalSnapshot, KillWorkers]


@pytest.mark.parametrize(("given", "signal"), [(2, 2), (0, 15)])
def test_a_stop_while_no_rank_runs_is_kept_and_ends_the_run(given: int, signal: int) -> None:
    made = GenerationMonitor(SETTINGS, pairs=PairCheck())
    made.note("a", heartbeat(generation=-1))
    assert made.stop_signal == 0
    made.note("b", heartbeat(generation=-1, stops=1, stop_signal=given))
    assert made.stop_signal == signal
    assert made.stopped().exit_code == 128 + signal
    assert set(made.reports.heartbeats) == {"a", "b"}


# --- steadiness, failures of nodes, and the next lead -----------------------------------------


def test_a_run_is_steady_once_all_ranks_run_and_none_has_failed() -> None:
    made = monitor()
    made.heartbeat_received("a", heartbeat(), now_s=1.0)
    assert not made.is_steady
    made.heartbeat_received("b", heartbeat(), now_s=1.0)
    assert made.is_steady
    assert not made.is_stopping
    made.heartbeat_received("b", heartbeat(exits=(exited(2, ExitKind.FINISHED, 0),)), now_s=1.0)
    assert not made.is_steady


def test_a_stopping_run_is_not_steady() -> None:
    made = monitor()
    for node_id in "ab":
        made.heartbeat_received(node_id, heartbeat(), now_s=1.0)
    made.heartbeat_received("a", heartbeat(stops=1), now_s=1.0)
    assert not made.is_steady


def test_a_node_that_is_lost_too_often_in_an_hour_is_excluded() -> None:
    made = monitor()
    for now_s in (0.0, 1000.0):
        made.note_failure("b", now_s=now_s)
    made.note_failure("a", now_s=1000.0)
    assert made.excluded(now_s=1000.0) == set()
    made.note_failure("b", now_s=2000.0)
    assert made.excluded(now_s=3599.0) == {"b"}
    assert made.excluded(now_s=3600.0) == set()


def test_a_lost_node_reports_nothing() -> None:
    made = monitor()
    for node_id in "ab":
        made.heartbeat_received(node_id, heartbeat(), now_s=1.0)
    made.note_failure("b", now_s=1.0)
    assert "b" not in made.reports.heartbeats
    assert not made.is_steady


def test_the_next_leader_is_as_strict() -> None:
    made = monitor()
    made.heartbeat_received("a", heartbeat(exits=(exited(0, ExitKind.SIGNAL, -9),)), now_s=10.0)
    made.tick(now_s=10.0)
    made.note_failure("b", now_s=20.0)
    made.note_failure("c", now_s=-5000.0)
    reported = made.history(now_s=30.0)
    assert reported.restarts == 1
    assert reported.node_failures == {"b": [10.0]}, "what is older than an hour is forgotten"
    successor = GenerationMonitor(SETTINGS, pairs=PairCheck())
    successor.succeed(reported, now_s=500.0, known_s=500.0)
    assert successor.history(now_s=500.0) == reported
    # Its own count continues from there, and a repeated report does not double it.
    successor.succeed(reported, now_s=500.0, known_s=500.0)
    successor.note_failure("b", now_s=501.0)
    assert successor.history(now_s=510.0).node_failures == {"b": [20.0, 9.0]}
    successor.note_failure("b", now_s=502.0)
    assert successor.excluded(now_s=510.0) == {"b"}


def test_a_node_that_takes_over_sees_how_far_the_generation_has_come() -> None:
    made = GenerationMonitor(SETTINGS, pairs=PairCheck())
    made.succeed(FailureHistory(), now_s=0.0, known_s=0.0)
    made.note("a", heartbeat(step=7))
    assert made.reports.step == 0
    made.take_over(TWO, since_s=0.0)
    assert made.reports.step == 7
    assert made.supervisor.world_size == 4
    assert made.supervisor.state is SupervisorState.RUNNING


def test_a_generation_reports_what_it_was_restored_from() -> None:
    made = monitor()
    assert made.begin(plan(2, "ab", restore=(1, 5)), now_s=1.0) == []
    assert made.orders == LeaderHeartbeat(generation=2)


# --- a run that makes no steps ----------------------------------------------------------------


def unresponsive(unresponsive_s: float) -> dict[str, Heartbeat]:
    """Rank 1 makes no progress, and the others wait for it."""
    views = hang(unresponsive_s)
    return {
        node.node_id: heartbeat(p99_s=0.1, views=tuple(views[rank] for rank in node.ranks))
        for node in TWO.members
    }


def observed(
    made: GenerationMonitor, unresponsive_s: float, now_s: float
) -> list[SupervisorCommand]:
    for node_id, one in unresponsive(unresponsive_s).items():
        made.heartbeat_received(node_id, one, now_s=now_s)
    return made.tick(now_s=now_s)


def test_a_hang_is_named_and_then_acted_on() -> None:
    made = monitor()
    assert observed(made, 9.0, 109.0) == []
    assert made.incidents.open is not None
    assert made.incidents.open.verdict is not None
    assert observed(made, 9.5, 109.5) == []
    reasons = starts(observed(made, 10.5, 110.5))
    assert len(reasons) == 1
    assert reasons[0].startswith("hang in computation: rank 1")
    kinds = [note.record.kind for note in made.incidents.drain_journal_entries()]
    assert kinds.count("verdict") == 1
    assert "lifecycle_change_rejected" not in kinds


def test_a_missing_heartbeat_that_ends_is_not_acted_on() -> None:
    made = monitor()
    observed(made, 9.0, 109.0)
    for node_id in "ab":
        made.heartbeat_received(node_id, heartbeat(step=6), now_s=110.0)
    assert made.tick(now_s=110.0) == []
    assert made.incidents.open is None


def test_a_hang_of_unknown_origin_is_acted_on_at_last() -> None:
    made = monitor()
    for now_s in (9.0, 121.0):
        made.heartbeat_received("a", unresponsive(now_s)["b"], now_s=now_s)
        found = made.tick(now_s=now_s)
    assert len(starts(found)) == 1


# --- protection and checkpoints ---------------------------------------------------------------


def test_a_committed_version_is_announced_as_protected_when_every_group_protects_it() -> None:
    made = monitor()
    made.heartbeat_received("a", heartbeat(ready=(1, 5), survives=1), now_s=1.0)
    made.heartbeat_received("b", heartbeat(ready=(1, 5), survives=0), now_s=1.0)
    assert (made.orders.committed, made.orders.protected) == ((1, 5), None)
    made.heartbeat_received("b", heartbeat(ready=(1, 5), survives=1), now_s=1.1)
    assert made.orders.protected == (1, 5)
    # The next version is not protected by the protection of the last one.
    made.heartbeat_received("a", heartbeat(ready=(1, 9), survives=1), now_s=1.2)
    assert made.orders.protected == (1, 5)
    made.heartbeat_received("b", heartbeat(ready=(1, 9), survives=0), now_s=1.2)
    assert (made.orders.committed, made.orders.protected) == ((1, 9), (1, 5))


def test_the_newest_complete_checkpoint_is_announced_whichever_node_completed_it() -> None:
    made = monitor()
    made.heartbeat_received("a", heartbeat(persisted=(0, 40)), now_s=1.0)
    assert made.orders.persisted == (0, 40)
    made.heartbeat_received("b", heartbeat(persisted=(0, 20)), now_s=1.0)
    assert made.orders.persisted == (0, 40)
    made.heartbeat_received("b", heartbeat(persisted=(1, 3)), now_s=1.0)
    assert made.orders.persisted == (1, 3)


def test_a_checkpoint_that_a_rank_waits_for_is_ordered_once_and_after_the_last_one() -> None:
    made = monitor(orders_checkpoints=True, checkpoint=CheckpointConfig(every_s=600.0))
    waits = heartbeat(ready=(1, 5), persist_step=5)
    made.heartbeat_received("a", waits, now_s=1.0)
    assert made.orders.checkpoint is None, "nothing is committed"
    made.heartbeat_received("b", heartbeat(ready=(1, 5)), now_s=1.0)
    made.heartbeat_received("a", waits, now_s=1.1)
    assert made.orders.checkpoint == (1, 5)
    for node_id in "ab":
        made.heartbeat_received(node_id, heartbeat(ready=(1, 8), persist_step=8), now_s=2.0)
    assert made.orders.committed == (1, 8)
    assert made.orders.checkpoint == (1, 5), "a node may still write its part of it"
    made.heartbeat_received("b", heartbeat(ready=(1, 8), persisted=(1, 5)), now_s=3.0)
    made.heartbeat_received("a", heartbeat(ready=(1, 8), persist_step=8), now_s=3.0)
    assert made.orders.checkpoint == (1, 8)


def test_a_failed_checkpoint_does_not_prevent_the_next_one_that_a_rank_waits_for() -> None:
    made = monitor(orders_checkpoints=True, checkpoint=CheckpointConfig(every_s=600.0))
    for node_id in "aba":
        made.heartbeat_received(node_id, heartbeat(ready=(1, 5), persist_step=5), now_s=1.0)
    assert made.orders.checkpoint == (1, 5)
    waits = heartbeat(ready=(1, 8), persist_step=8)
    writes = heartbeat(ready=(1, 8), writes_checkpoint=True)
    for now_s in (2.0, 50.0):
        made.heartbeat_received("b", writes, now_s=now_s)
        made.heartbeat_received("a", waits, now_s=now_s)
    assert made.orders.checkpoint == (1, 5), "b still writes its part"
    made.heartbeat_received("b", heartbeat(ready=(1, 8)), now_s=51.0)
    made.heartbeat_received("a", waits, now_s=51.0)
    assert made.orders.checkpoint == (1, 8)
    for node_id in "aba":
        made.heartbeat_received(node_id, heartbeat(ready=(1, 9), persist_step=9), now_s=52.0)
    assert made.orders.checkpoint == (1, 8), "not every node has received the order"
