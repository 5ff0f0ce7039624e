"""Restores a version for local ranks that have no slot of it, and answers waiting workers.

Runs in:  the SMP, in the server thread; the fetch has a thread of its own.
Takes in: the version that a generation starts from, and the nodes that have it.
Gives:    ArenaGranted, RestoreReady or RestoreFailed to the agent; arenas to waiting workers. An
          arena is sealed and equal in every byte to the lost one. An error names rank, version,
          nodes, and what is missing.

The ranks of a group with parity are restored from the mirror of their node, see `lost_node.py`.
Without parity, whole slots are copied from a node that holds them.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import xxhash

from ftrun import clock
from ftrun.errors import FetchFailed, LayoutUnknown
from ftrun.ids import Generation, Rank, Version
from ftrun.smp.checkpoint.service import check_available
from ftrun.smp.checkpoint.shared_load import SharedLoad
from ftrun.smp.client import Requester
from ftrun.smp.jobs import JobLanes, Steps
from ftrun.smp.memory.arenas import ArenaStore, SmpArena, create
from ftrun.smp.redundancy.mirror import Mirror
from ftrun.smp.restore.fetch import SHARE_TIMEOUT_S, Fetch, SharedPieces
from ftrun.smp.restore.lost_node import LostNode, LostNodeRestore, check_mirror, slot_header
from ftrun.smp.restore.previous_world import PreviousWorld, PreviousWorldShards
from ftrun.smp.restore.rpc import FetchRpc
from ftrun.snapshot.layout import Piece
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.messages.smp import NodeAddress, PreviousGroup
from ftrun.wire.shared_memory.arena import Arena, ArenaShape, SlotState

_SLOT = 0
_BATCH = 64


@dataclass(frozen=True, slots=True)
class FetchJob:
    """What to fetch.

    Args:
        ranks: the local ranks that have no slot of it.
        groups: the groups that protected it; together they contain all these ranks.
        own: the address to which other nodes send their answers.
        check: raises MemoryTooSmall if this number of bytes does not fit.
        notice: called with data that was rejected on the way.
    """

    wanted: Version
    ranks: Sequence[Rank]
    groups: Sequence[PreviousGroup]
    world_size: int
    own: NodeAddress
    check: Callable[[int], None]
    notice: Callable[[str], None]


class LostRanks:
    """The ranks of one job."""

    def __init__(self, job: FetchJob, fetch: Fetch) -> None:
        self._job = job
        self._fetch = fetch

    def steps(self) -> Steps[dict[Rank, int]]:
        """Return the descriptors of sealed arenas by rank, which the caller closes.

        Raises FtrunError.
        """
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
        mirror = yield from self._mirror(lost)
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
        """Get the small state of the lost node from one of the nodes that store it.

        Raises FetchFailed if no node can deliver it.
        """
        problems = []
        for node in lost.mirror_holders:
            try:
                raw = yield from self._fetch.ask(node.node_id, lost.get_mirror)
                return self._opened(raw, lost)
            except LayoutUnknown as error:
                problems.append(f"{node.node_id}: {error}")
        raise FetchFailed(lost.missing("its small state", problems))

    def _opened(self, raw: bytearray, lost: LostNode) -> Mirror:
        """Parse the mirror; raise LayoutUnknown if it is not the mirror of this node."""
        mirror = Mirror(memoryview(raw))
        check_mirror(mirror, lost)
        return mirror

    def _begin(self, lost: LostNode, mirror: Mirror, fds: dict[Rank, int]) -> LostNodeRestore:
        """Create arenas, add their descriptors to `fds`, and copy what is on this node."""
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
        yield from ()  # the calls below wait by themselves
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
    """Fill and seal a slot.

    Raises LayoutUnknown if no node has a piece, FetchFailed if a piece has changed.
    """
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


SendToAgent = Callable[..., None]
_log = logging.getLogger(__name__)


@dataclass
class _Restore:
    """The restore of one generation."""

    wanted: Version
    generation: Generation
    ranks: Sequence[Rank]
    world_size: int
    groups: Sequence[smp_messages.PreviousGroup]
    missing: set[Rank] = field(default_factory=set)
    fetch: Fetch | None = None
    failed: str = ""
    started_s: float = 0.0


class RestoreCoordinator:
    """Runs one restore at a time.

    `here` is called when all local ranks have the version.
    """

    def __init__(
        self,
        memory: ArenaStore,
        rpc: FetchRpc,
        jobs: JobLanes,
        *,
        send_to_agent: SendToAgent,
        here: Callable[[], None],
        lost_ranks: type[LostRanks] = LostRanks,
    ) -> None:
        self._memory = memory
        self._rpc = rpc
        self._jobs = jobs
        self._send_to_agent = send_to_agent
        self._here = here
        self._lost_ranks = lost_ranks
        self._restore: _Restore | None = None
        self._load: SharedLoad | None = None
        self._waiting: list[tuple[Requester, Rank, Version]] = []

    def share(self, load: SharedLoad | None) -> None:
        """Set the load whose remaining pieces come from other nodes; None if there is none."""
        if self._load is not None and not self._load.is_whole:
            self.cancel()
        self._load = load

    def share_of(self, wanted: Version | None) -> SharedLoad | None:
        load = self._load
        return load if load is not None and load.version == wanted else None

    def begin(
        self,
        body: smp_messages.BeginGeneration,
        wanted: Version | None,
        own: smp_messages.NodeAddress | None,
    ) -> None:
        """Fetch what the local ranks lack of this version; a running equal restore continues."""
        if self._is_under_way(body, wanted):
            return
        self.cancel()
        self._refuse(
            lambda waited: waited != wanted, "a new generation starts from another version"
        )
        if wanted is None:
            return
        restore = _Restore(
            wanted,
            Generation(body.generation),
            _ranks_of(body),
            body.world_size,
            body.restore_from,
            started_s=clock.now_s(),
        )
        restore.missing = self._missing(restore)
        self._restore = restore
        load = self.share_of(wanted)
        if load is not None and not load.is_whole:
            self._complete(restore, load, body)
            return
        if not restore.missing:
            self._ready(restore)
            return
        if own is None or not body.restore_from:
            # The agent may still deliver an arena, or start the worker from another version.
            if body.group:
                self._fail(restore, f"no node is known from which {wanted} can be fetched")
            return
        self._fetch(restore, body, own)

    def _fetch(
        self,
        restore: _Restore,
        body: smp_messages.BeginGeneration,
        own: smp_messages.NodeAddress,
    ) -> None:
        fetch = restore.fetch = Fetch(self._rpc, timeout_s=body.timeout_s)
        job = FetchJob(
            wanted=restore.wanted,
            ranks=sorted(restore.missing),
            groups=body.restore_from,
            world_size=body.world_size,
            own=own,
            check=check_available,
            notice=self._notice,
        )
        fetch.start(
            "ftrun-fetch",
            self._lost_ranks(job, fetch).steps(),
            done=lambda fds: self._jobs.post(partial(self._fetched, restore, fds, fetch.num_bytes)),
            failed=lambda reason: self._jobs.post(
                partial(self._fail, restore, reason, is_link=fetch.has_lost)
            ),
        )

    def _complete(
        self, restore: _Restore, load: SharedLoad, body: smp_messages.BeginGeneration
    ) -> None:
        groups = body.restore_from or body.read_from
        pieces = SharedPieces(load, groups[0].nodes if groups else [], self._notice)
        restore.missing.update(load.ranks)
        fetch = restore.fetch = Fetch(self._rpc, timeout_s=SHARE_TIMEOUT_S)
        fetch.start(
            "ftrun-share",
            pieces.steps(fetch),
            done=lambda _: self._jobs.post(
                partial(self._completed, restore, load, fetch.num_bytes)
            ),
            # Storage delivers what no node does, so a lost connection is not the cause.
            failed=lambda reason: self._jobs.post(partial(self._fail, restore, reason)),
        )

    def _notice(self, reason: str) -> None:
        """Report data that was rejected or not delivered; callable from any thread."""
        notice = smp_messages.SmpNotice("source_set_aside", reason)
        self._jobs.post(partial(self._send_to_agent, notice))

    def _completed(self, restore: _Restore, load: SharedLoad, num_bytes: int) -> None:
        if restore is self._restore:
            text = f"{load.num_read} bytes read and {num_bytes} received from other nodes"
            self._all_arrived(restore, text)

    def _is_under_way(self, body: smp_messages.BeginGeneration, wanted: Version | None) -> bool:
        restore = self._restore
        return (
            restore is not None
            and restore.fetch is not None
            and not restore.failed
            and (restore.wanted, restore.generation) == (wanted, body.generation)
            and restore.ranks == _ranks_of(body)
            and restore.groups == body.restore_from
        )

    def cancel(self) -> None:
        if self._restore is not None and self._restore.fetch is not None:
            self._restore.fetch.cancel()
        self._restore = None

    def stop(self) -> None:
        self.cancel()
        self._refuse(lambda _: True, "the SMP ends")

    def grant(self, requester: Requester, rank: Rank, wanted: Version) -> None:
        arena = self._holder(rank, wanted)
        restore = self._restore
        if arena is not None:
            requester.send(
                worker_messages.ArenaGranted(rank, arena.shape.layout_id), fds=(arena.fd,)
            )
        elif restore is None or restore.wanted != wanted or rank not in restore.missing:
            requester.send(
                messages.Refused(
                    f"{wanted} of rank {rank} is not on this node and is not being fetched"
                )
            )
        elif restore.failed:
            requester.send(messages.Refused(restore.failed))
        else:
            self._waiting.append((requester, rank, wanted))

    def recheck(self) -> None:
        """Check the missing ranks again, because arenas have arrived from the agent."""
        restore = self._restore
        if restore is not None and restore.missing and restore.fetch is None:
            restore.missing = self._missing(restore)
            if not restore.missing:
                self._ready(restore)

    def _fetched(self, restore: _Restore, fds: Mapping[Rank, int], num_bytes: int) -> None:
        if restore is not self._restore:
            for fd in fds.values():
                self._memory.discard(fd)
            return
        for rank, fd in sorted(fds.items()):
            arena = self._memory.add(fd, restore.generation)
            self._send_to_agent(
                worker_messages.ArenaGranted(rank, arena.shape.layout_id), fds=(fd,)
            )
            crash_point("smp.fetch.agent_told")
        self._all_arrived(restore, f"fetched {num_bytes} bytes")

    def _all_arrived(self, restore: _Restore, what: str) -> None:
        text = f"{restore.wanted}: {what} in {clock.now_s() - restore.started_s:.3f} s"
        self._send_to_agent(smp_messages.SmpNotice("restore", text))
        restore.missing.clear()
        self._ready(restore)

    def _ready(self, restore: _Restore) -> None:
        self._send_to_agent(
            smp_messages.RestoreReady(restore.wanted.generation, restore.wanted.step)
        )
        waiting, self._waiting = self._waiting, []
        for requester, rank, wanted in waiting:
            self.grant(requester, rank, wanted)
        self._here()

    def _fail(self, restore: _Restore, reason: str, *, is_link: bool = False) -> None:
        if restore is not self._restore:
            return
        restore.failed = reason
        _log.warning("%s", reason)
        self._send_to_agent(smp_messages.RestoreFailed(restore.generation, reason, is_link))
        self._refuse(lambda _: True, reason)

    def _refuse(self, chosen: Callable[[Version], bool], reason: str) -> None:
        waiting, self._waiting = self._waiting, []
        for requester, rank, wanted in waiting:
            if chosen(wanted):
                requester.send(
                    messages.Refused(f"{wanted} of rank {rank} is not available: {reason}")
                )
            else:
                self._waiting.append((requester, rank, wanted))

    def _missing(self, restore: _Restore) -> set[Rank]:
        held = self._memory.held(restore.world_size)
        return {rank for rank in restore.ranks if restore.wanted not in held.get(rank, ())}

    def _holder(self, rank: Rank, wanted: Version) -> SmpArena | None:
        return next((one for one in self._memory.of(rank) if one.holds(wanted)), None)


def _ranks_of(body: smp_messages.BeginGeneration) -> list[Rank]:
    """Ranks whose shards must be on this node.

    None if the world size differs: shards of another world size are read in place.
    """
    if body.restored_world_size not in (0, body.world_size):
        return []
    return [Rank(rank) for rank in body.local_ranks]
