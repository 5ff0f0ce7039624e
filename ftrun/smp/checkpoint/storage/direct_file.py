"""A file that is written past the page cache, while the next part of it is being made ready.

Runs in:  the SMP, in its disk lane's thread; one thread more drains.
Takes in: bytes in the order of the file, of any sizes; a pace.
Gives:    the file, whole and on disk when `finish` returns.
Survives: file systems without direct I/O: they get the same bytes by way of the page cache.
Source:   FastPersist (arXiv 2406.13768): aligned direct writes from two buffers, one being filled
          while the other drains, and a tail that is not aligned. Measured by bench_persist.

Rule 1: a buffer is filled again only when what was in it is written. What lies in memory as it will
        lie in the file, and stays so, is written from there: whole buffers' worth of it.
Rule 2: the tail is written as a whole block, and the file is cut to its size afterwards: so there
        is one way to the disk, and no second descriptor.
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
"""Direct I/O wants addresses, offsets and sizes in multiples of the device's blocks; of all
that are in use this is the largest."""

_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)

Pace = Callable[[int], None]
"""Called before so many bytes are written; it may wait, or raise to give the file up."""


def no_pace(num_bytes: int) -> None:
    """As fast as it goes."""


class DirectFile:
    """One file, from its first byte to its last.

    Args:
        path: made anew, or emptied.
        pace: see `Pace`; called in the draining thread.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, *, pace: Pace = no_pace) -> None:
        self._pace = pace
        self._fd, self.is_direct = _open(path)
        self._buffers = [fresh_memory(BUFFER_BYTES) for _ in range(2)]
        self._views = [memoryview(buffer) for buffer in self._buffers]
        self.is_in_place = False
        """The newest `room` has the file's bytes already."""
        self._part = self._views[0]
        """What is being filled: a buffer, or a part of somebody's memory."""
        self._turn = 0
        self._filled = 0
        self._size = 0
        """Of the file, with what is in the buffers."""
        self._draining: list[Future[None] | None] = [None, None]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drain")

    def room(self, source: memoryview | None = None) -> memoryview:
        """Memory for the bytes that come next, at least one; `take` says how many were put there.

        Args:
            source: the bytes of the whole file, which change no more before it is closed, begin
                at a page, and are taken as they are from the next buffer on: see `is_in_place`.

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
        """So many bytes of `room` belong to the file now."""
        self._filled += num_bytes
        self._size += num_bytes

    def write(self, data: memoryview | bytes) -> None:
        """Add these bytes."""
        left = memoryview(data).cast("B")
        while left:
            room = self.room()
            part = left[: len(room)]
            room[: len(part)] = part
            self.take(len(part))
            left = left[len(part) :]

    def finish(self) -> None:
        """All is written: have it on disk.

        Raises:
            OSError: a part could not be written; the file is not whole.
        """
        if self._filled:
            self._send_off(-(-self._filled // BLOCK_BYTES) * BLOCK_BYTES)
        for turn in range(2):
            self._wait_for(turn)
        os.ftruncate(self._fd, self._size)
        os.fsync(self._fd)

    def close(self) -> None:
        """Let go of it, finished or not."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._part = self._views[0]
        os.close(self._fd)
        for view, buffer in zip(self._views, self._buffers, strict=True):
            view.release()
            with suppress(BufferError):  # a `room` that is still held keeps it
                buffer.close()

    def _send_off(self, num_bytes: int) -> None:
        """Drain the buffer that is filled, and turn to the other one."""
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
    """The descriptor, and whether it goes past the page cache."""
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
