"""Real ranks capture while their checkpoint is written: killed ranks, and memory at the load."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.integration.conftest import Run, Start, script, start

__all__ = ["script", "start"]

pytestmark = [pytest.mark.chaos, pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(900)]

Write = Callable[..., str]
LAYERS, WIDTH = 8, 2048
LAYER_BYTES = 4 * WIDTH * WIDTH
"""Eight layers of 16 MB: a slot of 134 MB on each rank."""

TRAIN = f"""
import hashlib, os, sys, threading, time
import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # part of what a resized restore needs, and not of the state
from torch import nn

import ftrun

steps, pace_s = int(sys.argv[1]), float(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS})))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def own_bytes():
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("RssAnon")).split()[1]) << 10


is_over, most = threading.Event(), [own_bytes()]


def watch():
    while not is_over.wait(0.001):
        most[0] = max(most[0], own_bytes())


before = own_bytes()
watching = threading.Thread(target=watch)
watching.start()
session = ftrun.attach(model=model, optimizer=optimizer)
is_over.set()
watching.join()
print(f"begin {{dist.get_rank()}} {{session.step}} {{most[0] - before}}", flush=True)
x = torch.ones(2, {WIDTH})
for step in session.steps(steps):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(step % 7))
    optimizer.step()
    time.sleep(pace_s)
digest = hashlib.sha256()
for value in model.state_dict().values():
    digest.update(value.numpy().tobytes())
print(f"digest {{dist.get_rank()}} {{digest.hexdigest()}}", flush=True)
"""


def begins(run: Run) -> list[tuple[int, int, int]]:
    """Rank, step and bytes of the start of each generation."""
    found = re.findall(r"begin (\d+) (\d+) (-?\d+)", run.text)
    return [(int(rank), int(step), int(num_bytes)) for rank, step, num_bytes in found]


def digests(run: Run) -> set[str]:
    return set(re.findall(r"digest \d+ ([0-9a-f]{64})", run.text))


def test_what_is_written_while_it_is_captured_is_continued_from(
    start: Start, script: Write
) -> None:
    """A rank is killed during the write, then the whole run; another number of ranks restores it.

    One rank, so that the SMP has a processor while it copies.
    """
    name = script(TRAIN)
    words = ("--checkpoint-dir", "saved", "--checkpoint-every", "0.5")
    confidence = ("--set", "snapshot.every=1000", "--set", "snapshot.verify_first=1")
    one = start("--nproc-per-node", "1", *words, *confidence, name, "400", "0.03")

    def num_ahead() -> int:
        return sum(bool(line["ahead_s"]) for line in one.journal("checkpoint_written"))

    one.wait_until("one was begun before the end of its capture", num_ahead)
    (pid,) = one.journal("generation_started")[-1]["pids"]  # type: ignore[misc]
    os.kill(pid, signal.SIGKILL)
    seen = num_ahead()
    one.wait_until("another one, after the rank was killed", lambda: num_ahead() > seen)
    one.process.send_signal(signal.SIGTERM)
    assert one.wait() == 143, one.text
    saved = one.journal("checkpoint_written")[-1]["step"]
    verify = [sys.executable, "-m", "ftrun", "checkpoints", "verify", "saved"]
    verified = subprocess.run(verify, cwd=one.folder, capture_output=True, text=True, check=False)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    two = start("--nproc-per-node", "2", *words, *confidence, name, "400", "0")
    assert two.wait() == 0, two.text
    assert {step for _, step, _ in begins(two)} == {saved}
    undisturbed = start("--nproc-per-node", "1", *confidence, name, "400", "0")
    assert undisturbed.wait() == 0, undisturbed.text
    assert digests(two) == digests(undisturbed)


@pytest.mark.parametrize("ranks", [2, 1], ids=["same ranks", "fewer ranks"])
def test_a_load_needs_no_more_than_a_layer_next_to_the_state(
    start: Start, script: Write, ranks: int
) -> None:
    name = script(TRAIN)
    words = ("--checkpoint-dir", "saved")
    first = start("--nproc-per-node", "2", *words, name, "3", "0")
    assert first.wait() == 0, first.text
    second = start("--nproc-per-node", str(ranks), *words, name, "4", "0")
    assert second.wait() == 0, second.text
    for _, step, num_bytes in begins(second):
        assert step == 3
        # Of 134 MB; it includes modules that are loaded at this time.
        assert num_bytes < 2 * LAYER_BYTES, f"{num_bytes / LAYER_BYTES:.2f} layers"
