"""Initialises the device of a standby before its launch, for `start.device: context`.

Runs in:  standby. No code of the user has run there.
Takes in: a `BindDevice`: a local rank, and the variables of the rank that runs in that place now.
Gives:    a process with a device context, loaded libraries for matrix products, and the buffers
          for copies. A rank that starts from it does not wait for them.
Survives: nothing; if anything fails, the standby ends, and ranks initialise the device themselves.

Rule 1: the script finds what it finds in a new process, except that the device is initialised: the
        same current device, random numbers and counters of the allocator.
"""

import os
from typing import Any

import torch

from ftrun.wire.messages.worker import BindDevice, DeviceBound
from ftrun.worker.capture.device_copies import device_at

MIN_FREE_BYTES = 2 << 30
"""Device memory that must stay free for the ranks."""

_SIZE = 128
_SMALL_BYTES = 1 << 20
_MAX_TEXT = 300


def bind(order: BindDevice) -> DeviceBound:
    """Initialise the device with index `local_rank` modulo their number."""
    os.environ.update(order.variables)
    try:
        accelerator = torch.accelerator.current_accelerator()
        count = torch.accelerator.device_count() if accelerator is not None else 0
        if accelerator is None or not count:
            return DeviceBound(problem="there is no device that torch can use")
        device = torch.device(accelerator.type, order.local_rank % count)
        with torch.accelerator.device_index(device.index):
            return _initialise(device)
    except Exception as error:  # noqa: BLE001 - a driver may raise anything
        text = str(error)[:_MAX_TEXT]  # with a stack of C++, it may have many pages
        return DeviceBound(problem=f"a standby failed: {type(error).__name__}: {text}")


def _initialise(device: torch.device) -> DeviceBound:
    module: Any = torch.get_device_module(device)
    name_of = getattr(module, "get_device_name", None)
    if name_of is not None and " MIG " in name_of(device):
        return DeviceBound(problem=f"{device} is a MIG instance")
    memory_of = getattr(module, "mem_get_info", None)
    if (problem := _too_full(device, memory_of)) is not None:
        return problem
    _load_libraries(device)
    if (copies := device_at(device)) is not None:
        copies.prepare()
    torch.accelerator.synchronize(device)
    _forget_allocations(module)
    if (problem := _too_full(device, memory_of)) is not None:
        return problem
    free_bytes = memory_of(device)[0] if memory_of is not None else -1
    return DeviceBound(device=str(device), free_bytes=free_bytes)


def _load_libraries(device: torch.device) -> None:
    torch.empty(_SMALL_BYTES, dtype=torch.uint8, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device)
        torch.mm(square, square)


def _too_full(device: torch.device, memory_of: Any) -> DeviceBound | None:
    if memory_of is None or (free_bytes := memory_of(device)[0]) >= MIN_FREE_BYTES:
        return None
    return DeviceBound(
        problem=f"{free_bytes / 1e9:.1f} GB of {device} are free, and {MIN_FREE_BYTES / 1e9:.1f} "
        "GB must stay free"
    )


def _forget_allocations(module: Any) -> None:
    """Rule 1: free what the matrix products have used, and clear the counters."""
    clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear_workspaces is not None:
        clear_workspaces()
    for name in ("empty_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        function = getattr(module, name, None)
        if function is not None:
            function()
