"""The worker of bench_kills.py: a training whose whole state is known at each step.

All gradients are -1. SGD with a momentum of 1 and a rate of 1 then has, after k steps, a momentum
of -k and parameters k (k + 1) / 2 above their first values. Both are whole numbers that float32
holds exactly up to STEPS_LIMIT. After each restore the whole state is compared, bit for bit.
"""

import os
from functools import cache

import torch
import torch.distributed as dist
from bench_notes import Notes, arguments
from torch import Tensor, nn

import ftrun
from ftrun.wire.shared_memory.pages import CommandField, HeartbeatField
from ftrun.worker.context import worker_context

LAYERS = 8
STEPS_LIMIT = 5000
PATTERN = 251  # no power of two: a piece at a wrong place differs
WORK = 384  # width of the matrices that represent forward and backward


class Known(nn.Module):
    """Parameters that start as a pattern of rank and position, and a counter of steps."""

    def __init__(self, state_bytes: int, rank: int) -> None:
        super().__init__()
        size = state_bytes // 2 // 4 // LAYERS  # momentum takes the same size; 4 bytes each
        self.layers = nn.ParameterList(
            nn.Parameter(beginning(size, number, rank)) for number in range(LAYERS)
        )
        self.register_buffer("count", torch.zeros(1000))
        self.count: Tensor


@cache
def pattern(size: int) -> Tensor:
    return (torch.arange(size + PATTERN, dtype=torch.int32) % PATTERN).float()


def beginning(size: int, number: int, rank: int) -> Tensor:
    first = (37 * number + 101 * rank) % PATTERN
    return pattern(size)[first : first + size].clone()


def main() -> None:
    args = arguments(__doc__, mb=float)
    rank = int(os.environ["RANK"])
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    notes = Notes(args.folder / f"rank{rank}.jsonl")
    notes.write("begun", generation=generation, pid=os.getpid())

    dist.init_process_group("gloo")
    model = Known(int(args.mb * 1e6), rank)
    for layer in model.layers:
        layer.grad = torch.full_like(layer, -1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0, fused=True)
    plain = {"steps": 0}
    session = ftrun.attach(model=model, optimizer=optimizer, plain=plain)
    notes.write(
        "restored" if session.restored else "anew",
        generation=generation,
        step=session.step,
        wrong=wrong_parts(model, optimizer, plain, session.step, rank),
    )
    work = torch.ones(WORK, WORK) / WORK
    for step in session.steps(STEPS_LIMIT):
        for _ in range(10):
            work = work @ work
        dist.all_reduce(torch.ones(1))  # keeps the ranks in step, as with DDP
        optimizer.step()
        model.count += 1
        plain["steps"] += 1
        notes.write("step", step=step, generation=generation, **counts())


def counts() -> dict[str, int]:
    """Counters of this rank's snapshots, as evidence when steps are lost."""
    context = worker_context()
    assert context is not None
    page = context.page
    return {
        "sealed": page.get(HeartbeatField.SEALED_STEP),
        "skipped": page.get(HeartbeatField.SKIPPED_COUNT),
        "discarded": page.get(HeartbeatField.DISCARDED_COUNT),
        "committed": context.commands.get(CommandField.COMMITTED_STEP),
    }


def wrong_parts(
    model: Known, optimizer: torch.optim.Optimizer, plain: dict[str, int], step: int, rank: int
) -> list[str]:
    """Names of the parts that differ from the known state after `step` steps."""
    wrong = []
    for number, layer in enumerate(model.layers):
        wanted = beginning(layer.numel(), number, rank).add_(step * (step + 1) // 2)
        if not torch.equal(layer.detach(), wanted):
            wrong.append(f"layer {number}")
        momentum = optimizer.state.get(layer, {}).get("momentum_buffer")
        if step > 0 and (momentum is None or not bool((momentum == -step).all())):
            wrong.append(f"momentum {number}")
    if not bool((model.count == step).all()):
        wrong.append("buffer")
    if plain["steps"] != step:
        wrong.append("plain")
    return wrong


if __name__ == "__main__":
    main()
