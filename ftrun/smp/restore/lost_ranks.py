"""Restores the shards of ranks that this node lacks, from the nodes of their groups.

Runs in:  the SMP, in the thread that fetches.
Takes in: the version, the ranks, and the groups that protected it.
Gives:    sealed arenas, equal in every byte to the lost arenas; or an error with the rank, the
          version, the nodes, and the missing data.

The ranks of a group with parity are restored from the mirror of their node, see `lost_node.py`.
If a group has no parity, or only the owner of the slots is left, whole slots are copied from the
node that holds them.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from ftrun.errors import FetchFailed, LayoutUnknown
from ftrun.ids import Rank, Version
from ftrun.smp.jobs import Steps
from ftrun.smp.memory.arenas import create
from ftrun.smp.redundancy.mirror import Mirror
from ftrun.smp.restore.fetch import Fetch
from ftrun.smp.restore.lost_node import LostNode, LostNodeRestore, check_mirror, slot_header
from ftrun.smp.restore.previous_world import PreviousWorld, PreviousWorldShards
from ftrun.snapshot.layout import Piece
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages.smp import NodeAddress, PreviousGroup
from ftrun.wire.shared_memory.arena import Arena, ArenaShape, SlotState

_SLOT = 0
_BATCH = 64


@dataclass(frozen=True, slots=True)
class FetchJob:
    """What to fetch.

    Args:
        wanted: the version.
        ranks: the local ranks without a slot of the version.
        groups: the groups that protected the version; together they contain all `ranks`.
        own: the address to which other nodes send their answers.
        check: raises MemoryTooSmall if this number of bytes does not fit.
        notice: called with a text for each rejected block or piece.
    """

    wanted: Version
    ranks: Sequence[Rank]
    groups: Sequence[PreviousGroup]
    world_size: int
    own: NodeAddress
    check: Callable[[int], None]
    notice: Callable[[str], None]


class LostRanks:
    """Restores the ranks of one job."""

    def __init__(self, job: FetchJob, fetch: Fetch) -> None:
        self._job = job
        self._fetch = fetch

    def steps(self) -> Steps[dict[Rank, int]]:
        """Return the descriptors of sealed arenas, which the caller closes; raises FtrunError."""
        fds: dict[Rank, int] = {}
        try:
            for lost in self._lost_nodes():
                found = self._copy_slots(lost) if lost.group.parity < 1 else self._restore(lost)
                fds.update((yield from found))
            self._fetch.check()
        except BaseException:
            self._close(fds)
            raise
        return fds

    def _lost_nodes(self) -> list[LostNode]:
        """Raises FetchFailed if no known group has protected one of the ranks."""
        job = self._job
        found = [
            LostNode(
                job.wanted,
                group,
                position,
                [Rank(rank) for rank in node.ranks if rank in job.ranks],
                job.own.node_id,
            )
            for group in job.groups
            for position, node in enumerate(group.nodes)
        ]
        missing = set(job.ranks) - {rank for lost in found for rank in lost.ranks}
        if missing:
            raise FetchFailed(
                f"ranks {sorted(missing)}, {job.wanted}: no known group has protected it"
            )
        return [lost for lost in found if lost.ranks]

    def _close(self, fds: dict[Rank, int]) -> None:
        for fd in fds.values():
            os.close(fd)
        fds.clear()

    # --- with parity -------------------------------------------------------------------------

    def _restore(self, lost: LostNode) -> Steps[dict[Rank, int]]:
        self._fetch.meet(lost.group.nodes)
        try:
            mirror = yield from self._mirror(lost)
        except LayoutUnknown as error:
            if lost.owner is None:
                raise FetchFailed(str(error)) from error
            # No node has the mirror any more. The owner has lost its part of the protection, but
            # it still has the slots.
            try:
                return (yield from self._copy_slots(lost))
            except LayoutUnknown as problem:
                raise FetchFailed(f"{error}; nor its slots ({problem})") from problem
        crash_point("smp.fetch.mirror_taken")
        fds: dict[Rank, int] = {}
        work: LostNodeRestore | None = None
        try:
            work = self._begin(lost, mirror, fds)
            yield from self._fetch.download(work)
            work.seal()
            crash_point("smp.fetch.sealed")
        except BaseException:
            self._close(fds)
            raise
        finally:
            if work is not None:
                work.close()
        return fds

    def _mirror(self, lost: LostNode) -> Steps[Mirror]:
        """Get the lost node's small state; raises LayoutUnknown if no node can deliver it."""
        problems = []
        for node in lost.mirror_holders:
            try:
                raw = yield from self._fetch.ask(node.node_id, lost.get_mirror)
                return self._opened(raw, lost)
            except LayoutUnknown as error:
                problems.append(f"{node.node_id}: {error}")
        raise LayoutUnknown(lost.missing("its small state", problems))

    def _opened(self, raw: bytearray, lost: LostNode) -> Mirror:
        """Parse the mirror; raise LayoutUnknown if it is not the mirror of this node."""
        mirror = Mirror(memoryview(raw))
        check_mirror(mirror, lost)
        return mirror

    def _begin(self, lost: LostNode, mirror: Mirror, fds: dict[Rank, int]) -> LostNodeRestore:
        """Create arenas, add their descriptors to `fds`, and copy the data that is on this node."""
        shapes = {Rank(head.rank): head.shape for head in mirror.head.ranks}
        self._job.check(sum(shapes[rank].total_bytes for rank in lost.ranks))
        arenas: dict[Rank, Arena] = {}
        try:
            for rank in lost.ranks:
                fds[rank] = create(shapes[rank])
                arenas[rank] = Arena(fds[rank], writable=True)
            served = self._fetch.rpc.served
            held = served.shards if served is not None else None
            return LostNodeRestore(lost, mirror, arenas, held, self._job.notice)
        except BaseException:
            for arena in arenas.values():
                arena.close()
            raise

    # --- without parity ----------------------------------------------------------------------

    def _copy_slots(self, lost: LostNode) -> Steps[dict[Rank, int]]:
        yield from ()  # the calls below wait without a yield
        job, served = self._job, self._fetch.rpc.served
        assert served is not None
        world = PreviousWorld(job.wanted, job.groups, job.own, job.own.node_id)
        shards = PreviousWorldShards(world, self._fetch, served, None)
        shapes = {rank: self._shape(shards, rank) for rank in lost.ranks}
        job.check(sum(shape.total_bytes for shape in shapes.values()))
        fds: dict[Rank, int] = {}
        try:
            for rank, shape in shapes.items():
                fds[rank] = create(shape)
                arena = Arena(fds[rank], writable=True)
                try:
                    _copy_slot(shards, rank, job.wanted, arena)
                finally:
                    arena.close()
        except BaseException:
            self._close(fds)
            raise
        return fds

    def _shape(self, shards: PreviousWorldShards, rank: Rank) -> ArenaShape:
        head = shards.head(rank)
        num_pieces = len(head.table)
        return ArenaShape(rank, self._job.world_size, head.image_bytes, num_pieces, head.layout_id)


def _copy_slot(shards: PreviousWorldShards, rank: Rank, wanted: Version, arena: Arena) -> None:
    """Fill and seal a slot; raises LayoutUnknown or FetchFailed if a piece is not available."""
    head, pieces = shards.head(rank), shards.layout(rank).pieces
    facts = (wanted, head.image_bytes, head.table_digest)
    arena.write_header(_SLOT, slot_header(SlotState.COPYING, *facts))
    start = len(head.header)
    image, table = arena.image(_SLOT), arena.table(_SLOT)
    image[:start] = head.header
    table[:] = head.table
    data = image[start:]
    for batch in _batches(pieces):
        end = pieces[batch[-1]].offset + pieces[batch[-1]].num_bytes
        shards.read([(rank, index) for index in batch], data[pieces[batch[0]].offset : end])
    for index, piece in enumerate(pieces):
        found = xxhash.xxh3_64_intdigest(data[piece.offset : piece.offset + piece.num_bytes])
        if found != head.table[index]:
            raise FetchFailed(f"piece {index} of rank {rank}, {wanted}, does not match its digest")
    arena.write_header(_SLOT, slot_header(SlotState.SEALED, *facts))


def _batches(pieces: Sequence[Piece]) -> list[list[int]]:
    found: list[list[int]] = []
    for index, piece in enumerate(pieces):
        before = pieces[index - 1]
        follows = index > 0 and before.offset + before.num_bytes == piece.offset
        if follows and len(found[-1]) < _BATCH:
            found[-1].append(index)
        else:
            found.append([index])
    return found
