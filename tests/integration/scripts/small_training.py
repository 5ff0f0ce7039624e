"""A small training with everything an exact resume depends on; it writes each loss to a file.

Arguments: folder for the losses, steps or epochs, then switches: ddp, fsdp, workers, persistent,
stateful, epochs, late-ddp, batchnorm, die=STEP (SIGKILL after that number of iterations of this
process).
"""

import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ftrun


class Numbers(Dataset):
    """Forty samples."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.arange(8, dtype=torch.float32) * (index + 1) / 40
        return x.sin(), x.cos()[:4]


def loader_of(switches: set[str], rank: int, world_size: int) -> DataLoader:
    data = Numbers()
    sampler = DistributedSampler(data, world_size, rank, seed=3) if world_size > 1 else None
    workers = 2 if "workers" in switches else 0
    kind = DataLoader
    if "stateful" in switches:
        from torchdata.stateful_dataloader import StatefulDataLoader

        kind = StatefulDataLoader
    return kind(
        data,
        batch_size=4,
        sampler=sampler,
        shuffle=sampler is None,
        num_workers=workers,
        persistent_workers="persistent" in switches,
    )


def main() -> None:
    folder, total = Path(sys.argv[1]), int(sys.argv[2])
    switches = set(sys.argv[3:])
    die_after = next((int(s[4:]) for s in switches if s.startswith("die=")), -1)
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    layers: list[nn.Module] = [nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.2)]
    layers += [nn.BatchNorm1d(32)] if "batchnorm" in switches else []
    model: nn.Module = nn.Sequential(*layers, nn.Linear(32, 300), nn.Tanh(), nn.Linear(300, 4))
    if world_size > 1:
        dist.init_process_group("gloo")
    if "fsdp" in switches:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0])
        fully_shard(model)
    plain = model
    if "ddp" in switches and "late-ddp" not in switches:
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    loader = loader_of(switches, rank, world_size)
    session = ftrun.attach(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    if "late-ddp" in switches:
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)
    log = (folder / f"loss.{rank}.{session.generation}").open("w", buffering=1)
    turns = 0

    def train(batch: list[torch.Tensor]) -> None:
        nonlocal turns
        optimizer.zero_grad()
        x, y = batch
        noise = random.random() * 1e-3 + np.random.rand() * 1e-3
        loss = nn.functional.mse_loss(model(x + noise), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        log.write(f"{session.step + 1} {loss.item().hex()}\n")
        turns += 1
        if turns == die_after:
            os.kill(os.getpid(), signal.SIGKILL)

    for _epoch in session.epochs(total):
        for batch in session.batches(loader):
            train(batch)
    state = [t.to_local() if hasattr(t, "to_local") else t for t in plain.state_dict().values()]
    torch.save([session.step, state], folder / f"end.{rank}.pt")
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


main()
