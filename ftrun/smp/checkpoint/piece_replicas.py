"""Finds replicas of a checkpoint's pieces in the files of other ranks, for a damaged file.

Runs in:  the SMP, in the threads of `ftrun.smp.checkpoint.shared_load`.
Takes in: a checkpoint, the digest of a piece.
Gives:    its bytes, from the file of another rank that has the same piece.

Replicas of a tensor have equal digests in the tables of their ranks. Tables and headers of other
ranks are read only after a damaged piece was found, each once, and compared with the index.
"""

from collections.abc import Sequence

import xxhash

from ftrun.errors import CheckpointError, LayoutUnknown, SnapshotCorrupt
from ftrun.smp.checkpoint.index import CheckpointIndex, ShardFile
from ftrun.smp.checkpoint.reader import CheckpointFiles
from ftrun.snapshot.layout import Layout, parse_header
from ftrun.wire.shared_memory.arena import table_digest

MOST_RANKS = 64
"""Limit of other ranks whose tables are read."""

_Head = tuple[ShardFile, Sequence[int], Layout, int]
"""A shard, its digests, its layout, and the offset of its data in the file."""


class PieceReplicas:
    """The replicas of one checkpoint."""

    def __init__(self, index: CheckpointIndex) -> None:
        self._shards = {shard.rank: shard for shard in index.shards}
        self._heads: dict[int, _Head | None] = {}

    def read(
        self, source: CheckpointFiles, digest: int, room: memoryview, *, but: int
    ) -> int | None:
        """Fill `room` with a piece; return the rank that has it, or None if no rank has.

        Args:
            source: the checkpoint.
            digest: of the piece.
            room: as long as the piece.
            but: the rank whose file is damaged.
        """
        others = sorted(set(self._shards) - {but}, key=lambda rank: abs(rank - but))
        for rank in others[:MOST_RANKS]:
            head = self._head(source, rank)
            if head is None:
                continue
            shard, table, layout, start = head
            for index, found in enumerate(table):
                piece = layout.pieces[index]
                if found != digest or piece.num_bytes != len(room):
                    continue
                if _is_read(source, shard.file, room, start + piece.offset, digest):
                    return rank
        return None

    def _head(self, source: CheckpointFiles, rank: int) -> _Head | None:
        if rank not in self._heads:
            try:
                self._heads[rank] = _read_head(source, self._shards[rank])
            except (CheckpointError, SnapshotCorrupt, LayoutUnknown, OSError):
                self._heads[rank] = None  # this rank's files are unusable
        return self._heads[rank]


def _read_head(source: CheckpointFiles, shard: ShardFile) -> _Head | None:
    table = memoryview(bytearray(8 * shard.num_pieces))
    with source.opened(shard.digests) as file:
        if file.read_into(table) < len(table) or table_digest(table) != int(shard.table_digest, 16):
            return None
    with source.opened(shard.file) as file:
        length = memoryview(bytearray(8))
        if file.read_into(length) < len(length):
            return None
        end = 8 + int.from_bytes(length, "little")
        if end > min(file.size, shard.num_bytes):
            return None
        head = memoryview(bytearray(end))
        file.read_into(head)
    if xxhash.xxh3_64_hexdigest(head) != shard.header_digest:
        return None
    layout, start = parse_header(head, image_bytes=shard.num_bytes)
    return (
        (shard, table.cast("Q"), layout, start) if len(layout.pieces) == len(table) // 8 else None
    )


def _is_read(source: CheckpointFiles, name: str, room: memoryview, at: int, digest: int) -> bool:
    try:
        with source.opened(name) as file:
            is_whole = file.read_into(room, at) == len(room)
    except (CheckpointError, OSError):
        return False
    return is_whole and xxhash.xxh3_64_intdigest(room) == digest
