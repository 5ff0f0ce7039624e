"""A checkpoint that can be read, in a directory or in a store.

Runs in:  the SMP, in its disk lane's thread and in the one that gets the rest of what is shared.
Takes in: a checkpoint's folder.
Gives:    its index; any bytes of its files.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ftrun.smp.checkpoint.index import CheckpointIndex, read_index

_READ_BYTES = 1 << 22


class OpenFile(Protocol):
    """One of its files."""

    @property
    def size(self) -> int:
        """In bytes."""

    def read_into(self, target: memoryview, at: int = 0) -> int:
        """Fill this with what is there from `at` on; how many bytes there were."""


class CheckpointFiles(Protocol):
    """One checkpoint."""

    @property
    def path(self) -> Path | str:
        """Where, for messages; its last part is its name."""

    def index(self) -> CheckpointIndex:
        """Raises: CheckpointError: it is not there, or not as it was written."""

    def opened(self, name: str) -> AbstractContextManager[OpenFile]:
        """Raises: OSError, CheckpointError: there is no such file, or it cannot be read."""

    def again(self) -> "AbstractContextManager[CheckpointFiles]":
        """The same, also when what has found it is closed."""


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A checkpoint in a directory."""

    path: Path

    def index(self) -> CheckpointIndex:
        return read_index(self.path)

    @contextmanager
    def opened(self, name: str) -> Iterator[OpenFile]:
        fd = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield _OpenFile(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    @contextmanager
    def again(self) -> Iterator[CheckpointFiles]:
        yield self


@dataclass(frozen=True, slots=True)
class _OpenFile:
    fd: int
    size: int

    def read_into(self, target: memoryview, at: int = 0) -> int:
        done = 0
        while done < len(target):
            got = os.preadv(self.fd, [target[done : done + _READ_BYTES]], at + done)
            if not got:
                break
            done += got
        return done
