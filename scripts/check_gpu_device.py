"""Measurements of check_gpu.py on the device itself: copies, NVML, assumptions of the tests."""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ftrun.agent.observe.device_memory import used_by_nvml
from ftrun.agent.observe.devices import driver

EVENT_TYPES = {
    "xid": 0x8,
    "double_bit_ecc": 0x2,
    "fatal_poison": 0x2000,
    "gpu_unavailable": 0x4000,
    "recovery_action_changed": 0x8000,
}
RECOVERY_ACTION = 230
"""NVML's numbers; an older package does not have all names."""


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rates(device: str) -> dict[str, float]:
    """Copies between host and device in GB/s, and the time to pin memory."""
    size = 1 << 30 if device == "cuda" else 1 << 24
    there = torch.ones(size, dtype=torch.uint8, device=device)
    found: dict[str, float] = {}
    for kind in ("pageable", "pinned"):
        is_pinned, started_s = kind == "pinned" and device == "cuda", time.monotonic()
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
    return {key: round(value, 2) for key, value in found.items()}


def pinning() -> dict[str, float]:
    """Seconds to pin memory, which other processes wait for in their calls to the driver."""
    found: dict[str, float] = {}
    for mib in (128, 4096):
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


def conformance(device: str) -> dict[str, str]:
    """By assumption: empty if it holds on the device, else what is different."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from fake_device.conformance import CHECKS

    found: dict[str, str] = {}
    for name, check in CHECKS.items():
        try:
            check(f"{device}:0")
            found[name] = ""
        except (AssertionError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found
