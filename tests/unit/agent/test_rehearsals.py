"""What a rehearsal needs of memory, and the priority that it has until it is a rank."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftrun.agent.launch import rehearsals
from ftrun.linux import AvailableMemory

MB = 1 << 20


def test_a_rehearsal_that_does_not_fit_says_what_is_missing() -> None:
    free = AvailableMemory(300 * MB, "memory.max of /job")
    assert rehearsals.memory_problem(200 * MB, 100 * MB, free) == ""
    text = "a rehearsal needs 200 MB and snapshots 101 MB more, and 300 MB are free"
    assert rehearsals.memory_problem(200 * MB, 101 * MB, free) == f"{text} (memory.max of /job)"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process with two threads."""
    code = "import threading, time; threading.Timer(60, int).start(); print(); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        yield started
        started.kill()


def test_the_priority_of_each_thread_is_lowered_and_taken_back(
    process: subprocess.Popen[bytes],
) -> None:
    threads = [int(one) for one in os.listdir(f"/proc/{process.pid}/task")]
    assert len(threads) == 2
    before = os.getpriority(os.PRIO_PROCESS, 0)
    rehearsals._set_priority(process.pid, min(19, before + 3))
    assert {os.getpriority(os.PRIO_PROCESS, one) for one in threads} == {min(19, before + 3)}
    if rehearsals._can_take_back_priority():
        rehearsals._set_priority(process.pid, before)
        assert {os.getpriority(os.PRIO_PROCESS, one) for one in threads} == {before}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before, "the attempt leaves this process alone"


def test_the_memory_and_the_score_of_a_process(process: subprocess.Popen[bytes]) -> None:
    assert rehearsals.resident_bytes(process.pid) > MB
    rehearsals._set_oom_score(process.pid, 900)
    assert Path(f"/proc/{process.pid}/oom_score_adj").read_text() == "900\n"
    process.kill()
    process.wait()
    assert rehearsals.resident_bytes(process.pid) == 0
    rehearsals._set_oom_score(process.pid, 500)  # it has ended
    rehearsals._set_priority(process.pid, 5)
