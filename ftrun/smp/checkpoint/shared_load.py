"""Loads a checkpoint's bytes into arenas: this node's share, and room for other nodes' shares.

Runs in:  the SMP: begun in its disk lane's thread, called in the threads of links, finished in the
          thread of `ftrun.smp.restore.fetch`.
Takes in: a checkpoint; the nodes that load it together, and the ranks of each.
Gives:    one new arena per rank. If no other node reads a part of them, they are sealed at once.
          Otherwise a `SharedLoad`, whose slots are invalid until all of it has arrived.

Every piece is compared with its digest when it arrives, whatever its source. No slot is sealed
before all of its pieces have been compared. The assignment of reads to nodes therefore affects only
speed: a node that delivers nothing costs another read.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import xxhash

from ftrun import clock
from ftrun.errors import CheckpointError, LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Rank, Version, version
from ftrun.smp.checkpoint.index import CheckpointIndex, ShardFile
from ftrun.smp.checkpoint.piece_replicas import PieceReplicas
from ftrun.smp.checkpoint.reader import CheckpointFiles
from ftrun.smp.memory.arenas import create
from ftrun.snapshot.layout import Layout, parse_header
from ftrun.snapshot.load_shares import Place, company_of, ranks_at, share_of
from ftrun.wire.crash_points import crash_point
from ftrun.wire.shared_memory.arena import Arena, ArenaShape, SlotHeader, SlotState, table_digest

LOADED_GENERATION = -1
"""The generation of what was loaded: older than all that the run captures."""

_SLOT = 0
_RUN_BYTES = 16 << 20
"""Limit of one read of adjacent pieces."""

Check = Callable[[int], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadGroup:
    """Nodes that load a checkpoint at the same time.

    Args:
        ranks: of the new world, by node, in the same order everywhere.
        node: the index of this node.
    """

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
        source: the checkpoint.
        shards: the files of this node's ranks, in the order of its arenas.
        index: of the checkpoint.
        fds: of new arenas, one for each shard; the caller keeps them.
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
        """The pieces that are missing, with the node that reads each."""
        self.is_whole = False
        self.num_read = 0
        """Bytes that were read from storage."""
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
        """Return a piece that this node has loaded.

        Raises:
            LayoutUnknown: it has not.
        """
        place = self._here.get(digest)
        if place is None:
            raise LayoutUnknown("no piece with this digest was read here")
        return self.room(place)

    def room(self, place: Place) -> memoryview:
        rank, index = place
        layout, start = self._layouts[rank]
        piece = layout.pieces[index]
        at = start + piece.offset
        return self._arenas[rank].image(_SLOT)[at : at + piece.num_bytes]

    def digest(self, place: Place) -> int:
        rank, index = place
        return int(self._arenas[rank].table(_SLOT)[index])

    # --- filling -------------------------------------------------------------------------------

    def begin(
        self, node: int, ranks: Mapping[int, list[int]], tables: Mapping[int, Sequence[int]]
    ) -> None:
        """Read this node's share.

        Args:
            node: this one.
            ranks: by node; this node's are those of the arenas.
            tables: of the ranks of other nodes.

        Raises:
            CheckpointError, SnapshotCorrupt, LayoutUnknown, OSError: the checkpoint cannot be used.
        """
        for rank in self.ranks:
            self._read_head(rank)
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
            self._read(self._source, [place for place in share.own if place[0] == rank])
            crash_point("smp.checkpoint.shard_loaded")
        if not self.left:
            self.seal()

    def read_too(self, places: Sequence[Place]) -> None:
        """Read pieces that another node should have read; raises as `begin`."""
        with self._source.again() as source:
            self._read(source, places)

    def took(self, place: Place) -> None:
        """Check a piece that has arrived.

        Raises:
            SnapshotCorrupt: it differs from what was captured.
        """
        digest = self.digest(place)
        if xxhash.xxh3_64_intdigest(self.room(place)) != digest:
            rank, index = place
            pieces = self._shards[rank].num_pieces
            raise SnapshotCorrupt(what=self._what(rank), piece=index, pieces=pieces)
        self._here[digest] = place
        self.left.pop(place, None)

    def seal(self) -> None:
        assert not self.left
        for twin, place in self._twins:
            self.room(twin)[:] = self.room(place)
        for rank, arena in self._arenas.items():
            arena.write_header(_SLOT, self._header(rank, SlotState.SEALED))
        self.is_whole = True

    # --- details -------------------------------------------------------------------------------

    def _read(self, source: CheckpointFiles, places: Sequence[Place]) -> None:
        for rank in dict.fromkeys(rank for rank, _ in places):
            own = [place for place in places if place[0] == rank]
            try:
                self._read_runs(source, rank, own)
            except (CheckpointError, SnapshotCorrupt, OSError) as error:
                _log.warning("%s is read piece by piece: %s", self._what(rank), str(error))
                for place in own:
                    if self._here.get(self.digest(place)) != place:
                        self._read_piece(source, place)

    def _read_runs(self, source: CheckpointFiles, rank: int, places: Sequence[Place]) -> None:
        shard, what = self._shards[rank], self._what(rank)
        with source.opened(shard.file) as file:
            for run in self._runs(places):
                at, num_bytes = self._bytes_of(run)
                target = self._arenas[rank].image(_SLOT)[at : at + num_bytes]
                _check_length(file.read_into(target, at), target, what)
                self.num_read += num_bytes
                for place in run:
                    self.took(place)

    def _read_piece(self, source: CheckpointFiles, place: Place) -> None:
        """Read from the file of its rank, or from that of another rank that has the same piece."""
        try:
            self._read_runs(source, place[0], [place])
        except (CheckpointError, SnapshotCorrupt, OSError):
            rank, room = place[0], self.room(place)
            other = self._replicas.read(source, self.digest(place), room, but=rank)
            if other is None:
                raise
            self.num_read += len(room)
            self.took(place)
            _log.warning("%s: piece %d is read from rank %d", self._what(rank), place[1], other)

    def _what(self, rank: int) -> str:
        return f"{self._source.path}/{self._shards[rank].file}"

    def _header(self, rank: int, state: SlotState) -> SlotHeader:
        shard = self._shards[rank]
        at = self.version
        digest = int(shard.table_digest, 16)
        made = SlotHeader(state, at.generation, at.step, shard.num_bytes, digest, 0)
        return replace(made, sealed_ns=clock.now_ns())

    def _read_head(self, rank: int) -> None:
        shard, arena, what = self._shards[rank], self._arenas[rank], self._what(rank)
        arena.write_header(_SLOT, self._header(rank, SlotState.COPYING))
        table, image = arena.table(_SLOT), arena.image(_SLOT)
        _read_table(self._source, shard, table.cast("B"))
        with self._source.opened(shard.file) as file:
            start = min(8, len(image))
            _check_length(file.read_into(image[:start]), image[:start], what)
            end = 8 + int.from_bytes(image[:start], "little")
            if end <= len(image):
                rest = image[start:end]
                _check_length(file.read_into(rest, start), rest, what)
            # The digest table covers only the data, so the digest of the header is in the index.
            digest = xxhash.xxh3_64_hexdigest(image[:end]) if end <= len(image) else ""
        if digest != shard.header_digest:
            raise SnapshotCorrupt(what=f"{what}, header", piece=0, pieces=shard.num_pieces)
        layout, start = parse_header(image)
        if len(layout.pieces) != len(table):
            raise SnapshotCorrupt(what=f"{what}, digest table", piece=0, pieces=len(table))
        self._layouts[rank] = (layout, start)

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
    company: LoadGroup,
    check: Check,
) -> tuple[list[int], SharedLoad | None]:
    """Fill arenas with this node's share; return their descriptors, and the load if incomplete.

    Args:
        source: the checkpoint.
        index: of the checkpoint.
        world_size: of this run.
        company: the nodes that load it.
        check: raises MemoryTooSmall if this number of bytes does not fit.

    Raises:
        CheckpointError, SnapshotCorrupt, LayoutUnknown, OSError: the checkpoint cannot be used.
        MemoryTooSmall: the arenas do not fit.
    """
    node, shards = company.node, {shard.rank: shard for shard in index.shards}
    ranks = {
        other: company.loads(other, index, world_size)
        for other in company_of(node, len(company.ranks))
    }
    missing = [rank for rank in ranks[node] if rank not in shards]
    if missing:
        raise CheckpointError(f"{source.path}: its index has no rank {missing[0]}")
    own = [shards[rank] for rank in ranks[node]]
    shapes = [_shape(shard, index.world_size) for shard in own]
    for shard in own:
        _check_size(source, shard)
    check(sum(shape.total_bytes for shape in shapes))
    fds: list[int] = []
    try:
        fds.extend(create(shape) for shape in shapes)
        load = SharedLoad(source, own, index, fds)
        try:
            others = {r: shards[r] for other, some in ranks.items() if other != node for r in some}
            tables = {rank: _table_of(source, shard) for rank, shard in others.items()}
        except (KeyError, CheckpointError, SnapshotCorrupt, OSError):
            # Other nodes detect errors in their own files. Alone, this node may still succeed.
            tables, ranks = {}, {node: ranks[node]}
        load.begin(node, ranks, tables)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds, None if load.is_whole else load


def _table_of(source: CheckpointFiles, shard: ShardFile) -> Sequence[int]:
    table = memoryview(bytearray(8 * shard.num_pieces))
    _read_table(source, shard, table)
    return table.cast("Q")


def _read_table(source: CheckpointFiles, shard: ShardFile, target: memoryview) -> None:
    what = f"{source.path}/{shard.digests}"
    with source.opened(shard.digests) as file:
        _check_length(file.read_into(target), target, what)
    if table_digest(target) != int(shard.table_digest, 16):
        raise SnapshotCorrupt(what=f"{what}, digest table", piece=0, pieces=shard.num_pieces)


def _check_size(source: CheckpointFiles, shard: ShardFile) -> None:
    with source.opened(shard.file) as file:
        size = file.size
    if size != shard.num_bytes:
        raise CheckpointError(f"{source.path}/{shard.file} has {size} bytes of {shard.num_bytes}")


def _check_length(got: int, target: memoryview, what: str) -> None:
    if got < len(target):
        raise CheckpointError(f"{what} ends too early: {len(target) - got} bytes are missing")


def _shape(shard: ShardFile, world_size: int) -> ArenaShape:
    return ArenaShape(
        rank=shard.rank,
        world_size=world_size,
        image_bytes=shard.num_bytes,
        num_pieces=shard.num_pieces,
        layout_id=int(shard.layout_id, 16),
    )
