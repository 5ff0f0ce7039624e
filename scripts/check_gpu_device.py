"""Measurements of check_gpu.py on the device itself: copies, NVML, assumptions of the tests.

All but NVML goes through `torch.accelerator`, so that the device of the tests runs it too.
"""

import functools
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ftrun.agent.observe.device_memory import used_by_nvml
from ftrun.agent.observe.devices import Gpus, driver

TESTS = Path(__file__).parents[1] / "tests"
BACKENDS = {"cuda": "nccl", "fake": "fakeccl"}
"""The collectives of a device; gloo is the one of others."""

SLOW_CYCLES = 20_000_000
"""About 10 ms: the device is behind the host at each boundary, so that a missing wait shows."""

CYCLES_PER_S = 2_000_000_000
XID_S = 2.0
"""Required: the time after an illegal access in which the driver reports it."""

MUCH = 1 << 27

EVENT_TYPES = {
    "xid": 0x8,
    "double_bit_ecc": 0x2,
    "fatal_poison": 0x2000,
    "gpu_unavailable": 0x4000,
    "recovery_action_changed": 0x8000,
}
RECOVERY_ACTION = 230
"""NVML's numbers; an older package does not have all names."""


def load(device: str) -> None:
    """Make the device known to torch; the one of the tests is not part of it."""
    sys.path.append(str(TESTS))
    if device == "fake":
        from fake_device import collectives, fake

        fake.load()
        collectives.register()


def wait(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def delay(device: str) -> None:
    """Let the device fall behind; the one of the tests always is."""
    if device == "cuda":
        torch.cuda._sleep(SLOW_CYCLES)


def keep_spinning(device: str, for_s: float) -> None:
    """Queue work on the current stream that takes this time, at most; no wait of the host."""
    if device == "cuda":
        torch.cuda._sleep(int(for_s * CYCLES_PER_S))
        return
    from fake_device import fake

    current = torch.device(device, torch.accelerator.current_device_index())
    fake.call_in_stream(current, functools.partial(time.sleep, for_s))


def access_illegally(device: str) -> None:
    """Write to memory of the device that is not allocated; the process cannot use it again."""
    torch.zeros(1, device=device)
    storage = torch._C._construct_storage_from_data_pointer(1 << 40, torch.device(device, 0), 4096)
    torch.empty(0, dtype=torch.uint8, device=device).set_(storage).fill_(1)
    wait(device)


def xid_facts(command: list[str]) -> dict[str, Any]:
    """How a process with an illegal access ended, and what ftrun's observer of GPUs reports of it.

    The observer begins before the process does, and ends `XID_S` after it.
    """
    gpus = Gpus()
    gpus.poll()
    child = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    reports, end_s = [], time.monotonic() + XID_S
    while not reports and time.monotonic() < end_s:
        reports = [one for one in gpus.poll() if "XID" in one.text]
        time.sleep(0.05)
    return {
        "died": child.returncode,
        "error": child.stderr[-300:],
        "reports": [one.text for one in reports],
        "is_fault": any(one.is_fault for one in reports),
    }


def new_graph(device: str) -> Any:
    """None where torch has no graphs."""
    from fake_device import conformance

    if device == "cuda" or (device != "cpu" and hasattr(torch.accelerator, "Graph")):
        return conformance.new_graph(device)
    return None


@contextmanager
def captured(graph: Any, device: str) -> Iterator[None]:
    wait(device)
    gc.collect()  # what is freed during a capture may end it
    with torch.Stream(device):
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()


def random_state(device: str) -> torch.Tensor:
    state: torch.Tensor = torch.get_device_module(device).get_rng_state()
    return state


def free_bytes(device: str) -> int:
    """Of a GPU; little of other devices, because it is memory of the host."""
    found = int(torch.get_device_module(device).mem_get_info()[0]) if device != "cpu" else MUCH
    return found if device == "cuda" else min(found, MUCH)


def rates(device: str) -> dict[str, float]:
    """Copies between host and device in GB/s, and the time to allocate memory of the host."""
    size = 1 << 30 if device == "cuda" else 1 << 24
    there = torch.ones(size, dtype=torch.uint8, device=device)
    found: dict[str, float] = {}
    for kind in ("pageable", "pinned"):
        is_pinned, started_s = kind == "pinned" and device != "cpu", time.monotonic()
        here = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
        found[f"allocate_{kind}_s_per_gib"] = (time.monotonic() - started_s) * (1 << 30) / size
        for name, target, source in (("d2h", here, there), ("h2d", there, here)):
            times_s = []
            for _ in range(5):
                wait(device)
                started_s = time.monotonic()
                target.copy_(source, non_blocking=True)
                wait(device)
                times_s.append(time.monotonic() - started_s)
            found[f"{name}_{kind}_gb_per_s"] = size / 1e9 / statistics.median(times_s[1:])
    return {key: round(value, 4) for key, value in found.items()}


def pinning(device: str) -> dict[str, float]:
    """Seconds to pin memory, which other processes wait for in their calls to the driver."""
    found: dict[str, float] = {}
    for mib in (128, 4096) if device == "cuda" else (1,):
        started_s = time.monotonic()
        torch.empty(mib << 20, dtype=torch.uint8, pin_memory=True)
        found[f"pin_{mib}_mib_s"] = round(time.monotonic() - started_s, 3)
    return found


def nvml_facts() -> dict[str, Any]:
    """What NVML gives for the first GPU; empty without its package or driver."""
    nvml = driver()
    if nvml is None:
        return {"NVML": "no package or no driver"}
    device = nvml.nvmlDeviceGetHandleByIndex(0)
    found: dict[str, Any] = {
        "driver": str(nvml.nvmlSystemGetDriverVersion()),
        "used_mib": sum(used_by_nvml()().values()) >> 20,
    }
    events = nvml.nvmlEventSetCreate()
    for name, kind in EVENT_TYPES.items():
        try:
            nvml.nvmlDeviceRegisterEvents(device, kind, events)
            found[name] = "registered"
        except nvml.NVMLError as error:
            found[name] = str(error)
    try:
        (value,) = nvml.nvmlDeviceGetFieldValues(device, [RECOVERY_ACTION])
        found["recovery_action"] = value.value.uiVal if not value.nvmlReturn else "not known"
    except nvml.NVMLError as error:
        found["recovery_action"] = str(error)
    return found


def assumptions() -> dict[str, Callable[[str], None]]:
    """What the tests assume about a device, by name."""
    from fake_device.conformance import CHECKS

    return CHECKS


def holds(check: Callable[[str], None], device: str) -> str:
    """Empty if an assumption holds on the device, else what is different."""
    try:
        check(f"{device}:0")
    except Exception as error:  # noqa: BLE001 - the others are checked too
        return f"{type(error).__name__}: {error}"[:200]
    return ""
