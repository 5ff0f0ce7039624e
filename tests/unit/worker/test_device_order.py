"""Streams wait for the steps before a snapshot reads, and for its reads."""

from collections.abc import Iterator

import pytest
import torch

from ftrun.worker.capture.device_order import StepStreams

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
    assert device.log == ["main waits for own"]
    streams.release()
    assert device.log == ["main waits for own", "own waits for main"]
    streams.join()
    streams.release()
    assert len(device.log) == 2


def test_a_step_in_the_stream_of_the_boundary_costs_no_wait(
    device: Device, streams: StepStreams
) -> None:
    optimizer_on(META).step()
    streams.join()
    streams.release()
    assert device.log == []


def test_a_step_on_the_cpu_asks_no_device(streams: StepStreams) -> None:
    """`torch.accelerator.current_stream` raises on a machine without a device."""
    optimizer_on("cpu").step()
    streams.join()
