"""Waits until the device memory of ended ranks is free again.

Runs in the main thread; NVML is called in separate threads. If the memory is not freed, or the
driver does not answer, the generation starts anyway, and later ones do not wait for that driver.

The driver frees the memory of a process after its end, when the last descriptor of its context is
closed. A generation that starts earlier can run out of memory.

Rule 1: the reference value is read before the first generation starts. If the driver has not
        answered by then, there is no reference, because later values include the ranks.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from ftrun import clock, process_tree
from ftrun.agent.observe.devices import BoundedCall, driver
from ftrun.linux import open_device_files

_log = logging.getLogger(__name__)

TOLERANCE_BYTES = 1 << 30
"""Allowed growth of other processes on a GPU."""
STANDBY_BYTES = 1 << 30
"""Upper bound of the device memory of a standby that has initialised a GPU."""

_ANSWER_S = 2.0
_POLL_S = 0.05
_DRIVER = "/dev/nvidiactl"
_MAX_NAMED = 8

UsedBytes = Callable[[], Mapping[str, int]]


def still_used(
    before: Mapping[str, int], now: Mapping[str, int], *, allowed_bytes: int = TOLERANCE_BYTES
) -> dict[str, int]:
    """Bytes by device above the value before the first generation; empty: all are free."""
    more = {name: now.get(name, 0) - num_bytes for name, num_bytes in before.items()}
    return {name: num_bytes for name, num_bytes in more.items() if num_bytes > allowed_bytes}


class DeviceMemory:
    """The memory of the GPUs of this node, compared with its state before the first generation."""

    def __init__(self, used_bytes: UsedBytes, *, limit_s: float) -> None:
        self._limit_s = limit_s
        self._before: Mapping[str, int] | None = None
        self._read = BoundedCall[Mapping[str, int]](used_bytes, otherwise={})
        self._read.begin()

    def before_start(self) -> None:
        """Call this before ranks start: wait for the reference value; a later one is not used."""
        if self._before is None:
            self._before = self._read.answer(_ANSWER_S)
        if self._before is None:
            self._not_answered("")

    def wait(self, *, since_s: float, standbys_use_it: bool = False) -> float:
        """Wait until the memory is free, at most `limit_s` after `since_s`; return the seconds.

        The driver gets at least `_ANSWER_S`. `standbys_use_it`: bound standbys hold contexts.
        """
        began_s = clock.now_s()
        allowed_bytes = TOLERANCE_BYTES + (STANDBY_BYTES if standbys_use_it else 0)
        while self._before:
            left_s = since_s + self._limit_s - clock.now_s()
            used = self._read.answer(max(left_s, _ANSWER_S))
            if used is None:
                self._not_answered("The ranks start now. ")
                break
            if not (left := still_used(self._before, used, allowed_bytes=allowed_bytes)):
                break
            if left_s <= 0:
                self._give_up(left)
                # Other processes use the rest, or it is lost: later waits do not include it.
                self._before = used
                break
            clock.sleep(_POLL_S)
        return clock.now_s() - began_s

    def _not_answered(self, what_follows: str) -> None:
        self._before = {}
        _log.warning(
            "NVML has not answered for %.0f s. %sLater generations of this node do not wait until "
            "device memory is free", self._read.unresponsive_s, what_follows,
        )  # fmt: skip

    def _give_up(self, left: Mapping[str, int]) -> None:
        amounts = ", ".join(f"{name}: {n / 1e9:.1f} GB" for name, n in sorted(left.items()))
        _log.warning(
            "device memory of the ranks that ended is not free after %.0f s (%s). The ranks start "
            "now. Device files are open in: %s",
            self._limit_s, amounts, "; ".join(_holders()) or "no process of this user",
        )  # fmt: skip


def _holders() -> Iterator[str]:
    num_named = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        if files := open_device_files(name):
            num_named += 1
            if num_named > _MAX_NAMED:
                return
            yield f"{process_tree.name_of(int(name))} (pid {name}): {', '.join(files)}"


def used_by_nvml() -> UsedBytes:
    loaded = cache(lambda: driver() if os.path.exists(_DRIVER) else None)

    def used_bytes() -> dict[str, int]:
        nvml: Any = loaded()
        found: dict[str, int] = {}
        for name in _visible_devices(nvml) if nvml is not None else ():
            # Another module reports a failing device; no wait includes it.
            with suppress(nvml.NVMLError):
                found[name] = int(nvml.nvmlDeviceGetMemoryInfo(_handle(nvml, name)).used)
        return found

    return used_bytes


def _visible_devices(nvml: Any) -> Iterator[str]:
    """CUDA_VISIBLE_DEVICES has indices, or UUIDs of GPUs and MIG instances."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        with suppress(nvml.NVMLError):
            yield from (f"GPU {index}" for index in range(nvml.nvmlDeviceGetCount()))
        return
    for name in filter(None, map(str.strip, wanted.split(","))):
        if name.startswith("-"):
            return  # CUDA ignores what follows
        yield f"GPU {name}" if name.isdigit() else name


def _handle(nvml: Any, name: str) -> Any:
    number = name.removeprefix("GPU ")
    if number.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(number))
    return nvml.nvmlDeviceGetHandleByUUID(name)
