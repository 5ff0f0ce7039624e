"""A generation starts when the device memory of the ranks before it is free, or at the limit."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Event

import pytest
from fake_nvml.fake import STATE, search_path

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
        self.num_reads = 0

    def __call__(self) -> Mapping[str, int]:
        self.num_reads += 1
        return {"GPU 0": self.values.pop(0) if len(self.values) > 1 else self.values[0]}


def test_a_start_waits_until_the_memory_is_free(caplog: pytest.LogCaptureFixture) -> None:
    gpu = Gpu(0, 50 * GB, 20 * GB, 1)
    memory = DeviceMemory(gpu, limit_s=60.0)
    memory.before_start()
    assert memory.wait(since_s=clock.now_s()) > 0.09
    assert (gpu.values, gpu.num_reads) == ([1], 4)
    memory.wait(since_s=clock.now_s())
    assert gpu.num_reads == 5
    assert caplog.messages == []


def test_at_the_limit_the_holders_are_named_and_not_awaited_again(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linux, "DEVICE_FILES", (str(tmp_path),))
    gpu = Gpu(0, 50 * GB)
    memory = DeviceMemory(gpu, limit_s=0.1)
    memory.before_start()
    with (tmp_path / "card0").open("w") as card:
        took_s = memory.wait(since_s=clock.now_s())
    assert took_s >= 0.1
    (text,) = caplog.messages
    assert "not free after 0 s (GPU 0: 50.0 GB)" in text
    assert card.name in text
    num_reads = gpu.num_reads
    memory.wait(since_s=clock.now_s())
    assert gpu.num_reads == num_reads + 1
    assert len(caplog.messages) == 1


def test_a_driver_that_does_not_answer_costs_the_wait_and_not_the_start(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "_ANSWER_S", 0.01)
    answers = Event()

    def used_bytes() -> Mapping[str, int]:
        answers.wait(60.0)
        return {"GPU 0": 0}

    memory = DeviceMemory(used_bytes, limit_s=60.0)
    memory.before_start()
    answers.set()
    memory.before_start()
    assert memory.wait(since_s=clock.now_s()) < 30.0
    (text,) = caplog.messages
    assert text.startswith("NVML has not answered for 0 s. Later generations")


def test_a_driver_that_hangs_later_costs_one_wait(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = Event()

    def used_bytes() -> Mapping[str, int]:
        if hangs.is_set():
            Event().wait(60.0)
        return {"GPU 0": 0}

    memory = DeviceMemory(used_bytes, limit_s=0.1)
    memory.before_start()
    monkeypatch.setattr(device_memory, "_ANSWER_S", 0.01)
    hangs.set()
    assert memory.wait(since_s=clock.now_s()) < 30.0
    assert memory.wait(since_s=clock.now_s()) < 30.0
    (text,) = caplog.messages
    assert "The ranks start now." in text


def test_a_machine_without_a_driver_has_nothing_to_wait_for() -> None:
    assert used_by_nvml()() == {}


IN_A_PROCESS = """
import json, subprocess, sys, time
from pathlib import Path
from fake_nvml.fake import LOST, FakeGpus, load
from ftrun import clock
from ftrun.agent.observe import device_memory
from ftrun.agent.observe.device_memory import DeviceMemory, used_by_nvml

load()
device_memory._DRIVER = sys.argv[1]
gpus = FakeGpus(Path(sys.argv[1]), 3)
for index in range(3):
    gpus.use(index, 100 + index)
"""


def in_a_process(folder: Path, code: str) -> str:
    """Run code in a process in which the package of NVML has the library of the tests."""
    state = str(folder / "gpus")
    env = {name: one for name, one in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS + code, state],
        env={**env, STATE: state, "PYTHONPATH": search_path()},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_only_the_visible_devices_are_read(tmp_path: Path) -> None:
    code = """
import os
assert used_by_nvml()() == {"GPU 0": 100, "GPU 1": 101, "GPU 2": 102}
for visible, expected in (
    ("1", {"GPU 1": 101}),
    ("1,-1,0", {"GPU 1": 101}),
    ("GPU-2", {"GPU-2": 102}),
    ("", {}),
    ("5,1", {"GPU 1": 101}),
):
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    assert used_by_nvml()() == expected, visible
"""
    in_a_process(tmp_path, code)


def test_a_start_waits_until_the_memory_of_a_killed_process_is_free(tmp_path: Path) -> None:
    """GPU 0 is lost at the end. The others are awaited as before."""
    code = """
memory = DeviceMemory(used_by_nvml(), limit_s=100.0)
memory.before_start()
with subprocess.Popen(["sleep", "1000"]) as rank:
    gpus.hold(1, rank.pid, 50 << 30, late_s=0.5)
    gpus.fail(0, LOST)
    assert used_by_nvml()() == {"GPU 1": 101 + (50 << 30), "GPU 2": 102}
    rank.kill()
took_s = memory.wait(since_s=clock.now_s())
assert 0.4 < took_s < 60.0, took_s
assert memory.wait(since_s=clock.now_s()) < 5.0
"""
    assert in_a_process(tmp_path, code) == ""


def test_memory_that_does_not_come_back_costs_the_limit_once(tmp_path: Path) -> None:
    code = """
memory = DeviceMemory(used_by_nvml(), limit_s=0.3)
memory.before_start()
gpus.hold(2, 1, 2 << 30)
assert memory.wait(since_s=clock.now_s()) >= 0.3
print("once")
assert memory.wait(since_s=clock.now_s()) < 5.0
"""
    assert "(GPU 2: 2.1 GB)" in in_a_process(tmp_path, code)
