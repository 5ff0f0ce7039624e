"""Writes files past the page cache at a limited rate, and lends memory for copies of slots.

Runs in:  the SMP, in its disk lane's thread; a second thread drains the buffers of a file.
Takes in: bytes in the order of the file, in chunks of any size; a rate; the free memory.
Gives:    the file, complete and on disk when `finish` returns; memory for all copies, or none.
Survives: file systems without direct I/O. The same bytes are then written through the page cache.
Source:   FastPersist (arXiv 2406.13768): aligned direct writes from two buffers, one of which is
          filled while the other drains, and an unaligned tail. Measured by bench_persist.

Rule 1: a buffer is refilled only after its contents are written. Bytes that are in memory in the
        order of the file, and do not change, are written from there, in units of whole buffers.
Rule 2: the tail is written as a whole block, and the file is then truncated to its size. There is
        therefore one path to the disk, and no second descriptor.
Rule 3: a lent copy buffer is not lent again before `begin`, because a file is written from it, and
        a followed capture requests buffers more than once.
Rule 4: copy buffers are returned to the system if they were not used for `KEEP_S`, or if free
        memory is scarce.

Allocating memory costs more than copying into it: each page is cleared first, and a virtual machine
may have to request it from its host. Allocation was four fifths of the cost of a checkpoint to the
training that ran at the same time (scripts/bench_persist.py).
"""

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from ftrun import clock
from ftrun.errors import CheckpointError

BUFFER_BYTES = 8 << 20
BLOCK_BYTES = 4096
"""Direct I/O requires addresses, offsets and sizes in multiples of the device's block size.

This is the largest block size in use.
"""

_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)

KEEP_S = 60.0
"""If checkpoints are rarer than this, each one allocates memory: under 1 % of a processor."""

_PLENTY = 4
"""Free memory must be this multiple of the retained memory, because larger arenas may be needed."""

_NAP_S = 0.1
"""Seconds within which a waiting writer sees a changed rate."""

Pace = Callable[[int], None]
"""Called before this number of bytes is written. It may wait, or raise to cancel the file."""


def no_pace(num_bytes: int) -> None:
    """Do not limit the rate."""


class Throttle:
    """Limits the bytes per second of a node; a pause does not allow a faster rate later."""

    def __init__(self, stop: threading.Event) -> None:
        self.bytes_per_s = 0.0
        """0: no limit. It may change during a write."""
        self.stop = stop
        self._lock = threading.Lock()
        self._paid_s = 0.0
        """The time from which the bytes admitted so far are within the rate."""

    def __call__(self, num_bytes: int) -> None:
        """Wait until this number of bytes may be written; raises CheckpointError when cancelled."""
        while True:
            wait_s = self._paid_s - clock.now_s() if self.bytes_per_s else 0.0
            if self.stop.wait(min(max(wait_s, 0.0), _NAP_S)):
                raise CheckpointError("the checkpoint is cancelled: the run is being stopped")
            if wait_s <= _NAP_S:
                break
        if self.bytes_per_s:
            with self._lock:  # several files may be written at once
                self._paid_s = max(clock.now_s(), self._paid_s) + num_bytes / self.bytes_per_s


class DirectFile:
    """A file, written from first to last byte. `pace` is called in the draining thread."""

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

        `source` has the bytes of the whole file. They begin at a page boundary and must not change
        before the file is closed. From the next buffer on they are written in place, see
        `is_in_place`. Raises OSError if an earlier part could not be written.
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
        """Write the rest, and wait until it is on disk; after an OSError it is incomplete."""
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
                    flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
                    fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                    self.is_direct = False
                    continue
                at += done
                view = view[done:]


class CopyBuffers:
    """The copies of one node's ranks. `free_bytes` returns the number of bytes that may be used."""

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        self._free_bytes = free_bytes
        self._kept: list[mmap.mmap] = []
        self._lent: list[mmap.mmap] = []
        self._used_s = 0.0

    @property
    def num_bytes(self) -> int:
        return sum(len(block) for block in (*self._kept, *self._lent))

    def begin(self) -> None:
        """Begin an attempt to write a checkpoint, and take back the buffers of the previous one."""
        self._kept += self._lent
        self._lent = []
        self.clean_up()

    def lend(self, sizes: Sequence[int]) -> list[memoryview] | None:
        """Return buffers of these sizes with arbitrary content; None if they do not fit."""
        left = list(self._kept)
        found: list[mmap.mmap | None] = []
        for size in sizes:
            block = next((one for one in left if len(one) == size), None)
            if block is not None:
                left.remove(block)
            found.append(block)
        needed = sum(size for size, block in zip(sizes, found, strict=True) if block is None)
        if needed:
            left = []  # these have the sizes of another world
            if needed > self._free_bytes():
                self._kept = []
                return None
        self._used_s = clock.now_s()
        try:
            lent = [
                block if block is not None else fresh_memory(size)
                for size, block in zip(sizes, found, strict=True)
            ]
        except OSError:  # the kernel allows less than the reported free memory
            self._kept = []
            return None
        self._kept = left
        self._lent += lent
        return [memoryview(block) for block in lent]

    def clean_up(self) -> None:
        """Return memory to the system that need not be retained (rule 4)."""
        is_old = clock.now_s() - self._used_s >= KEEP_S
        if self._kept and (is_old or self._free_bytes() < _PLENTY * self.num_bytes):
            self._kept = []

    def drop(self) -> None:
        self._kept, self._lent = [], []


def fresh_memory(size: int) -> mmap.mmap:
    """Allocate page-aligned memory, in huge pages if the kernel has them."""
    # A private mapping: a shared one gets no huge pages, whose first touch costs half as much.
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _open(path: Path) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666), True
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
    return os.open(path, flags, 0o666), False
