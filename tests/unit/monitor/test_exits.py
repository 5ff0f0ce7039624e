"""explain: each way a worker can end has its own words and its own fingerprint."""

from dataclasses import replace

import pytest

from ftrun.events import ExitKind
from ftrun.ids import Rank
from ftrun.monitor.worker_exits import (
    ExitFacts,
    end_in_words,
    explain,
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
        (replace(FACTS, status=-11), ExitKind.SIGNAL, "killed by SIGSEGV"),
        (replace(FACTS, status=-9), ExitKind.SIGNAL, "by whom is not known"),
        (replace(FACTS, status=-9, oom_kills=0), ExitKind.SIGNAL, "has not run out of memory"),
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
    assert end_in_words(-9) == "was killed by SIGKILL"
    assert end_in_words(3) == "exited with code 3"


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
