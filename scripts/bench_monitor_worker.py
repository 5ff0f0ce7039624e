"""The worker of bench_monitor.py: a small DDP training that attaches, and records each step."""

import time

import torch
import torch.distributed as dist
from bench_notes import Notes, arguments
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ftrun

WIDTH = 256


def main() -> None:
    args = arguments(__doc__, pace=float)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    notes = Notes(args.folder / f"rank{rank}.jsonl")
    notes.write_begun(0)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    session = ftrun.attach(model=model, optimizer=optimizer)
    data = torch.ones(16, WIDTH)
    for step in session.steps(1 << 40):
        loss = model(data).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.report(loss=loss)
        time.sleep(args.pace)
        notes.write("step", step=step, generation=0)
        stop = torch.tensor(float((args.folder / "go").exists()))
        dist.all_reduce(stop)
        if stop:
            return


if __name__ == "__main__":
    main()
