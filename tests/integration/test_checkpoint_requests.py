"""Real runs whose checkpoints request their own snapshots, or persist each step."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Run, Start, script, start

__all__ = ["script", "start"]

Write = Callable[..., str]
WIDTH = 2048
KEPT = ("--checkpoint-dir", "saved")

TRAIN = f"""
import sys, time
import torch
from torch import nn

import ftrun

num_layers, steps, pace_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range(num_layers)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
session = ftrun.attach(model=model, optimizer=optimizer)
for step in session.steps(steps):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(step % 7))
    optimizer.step()
    time.sleep(pace_s)
"""


def status_of_checkpoint(run: Run) -> dict[str, Any]:
    found = run.status().get("checkpoint")
    return found if isinstance(found, dict) else {}


def verify(folder: Path) -> None:
    """Read every byte of all checkpoints."""
    words = [sys.executable, "-m", "ftrun", "checkpoints", "verify", "saved"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_checkpoint_requests_its_snapshot_and_is_written_while_that_is_captured(
    start: Start, script: Write
) -> None:
    """With an interval that the run does not reach. A slot has 134 MB."""
    words = (*KEPT, "--checkpoint-every", "1", "--snapshot-every", "1000")
    run = start(*words, script(TRAIN), "8", "1000", "0.3")

    def written() -> list[dict[str, Any]]:
        return run.journal("checkpoint_written")

    def is_ahead() -> bool:
        return len(written()) >= 2 and any(line["ahead_s"] for line in written())

    run.wait_until("its first byte is on disk before its last is captured", is_ahead)
    taken = run.status()["snapshots"]["taken"]  # type: ignore[index]
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.text
    # Those that were due between the two looks, and no other.
    assert 2 <= taken <= len(written()) + 1
    assert not run.journal("checkpoint_failed")
    verify(run.folder)


def test_each_step_is_persisted_as_far_as_the_storage_allows(start: Start, script: Write) -> None:
    words = (*KEPT, "--checkpoint-every", "1step", "--set", "checkpoint.max_bytes_per_s=50000000")
    run = start(*words, script(TRAIN), "1", "1000", "0.1")
    seen: list[int] = []

    def has_skipped() -> bool:
        now = status_of_checkpoint(run)
        seen.append(now.get("num_writes", 0))
        return bool(now.get("skipped")) and len(run.journal("checkpoint_written")) >= 3

    run.wait_until("versions were written and others skipped", has_skipped)
    assert 1 <= max(seen) <= 2
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.text
    steps = [line["step"] for line in run.journal("checkpoint_written")]
    assert steps == sorted(steps)  # type: ignore[type-var]
    assert not run.journal("checkpoint_failed")
    verify(run.folder)


@pytest.mark.full
def test_each_step_is_persisted_on_a_storage_that_is_fast_enough(
    start: Start, script: Write
) -> None:
    run = start(*KEPT, "--checkpoint-every", "2step", script(TRAIN), "1", "20", "0.5")
    assert run.wait() == 0, run.text
    steps = {line["step"] for line in run.journal("checkpoint_written")}
    assert steps == set(range(2, 21, 2))
    verify(run.folder)
