"""Error counters of network cards and GPUs: errors, lost links, throttling.

Runs in:  agent, the thread of the rank observer.
Takes in: /sys/class/net, /sys/class/infiniband; for GPUs NVML, if its package and driver are
          present.
Gives:    sentences about what was counted since the last poll; none if nothing was. For the process
          of the preflight check the faults and warnings of all GPUs.
Survives: missing devices: a machine without them reports nothing.
Source:   the counters are the kernel's (Documentation/ABI/testing/sysfs-class-net-statistics,
          sysfs-class-infiniband) and NVML's; which of them matter: docs/papers.md, C4 and Aegis.

Rule 1: NVML is loaded at the first poll of a node whose ranks use a GPU, never before, because
        loading it wakes the driver.
"""

from collections import deque
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

EVERY_S = 5.0
_RECENT_S = 120.0
_KEPT = 8
_NET = ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_crc_errors", "tx_carrier_errors")
_PORT = ("symbol_error", "link_downed", "port_rcv_errors", "port_xmit_discards")
_WORDS = {
    "carrier_down_count": "link lost",
    "link_downed": "link lost",
}


class DeviceCounters:
    """The counters of one node; each poll reports what is new since the last one."""

    def __init__(self, system: Path = Path("/sys")) -> None:
        self._system = system
        self._due_s = 0.0
        self._before: dict[str, int] = {}
        self._gpus: _Gpus | None = None

    def poll(self, now_s: float, *, on_device: bool) -> tuple[str, ...]:
        """What was counted since the last poll, if a poll is due."""
        if now_s < self._due_s:
            return ()
        is_first = not self._due_s
        self._due_s = now_s + EVERY_S
        counts = self._network()
        if on_device:
            self._gpus = self._gpus or _Gpus()
            counts |= self._gpus.counts()
        before, self._before = self._before, {**self._before, **counts}
        if is_first:
            return ()
        # The first value of a counter may have accumulated over years.
        grown = {key: n - before[key] for key, n in counts.items() if n > before.get(key, n)}
        found = [_as_text(key, more) for key, more in sorted(grown.items())]
        if self._gpus is not None:
            found += self._gpus.take_new_errors()
        return tuple(found)

    def _network(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for device in _entries(self._system / "class" / "net"):
            if device.name == "lo":
                continue
            _read(found, device.name, device / "statistics", _NET)
            _read(found, device.name, device, ("carrier_down_count",))
        for device in _entries(self._system / "class" / "infiniband"):
            for port in _entries(device / "ports"):
                _read(found, f"{device.name} port {port.name}", port / "counters", _PORT)
        return found


class RecentDeviceErrors:
    """Recent device errors, for verdicts that may follow; in the main thread."""

    def __init__(self) -> None:
        self._reported: deque[tuple[float, str]] = deque(maxlen=_KEPT)

    def take(self, new_errors: "SimpleQueue[str]", *, now_s: float) -> list[str]:
        found: list[str] = []
        with suppress(Empty):
            while True:
                found.append(new_errors.get_nowait())
        self._reported.extend((now_s, text) for text in found)
        while self._reported and now_s - self._reported[0][0] > _RECENT_S:
            self._reported.popleft()
        return found

    @property
    def recent(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text for _, text in self._reported))


class _Gpus:
    """The GPUs of NVML, if it is present."""

    def __init__(self) -> None:
        self._events: Any = None
        self._new_errors: list[str] = []
        self._throttled: dict[int, bool] = {}
        self._nvml = driver()
        if self._nvml is not None:
            self._listen()

    def take_new_errors(self) -> list[str]:
        new_errors, self._new_errors = self._new_errors, []
        return new_errors

    def counts(self) -> dict[str, int]:
        nvml, found = self._nvml, dict[str, int]()
        for index, device in self._devices():
            with suppress(Exception):  # unknown to some devices
                found[f"GPU {index} uncorrectable_memory_errors"] = uncorrectable_errors(
                    nvml, device
                )
            self._check_clocks(index, device)
        self._receive()
        return found

    def _devices(self) -> list[tuple[int, Any]]:
        nvml, found = self._nvml, list[tuple[int, Any]]()
        with suppress(Exception):
            count = nvml.nvmlDeviceGetCount() if nvml is not None else 0
            found = [(index, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
        return found

    def _check_clocks(self, index: int, device: Any) -> None:
        with suppress(Exception):
            message = slowdown(self._nvml, device)
            if message and not self._throttled.get(index, False):
                self._new_errors.append(f"GPU {index} {message}")
            self._throttled[index] = bool(message)

    def _listen(self) -> None:
        nvml = self._nvml
        with suppress(Exception):
            self._events = nvml.nvmlEventSetCreate()
            for _, device in self._devices():
                nvml.nvmlDeviceRegisterEvents(
                    device, nvml.nvmlEventTypeXidCriticalError, self._events
                )

    def _receive(self) -> None:
        """Read the errors that the driver has reported (XID).

        If there is none, the wait ends with an exception.
        """
        if self._events is None:
            return
        with suppress(Exception):
            while True:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                index = self._nvml.nvmlDeviceGetIndex(event.device)
                self._new_errors.append(f"GPU {index} has reported XID {event.eventData}")


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(found: dict[str, int], name: str, folder: Path, counters: tuple[str, ...]) -> None:
    for counter in counters:
        with suppress(OSError, ValueError):
            found[f"{name} {counter}"] = int((folder / counter).read_text())


def _as_text(key: str, more: int) -> str:
    device, _, counter = key.rpartition(" ")
    if counter in _WORDS:
        return f"{device}: {_WORDS[counter]} {more:,} times"
    return f"{device} {counter.replace('_', ' ')}: {more:,} more"


def driver() -> Any:
    """NVML, initialised; None without package, driver or device."""
    try:
        import pynvml  # type: ignore[import-not-found, unused-ignore]

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - of whatever kind: there is nothing to say
        return None
    return pynvml


def uncorrectable_errors(nvml: Any, device: Any) -> int:
    """Uncorrectable memory errors since the driver was loaded.

    Raises:
        NVMLError: unknown to this device.
    """
    return int(
        nvml.nvmlDeviceGetTotalEccErrors(
            device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    )


def slowdown(nvml: Any, device: Any) -> str:
    """Text that says that heat or a fault throttles the device; empty: not throttled.

    Raises:
        NVMLError: unknown to this device.
    """
    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)
    bad = nvml.nvmlClocksThrottleReasonHwSlowdown | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
    return f"is slowed down (reasons {reasons:#x})" if reasons & bad else ""


def device_health() -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """Number of GPUs, faults, and warnings about throttling; empty without a driver."""
    nvml = driver()
    if nvml is None:
        return 0, (), ()
    faults: list[str] = []
    remarks: list[str] = []
    count = 0
    with suppress(nvml.NVMLError):
        count = nvml.nvmlDeviceGetCount()
    for index in range(count):
        _check(nvml, index, faults, remarks)
    with suppress(nvml.NVMLError):
        nvml.nvmlShutdown()
    return count, tuple(faults), tuple(remarks)


def _check(nvml: Any, index: int, faults: list[str], remarks: list[str]) -> None:
    try:
        device = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        faults.append(f"GPU {index} does not answer: {error}")
        return
    with suppress(nvml.NVMLError):  # each is unknown to some devices
        if count := uncorrectable_errors(nvml, device):
            faults.append(f"GPU {index} has {count:,} uncorrectable memory errors since its reset")
    with suppress(nvml.NVMLError):
        _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(device)
        if has_failed:
            faults.append(f"GPU {index} could not replace a broken row of its memory")
        elif is_pending:
            faults.append(f"GPU {index} needs a reset: rows of its memory are to be replaced")
    with suppress(nvml.NVMLError):
        if message := slowdown(nvml, device):
            remarks.append(f"GPU {index} {message}")
