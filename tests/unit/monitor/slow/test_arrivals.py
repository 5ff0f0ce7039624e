"""Ranks that are late by their own delay; missing data makes no rank late."""

from collections.abc import Mapping

import pytest

from ftrun.monitor.slow import arrivals
from ftrun.monitor.slow.arrivals import ArrivalTracker, JoinedCollective, against_the_others

GROUPS = {"all": (0, 1, 2, 3), "t0": (0, 1), "t1": (2, 3), "one": (0,)}
NODES = ("a", "b", "c", "d")

Entries = Mapping[int, list[tuple[str, int, float]]]


def meetings(
    entries: Entries, nodes: tuple[str, ...] = NODES, found: ArrivalTracker | None = None
) -> list[JoinedCollective]:
    """All collectives that can be judged, after every rank was observed a second later."""
    found = found or ArrivalTracker()
    for rank, entered in entries.items():
        end_s = max(at_s for reported in entries.values() for _, _, at_s in reported) + 1.0
        found.add(rank, nodes[rank], entered, GROUPS, seen_s=end_s)
    return found.take()


def late(meeting: JoinedCollective) -> dict[int, float]:
    return {rank: round(value, 6) for rank, value in sorted(meeting.late_s.items())}


def everyone(seq: int, *times: float) -> Entries:
    return {rank: [("all", seq, at_s)] for rank, at_s in enumerate(times)}


def inner(t0: tuple[float, float], t1: tuple[float, float]) -> Entries:
    """One collective in each of two groups: of ranks 0 and 1, and of ranks 2 and 3."""
    return {
        rank: [(group, 1, at_s)]
        for group, times in (("t0", t0), ("t1", t1))
        for rank, at_s in zip(GROUPS[group], times, strict=True)
    }


START = everyone(1, 0.0, 0.0, 0.0, 0.0)


def joined(*parts: Entries) -> Entries:
    ranks = sorted({rank for part in parts for rank in part})
    return {rank: [one for part in parts for one in part.get(rank, [])] for rank in ranks}


def test_the_late_one_is_late_against_the_median_of_the_others() -> None:
    (meeting,) = meetings(everyone(1, 10.0, 10.1, 10.2, 13.0))
    assert meeting.released_s == 13.0
    assert late(meeting) == {0: -0.2, 1: -0.1, 2: 0.1, 3: 2.9}


def test_a_collective_is_given_once_and_when_all_have_been_checked_after_it() -> None:
    found = ArrivalTracker()
    for rank in range(4):
        found.add(rank, NODES[rank], [("all", 1, 10.0)], GROUPS, seen_s=11.0)
    assert [one.seq for one in found.take()] == [1]
    found.add(3, NODES[3], [("all", 1, 10.0), ("all", 2, 15.0)], GROUPS, seen_s=16.0)
    for rank in range(3):
        assert found.take() == []
        found.add(rank, NODES[rank], [("all", 2, 12.0)], GROUPS, seen_s=14.0 + rank)
    assert found.take() == []  # something may have delayed ranks 0 and 1 until 15.0
    for rank in range(2):
        found.add(rank, NODES[rank], [], GROUPS, seen_s=17.0)
    assert [one.seq for one in found.take()] == [2]


def test_a_victim_in_one_group_is_no_culprit_in_the_next() -> None:
    entered = inner((1.0, 1.0), (1.0, 5.0))  # rank 3 is the culprit: rank 2 waits for it
    found = meetings(joined(START, entered, everyone(2, 2.0, 2.0, 6.0, 6.0)))
    by_key = {(one.group, one.seq): late(one) for one in found}
    assert by_key["t1", 1] == {2: -4.0, 3: 4.0}
    assert by_key["t0", 1] == {0: 0.0, 1: 0.0}
    assert by_key["all", 2] == {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0}


def test_a_wait_for_a_message_is_no_delay_of_the_rank() -> None:
    """Rank 1 enters 4 s after rank 0, and has waited for a message for 3 s of them."""
    found = ArrivalTracker()
    for rank, at_s, waited_s in ((0, 2.0, 0.0), (1, 6.0, 3.0)):
        entered, waits = [("t0", 1, 1.0), ("t0", 2, at_s)], (7.0, 7.0 + waited_s)
        found.add(rank, "a", entered, GROUPS, seen_s=9.0, waited_s=waits)
    assert [late(one) for one in found.take()] == [{0: 0.0, 1: 0.0}, {0: -1.0, 1: 1.0}]


def test_waits_are_forgotten_with_their_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "REMEMBERED", 2)
    found = ArrivalTracker()
    for seq in range(1, 9):
        for rank in (0, 1):
            found.add(rank, "a", [("t0", seq, seq)], GROUPS, seen_s=seq, waited_s=(1.0,))
    assert len(found._ranks[0].waited_s) <= 5


def test_what_two_ranks_of_a_node_have_in_common_is_the_nodes_own() -> None:
    entries = joined(START, inner((1.0, 1.0), (4.0, 4.0)), everyone(2, 2.0, 2.0, 5.0, 5.0))
    found = meetings(entries, nodes=("a", "a", "b", "b"))
    last = found[-1]
    assert (last.group, last.seq) == ("all", 2)
    assert set(late(last).values()) == {0.0}
    assert last.node_late_s[2] == pytest.approx(3.0)
    assert last.node_late_s[0] == pytest.approx(-3.0)


def test_a_slow_collective_makes_no_rank_late() -> None:
    # t1 took three seconds, so both of its ranks continue 3 s later.
    after = everyone(2, 1.5, 1.5, 4.5, 4.5)
    found = meetings(joined(START, inner((1.0, 1.0), (1.0, 1.0)), after))
    assert late(found[-1]) == {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0}


def test_a_node_that_continues_during_a_collective_shows_that_it_overlaps() -> None:
    found = ArrivalTracker()
    entries = joined(
        *(everyone(seq, seq + 0.0, seq + 0.0, seq + 0.0, seq + 1.5) for seq in range(1, 6))
    )
    assert not found.overlaps("all")
    last = meetings(entries, found=found)[-1]
    assert found.overlaps("all")
    assert last.late_s[3] == pytest.approx(1.5)


def test_a_collective_that_ends_later_is_no_excuse() -> None:
    after = everyone(2, 2.0, 2.0, 4.0, 2.0)  # 2 does not wait for t1
    found = meetings(joined(START, inner((1.0, 1.0), (1.0, 9.0)), after))
    whole = next(one for one in found if one.group == "all" and one.seq == 2)
    assert whole.late_s[2] > 1.0


def test_none_is_judged_after_something_unknown() -> None:
    second = everyone(2, 2.0, 2.0, 6.0, 6.0)
    third = everyone(3, 7.0, 7.0, 7.0, 8.0)
    for unknown in ("t1", "of an unknown group"):
        # Rank 3 was never seen in it, or the ranks of the group are unknown.
        entries = joined(START, {2: [(unknown, 1, 1.0)]}, second, third)
        assert [one.seq for one in meetings(entries)] == [1, 3]


def test_the_first_of_some_ranks_only_is_left_out() -> None:
    entered = inner((1.0, 1.0), (3.0, 3.5))
    entries = joined(entered, everyone(1, 2.0, 2.0, 2.5, 2.5), everyone(2, 4.0, 4.0, 4.0, 4.0))
    assert ("all", 1) not in {(one.group, one.seq) for one in meetings(entries)}


def test_groups_of_others_and_of_one_are_left_out() -> None:
    found = ArrivalTracker()
    found.add(2, "c", [("t0", 1, 1.0), ("one", 1, 2.0)], GROUPS, seen_s=3.0)
    assert found.take() == []
    assert ArrivalTracker().take() == []


def test_what_never_becomes_whole_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MAX_OPEN", 3)
    monkeypatch.setattr(arrivals, "REMEMBERED", 4)
    found = ArrivalTracker()
    found.add(0, "a", [("all", seq, float(seq)) for seq in range(1, 30)], GROUPS, seen_s=29.0)
    assert len(found._open) == 3
    assert len(found._ranks[0].entries) <= 8
    for seq in range(30, 40):
        for rank in range(4):
            found.add(rank, NODES[rank], [("all", seq, float(seq))], GROUPS, seen_s=float(seq))
        assert [one.seq for one in found.take()] == [seq]
    assert len(found._done) == 3


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({0: 1.0, 1: 5.0}, {0: -4.0, 1: 4.0}),
        ({0: 1.0, 1: 1.0, 2: 4.0}, {0: -1.5, 1: -1.5, 2: 3.0}),
        ({0: 1.0, 1: 2.0, 2: 3.0, 3: 9.0}, {0: -2.0, 1: -1.0, 2: 1.0, 3: 7.0}),
    ],
)
def test_against_the_others(values: dict[int, float], expected: dict[int, float]) -> None:
    assert against_the_others(values) == expected
