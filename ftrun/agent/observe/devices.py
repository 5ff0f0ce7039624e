"""Error counters of network cards and GPUs: errors, lost links, throttling.

Runs in the thread of the rank observer; calls of NVML in threads of their own. A GPU that is lost
and a driver that does not answer are reported, and the ranks are observed as before.

Source:   the counters are the kernel's (Documentation/ABI/testing/sysfs-class-net-statistics,
          sysfs-class-infiniband) and NVML's; which of them matter: docs/papers.md, C4 and Aegis.

Rule 1: NVML is loaded at the first poll of a node whose ranks use a GPU, never before, because
        loading it wakes the driver.
Rule 2: each call of NVML has a deadline. It may hang in the driver, for example after a GPU has
        fallen off the bus, or wait for another process that page-locks memory.
"""

import ctypes
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from ftrun import clock
from ftrun.monitor.device_faults import DeviceReport, recovery_report, xid_report

_log = logging.getLogger(__name__)

EVERY_S = 5.0
_ANSWER_S = 0.2
_UNRESPONSIVE_S = 10.0
_MAX_XIDS = 32
"""XIDs that are reported of one poll; the driver keeps the others for the next."""

_RECENT_S = 120.0
_KEPT = 8
_NET = ("rx_errors", "tx_errors", "rx_crc_errors", "tx_carrier_errors")
"""Without dropped packets: a card drops every frame that no program on the node asks for."""
_PORT = ("symbol_error", "link_downed", "port_rcv_errors", "port_xmit_discards")
_WORDS = {"carrier_down_count": "link lost", "link_downed": "link lost"}


T = TypeVar("T")


class BoundedCall(Generic[T]):
    """Calls a function in a thread of its own, so that its one caller has a deadline.

    `otherwise` is the answer if it fails.
    """

    def __init__(self, function: Callable[[], T], *, otherwise: T) -> None:
        self._function = function
        self._otherwise = otherwise
        self._answers: SimpleQueue[T] = SimpleQueue()
        self._asked_s: float | None = None

    def begin(self) -> None:
        if self._asked_s is None:
            self._asked_s = clock.now_s()
            try:
                threading.Thread(target=self._call, name="ftrun-bounded", daemon=True).start()
            except RuntimeError:  # no more threads
                self._answers.put(self._otherwise)

    def answer(self, timeout_s: float) -> T | None:
        """The answer of the call in progress, or of a new one; None: not within `timeout_s`."""
        self.begin()
        try:
            found = self._answers.get(timeout=max(0.0, timeout_s))
        except Empty:
            return None
        self._asked_s = None
        return found

    @property
    def unresponsive_s(self) -> float:
        """Seconds since the call in progress began; 0: none is in progress."""
        return 0.0 if self._asked_s is None else clock.now_s() - self._asked_s

    def _call(self) -> None:
        try:
            self._answers.put(self._function())
        except Exception:  # noqa: BLE001 - a caller must not wait for ever
            _log.debug("a call of a driver or of a file system failed", exc_info=True)
            self._answers.put(self._otherwise)


class DeviceCounters:
    """The counters of one node; each poll reports what is new since the last one."""

    def __init__(self, system: Path = Path("/sys")) -> None:
        self._system = system
        self._due_s = 0.0
        self._before: dict[str, int] = {}
        self._gpus: BoundedCall[list[DeviceReport]] | None = None
        self._is_unresponsive = False

    def poll(self, now_s: float, *, on_device: bool) -> tuple[DeviceReport, ...]:
        if now_s < self._due_s:
            return ()
        is_first = not self._due_s
        self._due_s = now_s + EVERY_S
        counts = self._network()
        before, self._before = self._before, counts
        found: list[DeviceReport] = []
        if not is_first:  # The first value of a counter may have accumulated over years.
            grown = {key: n - before[key] for key, n in counts.items() if n > before.get(key, n)}
            found = [DeviceReport(_as_text(key, more)) for key, more in sorted(grown.items())]
        return (*found, *self._of_gpus(on_device=on_device))

    def _of_gpus(self, *, on_device: bool) -> list[DeviceReport]:
        """Once a rank has used a device, also while the next generation has not yet."""
        if self._gpus is None:
            if not on_device:
                return []
            self._gpus = BoundedCall(Gpus().poll, otherwise=[])
        found = self._gpus.answer(_ANSWER_S)
        was_unresponsive, self._is_unresponsive = (
            self._is_unresponsive,
            self._gpus.unresponsive_s >= _UNRESPONSIVE_S,
        )
        if self._is_unresponsive and not was_unresponsive:
            # It may only be busy, for example with page-locking much memory.
            text = f"the GPUs' driver (NVML) has not answered for {self._gpus.unresponsive_s:.0f} s"
            return [DeviceReport(text)]
        return found or []

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

    def __init__(self, fault: str) -> None:
        self.fault = fault
        """The first hardware fault of this node, in words. It stays until the run ends here: the
        operator has to repair the node. Empty: none."""
        self._reported: deque[tuple[float, str]] = deque(maxlen=_KEPT)

    def take(self, new_errors: "SimpleQueue[DeviceReport]", *, now_s: float) -> list[str]:
        found: list[str] = []
        with suppress(Empty):
            while True:
                report = new_errors.get_nowait()
                found.append(report.text)
                self.fault = self.fault or (report.text if report.is_fault else "")
        self._reported.extend((now_s, text) for text in found)
        while self._reported and now_s - self._reported[0][0] > _RECENT_S:
            self._reported.popleft()
        return found

    @property
    def recent(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text for _, text in self._reported))


class Gpus:
    """The GPUs of NVML, if it is present; for one thread at a time."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._is_loaded = False
        self._events: Any = None
        self._index_of: dict[int, int] = {}
        """By the address of a handle. A lost GPU does not answer which index it has."""
        self._errors: dict[int, int] = {}
        self._xid_counts: Counter[tuple[str, int]] = Counter()
        self._reported: dict[tuple[int, str], str] = {}

    def poll(self) -> list[DeviceReport]:
        """What is new since the last poll; of the first one only what is wrong now."""
        if not self._is_loaded:
            self._nvml, self._is_loaded = driver(), True
            if self._nvml is not None:
                self._listen()
        if self._nvml is None:
            return []
        found: list[DeviceReport] = []
        for index in range(self._count()):
            found += self._check(index)
        found += self._xids()
        return [one if _is_ours(one.text) else DeviceReport(one.text) for one in found]

    def _count(self) -> int:
        with suppress(self._nvml.NVMLError):
            return int(self._nvml.nvmlDeviceGetCount())
        return 0

    def _check(self, index: int) -> list[DeviceReport]:
        nvml, name, more = self._nvml, f"GPU {index}", 0
        now = dict.fromkeys(("lost", "slow", "action"), DeviceReport(""))
        try:
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            with _unknown_suppressed(nvml):
                count = uncorrectable_errors(nvml, device)
                more = count - self._errors.get(index, count)
                self._errors[index] = count
            with _unknown_suppressed(nvml):
                if text := slowdown(nvml, device):
                    now["slow"] = DeviceReport(f"{name} {text}")
            with _unknown_suppressed(nvml):
                if action := recovery_action(nvml, device):
                    now["action"] = recovery_report(name, action)
        except nvml.NVMLError_NoPermission:
            return []  # a GPU of another job; the driver counts it nevertheless
        except nvml.NVMLError as error:
            text = f"{name} does not answer: {error}"
            now["lost"] = DeviceReport(text, is_fault=_is_lost(nvml, error))
        found = []
        if more > 0:
            text = f"{name} uncorrectable memory errors: {more:,} more"
            found.append(DeviceReport(text, is_fault=True))
        for key, report in now.items():
            if report.text and not self._reported.get((index, key)):
                found.append(report)
            self._reported[index, key] = report.text
        return found

    def _listen(self) -> None:
        nvml = self._nvml
        with suppress(nvml.NVMLError):
            self._events = nvml.nvmlEventSetCreate()
        for index in range(self._count()):
            with suppress(nvml.NVMLError):  # unknown to this device, or it is lost
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                self._index_of[_address(device)] = index
                nvml.nvmlDeviceRegisterEvents(
                    device, nvml.nvmlEventTypeXidCriticalError, self._events
                )

    def _xids(self) -> list[DeviceReport]:
        """Errors that the driver has reported; without one, the wait ends with an error."""
        found: list[DeviceReport] = []
        with suppress(self._nvml.NVMLError):
            while self._events is not None and len(found) < _MAX_XIDS:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                index = self._index_of.get(_address(event.device))
                name = "a GPU" if index is None else f"GPU {index}"
                code = int(event.eventData)
                self._xid_counts[name, code] += 1
                found.append(xid_report(name, code, count=self._xid_counts[name, code]))
        return found


def _is_ours(text: str) -> bool:
    """Whether the ranks may use the GPU that this text names, by CUDA_VISIBLE_DEVICES."""
    wanted = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if not all(map(str.isdigit, wanted)):
        return True  # not set, or UUIDs
    return any(text.startswith(f"GPU {name} ") for name in wanted)


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


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
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - of whatever kind: there is nothing to say
        return None
    return pynvml


def uncorrectable_errors(nvml: Any, device: Any) -> int:
    """Since the driver was loaded; NVMLError if unknown to this device."""
    return int(
        nvml.nvmlDeviceGetTotalEccErrors(
            device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    )


def slowdown(nvml: Any, device: Any) -> str:
    """How heat or a fault throttles the device; empty: neither. NVMLError: it is unknown."""
    try:
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(device)
    except nvml.NVMLError_FunctionNotFound:  # a driver before 535; CUDA 14 has only the new name
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)
    bad = nvml.nvmlClocksThrottleReasonHwSlowdown | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
    return f"is slowed down (reasons {reasons:#x})" if reasons & bad else ""


def recovery_action(nvml: Any, device: Any) -> int:
    """NVML's number of the action that the GPU needs; 0: none, or the driver is older than 570."""
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", 230)
    (value,) = nvml.nvmlDeviceGetFieldValues(device, [field])
    return int(value.value.uiVal) if value.nvmlReturn == nvml.NVML_SUCCESS else 0


@contextmanager
def _unknown_suppressed(nvml: Any) -> Iterator[None]:
    """Errors of a device that does not know a value; not those of one that is lost."""
    try:
        yield
    except nvml.NVMLError as error:
        if _is_lost(nvml, error):
            raise


def _is_lost(nvml: Any, error: Any) -> bool:
    return error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)


def device_health() -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """Number of GPUs, faults, and warnings, such as faults of GPUs that the ranks cannot use."""
    nvml = driver()
    if nvml is None:
        return 0, (), ()
    faults: list[str] = []
    remarks: list[str] = []
    count = 0
    with suppress(nvml.NVMLError):
        count = nvml.nvmlDeviceGetCount()
    num_ours = sum(_check(nvml, index, faults, remarks) for index in range(count))
    with suppress(nvml.NVMLError):
        nvml.nvmlShutdown()
    remarks += [fault for fault in faults if not _is_ours(fault)]
    return num_ours, tuple(filter(_is_ours, faults)), tuple(remarks)


def _check(nvml: Any, index: int, faults: list[str], remarks: list[str]) -> bool:
    """False: the GPU belongs to another job."""
    try:
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        with _unknown_suppressed(nvml):
            if count := uncorrectable_errors(nvml, device):
                text = f"GPU {index} has {count:,} uncorrectable memory errors since its reset"
                faults.append(text)
        with _unknown_suppressed(nvml):
            _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(device)
            if has_failed:
                faults.append(f"GPU {index} could not replace a broken row of its memory")
            elif is_pending:
                faults.append(f"GPU {index} needs a reset: rows of its memory are to be replaced")
        with _unknown_suppressed(nvml):
            if action := recovery_action(nvml, device):
                faults.append(recovery_report(f"GPU {index}", action).text)
        with _unknown_suppressed(nvml):
            if message := slowdown(nvml, device):
                remarks.append(f"GPU {index} {message}")
    except nvml.NVMLError_NoPermission:
        return False
    except nvml.NVMLError as error:
        faults.append(f"GPU {index} does not answer: {error}")
    return True
