"""The worker of `bench_reshard.py`: one training, saved by some ranks and restored by others.

The state is FSDP2's: parameters and AdamW's two moments. `save` runs a step, so that ftrun writes a
checkpoint at its end, and writes the same state with dcp.save. `load` attaches, which restores.
`dcp` gets the places of the state, lets dcp.load fill them, and sets them. Both use a new model and
a new optimizer. `again` is killed once, restores its own arena, and copies the same number of bytes
from warm memory to warm memory.
"""

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import ftrun

WIDTH = 1536
STATES = 3
"""Parameters and two moments."""
COMMITTED_S = 2.0
"""Enough for the last snapshot to be committed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("save", "load", "dcp", "again"))
    parser.add_argument("--gb", type=float, required=True, help="GB of state of all ranks")
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model, optimizer = training(round(args.gb * 1e9 / STATES / 4 / WIDTH**2))
    figures: dict[str, float] = {"bytes_of_rank": STATES * bytes_here(model)}
    if args.what == "dcp":
        figures["dcp_load_s"] = timed(lambda: load(model, optimizer, args.folder / "dcp"))
        note(args.folder, figures)
        return
    found: list[Any] = []
    figures["attach_s"] = timed(
        lambda: found.append(ftrun.attach(model=model, optimizer=optimizer))
    )
    (session,) = found
    if not session.restored:
        make_steps(session, model, optimizer, is_killed=args.what == "again")
    if args.what == "save":
        dcp.save(state_of(model, optimizer), checkpoint_id=args.folder / "dcp")
        return
    if args.what == "again":
        figures["copy_s"] = warm_copy_s(int(figures["bytes_of_rank"]))
    note(args.folder, figures)


def note(folder: Path, figures: dict[str, float]) -> None:
    if dist.get_rank() == 0:
        (folder / "figures.json").write_text(json.dumps(figures))


def training(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, layers))))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def make_steps(
    session: Any, model: nn.Module, optimizer: torch.optim.Optimizer, *, is_killed: bool
) -> None:
    for step in session.steps(3 if is_killed else 1):
        if step == 2:
            time.sleep(COMMITTED_S)
            if dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def bytes_here(model: nn.Module) -> int:
    parts = [getattr(one, "to_local", lambda one=one: one)() for one in model.parameters()]
    return sum(part.numel() * part.element_size() for part in parts)


def timed(act: Callable[[], object]) -> float:
    """Seconds from the common start until all ranks have done it."""
    dist.barrier()
    started_s = time.perf_counter()
    act()
    took_s = torch.tensor(time.perf_counter() - started_s)
    dist.all_reduce(took_s, dist.ReduceOp.MAX)
    return took_s.item()


def warm_copy_s(num_bytes: int) -> float:
    """The best of three copies of this number of bytes by every rank at once."""
    source, target = (
        torch.ones(num_bytes, dtype=torch.uint8),
        torch.zeros(num_bytes, dtype=torch.uint8),
    )
    return min(timed(lambda: target.copy_(source)) for _ in range(3))


if __name__ == "__main__":
    main()
