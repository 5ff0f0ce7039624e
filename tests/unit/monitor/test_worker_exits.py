"""explain: each way in which a worker can end has its own text and its own fingerprint.

The first cause of several failures is found, also if it was not reported as a failure.
"""

from dataclasses import replace

import pytest
from unit.monitor.ranks import view
from unit.monitor.test_hang_detector import group, waiting

from ftrun.events import ExitKind, WorkerExit
from ftrun.ids import Rank
from ftrun.monitor.verdicts import RankView, Verdict, VerdictKind
from ftrun.monitor.worker_exits import (
    ExitFacts,
    exit_text,
    explain,
    first_cause,
    hidden_cause,
    may_be_a_consequence,
    place,
    signal_name,
    users_place,
)

TRACE = (
    'Traceback:\n  File "train.py", line 3, in <module>\n  File "model.py", line 9, in forward\n'
)
FACTS = ExitFacts(rank=Rank(1), pid=42, status=0)


@pytest.mark.parametrize(
    ("facts", "kind", "words"),
    [
        (FACTS, ExitKind.FINISHED, "has finished"),
        (replace(FACTS, status=3), ExitKind.EXIT_CODE, "exited with code 3"),
        (replace(FACTS, status=120), ExitKind.EXIT_CODE, "could not write the rest of its output"),
        (
            replace(FACTS, status=120, full_disk="/logs"),
            ExitKind.EXIT_CODE,
            "disk of /logs is full",
        ),
        (
            replace(FACTS, status=1, message="ValueError: bad\nmore", traceback=TRACE),
            ExitKind.EXCEPTION,
            "raised ValueError: bad",
        ),
        (
            replace(FACTS, status=1, message="SetUpDifference: x", traceback=TRACE),
            ExitKind.EXCEPTION,
            "raised SetUpDifference",
        ),
        *(
            (replace(FACTS, status=1, message=f"{name}: x"), ExitKind.JOIN_REFUSED, f"{name}: x")
            for name in ("JoinRefused", "SetUpDiffers")
        ),
        (replace(FACTS, status=-11), ExitKind.SIGNAL, "killed by SIGSEGV"),
        (replace(FACTS, status=-9), ExitKind.SIGNAL, "sender unknown"),
        (replace(FACTS, status=-9, oom_kills=0), ExitKind.SIGNAL, "not out of memory"),
        (replace(FACTS, status=-9, oom_kills=1), ExitKind.OUT_OF_MEMORY, "out of memory"),
        (replace(FACTS, status=-9, stopped_s=6.0), ExitKind.STOPPED, "stopped (SIGSTOP) for 6 s"),
        (replace(FACTS, status=1, corrupt="digest"), ExitKind.CORRUPT_SNAPSHOT, "digest"),
    ],
)
def test_end_is_explained(facts: ExitFacts, kind: ExitKind, words: str) -> None:
    found = explain(facts)
    assert found.kind is kind
    assert words in found.text
    assert "rank 1 (pid 42)" in found.text


def test_same_exception_at_another_place_is_another_failure() -> None:
    here = replace(FACTS, status=1, message="ValueError: bad", traceback=TRACE)
    there = replace(here, traceback=TRACE.replace("line 9", "line 10"))
    assert explain(here).fingerprint != explain(there).fingerprint


def test_same_exception_with_other_numbers_is_the_same_failure() -> None:
    one = replace(FACTS, status=1, message="ValueError: batch 3", traceback=TRACE)
    other = replace(one, rank=Rank(0), message="ValueError: batch 4")
    assert explain(one).fingerprint == explain(other).fingerprint


def test_place_is_the_innermost_frame() -> None:
    assert place(TRACE) == 'File "model.py", line 9, in forward'
    assert place("") == ""


def test_unknown_signal_keeps_its_number() -> None:
    assert signal_name(99) == "signal 99"


def test_own_process_ends_in_words() -> None:
    assert exit_text(-9) == "was killed by SIGKILL"
    assert exit_text(3) == "exited with code 3"


def test_a_crash_in_c_code_names_the_users_line() -> None:
    trace = (
        '  File "/home/me/train.py", line 42, in step\n'
        '  File "/v/site-packages/torch/x.py", line 7, in run'
    )
    found = explain(ExitFacts(rank=Rank(1), pid=7, status=-11, traceback=trace))
    assert found.text == "rank 1 (pid 7) was killed by SIGSEGV at train.py:42 in step"
    assert users_place("nothing") == ""
    alone = explain(ExitFacts(rank=Rank(1), pid=7, status=-11))
    assert alone.text == "rank 1 (pid 7) was killed by SIGSEGV"


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


def cause_of(
    ended: list[WorkerExit], views: dict[int, RankView], nodes: dict[int, str]
) -> tuple[WorkerExit, Verdict | None]:
    found = hidden_cause(ended, views, nodes)
    assert found is not None
    return found


def test_a_rank_that_ends_while_others_need_it_is_to_blame() -> None:
    cause, verdict = cause_of([finished(2), broken(1), broken(3)], {}, NODES)
    assert (cause.rank, cause.kind, cause.code) == (2, ExitKind.LEFT_EARLY, 1)
    assert cause.text == (
        "rank 2 on b exited early (code 0) while ranks 1 and 3 were still in a collective"
    )
    assert verdict is None
    assert first_cause([broken(1), cause, broken(3)]) == cause


def test_the_traceback_of_a_victim_is_under_its_own_name() -> None:
    victim = replace(broken(1), detail="  File train.py, line 3\nRuntimeError: reset")
    cause, _ = cause_of([finished(2), victim], {}, NODES)
    head, _, trace = cause.detail.partition("\n")
    assert head == "rank 1 failed because of it:"
    assert trace == victim.detail


def test_without_a_place_for_it_the_rank_alone_is_named() -> None:
    cause, _ = cause_of([finished(2), broken(1)], {}, {})
    assert cause.text.startswith("rank 2 exited early")


def test_a_rank_that_calls_something_else_is_to_blame_for_an_abort() -> None:
    """Gloo aborts a rank that received another amount than it expected."""
    views = {rank: waiting(rank) for rank in (0, 3)}
    views[2] = view(2, groups=(group(2, entered=5, waits=True, sizes="[99]"),))
    views[1] = view(1, process="")
    aborted = end(1, ExitKind.SIGNAL, "was killed by SIGABRT", -6)
    cause, verdict = cause_of([aborted, broken(3)], views, NODES)
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


def test_the_last_collective_of_a_stopped_rank_is_its_detail() -> None:
    stopped = replace(FACTS, status=-9, stopped_s=6.0, last_call="its last collective is x")
    assert explain(stopped).detail == "its last collective is x"
    assert explain(stopped).fingerprint == explain(replace(stopped, last_call="")).fingerprint
