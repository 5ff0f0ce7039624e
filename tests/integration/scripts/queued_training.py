"""A training that is queued again: it records the start of each life, and every step.

Arguments: a folder for the records; it continues until the folder has a file `go`.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ftrun


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    session = ftrun.attach(model=model, optimizer=optimizer)
    life = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    name = folder / f"rank{dist.get_rank()}.jsonl"
    notes = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(kind: str, **fields: object) -> None:
        fields |= {"kind": kind, "life": life, "step": session.step}
        os.write(notes, json.dumps(fields).encode() + b"\n")

    note("begun", restored=session.restored, given=dict(os.environ))
    for _ in session.steps(100_000):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().sum()
        loss.backward()
        optimizer.step()
        note("step", loss=loss.item().hex())
        may_end = torch.tensor([float((folder / "go").exists())])
        dist.all_reduce(may_end, op=dist.ReduceOp.MIN)
        if may_end.item():
            break
        time.sleep(0.02)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
