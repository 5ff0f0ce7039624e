"""Two stages of a pipeline with two replicas each, under DDP: `staged_training.py FOLDER RANKS`.

Ranks 0 and 1 are the first stage. Each step has two microbatches, and the stages wait for each
other in messages only. While the file `slow` is in FOLDER, RANKS (such as 2,3) work longer.
"""

import contextlib
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ftrun

BATCHES, WIDTH, WORK_S, MORE_S = 2, 16, 0.008, 0.012
SLOW, RANKS = Path(sys.argv[1]) / "slow", {int(one) for one in sys.argv[2].split(",")}


def work() -> None:
    time.sleep(WORK_S + MORE_S * (dist.get_rank() in RANKS and SLOW.exists()))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage, replica = divmod(rank, 2)
    other = (1 - stage) * 2 + replica
    torch.manual_seed(stage)
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH), process_group=groups[stage])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = ftrun.attach(model=model, optimizer=optimizer, mesh={"pp": 2, "dp": 2})
    for _ in session.steps(1 << 30):
        optimizer.zero_grad()
        parts = []
        for one in range(BATCHES):
            x = torch.ones(4, WIDTH)
            if stage:
                dist.recv(x, other)
            with contextlib.nullcontext() if one == BATCHES - 1 else model.no_sync():
                out = model(x.requires_grad_())
            work()
            if not stage:
                dist.send(out.detach(), other)
            parts.append((x, out))
        for one, (x, out) in enumerate(parts):
            gradient = torch.ones_like(out)
            if not stage:
                dist.recv(gradient, other)
            work()
            with contextlib.nullcontext() if one == BATCHES - 1 else model.no_sync():
                out.backward(gradient)
            if stage:
                dist.send(x.grad, other)
        optimizer.step()


if __name__ == "__main__":
    main()
