"""What to write, with which resources, and the result; the same for a directory and a URL.

Runs in:  the SMP, in its disk lane's thread.
Takes in: duplicates of the arenas' descriptors.
Gives:    the version to write; after a failed attempt the next one, until one of them is written.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ftrun.errors import CheckpointError, CheckpointSuperseded
from ftrun.ids import Generation, Rank, RunId, Version
from ftrun.smp.checkpoint.index import FORMAT, CheckpointPart
from ftrun.smp.checkpoint.live_capture import (
    CaptureFilter,
    LiveCapture,
    Started,
    await_capture,
)
from ftrun.smp.checkpoint.pool_reader import PooledWait, reading
from ftrun.smp.checkpoint.slot_reader import (
    ArenaFds,
    CopyBeforeOverwrite,
    SealedSlot,
    SlotOverwritten,
    find_shards,
    newest_version,
)
from ftrun.smp.checkpoint.storage.direct_file import BUFFER_BYTES, CopyBuffers, Pace, Throttle
from ftrun.smp.checkpoint.storage.storage import Retention
from ftrun.urls import is_url

TRIES = 5
_log = logging.getLogger(__name__)


class VersionClaims:
    """The versions that this node is writing. Two writes of one would use the same files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: set[Version] = set()

    @contextmanager
    def claimed(self, version: Version) -> Iterator[None]:
        """Raises CheckpointSuperseded if the version is being written."""
        with self._lock:
            if version in self._versions:
                raise CheckpointSuperseded(f"the snapshot of {version} is being written already")
            self._versions.add(version)
        try:
            yield
        finally:
            self._versions.discard(version)


class EqualBytes:
    """Whether the nodes of a generation hold equal bytes, by the last version that they divided.

    If they do, each version is written once over all nodes, which needs the digests of the seal. If
    they do not, or a node made no offer, each node writes what it captures while it is captured,
    until the next generation. The nodes need not agree: one that makes no offer costs the others a
    wait.
    """

    def __init__(self) -> None:
        self._none_in: Generation | None = None

    def may_be(self, generation: Generation) -> bool:
        return self._none_in != generation

    def note(self, generation: Generation, *, were_found: bool) -> None:
        if not were_found:
            self._none_in = generation


@dataclass(frozen=True, slots=True)
class WriterContext:
    """The resources of a writer; `throttle.stop` cancels a write.

    Writers of one node share `claims`, `equal_bytes` and `throttle`, and have `room` of their own.
    """

    run_id: RunId
    room: CopyBuffers
    throttle: Throttle
    claims: VersionClaims = field(default_factory=VersionClaims)
    equal_bytes: EqualBytes = field(default_factory=EqualBytes)

    @property
    def gap_s(self) -> float:
        """Seconds that a full buffer waits for the disk at this pace."""
        rate = self.throttle.bytes_per_s
        return BUFFER_BYTES / rate if rate else 0.0


@dataclass(frozen=True, slots=True)
class WriteJob:
    """What to write.

    Args:
        where: a directory or a URL; the same on all nodes that write together.
        ranks: the node's own.
        version: only this one; None: the capture to follow, or the newest that all ranks hold, if
            they are all on this node.
        token: equal on all nodes that write this together, and on no others.
        follow: without a version: which capture is written while it is captured.
        is_alone: all other writers are excluded until this node has finished.
        hurries: returns whether the run ends, so that other nodes are not awaited long.
        is_over: returns whether the generation has ended.
        share_wait_s: wait for the next offer of another node, so that equal bytes are written
            once; 0: this node writes all of its bytes.
        num_writers: files of equal size that are written at once; 0: a file for each rank, one
            after the other.
    """

    where: str
    ranks: tuple[Rank, ...]
    world_size: int
    retention: Retention
    version: Version | None = None
    token: str = ""
    life: str = ""
    follow: CaptureFilter | None = None
    is_alone: bool = False
    hurries: Callable[[], bool] = lambda: False
    is_over: Callable[[], bool] = lambda: False
    share_wait_s: float = 0.0
    num_writers: int = 0

    @property
    def has_all_ranks(self) -> bool:
        return len(self.ranks) == self.world_size

    def gap_s(self, context: WriterContext) -> float:
        """Seconds that may pass without a read; a network may be slow."""
        return math.inf if is_url(self.where) else context.gap_s

    def part(self, run_id: RunId, version: Version) -> CheckpointPart:
        generation, step = version.generation, version.step
        return CheckpointPart(
            FORMAT, run_id, self.token, generation, step, self.world_size, [], life=self.life
        )


@dataclass(frozen=True, slots=True)
class WriteResult:
    """A durable checkpoint, or this node's part of one.

    Args:
        path: of the checkpoint, or its URL; for a part, of the folder of parts.
        total_bytes: of the checkpoint or the part; 0 if it existed already.
        missing_ranks: ranks whose parts are missing; empty if the checkpoint is finished.
        note: irregularities, as text.
        ahead_s: seconds between the first byte written and the last byte captured; 0 if writing
            started after the capture.
        is_pooled: it came through capture pools, so no memory has the version.
    """

    version: Version
    path: str
    total_bytes: int
    missing_ranks: tuple[int, ...] = ()
    note: str = ""
    ahead_s: float = 0.0
    is_pooled: bool = False


@dataclass(frozen=True, slots=True)
class ChosenVersion:
    """A version to write; if tight, its slots may be overwritten at any time.

    Of a live one, the slots may still be filled, so their digests are not known.
    `await_commit` returns when the version is committed; raises SlotOverwritten if it will not be.
    """

    version: Version
    shards: Sequence[SealedSlot]
    pace: Pace
    is_tight: bool = False
    is_live: bool = False
    await_commit: Callable[[], None] = lambda: None

    @property
    def is_sound(self) -> bool:
        return all(shard.is_sound for shard in self.shards)


def choose_own(fds: ArenaFds, job: WriteJob, version: Version, throttle: Throttle) -> ChosenVersion:
    """Return the named version with the slots of this node's ranks; raises CheckpointError."""
    if not job.ranks:
        raise CheckpointError("this node runs no ranks, so it has nothing to write")
    own = {rank: fds.get(rank, []) for rank in job.ranks}
    return ChosenVersion(version, find_shards(own, version, job.world_size), throttle)


def write_newest(
    fds: ArenaFds,
    job: WriteJob,
    context: WriterContext,
    write: Callable[[ChosenVersion], WriteResult],
) -> WriteResult:
    """Write the version that is being captured, or else the newest that all ranks hold.

    `fds` are those of all arenas of each rank of the job. If `write` raises SlotOverwritten,
    another attempt is made, unless other nodes write this too. They would not know its version.
    Raises CheckpointError with the reason if nothing was written.
    """
    try:
        if (found := _write_captured(fds, job, context, write)) is not None:
            return found
    except SlotOverwritten as error:
        if not job.has_all_ranks or (job.follow is not None and job.follow.pools):
            raise
        _log.info("cannot write the snapshot while it is captured: %s", error)
    throttle = context.throttle
    for turn in range(TRIES):
        version = newest_version(fds, job.world_size)
        if version is None:
            raise CheckpointError("no version is sealed by every rank yet; nothing to write")
        shards = find_shards(fds, version, job.world_size)
        try:
            return write(ChosenVersion(version, shards, throttle, is_tight=turn > 0))
        except SlotOverwritten:
            continue
    raise CheckpointError(
        f"the slots were overwritten {TRIES} times while they were read: snapshots are taken "
        "faster than they are written, and memory has no room for a copy. Take them less often "
        "(--snapshot-every)"
    )


def _write_captured(
    fds: ArenaFds,
    job: WriteJob,
    context: WriterContext,
    write: Callable[[ChosenVersion], WriteResult],
) -> WriteResult | None:
    """Write a version while it is captured; None if no capture begins, and all ranks are here."""
    if job.follow is None:
        return None
    if not job.follow.pools:
        return _write_followed(fds, job, job.follow, context, write)
    with reading(job.follow.pools) as pools:
        pooled = PooledWait(pools, job.follow).poll
        done = _write_followed(fds, job, job.follow, context, write, pooled)
    if done is None:
        raise CheckpointSuperseded("no capture into the pools has begun, and their use has ended")
    return replace(done, is_pooled=True)


def _write_followed(
    fds: ArenaFds,
    job: WriteJob,
    follow: CaptureFilter,
    context: WriterContext,
    write: Callable[[ChosenVersion], WriteResult],
    pooled: Callable[[], Started | None] | None = None,
) -> WriteResult | None:
    capturing = await_capture(
        fds,
        job.world_size,
        follow,
        gap_s=job.gap_s(context),
        room=context.room,
        stop=context.throttle.stop,
        pooled=pooled,
    )
    if capturing is None:
        if job.has_all_ranks:
            return None
        if follow.hurries():
            raise CheckpointSuperseded("the requested snapshot has not begun, and the run ends")
        raise CheckpointError(
            f"no snapshot from step {follow.from_step} on, which was requested for it, has "
            f"begun (limit {follow.wait_s:.0f} s). The newest committed version will be "
            "written instead"
        )
    if pooled is not None:
        pace = capturing.paced(context.throttle)
        chosen = ChosenVersion(capturing.version, capturing.shards, pace, is_live=True)
    else:
        chosen = _chosen(capturing, fds, job, context)
    return replace(write(chosen), ahead_s=capturing.ahead_s)


def _chosen(
    capturing: LiveCapture, fds: ArenaFds, job: WriteJob, context: WriterContext
) -> ChosenVersion:
    """The capture at once, or its sealed slots, if these are divided among nodes or files."""
    version, await_commit = capturing.version, capturing.await_commit
    may_share = job.share_wait_s and context.equal_bytes.may_be(version.generation)
    if not may_share and not job.num_writers:
        pace = capturing.paced(context.throttle)
        return ChosenVersion(
            version, capturing.shards, pace, is_live=True, await_commit=await_commit
        )
    capturing.await_seal()
    shards = find_shards(fds, version, job.world_size)
    return ChosenVersion(version, shards, context.throttle, await_commit=await_commit)


@contextmanager
def reported(job: WriteJob) -> Iterator[None]:
    """Convert an OSError of the file system into a CheckpointError with a readable text."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not job.is_alone:
            raise CheckpointSuperseded(
                f"{error.filename} disappeared while the checkpoint was written: another node has "
                "finished or removed it. Request it again"
            ) from error
        raise CheckpointError(
            f"cannot write the checkpoint in {job.where}: {error.strerror or error}. "
            "Snapshots in memory continue; free space or use another --checkpoint-dir"
        ) from error


def keep(chosen: ChosenVersion, context: WriterContext, *, gap_s: float) -> None:
    """Copy at once if the slots may be overwritten soon; raises SlotOverwritten if one was.

    Each attempt to write begins with this call, because it reuses the copies of the previous one.
    """
    context.room.begin()
    late = CopyBeforeOverwrite(chosen.version, chosen.shards, context.room, gap_s=gap_s)
    if chosen.is_tight or late.is_tight:
        late.copy()
