"""Reads the shards of all ranks of a version.

Runs in:  worker, inside `attach`, when a version is restored into another number of ranks.
Takes in: descriptors of arenas from the SMP; or any other `ShardSource`.
Gives:    bytes of any rank's shard; each piece is compared with its digest before it is used.

Rule 1: only requested bytes are read. A digest covers a piece, so the pieces that contain the
        requested bytes are read whole.
Rule 2: a reader that knows its reads announces them first (`expect`), in their order. A source on
        other nodes can then fetch them in a few transfers of bounded size.
"""

import os
from collections.abc import Mapping, Sequence

import xxhash

from ftrun.errors import LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Rank, Version
from ftrun.sharding.source_index import ByteRange, ShardSource
from ftrun.snapshot.layout import parse_header
from ftrun.snapshot.shard_header import ShardHeader
from ftrun.wire.shared_memory.arena import Arena, SlotHeader, table_digest


class LocalShards:
    """Shards in arenas of this node.

    Args:
        fds: read-only descriptors, by rank; this closes them.
        wanted: the version.
    """

    def __init__(self, fds: Mapping[Rank, int], wanted: Version) -> None:
        self._wanted = wanted
        self._arenas: dict[Rank, Arena] = {}
        self._slots: dict[Rank, int] = {}
        self._heads: dict[Rank, ShardHeader] = {}
        try:
            for rank, fd in fds.items():
                self._arenas[rank] = Arena(fd, writable=False)
        finally:
            for fd in fds.values():
                os.close(fd)

    def headers(self) -> Mapping[Rank, ShardHeader]:
        for rank, arena in self._arenas.items():
            if rank not in self._heads:
                slot = arena.find(self._wanted)
                if slot is None:
                    raise LayoutUnknown(f"the arena of rank {rank} does not hold {self._wanted}")
                self._slots[rank] = slot
                self._heads[rank] = _head(arena, slot, f"{self._wanted} of rank {rank}", rank)
        return self._heads

    def expect(self, ranges: Sequence[ByteRange]) -> None:
        """Nothing to do: the shards are on this node."""

    def read(self, rank: Rank, offset: int, num_bytes: int) -> memoryview:
        start = self._heads[rank].start + offset
        return self._arenas[rank].image(self._slots[rank])[start : start + num_bytes]

    def close(self) -> None:
        self._heads.clear()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()


def _head(arena: Arena, slot: int, what: str, rank: Rank) -> ShardHeader:
    return make_head(
        arena.image(slot),
        arena.table(slot),
        layout_id=arena.shape.layout_id,
        sealed=arena.header(slot),
        what=what,
        rank=rank,
    )


def make_head(
    image: memoryview,
    table: memoryview,
    *,
    layout_id: int,
    sealed: SlotHeader,
    what: str,
    rank: Rank,
) -> ShardHeader:
    """Parse a shard's header, and compare it with the sealed digests.

    Args:
        image: the shard, or only its header.
        table: u64 per piece.
        layout_id: of the arena; the digest of the header.
        sealed: the slot's header.
        what: name of the shard, for errors.
        rank: owner of the shard.

    Raises:
        SnapshotCorrupt: header or digest table differs from the sealed one.
        LayoutUnknown: the header is intact, but of another version of ftrun.
    """
    count = len(table)
    end = 8 + int.from_bytes(image[:8], "little")
    if end > len(image) or xxhash.xxh3_64_intdigest(image[:end]) != layout_id:
        raise SnapshotCorrupt(what=f"{what}, header", piece=0, pieces=count, rank=rank)
    layout, start = parse_header(image, image_bytes=sealed.image_bytes)
    if count != len(layout.pieces) or table_digest(table) != sealed.table_digest:
        raise SnapshotCorrupt(what=f"{what}, digest table", piece=0, pieces=count, rank=rank)
    return ShardHeader(layout, start, table)


class CheckedShards:
    """Reads from a source, and returns only bytes that match their digests.

    Args:
        source: of the shards.
        what: name of the version, for errors.
    """

    def __init__(self, source: ShardSource, what: str) -> None:
        self._source = source
        self._what = what
        self.heads = dict(source.headers())
        self._last: tuple[Rank, range, memoryview] | None = None

    def expect(self, ranges: Sequence[ByteRange]) -> None:
        """Announce the next reads in their order; each piece is announced once."""
        found: list[ByteRange] = []
        for one in ranges:
            head = self.heads[one.rank]
            pieces = head.pieces_under(one.offset, one.num_bytes)
            if pieces:
                made = ByteRange(one.rank, *head.bytes_of(pieces))
                if not found or found[-1] != made:
                    found.append(made)
        self._source.expect(found)

    def read(self, rank: Rank, offset: int, num_bytes: int) -> memoryview:
        """Bytes of a shard's data.

        Raises:
            SnapshotCorrupt: a piece that contains them differs from the captured one; `rank` is
                set.
        """
        head = self.heads[rank]
        pieces = head.pieces_under(offset, num_bytes)
        if not pieces:
            return memoryview(b"")
        start, length = head.bytes_of(pieces)
        # Small entries share a piece and are read consecutively.
        if self._last is None or self._last[:2] != (rank, pieces):
            data = self._source.read(rank, start, length)
            self._check(rank, pieces, start, data)
            self._last = (rank, pieces, data)
        data = self._last[2]
        return data[offset - start : offset - start + num_bytes]

    def close(self) -> None:
        self._last = None
        self.heads.clear()
        self._source.close()

    def _check(self, rank: Rank, pieces: range, start: int, data: memoryview) -> None:
        head = self.heads[rank]
        for index in pieces:
            piece = head.layout.pieces[index]
            at = piece.offset - start
            if xxhash.xxh3_64_intdigest(data[at : at + piece.num_bytes]) != head.digests[index]:
                what = f"{self._what} of rank {rank}"
                pieces_in_all = len(head.digests)
                raise SnapshotCorrupt(what=what, piece=index, pieces=pieces_in_all, rank=rank)
