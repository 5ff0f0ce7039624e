"""ZeroRedundancyOptimizer and FSDP1: each rank's own part of the state is restored."""

from pathlib import Path

import pytest

from tests.integration.conftest import Start
from tests.integration.examples import ends_like_undisturbed, restored_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CODE = """
import os

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer

import ftrun

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 1))
WRAPPED
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
session = ftrun.attach(model=model, optimizer=optimizer, scheduler=scheduler)
for _ in session.steps(12):
    x = torch.randn(4, 8) + dist.get_rank()
    nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
"""

ZERO = """
model = nn.parallel.DistributedDataParallel(model)
optimizer = ZeroRedundancyOptimizer(
    model.parameters(), torch.optim.AdamW, lr=1e-2, parameters_as_bucket_view=IS_VIEW
)
"""

FSDP = """
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=IS_VIEW)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
"""


@pytest.mark.parametrize(
    ("wrapped", "is_view"),
    [
        pytest.param(ZERO, False, id="zero"),
        pytest.param(ZERO, True, id="zero in buckets", marks=pytest.mark.full),
        pytest.param(FSDP, False, id="fsdp", marks=pytest.mark.full),
        pytest.param(FSDP, True, id="fsdp with own parameters", marks=pytest.mark.full),
    ],
)
def test_two_ranks_end_as_undisturbed(
    start: Start, tmp_path: Path, wrapped: str, is_view: bool
) -> None:
    code = CODE.replace("WRAPPED", wrapped.replace("IS_VIEW", str(is_view)))
    run = ends_like_undisturbed(start, tmp_path, code, {0: 8})
    assert restored_steps(run)[0] in (6, 7)
