"""The worker of bench_survivors.py: a DDP model under ftrun or torchrun, with or without set-up.

Each step is a function of its number, so a reference run gives the parameters of every step. Under
torchrun each rank reads its own file from tmpfs, and writes it once per generation.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
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


def main() -> None:
    args = arguments(__doc__, job=str, setup_s=float, pace_s=float, until=int, guarded=int)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    if args.job == "setup":
        set_up(args.setup_s)
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)]
    ddp = DistributedDataParallel(nn.Sequential(*layers))
    model = torch.compile(ddp) if args.job == "compiled" else ddp
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    notes = Notes(args.folder / f"rank{rank}.jsonl")

    def turn(step: int, generation: int, *, is_rehearsal: bool = False) -> None:
        optimizer.zero_grad()
        loss = model(batch(step, rank)).square().mean()
        loss.backward()
        optimizer.step()
        if not is_rehearsal:
            found = {"step": step, "generation": generation, "pid": os.getpid()}
            notes.write("step", **found, digest=digest(loss, ddp.parameters()))
        time.sleep(args.pace_s)

    if "FTRUN_RUN_ID" in os.environ:
        import ftrun

        session: Any = ftrun.attach(model=ddp, optimizer=optimizer)
        for step in session.steps(args.until):
            with session.guard() if args.guarded else contextlib.nullcontext():
                is_rehearsal = bool(args.guarded) and session.is_rehearsal
                turn(step, session.generation, is_rehearsal=is_rehearsal)
        return
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for step in saved_steps(ddp, optimizer, args.folder / f"rank{rank}.pt", args.until):
        turn(step, generation)


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
    model: nn.Module, optimizer: torch.optim.Optimizer, file: Path, until: int
) -> Iterator[int]:
    first = 0
    if file.exists():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"])
        first = saved["step"]
    for step in range(first, until):
        yield step
        if step == first + SAVE_AT:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            random = {"step": step + 1, "rng": torch.get_rng_state()}
            torch.save({**state, **random}, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)


if __name__ == "__main__":
    main()
