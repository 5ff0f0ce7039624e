"""The head of a shard as it travels: between SMPs, and from an SMP to a worker.

Runs in:  SMP (writes, passes on), worker (reads). Pure.
Takes in: the header of an image and its digest table.
Gives:    one run of bytes, and a `PackedShardHeader` out of it.

    u64 header bytes | u64 pieces | u64 image bytes | u64 layout id | u64 table digest
    header | digest table, u64 per piece
"""

import struct
from dataclasses import dataclass

from ftrun.errors import LayoutUnknown

_HEAD = struct.Struct("<QQQQQ")


@dataclass(frozen=True, slots=True)
class PackedShardHeader:
    """What is known of a shard without its data.

    Args:
        header: of the image, its length included.
        table: u64 per piece.
        image_bytes: of the whole shard.
        layout_id: digest of the header.
        table_digest: of the table.
    """

    header: memoryview
    table: memoryview
    image_bytes: int
    layout_id: int
    table_digest: int


def pack_head(head: PackedShardHeader) -> list[bytes | memoryview]:
    """The bytes, in parts."""
    numbers = (len(head.header), len(head.table), head.image_bytes)
    front = _HEAD.pack(*numbers, head.layout_id, head.table_digest)
    return [front, head.header, head.table.cast("B")]


def unpack_head(raw: memoryview) -> PackedShardHeader:
    """The head that was packed; whether it is what was sealed is for the reader to find out.

    Raises:
        LayoutUnknown: these bytes are none.
    """
    try:
        header_bytes, num_pieces, image_bytes, layout_id, digest = _HEAD.unpack_from(raw)
    except struct.error as error:
        raise LayoutUnknown(f"{len(raw)} bytes are too few for the head of a shard") from error
    at = _HEAD.size + header_bytes
    if at + 8 * num_pieces != len(raw):
        raise LayoutUnknown(
            f"the head of a shard has {len(raw)} bytes and says {at + 8 * num_pieces}"
        )
    table = raw[at:].cast("Q")
    return PackedShardHeader(raw[_HEAD.size : at], table, image_bytes, layout_id, digest)
