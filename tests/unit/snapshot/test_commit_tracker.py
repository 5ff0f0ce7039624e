"""A commit means that every rank holds exactly that version."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.ids import Generation, Rank, Version, version
from ftrun.snapshot.commit_tracker import CommitTracker, newest_common

R0, R1 = Rank(0), Rank(1)


def tracker(*, generation: int = 0, held: dict[Rank, set[Version]] | None = None) -> CommitTracker:
    found = CommitTracker()
    found.begin_generation(Generation(generation), [R0, R1], 2, held or {})
    return found


def test_the_last_rank_commits() -> None:
    found = tracker()
    assert found.sealed(R0, version(0, 1)) is None
    assert found.pending(R0) == version(0, 1)
    assert found.committed is None
    assert found.sealed(R1, version(0, 1)) == version(0, 1)
    assert found.committed == version(0, 1)
    assert found.pending(R0) is None


@pytest.mark.parametrize(
    ("seals", "commits"),
    [
        ([(R0, 1), (R1, 1), (R1, 1), (R0, 1)], [None, 1, None, None]),  # reported twice
        ([(R0, 1), (R0, 2), (R1, 1), (R1, 2)], [None, None, None, 2]),  # replaced, as in memory
        ([(R0, 2), (R0, 1), (R1, 2)], [None, None, 2]),  # an older one comes late
        ([(Rank(2), 1), (R0, 1), (R1, 1)], [None, None, 1]),  # a rank of another node is dropped
    ],
)
def test_which_seals_commit(seals: list[tuple[Rank, int]], commits: list[int | None]) -> None:
    found = tracker()
    made = [found.sealed(rank, version(0, step)) for rank, step in seals]
    assert made == [None if step is None else version(0, step) for step in commits]
    assert found.ranks == (R0, R1)
    assert found.pending(Rank(2)) is None


def test_a_seal_of_another_generation_is_dropped() -> None:
    found = tracker(generation=1)
    for other in (version(0, 9), version(2, 9)):
        assert found.sealed(R0, other) is None
        assert found.sealed(R1, other) is None
    assert found.committed is None


def test_a_withdrawn_seal_counts_no_more() -> None:
    found = tracker()
    found.sealed(R0, version(0, 1))
    assert found.withdraw(R0, version(0, 1))
    assert found.pending(R0) is None
    assert found.sealed(R1, version(0, 1)) is None
    assert found.withdraw(R1, version(0, 2)), "what was never sealed can be withdrawn"
    assert found.pending(R1) == version(0, 1)
    assert found.sealed(R0, version(0, 1)) == version(0, 1)
    assert not found.withdraw(R0, version(0, 1))


def test_a_generation_begins_with_the_restore_point_committed() -> None:
    held = {R0: {version(0, 7), version(0, 8)}, R1: {version(0, 8)}}
    found = tracker(generation=1, held=held)
    assert found.committed == version(0, 8)
    assert found.sealed(R0, version(1, 9)) is None
    assert found.sealed(R1, version(1, 9)) == version(1, 9)


def test_a_new_smp_learns_a_seal_that_no_process_received() -> None:
    held = {R0: {version(0, 7), version(0, 8)}, R1: {version(0, 7)}}
    found = tracker(held=held)
    assert found.committed == version(0, 7)
    assert found.sealed(R1, version(0, 8)) == version(0, 8)


def test_a_node_with_a_part_of_the_ranks_never_commits() -> None:
    found = CommitTracker([R0], 2)
    assert found.world_size == 2
    held = {R0: {version(0, 1)}}
    assert found.begin_generation(Generation(0), [R0], 2, held) is None
    assert found.sealed(R0, version(0, 2)) is None
    assert not found.sees_all


def test_a_tracker_without_ranks_commits_nothing() -> None:
    found = CommitTracker()
    assert not found.sees_all
    assert found.sealed(R0, version(0, 1)) is None
    assert newest_common({}, []) is None


seals = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 6)), max_size=60)


@given(seals, st.integers(1, 4))
def test_every_commit_is_newer_and_is_what_each_rank_sealed_last(
    reported: list[tuple[int, int, int]], world_size: int
) -> None:
    found = CommitTracker()
    ranks = [Rank(rank) for rank in range(world_size)]
    found.begin_generation(Generation(1), ranks, world_size, {})
    newest: dict[Rank, Version] = {}
    before: Version | None = None
    for rank, generation, step in reported:
        sealed = version(generation, step)
        committed = found.sealed(Rank(rank), sealed)
        if generation == 1:
            newest[Rank(rank)] = max(sealed, newest.get(Rank(rank), sealed))
        if committed is not None:
            assert committed.generation == 1
            assert before is None or committed > before
            assert all(newest[rank] == committed for rank in ranks)
            before = committed
        assert found.committed == before


@given(seals, st.integers(1, 4))
def test_a_fresh_tracker_filled_from_the_slots_agrees_with_the_one_that_received_all(
    reported: list[tuple[int, int, int]], world_size: int
) -> None:
    """The protocol: no rank takes a version before the previous one is committed."""
    ranks = [Rank(rank) for rank in range(world_size)]
    received = CommitTracker()
    received.begin_generation(Generation(0), ranks, world_size, {})
    slots: dict[Rank, set[Version]] = {rank: set() for rank in ranks}
    for number, _, _ in reported:
        rank = Rank(number % world_size)
        committed = received.committed
        mine = version(0, committed.step + 1 if committed else 1)
        slots[rank] = {one for one in slots[rank] if one == committed} | {mine}
        received.sealed(rank, mine)
        fresh = CommitTracker()
        fresh.begin_generation(Generation(0), ranks, world_size, slots)
        assert fresh.committed == received.committed
        assert [fresh.pending(one) for one in ranks] == [received.pending(one) for one in ranks]


def test_what_is_abandoned_counts_no_more_and_what_is_newer_does() -> None:
    made = tracker()
    made.sealed(R0, version(0, 5))
    made.sealed(R1, version(0, 6))
    made.abandon(version(0, 5))
    assert (made.pending(R0), made.pending(R1)) == (None, version(0, 6))
