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
    create_vault,
    vault_bytes,
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
        place=0,
        block_bytes=BLOCK,
        coded_bytes=[10, 20, 30],
        own=NodeRedundancy([], 0, 0),
        holders=[],
        mirrors=[(2, room)],
        num_rows=rows,
    )


@pytest.fixture
def vault() -> Iterator[ParityRegion]:
    made = ParityRegion(create_vault(vault_bytes(record())))
    made.begin(record())
    yield made
    made.close()


def fill(vault: ParityRegion) -> None:
    for row in range(3):
        vault.row(row)[:] = bytes([row]) * BLOCK
        vault.keep_row(row, xxhash.xxh3_64_intdigest(vault.row(row)))
    vault.mirror_room(2)[:700] = b"m" * 700
    vault.keep_mirror(2, 700, xxhash.xxh3_64_intdigest(b"m" * 700))


def test_another_process_finds_what_was_kept(vault: ParityRegion) -> None:
    fill(vault)
    vault.mark(ParityRegionState.COMPLETE)
    other = ParityRegion(os.dup(vault.fd))
    assert other.state is ParityRegionState.COMPLETE
    assert other.record == record()
    assert [bytes(other.row(row)) for row in range(3)] == [bytes([r]) * BLOCK for r in range(3)]
    mirror = other.mirror(2)
    assert mirror is not None
    assert bytes(mirror) == b"m" * 700
    assert other.mirrored_places() == [2]
    del mirror
    other.close()


def test_a_new_beginning_forgets_what_was_there(vault: ParityRegion) -> None:
    fill(vault)
    vault.mark(ParityRegionState.COMMITTED)
    vault.begin(record(step=2, rows=2))
    assert vault.state is ParityRegionState.FILLING
    assert vault.row_digest(0) == vault.row_digest(1) == 0
    assert vault.mirrored_places() == []
    assert vault.mirror(2) is None


def test_what_does_not_fit_is_refused_and_leaves_the_old_state(vault: ParityRegion) -> None:
    fill(vault)
    vault.mark(ParityRegionState.COMMITTED)
    with pytest.raises(LayoutUnknown):
        vault.begin(record(rows=400))
    assert vault.state is ParityRegionState.COMMITTED
    with pytest.raises(LayoutUnknown):
        vault.mirror_room(1)


def test_a_flipped_bit_in_a_mirror_is_seen(vault: ParityRegion) -> None:
    fill(vault)
    vault.mirror_room(2)[100] ^= 1
    assert vault.mirror(2) is None


def test_a_header_torn_at_any_byte_is_an_empty_vault(vault: ParityRegion) -> None:
    fill(vault)
    vault.mark(ParityRegionState.FILLING)
    old = os.pread(vault.fd, HEADER_BYTES, 0)
    vault.mark(ParityRegionState.COMPLETE)
    new = os.pread(vault.fd, HEADER_BYTES, 0)
    for cut in range(HEADER_BYTES + 1):
        torn = new[:cut] + old[cut:]
        os.pwrite(vault.fd, torn, 0)
        other = ParityRegion(os.dup(vault.fd))
        wanted = {old: ParityRegionState.FILLING, new: ParityRegionState.COMPLETE}.get(
            torn, ParityRegionState.EMPTY
        )
        assert other.state is wanted
        other.close()


def test_a_damaged_record_is_an_empty_vault(vault: ParityRegion) -> None:
    vault.mark(ParityRegionState.COMPLETE)
    (byte,) = os.pread(vault.fd, 1, 4096 + 20)
    os.pwrite(vault.fd, bytes([byte ^ 1]), 4096 + 20)
    other = ParityRegion(os.dup(vault.fd))
    assert (other.state, other.record) == (ParityRegionState.EMPTY, None)
    other.close()


def test_its_memory_is_there_and_cannot_be_resized(vault: ParityRegion) -> None:
    assert os.fstat(vault.fd).st_blocks * 512 >= vault.size
    with pytest.raises(PermissionError):
        os.ftruncate(vault.fd, 4096)


def test_what_is_no_vault_is_not_read_as_one() -> None:
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
