"""Snapshot coordination: the maintained sums equal recomputed ones.

The leader names the step of the next snapshot far enough ahead, and not much further.
"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from ftrun.config.profile import CheckpointConfig
from ftrun.events import Progress
from ftrun.ids import Step
from ftrun.recovery.snapshot_coordination import (
    MAX_WRITES,
    CheckpointSchedule,
    MemberReports,
    SnapshotAlignment,
)
from ftrun.wire.cluster.generation import VersionPair
from ftrun.wire.cluster.membership import Heartbeat, LeaderHeartbeat
from tests.unit.recovery.made import plan

heartbeats = st.builds(
    Heartbeat,
    generation=st.integers(1, 2),
    step=st.integers(0, 9),
    steps_here=st.integers(0, 5),
    attached=st.booleans(),
    ready=st.sampled_from([None, (1, 4), (2, 5)]),
    abandoned_step=st.integers(-1, 3),
    at_boundary=st.booleans(),
    requested_every=st.integers(0, 3),
    problem=st.sampled_from(["", "", "a slot is damaged"]),
    survives=st.integers(0, 1),
    sealed=st.sampled_from([None, (3, 3), (4, 6), (5, 5)]),
    committed=st.sampled_from([None, (0, 9), (1, 3), (1, 5)]),
)
node_ids = st.sampled_from("abz")
acts = st.one_of(
    st.tuples(st.just("take"), node_ids, heartbeats),
    st.tuples(st.just("forget"), node_ids),
    st.tuples(st.just("begin"), st.integers(1, 2)),
)


def agrees(
    reports: MemberReports, newest: dict[str, Heartbeat], seen: list[Heartbeat], generation: int
) -> None:
    """The same values, recomputed from all reports."""
    now = [
        heartbeat
        for one, heartbeat in newest.items()
        if one in "ab" and heartbeat.generation == generation
    ]
    assert reports.step == max((heartbeat.step for heartbeat in seen), default=0)
    assert reports.steps_here == max((heartbeat.steps_here for heartbeat in seen), default=0)
    assert reports.attached == any(heartbeat.attached for heartbeat in seen)
    assert reports.abandoned_step == max(
        (heartbeat.abandoned_step for heartbeat in seen), default=-1
    )
    assert reports.all_run == (len(now) == 2)
    assert reports.all_at_boundary == (sum(heartbeat.at_boundary for heartbeat in now) == 2)
    assert reports.requested_every() == max(
        (heartbeat.requested_every for heartbeat in now), default=0
    )
    assert reports.are_protected() == (
        len(now) == sum(heartbeat.survives for heartbeat in now) == 2
    )
    known = [heartbeat.committed for heartbeat in seen if heartbeat.committed is not None]
    assert reports.committed == max(known, default=None)
    committed = max(known, default=(-1, -1))
    newest_sealed = max((heartbeat.sealed[1] for heartbeat in seen if heartbeat.sealed), default=-1)
    for heartbeat in now:
        is_missed = heartbeat.sealed is not None and (
            committed < (generation, heartbeat.sealed[0]) and heartbeat.sealed[0] < newest_sealed
        )
        assert reports.missed_step(heartbeat) == (newest_sealed - 1 if is_missed else -1)
        is_whole = not any(one.problem for one in now) and heartbeat.ready is not None
        is_ready = is_whole and [one.ready for one in now] == [heartbeat.ready] * 2
        assert reports.ready_with(heartbeat) == (heartbeat.ready if is_ready else None)


@effort(max_examples=120, deadline=None)
@given(st.lists(acts, max_size=25))
def test_the_sums_are_those_of_the_members_of_the_running_generation(
    found: list[tuple[object, ...]],
) -> None:
    reports, generation = MemberReports(), 1
    reports.begin(plan(1, "ab", spares="z"))
    newest: dict[str, Heartbeat] = {}
    seen: list[Heartbeat] = []
    for what in found:
        match what:
            case ("take", str(node_id), Heartbeat() as heartbeat):
                counts = node_id in "ab" and heartbeat.generation == generation
                assert reports.take(node_id, heartbeat) is counts
                newest[node_id] = heartbeat
                seen += [heartbeat] if counts else []
            case ("forget", str(node_id)):
                reports.forget(node_id)
                newest.pop(node_id, None)
            case ("begin", int(generation)):
                reports.begin(plan(generation, "ab", spares="z"))
                seen = [
                    heartbeat
                    for one, heartbeat in newest.items()
                    if one in "ab" and heartbeat.generation == generation
                ]
            case _:
                raise AssertionError(what)
        assert reports.heartbeats == newest
        agrees(reports, newest, seen, generation)


def test_before_the_first_generation_nothing_is_summed_up() -> None:
    reports = MemberReports()
    assert not reports.take("a", Heartbeat(generation=0, step=7, at_boundary=True, ready=(0, 7)))
    assert reports.progress == Progress(Step(0), 0, False)
    assert not reports.all_run
    assert not reports.all_at_boundary
    assert reports.member("a") is None


def test_a_member_is_known_with_its_ranks() -> None:
    reports = MemberReports()
    reports.begin(plan(1, "ab", spares="z"))
    node = reports.member("b")
    assert node is not None
    assert list(node.ranks) == [1]
    assert reports.member("z") is None


def test_the_next_step_is_named_first() -> None:
    assert SnapshotAlignment().after_commit(-1, step=10) == 11


def test_a_step_that_was_named_is_never_taken_back() -> None:
    assert SnapshotAlignment().after_commit(40, step=10) == 40
    assert SnapshotAlignment().after_skip(40, skipped=40, step=10) > 40


def test_a_step_skipped_before_the_named_one_moves_nothing() -> None:
    """Ranks that had not received the named step have skipped it, and no rank has taken it."""
    found = SnapshotAlignment()
    assert found.after_skip(40, skipped=39, step=39) == 40
    assert found.after_commit(-1, step=10) == 11


def test_a_report_that_takes_hundreds_of_steps_is_caught_up_with_soon() -> None:
    """A rank reads the named step 200 steps late, and reports every 50 steps."""
    found, named, read = SnapshotAlignment(), 0, -1
    for step in range(50, 5000, 50):
        skipped = step if read <= step else -1
        if skipped < 0:
            break
        read, named = named, found.after_skip(named, skipped=skipped, step=step)
    assert step < 1200


def test_words_that_arrive_late_put_it_further_ahead_until_they_do_not() -> None:
    found = SnapshotAlignment()
    assert found.after_skip(11, skipped=11, step=17) == 17 + 12  # there and back
    assert found.after_skip(29, skipped=29, step=30) == 30 + 18
    ahead = [found.after_commit(-1, step=100) - 100 for _ in range(40)]
    assert ahead[:3] == [18, 18, 18]
    assert sorted(ahead, reverse=True) == ahead
    assert ahead[-1] <= 2


# --- checkpoints ------------------------------------------------------------------------------

AHEAD = 3


class Checkpoints:
    """The schedule of a leader, with the reports of two members and the present orders."""

    def __init__(self, *, is_on: bool = True, **changes: object) -> None:
        settings = CheckpointConfig(every_s=10.0, live_capture_timeout_s=5.0)
        settings = msgspec.structs.replace(settings, **changes)
        self.made = CheckpointSchedule(settings, is_on=is_on)
        self.made.begin(now_s=0.0)
        self.reports = MemberReports()
        self.reports.begin(plan(1, "ab"))
        self.orders = LeaderHeartbeat(generation=1)
        for node_id in "ab":
            self.report(node_id)

    def report(self, node_id: str, **changes: object) -> None:
        found = Heartbeat(generation=1, attached=True, step=7, p99_s=2.0)
        self.reports.take(node_id, msgspec.structs.replace(found, **changes))

    def commit(self, at: VersionPair | None, **changes: object) -> None:
        self.orders = msgspec.structs.replace(self.orders, committed=at, **changes)

    def poll(self, now_s: float, *, awaited: int = 0) -> dict[str, object]:
        found = self.made.poll(self.orders, self.reports, AHEAD, awaited, now_s=now_s)
        self.orders = msgspec.structs.replace(self.orders, **found)
        return found


def test_a_checkpoint_by_time_requests_a_snapshot_once() -> None:
    made = Checkpoints()
    assert made.poll(9.9) == {}
    assert made.poll(10.0) == {"capture_from": 7 + AHEAD}, "also before the first commit"
    assert made.poll(11.0) == {}
    made.commit((1, 7 + AHEAD + 1))
    assert made.poll(12.0) == {}
    assert made.poll(19.9) == {}
    made.commit((1, 12), take_from=30)
    assert made.poll(20.0) == {"capture_from": 30}, "no rank takes one before"


def test_a_version_before_the_request_does_not_answer_it() -> None:
    made = Checkpoints()
    made.commit((0, 4))
    made.poll(10.0)
    made.commit((0, 99))
    assert made.poll(18.9) == {}
    made.commit((1, 9))
    assert made.poll(18.9) == {}
    # Two steps of 2 s, and 5 s: then the newest committed version has to do.
    assert made.poll(19.0) == {"checkpoint": (1, 9)}
    assert made.poll(20.0) == {}


def test_an_abandoned_request_is_made_again_further_ahead() -> None:
    made = Checkpoints()
    made.commit((0, 4))
    made.poll(10.0)
    made.commit((0, 4), abandoned_step=7 + AHEAD, take_from=15)
    made.report("b", step=11)
    assert made.poll(10.5) == {"capture_from": 15}
    assert made.poll(10.6) == {}
    assert made.poll(19.0) == {"checkpoint": (0, 4)}, "the limit counts from the first request"


@pytest.mark.parametrize("timeout_s", [0.0, 5.0], ids=["off", "detached"])
def test_without_a_capture_to_wait_for_the_committed_version_is_ordered(timeout_s: float) -> None:
    made = Checkpoints(live_capture_timeout_s=timeout_s)
    made.reports.attached = not timeout_s  # a script that saves by itself is not attached
    assert made.poll(10.0) == {}
    made.commit((1, 5))
    assert made.poll(10.0) == {"checkpoint": (1, 5)}
    assert made.poll(20.0) == {}, "there is nothing newer"
    assert made.made.order_committed(made.orders, now_s=20.0) == {}


@pytest.mark.parametrize("every_steps", [0, 4])
def test_a_version_that_a_rank_waits_for_is_ordered_once_and_if_there_is_room(
    every_steps: int,
) -> None:
    made = Checkpoints(every_steps=every_steps)
    assert made.poll(0.1, awaited=5) == {}, "nothing is committed"
    made.commit((1, 4), persisted=(1, 5))
    assert made.poll(0.2, awaited=5) == ({"checkpoint": (1, 4)} if every_steps else {})
    made.commit((1, 6))
    assert made.poll(0.3, awaited=5) == {}, "there is a checkpoint of it"
    assert made.poll(0.4, awaited=7) == {}, "it is not committed"
    assert made.poll(0.5, awaited=6) == {"checkpoint": (1, 6)}
    assert made.poll(0.6, awaited=6) == {}, "once"
    for node_id in "ab":
        made.report(node_id, checkpoint=(1, 6), num_writes=MAX_WRITES)
    made.commit((1, 9))
    assert made.poll(0.7, awaited=9) == {}, "no node has room"
    for node_id in "ab":
        made.report(node_id, checkpoint=(1, 6), num_writes=1)
    assert made.poll(0.8, awaited=8) == {"checkpoint": (1, 9)}
    assert made.poll(0.9, awaited=9) == {}, "the one that was ordered includes it"
    made.made.begin(now_s=1.0)
    made.commit((1, 3), persisted=None, checkpoint=None)
    assert made.poll(1.1, awaited=3) == {"checkpoint": (1, 3)}, "a new generation"


def test_a_run_without_a_directory_orders_nothing() -> None:
    made = Checkpoints(is_on=False)
    made.commit((1, 5))
    assert made.poll(99.0) == {}
    assert made.made.order_committed(made.orders, now_s=99.0) == {}


def test_a_checkpoint_by_steps_is_ordered_if_all_members_have_room() -> None:
    made = Checkpoints(every_steps=2)
    made.commit((1, 5))
    assert made.poll(0.1) == {}, "no multiple"
    made.commit((1, 6))
    assert made.poll(0.2) == {"checkpoint": (1, 6)}
    assert made.poll(0.2) == {}, "once"
    made.commit((1, 8))
    assert made.poll(0.3) == {"checkpoint": (1, 8)}
    made.commit((1, 10))
    assert made.poll(0.4) == {}, "the members may not have received two orders"
    for node_id in "ab":
        made.report(node_id, checkpoint=(1, 8), num_writes=MAX_WRITES - 1)
    made.commit((1, 12))
    assert made.poll(0.5) == {"checkpoint": (1, 12)}
    made.report("a", checkpoint=(1, 12), num_writes=1)
    made.report("b", checkpoint=(1, 12), num_writes=MAX_WRITES)
    made.commit((1, 14))
    assert made.poll(0.6) == {}, "one member has no room"
    made.report("b", checkpoint=(1, 12), num_writes=0)
    assert made.poll(0.7) == {}, "a version that was skipped is not ordered later"
    made.commit((1, 16))
    assert made.poll(0.8) == {"checkpoint": (1, 16)}
    made.reports.forget("b")
    made.commit((1, 18))
    assert made.poll(0.9) == {}, "a member has not reported"
