"""The worker of bench_recovery.py: a DDP model under ftrun or torchrun.

Under ftrun it attaches its state. Under torchrun it uses the best case: each rank reads its own
file from tmpfs with torch.load, and writes it once per generation, outside the measured time.
Everything else is equal.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from bench_notes import Notes, arguments
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LAYERS = 8
SAVE_AT = 5
HOLD_S = 0.01
FOREVER = 1 << 40


class Layers(nn.Module):
    """Square layers whose parameters cost almost nothing to create and to use."""

    def __init__(self, state_bytes: int) -> None:
        super().__init__()
        # The state is the parameters and AdamW's two moments; 4 bytes each.
        self.width = int((state_bytes / 3 / 4 / LAYERS) ** 0.5)
        shape = (self.width, self.width)
        self.layers = nn.ParameterList(
            nn.Parameter(torch.full(shape, 1.0 / self.width)) for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x @ layer
        return x.mean()


def main() -> None:
    args = arguments(__doc__, state_mb=float)
    rank, generation = (int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    notes = Notes(args.folder / f"rank{rank}.jsonl")
    notes.write("started", generation=generation)
    dist.init_process_group("gloo")
    notes.write_begun(generation)

    layers = Layers(int(args.state_mb * 1e6))
    data = torch.ones(1, layers.width)
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    hold = args.folder / "hold"
    is_first = True
    for step in steps(model, optimizer, args.folder / f"rank{rank}.pt"):
        if is_first:
            notes.write("restored", generation=generation)
            is_first = False
        loss = model(data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        notes.write("step", step=step, generation=generation)
        while hold.exists():  # the other launcher runs now
            time.sleep(HOLD_S)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, file: Path) -> Iterator[int]:
    if "FTRUN_RUN_ID" in os.environ:
        import ftrun

        session = ftrun.attach(model=model, optimizer=optimizer)
        yield from session.steps(FOREVER)
        return
    first = 0
    if file.exists():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    for step in range(first, FOREVER):
        yield step
        if step == first + SAVE_AT:
            save(model, optimizer, step + 1, file)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, file: Path) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


if __name__ == "__main__":
    main()
