"""Processes that do not die of SIGKILL until they are released, as on a hung file system.

A cgroup of version 1 holds them in state D. One of version 2 does not: SIGKILL ends its processes.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import pytest

_WAIT_S = 120.0
_ROOT = Path("/sys/fs/cgroup/freezer")


class KernelHang:
    """One cgroup that holds its processes from `begin` to `end`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, *pids: int) -> None:
        for pid in pids:
            (self.folder / "cgroup.procs").write_text(str(pid))
        (self.folder / "freezer.state").write_text("FROZEN")

    def end(self) -> None:
        (self.folder / "freezer.state").write_text("THAWED")


@contextmanager
def kernel_hang() -> Iterator[KernelHang]:
    """Make one; the test is skipped if that is not allowed."""
    folder = _ROOT / f"ftrun-test-{uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs an own cgroup (freezer, version 1): {error}")
    made = KernelHang(folder)
    try:
        yield made
    finally:
        made.end()
        _remove(folder)


def _remove(folder: Path) -> None:
    give_up_s = time.monotonic() + _WAIT_S
    while folder.exists():
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it has just ended
                (_ROOT / "cgroup.procs").write_text(pid)
        with suppress(OSError):  # a process that is just ending still counts
            folder.rmdir()
        assert time.monotonic() < give_up_s, f"{folder} cannot be removed"
