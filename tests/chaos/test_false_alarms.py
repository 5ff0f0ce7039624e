"""A long operation is never diagnosed as a hang: no restart, whatever the failure timeout is.

Timeouts are a fifth of the usual ones, so that the operations are shorter here.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.conftest import Run
from tests.integration.conftest import Start
from tests.stopping import stop

SCRIPT = Path(__file__).parents[1] / "integration" / "scripts" / "patient_training.py"
LONG_S = 5.0
FLAGS = (
    "--nproc-per-node", "2", "--set", "hang.suspect_after_s=2", "--set", "hang.no_activity_s=0.6",
    "--set", "hang.kill_after_s=24", "--set", "snapshot.every=4",
)  # fmt: skip

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.launch]


def begin(start: Start, what: str, seconds: float = LONG_S) -> Run:
    return start(*FLAGS, str(SCRIPT), what, str(seconds))


def check_undisturbed(run: Run) -> None:
    assert run.wait() == 0, run.text
    assert len(run.journal("generation_started")) == 1, run.text
    assert not [line for line in run.journal("action_taken") if line["action"] != "report"]
    assert run.text.count("generation=0") == 2


ALWAYS = ("eval-here",)
"""The others run with scripts/test --full."""

ONLY_IN_FULL = (
    "checkpoint", "slow-data", "slow-start", "first-step", "eval-everywhere", "eval-said",
    "long-batch", "busy-thread", "download", "other-process", "uneven", "unattached", "compile",
)  # fmt: skip


@pytest.mark.parametrize(
    "what", [*ALWAYS, *(pytest.param(what, marks=pytest.mark.full) for what in ONLY_IN_FULL)]
)
def test_what_takes_long_is_left_alone(start: Start, what: str) -> None:
    check_undisturbed(begin(start, what))


@pytest.mark.full  # test_member.py pauses agents, too
def test_a_machine_that_was_paused(start: Start) -> None:
    """A laptop that was suspended: all processes stop, and all continue."""
    run = begin(start, "stands-still")
    run.wait_for_step(3)
    pids = [*run.pids(), run.pid_of("agent"), run.pid_of("smp"), run.pid_of("zygote")]
    for pid in pids:
        stop(pid)
    run.wait_until("away for long enough", _after(LONG_S))
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)
    check_undisturbed(run)


@pytest.mark.full
def test_processors_that_others_use(start: Start) -> None:
    run = begin(start, "starved")
    run.wait_for_step(3)
    pids = [*run.pids(), run.pid_of("agent"), run.pid_of("smp")]
    for pid in pids:
        os.setpriority(os.PRIO_PROCESS, pid, 19)
    count = 3 * (os.cpu_count() or 1)
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        check_undisturbed(run)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def _after(seconds: float) -> Callable[[], bool]:
    end_s = time.monotonic() + seconds
    return lambda: time.monotonic() >= end_s
