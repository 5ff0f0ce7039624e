"""Summarizes the shards of a node for the other nodes of its group.

The nodes exchange a `NodeManifest` of a version before they make a redundancy plan for it. For each
rank it holds the shape and the sections, with a digest of each.

A section is the unit that is or is not a replica: all pieces of one large entry, or one piece of
packed small entries. Its key identifies its entries (names, dtypes, shapes), its digest their
content. If key and digest are equal, so are the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from ftrun.snapshot.layout import PLAIN_NAME, CopyTiming, Layout, LayoutEntry, Piece


class Section(msgspec.Struct, frozen=True, array_like=True):
    """A run of pieces that are protected together.

    Args:
        key: u64 that identifies the entries.
        first: index of the first piece.
        count: number of pieces.
        num_bytes: of all pieces.
        may_repeat: it belongs to an optimizer, so equal content on another node is no coincidence.
    """

    key: int
    first: int
    count: int
    num_bytes: int
    may_repeat: bool


class RankManifest(msgspec.Struct, frozen=True, array_like=True):
    """One rank's shard of a version.

    Args:
        digests: content of each section: u64 each, little-endian.
        table_digest: as in the header of the slot.
        header_bytes: length of the safetensors header, including its length field.
    """

    rank: int
    world_size: int
    image_bytes: int
    num_pieces: int
    layout_id: int
    header_bytes: int
    header_digest: int
    table_digest: int
    sections: list[Section]
    digests: bytes

    def digest_of(self, index: int) -> int:
        return int.from_bytes(self.digests[8 * index : 8 * index + 8], "little")

    def content(self) -> dict[int, int]:
        """Digest of each section, by its key."""
        return {section.key: self.digest_of(at) for at, section in enumerate(self.sections)}


class NodeManifest(msgspec.Struct, frozen=True, array_like=True):
    """All shards of one node, by rank."""

    ranks: list[RankManifest]


@dataclass(frozen=True, slots=True)
class SectionPlace:
    """A section, and the offset of its bytes from the start of the data."""

    section: Section
    offset: int


def sections_of(layout: Layout) -> list[SectionPlace]:
    large = {e.offset: e for e in layout.entries if not e.is_small or e.name == PLAIN_NAME}
    small = [e for e in layout.entries if e.is_small and e.name != PLAIN_NAME]
    pieces = layout.pieces
    found: list[SectionPlace] = []
    at = next_small = 0
    while at < len(pieces):
        entry = large.get(pieces[at].offset) if pieces[at].num_bytes else None
        if entry is not None:
            count = -(-entry.num_bytes // layout.piece_bytes)
            is_lazy = entry.when is CopyTiming.LAZY and entry.name != PLAIN_NAME
            section = Section(_key([entry]), at, count, entry.num_bytes, is_lazy)
            found.append(SectionPlace(section, entry.offset))
        else:
            count = 1
            packed, next_small = _packed(small, next_small, pieces[at])
            is_lazy = bool(packed) and all(one.when is CopyTiming.LAZY for one in packed)
            section = Section(_key(packed), at, 1, pieces[at].num_bytes, is_lazy)
            found.append(SectionPlace(section, pieces[at].offset))
        at += count
    return found


def content_digests(places: Sequence[SectionPlace], table: memoryview) -> bytes:
    """Digest of each section: xxh3 of the digests of its pieces in the u64 `table`."""
    return b"".join(
        xxhash.xxh3_64_intdigest(table[p.section.first : p.section.first + p.section.count])
        .to_bytes(8, "little")
        for p in places
    )  # fmt: skip


def _packed(small: Sequence[LayoutEntry], at: int, piece: Piece) -> tuple[list[LayoutEntry], int]:
    """The small entries in a piece, and the index of the next small entry."""
    found = []
    end = piece.offset + piece.num_bytes
    while at < len(small) and small[at].offset + small[at].num_bytes <= end:
        found.append(small[at])
        at += 1
    return found, at


def _key(entries: Sequence[LayoutEntry]) -> int:
    """Identifies these entries, and the tensor parts that they are."""
    text = "".join(
        f"{len(e.name)}:{e.name} {e.dtype} {'x'.join(map(str, e.shape))} {e.part or ''};"
        for e in entries
    )
    return xxhash.xxh3_64_intdigest(text.encode())
