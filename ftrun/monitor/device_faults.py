"""Judges reports of GPUs and their driver: whether the node's hardware must be replaced.

Source:   NVIDIA's list of immediate actions for each XID (NVSentinel, xiderrorsmapping.csv), and
          the names in its catalogue of XIDs. One in three illegal memory accesses of a large
          cluster came from the infrastructure (ByteRobust, SOSP 2025): they prove nothing alone.

Rule 1: a report counts as a hardware fault only if NVIDIA's action is a reset, a restart of the
        machine, or a repair. Other XIDs also come from faults of the program.
Rule 2: the text of an exception counts if the driver has made it: a program cannot raise it by a
        fault of its own.
"""

from typing import NamedTuple

_RESET = (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158, 162)
_RESTART = (79, 160)
_REPAIR = (48, 74, *range(144, 151))
HARDWARE_XIDS = frozenset((*_RESET, *_RESTART, *_REPAIR))

CONTAINED_XID = 94
"""A memory error that ended one program only. A second one on a GPU is a fault of the GPU."""

_ACTIONS = {1: "a reset", 2: "a restart of the machine", 3: "its NVLinks drained",
            4: "to be drained and reset", 5: "its IMEX domain recovered", 6: "a reset of its bus",
            7: "a restart of the machine"}  # fmt: skip
_NAMES = {
    48: "double-bit memory error",
    62: "internal error of the GPU",
    64: "memory rows cannot be replaced",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "the GPU's system processor has failed",
}
_DRIVER_TEXTS = (
    "uncorrectable ECC error",
    "GPU is lost",
    "fallen off the bus",
    "no CUDA-capable device is detected",
    "system not yet initialized",
)


class DeviceReport(NamedTuple):
    """What a network card or a GPU has reported."""

    text: str
    is_fault: bool = False
    """The hardware is at fault: the node must not run ranks."""


def xid_report(device: str, code: int, *, count: int) -> DeviceReport:
    """`GPU 2 has reported XID 79 (the GPU has fallen off the bus)`.

    Args:
        count: number of reports of this XID by this device so far, this one included.
    """
    name = f" ({_NAMES[code]})" if code in _NAMES else ""
    is_fault = code in HARDWARE_XIDS or (code == CONTAINED_XID and count > 1)
    return DeviceReport(f"{device} has reported XID {code}{name}", is_fault)


def recovery_report(device: str, action: int) -> DeviceReport:
    """A GPU that needs an action of the operator; `action` is NVML's number, at least 1."""
    return DeviceReport(f"{device} needs {_ACTIONS.get(action, f'action {action}')}", is_fault=True)


def is_hardware_text(text: str) -> bool:
    return any(words.lower() in text.lower() for words in _DRIVER_TEXTS)
