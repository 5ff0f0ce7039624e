"""Reads the sealed slots of one version on this node in place, without a copy.

Runs in:  the SMP, on any of its threads.
Takes in: descriptors of arenas, a version.
Gives:    a `SealedShards`: the manifest of the version, views of pieces and blocks.

A worker writes only to a slot whose version is superseded by a commit, or abandoned. The bytes of a
needed slot therefore do not change. If they change, a digest differs, and the reader detects that
before it uses the bytes.
"""

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from ftrun.errors import LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Rank, Version
from ftrun.snapshot.layout import Layout, parse_header
from ftrun.snapshot.manifest import (
    NodeManifest,
    RankManifest,
    SectionPlace,
    content_digests,
    sections_of,
)
from ftrun.snapshot.redundancy import Extent, PieceRun
from ftrun.wire.shared_memory.arena import Arena, SlotHeader, table_digest


@dataclass(frozen=True, slots=True)
class MappedArena:
    """The mapping of an arena, and for each slot its layout, start of data and sections."""

    arena: Arena
    layouts: dict[int, tuple[Layout, int, list[SectionPlace]]]


class ArenaMappings:
    """Mappings, kept while arenas exist: page tables are expensive to build. Thread-safe."""

    def __init__(self) -> None:
        self._maps: dict[int, MappedArena] = {}
        self._lock = threading.Lock()

    def get(self, fd: int) -> MappedArena:
        """Raises LayoutUnknown if the descriptor is not that of an arena."""
        inode = os.fstat(fd).st_ino
        with self._lock:
            if inode not in self._maps:
                self._maps[inode] = MappedArena(Arena(fd, writable=False), {})
            return self._maps[inode]

    def hold(self, fds: Mapping[Rank, Sequence[int]], version: Version) -> "SealedShards":
        """Find the shards of a version; `problems` has the errors of unreadable shards."""
        found: dict[Rank, SealedShard] = {}
        problems: dict[Rank, LayoutUnknown | SnapshotCorrupt] = {}
        for rank, some in fds.items():
            for fd in some:
                try:
                    mapped = self.get(fd)
                    slot = mapped.arena.find(version)
                    if slot is not None:
                        found[rank] = SealedShard(mapped, slot)
                except (LayoutUnknown, SnapshotCorrupt) as error:
                    problems[rank] = error
        return SealedShards(version, found, problems)

    def keep_only(self, fds: Iterable[int]) -> None:
        inodes = {os.fstat(fd).st_ino for fd in fds}
        with self._lock:
            for inode in self._maps.keys() - inodes:
                self._maps.pop(inode).arena.close()


class SealedShard:
    """One rank's sealed slot."""

    def __init__(self, mapped: MappedArena, slot: int) -> None:
        """Raises SnapshotCorrupt if the header of the image or the digest table has changed."""
        arena = mapped.arena
        self.shape = arena.shape
        self.header: SlotHeader = arena.header(slot)
        self.image = arena.image(slot)
        self.table = arena.table(slot)
        self.what = f"rank {self.shape.rank}, {self.header.version}"
        if slot not in mapped.layouts:
            try:
                layout, start = parse_header(self.image)
            except LayoutUnknown as error:
                raise self._corrupt("header") from error
            mapped.layouts[slot] = (layout, start, sections_of(layout))
        self.layout, self.start, self.sections = mapped.layouts[slot]
        self._good: set[int] = set()
        if (
            len(self.layout.pieces) != len(self.table)
            or table_digest(self.table) != self.header.table_digest
        ):
            raise self._corrupt("digest table")

    def manifest(self) -> RankManifest:
        """Raises SnapshotCorrupt if the image's header does not match the layout id."""
        shape = self.shape
        header_digest = xxhash.xxh3_64_intdigest(self.image[: self.start])
        if header_digest != shape.layout_id:
            raise self._corrupt("header")
        return RankManifest(
            rank=shape.rank,
            world_size=shape.world_size,
            image_bytes=shape.image_bytes,
            num_pieces=shape.num_pieces,
            layout_id=shape.layout_id,
            header_bytes=self.start,
            header_digest=header_digest,
            table_digest=self.header.table_digest,
            sections=[position.section for position in self.sections],
            digests=content_digests(self.sections, self.table),
        )

    def data(self, offset: int, num_bytes: int) -> memoryview:
        """Bytes of the image; `offset` counts from the start of the data."""
        return self.image[self.start + offset : self.start + offset + num_bytes]

    def piece(self, index: int) -> memoryview:
        """A piece whose digest was checked; raises SnapshotCorrupt if it differs."""
        piece = self.layout.pieces[index]
        self.check(index)
        return self.data(piece.offset, piece.num_bytes)

    def run(self, run: PieceRun) -> memoryview:
        """Adjacent pieces whose digests were checked; raises as `piece`."""
        for index in range(run.first, run.first + run.count):
            self.check(index)
        first, last = self.layout.pieces[run.first], self.layout.pieces[run.first + run.count - 1]
        return self.data(first.offset, last.offset + last.num_bytes - first.offset)

    def check(self, index: int) -> None:
        """Compare a piece with its digest, unless it passed before; raises SnapshotCorrupt."""
        if index in self._good:
            return
        piece = self.layout.pieces[index]
        found = xxhash.xxh3_64_intdigest(self.data(piece.offset, piece.num_bytes))
        if found != self.table[index]:
            raise SnapshotCorrupt(
                what=self.what, piece=index, pieces=len(self.table), rank=self.shape.rank
            )
        self._good.add(index)

    def _corrupt(self, part: str) -> SnapshotCorrupt:
        rank, pieces = self.shape.rank, self.shape.num_pieces
        return SnapshotCorrupt(what=f"{self.what}, {part}", piece=0, pieces=pieces, rank=rank)


@dataclass(eq=False)
class SealedShards:
    """All shards of a version on this node, by rank."""

    version: Version
    shards: dict[Rank, SealedShard]
    problems: dict[Rank, LayoutUnknown | SnapshotCorrupt]
    _by_digest: dict[int, tuple[SealedShard, int]] | None = None

    @property
    def ranks(self) -> list[Rank]:
        return sorted(self.shards)

    def manifest(self, ranks: Sequence[Rank]) -> NodeManifest:
        """Raises LayoutUnknown if a rank's shard is missing, SnapshotCorrupt if it has changed."""
        return NodeManifest([self.shard(rank).manifest() for rank in sorted(ranks)])

    def views(self, extents: Iterable[Extent]) -> list[memoryview]:
        """Views of the bytes of these extents, without a copy; raises as `manifest`."""
        return [self.shard(e.rank).data(e.offset, e.num_bytes) for e in extents]

    def check(self, pieces: Iterable[tuple[int, int]]) -> None:
        """Compare pieces, as (rank, index), with their digests; raises as `manifest`."""
        for rank, index in pieces:
            self.shard(rank).check(index)

    def find(self, digest: int) -> memoryview:
        """A checked piece of any rank; raises LayoutUnknown (there is none), SnapshotCorrupt."""
        if self._by_digest is None:
            self._by_digest = {
                one: (shard, index)
                for shard in self.shards.values()
                for index, one in enumerate(shard.table)
            }
        found = self._by_digest.get(digest)
        if found is None:
            raise LayoutUnknown("this node has no piece with this digest")
        shard, index = found
        return shard.piece(index)

    def shard(self, rank: int) -> SealedShard:
        """Raises as `manifest`."""
        shard = self.shards.get(Rank(rank))
        if shard is None:
            missing = LayoutUnknown(f"rank {rank} has no slot with {self.version} on this node")
            raise self.problems.get(Rank(rank), missing)
        return shard
