"""DDP with large layers, BatchNorm and dropout; each rank writes a digest of its state at the end.

Arguments: steps, seconds per step, then switches: die=STEP:RANK (SIGKILL of that rank, or of all of
them, after that step of generation 0), drift=STEP (rank 1 changes one weight).
"""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ftrun

WIDTH = 300  # a weight has 360 kB, so it is shared

torch.set_num_threads(1)
dist.init_process_group(os.environ.get("TRAINING_BACKEND", "gloo"))
rank = dist.get_rank()
steps, pace_s = int(sys.argv[1]), float(sys.argv[2])
switches = dict(one.split("=") for one in sys.argv[3:])
die_step, _, die_rank = switches.get("die", "-1:").partition(":")
torch.manual_seed(1)
layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)]
plain = nn.Sequential(*layers, nn.Conv1d(1, 8, 3))
model = nn.parallel.DistributedDataParallel(plain, broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
session = ftrun.attach(model=model, optimizer=optimizer)
torch.manual_seed(100 + rank)


def forward(x: torch.Tensor) -> torch.Tensor:
    for layer in plain[:4]:
        x = layer(x)
    return plain[4](x[:, None]).square().mean()


plain.forward = forward
for step in session.steps(steps):
    optimizer.zero_grad()
    model(torch.randn(8, WIDTH)).backward()
    optimizer.step()
    time.sleep(pace_s)
    if session.generation == 0 and step == int(switches.get("drift", -1)) and rank == 1:
        with torch.no_grad():
            plain[0].weight[5, 5] += 1e-3
    if session.generation == 0 and step == int(die_step) and die_rank in ("all", str(rank)):
        os.kill(os.getpid(), signal.SIGKILL)
found = hashlib.sha256(torch.rand(3).cpu().numpy().tobytes())
moments = [tensor for one in plain.parameters() for tensor in optimizer.state[one].values()]
for tensor in [*plain.state_dict().values(), *moments]:
    found.update(tensor.cpu().numpy().tobytes())
Path(f"end.{rank}").write_text(f"{found.hexdigest()}\n")
