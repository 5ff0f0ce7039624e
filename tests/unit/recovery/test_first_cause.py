"""Which failure the others followed from, also where it has not been reported as one."""

from dataclasses import replace

import pytest
from unit.monitor.ranks import view
from unit.monitor.test_hangs import group, waiting

from ftrun.events import ExitKind, WorkerExit
from ftrun.ids import Rank
from ftrun.monitor.verdicts import VerdictKind
from ftrun.monitor.worker_exits import first_cause, hidden_cause, may_be_a_consequence

BROKEN = "raised RuntimeError: [gloo/transport/tcp/pair.cc:5] Read error: Connection reset by peer"
NODES = {0: "a", 1: "a", 2: "b", 3: "b"}


def end(rank: int, kind: ExitKind, text: str = "x", code: int = 1, at_ns: int = 0) -> WorkerExit:
    return WorkerExit(Rank(rank), kind, code, f"rank {rank} {text}", failed_at_ns=at_ns)


def broken(rank: int) -> WorkerExit:
    return end(rank, ExitKind.EXCEPTION, BROKEN)


def finished(rank: int) -> WorkerExit:
    return end(rank, ExitKind.FINISHED, "has finished", 0)


def test_a_kill_comes_before_an_exception_and_a_lost_node_before_both() -> None:
    killed, lost = end(1, ExitKind.SIGNAL, code=-9), end(2, ExitKind.NODE_LOST)
    assert first_cause([broken(0), killed]) == killed
    assert first_cause([killed, lost]) == lost


def test_among_exceptions_the_earliest() -> None:
    late, early = end(0, ExitKind.EXCEPTION, at_ns=9), end(1, ExitKind.EXCEPTION, at_ns=3)
    assert first_cause([late, end(2, ExitKind.EXCEPTION), early]) == early


@pytest.mark.parametrize(
    ("one", "is_so"),
    [
        (broken(0), True),
        (end(0, ExitKind.SIGNAL, code=-6), True),
        (end(0, ExitKind.SIGNAL, code=-9), False),
        (end(0, ExitKind.EXCEPTION, "raised ValueError: mine"), False),
        (end(0, ExitKind.EXIT_CODE), False),
    ],
)
def test_what_may_be_a_consequence(one: WorkerExit, is_so: bool) -> None:
    assert may_be_a_consequence(one) is is_so


def test_a_rank_that_ends_while_others_need_it_is_to_blame() -> None:
    found = hidden_cause([finished(2), broken(1), broken(3)], {}, NODES)
    assert found is not None
    cause, verdict = found
    assert (cause.rank, cause.kind, cause.code) == (2, ExitKind.LEFT_EARLY, 1)
    assert cause.text == (
        "rank 2 on b has ended with exit code 0 while ranks 1 and 3 still needed it"
    )
    assert verdict is None
    assert first_cause([broken(1), cause, broken(3)]) == cause


def test_the_traceback_of_a_victim_stands_under_its_own_name() -> None:
    victim = replace(broken(1), detail="  File train.py, line 3\nRuntimeError: reset")
    found = hidden_cause([finished(2), victim], {}, NODES)
    assert found is not None
    head, _, trace = found[0].detail.partition("\n")
    assert head == "rank 1 failed because of it:"
    assert trace == victim.detail


def test_without_a_place_for_it_the_rank_alone_is_named() -> None:
    found = hidden_cause([finished(2), broken(1)], {}, {})
    assert found is not None
    assert found[0].text.startswith("rank 2 has ended")


def test_a_rank_that_calls_something_else_is_to_blame_for_an_abort() -> None:
    """Gloo aborts one of those that received another amount than they expected."""
    views = {rank: waiting(rank) for rank in (0, 3)}
    views[2] = view(2, groups=(group(2, entered=5, waits=True, sizes="[99]"),))
    views[1] = view(1, process="")
    aborted = end(1, ExitKind.SIGNAL, "was killed by SIGABRT", -6)
    found = hidden_cause([aborted, broken(3)], views, NODES)
    assert found is not None
    cause, verdict = found
    assert (cause.rank, cause.kind) == (2, ExitKind.SKIPPED)
    assert verdict is not None
    assert verdict.kind is VerdictKind.SKIPPED_COLLECTIVE
    assert first_cause([aborted, cause]) == cause


@pytest.mark.parametrize(
    "ended",
    [
        [],
        [finished(0)],
        [end(0, ExitKind.SIGNAL, code=-9), finished(1)],
        [broken(0), broken(1)],
        [end(0, ExitKind.SIGNAL, code=-6), finished(1)],
    ],
)
def test_where_nothing_is_hidden(ended: list[WorkerExit]) -> None:
    assert hidden_cause(ended, {}, NODES) is None
