"""A training without ftrun: each rank records its variables and every step.

It runs under torchrun as well. Arguments: a folder for the records, and the number of steps; with 0
it continues until the folder has a file `go`.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

PACE_S = 0.02
SIGNAL_MASKS = ("SigIgn", "SigCgt")


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    # One write of O_APPEND per line: a kill leaves no half of one.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    notes = os.open(folder / f"rank{dist.get_rank()}.jsonl", flags, 0o644)

    def note(kind: str, **fields: object) -> None:
        os.write(notes, json.dumps({"kind": kind, **fields}).encode() + b"\n")

    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    note("begun", generation=generation, node=socket.gethostname(), given=dict(os.environ))
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    step, is_over = 0, False
    while not is_over:
        step += 1
        weight.grad = torch.ones(2)
        optimizer.step()
        may_end = torch.tensor([float(step == steps or (not steps and (folder / "go").exists()))])
        dist.all_reduce(may_end, op=dist.ReduceOp.MIN)  # all end after the same step
        is_over = bool(may_end.item())
        note("step", generation=generation, step=step)
        time.sleep(0 if steps else PACE_S)
    note("end", generation=generation, signals=masks())
    dist.barrier()
    dist.destroy_process_group()


def masks() -> dict[str, str]:
    """The ignored and the caught signals, as the kernel shows them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":\t") for line in lines if line.startswith(SIGNAL_MASKS))
    return {name: found[name] for name in SIGNAL_MASKS}


if __name__ == "__main__":
    main()
