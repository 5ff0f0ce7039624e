"""Bytes pass through a pool in their order, and a torn header counts for nothing."""

import os
from collections.abc import Iterator

import pytest

from ftrun.errors import LayoutUnknown
from ftrun.snapshot.layout import PAGE_BYTES
from ftrun.wire.shared_memory.arena import ArenaShape, SlotState, create_memfd
from ftrun.wire.shared_memory.pool import CapturePool, PooledHeader, PoolField, create_pool

CAPACITY = 3 * PAGE_BYTES
SHAPE = ArenaShape(1, 2, 10_000, 3, 77)
HEADER = PooledHeader(SlotState.COPYING, 4, 20, 12_345, SHAPE, 5, 6)


@pytest.fixture
def fd() -> Iterator[int]:
    found = create_pool(1, CAPACITY)
    yield found
    os.close(found)


def test_bytes_come_out_in_their_order_over_the_end_of_the_ring(fd: int) -> None:
    """With each combination of sizes, ten times the capacity passes."""
    writer, reader = CapturePool(fd, is_writer=True), CapturePool(fd)
    sent, received = bytearray(), bytearray()
    seed = bytes(range(251))
    for turn in range(200):
        size = 1 + turn * 997 % CAPACITY
        data = (seed * (size // len(seed) + 1))[turn % 7 :][:size]
        at = 0
        while at < len(data) and len(room := writer.room(len(data) - at)):
            room[:] = data[at : at + len(room)]
            writer.add_written(len(room))
            sent += data[at : at + len(room)]
            at += len(room)
        target = memoryview(bytearray(1 + turn * 613 % CAPACITY))
        num_bytes = reader.read(target, len(received))
        received += target[:num_bytes]
        reader.set(PoolField.DRAINED, len(received))
    assert len(received) > 10 * CAPACITY
    assert sent[: len(received)] == received


def test_a_full_ring_has_no_room_and_an_older_position_makes_none(fd: int) -> None:
    writer, reader = CapturePool(fd, is_writer=True), CapturePool(fd)
    assert len(writer.room(10 * CAPACITY)) == CAPACITY
    writer.add_written(CAPACITY)
    assert not len(writer.room(1))
    reader.set(PoolField.DRAINED, 100)
    assert len(writer.room(CAPACITY)) == 100
    reader.set(PoolField.DRAINED, 0)  # a reader of an earlier capture
    assert not len(writer.room(1))


def test_a_header_is_whole_or_absent(fd: int) -> None:
    writer, reader = CapturePool(fd, is_writer=True), CapturePool(fd)
    assert reader.header() is None
    writer.write_header(HEADER)
    assert reader.header() == HEADER
    for at in range(1024, 1024 + 96):
        byte = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([byte[0] ^ 1]), at)
        assert reader.header() is None, at
        os.pwrite(fd, byte, at)
    assert reader.header() == HEADER


def test_other_memory_is_no_pool(fd: int) -> None:
    other = create_memfd(SHAPE)
    try:
        with pytest.raises(LayoutUnknown):
            CapturePool(other)
    finally:
        os.close(other)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, PAGE_BYTES)
