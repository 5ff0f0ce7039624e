"""What a rehearsal needs of memory, and the priority that it has until it is a rank."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ftrun.agent.launch import rehearsals
from ftrun.agent.launch.process import spawn
from ftrun.agent.launch.warm_start import LaunchSlot, WorkerHandle
from ftrun.config.profile import Profile, RestartConfig
from ftrun.config.run_spec import RunSpec
from ftrun.ids import version
from ftrun.linux import AvailableMemory
from ftrun.wire.messages.worker import LaunchRequest, Parked
from ftrun.wire.shared_memory.pages import SharedPage, create_page, create_stack_file

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


def parked_process(first_step: int, last_step: int) -> WorkerHandle:
    """A process in place of a rehearsed standby of rank 0."""
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    child = spawn(words, name="rank", variables=os.environ, new_session=True)
    descriptors = {"heartbeat": create_page("rank-0"), "stack": create_stack_file("0")}
    request = LaunchRequest(4, 0, 1, os.getpid(), "", descriptors=descriptors)
    slot = LaunchSlot(request, SharedPage(descriptors["heartbeat"]))
    parked = Parked(4, first_step, last_step)
    return WorkerHandle(0, child, slot, "rehearsed", parked=parked)


@pytest.mark.parametrize(("step", "is_used", "lives"), [
    (6, False, True), (7, True, True), (30, True, True), (31, False, False),
])  # fmt: skip
def test_a_standby_is_used_only_for_a_version_of_its_loop(
    step: int, is_used: bool, lives: bool
) -> None:
    profile = Profile(restart=RestartConfig(survivors="on", rehearse="all"))
    spec = RunSpec(
        run_id="r", script="s", torchrun_argv=[], log_folder=".", cwd=".", profile=profile
    )
    run = SimpleNamespace(spec=spec, workers=SimpleNamespace(slots=[]))
    made = rehearsals.Rehearsals(cast("Any", run))
    handle = parked_process(7, 30)
    made._parked[0] = handle
    request = LaunchRequest(5, -1, 1, os.getpid(), "", joins=True, restore=version(4, step))
    try:
        assert made.begin_generation(request, range(1), ()) == ({0: handle} if is_used else {})
        assert bool(made.handles) == (lives and not is_used)
        assert handle.child.wait(0.2 if lives else 60) != lives
    finally:
        handle.child.signal(9)
        handle.child.wait(60)
