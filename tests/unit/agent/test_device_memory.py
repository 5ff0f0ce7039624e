"""A generation starts when the device memory of the ranks before it is free, or at the limit."""

import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from ftrun import clock, linux
from ftrun.agent.observe import device_memory
from ftrun.agent.observe.device_memory import (
    TOLERANCE_BYTES,
    DeviceMemory,
    still_used,
    used_by_nvml,
)

GB = 10**9


def test_memory_is_back_within_the_tolerance_of_each_device() -> None:
    before = {"GPU 0": 1 * GB, "GPU 1": 0}
    assert still_used(before, before) == {}
    assert still_used(before, {"GPU 0": 1 * GB + TOLERANCE_BYTES, "GPU 1": 0}) == {}
    assert still_used(before, {"GPU 0": 0, "GPU 1": 9 * GB, "GPU 2": 9 * GB}) == {"GPU 1": 9 * GB}
    assert still_used(before, {}) == {}
    assert still_used({}, {"GPU 0": 9 * GB}) == {}


class Gpu:
    """Memory in use: one value per read, then the last one again."""

    def __init__(self, *values: int) -> None:
        self.values = list(values)

    def __call__(self) -> Mapping[str, int]:
        return {"GPU 0": self.values.pop(0) if len(self.values) > 1 else self.values[0]}


def test_a_start_waits_until_the_memory_is_free(caplog: pytest.LogCaptureFixture) -> None:
    gpu = Gpu(0, 50 * GB, 20 * GB, 1)
    memory = DeviceMemory(gpu, limit_s=60.0)
    memory.before_start()
    assert 0.09 < memory.wait(since_s=clock.now_s()) < 30.0
    assert gpu.values == [1]
    assert memory.wait(since_s=clock.now_s()) < 0.04
    assert caplog.messages == []


def test_at_the_limit_the_holders_are_named_and_not_awaited_again(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linux, "DEVICE_FILES", (str(tmp_path),))
    memory = DeviceMemory(Gpu(0, 50 * GB), limit_s=0.1)
    memory.before_start()
    with (tmp_path / "card0").open("w") as card:
        took_s = memory.wait(since_s=clock.now_s())
    assert took_s >= 0.1
    (text,) = caplog.messages
    assert "not free after 0 s (GPU 0: 50.0 GB)" in text
    assert card.name in text
    assert memory.wait(since_s=clock.now_s()) < 0.04
    assert len(caplog.messages) == 1


def test_a_driver_that_does_not_answer_costs_the_wait_and_not_the_start(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "_FIRST_READ_S", 0.01)
    answers = Event()

    def used_bytes() -> Mapping[str, int]:
        answers.wait(60.0)
        return {"GPU 0": 0}

    memory = DeviceMemory(used_bytes, limit_s=60.0)
    memory.before_start()
    answers.set()
    memory._read.join(60.0)
    memory.before_start()
    assert memory.wait(since_s=clock.now_s()) == pytest.approx(0.0, abs=0.04)
    assert [text.split(":")[0] for text in caplog.messages] == ["NVML has not answered within 0 s"]


def test_a_machine_without_a_driver_has_nothing_to_wait_for() -> None:
    assert used_by_nvml()() == {}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, {"GPU 0": 100, "GPU 1": 101}),
        ("1", {"GPU 1": 101}),
        ("1,-1,0", {"GPU 1": 101}),
        ("GPU-7", {"GPU-7": 107}),
        ("", {}),
        ("5", {}),
    ],
)
def test_only_the_visible_devices_are_read(
    visible: str | None,
    expected: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interface of NVML's package; the real one runs in scripts/check_gpu.py."""

    def by_index(index: int) -> int:
        if index > 1:
            raise OSError("invalid argument")
        return index

    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=by_index,
        nvmlDeviceGetHandleByUUID=lambda name: int(name.rpartition("-")[2]),
        nvmlDeviceGetMemoryInfo=lambda device: SimpleNamespace(used=100 + device),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(device_memory, "_DRIVER", str(tmp_path))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert used_by_nvml()() == expected
