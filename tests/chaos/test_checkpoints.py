"""What the SMP has written is what the next run goes on from."""

import os
import signal

import pytest

from tests.chaos.conftest import STEPS, Checked
from tests.integration.conftest import Run, Start

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

KEPT = ("--checkpoint-dir", "saved")


def first_step(run: Run) -> int:
    """The step at which its newest life began."""
    begun = [line for line in run.text.splitlines() if line.startswith("begin rank=0")]
    return int(begun[-1].rpartition("=")[2])


def test_sigterm_saves_the_last_step_and_the_next_run_goes_on(
    start: Start, train: tuple[str, ...], undisturbed: Checked
) -> None:
    run = start(*KEPT, *train)
    run.wait_for_step(30)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.text
    stopped_at = run.journal("CheckpointWritten")[-1]["step"]
    assert (run.folder / "saved" / "latest").is_symlink()
    again = start(*KEPT, *train)
    assert again.wait() == 0, again.text
    assert first_step(again) == stopped_at
    undisturbed.check(again)


def test_sigkill_of_everything_loses_what_came_after_the_last_checkpoint(
    start: Start, train: tuple[str, ...], undisturbed: Checked
) -> None:
    run = start(*KEPT, "--checkpoint-every", "0.2", *train)
    run.wait_until("two checkpoints", lambda: len(run.journal("CheckpointWritten")) >= 2)
    for pid in (run.process.pid, run.pid_of("agent"), run.pid_of("smp")):
        os.kill(pid, signal.SIGKILL)
    run.process.wait(20)
    saved_at = int((run.folder / "saved" / "latest").readlink().name.split("-")[1])
    again = start(*KEPT, *train)
    assert again.wait() == 0, again.text
    assert first_step(again) == saved_at
    undisturbed.check(again)


def test_rank_killed_right_after_a_resume_falls_back_to_it(
    start: Start, train: tuple[str, ...], undisturbed: Checked
) -> None:
    run = start(*KEPT, *train)
    run.wait_for_step(20)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    at = int(run.journal("CheckpointWritten")[-1]["step"])  # type: ignore[call-overload]
    once = {"FTRUN_CRASH_AT": "worker.capture.marked", "FTRUN_CRASH_ONCE": str(run.folder / "once")}
    again = start(*KEPT, *train, env=once)
    assert again.wait() == 0, again.text
    assert (run.folder / "once").exists()
    assert len(again.journal("StartGeneration")) == 2
    assert first_step(again) == at
    undisturbed.check(again)


def test_finished_run_is_saved_and_not_repeated(start: Start, train: tuple[str, ...]) -> None:
    run = start(*KEPT, *train[:-1], "0")
    assert run.wait() == 0, run.text
    again = start(*KEPT, *train[:-1], "0")
    assert again.wait() == 0, again.text
    assert first_step(again) == STEPS


def test_other_world_size_is_refused_with_both_numbers(
    start: Start, train: tuple[str, ...]
) -> None:
    run = start(*KEPT, *train[:-1], "0")
    assert run.wait() == 0, run.text
    other = start(*KEPT, "--nproc-per-node", "1", *train[2:-1], "0")
    assert other.wait() == 77
    assert "2" in other.text
    assert "1" in other.text
