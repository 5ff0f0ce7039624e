"""Snapshot coordination: the maintained sums equal recomputed ones.

The leader names the step of the next snapshot far enough ahead, and not much further.
"""

from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from ftrun.events import Progress
from ftrun.ids import Step
from ftrun.recovery.snapshot_coordination import MemberReports, SnapshotAlignment
from ftrun.wire.cluster.membership import Heartbeat
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
