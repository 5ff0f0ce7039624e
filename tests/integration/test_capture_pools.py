"""With memory for less than two slots, checkpoints are captured through pools."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Run, Start, script, start

__all__ = ["script", "start"]

Write = Callable[..., str]
WIDTH = 512
STATE_MB = 4 * 3 * 4 * WIDTH * WIDTH / 1e6
"""Of one rank: four layers with two moments each."""

TRAIN = f"""
import hashlib, os, sys, time
import torch
import torch.distributed as dist
from torch import nn

import ftrun

steps, pace_s = int(sys.argv[1]), float(sys.argv[2])
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
layers = [nn.Linear({WIDTH}, {WIDTH}) for _ in range(4)]
model = nn.Sequential(*layers, nn.BatchNorm1d({WIDTH}))
model.register_parameter("turned", nn.Parameter(torch.ones(300, 700).t()))
torch.manual_seed(dist.get_rank())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
history = {{"losses": []}}
session = ftrun.attach(model=model, optimizer=optimizer, history=history)
for step in session.steps(steps):
    optimizer.zero_grad()
    loss = model(torch.randn(4, {WIDTH})).square().mean() + model.turned.square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    history["losses"].append(loss.item())
    time.sleep(pace_s)
found = hashlib.sha256(repr(history).encode())
for tensor in model.state_dict().values():
    found.update(tensor.contiguous().numpy().tobytes())
for state in optimizer.state.values():
    for key in ("exp_avg", "exp_avg_sq", "step"):
        found.update(state[key].contiguous().numpy().tobytes())
open(f"{{os.environ['OUT']}}-{{dist.get_rank()}}", "w").write(found.hexdigest())
dist.destroy_process_group()
"""
KEPT = ("--checkpoint-dir", "saved", "--checkpoint-every", "5step")


def limit(part: float, num_ranks: int = 2) -> tuple[str, str]:
    """A limit of the node to this part of the state of each rank."""
    return ("--set", f"snapshot.max_memory_gb={num_ranks * part * STATE_MB / 1e3:.6f}")


def checkpoints(run: Run) -> list[int]:
    return [line["step"] for line in run.journal("checkpoint_written")]  # type: ignore[misc]


def snapshots(run: Run) -> dict[str, Any]:
    found = run.status().get("snapshots")
    return found if isinstance(found, dict) else {}


def digests(folder: Path, name: str, num_ranks: int = 2) -> list[str]:
    return [(folder / f"{name}-{rank}").read_text() for rank in range(num_ranks)]


def phases(run: Run) -> list[str]:
    return [rank["phase"] for rank in run.status().get("ranks") or []]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_kills_of_a_rank_and_of_the_smp_change_no_bit(
    start: Start, script: Write, tmp_path: Path
) -> None:
    """Pools of a quarter of the state, and a storage that takes longer than a step."""
    train = script(TRAIN)
    plain = start("--nproc-per-node", "2", train, "40", "0", env={"OUT": "plain"})
    assert plain.wait() == 0, plain.text
    slow = ("--set", "checkpoint.max_bytes_per_s=15000000")
    words = ("--nproc-per-node", "2", *KEPT, *limit(0.25), *slow, train, "40", "0.05")
    run = start(*words, env={"OUT": "pooled"})
    run.wait_until("a checkpoint", lambda: checkpoints(run))
    status = snapshots(run)
    assert "only checkpoints, through a pool of" in status["unprotected_reason"]
    waited = re.search(r"the training waited ([0-9.]+) s", status["unprotected_reason"])
    assert waited is not None, status
    assert float(waited[1]) > 0.5
    assert status["memory_bytes"] == 0

    run.wait_until("a capture", lambda: any("the storage" in one for one in phases(run)))
    before = checkpoints(run)[-1]
    os.kill(run.pids()[1], signal.SIGKILL)
    run.wait_for_step(before + 1, generation=1)
    restored = run.journal("restore_point_chosen")[-1]["version"]
    assert restored["step"] == before  # type: ignore[index]

    run.wait_until("a capture", lambda: any("the storage" in one for one in phases(run)))
    os.kill(run.pid_of("smp"), signal.SIGKILL)
    step = max(rank["step"] or 0 for rank in run.status()["ranks"])  # type: ignore[attr-defined]
    run.wait_until("a later checkpoint", lambda: checkpoints(run)[-1] > step)
    assert run.wait() == 0, run.text
    assert len(run.journal("generation_started")) == 2
    assert digests(tmp_path, "pooled") == digests(tmp_path, "plain")
