"""Evidence on a failure from outside of the rank: what it wrote, and the pressure on its node.

Runs in:  a thread of its own, with a deadline for the main thread when a rank has ended, and for
          the thread of the rank observer in a hang; pressure in the main thread.
Takes in: the log files of `--redirects` and `--tee`; /proc/pressure, or that of the cgroup.
Gives:    lines with error classes, once for each failure of a rank; pressure, once a second.
Survives: files of any size and content: the end of each regular file is read, and no more. A file
          system that does not answer.
"""

import json
import logging
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ftrun import clock
from ftrun.agent.observe.devices import BoundedCall
from ftrun.events import ErrorLine, ExitKind, WorkerExit
from ftrun.linux import pressure_files
from ftrun.monitor.error_classes import ErrorClasses
from ftrun.monitor.slow.host_pressure import HostPressure
from ftrun.monitor.worker_exits import first_cause, is_broken_connection

TAIL_BYTES = 16 << 10
STREAMS = ("stderr.log", "stdout.log")
LOGS_S = 0.5
"""Deadline for the logs of a rank that has ended; later only its exception is examined."""
EXCEPTION_S = 2.0
"""Deadline for the error file of a rank that has ended, and for the space of its log folder."""
PRESSURE_EVERY_S = 1.0
_FULL_BYTES = 1 << 16

T = TypeVar("T")
_log = logging.getLogger(__name__)


class BoundedReads:
    """Reads and writes of files whose file system may be dead, for one thread.

    While one hangs, no other one begins, so at most one thread is lost.
    """

    def __init__(self) -> None:
        self._call: BoundedCall[Any] | None = None

    def result(self, read: Callable[[], T], deadline_s: float) -> T | None:
        """None: it failed, it takes longer, or an earlier read still hangs."""
        if self._call is not None and self._call.unresponsive_s:
            self._call.answer(0.0)
            if self._call.unresponsive_s:
                return None
        self._call = call = BoundedCall[T | None](read, otherwise=None)
        return call.answer(deadline_s)


class EndedRank(NamedTuple):
    """How a rank has ended, and what it has left."""

    end: WorkerExit
    folder: str
    """Of its log files; empty: it has none."""
    error: str
    """Traceback and text of the exception that ended it."""


class RankException(NamedTuple):
    """The exception that a rank has written to its error file; empty: none."""

    message: str = ""
    traceback: str = ""
    failed_at_ns: int = 0
    """Monotonic."""
    is_disk_full: bool = False
    """Of the log folder."""


class WrittenErrors:
    """Error classes in what ranks write, with those of the profile."""

    def __init__(self, own: Mapping[str, str]) -> None:
        self._classes = ErrorClasses(own)
        self._reads, self._exceptions = BoundedReads(), BoundedReads()

    def exception_of(self, error_file: str, folder: str) -> RankException:
        """Runs in the main thread, at most for `EXCEPTION_S`."""
        found = self._exceptions.result(lambda: read_exception(error_file, folder), EXCEPTION_S)
        if found is None:
            _log.warning("%s was not read: its file system does not answer", error_file)
        return found or RankException()

    def of_first_cause(self, ended: Sequence[EndedRank]) -> list[WorkerExit]:
        """The ends; that of the first cause with its errors. Runs in the main thread."""
        found = [one.end for one in ended]
        failed = [
            one for one in found
            if one.kind is not ExitKind.FINISHED and not is_broken_connection(one)
        ]  # fmt: skip
        if failed:
            at = found.index(first_cause(failed))
            _, folder, error = ended[at]
            errors = self._reads.result(lambda: self.find(folder, error), LOGS_S)
            errors = self.find("", error) if errors is None else errors
            found[at] = replace(found[at], errors=errors)
        return found

    def find(self, folder: str, error: str = "") -> tuple[ErrorLine, ...]:
        """The likely cause first; `folder` and `error` as of `EndedRank`. Runs in any thread."""
        found = self._classes.find(error.splitlines(), "exception")
        for name in STREAMS if folder else ():
            found += self._classes.find(tail(os.path.join(folder, name)), name)
        return self._classes.first(found)


def read_exception(path: str, folder: str) -> RankException:
    is_full = is_disk_full(folder)
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        document = json.loads(Path(path).read_text(encoding="utf-8"))["message"]
        extra = document["extraInfo"]
        age_s = clock.wall_s() - float(extra["timestamp"])
        failed_at_ns = clock.now_ns() - int(age_s * 1e9)
        return RankException(document["message"], extra["py_callstack"], failed_at_ns, is_full)
    return RankException(is_disk_full=is_full)


def is_disk_full(folder: str) -> bool:
    with suppress(OSError):
        has = os.statvfs(folder)
        is_full = has.f_blocks > 0 and has.f_bavail * has.f_frsize < _FULL_BYTES
        return is_full or (has.f_files > 0 and has.f_favail == 0)
    return False


def tail(path: str) -> list[str]:
    """The last whole lines of a regular file; empty if it cannot be read."""
    with suppress(OSError):
        # A named pipe without a writer must not block.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                return []
            at = max(0, about.st_size - TAIL_BYTES)
            lines = os.pread(fd, TAIL_BYTES, at).decode("utf-8", "replace").splitlines()
            return lines[1:] if at else lines
        finally:
            os.close(fd)
    return []


class PressureReader:
    """The pressure on this node, read at most once in `PRESSURE_EVERY_S`."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._files = [pressure_files(kind, root) for kind in ("cpu", "memory", "io")]
        self._read_s = float("-inf")
        self._last: HostPressure | None = None

    def poll(self, now_s: float) -> HostPressure | None:
        """None: the kernel has no pressure information."""
        if now_s - self._read_s >= PRESSURE_EVERY_S:
            self._read_s = now_s
            found = HostPressure(*map(_some_avg10, self._files))
            self._last = None if found == HostPressure() else found
        return self._last


def _some_avg10(paths: Iterable[Path]) -> float | None:
    """The percentage of `some avg10=42.51 avg60=...` in the first file that can be read."""
    for path in paths:
        with suppress(OSError, ValueError, IndexError):
            return float(path.read_text("ascii").split()[1].removeprefix("avg10="))
    return None
