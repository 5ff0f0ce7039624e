"""Builds the library, and sets the state of its devices.

The package loads `libnvidia-ml.so.1` by its name, once per process. A process finds the library
here if LD_LIBRARY_PATH had its folder at the start. In a process that runs already, `load` opens
it first: a library of this name that is loaded is used again.
"""

import ctypes
import hashlib
import importlib
import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("nvml.c")
CACHE = Path(__file__).parents[2] / "build" / "fake_nvml"
NAME = "libnvidia-ml.so.1"
COMPILER = (
    "gcc", "-std=gnu11", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", f"-Wl,-soname,{NAME}",
)  # fmt: skip
STATE = "FAKE_NVML_STATE"

SIZE = 1 << 16
NO_PERMISSION, LOST = 4, 15
UNKNOWN = (1 << 64) - 1
_HANGS, _FIRST = 1, 2
_STATUS, _HANDLE_STATUS, _USED, _TOTAL, _ECC, _REASONS = range(6)
_PENDING, _FAILED, _NO_EVENTS, _ACTION, _NUM_XIDS, _XIDS = range(6, 12)
_LATE_MS = _XIDS + 8
_HOLDERS = _LATE_MS + 1
_MAX_HOLDERS = 8
_DEVICE_WORDS = _HOLDERS + 3 * _MAX_HOLDERS


def folder(*, before_535: bool = False) -> Path:
    """Of the compiled library; `before_535`: without the functions that are newer."""
    flags = [*COMPILER, *(["-DBEFORE_535"] if before_535 else [])]
    key = hashlib.sha256(SOURCE.read_bytes() + repr(flags).encode()).hexdigest()[:16]
    target = CACHE / key
    if not (target / NAME).exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as made:
            subprocess.run([*flags, str(SOURCE), "-o", f"{made}/{NAME}"], check=True)
            target.mkdir(exist_ok=True)
            os.rename(f"{made}/{NAME}", target / NAME)
    return target


def search_path() -> str:
    """PYTHONPATH for processes that import this package."""
    return os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])


def load(*, before_535: bool = False) -> Any:
    """The package nvidia-ml-py with this library, in this process."""
    ctypes.CDLL(str(folder(before_535=before_535) / NAME), mode=ctypes.RTLD_GLOBAL)
    return importlib.import_module("pynvml")


class FakeGpus:
    """The devices that processes with this state file see."""

    def __init__(self, path: Path, count: int) -> None:
        self.path = path
        path.write_bytes(bytes(SIZE))
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), SIZE)).cast("Q")
        self._words[0] = count
        for index in range(count):
            self._set(index, _TOTAL, 80 << 30)

    def _set(self, index: int, word: int, value: int) -> None:
        self._words[_FIRST + index * _DEVICE_WORDS + word] = value

    def _get(self, index: int, word: int) -> int:
        return self._words[_FIRST + index * _DEVICE_WORDS + word]

    def hang(self, does_hang: bool) -> None:
        self._words[_HANGS] = int(does_hang)

    def fail(self, index: int, status: int, *, gives_handle: bool = False) -> None:
        """Every call about this device ends with this error; 0: with none."""
        self._set(index, _STATUS, status)
        self._set(index, _HANDLE_STATUS, 0 if gives_handle else status)

    def use(self, index: int, num_bytes: int) -> None:
        """Memory that belongs to no process of the test."""
        self._set(index, _USED, num_bytes)

    def hold(self, index: int, pid: int, num_bytes: int, *, late_s: float = 0.0) -> None:
        """Memory of a process, which comes back this much later than its end is seen."""
        self._set(index, _LATE_MS, int(late_s * 1000))
        for at in range(_HOLDERS, _HOLDERS + 3 * _MAX_HOLDERS, 3):
            if not self._get(index, at):
                self._set(index, at + 1, num_bytes)
                self._set(index, at + 2, 0)
                self._set(index, at, pid)
                return
        raise ValueError("too many processes")

    def count_errors(self, index: int, total: int) -> None:
        self._set(index, _ECC, total)

    def slow_down(self, index: int, reasons: int) -> None:
        self._set(index, _REASONS, reasons)

    def remap(self, index: int, *, is_pending: bool, has_failed: bool) -> None:
        self._set(index, _PENDING, int(is_pending))
        self._set(index, _FAILED, int(has_failed))

    def refuse_events(self, index: int) -> None:
        self._set(index, _NO_EVENTS, 1)

    def need_action(self, index: int, action: int) -> None:
        self._set(index, _ACTION, action)

    def report_xid(self, index: int, number: int) -> None:
        count = self._get(index, _NUM_XIDS)
        self._set(index, _XIDS + count % 8, number)
        self._set(index, _NUM_XIDS, count + 1)
