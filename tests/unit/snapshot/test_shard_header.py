"""Pieces of a byte range are found, and fingerprints prove equality."""

from array import array

import pytest

from ftrun.errors import LayoutUnknown
from ftrun.snapshot.layout import PIECE_BYTES, PLAIN_NAME, CopyTiming, LayoutEntry, make_layout
from ftrun.snapshot.shard_header import PackedShardHeader, ShardHeader, pack_header, unpack_header

ENTRIES = [
    LayoutEntry("mean", "F32", (10,), CopyTiming.BOUNDARY),
    LayoutEntry("none", "F32", (0,), CopyTiming.LAZY),
    LayoutEntry("step", "F32", (), CopyTiming.LAZY),
    LayoutEntry("bias", "F32", (100,), CopyTiming.LAZY),
    LayoutEntry("wide", "U8", (2 * PIECE_BYTES + 5,), CopyTiming.LAZY),
]


def head(change: int = -1) -> ShardHeader:
    layout = make_layout(ENTRIES, plain_bytes=1)
    digests = [1000 + at for at in range(len(layout.pieces))]
    if change >= 0:
        digests[change] += 1
    return ShardHeader(layout, len(layout.header), memoryview(array("Q", digests)))


@pytest.mark.parametrize("name", ["mean", "step", "bias", "wide", PLAIN_NAME])
def test_pieces_under_an_entry_cover_it_and_no_more_than_they_must(name: str) -> None:
    shard = head()
    entry = shard.entries[name]
    pieces = shard.pieces_under(entry.offset, entry.num_bytes)
    offset, num_bytes = shard.bytes_of(pieces)
    assert offset <= entry.offset
    assert offset + num_bytes >= entry.offset + entry.num_bytes
    found = shard.layout.pieces
    assert found[pieces[0]].offset + found[pieces[0]].num_bytes > entry.offset
    assert found[pieces[-1]].offset < entry.offset + entry.num_bytes


def test_a_part_of_a_large_entry_needs_only_its_pieces() -> None:
    shard = head()
    wide = shard.entries["wide"]
    assert len(shard.pieces_under(wide.offset, wide.num_bytes)) == 3
    assert len(shard.pieces_under(wide.offset + PIECE_BYTES, 1)) == 1
    assert len(shard.pieces_under(wide.offset + PIECE_BYTES - 1, 2)) == 2
    assert len(shard.pieces_under(wide.offset, 0)) == 0


def test_a_fingerprint_changes_with_the_digests_under_an_entry_and_with_no_other() -> None:
    shard = head()
    step, wide, none = (shard.entries[name] for name in ("step", "wide", "none"))
    (pack,) = shard.pieces_under(step.offset, step.num_bytes)
    for at in range(len(shard.digests)):
        other = head(change=at)
        assert (shard.fingerprint(step) == other.fingerprint(step)) == (at != pack)
        in_wide = at in shard.pieces_under(wide.offset, wide.num_bytes)
        assert (shard.fingerprint(wide) == other.fingerprint(wide)) == (not in_wide)
        assert shard.fingerprint(none) == other.fingerprint(none)
    assert shard.fingerprint(step) != shard.fingerprint(shard.entries["bias"])


def packed() -> bytes:
    table = memoryview(bytes(range(16))).cast("Q")
    head = PackedShardHeader(memoryview(b"header"), table, 4096, layout_id=7, table_digest=9)
    return b"".join(bytes(part) for part in pack_header(head))


def test_a_packed_header_is_unpacked_to_the_same_values() -> None:
    found = unpack_header(memoryview(packed()))
    assert bytes(found.header) == b"header"
    assert found.table.tobytes() == bytes(range(16))
    assert (found.image_bytes, found.layout_id, found.table_digest) == (4096, 7, 9)


@pytest.mark.parametrize("raw", [b"", packed()[:39], packed()[:-1], packed() + b"x"])
def test_bytes_of_another_length_are_not_a_packed_header(raw: bytes) -> None:
    with pytest.raises(LayoutUnknown, match="the header of a shard"):
        unpack_header(memoryview(raw))
