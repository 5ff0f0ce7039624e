"""The shards of all ranks of a version, to read from.

Runs in:  worker, inside `attach`, where a version is restored into another number of ranks.
Takes in: descriptors of arenas that the SMP hands over; or whatever else is an `ShardSource`.
Gives:    bytes of any rank's shard, each piece compared with its digest before it is used.

Rule 1: nothing is read that is not asked for. A digest covers a piece, so the pieces under what is
        asked for are what is read.
Rule 2: whoever knows what will be read says so first (`expect`), in the order in which it will be
        read, so that a source on other nodes can fetch it in few and bounded turns.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from ftrun.errors import LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Rank, Version
from ftrun.snapshot.layout import parse_header
from ftrun.snapshot.shard_header import ShardHeader
from ftrun.wire.shared_memory.arena import Arena, SlotHeader, table_digest


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes of one rank's shard; `offset` counts from the start of its data."""

    rank: Rank
    offset: int
    num_bytes: int


class ShardSource(Protocol):
    """Where the shards of one version are."""

    def headers(self) -> Mapping[Rank, ShardHeader]:
        """Layout and digest table of every rank's shard, compared with what was sealed.

        Raises:
            SnapshotCorrupt: one of them is something else; its `rank` says which.
            SnapshotError, PeerError: one of them is not to be had.
        """
        ...

    def expect(self, ranges: Sequence[ByteRange]) -> None:
        """What will be read next, in this order; whole pieces. Replaces what was said before."""
        ...

    def read(self, rank: Rank, offset: int, num_bytes: int) -> memoryview:
        """Bytes of a shard's data as they lie there, not compared with anything.

        Raises:
            SnapshotError, PeerError: they are not to be had.
        """
        ...

    def close(self) -> None:
        """Let go of all memory; views that are still held keep theirs."""
        ...


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
        """Nothing to do: it is here."""

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
    """A head, compared with what was sealed.

    Args:
        image: the shard, or no more than its header.
        table: u64 per piece.
        layout_id: of the arena; the digest of the header.
        sealed: the slot's header.
        what: in words.
        rank: whose shard it is.

    Raises:
        SnapshotCorrupt: header or digest table is something else.
        LayoutUnknown: the header is what it was, and of another version of ftrun.
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
    """Reads from a source and lets nothing through that does not match its digest.

    Args:
        source: where the shards are.
        what: of what, in words.
    """

    def __init__(self, source: ShardSource, what: str) -> None:
        self._source = source
        self._what = what
        self.heads = dict(source.headers())
        self._last: tuple[Rank, range, memoryview] | None = None

    def expect(self, ranges: Sequence[ByteRange]) -> None:
        """Say what will be read, in this order; the pieces under it are made of it, once each."""
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
            SnapshotCorrupt: a piece under them is not what was captured; its `rank` is set.
        """
        head = self.heads[rank]
        pieces = head.pieces_under(offset, num_bytes)
        if not pieces:
            return memoryview(b"")
        start, length = head.bytes_of(pieces)
        # Small entries share a piece, and are read one after the other.
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
