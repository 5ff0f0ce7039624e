"""A memory cgroup for one test, whose processes have less memory than the machine."""

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

WAIT_S = 120.0


class MemoryCgroup:
    """One cgroup below that of this process (version 1 or 2)."""

    def __init__(self, folder: Path, limit: str, usage: str) -> None:
        self.folder = folder
        self._limit = folder / limit
        self._usage = folder / usage

    @property
    def used_bytes(self) -> int:
        return int(self._usage.read_text())

    def limit(self, num_bytes: int) -> None:
        self._limit.write_text(str(num_bytes))

    def add(self, pid: int) -> None:
        """Move a process here; memory that it already uses stays counted in its previous cgroup."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    @contextmanager
    def for_children(self) -> Iterator[None]:
        """Processes that this one starts inside the block begin here."""
        self.add(os.getpid())
        try:
            yield
        finally:
            (self.folder.parent / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Move the remaining processes to the cgroup above, and remove this one."""
        give_up_s = time.monotonic() + WAIT_S
        while self.folder.exists():
            for pid in (self.folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):  # it has just ended
                    (self.folder.parent / "cgroup.procs").write_text(pid)
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            assert time.monotonic() < give_up_s, f"{self.folder} cannot be removed"


@contextmanager
def memory_cgroup() -> Iterator[MemoryCgroup]:
    """Make one; the test is skipped if that is not allowed."""
    made = _make()
    if made is None:
        pytest.skip("needs an own cgroup")
    try:
        yield made
    finally:
        made.remove()


def _make() -> MemoryCgroup | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, inside = line.split(":", 2)
        name = f"ftrun-test-{uuid4().hex[:8]}"
        if names == "memory":
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            folder = Path("/sys/fs/cgroup/memory", inside.lstrip("/"), name)
        elif not names:
            files = ("memory.max", "memory.current")
            folder = Path("/sys/fs/cgroup", inside.lstrip("/"), name)
        else:
            continue
        with contextlib.suppress(OSError):
            folder.mkdir()
            if all((folder / file).exists() for file in files):
                return MemoryCgroup(folder, *files)
            folder.rmdir()
    return None
