"""Writes a file past the page cache, while its next part is being prepared.

Runs in:  the SMP, in its disk lane's thread; a second thread drains the buffers.
Takes in: bytes in the order of the file, in chunks of any size; a pace.
Gives:    the file, complete and on disk when `finish` returns.
Survives: file systems without direct I/O. The same bytes are then written through the page cache.
Source:   FastPersist (arXiv 2406.13768): aligned direct writes from two buffers, one of which is
          filled while the other drains, and an unaligned tail. Measured by bench_persist.

Rule 1: a buffer is refilled only after its contents are written. Bytes that are in memory in the
        order of the file, and do not change, are written from there, in units of whole buffers.
Rule 2: the tail is written as a whole block, and the file is then truncated to its size. There is
        therefore one path to the disk, and no second descriptor.
"""

import errno
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from ftrun.smp.checkpoint.storage.copy_room import fresh_memory

BUFFER_BYTES = 8 << 20
BLOCK_BYTES = 4096
"""Direct I/O requires addresses, offsets and sizes in multiples of the device's block size.

This is the largest block size in use.
"""

_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)

Pace = Callable[[int], None]
"""Called before this number of bytes is written. It may wait, or raise to cancel the file."""


def no_pace(num_bytes: int) -> None:
    """Do not limit the rate."""


class DirectFile:
    """One file, written from its first byte to its last.

    Args:
        path: created, or truncated.
        pace: see `Pace`; called in the draining thread.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path, *, pace: Pace = no_pace) -> None:
        self._pace = pace
        self._fd, self.is_direct = _open(path)
        self._buffers = [fresh_memory(BUFFER_BYTES) for _ in range(2)]
        self._views = [memoryview(buffer) for buffer in self._buffers]
        self.is_in_place = False
        """The newest `room` has the file's bytes already."""
        self._part = self._views[0]
        """What is being filled: a buffer, or a part of the caller's memory."""
        self._turn = 0
        self._filled = 0
        self._size = 0
        """Of the file, with what is in the buffers."""
        self._draining: list[Future[None] | None] = [None, None]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drain")

    def room(self, source: memoryview | None = None) -> memoryview:
        """Return memory for the next bytes, at least one; `take` adds those written into it.

        Args:
            source: the bytes of the whole file. They begin at a page boundary and must not change
                before the file is closed. From the next buffer on they are written in place, see
                `is_in_place`.

        Raises:
            OSError: an earlier part could not be written.
        """
        if self._filled == BUFFER_BYTES:
            self._send_off(BUFFER_BYTES)
        if self._filled == 0:
            self._wait_for(self._turn)
            end = self._size + BUFFER_BYTES
            self._part, self.is_in_place = self._views[self._turn], False
            if source is not None and end <= len(source):
                self._part, self.is_in_place = source[self._size : end], True
        return self._part[self._filled :]

    def take(self, num_bytes: int) -> None:
        self._filled += num_bytes
        self._size += num_bytes

    def write(self, data: memoryview | bytes) -> None:
        left = memoryview(data).cast("B")
        while left:
            room = self.room()
            part = left[: len(room)]
            room[: len(part)] = part
            self.take(len(part))
            left = left[len(part) :]

    def finish(self) -> None:
        """Write the rest, and wait until the file is on disk.

        Raises:
            OSError: a part could not be written; the file is incomplete.
        """
        if self._filled:
            self._send_off(-(-self._filled // BLOCK_BYTES) * BLOCK_BYTES)
        for turn in range(2):
            self._wait_for(turn)
        os.ftruncate(self._fd, self._size)
        os.fsync(self._fd)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._part = self._views[0]
        os.close(self._fd)
        for view, buffer in zip(self._views, self._buffers, strict=True):
            view.release()
            with suppress(BufferError):  # a `room` still in use keeps it alive
                buffer.close()

    def _send_off(self, num_bytes: int) -> None:
        at = self._size - self._filled
        view = self._part[:num_bytes]
        self._draining[self._turn] = self._thread.submit(self._drain, view, at)
        self._turn, self._filled = 1 - self._turn, 0

    def _wait_for(self, turn: int) -> None:
        draining, self._draining[turn] = self._draining[turn], None
        if draining is not None:
            draining.result()

    def _drain(self, view: memoryview, at: int) -> None:
        with view:
            self._pace(len(view))
            while view:
                try:
                    done = os.pwrite(self._fd, view, at)
                except OSError as error:
                    if not self.is_direct or error.errno not in _NO_DIRECT:
                        raise
                    _make_indirect(self._fd)
                    self.is_direct = False
                    continue
                at += done
                view = view[done:]


def _open(path: Path) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666), True
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
    return os.open(path, flags, 0o666), False


def _make_indirect(fd: int) -> None:
    import fcntl

    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
