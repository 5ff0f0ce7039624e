"""Wire format of a shard's header, between SMPs and from an SMP to a worker.

Runs in:  SMP (writes and forwards), worker (reads). Pure.

    u64 header bytes | u64 pieces | u64 image bytes | u64 layout id | u64 table digest
    header | digest table, u64 per piece
"""

import struct
from dataclasses import dataclass

from ftrun.errors import LayoutUnknown

_HEAD = struct.Struct("<QQQQQ")


@dataclass(frozen=True, slots=True)
class PackedShardHeader:
    """Everything known of a shard without its data.

    Args:
        header: of the image, including its length field.
        table: one u64 digest per piece.
        image_bytes: size of the whole shard.
        layout_id: digest of the header.
        table_digest: digest of the table.
    """

    header: memoryview
    table: memoryview
    image_bytes: int
    layout_id: int
    table_digest: int


def pack_head(head: PackedShardHeader) -> list[bytes | memoryview]:
    numbers = (len(head.header), len(head.table), head.image_bytes)
    front = _HEAD.pack(*numbers, head.layout_id, head.table_digest)
    return [front, head.header, head.table.cast("B")]


def unpack_head(raw: memoryview) -> PackedShardHeader:
    """Decode a packed header. The reader must check that it is the header that was sealed.

    Raises:
        LayoutUnknown: the bytes are not a packed header.
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
