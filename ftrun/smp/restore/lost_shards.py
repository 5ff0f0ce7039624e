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

from ftrun.erasure.groups import ProtectionGroup
from ftrun.erasure.stripes import Stripes
from ftrun.errors import LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Rank, Version
from ftrun.smp.redundancy.mirror import Mirror
from ftrun.smp.restore.downloader import BLOCK, PIECE, DownloadItem
from ftrun.snapshot.stripe_space import StripeSpace
from ftrun.wire.cluster import transfer as t
from ftrun.wire.messages.smp import PreviousGroup

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
        group: the group that protected it, with the present addresses of its nodes.
        mirror: of the lost node.
        own_id: this node.
        rebuild: rebuilds a block with this node's own parity; None if it has none.
    """

    def __init__(
        self, group: PreviousGroup, mirror: Mirror, *, own_id: str, rebuild: Rebuild | None
    ) -> None:
        head = mirror.head
        self._group = group
        self._mirror = mirror
        self._own_id = own_id
        self._rebuild = rebuild
        self._names = [node.node_id for node in group.nodes]
        self._alive = [at for at, node in enumerate(group.nodes) if self._is_here(at)]
        pieces = {rank: layout.pieces for rank, layout in mirror.layouts.items()}
        self.space = StripeSpace(head.own, pieces, head.block_bytes)
        self._stripes = Stripes(len(head.members), head.parity, head.block_bytes)
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
        place = self._mirror.head.place
        stripe = self._stripes.stripe_of(place, number)
        keepers = [at for at in self._stripes.parity_nodes(stripe) if at in self._alive]
        size = sum(extent.num_bytes for extent in self.space.extents(number))
        names = [self._names[at] for at in keepers]
        made = DownloadItem(
            kind=BLOCK,
            key=stripe,
            num_bytes=size,
            views=[memoryview(bytearray(size))],
            sources=deque(name for name in names if name != self._own_id),
        )
        block = _Block(self, number, made)
        if self._own_id in names and self._rebuild is not None:
            try:
                made.views[0][:] = self._rebuild(self.question(0, stripe))
                block.is_here = True
            except (LayoutUnknown, SnapshotCorrupt) as error:
                made.problems.append(f"{self._own_id}: {error}")
        return block

    def question(self, number: int, stripe: int) -> t.RebuildBlock:
        head = self._mirror.head
        return t.RebuildBlock(
            number,
            head.generation,
            head.step,
            ProtectionGroup(tuple(self._names), self._group.parity).id,
            self._group.generation,
            place=head.place,
            stripe=stripe,
            alive=[at for at in self._alive if at != head.place],
        )

    def piece_offset(self, one: WantedPiece) -> int:
        return self._mirror.layouts[one.rank].pieces[one.index].offset

    def _is_here(self, place: int) -> bool:
        node = self._group.nodes[place]
        return node.smp_port > 0 or node.node_id == self._own_id

    def _holders(self, one: WantedPiece) -> list[str]:
        for replicated in self._mirror.plan_of(one.rank).replicated:
            if any(run.first <= one.index < run.first + run.count for run in replicated.runs):
                places = self._mirror.head.holders[replicated.holders]
                return [self._names[at] for at in places]
        return []


class ShardLocations:
    """The sources of the pieces of one request.

    Args:
        alive: other nodes that can be asked for a piece, in any order.
    """

    def __init__(self, alive: Sequence[str]) -> None:
        self.missing: list[WantedPiece] = []
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
        found, self._next = self._next, []
        return found

    def question(
        self, number: int, wanted: Version, batch: Sequence[DownloadItem]
    ) -> t.GetPieces | t.RebuildBlock:
        if batch[0].kind == BLOCK:
            return self._by_item[batch[0]].lost.question(number, batch[0].key)
        digests = b"".join(item.key.to_bytes(8, "little") for item in batch)
        return t.GetPieces(number, wanted.generation, wanted.step, 0, 0, digests=digests)

    def finish(self, failed: Sequence[DownloadItem]) -> list[DownloadItem]:
        """Assemble what has arrived; return the blocks to request from their next source.

        Args:
            failed: items that no source could deliver.
        """
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

    def try_again(self, items: Sequence[DownloadItem]) -> None:
        self._next.extend(items)

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
