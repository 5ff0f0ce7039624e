"""The job of drill_nodes.py: a small training with everything an exact resume depends on.

It has batch normalisation (buffers of each rank's own), dropout and noise (random states), AdamW, a
schedule and a shuffled loader, under DDP or FSDP2. The state is large enough to be encoded and not
mirrored. Each rank records each step with its loss, and at the end a digest of all its state. The
job runs slowly until the file `go` exists, so that a fault can be injected in time. It waits for
that file before its last steps.
"""

import argparse
import hashlib
import os
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist
from bench_notes import Notes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ftrun
from ftrun.wire.shared_memory.pages import CommandField, HeartbeatField
from ftrun.worker.context import worker_context

WIDTH = 640
BATCH = 16
SAMPLES_PER_RANK = 160
LAST_STEPS = 10
HOLD_S = 0.01


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    notes = Notes(args.folder / f"rank{rank}.jsonl")
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    where = {"generation": generation, "node": socket.gethostname(), "pid": os.getpid()}
    notes.write("begun", **where)

    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(1 + rank)
    model = wrap(plain, args.kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    loader = loader_of(rank, world_size)
    session = ftrun.attach(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    notes.write("attached", step=session.step, **where)

    for _ in session.epochs(args.steps * BATCH // SAMPLES_PER_RANK):
        for (x,) in session.batches(loader):
            with session.guard():
                step = session.step
                loss = model(x + 0.01 * torch.randn_like(x)).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                mean = loss.detach() / world_size
                dist.all_reduce(mean)  # as in most scripts, so a collective is skipped briefly
                session.report(loss=mean)
                now = {"generation": session.generation}  # it changes if this process stays
                notes.write("step", step=step, loss=loss.item().hex(), **kept(), **{**where, **now})
                pace(args, step)
    notes.write("end", step=session.step, digest=digest_of(plain, optimizer), **where)
    dist.barrier()
    dist.destroy_process_group()


def build() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(32, WIDTH),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.BatchNorm1d(WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, 8),
    )


def wrap(model: nn.Sequential, kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=1)
    for layer in (model[0], model[4]):
        fully_shard(layer)
    return fully_shard(model)


def loader_of(rank: int, world_size: int) -> DataLoader:
    numbers = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(SAMPLES_PER_RANK * world_size, 32, generator=numbers))
    sampler = DistributedSampler(data, world_size, rank, shuffle=True, seed=3)
    return DataLoader(data, batch_size=BATCH, sampler=sampler)


def pace(args: argparse.Namespace, step: int) -> None:
    """Slow down, so that there is time to inject a fault."""
    go = args.folder / "go"
    if go.exists():
        return
    time.sleep(args.pace)
    while step >= args.steps - LAST_STEPS and not go.exists():
        time.sleep(HOLD_S)


def kept() -> dict[str, int]:
    """The newest steps that this rank has sealed and that all nodes have protected."""
    context = worker_context()
    if context is None:
        return {}
    committed = context.commands.get(CommandField.COMMITTED_STEP)
    return {"sealed": context.page.get(HeartbeatField.SEALED_STEP), "committed": committed}


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all parameters, this rank's buffers, and its part of the optimizer's state."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        digest.update(bytes_of(full))
    for state in optimizer.state_dict()["state"].values():
        for name in sorted(state):
            part = state[name]
            digest.update(bytes_of(part.to_local() if isinstance(part, DTensor) else part))
    return digest.hexdigest()


def bytes_of(value: Tensor) -> bytes:
    return value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kind", choices=("ddp", "fsdp2"), required=True)
    parser.add_argument(
        "--steps", type=int, required=True, help="number of steps, a multiple of 10"
    )
    parser.add_argument("--pace", type=float, default=0.0, help="seconds added to each step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
