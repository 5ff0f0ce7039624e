"""Loads a checkpoint into arenas: reads this node's share, and receives the other nodes' shares.

Runs in:  the SMP: begun in its disk lane's thread, called in the threads of links, finished in the
          thread of `ftrun.smp.restore.fetch`.
Takes in: a checkpoint; the nodes that load it together, and the ranks of each.
Gives:    one new arena per rank. If no other node reads a part of them, they are sealed at once.
          Otherwise a `SharedLoad`, whose slots are invalid until all pieces have arrived.

Every piece from any source is compared with its digest when it arrives. A slot is sealed after all
of its pieces have been compared. The assignment of reads to nodes therefore affects only speed: the
pieces of a node that delivers nothing are read by other nodes.

If a piece in a file is damaged, it is read from the file of another rank. Replicas of a tensor have
equal digests in the tables of their ranks. Tables and headers of other ranks are read only in this
case, each once, and compared with the index.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import xxhash

from ftrun import clock
from ftrun.errors import CheckpointError, LayoutUnknown, MemoryTooSmall, SnapshotCorrupt
from ftrun.ids import Rank, Version, version
from ftrun.linux import available_memory
from ftrun.smp.checkpoint.index import CheckpointIndex, ShardFile
from ftrun.smp.checkpoint.reader import (
    CheckpointFiles,
    check_length,
    check_sizes,
    parts_of,
    read_head,
    read_table,
)
from ftrun.smp.memory.arenas import create
from ftrun.snapshot.layout import Layout
from ftrun.snapshot.load_shares import Place, load_group_of, ranks_at, share_of
from ftrun.snapshot.write_shares import FileExtent
from ftrun.wire.crash_points import crash_point
from ftrun.wire.shared_memory.arena import (
    Arena,
    ArenaShape,
    SlotHeader,
    SlotState,
    create_on_disk,
)

LOADED_GENERATION = -1
"""Generation of a loaded version: lower than that of every version captured by a run."""

_SLOT = 0
_RUN_BYTES = 16 << 20
"""Limit of one read of adjacent pieces."""

Check = Callable[[int], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadGroup:
    """Nodes that load together: the new ranks of each, in one order, and the own index."""

    ranks: Sequence[Sequence[int]]
    node: int

    def loads(self, node: int, index: CheckpointIndex, world_size: int) -> list[int]:
        """Return the checkpoint's ranks that a node loads: its own, or a share of another world."""
        if index.world_size == world_size:
            return list(self.ranks[node])
        return list(ranks_at(node, len(self.ranks), index.world_size))


class SharedLoad:
    """The arenas of one node, some of whose pieces other nodes read.

    Args:
        shards: files of this node's ranks.
        fds: one new arena for each shard; the caller owns the descriptors.
    """

    def __init__(
        self,
        source: CheckpointFiles,
        shards: Sequence[ShardFile],
        index: CheckpointIndex,
        fds: Sequence[int],
    ) -> None:
        self.version: Version = version(LOADED_GENERATION, index.step)
        self.ranks = [Rank(shard.rank) for shard in shards]
        self.lock = threading.Lock()
        """Held while the arenas are filled and sealed."""
        self.left: dict[Place, int] = {}
        """The missing pieces, with the node that reads each piece."""
        self.is_whole = False
        self.num_read = 0
        """Bytes that were read from storage."""
        self.ends = ExitStack()
        """What is held while pieces may still be read from the checkpoint."""
        self._source = source
        self._shards = {shard.rank: shard for shard in shards}
        self._replicas = PieceReplicas(index)
        self._twins: Sequence[tuple[Place, Place]] = ()
        self._here: dict[int, Place] = {}
        self._layouts: dict[int, tuple[Layout, int]] = {}
        self._arenas = {
            shard.rank: Arena(fd, writable=True) for shard, fd in zip(shards, fds, strict=True)
        }

    # --- present pieces --- ------------------------------------------------------------------

    def find(self, digest: int) -> memoryview:
        """Return a piece that this node has loaded; raises LayoutUnknown if it has not."""
        position = self._here.get(digest)
        if position is None:
            raise LayoutUnknown("no piece with this digest was read on this node")
        return self.room(position)

    def room(self, position: Place) -> memoryview:
        rank, index = position
        layout, start = self._layouts[rank]
        piece = layout.pieces[index]
        at = start + piece.offset
        return self._arenas[rank].image(_SLOT)[at : at + piece.num_bytes]

    def digest(self, position: Place) -> int:
        rank, index = position
        return int(self._arenas[rank].table(_SLOT)[index])

    # --- filling -------------------------------------------------------------------------------

    def begin(
        self, node: int, ranks: Mapping[int, list[int]], tables: Mapping[int, Sequence[int]]
    ) -> None:
        """Read this node's share. `tables` are those of other nodes. Raises as `read_head`."""
        for rank in self.ranks:
            self._read_header(rank)
        own: dict[int, Sequence[int]] = {
            rank: self._arenas[rank].table(_SLOT) for rank in self.ranks
        }
        sizes = {
            rank: [piece.num_bytes for piece in layout.pieces]
            for rank, (layout, _) in self._layouts.items()
        }
        share = share_of(node, ranks, {**tables, **own}, sizes)
        self._twins, self.left = share.twins, dict(share.others)
        for rank in self.ranks:
            self._read(self._source, [position for position in share.own if position[0] == rank])
            crash_point("smp.checkpoint.shard_loaded")
        if not self.left:
            self.seal()

    def read_too(self, places: Sequence[Place]) -> None:
        """Read pieces that another node should have read; raises as `begin`."""
        with self._source.again() as source:
            self._read(source, places)

    def took(self, position: Place) -> None:
        """Check a piece that has arrived; raises SnapshotCorrupt if it has changed."""
        digest = self.digest(position)
        if xxhash.xxh3_64_intdigest(self.room(position)) != digest:
            rank, index = position
            pieces = self._shards[rank].num_pieces
            raise SnapshotCorrupt(what=self._file_of(position), piece=index, pieces=pieces)
        self._here[digest] = position
        self.left.pop(position, None)

    def seal(self) -> None:
        assert not self.left
        for twin, position in self._twins:
            self.room(twin)[:] = self.room(position)
        for rank, arena in self._arenas.items():
            arena.write_header(_SLOT, self._header(rank, SlotState.SEALED))
        self.is_whole = True
        self.close()

    def close(self) -> None:
        """Allow the checkpoint to be pruned; called if the load is given up, and by `seal`."""
        self.ends.close()

    def unmap(self) -> None:
        """Nothing is read here any more, so no mapping must keep memory that is freed."""
        self._here.clear()
        for arena in self._arenas.values():
            arena.close()

    # --- details -------------------------------------------------------------------------------

    def _read(self, source: CheckpointFiles, places: Sequence[Place]) -> None:
        for rank in dict.fromkeys(rank for rank, _ in places):
            own = [position for position in places if position[0] == rank]
            try:
                self._read_runs(source, rank, own)
            except (CheckpointError, SnapshotCorrupt, OSError) as error:
                _log.warning("reading %s piece by piece: %s", self._what(rank), str(error))
                for position in own:
                    if self._here.get(self.digest(position)) != position:
                        self._read_piece(source, position)

    def _read_runs(self, source: CheckpointFiles, rank: int, places: Sequence[Place]) -> None:
        shard, what = self._shards[rank], self._what(rank)
        with source.image(shard) as file:
            for run in self._runs(places):
                at, num_bytes = self._bytes_of(run)
                target = self._arenas[rank].image(_SLOT)[at : at + num_bytes]
                check_length(file.read_into(target, at), target, what)
                self.num_read += num_bytes
                for position in run:
                    self.took(position)

    def _read_piece(self, source: CheckpointFiles, position: Place) -> None:
        """Read a piece from the file of its rank, or of another rank that has the same piece."""
        try:
            self._read_runs(source, position[0], [position])
        except (CheckpointError, SnapshotCorrupt, OSError):
            rank, room = position[0], self.room(position)
            at, _ = self._bytes_of([position])
            other = self._replicas.read(source, self.digest(position), room, but=(rank, at))
            if other is None:
                raise
            self.num_read += len(room)
            self.took(position)
            _log.warning(
                "%s: piece %d was read from the file of rank %d",
                self._file_of(position),
                position[1],
                other,
            )

    def _what(self, rank: int) -> str:
        return f"{self._source.path}/{self._shards[rank].file}"

    def _file_of(self, position: Place) -> str:
        at, num_bytes = self._bytes_of([position])
        places = parts_of(self._shards[position[0]], at, num_bytes)
        return f"{self._source.path}/{' and '.join(dict.fromkeys(one.file for one in places))}"

    def _header(self, rank: int, state: SlotState) -> SlotHeader:
        shard = self._shards[rank]
        at = self.version
        digest = int(shard.table_digest, 16)
        made = SlotHeader(state, at.generation, at.step, shard.num_bytes, digest, 0)
        return replace(made, sealed_ns=clock.now_ns())

    def _read_header(self, rank: int) -> None:
        arena = self._arenas[rank]
        arena.write_header(_SLOT, self._header(rank, SlotState.COPYING))
        header, table, layout = read_head(self._source, self._shards[rank])
        arena.table(_SLOT)[:] = table
        arena.image(_SLOT)[: len(header)] = header
        self._layouts[rank] = (layout, len(header))

    def _bytes_of(self, run: Sequence[Place]) -> tuple[int, int]:
        layout, start = self._layouts[run[0][0]]
        first, last = layout.pieces[run[0][1]], layout.pieces[run[-1][1]]
        return start + first.offset, last.offset + last.num_bytes - first.offset

    def _runs(self, places: Sequence[Place]) -> Iterable[Sequence[Place]]:
        run: list[Place] = []
        for rank, index in sorted(places):
            is_next = run and run[-1][1] + 1 == index
            if run and not (is_next and self._bytes_of(run)[1] < _RUN_BYTES):
                yield run
                run = []
            run.append((rank, index))
        if run:
            yield run


def load_share(
    source: CheckpointFiles,
    index: CheckpointIndex,
    world_size: int,
    load_group: LoadGroup,
    check: Check,
) -> tuple[list[int], SharedLoad | None]:
    """Fill arenas with this node's share; return their descriptors, and the load if incomplete.

    `check` raises MemoryTooSmall if this number of bytes does not fit. If this node runs all ranks,
    it then makes arenas of one slot, in files if it can. Raises MemoryTooSmall; CheckpointError,
    SnapshotCorrupt, LayoutUnknown or OSError if the checkpoint cannot be used.
    """
    node, shards = load_group.node, {shard.rank: shard for shard in index.shards}
    ranks = {
        other: load_group.loads(other, index, world_size)
        for other in load_group_of(node, len(load_group.ranks))
    }
    missing = [rank for rank in ranks[node] if rank not in shards]
    if missing:
        raise CheckpointError(f"{source.path}: its index has no rank {missing[0]}")
    own = [shards[rank] for rank in ranks[node]]
    shapes = [_shape(shard, index.world_size) for shard in own]
    check_sizes(source, own)
    make: Callable[[ArenaShape], int] = create
    has_all_ranks = len(load_group.ranks[node]) == world_size
    needed_bytes = sum(shape.total_bytes for shape in shapes)
    try:
        check(needed_bytes)
        if has_all_ranks:  # the ranks, which do not run yet, need memory for their state too
            available_memory().check(needed_bytes + sum(shape.image_bytes for shape in shapes))
    except MemoryTooSmall:
        if not has_all_ranks:
            raise  # other nodes rely on the version in this node's memory
        make = _maker_of_one_slot(source, shapes)
        shapes = [replace(shape, num_slots=1) for shape in shapes]
    fds: list[int] = []
    try:
        fds.extend(make(shape) for shape in shapes)
        load = SharedLoad(source, own, index, fds)
        try:
            others = {r: shards[r] for other, some in ranks.items() if other != node for r in some}
            tables = {rank: read_table(source, shard) for rank, shard in others.items()}
        except (KeyError, CheckpointError, SnapshotCorrupt, OSError):
            # A file of another node is damaged; that node detects it. This node loads its own ranks
            # without the others, and may succeed.
            tables, ranks = {}, {node: ranks[node]}
        load.begin(node, ranks, tables)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    if not load.is_whole:
        return fds, load
    load.unmap()
    return fds, None


def _maker_of_one_slot(
    source: CheckpointFiles, shapes: Sequence[ArenaShape]
) -> Callable[[ArenaShape], int]:
    """Make arenas that are only restored from; the ranks free them for their capture pools.

    In files of the checkpoint directory, because the ranks restore into memory of the same size.
    """
    folder = os.path.dirname(source.path)
    if source.storage.is_local and os.access(folder, os.W_OK):
        return partial(create_on_disk, folder=folder)
    needed_bytes = sum(replace(shape, num_slots=1).total_bytes for shape in shapes)
    available_memory().check(needed_bytes)
    return create


def _shape(shard: ShardFile, world_size: int) -> ArenaShape:
    return ArenaShape(
        rank=shard.rank,
        world_size=world_size,
        image_bytes=shard.num_bytes,
        num_pieces=shard.num_pieces,
        layout_id=int(shard.layout_id, 16),
    )


MOST_RANKS = 64
"""Limit of other ranks whose tables are read."""

_Head = tuple[ShardFile, Sequence[int], Layout, int]
"""A shard, its digests, its layout, and the offset of its data in the file."""


class PieceReplicas:
    """Finds replicas of a piece in the files of other ranks."""

    def __init__(self, index: CheckpointIndex) -> None:
        self._shards = {shard.rank: shard for shard in index.shards}
        self._headers: dict[int, _Head | None] = {}

    def read(
        self, source: CheckpointFiles, digest: int, room: memoryview, *, but: tuple[int, int]
    ) -> int | None:
        """Fill `room`; return the rank that was read, or None.

        `but`: a rank and the offset in its image where its files are damaged. A replica in the same
        bytes of a file is not read again.
        """
        damaged, at = but
        tried = [_stored(self._shards[damaged], at, len(room))]
        others = sorted(set(self._shards) - {damaged}, key=lambda rank: abs(rank - damaged))
        for rank in others[:MOST_RANKS]:
            head = self._head(source, rank)
            if head is None:
                continue
            shard, table, layout, start = head
            for index, found in enumerate(table):
                piece = layout.pieces[index]
                if found != digest or piece.num_bytes != len(room):
                    continue
                places = _stored(shard, start + piece.offset, len(room))
                if places in tried:
                    continue
                tried.append(places)
                if _is_read(source, shard, room, start + piece.offset, digest):
                    return rank
        return None

    def _head(self, source: CheckpointFiles, rank: int) -> _Head | None:
        if rank not in self._headers:
            try:
                header, table, layout = read_head(source, self._shards[rank])
                self._headers[rank] = self._shards[rank], table, layout, len(header)
            except (CheckpointError, SnapshotCorrupt, LayoutUnknown, OSError):
                self._headers[rank] = None  # this rank's files are unusable
        return self._headers[rank]


def _stored(shard: ShardFile, at: int, num_bytes: int) -> list[FileExtent]:
    """Where bytes of an image are in files; equal for all ranks that have them there."""
    parts = parts_of(shard, at, num_bytes)
    return [msgspec.structs.replace(one, first=one.first - at) for one in parts]


def _is_read(
    source: CheckpointFiles, shard: ShardFile, room: memoryview, at: int, digest: int
) -> bool:
    try:
        with source.image(shard) as file:
            is_whole = file.read_into(room, at) == len(room)
    except (CheckpointError, OSError):
        return False
    return is_whole and xxhash.xxh3_64_intdigest(room) == digest
