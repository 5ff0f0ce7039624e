"""A training in which one rank fails once: `hanging_training.py HOW RANK`.

Each rank records the loss of every step. In the first generation the given rank does at step AT
what HOW says; later generations have no fault.
"""

import ctypes
import hashlib
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ftrun

AT, STEPS = 20, 45
HOW, WHO = sys.argv[1], int(sys.argv[2])


def go_wrong() -> bool:
    """Returns whether the collective of this step is skipped."""
    if HOW in ("sleep", "workers"):
        time.sleep(1e6)
    elif HOW == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif HOW == "gil":
        # Unlike a sleep, no signal ends this wait: a look at the stack may send one.
        library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
    elif HOW == "spin":
        while True:
            pass
    elif HOW == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif HOW == "leave":
        os._exit(0)
    return HOW == "skip"


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = ftrun.attach(model=model, optimizer=optimizer)
    if HOW == "workers":  # they stay idle, and wake now and then
        idle = iter(DataLoader(list(range(1000)), num_workers=4))
        next(idle)
    for step in session.steps(STEPS):
        skips = step == AT and rank == WHO and session.generation == 0 and go_wrong()
        numbers = torch.Generator().manual_seed(step * 100 + rank)
        loss = model(torch.randn(8, 64, generator=numbers)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not skips:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            session.report(loss=mean)
        time.sleep(0.03)
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    print(f"digest {rank} {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
