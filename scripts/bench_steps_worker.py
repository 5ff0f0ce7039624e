"""The worker of bench_steps.py: ranks with a state of their own that step together.

Each rank trains its own layers, so nothing is a replica and all of it is encoded; with --replicated
1 all ranks train equal layers. A small all-reduce keeps the ranks in step, as gradients do in a
training.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from bench_notes import Notes, arguments
from bench_recovery_worker import Layers
from torch import nn

BATCH = 64


def main() -> None:
    args = arguments(__doc__, state_mb=float, attach=int, gradient_mb=float, replicated=int)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    notes = Notes(args.folder / f"rank{rank}.jsonl")
    notes.write_begun(0)

    model = Layers(int(args.state_mb * 1e6))
    with torch.no_grad():
        for layer in model.layers:
            layer += 0 if args.replicated else rank * 1e-3
    data = torch.ones(BATCH, model.width)
    gradients = torch.ones(int(args.gradient_mb * 1e6 / 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    for step in steps(model, optimizer, attach=bool(args.attach)):
        loss = model(data)
        optimizer.zero_grad()
        loss.backward()
        is_over = torch.tensor(float((args.folder / "go").exists()))
        if len(gradients):
            dist.all_reduce(gradients)
        both = torch.stack([loss.detach(), is_over])
        dist.all_reduce(both)  # ranks may look before and after the file appears, but end together
        optimizer.step()
        notes.write("step", step=step, generation=0)
        if both[1]:
            return


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, *, attach: bool) -> Iterator[int]:
    if not attach:
        yield from range(1 << 40)
        return
    import ftrun

    yield from ftrun.attach(model=model, optimizer=optimizer).steps(1 << 40)


if __name__ == "__main__":
    main()
