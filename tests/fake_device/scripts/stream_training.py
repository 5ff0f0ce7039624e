"""Trains on the fake device, and kills itself once after step 12; its next process compares.

Arguments: a file for the result, and `default` or `own`: the stream of the training.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from fake_device import fake
from torch import nn

import ftrun

DEVICE = "fake:0"
KILL_AFTER = 12


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 64)).to(DEVICE)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(32, 256, generator=generator).to(DEVICE, non_blocking=True)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    torch.accelerator.synchronize(0)
    found = {key: value.detach().cpu() for key, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{key}": value.cpu() for key, value in state.items()}
    return found


def main() -> None:
    fake.load()
    torch.set_num_threads(1)
    result, where = Path(sys.argv[1]), sys.argv[2]
    stream = torch.Stream(DEVICE) if where == "own" else torch.accelerator.current_stream(DEVICE)
    with stream:
        model, optimizer = made()
        session = ftrun.attach(model=model, optimizer=optimizer)
        if session.restored:
            found, restored = state_of(model, optimizer), session.step
            model, optimizer = made()
            for step in range(restored):
                train_step(model, optimizer, step)
            expected = state_of(model, optimizer)
            wrong = [key for key in expected if not torch.equal(expected[key], found[key])]
            result.write_text(
                json.dumps({"step": restored, "tensors": len(expected), "wrong": wrong})
            )
            os._exit(0)
        for step in session.steps(30):
            train_step(model, optimizer, step)
            if step == KILL_AFTER:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
