"""A parity region returns its content to any holder of its descriptor, or counts as empty."""

import os
from collections.abc import Iterator

import pytest
import xxhash

from ftrun.errors import LayoutUnknown
from ftrun.snapshot.redundancy import NodeRedundancy
from ftrun.wire.messages.smp import GroupMember
from ftrun.wire.shared_memory.parity_region import (
    ParityRecord,
    ParityRegion,
    ParityRegionState,
    create_parity_region,
    parity_region_bytes,
)

BLOCK = 8192
HEADER_BYTES = 40


def record(*, step: int = 1, rows: int = 3, room: int = 5000) -> ParityRecord:
    return ParityRecord(
        generation=0,
        step=step,
        world_size=3,
        protected_in=2,
        members=[GroupMember(f"n{at}", [at]) for at in range(3)],
        parity=1,
        position=0,
        block_bytes=BLOCK,
        coded_bytes=[10, 20, 30],
        own=NodeRedundancy([], 0, 0),
        holders=[],
        mirrors=[(2, room)],
        num_rows=rows,
    )


@pytest.fixture
def region() -> Iterator[ParityRegion]:
    made = ParityRegion(create_parity_region(parity_region_bytes(record())))
    made.begin(record())
    yield made
    made.close()


def fill(region: ParityRegion) -> None:
    for row in range(3):
        region.row(row)[:] = bytes([row]) * BLOCK
        region.store_row(row, xxhash.xxh3_64_intdigest(region.row(row)))
    region.mirror_space(2)[:700] = b"m" * 700
    region.store_mirror(2, 700, xxhash.xxh3_64_intdigest(b"m" * 700))


def test_another_process_finds_what_was_kept(region: ParityRegion) -> None:
    fill(region)
    region.mark(ParityRegionState.COMPLETE)
    other = ParityRegion(os.dup(region.fd))
    assert other.state is ParityRegionState.COMPLETE
    assert other.record == record()
    assert [bytes(other.row(row)) for row in range(3)] == [bytes([r]) * BLOCK for r in range(3)]
    mirror = other.mirror(2)
    assert mirror is not None
    assert bytes(mirror) == b"m" * 700
    assert other.mirrored_positions() == [2]
    del mirror
    other.close()


def test_a_new_beginning_forgets_what_was_there(region: ParityRegion) -> None:
    fill(region)
    region.mark(ParityRegionState.COMMITTED)
    region.begin(record(step=2, rows=2))
    assert region.state is ParityRegionState.FILLING
    assert region.row_digest(0) == region.row_digest(1) == 0
    assert region.mirrored_positions() == []
    assert region.mirror(2) is None


def test_what_does_not_fit_is_refused_and_leaves_the_old_state(region: ParityRegion) -> None:
    fill(region)
    region.mark(ParityRegionState.COMMITTED)
    with pytest.raises(LayoutUnknown):
        region.begin(record(rows=400))
    assert region.state is ParityRegionState.COMMITTED
    with pytest.raises(LayoutUnknown):
        region.mirror_space(1)


def test_a_flipped_bit_in_a_mirror_is_seen(region: ParityRegion) -> None:
    fill(region)
    region.mirror_space(2)[100] ^= 1
    assert region.mirror(2) is None


def test_a_header_torn_at_any_byte_is_an_empty_parity_region(region: ParityRegion) -> None:
    fill(region)
    region.mark(ParityRegionState.FILLING)
    old = os.pread(region.fd, HEADER_BYTES, 0)
    region.mark(ParityRegionState.COMPLETE)
    new = os.pread(region.fd, HEADER_BYTES, 0)
    for cut in range(HEADER_BYTES + 1):
        torn = new[:cut] + old[cut:]
        os.pwrite(region.fd, torn, 0)
        other = ParityRegion(os.dup(region.fd))
        wanted = {old: ParityRegionState.FILLING, new: ParityRegionState.COMPLETE}.get(
            torn, ParityRegionState.EMPTY
        )
        assert other.state is wanted
        other.close()


def test_a_damaged_record_is_an_empty_parity_region(region: ParityRegion) -> None:
    region.mark(ParityRegionState.COMPLETE)
    (byte,) = os.pread(region.fd, 1, 4096 + 20)
    os.pwrite(region.fd, bytes([byte ^ 1]), 4096 + 20)
    other = ParityRegion(os.dup(region.fd))
    assert (other.state, other.record) == (ParityRegionState.EMPTY, None)
    other.close()


def test_its_memory_is_there_and_cannot_be_resized(region: ParityRegion) -> None:
    assert os.fstat(region.fd).st_blocks * 512 >= region.size
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, 4096)


def test_what_is_no_parity_region_is_not_read_as_one() -> None:
    fd = os.memfd_create("test")
    try:
        with pytest.raises(LayoutUnknown):
            ParityRegion(fd)
        os.ftruncate(fd, 1 << 16)
        empty = ParityRegion(os.dup(fd))
        assert (empty.state, empty.record) == (ParityRegionState.EMPTY, None)
        empty.close()
    finally:
        os.close(fd)
