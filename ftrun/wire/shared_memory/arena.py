"""Memory shared by worker and SMP: one memfd per rank, with two slots, or one to restore from.

Runs in:  worker (writes), SMP (creates, reads), agent (holds a descriptor).
Takes in: a descriptor.
Gives:    an `Arena` with its `SlotHeader`s, and views of a slot's bytes.
Survives: the death of any of the three. The kernel frees the memory with the last descriptor.

    arena header | slot 0: header | digest table | image | slot 1: header | digest table | image

Each part starts on a page boundary. An image is one safetensors file (see snapshot/layout.py). The
table holds one xxh3 digest per piece of it, and the header the xxh3 digest of the table. A memfd
has no name that could be left behind, and no /dev/shm size limits it.

Rule 1: The worker's first write to a slot sets COPYING, its last sets SEALED. In between it clears
        the table, and stores the digest of each piece after that piece is copied.
Rule 2: A header is valid as a whole or not at all, because it ends in a digest of itself. If a
        process is killed while it writes the header, the slot counts as empty.
Rule 3: Only the worker writes images. Other processes void slots only after the worker is dead.
"""

import errno
import os
import struct
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from enum import IntEnum

import xxhash

from ftrun.errors import LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Version, version
from ftrun.snapshot.layout import PAGE_BYTES, Layout, parse_header
from ftrun.wire.shared_memory.mapped_memory import (
    MADV_POPULATE_READ,
    MADV_POPULATE_WRITE,
    HugePageAllocator,
    MappedMemory,
)

NUM_SLOTS = 2
NO_LAYOUT = 0
"""`layout_id` of memory that is allocated before the layout is known."""
_MAGIC = 0x4E524154_46303031
_ONE_SLOT_MAGIC = 0x4E524154_46303032
"""Of an arena with one slot. An earlier ftrun, which reads two, refuses it."""

_ARENA_HEADER = struct.Struct("<7Q")
_SLOT_HEADER = struct.Struct("<QQqqQQQQ")
_CHECK = struct.Struct("<Q")
_ALLOCATED_BYTES = 1 << 24  # for each call; less: a more exact report of what is missing
_MAPPED_BYTES = 1 << 26


class SlotState(IntEnum):
    """State of a slot."""

    EMPTY = 0
    COPYING = 1
    SEALED = 2
    VOID = 3


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """Fixed-size header of a slot."""

    state: SlotState
    generation: int
    step: int
    image_bytes: int
    table_digest: int
    sealed_ns: int

    @property
    def version(self) -> Version:
        return version(self.generation, self.step)


EMPTY_HEADER = SlotHeader(SlotState.EMPTY, -1, -1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """Division of an arena; written once, when the arena is created.

    `num_slots`: snapshots need two, and a version that is only restored needs one.
    """

    rank: int
    world_size: int
    image_bytes: int
    num_pieces: int
    layout_id: int
    num_slots: int = NUM_SLOTS

    @property
    def table_bytes(self) -> int:
        return round_up(8 * self.num_pieces)

    @property
    def slot_bytes(self) -> int:
        return PAGE_BYTES + self.table_bytes + round_up(self.image_bytes)

    @property
    def total_bytes(self) -> int:
        return PAGE_BYTES + self.num_slots * self.slot_bytes


def arena_bytes(image_bytes: int, num_pieces: int) -> int:
    return ArenaShape(0, 1, image_bytes, num_pieces, 0).total_bytes


def create_memfd(shape: ArenaShape, allocated: Callable[[int], object] | None = None) -> int:
    """Create a fully allocated arena, sealed against resizing, or memory for one.

    `allocated` is called with the number of bytes allocated so far. Without a layout the memory has
    no header yet; see `divide`. Raises OSError (ENOSPC, ENOMEM); nothing stays allocated.
    posix_fallocate reports a full memory here. Without it, a later write in a step would raise
    SIGBUS. The call releases the interpreter lock.
    """
    fd = os.memfd_create(f"ftrun-rank-{shape.rank}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, shape.total_bytes)  # a size over a limit fails before allocation
        with closing(HugePageAllocator(fd, shape.total_bytes)) as allocator:
            for at in range(0, shape.total_bytes, _ALLOCATED_BYTES):
                num_bytes = min(_ALLOCATED_BYTES, shape.total_bytes - at)
                allocator.allocate(at, num_bytes)
                if allocated is not None:
                    allocated(at + num_bytes)
        if shape.layout_id != NO_LAYOUT:
            divide(fd, shape)
    except BaseException:
        os.close(fd)
        raise
    return fd


def divide(fd: int, shape: ArenaShape) -> None:
    """Make an arena of memory without a header, cut it to its size, and seal it against resizing.

    Raises OSError if the memory is smaller than the arena: nothing is allocated here.
    """
    import fcntl

    if os.fstat(fd).st_size < shape.total_bytes:
        raise OSError(errno.ENOSPC, f"{shape.total_bytes} bytes do not fit")
    os.ftruncate(fd, shape.total_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    _write_shape(fd, shape)


def create_on_disk(shape: ArenaShape, folder: str) -> int:
    """Create an arena in a file without a name, whose pages the kernel can write to the disk.

    Only for an arena that is restored from: its pages take no memory that another process needs.
    Raises OSError.
    """
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, shape.total_bytes)
        _write_shape(file.fileno(), shape)
        return os.dup(file.fileno())


def _write_shape(fd: int, shape: ArenaShape) -> None:
    header = _ARENA_HEADER.pack(
        *(_ONE_SLOT_MAGIC if shape.num_slots == 1 else _MAGIC, PAGE_BYTES),
        *(shape.rank, shape.world_size, shape.image_bytes, shape.num_pieces, shape.layout_id),
    )
    os.pwrite(fd, header + _CHECK.pack(xxhash.xxh3_64_intdigest(header)), 0)


def read_shape(fd: int) -> ArenaShape:
    """Raises LayoutUnknown if the descriptor is not an arena of this format."""
    raw = os.pread(fd, _ARENA_HEADER.size + _CHECK.size, 0)
    if len(raw) < _ARENA_HEADER.size + _CHECK.size:
        raise LayoutUnknown(f"an arena of {len(raw)} bytes has no header")
    header = raw[: _ARENA_HEADER.size]
    (check,) = _CHECK.unpack(raw[_ARENA_HEADER.size :])
    magic, page, *division = _ARENA_HEADER.unpack(header)
    num_slots = {_MAGIC: NUM_SLOTS, _ONE_SLOT_MAGIC: 1}.get(magic)
    is_whole = page == PAGE_BYTES and check == xxhash.xxh3_64_intdigest(header)
    if num_slots is None or not is_whole:
        raise LayoutUnknown("the header of an arena is not of this version of ftrun")
    return replace(ArenaShape(*division), num_slots=num_slots)


def read_slot_headers(fd: int) -> list[SlotHeader]:
    shape = read_shape(fd)
    size = _SLOT_HEADER.size + _CHECK.size
    return [
        _unpack_slot(os.pread(fd, size, PAGE_BYTES + slot * shape.slot_bytes))
        for slot in range(shape.num_slots)
    ]


def void_slots(fd: int, chosen: Callable[[Version], bool]) -> int:
    """Void sealed slots of chosen versions, after the worker's death; return how many."""
    shape = read_shape(fd)
    voided = 0
    for slot, header in enumerate(read_slot_headers(fd)):
        if header.state is SlotState.SEALED and chosen(header.version):
            data = _pack_slot(replace(header, state=SlotState.VOID))
            os.pwrite(fd, data, PAGE_BYTES + slot * shape.slot_bytes)
            voided += 1
    return voided


def map_all(fd: int) -> MappedMemory:
    """Map every page of an arena for writing, or of memory for one.

    A first touch of a small page in a step costs eight times a warm copy (2026-11). The kernel maps
    a part at a time, because other threads that map memory or fork wait for it.
    """
    mapped = MappedMemory(fd, os.fstat(fd).st_size)
    for at in range(0, len(mapped), _MAPPED_BYTES):
        mapped.advise(MADV_POPULATE_WRITE, at, min(_MAPPED_BYTES, len(mapped) - at))
    return mapped


class Arena:
    """A mapped arena. The caller keeps ownership of the descriptor.

    Args:
        mapped: a writable mapping of the same memory, which may be longer than the arena.
    """

    def __init__(self, fd: int, *, writable: bool, mapped: MappedMemory | None = None) -> None:
        self.shape = read_shape(fd)
        if mapped is None:
            mapped = MappedMemory(fd, self.shape.total_bytes, writable=writable)
        self._mapped = mapped
        self.memory = mapped.memory

    def populate(self) -> None:
        """Map every page now, as `map_all`."""
        self._mapped.advise(MADV_POPULATE_WRITE)

    def map_slot(self, slot: int) -> None:
        """Map a slot's pages for reading, ahead of a restore."""
        at, num_bytes = self._slot_offset(slot), self.shape.slot_bytes
        self._mapped.advise(MADV_POPULATE_READ, at, num_bytes)

    def header(self, slot: int) -> SlotHeader:
        at = self._slot_offset(slot)
        return _unpack_slot(bytes(self.memory[at : at + _SLOT_HEADER.size + _CHECK.size]))

    def write_header(self, slot: int, header: SlotHeader) -> None:
        at = self._slot_offset(slot)
        data = _pack_slot(header)
        self.memory[at : at + len(data)] = data

    def begin_copy(self, slot: int, header: SlotHeader) -> None:
        self.write_header(slot, header)  # Rule 1: COPYING, before any byte changes
        at = self._slot_offset(slot) + PAGE_BYTES
        num_bytes = 8 * self.shape.num_pieces
        self.memory[at : at + num_bytes] = bytes(num_bytes)

    def table(self, slot: int) -> memoryview:
        """u64 per piece."""
        at = self._slot_offset(slot) + PAGE_BYTES
        return self.memory[at : at + 8 * self.shape.num_pieces].cast("Q")

    def image(self, slot: int) -> memoryview:
        at = self._slot_offset(slot) + PAGE_BYTES + self.shape.table_bytes
        return self.memory[at : at + self.shape.image_bytes]

    def find(self, wanted: Version) -> int | None:
        for slot in range(self.shape.num_slots):
            header = self.header(slot)
            if header.state is SlotState.SEALED and header.version == wanted:
                return slot
        return None

    def close(self) -> None:
        """Views that still exist keep the mapping alive."""
        self._mapped.close()

    def _slot_offset(self, slot: int) -> int:
        return PAGE_BYTES + slot * self.shape.slot_bytes


def table_digest(table: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(table)


def open_slot(arena: Arena, slot: int, *, what: str) -> tuple[Layout, memoryview, memoryview]:
    """Return a slot's layout, data and digest table. Only the table is verified, not the data.

    Raises SnapshotCorrupt or LayoutUnknown.
    """
    header = arena.header(slot)
    table = arena.table(slot)
    layout, start = parse_header(arena.image(slot))
    if len(layout.pieces) != len(table) or table_digest(table) != header.table_digest:
        raise SnapshotCorrupt(what=f"{what}, digest table", piece=0, pieces=len(table))
    return layout, arena.image(slot)[start:], table


def verify(arena: Arena, slot: int, *, what: str) -> tuple[Layout, memoryview]:
    """Verify every digest of a slot; return its layout and data. Raises as `open_slot`."""
    layout, data, table = open_slot(arena, slot, what=what)
    pieces = layout.pieces
    for index, piece in enumerate(pieces):
        found = xxhash.xxh3_64_intdigest(data[piece.offset : piece.offset + piece.num_bytes])
        if found != table[index]:
            raise SnapshotCorrupt(what=what, piece=index, pieces=len(pieces))
    return layout, data


def _pack_slot(header: SlotHeader) -> bytes:
    data = _SLOT_HEADER.pack(
        *(_MAGIC, header.state, header.generation, header.step),
        *(header.image_bytes, header.table_digest, header.sealed_ns, 0),
    )
    return data + _CHECK.pack(xxhash.xxh3_64_intdigest(data))


def _unpack_slot(raw: bytes) -> SlotHeader:
    data = raw[: _SLOT_HEADER.size]
    (check,) = _CHECK.unpack(raw[_SLOT_HEADER.size :])
    magic, state, generation, step, image_bytes, digest, sealed_ns, _ = _SLOT_HEADER.unpack(data)
    if magic != _MAGIC or check != xxhash.xxh3_64_intdigest(data):
        return EMPTY_HEADER  # Rule 2: never written, or torn by a kill
    return SlotHeader(SlotState(state), generation, step, image_bytes, digest, sealed_ns)


def round_up(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
