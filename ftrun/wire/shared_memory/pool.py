"""Memory through which a rank's image passes to the SMP, if two slots of it do not fit.

Runs in:  worker (writes), SMP (creates, reads).
Takes in: a descriptor.
Gives:    a `CapturePool`: the header of the capture in progress, and a ring of bytes.
Survives: the death of either. The kernel frees the memory with the last descriptor.
Source:   DataStates-LLM (arXiv 2406.10707): one buffer that is reused; a full buffer is waited for.

    header page | ring of `capacity` bytes

One capture writes its image, and then its digest table, in the order of the file. Positions count
all bytes that have passed since the pool was created, so byte p is at p modulo the capacity. The
worker publishes WRITTEN after it has written bytes, and the SMP publishes DRAINED after it has read
them.

Rule 1: a position is never set back by its owner. A reader of an earlier capture may show an older
        DRAINED, which only makes the ring look fuller.
Rule 2: the worker writes the header of a capture before its first byte, and SEALED after the last.
        A header ends in a digest of itself, so it is valid as a whole or not at all.
Rule 3: a reader compares the header after each read. If another capture has begun, the bytes are
        not used.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from ftrun.errors import LayoutUnknown
from ftrun.ids import Version, version
from ftrun.snapshot.layout import PAGE_BYTES
from ftrun.wire.shared_memory.arena import ArenaShape, SlotState

LEAST_POOL_BYTES = 1 << 20
"""With less, the copy thread and the SMP would take turns for every few pieces."""

_MAGIC = 0x4C4F4F50_46303031
_POOL_HEADER = struct.Struct("<QQQ")
_CAPTURE = struct.Struct("<Qqq8Q")
_CHECK = struct.Struct("<Q")
_CAPTURE_AT = 1024


class PoolField(IntEnum):
    """Fields of the header page, in words; each has a cache line and a writer of its own."""

    WRITTEN = 16  # worker: position after the last byte in the ring
    DRAINED = 24  # SMP: position of the first byte that may not be overwritten
    READER = 32  # SMP: 1 while a job reads captures of this pool; 0: none does
    READER_NS = 40  # SMP: when that job last made progress


@dataclass(frozen=True, slots=True)
class PooledHeader:
    """One capture; `base` is the position of the first byte of its image."""

    state: SlotState
    generation: int
    step: int
    base: int
    shape: ArenaShape
    table_digest: int = 0
    sealed_ns: int = 0

    @property
    def version(self) -> Version:
        return version(self.generation, self.step)


def create_pool(rank: int, capacity: int) -> int:
    """Create a fully allocated pool, sealed against resizing; raises OSError."""
    fd = os.memfd_create(f"ftrun-pool-{rank}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, PAGE_BYTES + capacity)
        os.posix_fallocate(fd, 0, PAGE_BYTES + capacity)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        header = _POOL_HEADER.pack(_MAGIC, rank, capacity)
        os.pwrite(fd, header + _CHECK.pack(xxhash.xxh3_64_intdigest(header)), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


class CapturePool:
    """A mapped pool. The caller keeps ownership of the descriptor.

    Args:
        fd: of the pool; raises LayoutUnknown if it is none.
        is_writer: maps the ring too.
    """

    def __init__(self, fd: int, *, is_writer: bool = False) -> None:
        raw = os.pread(fd, _POOL_HEADER.size + _CHECK.size, 0)
        header = raw[: _POOL_HEADER.size]
        if len(raw) < _POOL_HEADER.size + _CHECK.size:
            raise LayoutUnknown(f"a pool of {len(raw)} bytes has no header")
        magic, self.rank, self.capacity = _POOL_HEADER.unpack(header)
        if magic != _MAGIC or raw[len(header) :] != _CHECK.pack(xxhash.xxh3_64_intdigest(header)):
            raise LayoutUnknown("the header of a pool is not of this version of ftrun")
        self._fd = fd
        self._map = mmap.mmap(fd, 0 if is_writer else PAGE_BYTES)
        self._map.madvise(mmap.MADV_DONTFORK)  # else a DataLoader worker would keep the memory
        memory = memoryview(self._map)
        self._words = memory[:_CAPTURE_AT].cast("Q")
        self.ring = memory[PAGE_BYTES:]
        """[capacity] bytes; empty without `is_writer`."""

    def get(self, at: PoolField) -> int:
        return self._words[at]

    def set(self, at: PoolField, value: int) -> None:
        self._words[at] = value

    def close(self) -> None:
        try:
            self._words.release()
            self.ring.release()
            self._map.close()
        except BufferError:  # views that still exist keep the mapping alive
            pass

    def header(self) -> PooledHeader | None:
        """The capture in progress, or the last one; None before the first, or if it is torn."""
        raw = self._map[_CAPTURE_AT : _CAPTURE_AT + _CAPTURE.size + _CHECK.size]
        data = raw[: _CAPTURE.size]
        state, generation, step, base, rank, *sizes, table_digest, sealed_ns = _CAPTURE.unpack(data)
        if not state or raw[len(data) :] != _CHECK.pack(xxhash.xxh3_64_intdigest(data)):
            return None
        shape = ArenaShape(rank, *sizes)
        found = SlotState(state), generation, step, base, shape, table_digest, sealed_ns
        return PooledHeader(*found)

    # --- worker ------------------------------------------------------------------------------

    def write_header(self, header: PooledHeader) -> None:
        shape = header.shape
        data = _CAPTURE.pack(
            *(header.state, header.generation, header.step, header.base, shape.rank),
            *(shape.world_size, shape.image_bytes, shape.num_pieces, shape.layout_id),
            *(header.table_digest, header.sealed_ns),
        )
        check = _CHECK.pack(xxhash.xxh3_64_intdigest(data))
        self._map[_CAPTURE_AT : _CAPTURE_AT + len(data) + len(check)] = data + check

    def room(self, most_bytes: int) -> memoryview:
        """The next bytes to write, adjacent and at most `most_bytes`; empty if the ring is full."""
        written = self.get(PoolField.WRITTEN)
        free = self.capacity - (written - min(self.get(PoolField.DRAINED), written))
        at = written % self.capacity
        return self.ring[at : at + max(0, min(most_bytes, free, self.capacity - at))]

    def add_written(self, num_bytes: int) -> None:
        self.set(PoolField.WRITTEN, self.get(PoolField.WRITTEN) + num_bytes)

    # --- SMP ---------------------------------------------------------------------------------

    def read(self, target: memoryview, at: int) -> int:
        """Fill `target` from position `at` with what is written; return the number of bytes."""
        size = min(len(target), self.get(PoolField.WRITTEN) - at)
        done = 0
        for first, num_bytes in self._runs(at, size):
            part = target[done : done + num_bytes]
            done += os.preadv(self._fd, [part], PAGE_BYTES + first)
        return done

    def _runs(self, at: int, size: int) -> Iterator[tuple[int, int]]:
        """The ring offsets and lengths of these positions."""
        while size > 0:
            first = at % self.capacity
            num_bytes = min(size, self.capacity - first)
            yield first, num_bytes
            at, size = at + num_bytes, size - num_bytes
