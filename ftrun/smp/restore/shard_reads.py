"""Answers workers of a new world that read shards of the previous world.

Runs in:  the SMP: requests arrive in the server thread; a job lane for each local rank reads from
          other nodes.
Takes in: OpenShards for shards on this node; FetchShardHeaders and FetchPieces for other shards.
Gives:    one read-only descriptor for each shard of the previous world that is on this node; memfds
          with the requested bytes of other shards; or a refusal.

Two ranks of a node that need the same piece of another node get it from one fetch, see
`piece_cache.py`. The pieces are kept for the length of the restore.

The arenas of the previous world stay until the first version of the new world is committed. No
process writes to them, because workers of the new world have separate arenas.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from mmap import mmap

from ftrun.errors import FtrunError, LayoutUnknown
from ftrun.ids import Rank, version
from ftrun.smp.client import Requester
from ftrun.smp.jobs import Finish, IntervalTimer, JobLanes
from ftrun.smp.memory.arenas import ArenaStore
from ftrun.smp.restore.previous_world import PreviousWorldShards
from ftrun.snapshot.shard_header import pack_header
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import worker as worker_messages

MOST_IMAGES = 250
"""Slightly below the number of descriptors that one message can carry."""

MAX_HEADERS = 200
"""Limit of descriptors per answer."""

MAX_BYTES = 64 << 20
"""Limit of one answer with several pieces."""

_READ_ONLY = os.O_RDONLY | os.O_CLOEXEC
_BUG = messages.Refused("internal error in ftrun; see the SMP's log")
Body = worker_messages.OpenShards | worker_messages.FetchShardHeaders | worker_messages.FetchPieces
Work = Callable[[], tuple[messages.AnyMessage, list[int]]]


_LANES = 8
"""Threads that read for the ranks of this node; a rank's reads stay in order."""

IDLE_S = 10.0
"""After a time without a read, ranks have restored the version, and pieces are not kept."""


class ShardReads:
    """Serves the read requests of local workers."""

    def __init__(self, memory: ArenaStore, jobs: JobLanes) -> None:
        self._memory = memory
        self._jobs = jobs
        self._shards: PreviousWorldShards | None = None
        self._num_open = self._num_reads = self._num_seen = 0
        self._is_watched = False
        self._watch = IntervalTimer(jobs, self._free_if_idle)

    def begin(self, shards: PreviousWorldShards | None) -> None:
        if self._shards is not None:
            self._shards.fetch.cancel()
        self._shards = shards
        self._is_watched = False
        self._watch.stop()

    def free_copies(self) -> bool:
        """Free the pieces that are kept for other ranks; return whether there were some."""
        return self._shards is not None and self._shards.pieces.forget()

    def _free_if_idle(self) -> None:
        is_idle = not self._num_open and self._num_reads == self._num_seen
        self._num_seen = self._num_reads
        if is_idle and self._is_watched:
            self._watch.stop()
            self.free_copies()

    def ask(self, requester: Requester, body: Body) -> None:
        if isinstance(body, worker_messages.OpenShards):
            self._open(requester, body)
            return
        shards = self._shards
        wanted = version(body.generation, body.step)
        if shards is None or shards.world.wanted != wanted:
            reason = f"{wanted} is not on this node, and cannot be read from other nodes"
            requester.send(messages.Refused(reason))
            return
        work: Work
        if isinstance(body, worker_messages.FetchShardHeaders):
            work = partial(_headers, shards, body)
        else:
            work = partial(_pieces, shards, body)
        if not self._is_watched:
            self._is_watched = True
            self._watch.start(IDLE_S)
        self._num_open += 1
        self._num_reads += 1
        self._jobs.submit(
            f"read-{body.rank % _LANES}",
            partial(self._read, work, requester),
            failed=partial(self._answer, requester, _BUG, []),
        )

    def _read(self, work: Work, requester: Requester) -> Finish:
        """Runs in a job's thread."""
        try:
            answer, fds = work()
        except (FtrunError, OSError) as error:
            return partial(self._answer, requester, messages.Refused(str(error)), [])
        return partial(self._answer, requester, answer, fds)

    def _answer(
        self, requester: Requester, answer: messages.AnyMessage, fds: Sequence[int]
    ) -> None:
        self._num_open -= 1
        try:
            requester.send(answer, fds=tuple(fds))
        finally:
            for fd in fds:
                os.close(fd)

    def _open(self, requester: Requester, body: worker_messages.OpenShards) -> None:
        """Answer with descriptors of the shards on this node, without shards of other nodes."""
        wanted = version(body.generation, body.step)
        found = {
            Rank(arena.shape.rank): arena.fd
            for arena in self._memory.all()
            if arena.shape.world_size == body.world_size and arena.holds(wanted)
        }
        if len(found) > MOST_IMAGES:
            reason = f"{len(found)} shards are on this node; the limit is {MOST_IMAGES}"
            requester.send(messages.Refused(reason))
            return
        # Opening the memfds again gives new file descriptions, which can be read-only.
        fds: list[int] = []
        try:
            fds.extend(os.open(f"/proc/self/fd/{fd}", _READ_ONLY) for fd in found.values())
            requester.send(worker_messages.ShardsOpened(list(found)), fds=tuple(fds))
        finally:
            for fd in fds:
                os.close(fd)


def _headers(
    shards: PreviousWorldShards, body: worker_messages.FetchShardHeaders
) -> tuple[messages.AnyMessage, list[int]]:
    if not 0 < len(body.ranks) <= MAX_HEADERS:
        raise LayoutUnknown(f"{len(body.ranks)} headers requested; the limit is {MAX_HEADERS}")
    fds: list[int] = []
    try:
        for rank in body.ranks:
            parts = pack_header(shards.head(Rank(rank)))
            fds.append(_memory(sum(map(len, parts))))
            with open(fds[-1], "wb", closefd=False) as file:
                file.writelines(parts)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return worker_messages.ShardHeadersFetched(list(body.ranks)), fds


def _pieces(
    shards: PreviousWorldShards, body: worker_messages.FetchPieces
) -> tuple[messages.AnyMessage, list[int]]:
    wanted = [
        (Rank(rank), index)
        for rank, first, count in body.wanted
        for index in range(first, first + count)
    ]
    size = sum(_size_of(shards, rank, index) for rank, index in wanted)
    if not size or (size > MAX_BYTES and len(wanted) > 1):
        raise LayoutUnknown(f"pieces of {size} bytes requested; the limit is {MAX_BYTES}")
    fd = _memory(size)
    try:
        # Not closed here: an error of the read refers to parts of the mapping.
        shards.read(wanted, memoryview(mmap(fd, size)))
        crash_point("smp.fetch.pieces_taken")
    except BaseException:
        os.close(fd)
        raise
    return worker_messages.PiecesFetched(size), [fd]


def _size_of(shards: PreviousWorldShards, rank: Rank, index: int) -> int:
    pieces = shards.layout(rank).pieces
    if not 0 <= index < len(pieces):
        raise LayoutUnknown(f"rank {rank} has no piece {index}, only {len(pieces)}")
    return pieces[index].num_bytes


def _memory(size: int) -> int:
    fd = os.memfd_create("ftrun-pieces", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size)
    except BaseException:
        os.close(fd)
        raise
    return fd
