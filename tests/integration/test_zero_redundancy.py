"""ZeroRedundancyOptimizer: each rank's part of the optimizer's state comes back."""

from pathlib import Path

import pytest

from tests.integration.conftest import Start
from tests.integration.examples import ends_as_undisturbed, restored_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CODE = """
import os

import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import ftrun

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(
    nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 1))
)
optimizer = ZeroRedundancyOptimizer(
    model.parameters(), torch.optim.AdamW, lr=1e-2, parameters_as_bucket_view=BUCKETS
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
session = ftrun.attach(model=model, optimizer=optimizer, scheduler=scheduler)
for _ in session.steps(12):
    x = torch.randn(4, 8) + dist.get_rank()
    nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
"""


@pytest.mark.parametrize("buckets", [False, pytest.param(True, marks=pytest.mark.full)])
def test_two_ranks_end_as_undisturbed(start: Start, tmp_path: Path, buckets: bool) -> None:
    code = CODE.replace("BUCKETS", str(buckets))
    run = ends_as_undisturbed(start, tmp_path, code, {0: 8})
    assert restored_steps(run)[0] in (6, 7)
