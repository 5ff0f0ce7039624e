"""A pipeline of plain messages in which one rank fails once: `messaging_training.py HOW RANK`.

Each rank is a stage: activations go up with `send` and `recv`, gradients come back with `isend` and
`irecv` of two microbatches. In the first generation the given rank does at step AT what HOW says:

sleep, spin  hangs before it sends its activation
tag          sends its activation with another tag
skip         does not send its activation
peer         receives its activation from the next stage in place of the one before
stop         stops its process before it sends
"""

import hashlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import ftrun

STEPS, BATCHES, WIDTH = 30, 2, 8
HOW, WHO, AT = sys.argv[1], int(sys.argv[2]), 12


def go_wrong() -> None:
    if HOW == "sleep":
        time.sleep(1e6)
    elif HOW == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif HOW == "spin":
        while True:
            pass


class Stage:
    """One rank of the pipeline."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1

    def step(self, step: int, *, is_wrong: bool) -> None:
        parts = [
            self.forward(step * BATCHES + one, is_wrong and one == 1) for one in range(BATCHES)
        ]
        works = [self.backward(*part) for part in parts]
        for work in works:
            if work is not None:
                work.wait()

    def forward(self, number: int, is_wrong: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        if self.rank:
            wrong_peer = is_wrong and HOW == "peer"
            dist.recv(x, self.rank + 1 if wrong_peer else self.rank - 1)
        x.requires_grad_()
        out = self.model(x).tanh()
        if is_wrong:
            go_wrong()
        if self.rank < self.last and not (is_wrong and HOW == "skip"):
            dist.send(out.detach(), self.rank + 1, tag=7 if is_wrong and HOW == "tag" else 0)
        return x, out

    def backward(self, x: torch.Tensor, out: torch.Tensor) -> "dist.Work | None":
        gradient = torch.ones_like(out)
        if self.rank < self.last:
            work = dist.irecv(gradient, self.rank + 1)
            assert work is not None
            work.wait()
        out.backward(gradient)
        return dist.isend(x.grad, self.rank - 1) if self.rank else None


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = ftrun.attach(model=model, optimizer=optimizer)
    stage = Stage(model)
    for step in session.steps(STEPS):
        is_wrong = step == AT and stage.rank == WHO and session.generation == 0
        optimizer.zero_grad()
        stage.step(step, is_wrong=is_wrong)
        optimizer.step()
        time.sleep(0.03)
    digest = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
    print(f"digest {stage.rank} {digest}", flush=True)


if __name__ == "__main__":
    main()
