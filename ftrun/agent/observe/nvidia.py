"""Health of this node's GPUs from NVML: faults, and throttling.

Runs in:  the process of the preflight check; agent, the thread of the rank observer.
Takes in: the package `pynvml` and its driver, if present.
Gives:    the driver or None; memory errors of a device, and the reasons for a slow clock.
Source:   NVML's API; which of its figures matter: docs/papers.md, C4 and Aegis.
"""

from contextlib import suppress
from typing import Any


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


def soundness() -> tuple[int, tuple[str, ...], tuple[str, ...]]:
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
        _look_at(nvml, index, faults, remarks)
    with suppress(nvml.NVMLError):
        nvml.nvmlShutdown()
    return count, tuple(faults), tuple(remarks)


def _look_at(nvml: Any, index: int, faults: list[str], remarks: list[str]) -> None:
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
        if said := slowdown(nvml, device):
            remarks.append(f"GPU {index} {said}")
