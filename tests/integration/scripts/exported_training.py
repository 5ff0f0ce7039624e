"""A small training whose whole state rank 0 saves with torch's own functions, to compare exports.

Arguments: ddp or fsdp, folder. There are tied weights, shards of unequal size, one tensor that is
larger than a piece, buffers that differ between ranks, and state of every attached kind.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import ftrun

STEPS = 5


class Counted(nn.Module):
    """Counts its calls in torch's extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Scale(nn.Module):
    """Has a parameter of another dtype than all others."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(7, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor.float().mean()


class Model(nn.Module):
    """Words in, words out, through a wide layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 40_001), nn.Linear(40_001, 5), nn.Linear(5, 6)])
        self.norm = nn.BatchNorm1d(6)
        self.counted = Counted()
        self.scale = Scale()
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(self.scale(self.counted(self.norm(x))))


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model: Any = Model()
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in (*model.layers, model.scale):
            fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    table = torch.arange(6.0).view(2, 3)
    progress: dict[str, Any] = {"best": 0.5, "seen": (1, 2), "array": np.arange(3), 7: None}
    session = ftrun.attach(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        table=table,
        progress=progress,
        dice=torch.Generator().manual_seed(1),
    )
    torch.manual_seed(100 + dist.get_rank())
    for step in session.steps(STEPS):
        optimizer.zero_grad()
        x = torch.randint(11, (8,))
        nn.functional.cross_entropy(model(x), x).backward()
        optimizer.step()
        scheduler.step()
        table += 1
        progress["best"] = np.float64(step / 8)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved_model, saved_optimizer = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        whole = {"model": saved_model, "optimizer": saved_optimizer, "table": table}
        torch.save({**whole, "scheduler": scheduler.state_dict()}, folder / f"whole-{kind}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
