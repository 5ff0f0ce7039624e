"""A readable checkpoint in a directory or in a store.

Runs in:  the SMP, in its disk lane's thread and in the thread that fetches the rest of a shared
          load.
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
    """A file of a checkpoint."""

    @property
    def size(self) -> int:
        """In bytes."""

    def read_into(self, target: memoryview, at: int = 0) -> int:
        """Fill `target` from offset `at`; return the number of bytes read."""


class CheckpointFiles(Protocol):
    """The files of one checkpoint."""

    @property
    def path(self) -> Path | str:
        """The location, for messages; its last component is the name."""

    def index(self) -> CheckpointIndex:
        """Raise CheckpointError if it is missing, or differs from what was written."""

    def opened(self, name: str) -> AbstractContextManager[OpenFile]:
        """Raise OSError or CheckpointError if the file is missing or unreadable."""

    def again(self) -> "AbstractContextManager[CheckpointFiles]":
        """Return the same checkpoint, usable also after its original source is closed."""


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
