"""Generations of a small training in one warm process: each is forked with its own world size.

Argument: a folder. Reads one JSON line per generation from stdin and forks its ranks. Each rank
attaches, writes the restored state, trains to the requested step, writes its state again, and ends.
The answer is a JSON line with the exit statuses. The variables of a rank come with the line.
"""

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ftrun
import ftrun.worker.session
import ftrun.worker.snapshot_session


class Numbers(Dataset):
    """Ninety-six samples, each its own number."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return (torch.arange(8, dtype=torch.float32) * (index + 1) / 96).sin(), index


class Counted(nn.Linear):
    """A layer with state that only `get_extra_state` returns."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> dict[str, object]:
        return {"calls": self.calls, "scales": torch.full((3,), 0.5 * self.calls)}

    def set_extra_state(self, state: dict[str, object]) -> None:
        assert state["scales"].tolist() == [0.5 * state["calls"]] * 3
        self.calls = state["calls"]


class Net(nn.Module):
    """Odd sizes that no world size divides; one tensor is cut into pieces, most are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 37)
        self.norm = nn.BatchNorm1d(37)
        self.wide = nn.Linear(37, 2501)
        self.last = Counted(2501, 3)
        self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(0))

    def keep(self, first: int, end: int) -> None:
        """Become a pipeline stage that has these of three blocks, under their names."""
        blocks = (("first", "norm"), ("wide",), ("last", "frozen", "scale"))
        for names in (*blocks[:first], *blocks[end:]):
            for name in names:
                setattr(self, name, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first is not None:
            x = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.1, self.training)
        if self.wide is not None:
            x = self.wide(x.to(self.wide.weight.dtype)).float().tanh()
        return x if self.last is None else self.last(x) * self.scale + self.frozen.sum(0)


def device() -> str:
    """The type of torch's default device, which all tensors are on."""
    return torch.get_default_device().type


def made(order: dict[str, object], rank: int, world_size: int) -> dict[str, object]:
    torch.manual_seed(100 * int(order["generation"]) + rank)  # nothing is equal by chance
    np.random.seed(rank)
    model: nn.Module = Net()
    if order.get("half"):
        model.wide.bfloat16()
    for at in range(order.get("more", 0)):
        model.register_parameter(f"new{at}", nn.Parameter(torch.zeros(at + 1)))
    kind = order["kind"]
    if order.get("mask"):  # DDP does not accept a buffer whose items share memory
        model.register_buffer("mask", torch.zeros(1).expand(3))
    data_rank, data_size = rank, world_size
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if kind in ("fsdp", "hsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        share(model)
        names = ("replicate", "shard")
        shape = (2, world_size // 2)
        mesh = init_device_mesh(device(), shape, mesh_dim_names=names) if kind == "hsdp" else None
        fully_shard(model.wide, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if kind in ("tp", "fsdp+tp"):
        share(model)
        size = world_size if kind == "tp" else 2
        data_rank, data_size = rank // size, world_size // size
        parallelize(model.eval(), size, world_size)
    if kind == "pp":
        share(model)
        data_rank, data_size = 0, 1
        ends = np.cumsum([0, *order["split"]]).tolist()
        model.eval().keep(ends[rank], ends[rank + 1])
        if order.get("tied") and model.first is not None:  # with a copy for each stage
            model.gain = nn.Parameter(torch.ones(1)) if model.scale is None else model.scale
    learned = {n.removeprefix("module."): p for n, p in model.named_parameters() if p.requires_grad}
    quick = ("scale", "first.weight")
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for name, p in learned.items() if name in quick], "lr": 0.03},
            {"params": [p for name, p in learned.items() if name not in quick], "lr": 0.01},
        ]
    )
    data = Numbers()
    sampler = DistributedSampler(data, data_size, data_rank, seed=3)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40),
        "loader": DataLoader(data, batch_size=2, sampler=sampler),
        "dice": torch.Generator().manual_seed(50 + rank),
        "average": torch.zeros(4),
    }


def share(model: nn.Module) -> None:
    """Give all ranks the value of rank 0."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)


def parallelize(model: Net, size: int, world_size: int) -> None:
    """Torch's own sharding: tensor parallel within, FSDP2 across if there is more than one row."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(device(), (world_size // size, size), mesh_dim_names=("dp", "tp"))
    cuts = {"wide": ColwiseParallel(use_local_output=False), "last": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], cuts)
    if world_size > size:
        for part in (model.wide, model.last, model):
            fully_shard(part, mesh=mesh["dp"])


def stepper(model: nn.Module, kind: object) -> Callable[[torch.Tensor], object]:
    """One pass forward and backward."""
    if kind != "pp":
        return lambda x: model(x).square().mean().backward()
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(model, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, _: out.square().mean())

    def step(x: torch.Tensor) -> None:
        schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == size - 1 else {}))

    return step


def remember(things: dict[str, object], at: int) -> None:
    """State that grows, that has several levels, and flags of single modules."""
    model = getattr(things["model"], "module", things["model"])
    model.seen = torch.cat([model.seen, torch.tensor([float(at)])])
    if hasattr(model, "mask"):
        model.mask[0] += 1
    if model.norm is not None:
        model.norm.eval()
    if model.wide is not None:
        model.wide.train(mode=not model.training)
    for state in things["optimizer"].state.values():
        state["more"] = [state["exp_avg"] + 1, {"at": at, "wide": state["exp_avg_sq"].double()}]


def full(tensor: object) -> object:
    if isinstance(tensor, list):
        return [full(one) for one in tensor]
    if isinstance(tensor, dict):
        return {key: full(value) for key, value in tensor.items()}
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu().clone() if isinstance(tensor, torch.Tensor) else tensor


def state_of(things: dict[str, object], session: object) -> dict[str, object]:
    """The whole state; a collective call if tensors are sharded."""
    model, optimizer = things["model"], things["optimizer"]
    names = {id(p): n.removeprefix("module.") for n, p in model.named_parameters()}
    own = {n.removeprefix("module.") for n, _ in model.named_buffers()}
    tensors = {n.removeprefix("module."): full(t) for n, t in model.state_dict().items()}
    return {
        "step": session.step,
        "parameters": {n: t for n, t in tensors.items() if n not in own},
        "buffers": {n: t for n, t in tensors.items() if n in own},
        "optimizer": {
            names[id(parameter)]: {key: full(value) for key, value in state.items()}
            for parameter, state in optimizer.state.items()
        },
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
        "scheduler": things["scheduler"].state_dict(),
        "average": full(things["average"]),
        "training": {
            n.removeprefix("module").removeprefix("."): part.training
            for n, part in model.named_modules()
        },
        "random": [torch.get_rng_state(), things["dice"].get_state()],
    }


def train(folder: Path, order: dict[str, object], rank: int, world_size: int) -> None:
    generation = order["generation"]
    store = folder / f"store.{generation}"
    backend = os.environ.get("TRAINING_BACKEND", "gloo")
    init_method = f"file://{store}"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)
    things = made(order, rank, world_size)
    things |= {name: order[name] for name in ("mesh", "cast") if name in order}
    if order.get("tied"):
        things["mine"] = {"rank": rank}
    if order.get("narrow"):
        _read_little_at_a_time()
    if order.get("older"):
        _forget_parts()
    dies = order.get("dies", "") if rank == world_size - 1 else ""
    if dies == "reading":
        _die_while_reading()
    session = ftrun.attach(**things, strict=bool(order.get("strict")))
    restored = state_of(things, session) if session.restored else None
    torch.save(restored, folder / f"restored.{generation}.{rank}.pt")
    if dies == "restored":
        os._exit(9)
    model, optimizer = things["model"], things["optimizer"]
    seen: list[int] = []
    step = stepper(model, order["kind"])
    batches = session.batches(things["loader"])
    for at in session.steps(int(order["steps"])):
        x, indices = next(batches)
        seen += indices.tolist()
        optimizer.zero_grad()
        step(x)
        optimizer.step()
        things["scheduler"].step()
        things["average"] += at + rank
        remember(things, at)
        if dies == "before its seal":
            os._exit(9)
    torch.save(state_of(things, session), folder / f"end.{generation}.{rank}.pt")
    torch.save(seen, folder / f"seen.{generation}.{rank}.pt")
    session.close()
    dist.barrier()
    dist.destroy_process_group()


def _forget_parts() -> None:
    from ftrun.worker.capture import slots

    now = slots.make_layout
    slots.make_layout = lambda *args, **kwargs: replace(now(*args, **kwargs), knows_parts=False)


def _read_little_at_a_time() -> None:
    from ftrun.worker.reshard import source
    from ftrun.worker.reshard import tensor_reader as world_reader

    source.WINDOW_BYTES = 1 << 18
    world_reader.MOST_BYTES = 1 << 15


def _die_while_reading() -> None:
    """End after the second window, with the request for the next one."""
    from ftrun.worker import smp_client

    now, windows = smp_client.WorkerSmpClient.fetch_pieces, []

    def fetch(link: object, *args: object) -> int:
        windows.append(1)
        if len(windows) > 2:
            threading.Timer(0.002, os._exit, [9]).start()
        return now(link, *args)

    smp_client.WorkerSmpClient.fetch_pieces = fetch


def become(folder: Path, order: dict[str, object], rank: int) -> None:
    os.environ.update(order["variables"][rank])
    torch.set_num_threads(1)
    torch.set_default_device(os.environ.get("TRAINING_DEVICE", "cpu"))
    status = 1
    try:
        train(folder, order, rank, len(order["variables"]))
        status = 0
    except BaseException as error:  # noqa: BLE001
        text = f"{type(error).__name__}: {error}"
        (folder / f"error.{order['generation']}.{rank}").write_text(text)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    folder = Path(sys.argv[1])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pids = []
        for rank in range(len(order["variables"])):
            pid = os.fork()
            if pid == 0:
                become(folder, order, rank)
            pids.append(pid)
        print(json.dumps([os.waitpid(pid, 0)[1] for pid in pids]), flush=True)


main()
