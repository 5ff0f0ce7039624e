"""A training that can be killed at any moment, and its required result."""

import time
from pathlib import Path

import pytest

from tests.integration.conftest import WAIT_S, Run, Start, script, start

__all__ = ["Checked", "Run", "Start", "script", "start"]

STEPS = 120
HOLD = "hold"
"""While this file exists, the last steps are not executed."""

TRAIN = """
import hashlib, os, random, sys
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ftrun

steps, pace_s = int(sys.argv[1]), float(sys.argv[2])
dist.init_process_group(os.environ.get("TRAINING_BACKEND", "gloo"))
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(32, 300), nn.GELU(), nn.Dropout(0.1), nn.BatchNorm1d(300), nn.Linear(300, 8)
)
torch.manual_seed(1 + rank)
np.random.seed(2 + rank)
random.seed(3 + rank)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
order = torch.Generator().manual_seed(rank)
session = ftrun.attach(model=model, optimizer=optimizer, scheduler=scheduler, order=order)
losses = open(f"losses.{rank}", "a", buffering=1)
# In one piece: two ranks write to one file.
begun = f"begin rank={rank} generation={session.generation} step={session.step}\\n"
print(begun, end="", flush=True)
for step in session.steps(steps):
    x = torch.randn(16, 32, generator=order, device="cpu") + random.random()
    x = x + torch.from_numpy(np.random.randn(16, 32).astype(np.float32))
    x = x.to(torch.get_default_device())
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    scheduler.step()
    losses.write(f"{step} {loss.item().hex()}\\n")
    if pace_s:
        import time
        time.sleep(pace_s)
        while step >= steps - 20 and os.path.exists("hold"):
            time.sleep(0.01)
digest = hashlib.sha256()
for value in model.state_dict().values():
    digest.update(value.cpu().numpy().tobytes())
print(f"digest {rank} {digest.hexdigest()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


class Checked:
    """The result of an undisturbed run; `first` are the words before the script."""

    def __init__(self, folder: Path, *first: str) -> None:
        (folder / "train.py").write_text(TRAIN)
        run = Run(folder, "--nproc-per-node", "2", *first, "train.py", str(STEPS), "0")
        try:
            assert run.wait() == 0, run.text
        finally:
            run.end()
        self.digests = digests(run)
        self.losses = [losses(folder, rank) for rank in (0, 1)]

    def check(self, run: Run) -> None:
        """A disturbed run has ended with the same parameters, after the same losses."""
        assert digests(run) == self.digests
        for rank in (0, 1):
            found = losses(run.folder, rank)
            wrong = [line for line in found if line not in set(self.losses[rank])]
            assert not wrong, f"rank {rank}: {wrong[:3]}"
            assert set(found) == set(self.losses[rank])
        outcomes = {line["result"]["outcome"] for line in run.journal("repeated_steps")}
        assert outcomes <= {"equal", "not compared"}, run.journal("repeated_steps")


def digests(run: Run) -> list[str]:
    return sorted({line for line in run.text.splitlines() if line.startswith("digest")})


def losses(folder: Path, rank: int) -> list[str]:
    """Whole lines only: a killed rank may leave half of one."""
    text = (folder / f"losses.{rank}").read_text()
    return [line for line in text.split("\n") if line.count(" ") == 1 and "p" in line]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    return Checked(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def train(tmp_path: Path) -> tuple[str, ...]:
    """Arguments that start the training at a pace that leaves time to kill something.

    It waits for `let_end` before its last steps: on a busy machine that takes longer than steps.
    """
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / HOLD).touch()
    return ("--nproc-per-node", "2", "train.py", str(STEPS), "0.02")


def let_end(run: Run) -> None:
    """Let this run, and those after it, finish."""
    (run.folder / HOLD).unlink(missing_ok=True)


def wait_for_memory(run: Run, step: int) -> None:
    """Wait until this step is committed, so that no kill takes the run back behind it."""

    def is_committed() -> bool:
        found = (run.status().get("snapshots") or {}).get("step")  # type: ignore[attr-defined]
        return found is not None and found >= step

    run.wait_until(f"step {step} in memory", is_committed)


def wait_until_gone(pid: int) -> None:
    """Wait until a process that is ending has ended, with all threads: one may still write."""
    give_up_s = time.monotonic() + WAIT_S
    while _is_there(pid):
        if time.monotonic() > give_up_s:
            pytest.fail(f"process {pid} is still there")
        time.sleep(0.02)


def _is_there(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return stat[0] not in "ZX" or int(stat[17]) > 1
