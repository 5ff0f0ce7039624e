"""A batch makes the loss infinite: the run resumes from before it, and skips it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Start

POISON = 37
TRAIN = f"""
import hashlib, os, sys, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, left_out = dist.get_rank(), [int(one) for one in sys.argv[1:]]
torch.manual_seed(5)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
inputs = torch.randn(240, 8)
inputs[2 * {POISON}] = float("inf")
loader = DataLoader(TensorDataset(inputs), batch_size=2)
if left_out:
    session, batches = None, enumerate(loader)
    batches = (batch for number, batch in batches if number not in left_out)
else:
    import ftrun
    session = ftrun.attach(model=model, optimizer=optimizer, loader=loader)
    batches = session.batches(loader)
for (batch,) in batches:
    optimizer.zero_grad()
    loss = model(batch + rank).square().mean()
    loss.backward()
    optimizer.step()
    time.sleep(0.01)
parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
finite = all(bool(p.isfinite().all()) for p in model.parameters())
digest = hashlib.sha256(parameters).hexdigest()
# In one piece: two ranks write to one pipe.
os.write(1, f"finite {{finite}}\\ndigest {{rank}} {{digest}}\\n".encode())
dist.destroy_process_group()
"""

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.launch]


def digests(text: str) -> set[str]:
    return {line.split("digest ")[1] for line in text.splitlines() if "digest " in line}


def test_the_batches_that_led_to_it_are_left_out(
    start: Start, script: Callable[..., str], tmp_path: Path
) -> None:
    name = script(TRAIN)
    run = start("--nproc-per-node", "2", "--set", "numerics.policy=skip-data", name)
    assert run.wait() == 0, run.text
    found = [line for line in run.journal("generation_chosen") if line.get("skip_batches")]
    assert len(found) == 1, run.text
    chosen: Any = found[0]
    restored, count = chosen["restored"][1], chosen["skip_batches"]
    # Batches are counted from 0, steps from 1.
    left_out = range(restored, restored + count)
    assert POISON in left_out
    assert "finite True" in run.text
    plain = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         name, *map(str, left_out)],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert digests(run.text) == digests(plain.stdout)


@pytest.mark.full
def test_without_the_policy_it_is_reported_and_the_run_continues(
    start: Start, script: Callable[..., str]
) -> None:
    run = start("--nproc-per-node", "2", script(TRAIN))
    assert run.wait() == 0, run.text
    assert "finite False" in run.text
    (closed,) = run.journal("incident_closed")
    assert closed["verdict_kind"] == "numerical anomaly"
    assert len(run.journal("generation_started")) == 1
