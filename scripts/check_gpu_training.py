"""The small trainings of check_gpu.py whose state is compared after a kill."""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from bench_notes import Notes
from check_gpu_device import BACKENDS, captured, delay, new_graph, random_state, wait
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ftrun
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage
from ftrun.worker.context import worker_context

STEPS, KILL_AT, EAGER = 12, 7, 3

OPTIONS: dict[str, dict[str, bool]] = {
    "adamw-plain": {"foreach": False},
    "adamw-fused": {"fused": True},
    **{name: {"capturable": True} for name in ("capturable", "graph", "graph-update")},
}
"""Options of AdamW, by variant."""


class Training:
    """One variant of a small training; every random number it draws is part of its state."""

    def __init__(self, variant: str, device: str) -> None:
        random.seed(1)
        torch.manual_seed(1)
        self.variant, self.device = variant, device
        width = 2048 if device == "cuda" else 64
        self.shape, model = [32, width], self.linear(width)
        if variant == "channels-last":
            convolutions = nn.Conv2d(3, 256, 3), nn.BatchNorm2d(256), nn.Conv2d(256, 64, 3)
            self.shape, model = [8, 3, 32, 32], nn.Sequential(*convolutions)
        model = model.to(device)
        if variant == "channels-last":
            model = model.to(memory_format=torch.channels_last)
        if variant in ("group", "gloo", "fsdp"):
            backend = BACKENDS.get(device, "gloo")
            if variant == "gloo" and device != "fake":  # NCCL has one rank for each GPU
                backend = "gloo"
            alone = {} if "RANK" in os.environ else {"rank": 0, "world_size": 1}
            dist.init_process_group(backend, store=dist.HashStore() if alone else None, **alone)
            model = fully_shard(model) if variant == "fsdp" else DistributedDataParallel(model)
        self.model: Any = model
        self.averages = {} if variant != "dict" else {"weight": torch.zeros_like(model[0].weight)}
        self.optimizers = self.made_optimizers()
        self.optimizer = self.optimizers[0]
        self.scaler = torch.amp.GradScaler(device, enabled=variant == "amp")
        self.forward, self.update = compiled(variant, model), compiled(variant, self.optimizer.step)
        self.done, self.graph = 0, new_graph(device)

    def linear(self, width: int) -> nn.Module:
        dropout = nn.Dropout(0.1 if self.variant == "dropout" else 0.0)
        layers = nn.Linear(width, width), nn.GELU(), dropout, nn.Linear(width, width // 4)
        return nn.Sequential(*layers)

    def made_optimizers(self) -> list[Any]:
        parameters = list(self.model.parameters())
        if self.variant == "sgd":
            return [torch.optim.SGD(parameters, lr=0.01, momentum=0.9)]
        if self.variant != "in-backward":
            return [torch.optim.AdamW(parameters, lr=0.01, **OPTIONS.get(self.variant, {}))]
        found = [torch.optim.AdamW([one], lr=0.01) for one in parameters]

        def update(optimizer: torch.optim.Optimizer, _parameter: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        for parameter, optimizer in zip(parameters, found, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(update, optimizer))
        return found

    def backward(self) -> None:
        x = torch.randn(self.shape, device=self.device)
        if self.variant == "channels-last":
            x = x.to(memory_format=torch.channels_last)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.variant == "amp"):
            loss = self.forward(x).square().mean()
        self.scaler.scale(loss).backward()
        delay(self.device)

    def turn(self, step: int) -> None:
        is_graph = self.variant.startswith("graph") and self.done >= EAGER
        is_whole = self.variant == "graph"
        if is_graph and self.done == EAGER:
            with captured(self.graph, self.device):
                if is_whole:
                    self.backward()
                self.optimizer.step()
        if not (is_graph and is_whole):
            self.backward()
        self.done += 1
        if is_graph:
            self.graph.replay()
        elif self.variant == "accumulate" and step % 2 == 0:
            return
        elif self.variant == "amp":
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.variant != "in-backward":
            self.update()
        for average in self.averages.values():
            average.lerp_(self.model[0].weight.detach(), 0.1)
        if not (is_graph and is_whole):
            self.optimizer.zero_grad(set_to_none=self.variant != "graph-update")

    def run(self, notes: Notes, kill_at: int, *, each: bool) -> None:
        """Train under `ftrun.attach`; `each`: record the state at every boundary."""
        streams: dict[str, Any] = {"own-stream": nullcontext(), "step-stream": nullcontext()}
        if self.variant in streams:
            streams[self.variant] = torch.Stream(self.device)
        wait(self.device)
        with streams["own-stream"]:
            session = ftrun.attach(
                self.model, self.optimizers, scaler=self.scaler, averages=self.averages
            )
            is_first = session.generation == 0
            if not is_first:
                notes.write("begun", step=session.restored and session.step, state=self.state())
            for step in session.steps(STEPS):
                if each:
                    notes.write("at", variant=self.variant, step=step, state=self.state())
                with streams["step-stream"]:
                    self.turn(step)
                if is_first and step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            notes.write("end", variant=self.variant, state=self.state(), **page_facts())
            session.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def state(self) -> dict[str, str]:
        """A digest of each tensor, and the text of everything else."""
        wait(self.device)
        numbers: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if self.device != "cpu":
            numbers["device"] = random_state(self.device)
        parts = {"model": self.model, "scaler": self.scaler}
        parts |= {f"optimizer {at}": one for at, one in enumerate(self.optimizers)}
        whole = {name: part.state_dict() for name, part in parts.items()}
        return dict(flat({**whole, "averages": self.averages, "random": numbers}, ""))


def compiled(variant: str, function: Any) -> Any:
    if variant == "reduce-overhead":
        return torch.compile(function, mode="reduce-overhead")
    return torch.compile(function) if variant == "compile" else function


def flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(item, f"{name}.{key}")
    elif isinstance(value, Tensor):
        if isinstance(value, DTensor):
            value = value.to_local()
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield name, xxhash.xxh3_64_hexdigest(data.numpy())
    else:
        yield name, xxhash.xxh3_64_hexdigest(repr(value).encode())


def page() -> SharedPage | None:
    context = worker_context()
    return None if context is None else context.page


def page_facts() -> dict[str, Any]:
    shared = page()
    if shared is None:
        return {}
    counts = (HeartbeatField.SEALED_COUNT, HeartbeatField.DISCARDED_COUNT)
    return {"note": shared.note, **{one.name: shared.get(one) for one in counts}}
