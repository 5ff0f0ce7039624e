"""Trains a few steps, and prints a digest of everything in a checkpoint of 0.2."""

import hashlib
import random
import sys
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import ftrun

torch.manual_seed(0)
random.seed(0)
np.random.seed(0)
model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1, bias=False))
model[2].weight.requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
generator = torch.Generator().manual_seed(5)
counts = {"seen": 0, "last": None}
total = torch.zeros(3)
loader = DataLoader(torch.arange(96.0).reshape(24, 4), batch_size=4, shuffle=True)
session = ftrun.attach(
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    loader=loader,
    generator=generator,
    counts=counts,
    total=total,
)


def digest() -> str:
    found = hashlib.sha256()
    moments = [optimizer.state[one] for one in model.parameters() if one in optimizer.state]
    for tensors in (model.state_dict(), *moments, {"total": total}):
        for name, tensor in tensors.items():
            found.update(name.encode() + tensor.numpy().tobytes())
    numbers = (session.step, optimizer.param_groups[0]["lr"], scheduler.last_epoch, counts)
    draws = (torch.rand(2), random.random(), np.random.rand(), torch.rand(1, generator=generator))
    found.update(repr((numbers, draws)).encode())
    found.update(repr([one.requires_grad for one in model.parameters()]).encode())
    return found.hexdigest()


def every_batch() -> Iterator[torch.Tensor]:
    while True:
        yield from session.batches(loader)


if session.restored:
    print("restored", digest(), flush=True)
batches = every_batch()
for step in session.steps(int(sys.argv[1])):
    batch = next(batches)
    print("batch", step, batch[:, 0].int().tolist(), flush=True)
    model(batch / 96 + torch.rand(4, 4, generator=generator)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    counts["seen"] += len(batch)
    counts["last"] = ("step", step)
    total += batch.sum() * torch.rand(3)
print("ended", digest(), flush=True)
