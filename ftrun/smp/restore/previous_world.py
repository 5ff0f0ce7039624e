"""Reads the shards of a version, from any node, for ranks that did not write them.

Runs in:  the SMP, in threads of jobs; answers of other nodes arrive in the threads of links.
Takes in: the groups that held the version, and the present addresses of their nodes.
Gives:    the requested headers and pieces of the shard of any previous rank; or an error with the
          rank, the version and the nodes.
Survives: the loss of up to m nodes of each group.

If the node of a shard is reachable, the shard is read from it. If that node is lost, or the shard
is damaged, a mirror of that node's small state gives the location of each piece. A piece is in the
mirror itself, on any node that has an equal piece, or in blocks that are rebuilt from parity. This
node checks its own memory first, because it may hold the piece, a mirror or parity.

Blocks are longer than pieces. Each block is fetched once per request into a separate buffer, and
the requested bytes are copied from it. The size of a request is bounded, and so are its buffers.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import xxhash

from ftrun.errors import LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Rank, Version
from ftrun.smp.jobs import drive
from ftrun.smp.redundancy.mirror import Mirror
from ftrun.smp.restore.downloader import BLOCK, DownloadItem, get_pieces, piece_item
from ftrun.smp.restore.fetch import Fetch
from ftrun.smp.restore.lost_node import CodedBlocks, LostNode, check_mirror
from ftrun.smp.restore.piece_cache import PieceCache, PieceKey
from ftrun.smp.restore.restore_server import RestoreServer
from ftrun.snapshot.layout import Layout, parse_header
from ftrun.snapshot.shard_header import PackedShardHeader, unpack_header
from ftrun.wire.cluster import transfer as t
from ftrun.wire.messages.smp import NodeAddress, PreviousGroup
from ftrun.wire.shared_memory.arena import table_digest

Rebuild = Callable[[t.RebuildBlock], memoryview]


@dataclass(eq=False)
class WantedPiece:
    """A piece of the shard of a previous rank, and its destination."""

    rank: Rank
    index: int
    digest: int
    room: memoryview
    problems: list[str] = field(default_factory=list)

    @property
    def key(self) -> PieceKey:
        return self.digest, len(self.room)


@dataclass(eq=False)
class _Block:
    """A block of a lost node, pending or received."""

    lost: "MissingShards"
    number: int
    item: DownloadItem
    is_here: bool = False


class MissingShards:
    """The shards of one lost node; `rebuild` is None if this node has no parity."""

    def __init__(self, lost: LostNode, mirror: Mirror, *, rebuild: Rebuild | None) -> None:
        self.lost = lost
        self._mirror = mirror
        self._rebuild = rebuild
        self._coded = CodedBlocks(lost, mirror)
        self.space = self._coded.space
        self._mirrored = {rank: dict(mirror.mirrored(rank)) for rank in mirror.layouts}

    def add(self, one: WantedPiece, homes: "ShardLocations") -> None:
        mirrored = self._mirrored[one.rank].get(one.index)
        if mirrored is not None:
            one.room[:] = mirrored
            return
        blocks = self.space.blocks_with(one.rank, one.index)
        if blocks:
            homes.add_coded(one, [homes.block(self, block) for block in blocks])
        else:
            homes.add_piece(one, self._holders(one))

    def make_block(self, number: int) -> _Block:
        size = sum(extent.num_bytes for extent in self.space.extents(number))
        item = self._coded.item(number, [memoryview(bytearray(size))])
        block = _Block(self, number, item)
        own_id = self.lost.own_id
        if own_id in item.sources:
            item.sources.remove(own_id)
            block.is_here = self._is_rebuilt(item)
        return block

    def _is_rebuilt(self, item: DownloadItem) -> bool:
        """Rebuild a block from this node's parity; return False if that is not possible."""
        if self._rebuild is None:
            return False
        try:
            item.views[0][:] = self._rebuild(self.lost.rebuild_block(0, item.key))
        except LayoutUnknown as error:
            item.problems.append(f"{self.lost.own_id}: {error}")
            return False
        return True

    def piece_offset(self, one: WantedPiece) -> int:
        return self._mirror.layouts[one.rank].pieces[one.index].offset

    def _holders(self, one: WantedPiece) -> list[str]:
        for replicated in self._mirror.plan_of(one.rank).replicated:
            if any(run.first <= one.index < run.first + run.count for run in replicated.runs):
                places = self._mirror.head.holders[replicated.holders]
                return self.lost.names(places)
        return []


class ShardLocations:
    """Sources of the pieces of one request, a `FetchSource`; `alive`: other reachable nodes."""

    def __init__(self, wanted: Version, alive: Sequence[str]) -> None:
        self.missing: list[WantedPiece] = []
        """Pieces that no node could deliver."""
        self._wanted = wanted
        self._alive = list(alive)
        self._pieces: dict[DownloadItem, WantedPiece] = {}
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._by_item: dict[DownloadItem, _Block] = {}
        self._coded: list[tuple[WantedPiece, list[_Block]]] = []
        self._next: list[DownloadItem] = []

    def add_piece(self, one: WantedPiece, best: Sequence[str]) -> None:
        first = [node for node in best if node in self._alive]
        others = [node for node in self._alive if node not in first]
        item = piece_item(one.digest, one.room, [*first, *others])
        self._pieces[item] = one
        self._next.append(item)

    def block(self, lost: MissingShards, number: int) -> _Block:
        key = (id(lost), number)
        if key not in self._blocks:
            made = self._blocks[key] = lost.make_block(number)
            self._by_item[made.item] = made
            if not made.is_here:
                self._next.append(made.item)
        return self._blocks[key]

    def add_coded(self, one: WantedPiece, blocks: list[_Block]) -> None:
        self._coded.append((one, blocks))

    def items(self) -> list[DownloadItem]:
        return self._next

    def question(self, number: int, batch: Sequence[DownloadItem]) -> t.GetPieces | t.RebuildBlock:
        if batch[0].kind == BLOCK:
            return self._by_item[batch[0]].lost.lost.rebuild_block(number, batch[0].key)
        return get_pieces(number, self._wanted, batch)

    def next_items(self, failed: Sequence[DownloadItem]) -> list[DownloadItem]:
        """Assemble pieces whose blocks have arrived; return the blocks to request elsewhere."""
        for item in failed:
            if item in self._pieces:
                self._lack(self._pieces[item], item.problems)
        again: dict[DownloadItem, None] = {}
        left: list[tuple[WantedPiece, list[_Block]]] = []
        for one, blocks in self._coded:
            lacking = [block.item for block in blocks if block.item in failed]
            if lacking:
                self._lack(one, lacking[0].problems)
            elif not _joined(one, blocks):
                self._mistrust(blocks)
                if all(block.item.sources for block in blocks):
                    again.update(dict.fromkeys(block.item for block in blocks))
                    left.append((one, blocks))
                else:
                    self._lack(one, blocks[0].item.problems)
        self._coded = left
        return list(again)

    def _lack(self, one: WantedPiece, problems: Sequence[str]) -> None:
        one.problems.extend(problems)
        self.missing.append(one)

    @staticmethod
    def _mistrust(blocks: Sequence[_Block]) -> None:
        for block in blocks:
            source = block.item.source or "this node"
            block.item.problems.append(
                f"{source}: its rebuilt block does not match the captured digests"
            )


def _joined(one: WantedPiece, blocks: Sequence[_Block]) -> bool:
    """Copy a piece from its blocks; return True if its digest matches."""
    lost = blocks[0].lost
    offset = lost.piece_offset(one)
    for block in blocks:
        at = 0
        for extent in lost.space.extents(block.number):
            low = max(extent.offset, offset)
            high = min(extent.offset + extent.num_bytes, offset + len(one.room))
            if extent.rank == one.rank and low < high:
                begin = at + low - extent.offset
                one.room[low - offset : high - offset] = block.item.views[0][
                    begin : begin + high - low
                ]
            at += extent.num_bytes
    return xxhash.xxh3_64_intdigest(one.room) == one.digest


_TIMES = 3
"""Rounds of one read: after each, a shard changes between its whole copy and its parts."""


@dataclass(frozen=True, slots=True)
class PreviousWorld:
    """The version to read, and the nodes that hold it.

    The groups contain all previous ranks. `own` is the address of this SMP; None if there are no
    other SMPs. `num_readers` is the number of ranks of this node.
    """

    wanted: Version
    groups: Sequence[PreviousGroup]
    own: NodeAddress | None
    own_id: str
    num_readers: int = 1


@dataclass(frozen=True, slots=True)
class _Shard:
    """A shard of a previous rank; `node_id` has it whole; empty: it is read in parts."""

    head: PackedShardHeader
    layout: Layout
    node_id: str
    lost: MissingShards | None


class PreviousWorldShards:
    """The shards of one previous world, for one generation. Thread-safe."""

    def __init__(
        self, world: PreviousWorld, fetch: Fetch, served: RestoreServer, rebuild: Rebuild | None
    ) -> None:
        self.world = world
        self.fetch = fetch
        self.pieces = PieceCache() if world.num_readers > 1 else PieceCache(lambda: 0)
        """Of other nodes."""
        self._served = served
        self._rebuild = rebuild
        self._shards: dict[Rank, _Shard] = {}
        self._has_met = False
        self._headers_lock = threading.Lock()

    def head(self, rank: Rank) -> PackedShardHeader:
        """Return the checked header of a shard; raises LayoutUnknown if no node has the shard."""
        with self._headers_lock:
            if rank not in self._shards:
                self._shards[rank] = self._find(rank)
            return self._shards[rank].head

    def layout(self, rank: Rank) -> Layout:
        self.head(rank)
        return self._shards[rank].layout

    def read(self, wanted: Sequence[tuple[Rank, int]], out: memoryview) -> None:
        """Read pieces (rank, index) into `out` without gaps; raises LayoutUnknown."""
        left = self._places(wanted, out)
        for _ in range(_TIMES):
            left = self._fetch([one for one in left if not self._copy_own(one)])
            if not left:
                return
            for rank in {one.rank for one in left}:
                self._find_another_way(rank, left)
        raise LayoutUnknown(self._missing(left[0]))

    # --- details -----------------------------------------------------------------------------

    def _places(self, wanted: Sequence[tuple[Rank, int]], out: memoryview) -> list[WantedPiece]:
        found, at = [], 0
        for rank, index in wanted:
            head = self.head(rank)
            piece = self._shards[rank].layout.pieces[index]
            room = out[at : at + piece.num_bytes]
            found.append(WantedPiece(rank, index, head.table[index], room))
            at += piece.num_bytes
        return found

    def _copy_own(self, one: WantedPiece) -> bool:
        try:
            one.room[:] = self._served.shards.find(one.digest)
        except LayoutUnknown:
            return False
        except SnapshotCorrupt as error:
            self.fetch.rpc.exclude(error, get_pieces(0, self.world.wanted, []))
            return False
        return True

    def _fetch(self, wanted: Sequence[WantedPiece]) -> list[WantedPiece]:
        """Get pieces of other nodes; return the pieces that no node could deliver."""
        equal: dict[PieceKey, list[WantedPiece]] = {}
        for one in wanted:
            equal.setdefault(one.key, []).append(one)

        def fetch(keys: Sequence[PieceKey]) -> list[PieceKey]:
            return [one.key for one in self._download([equal[key][0] for key in keys])]

        missing = self.pieces.fill({key: same[0].room for key, same in equal.items()}, fetch)
        for key, (first, *others) in equal.items():
            for one in others:
                if key in missing:
                    one.problems.extend(first.problems)
                else:
                    one.room[:] = first.room
        return [one for one in wanted if one.key in missing]

    def _download(self, wanted: Sequence[WantedPiece]) -> list[WantedPiece]:
        locations = ShardLocations(self.world.wanted, self._alive)
        for one in wanted:
            shard = self._shards[one.rank]
            if shard.lost is not None:
                shard.lost.add(one, locations)
            else:
                locations.add_piece(one, [shard.node_id])
        if locations.items():
            self._meet()
        drive(self.fetch.download(locations))
        return locations.missing

    # --- headers --- -------------------------------------------------------------------------

    @property
    def _alive(self) -> list[str]:
        own_id = self.world.own_id
        nodes = [node for group in self.world.groups for node in group.nodes]
        found = [n.node_id for n in nodes if n.smp_port > 0 and n.node_id != own_id]
        return list(dict.fromkeys(found))

    def _meet(self) -> None:
        if self._has_met or self.world.own is None:
            return
        self._has_met = True
        for group in self.world.groups:
            self.fetch.meet(group.nodes)

    def _find(self, rank: Rank) -> _Shard:
        """Find a shard, whole or in parts; raise LayoutUnknown if no node has it."""
        problems: list[str] = []
        for group in self.world.groups:
            for node in group.nodes:
                if rank not in node.ranks or node.node_id not in self._alive:
                    continue
                try:
                    return self._whole(rank, group, node)
                except LayoutUnknown as error:
                    problems.append(f"{node.node_id}: {error}")
        try:
            return self._in_parts(rank)
        except LayoutUnknown as error:
            problems.append(str(error))
        raise LayoutUnknown(
            f"rank {rank}, {self.world.wanted}: its shard cannot be fetched ({'; '.join(problems)})"
        )

    def _whole(self, rank: Rank, group: PreviousGroup, node: NodeAddress) -> _Shard:
        def ask(number: int) -> t.GetShardHeader:
            at = self.world.wanted
            return t.GetShardHeader(number, at.generation, at.step, 0, group.generation, rank=rank)

        head = unpack_header(memoryview(self._ask(node.node_id, ask)))
        layout, start = parse_header(head.header, image_bytes=head.image_bytes)
        is_sound = start == len(head.header) and len(layout.pieces) == len(head.table)
        if not is_sound or table_digest(head.table) != head.table_digest:
            raise LayoutUnknown(f"its header is not one of rank {rank}")
        return _Shard(head, layout, node.node_id, None)

    def _in_parts(self, rank: Rank) -> _Shard:
        """Find the parts of a shard; raise LayoutUnknown if no mirror of its node is available."""
        problems: list[str] = []
        for group in self.world.groups:
            for position, node in enumerate(group.nodes):
                if rank not in node.ranks or group.parity < 1:
                    continue
                ranks = [Rank(one) for one in node.ranks]
                lost = LostNode(self.world.wanted, group, position, ranks, self.world.own_id)
                for holder in lost.mirror_nodes:
                    try:
                        return self._shard_of(rank, lost, self._mirror(lost, holder.node_id))
                    except LayoutUnknown as error:
                        problems.append(f"{holder.node_id}: {error}")
        raise LayoutUnknown("; ".join(problems) or "no group protects it")

    def _mirror(self, lost: LostNode, holder_id: str) -> Mirror:
        if holder_id == self.world.own_id:
            ask = lost.get_mirror(0)
            try:
                raw = memoryview(b"".join(self._served.mirror(ask)))
            except SnapshotCorrupt as error:
                self.fetch.rpc.exclude(error, ask)
                raise LayoutUnknown(str(error)) from error
        else:
            raw = memoryview(self._ask(holder_id, lost.get_mirror))
        mirror = Mirror(raw)
        check_mirror(mirror, lost)
        return mirror

    def _shard_of(self, rank: Rank, lost: LostNode, mirror: Mirror) -> _Shard:
        about = next(head for head in mirror.head.ranks if head.rank == rank)
        head = PackedShardHeader(
            mirror.headers[rank],
            mirror.tables[rank],
            about.image_bytes,
            about.layout_id,
            about.table_digest,
        )
        missing = MissingShards(lost, mirror, rebuild=self._rebuild)
        return _Shard(head, mirror.layouts[rank], "", missing)

    def _ask(
        self, node_id: str, question: Callable[[int], t.GetShardHeader | t.GetMirror]
    ) -> bytearray:
        if reason := self.fetch.loss_reason(node_id):
            raise LayoutUnknown(reason)
        if node_id not in self._alive:
            raise LayoutUnknown("the node is unreachable")
        self._meet()
        return drive(self.fetch.ask(node_id, question))

    def _find_another_way(self, rank: Rank, left: Sequence[WantedPiece]) -> None:
        """After pieces were missing: change from the whole copy of a shard to its parts, or back.

        When the version is protected again, the previous parity and mirrors are freed. Some node
        then has the whole shard.
        """
        with self._headers_lock:
            try:
                is_whole = self._shards[rank].lost is None
                self._shards[rank] = self._in_parts(rank) if is_whole else self._find(rank)
            except LayoutUnknown as error:
                for one in left:
                    one.problems.append(str(error))

    def _missing(self, one: WantedPiece) -> str:
        reason = "; ".join(dict.fromkeys(one.problems)) or "no node has it"
        gone = [n.node_id for g in self.world.groups for n in g.nodes if n.smp_port <= 0]
        return (
            f"piece {one.index} of rank {one.rank}, {self.world.wanted}: cannot fetch it "
            f"({reason}); unreachable nodes: {', '.join(gone) or 'none'}"
        )
