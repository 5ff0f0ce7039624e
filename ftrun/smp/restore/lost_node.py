"""Restores the ranks of a lost node: what is fetched, and the destination of each part.

Runs in:  the SMP, in the thread that fetches.
Takes in: the group that protected the node, its mirror, new arenas.
Gives:    items to download, the requests for them, sealed slots; error texts for what is missing.

The mirror lists the location of all bytes that it does not contain. Replicas are requested from any
node that has a piece with that digest, and blocks from the survivors, which rebuild them. Finally
every piece is compared with the digest table, and the slots are sealed.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from ftrun import clock
from ftrun.erasure.codec import MAX_DATA, MAX_PARITY
from ftrun.erasure.groups import ProtectionGroup
from ftrun.errors import FetchFailed, LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Rank, Version
from ftrun.smp.memory.sealed_shards import SealedShards
from ftrun.smp.redundancy.mirror import Mirror
from ftrun.smp.restore.downloader import BLOCK, PIECE, DownloadItem, get_pieces, piece_item
from ftrun.snapshot.redundancy import MAX_BLOCK_BYTES, Extent, StripeSpace
from ftrun.wire.cluster import transfer as t
from ftrun.wire.messages.smp import NodeAddress, PreviousGroup
from ftrun.wire.shared_memory.arena import Arena, SlotHeader, SlotState

_SLOT = 0


@dataclass(frozen=True, slots=True)
class LostNode:
    """The node at `position` of a group, whose `ranks` are fetched by the node `own_id`."""

    wanted: Version
    group: PreviousGroup
    position: int
    ranks: Sequence[Rank]
    own_id: str

    @property
    def node_id(self) -> str:
        return self.group.nodes[self.position].node_id

    @property
    def alive(self) -> list[NodeAddress]:
        return [node for node in self.group.nodes if node.smp_port > 0]

    @property
    def owner(self) -> NodeAddress | None:
        """The node itself, if it is still reachable because a rank has only moved away from it."""
        node = self.group.nodes[self.position]
        return node if node.smp_port > 0 and node.node_id != self.own_id else None

    @property
    def alive_positions(self) -> list[int]:
        nodes = enumerate(self.group.nodes)
        return [at for at, node in nodes if node.smp_port > 0 or node.node_id == self.own_id]

    @property
    def mirror_nodes(self) -> list[NodeAddress]:
        """The nodes that store the small state of the lost node: the m after it."""
        count = len(self.group.nodes)
        ahead = range(1, self.group.parity + 1)
        return [self.group.nodes[(self.position + at) % count] for at in ahead]

    @property
    def mirror_holders(self) -> list[NodeAddress]:
        found = [node for node in self.mirror_nodes if node.smp_port > 0]
        return found if self.owner is None else [self.owner, *found]

    def names(self, places: Sequence[int]) -> list[str]:
        return [self.group.nodes[position].node_id for position in places]

    def get_mirror(self, number: int) -> t.GetMirror:
        return t.GetMirror(*self._name(number), position=self.position)

    def rebuild_block(self, number: int, stripe: int) -> t.RebuildBlock:
        alive = [position for position in self.alive_positions if position != self.position]
        return t.RebuildBlock(
            *self._name(number), position=self.position, stripe=stripe, alive=alive
        )

    def _name(self, number: int) -> tuple[int, int, int, int, int]:
        at, group_id = self.wanted, self.protection.id
        return number, at.generation, at.step, group_id, self.group.generation

    @property
    def protection(self) -> ProtectionGroup:
        names = tuple(node.node_id for node in self.group.nodes)
        return ProtectionGroup(names, self.group.parity, self.group.is_ring)

    def missing(self, what: str, problems: Sequence[str]) -> str:
        group = self.group
        gone = [node.node_id for node in group.nodes if node.smp_port <= 0]
        needed = f"{self.protection.data} are needed"
        if group.is_ring:
            needed = f"a copy is on {self.mirror_nodes[0].node_id}"
        noun = "rank" if len(self.ranks) == 1 else "ranks"
        ranks = ", ".join(map(str, self.ranks))
        reason = "; ".join(dict.fromkeys(problems)) or "no node has it"
        return (
            f"{noun} {ranks} of node {self.node_id}, {self.wanted}: cannot fetch {what} "
            f"({reason}). "
            f"{len(self.alive)} of the {len(group.nodes)} nodes of its group are reachable and "
            f"{needed}; unreachable: {', '.join(gone) or 'none'}"
        )


class CodedBlocks:
    """The coded blocks of a lost node."""

    def __init__(self, lost: LostNode, mirror: Mirror) -> None:
        head = mirror.head
        pieces = {rank: layout.pieces for rank, layout in mirror.layouts.items()}
        self.space = StripeSpace(head.own, pieces, head.block_bytes)
        self._stripes = lost.protection.stripes(head.block_bytes)
        self._lost = lost

    def item(self, block: int, views: Sequence[memoryview]) -> DownloadItem:
        """Return the item of a block. Its sources are the reachable nodes with its parity."""
        lost = self._lost
        stripe = self._stripes.stripe_of(lost.position, block)
        holders = [at for at in self._stripes.parity_nodes(stripe) if at in lost.alive_positions]
        return DownloadItem(
            kind=BLOCK,
            key=stripe,
            num_bytes=sum(map(len, views)),
            views=views,
            sources=deque(lost.names(_turned(holders, stripe // self._stripes.n))),
        )


class LostNodeRestore:
    """Restores the state of one lost node into arenas; a `FetchSource`.

    `held` are the shards of the version on this node. `notice` is called with what was rejected on
    the way. Raises LayoutUnknown if the mirror is not of this node and version.
    """

    def __init__(
        self,
        lost: LostNode,
        mirror: Mirror,
        arenas: Mapping[Rank, Arena],
        held: SealedShards | None,
        notice: Callable[[str], None],
    ) -> None:
        self._lost = lost
        self._mirror = mirror
        self._arenas = dict(arenas)
        self._held = held
        self._notice = notice
        self._headers = {head.rank: head for head in mirror.head.ranks}
        self._twins: list[tuple[DownloadItem, list[tuple[Rank, int]]]] = []
        self._blocks: dict[int, DownloadItem] = {}
        self._num_replicas = 0
        self._coded = CodedBlocks(lost, mirror)
        for rank, arena in self._arenas.items():
            self._begin(rank, arena)

    def items(self) -> list[DownloadItem]:
        replicas = self._replica_items()
        if self._lost.owner is None:
            return replicas + self._block_items()
        # The owner still has all of it, so nothing has to be rebuilt.
        return replicas + self._coded_pieces(self._lost.owner)

    def question(self, number: int, batch: Sequence[DownloadItem]) -> t.GetPieces | t.RebuildBlock:
        if batch[0].kind == PIECE:
            return get_pieces(number, self._lost.wanted, batch)
        return self._lost.rebuild_block(number, batch[0].key)

    def next_items(self, failed: Sequence[DownloadItem]) -> list[DownloadItem]:
        """Return the blocks to request again; raises as `FetchSource.next_items`.

        Raises FetchFailed if no source can deliver an item. Raises SnapshotCorrupt if a piece is
        damaged whose digest was checked on arrival, so memory is failing.
        """
        if failed:
            if self._blocks or not all(item.is_coded for item in failed):
                what = _described(failed[0])
                raise FetchFailed(self._lost.missing(what, failed[0].problems))
            # The other nodes rebuild what the node itself can no longer deliver.
            return self._block_items()
        self._copy_twins()
        found = self._bad_items()
        for item in found:
            reason = f"{item.source}: its rebuilt block does not match the captured digests"
            self._notice(f"stripe {item.key}, {self._lost.wanted}: {reason}")
            item.problems.append(reason)
        return found

    def seal(self) -> None:
        """Seal the slots, after every digest has matched."""
        for rank, arena in self._arenas.items():
            header = self._header(rank, SlotState.SEALED)
            arena.write_header(_SLOT, header)

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()

    # --- details -----------------------------------------------------------------------------

    def _copy_twins(self) -> None:
        """Copy pieces that several ranks hold alike, because each was fetched only once."""
        for item, places in self._twins:
            for rank, index in places:
                self._piece(rank, index)[:] = item.views[0]

    def _bad_items(self) -> list[DownloadItem]:
        """Return the blocks with damaged pieces, to be requested from their next source."""
        bad: set[int] = set()
        for rank in self._arenas:
            table = self._mirror.tables[rank]
            for index, digest in enumerate(table):
                if xxhash.xxh3_64_intdigest(self._piece(rank, index)) != digest:
                    blocks = self._coded.space.blocks_with(rank, index) if self._blocks else []
                    if not blocks:
                        what = f"rank {rank}, {self._lost.wanted}"
                        raise SnapshotCorrupt(what=what, piece=index, pieces=len(table))
                    bad.update(blocks)
        return [self._blocks[block] for block in sorted(bad)]

    def _begin(self, rank: Rank, arena: Arena) -> None:
        arena.write_header(_SLOT, self._header(rank, SlotState.COPYING))
        header = self._mirror.headers[rank]
        arena.image(_SLOT)[: len(header)] = header
        arena.table(_SLOT)[:] = self._mirror.tables[rank]
        for index, view in self._mirror.mirrored(rank):
            self._piece(rank, index)[:] = view

    def _header(self, rank: Rank, state: SlotState) -> SlotHeader:
        head = self._headers[rank]
        return slot_header(state, self._lost.wanted, head.image_bytes, head.table_digest)

    def _replica_items(self) -> list[DownloadItem]:
        found: dict[int, tuple[DownloadItem, list[tuple[Rank, int]]]] = {}
        for rank in self._arenas:
            table = self._mirror.tables[rank]
            for replicated in self._mirror.plan_of(rank).replicated:
                for run in replicated.runs:
                    for index in range(run.first, run.first + run.count):
                        digest = table[index]
                        if digest in found:
                            found[digest][1].append((rank, index))
                        elif not self._copy_own(rank, index, digest):
                            holders = self._mirror.head.holders[replicated.holders]
                            item = self._replica(rank, index, digest, holders)
                            found[digest] = (item, [])
        self._twins = list(found.values())
        return [item for item, _ in found.values()]

    def _copy_own(self, rank: Rank, index: int, digest: int) -> bool:
        """Copy an equal piece from a slot of this node; return False if there is none."""
        if self._held is None:
            return False
        try:
            self._piece(rank, index)[:] = self._held.find(digest)
        except (LayoutUnknown, SnapshotCorrupt):
            return False
        return True

    def _replica(self, rank: Rank, index: int, digest: int, holders: Sequence[int]) -> DownloadItem:
        lost = self._lost
        best = [at for at in holders if at in lost.alive_positions and at != lost.position]
        others = [at for at in lost.alive_positions if at not in best]
        self._num_replicas += 1
        names = lost.names([*_turned(best, self._num_replicas), *others])
        return piece_item(digest, self._piece(rank, index), names)

    def _coded_pieces(self, owner: NodeAddress) -> list[DownloadItem]:
        items = []
        for rank in self._arenas:
            table = self._mirror.tables[rank]
            for run in self._mirror.plan_of(rank).coded:
                for index in range(run.first, run.first + run.count):
                    room = self._piece(rank, index)
                    items.append(piece_item(table[index], room, [owner.node_id], is_coded=True))
        return items

    def _block_items(self) -> list[DownloadItem]:
        space = self._coded.space
        scratch = memoryview(bytearray(space.block_bytes))
        wanted = {block for rank in self._arenas for block in space.blocks_of(rank)}
        for block in sorted(wanted):
            views = [self._room(extent, scratch) for extent in space.extents(block)]
            self._blocks[block] = self._coded.item(block, views)
        return list(self._blocks.values())

    def _room(self, extent: Extent, scratch: memoryview) -> memoryview:
        """Return the destination of block bytes; bytes of ranks not requested go to `scratch`."""
        rank = Rank(extent.rank)
        if rank not in self._arenas:
            return scratch[: extent.num_bytes]
        at = self._headers[rank].header_bytes + extent.offset
        return self._arenas[rank].image(_SLOT)[at : at + extent.num_bytes]

    def _piece(self, rank: Rank, index: int) -> memoryview:
        piece = self._mirror.layouts[rank].pieces[index]
        at = self._headers[rank].header_bytes + piece.offset
        return self._arenas[rank].image(_SLOT)[at : at + piece.num_bytes]


def slot_header(
    state: SlotState, wanted: Version, image_bytes: int, table_digest: int
) -> SlotHeader:
    sealed_ns = clock.now_ns() if state is SlotState.SEALED else 0
    return SlotHeader(state, wanted.generation, wanted.step, image_bytes, table_digest, sealed_ns)


def _described(item: DownloadItem) -> str:
    if item.kind == PIECE:
        return f"{item.num_bytes} bytes of a replica"
    return f"its block of stripe {item.key}"


def check_mirror(mirror: Mirror, lost: LostNode) -> None:
    """Raise LayoutUnknown if this is not the requested mirror."""
    head = mirror.head
    nodes = [member.node_id for member in head.members]
    is_it = (
        head.version == lost.wanted
        and head.protected_in == lost.group.generation
        and head.position == lost.position
        and head.parity == lost.group.parity
        and nodes == [node.node_id for node in lost.group.nodes]
    )
    is_sane = (
        1 <= head.parity < len(nodes)
        and len(nodes) <= MAX_DATA + MAX_PARITY
        and 0 < head.block_bytes <= MAX_BLOCK_BYTES
        and {plan.rank for plan in head.own.ranks} >= set(lost.ranks)
        and {rank.rank for rank in head.ranks} >= set(lost.ranks)
    )
    if not (is_it and is_sane):
        raise LayoutUnknown(f"received a mirror of {head.version} instead of {lost.wanted}")


def _turned(places: list[int], times: int) -> list[int]:
    """Rotate the list by `times`, so that all positions get equally many requests."""
    at = times % max(1, len(places))
    return places[at:] + places[:at]
