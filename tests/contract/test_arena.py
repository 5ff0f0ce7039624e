"""A slot is complete or empty, and every flipped bit is detected."""

import errno
import os
import resource
import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftrun.errors import LayoutUnknown, SnapshotCorrupt
from ftrun.ids import version
from ftrun.snapshot.layout import PAGE_BYTES, CopyTiming, LayoutEntry, make_layout
from ftrun.wire.shared_memory.arena import (
    EMPTY_HEADER,
    Arena,
    ArenaShape,
    SlotHeader,
    SlotState,
    arena_bytes,
    create_memfd,
    read_shape,
    read_slot_headers,
    table_digest,
    verify,
    void_slots,
)

LAYOUT = make_layout(
    [
        LayoutEntry("weight", "F32", (100_000,), CopyTiming.LAZY),
        LayoutEntry("bias", "F32", (9,), CopyTiming.BOUNDARY),
    ],
    plain_bytes=10,
)
SHAPE = ArenaShape(3, 4, LAYOUT.image_bytes, len(LAYOUT.pieces), 77)
HEADER_BYTES = 72
_SIZES = LAYOUT.image_bytes, len(LAYOUT.pieces)


def _check(fields: bytes) -> bytes:
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))


@pytest.fixture
def fd() -> Iterator[int]:
    found = create_memfd(SHAPE)
    yield found
    os.close(found)


def seal(fd: int, slot: int, step: int) -> SlotHeader:
    arena = Arena(fd, writable=True)
    image = arena.image(slot)
    start = len(LAYOUT.header)
    image[:start] = LAYOUT.header
    image[start:] = bytes((step + index) % 251 for index in range(len(image) - start))
    table = arena.table(slot)
    for index, piece in enumerate(LAYOUT.pieces):
        at = start + piece.offset
        table[index] = xxhash.xxh3_64_intdigest(image[at : at + piece.num_bytes])
    header = SlotHeader(SlotState.SEALED, 0, step, len(image), table_digest(table), 5)
    arena.write_header(slot, header)
    del image, table
    arena.close()
    return header


def test_a_fresh_arena_has_two_empty_slots_and_its_whole_size(fd: int) -> None:
    assert read_shape(fd) == SHAPE
    assert read_slot_headers(fd) == [EMPTY_HEADER, EMPTY_HEADER]
    assert os.fstat(fd).st_size == SHAPE.total_bytes
    assert os.fstat(fd).st_blocks * 512 >= SHAPE.total_bytes
    assert arena_bytes(SHAPE.image_bytes, SHAPE.num_pieces) == SHAPE.total_bytes


def test_headers_of_two_slots_are_those_of_earlier_versions_of_ftrun(fd: int) -> None:
    """An SMP of a later version adopts the memory that an earlier one has left."""
    fields = struct.pack("<7Q", 0x4E524154_46303031, PAGE_BYTES, 3, 4, *_SIZES, 77)
    assert os.pread(fd, len(fields) + 8, 0) == fields + _check(fields)
    header = seal(fd, 0, 8)
    fields = struct.pack(
        *("<QQqqQQQQ", 0x4E524154_46303031, 2, 0, 8, LAYOUT.image_bytes),
        *(header.table_digest, 5, 0),
    )
    assert os.pread(fd, len(fields) + 8, PAGE_BYTES) == fields + _check(fields)


def test_an_arena_with_one_slot_is_read_as_such() -> None:
    shape = replace(SHAPE, num_slots=1)
    fd = create_memfd(shape)
    try:
        assert read_shape(fd) == shape
        assert read_slot_headers(fd) == [EMPTY_HEADER]
    finally:
        os.close(fd)


def test_a_sealed_slot_is_found_and_verifies(fd: int) -> None:
    header = seal(fd, 1, 8)
    assert read_slot_headers(fd) == [EMPTY_HEADER, header]
    arena = Arena(fd, writable=False)
    assert arena.find(version(0, 8)) == 1
    assert arena.find(version(0, 9)) is None
    layout, data = verify(arena, 1, what="test")
    assert layout.entries == LAYOUT.entries
    assert bytes(data[:3]) == bytes([8, 9, 10])
    del data
    arena.close()


def test_a_header_torn_at_any_byte_is_an_empty_slot(fd: int) -> None:
    at = PAGE_BYTES
    old = seal(fd, 0, 1)
    previous_bytes = os.pread(fd, HEADER_BYTES, at)
    new = seal(fd, 0, 250)
    new_bytes = os.pread(fd, HEADER_BYTES, at)
    for cut in range(HEADER_BYTES + 1):
        torn = new_bytes[:cut] + previous_bytes[cut:]
        os.pwrite(fd, torn, at)
        expected = {previous_bytes: old, new_bytes: new}.get(torn, EMPTY_HEADER)
        assert read_slot_headers(fd)[0] == expected
        os.pwrite(fd, new_bytes[:cut] + bytes(HEADER_BYTES - cut), at)
        if new_bytes[cut:].strip(b"\0"):
            assert read_slot_headers(fd)[0] == EMPTY_HEADER


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.integers(0, 8 * (LAYOUT.image_bytes + 8 * len(LAYOUT.pieces)) - 1))
def test_a_flipped_bit_in_data_or_table_is_found(fd: int, where: int) -> None:
    seal(fd, 0, 1)
    at, bit = divmod(where, 8)
    table_bytes = 8 * len(LAYOUT.pieces)
    start = PAGE_BYTES + PAGE_BYTES  # the arena's header, the slot's header
    if at < table_bytes:
        place = start + at
    else:
        place = start + SHAPE.table_bytes + at - table_bytes
        if at - table_bytes < len(LAYOUT.header):
            return  # the JSON header has no digest in the slot; the checkpoint's index has one
    (byte,) = os.pread(fd, 1, place)
    os.pwrite(fd, bytes([byte ^ (1 << bit)]), place)
    arena = Arena(fd, writable=False)
    with pytest.raises(SnapshotCorrupt):
        verify(arena, 0, what="test")
    arena.close()


def test_void_marks_only_what_is_later(fd: int) -> None:
    seal(fd, 0, 7)
    seal(fd, 1, 8)
    assert void_slots(fd, lambda found: found > version(0, 7)) == 1
    assert [header.state for header in read_slot_headers(fd)] == [SlotState.SEALED, SlotState.VOID]
    assert void_slots(fd, lambda found: found > version(0, 7)) == 0
    assert void_slots(fd, lambda found: found > version(-1, -1)) == 1


def test_an_arena_cannot_be_resized(fd: int) -> None:
    for size in (0, SHAPE.total_bytes + PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


@pytest.mark.parametrize("size", [0, 10, PAGE_BYTES])
def test_what_is_no_arena_is_not_read_as_one(size: int) -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    try:
        with pytest.raises(LayoutUnknown):
            read_shape(fd)
    finally:
        os.close(fd)


def test_a_memory_that_is_full_is_an_error_with_nothing_left_behind() -> None:
    before = set(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError) as caught:  # noqa: PT011 - which errno is the point
            create_memfd(ArenaShape(0, 1, 1 << 24, 64, 1))
        assert caught.value.errno == errno.EFBIG
        with pytest.raises((OSError, OverflowError)):
            create_memfd(ArenaShape(0, 1, 1 << 60, 64, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1
