"""The worker of bench_survivors.py: a DDP model under ftrun, torchrun or torchft.

Each step is a function of its number, so a reference run gives the parameters of every step. Under
torchrun each rank reads its own file from tmpfs, and writes it once per generation. Under torchft
each rank is a replica group, and the number of the quorum takes the place of the generation.
"""

import argparse
import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_notes import Notes, arguments
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 128
ROWS = 8
SAVE_AT = 5
TORCHFT_S = 10.0
"""Its limit for a collective and for a quorum."""


def main() -> None:
    args = arguments(__doc__, job=str, setup_s=float, pace_s=float, until=int, launcher=str)
    rank = int(os.environ.get("REPLICA_GROUP_ID", os.environ["RANK"]))
    notes = Notes(args.folder / f"rank{rank}.jsonl")
    if args.launcher != "torchft":
        dist.init_process_group("gloo")
    if args.job == "setup":
        set_up(args.setup_s)
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)]
    module = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    make = torchft_steps if args.launcher == "torchft" else steps
    for turn in make(module, optimizer, args, rank):
        with turn.block:
            turn.optimizer.zero_grad()
            loss = turn.model(batch(turn.step, rank)).square().mean()
            loss.backward()
            turn.optimizer.step()
            if not turn.is_rehearsal:
                found = {"generation": turn.generation(), "pid": os.getpid()}
                of_step = {"step": turn.step, "digest": digest(loss, module.parameters())}
                notes.write("step", **of_step, **found)
            time.sleep(args.pace_s)


@dataclass(frozen=True)
class Turn:
    """One step, and what it is made with."""

    step: int
    model: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    generation: Callable[[], int]
    block: contextlib.AbstractContextManager[object] = field(default_factory=contextlib.nullcontext)
    is_rehearsal: bool = False


def steps(
    module: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace, rank: int
) -> Iterator[Turn]:
    ddp = DistributedDataParallel(module)
    model = torch.compile(ddp) if args.job == "compiled" else ddp
    if args.launcher == "torchrun":
        generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        for step in saved_steps(module, optimizer, args.folder / f"rank{rank}.pt", args.until):
            yield Turn(step, model, optimizer, lambda: generation)
        return
    import ftrun

    session: Any = ftrun.attach(model=ddp, optimizer=optimizer)
    now = lambda: session.generation  # noqa: E731
    for step in session.steps(args.until):
        if args.launcher == "survivors":
            yield Turn(step, model, optimizer, now, session.guard(), session.is_rehearsal)
        else:
            yield Turn(step, model, optimizer, now)


def torchft_steps(
    module: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace, rank: int
) -> Iterator[Turn]:
    import torchft

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=TORCHFT_S)),
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        replica_id=f"bench-{rank}",
        timeout=timedelta(seconds=TORCHFT_S),
    )
    ddp = torchft.DistributedDataParallel(manager, module)
    model = torch.compile(ddp) if args.job == "compiled" else ddp
    wrapped = torchft.Optimizer(manager, optimizer)
    while (step := manager.current_step()) < args.until:
        yield Turn(step, model, wrapped, lambda: manager._quorum_id)


def set_up(seconds: float) -> None:
    """Compute for this number of seconds of a processor."""
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        hashlib.blake2b(bytes(1 << 16)).digest()


def batch(step: int, rank: int) -> Tensor:
    """[ROWS, WIDTH] of normal values."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def digest(loss: Tensor, parameters: Iterator[Tensor]) -> str:
    found = hashlib.blake2b(loss.detach().numpy().tobytes(), digest_size=8)
    for one in parameters:
        found.update(one.detach().numpy().tobytes())
    return found.hexdigest()


def saved_steps(
    module: nn.Module, optimizer: torch.optim.Optimizer, file: Path, until: int
) -> Iterator[int]:
    first = 0
    if file.exists():
        saved = torch.load(file)
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"])
        first = saved["step"]
    for step in range(first, until):
        yield step
        if step == first + SAVE_AT:
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
            random = {"step": step + 1, "rng": torch.get_rng_state()}
            torch.save({**state, **random}, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)


if __name__ == "__main__":
    main()
