"""The header of a shard: layout and digests, which are read before the data.

It maps byte ranges to pieces, and compares entries without reading their bytes. Between processes
it is packed, in little endian:

    u64 header bytes | u64 pieces | u64 image bytes | u64 layout id | u64 table digest
    header | digest table, u64 per piece
"""

import struct
from dataclasses import dataclass
from functools import cached_property

from ftrun.errors import LayoutUnknown
from ftrun.snapshot.layout import Layout, LayoutEntry

Fingerprint = tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True)
class ShardHeader:
    """One shard without its data. Data offsets count from `start`; digests are u64 per piece."""

    layout: Layout
    start: int
    digests: memoryview

    @cached_property
    def entries(self) -> dict[str, LayoutEntry]:
        return {entry.name: entry for entry in self.layout.entries}

    def pieces_under(self, offset: int, num_bytes: int) -> range:
        """Indices of the pieces that hold any of these bytes."""
        if num_bytes <= 0:
            return range(0)
        return self.layout.pieces_between(offset, offset + num_bytes)

    def bytes_of(self, pieces: range) -> tuple[int, int]:
        found = self.layout.pieces
        offset = found[pieces[0]].offset
        last = found[pieces[-1]]
        return offset, last.offset + last.num_bytes - offset

    def fingerprint(self, entry: LayoutEntry) -> Fingerprint:
        """If the fingerprints of two entries of equal shape are equal, so are their bytes.

        The converse does not hold for small entries. They share a piece with neighbours, and the
        bytes of a neighbour may be the ones that differ.
        """
        pieces = self.pieces_under(entry.offset, entry.num_bytes)
        if not pieces:
            return (0, 0, ())
        offset, num_bytes = self.bytes_of(pieces)
        return (entry.offset - offset, num_bytes, tuple(self.digests[index] for index in pieces))


_HEAD = struct.Struct("<QQQQQ")


@dataclass(frozen=True, slots=True)
class PackedShardHeader:
    """Everything known of a shard without its data.

    `header` includes its length field; `layout_id` is the digest of the header, `table_digest` that
    of the table.
    """

    header: memoryview
    table: memoryview
    image_bytes: int
    layout_id: int
    table_digest: int


def pack_header(head: PackedShardHeader) -> list[bytes | memoryview]:
    numbers = (len(head.header), len(head.table), head.image_bytes)
    front = _HEAD.pack(*numbers, head.layout_id, head.table_digest)
    return [front, head.header, head.table.cast("B")]


def unpack_header(raw: memoryview) -> PackedShardHeader:
    """Raises LayoutUnknown; the reader must check that the result is the header that was sealed."""
    try:
        header_bytes, num_pieces, image_bytes, layout_id, digest = _HEAD.unpack_from(raw)
    except struct.error as error:
        raise LayoutUnknown(f"{len(raw)} bytes are too few for the header of a shard") from error
    at = _HEAD.size + header_bytes
    if at + 8 * num_pieces != len(raw):
        raise LayoutUnknown(
            f"the header of a shard has {len(raw)} bytes instead of {at + 8 * num_pieces}"
        )
    table = raw[at:].cast("Q")
    return PackedShardHeader(raw[_HEAD.size : at], table, image_bytes, layout_id, digest)
