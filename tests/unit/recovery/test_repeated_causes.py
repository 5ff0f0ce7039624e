"""Repeated causes: of a node, of a rank, and of the program."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.events import ExitKind, WorkerExit
from ftrun.ids import Rank
from ftrun.recovery.repeated_causes import (
    KEPT_S,
    MAX_CAUSES,
    MAX_EXCLUDED_PER_HOUR,
    Placement,
    RepeatedCauses,
    Repetition,
)

PLACED = Placement(node_of={0: "a", 1: "b"}, can_replace=True, is_protected=True)
ALONE = replace(PLACED, can_replace=False)
MOVED = replace(PLACED, node_of={0: "a", 1: "c"})


def crash(rank: int = 1, kind: ExitKind = ExitKind.EXCEPTION, code: int = 1) -> WorkerExit:
    return WorkerExit(Rank(rank), kind, code, f"rank {rank} raised", fingerprint="exception")


def note(
    made: RepeatedCauses, cause: WorkerExit, placement: Placement = PLACED, now_s: float = 0.0
) -> Repetition:
    return made.note(cause.fingerprint, cause, placement, now_s=now_s)


def other(rank: int, fingerprint: str = "other") -> WorkerExit:
    return replace(crash(rank), fingerprint=fingerprint)


def test_a_cause_that_repeats_on_one_node_excludes_it() -> None:
    made = RepeatedCauses(3)
    assert note(made, crash()).exclude == ""
    assert note(made, crash()).exclude == "b"
    assert note(made, crash(0), MOVED) == Repetition(1)
    assert note(made, crash(0), MOVED).exclude == "a", "another rank"


def test_a_cause_that_follows_its_rank_is_named_with_both_nodes() -> None:
    made = RepeatedCauses(3)
    note(made, crash())
    note(made, crash())
    found = note(made, crash(), MOVED)
    assert found.follows == "rank 1 has failed by it on node b, and on c too"
    assert found.exclude == ""


def test_with_a_higher_limit_the_rank_is_tried_more_often() -> None:
    made = RepeatedCauses(5)
    note(made, crash())
    note(made, crash())
    assert [bool(note(made, crash(), MOVED).follows) for _ in range(3)] == [False, False, True]


def test_a_cause_on_several_nodes_excludes_none() -> None:
    made = RepeatedCauses(3)
    for rank in (0, 1, 0, 1):
        assert note(made, crash(rank)).exclude == ""
    assert [one.count for one in made.counts(now_s=0.0)] == [4]


def test_progress_begins_new_counts() -> None:
    made = RepeatedCauses(3)
    note(made, crash())
    made.forget()
    assert made.newest == ""
    assert note(made, crash()) == Repetition(1)
    assert note(made, crash()).exclude == "b"
    made.forget()
    assert note(made, crash(), MOVED) == Repetition(1)


def test_causes_that_alternate_on_one_node_exclude_it() -> None:
    made = RepeatedCauses(3)
    on_one_node = replace(PLACED, node_of={1: "b", 3: "b"})
    assert note(made, crash(1), on_one_node) == Repetition(1)
    assert note(made, other(3), on_one_node) == Repetition(1)
    assert note(made, crash(1), on_one_node).exclude == "b"
    elsewhere = replace(PLACED, node_of={1: "c", 3: "c"})
    assert note(made, other(3), elsewhere) == Repetition(2), "it has failed on two nodes"
    assert note(made, crash(1), elsewhere).follows


def test_causes_that_alternate_reach_the_limit_of_each() -> None:
    made = RepeatedCauses(3)
    alone = replace(PLACED, can_replace=False)
    found = [note(made, one, alone).count for one in 3 * [crash(), other(0), other(0, "third")]]
    assert found == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_failure_that_is_not_counted_changes_no_count() -> None:
    made = RepeatedCauses(3)
    note(made, crash(0))
    for cause in ("fault", "exception"):
        made.note_uncounted(cause, now_s=0.0)
    assert made.newest == "exception"
    assert note(made, crash(0)).exclude == "a"


def test_the_cause_that_occurred_longest_ago_is_dropped() -> None:
    made = RepeatedCauses(99)
    for number in range(MAX_CAUSES):
        note(made, other(0, f"{number}"))
    assert note(made, other(1, "0")).count == 2
    note(made, other(0, "new"))
    assert [one.cause for one in made.counts(now_s=0.0)] == [
        *map(str, range(2, MAX_CAUSES)),
        "0",
        "new",
    ]
    assert note(made, other(0, "1")) == Repetition(1)
    assert len(made.counts(now_s=0.0)) == MAX_CAUSES


@pytest.mark.parametrize(
    ("cause", "placement"),
    [
        (crash(kind=ExitKind.SIGNAL, code=-9), PLACED),
        (crash(kind=ExitKind.HUNG), PLACED),
        (crash(kind=ExitKind.RESTORE_FAILED), PLACED),
        (crash(), replace(PLACED, can_replace=False)),
        (crash(), replace(PLACED, is_protected=False)),
        (crash(), replace(PLACED, num_excluded=MAX_EXCLUDED_PER_HOUR)),
        (crash(), replace(PLACED, node_of={})),
    ],
    ids=["killed", "hung", "restore", "no other node", "not protected", "too many", "not placed"],
)
def test_then_no_node_is_excluded(cause: WorkerExit, placement: Placement) -> None:
    made = RepeatedCauses(99)
    assert [note(made, cause, placement) for _ in range(3)] == [*map(Repetition, (1, 2, 3))]


def test_a_cause_that_did_not_occur_for_a_day_is_forgotten() -> None:
    made, later = RepeatedCauses(9), RepeatedCauses(9)
    note(made, crash(), ALONE)
    note(made, other(0), ALONE, now_s=KEPT_S)
    assert note(made, crash(), ALONE, now_s=KEPT_S).count == 2
    later.succeed(made.counts(now_s=KEPT_S + 100), now_s=100.0)
    assert note(later, crash(), ALONE, now_s=KEPT_S).count == 3
    assert note(later, crash(), ALONE, now_s=2 * KEPT_S + 1).count == 1
    assert [one.cause for one in later.counts(now_s=2 * KEPT_S + 1)] == [crash().fingerprint]


def test_the_next_leader_continues_the_counts() -> None:
    made, later = RepeatedCauses(3), RepeatedCauses(3)
    note(made, crash())
    note(made, other(0))
    later.succeed(made.counts(now_s=50.0), now_s=7.0)
    assert later.newest == "other"
    assert note(later, crash()).exclude == "b"
    made.succeed(later.counts(now_s=7.0), now_s=7.0)
    assert note(made, crash(), MOVED).follows


@pytest.mark.parametrize(
    ("faults", "text", "found"),
    [
        ({}, "rank 1 raised", ("", "")),
        ({"b": "XID 79"}, "rank 0 lost its peer", ("b", "XID 79")),
        ({"z": "XID 79"}, "rank 1 raised", ("", "")),
        ({}, "rank 1 raised: the GPU is lost", ("b", "rank 1 raised: the GPU is lost")),
        ({"a": "XID 48"}, "rank 1 raised: the GPU is lost", ("a", "XID 48")),
    ],
    ids=["none", "of another rank", "not a member", "text", "reported before text"],
)
def test_the_fault_behind_a_failure(
    faults: dict[str, str], text: str, found: tuple[str, str]
) -> None:
    placed = replace(PLACED, faults=faults)
    assert placed.fault_behind(replace(crash(), text=text)) == found
    assert replace(placed, node_of={}).fault_behind(replace(crash(), text=text)) == ("", "")


@given(
    failures=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.sampled_from("xy"), st.booleans()),
        max_size=30,
    )
)
def test_no_sequence_excludes_two_nodes_for_one_rank_and_cause_without_progress(
    failures: list[tuple[int, str, str, bool]],
) -> None:
    made, excluded = RepeatedCauses(3), dict[tuple[int, str], set[str]]()
    for rank, node_id, key, advanced in failures:
        if advanced:
            made.forget()
            excluded.clear()
        placed = replace(PLACED, node_of={rank: node_id})
        found = note(made, replace(crash(rank), fingerprint=key), placed)
        if found.exclude:
            excluded.setdefault((rank, key), set()).add(found.exclude)
        assert all(len(nodes) <= 1 for nodes in excluded.values())


def test_the_end_of_an_agent_shows_nothing_about_a_device() -> None:
    placed = replace(PLACED, faults={"b": "XID 79"})
    lost = replace(crash(kind=ExitKind.NODE_LOST), text="node b is lost: the GPU is lost")
    assert placed.fault_behind(lost) == ("", "")
    assert placed.fault_behind(crash()) == ("b", "XID 79")
