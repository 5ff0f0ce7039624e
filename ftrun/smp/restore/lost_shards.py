"""Pieces of shards whose node is lost: their present locations, and the items to download.

Runs in:  the SMP, in a thread of a job.
Takes in: the mirror of a lost node; the requested pieces, each with its buffer.
Gives:    items to download; pieces assembled from blocks and compared with their digests.

Blocks are longer than pieces. Each block is fetched once per request into memory of its own, and
the requested bytes are copied from it. A request is bounded, so this memory is bounded too.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import xxhash

from ftrun.errors import LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Rank, Version
from ftrun.smp.redundancy.mirror import Mirror
from ftrun.smp.restore.downloader import BLOCK, PIECE, DownloadItem, get_pieces
from ftrun.smp.restore.lost_node import CodedBlocks, LostNode
from ftrun.wire.cluster import transfer as t

Rebuild = Callable[[t.RebuildBlock], memoryview]


@dataclass(eq=False)
class WantedPiece:
    """A piece of the shard of a previous rank, and its destination."""

    rank: Rank
    index: int
    digest: int
    room: memoryview
    problems: list[str] = field(default_factory=list)


@dataclass(eq=False)
class _Block:
    """A block of a lost node, pending or received."""

    lost: "MissingShards"
    number: int
    item: DownloadItem
    is_here: bool = False


class MissingShards:
    """The shards of one lost node.

    Args:
        lost: the node.
        mirror: of the lost node.
        rebuild: rebuilds a block with this node's own parity; None if it has none.
    """

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
        """Rebuild a block with this node's own parity; return False if that is not possible."""
        if self._rebuild is None:
            return False
        try:
            item.views[0][:] = self._rebuild(self.lost.rebuild_block(0, item.key))
        except (LayoutUnknown, SnapshotCorrupt) as error:
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
    """The sources of the pieces of one request; a `FetchSource`.

    Args:
        wanted: the version.
        alive: other nodes that can be asked for a piece, in any order.
    """

    def __init__(self, wanted: Version, alive: Sequence[str]) -> None:
        self.missing: list[WantedPiece] = []
        """The pieces that no node could deliver."""
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
        item = DownloadItem(
            kind=PIECE,
            key=one.digest,
            num_bytes=len(one.room),
            views=[one.room],
            sources=deque([*first, *others]),
            digest=one.digest,
        )
        self._pieces[item] = one
        self._next.append(item)

    def block(self, lost: MissingShards, number: int) -> _Block:
        """Return a block of a lost node, which is fetched at most once."""
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
        """Assemble what has arrived; return the blocks to request from their next source."""
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
            block.item.problems.append(f"{source}: what it has rebuilt is not what was captured")


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
