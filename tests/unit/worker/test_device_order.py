"""Streams wait for the steps before a snapshot reads, and graph replays count as steps."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ftrun.worker.capture.boundaries import AccumulationTracker
from ftrun.worker.capture.device_order import GraphReplays, StepStreams

META = torch.device("meta")
"""Replaces a device: it has no memory, so that a step on it is quick."""


class Stream:
    """Records each use in `log`."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.device, self.log = name, META, log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class Device:
    """A device with one stream by default."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = self.main = Stream("main", self.log)

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self.current


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.accelerator, "current_stream", made.current_stream)
    return made


@pytest.fixture
def streams() -> Iterator[StepStreams]:
    made = StepStreams(lambda hook: hook)
    yield made
    made.close()


def optimizer_on(device: torch.device | str) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(3, device=device, requires_grad=True)])


def test_a_boundary_waits_for_the_stream_of_the_step_and_once(
    device: Device, streams: StepStreams
) -> None:
    optimizer = optimizer_on(META)
    device.current = Stream("own", device.log)
    optimizer.step()
    device.current = device.main
    streams.join()
    streams.join()
    assert device.log == ["main waits for own"]


def test_a_step_in_the_stream_of_the_boundary_costs_no_wait(
    device: Device, streams: StepStreams
) -> None:
    optimizer_on(META).step()
    streams.join()
    assert device.log == []


def test_a_step_on_the_cpu_asks_no_device(streams: StepStreams) -> None:
    """`torch.accelerator.current_stream` raises on a machine without a device."""
    optimizer_on("cpu").step()
    streams.join()


class Graph:
    """A key for `GraphReplays`; its methods replace those of torch's class."""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    for name in ("capture_begin", "capture_end", "replay"):
        monkeypatch.setattr(torch.cuda.CUDAGraph, name, lambda graph, name=name: made.append(name))
    return made


def call(name: str, graph: Graph) -> None:
    getattr(torch.cuda.CUDAGraph, name)(graph)


def captured(graph: Graph, *calls: Callable[[], Any]) -> None:
    call("capture_begin", graph)
    for one in calls:
        one()
    call("capture_end", graph)


def test_a_replay_names_the_optimizers_of_its_own_capture(log: list[str]) -> None:
    seen: list[object] = []

    def before(optimizers: Any) -> None:
        seen.extend(optimizers)
        log.append("before")

    replays = GraphReplays(lambda: log.append("settled"), before)
    stepping, other = optimizer_on("cpu"), optimizer_on("cpu")
    update, forward = Graph(), Graph()
    captured(update, stepping.step)
    captured(forward)
    other.step()
    assert log == ["settled", "capture_begin", "capture_end"] * 2
    call("replay", forward)
    call("replay", Graph())  # captured before attach
    assert seen == []
    call("replay", update)
    assert seen == [stepping]
    assert log[6:] == ["before", "replay"] * 3
    replays.close()
    call("replay", update)
    assert log[12:] == ["replay"]


def test_the_replay_of_an_update_ends_an_accumulation(log: list[str]) -> None:
    """Its capture runs no step, so it uses no gradients of the turn before."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def before(optimizers: Any) -> None:
        for one in optimizers:
            accumulation.before_step(one)

    replays = GraphReplays(lambda: None, before)
    hooks = replays.outside_captures
    accumulation = AccumulationTracker([optimizer], guarded=hooks)

    def turn(step: Callable[[], Any]) -> bool:
        model(torch.ones(2, 3)).sum().backward()
        is_pending = accumulation.boundary()
        step()
        optimizer.zero_grad(set_to_none=False)
        return is_pending and not accumulation.boundary()

    assert turn(optimizer.step)
    graph = Graph()
    captured(graph, optimizer.step)
    assert accumulation.crossing == []
    assert turn(lambda: call("replay", graph))
    assert turn(lambda: call("replay", graph))
    assert accumulation.crossing == []
    replays.close()
    accumulation.close()
