"""The lead names the step of the next snapshot far enough ahead, and not much further."""

from ftrun.recovery.snapshot_coordination import SnapshotAlignment


def test_the_next_step_is_named_first() -> None:
    assert SnapshotAlignment().after_commit(-1, step=10) == 11


def test_a_step_that_was_named_is_never_taken_back() -> None:
    assert SnapshotAlignment().after_commit(40, step=10) == 40
    assert SnapshotAlignment().after_skip(40, skipped=40, step=10) > 40


def test_a_step_skipped_before_the_named_one_moves_nothing() -> None:
    """Ranks that had not heard of the named step have skipped it, and nobody has taken it."""
    found = SnapshotAlignment()
    assert found.after_skip(40, skipped=39, step=39) == 40
    assert found.after_commit(-1, step=10) == 11


def test_a_report_that_takes_hundreds_of_steps_is_caught_up_with_soon() -> None:
    """A rank reads what was named 200 steps late, and reports each 50 steps."""
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
