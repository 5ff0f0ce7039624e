"""Memory in which a node stores mirrors and parity of its group.

There is one memfd for each of two versions.

Runs in:  SMP (creates, fills, reads); the agent holds a descriptor and never reads the memory.
Takes in: a `ParityRecord`, which fixes the layout.
Gives:    a `ParityRegion`: views of the mirrors and parity rows, each with its own digest.
Survives: the death of the SMP. The next SMP gets the descriptor and can serve from the memory.

    header | record | index: length and digest of each mirror, digest of each row | mirrors | rows

Each part starts on a page boundary. Memory is allocated and touched once. It is reused while the
data to store fits into it.

Rule 1: A header is valid as a whole or not at all, as in an arena. Its first state is FILLING, and
        only COMPLETE or COMMITTED regions are served.
Rule 2: A row's digest is written after the row. An index entry of zeros means that no data arrived.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
from enum import IntEnum

import msgspec
import xxhash

from ftrun.errors import LayoutUnknown
from ftrun.ids import Version, version
from ftrun.snapshot.layout import PAGE_BYTES
from ftrun.snapshot.redundancy import NodeRedundancy
from ftrun.wire.messages.smp import GroupMember
from ftrun.wire.shared_memory.arena import round_up

_MAGIC = 0x56415554_46303031
_HEADER = struct.Struct("<QQQQ")
_CHECK = struct.Struct("<Q")
_MIRROR = struct.Struct("<QQ")
_ROW = struct.Struct("<Q")
_MADV_POPULATE_WRITE = 23


class ParityRegionState(IntEnum):
    """Progress of a parity region."""

    EMPTY = 0
    FILLING = 1
    COMPLETE = 2
    COMMITTED = 3
    VOID = 4


class ParityRecord(msgspec.Struct, frozen=True):
    """Content of a parity region, and everything needed to serve from it."""

    generation: int
    step: int
    world_size: int
    protected_in: int  # generation in which the group protects this version
    members: list[GroupMember]
    parity: int
    position: int  # position in the group of the node that owns this region
    block_bytes: int
    coded_bytes: list[int]  # of each node, by position
    own: NodeRedundancy  # the node's own plan, to find its blocks in the slots of its ranks
    holders: list[list[int]]  # sets of nodes, by position, that hold the same sections
    mirrors: list[tuple[int, int]]  # positions of mirrors here, with buffer sizes in bytes
    num_rows: int
    is_ring: bool = False  # the rows are copies of the blocks of the node before this one

    @property
    def version(self) -> Version:
        return version(self.generation, self.step)


_RECORD = msgspec.msgpack.Decoder(ParityRecord)


class _Areas:
    """Offsets of the areas of a parity region, in bytes from its start."""

    def __init__(self, record: ParityRecord, raw: bytes) -> None:
        self.digests = PAGE_BYTES + round_up(len(raw))
        self.row_digests = self.digests + _MIRROR.size * len(record.mirrors)
        self.index_end = self.row_digests + _ROW.size * record.num_rows
        at = round_up(self.index_end)
        self.mirrors: dict[int, tuple[int, int, int]] = {}
        for number, (position, room) in enumerate(record.mirrors):
            self.mirrors[position] = (self.digests + _MIRROR.size * number, at, room)
            at += round_up(room)
        self.rows = at
        self.total = at + round_up(record.num_rows * record.block_bytes)


def parity_region_bytes(record: ParityRecord) -> int:
    return _Areas(record, msgspec.msgpack.encode(record)).total


def create_parity_region(total_bytes: int) -> int:
    """Return a memfd, allocated and touched. After an OSError nothing stays allocated."""
    fd = os.memfd_create("ftrun-parity", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, total_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with mmap.mmap(fd, total_bytes) as memory:
            held = ctypes.c_char.from_buffer(memory)
            address, size = ctypes.addressof(held), ctypes.c_size_t(total_bytes)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(address), size, _MADV_POPULATE_WRITE)
            del held
    except BaseException:
        os.close(fd)
        raise
    return fd


class ParityRegion:
    """A mapped parity region, which owns its descriptor. Raises LayoutUnknown for other memory."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size = os.fstat(fd).st_size
        if self.size < 2 * PAGE_BYTES:
            raise LayoutUnknown(f"{self.size} bytes are too few for a parity region")
        self._map = mmap.mmap(fd, self.size)
        self._memory = memoryview(self._map)
        self.state = ParityRegionState.EMPTY
        self.record: ParityRecord | None = None
        self.is_damaged = False  # a requested block did not match its digest
        self._areas: _Areas | None = None
        self._raw = b""
        self._read()

    def begin(self, record: ParityRecord) -> None:
        """Start to store another version; the previous content is lost."""
        raw = msgspec.msgpack.encode(record)
        areas = _Areas(record, raw)
        if areas.total > self.size:
            raise LayoutUnknown(f"{areas.total} bytes do not fit a parity region of {self.size}")
        self.mark(ParityRegionState.EMPTY)
        self.record, self._areas, self._raw = record, areas, raw
        self.is_damaged = False
        self._memory[PAGE_BYTES : PAGE_BYTES + len(raw)] = raw
        self._memory[areas.digests : areas.index_end] = bytes(areas.index_end - areas.digests)
        self.mark(ParityRegionState.FILLING)

    def mark(self, state: ParityRegionState) -> None:
        """Write the header, which decides whether the content is valid."""
        digest = xxhash.xxh3_64_intdigest(self._raw)
        data = _HEADER.pack(_MAGIC, state, len(self._raw), digest)
        data += _CHECK.pack(xxhash.xxh3_64_intdigest(data))
        self._memory[: len(data)] = data
        self.state = state

    # --- mirrors ---------------------------------------------------------------------------

    def mirror_space(self, position: int) -> memoryview:
        _, at, room = self._mirror_area(position)
        return self._memory[at : at + room]

    def store_mirror(self, position: int, num_bytes: int, digest: int) -> None:
        at, _, _ = self._mirror_area(position)
        self._memory[at : at + _MIRROR.size] = _MIRROR.pack(num_bytes, digest)

    def mirror(self, position: int) -> memoryview | None:
        """A node's small state; None if it has not arrived or is damaged."""
        at, start, room = self._mirror_area(position)
        num_bytes, digest = _MIRROR.unpack(self._memory[at : at + _MIRROR.size])
        if not 0 < num_bytes <= room:
            return None
        view = self._memory[start : start + num_bytes]
        return view if xxhash.xxh3_64_intdigest(view) == digest else None

    def mirrored_positions(self) -> list[int]:
        areas = self._known().mirrors
        return [p for p, (at, _, _) in areas.items() if any(self._memory[at : at + _MIRROR.size])]

    # --- parity ----------------------------------------------------------------------------

    def row(self, index: int) -> memoryview:
        assert self.record is not None
        size = self.record.block_bytes
        at = self._known().rows + index * size
        return self._memory[at : at + size]

    def store_row(self, index: int, digest: int) -> None:
        at = self._known().row_digests + index * _ROW.size
        self._memory[at : at + _ROW.size] = _ROW.pack(digest)

    def row_digest(self, index: int) -> int:
        """Digest of the row; 0: no data arrived."""
        at = self._known().row_digests + index * _ROW.size
        (found,) = _ROW.unpack(self._memory[at : at + _ROW.size])
        return int(found)

    def close(self) -> None:
        """Unmap and close. Views that still exist keep the memory alive."""
        with contextlib.suppress(BufferError):
            self._memory.release()
            self._map.close()
        os.close(self.fd)

    def _known(self) -> _Areas:
        if self._areas is None:
            raise LayoutUnknown("this parity region has no record")
        return self._areas

    def _mirror_area(self, position: int) -> tuple[int, int, int]:
        area = self._known().mirrors.get(position)
        if area is None:
            raise LayoutUnknown(f"no mirror of place {position} belongs here")
        return area

    def _read(self) -> None:
        head = bytes(self._memory[: _HEADER.size + _CHECK.size])
        magic, state, length, digest = _HEADER.unpack(head[: _HEADER.size])
        (check,) = _CHECK.unpack(head[_HEADER.size :])
        if magic != _MAGIC or check != xxhash.xxh3_64_intdigest(head[: _HEADER.size]):
            return
        raw = bytes(self._memory[PAGE_BYTES : PAGE_BYTES + length])
        if xxhash.xxh3_64_intdigest(raw) != digest:
            return
        record = _RECORD.decode(raw)
        areas = _Areas(record, raw)
        if areas.total <= self.size:
            self.record, self._areas, self._raw = record, areas, raw
            self.state = ParityRegionState(state)
