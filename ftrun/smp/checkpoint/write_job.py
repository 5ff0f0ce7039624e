"""What to write, with which resources, and the result; the same for a directory and a URL.

Runs in:  the SMP, in its disk lane's thread.
Takes in: duplicates of the arenas' descriptors.
Gives:    the version to write; after a failed attempt the next one, until one of them is written.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ftrun.errors import CheckpointError
from ftrun.ids import Rank, RunId, Version
from ftrun.smp.checkpoint.index import FORMAT, CheckpointPart
from ftrun.smp.checkpoint.live_capture import CaptureFilter, await_capture
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


@dataclass(frozen=True, slots=True)
class WriterContext:
    """The resources of a writer; `throttle.stop` cancels a write."""

    run_id: RunId
    room: CopyBuffers
    throttle: Throttle

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
        version: only this one; None: all ranks are on this node, and it is the newest that all
            hold.
        token: with a version: equal on all nodes that write this together, and on no others.
        follow: without a version: which running captures are written while they are captured.
        share_wait_s: with a version: wait for the next offer of another node, so that equal bytes
            are written once; 0: this node writes all of its bytes.
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
    share_wait_s: float = 0.0
    num_writers: int = 0

    @property
    def hurries(self) -> bool:
        return self.follow is not None and self.follow.hurries()

    @property
    def is_over(self) -> bool:
        return self.follow is not None and self.follow.is_over()

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
    """

    version: Version
    path: str
    total_bytes: int
    missing_ranks: tuple[int, ...] = ()
    note: str = ""
    ahead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ChosenVersion:
    """A version to write; if tight, its slots may be overwritten at any time."""

    version: Version
    shards: Sequence[SealedSlot]
    pace: Pace
    is_tight: bool = False

    @property
    def is_sound(self) -> bool:
        return all(shard.is_sound for shard in self.shards)


def choose_own(fds: ArenaFds, job: WriteJob, version: Version, throttle: Throttle) -> ChosenVersion:
    """Return the named version with the slots of this node's ranks; raises CheckpointError."""
    if not job.ranks:
        raise CheckpointError("this node runs no ranks, so it has nothing to write")
    own = {rank: fds.get(rank, ()) for rank in job.ranks}
    return ChosenVersion(version, find_shards(own, version, job.world_size), throttle)


def write_newest(
    fds: ArenaFds,
    job: WriteJob,
    context: WriterContext,
    write: Callable[[ChosenVersion], WriteResult],
) -> WriteResult:
    """Write the version that is being captured, or else the newest that all ranks hold.

    `fds` are those of all arenas of each rank. If `write` raises SlotOverwritten, another attempt
    is made. Raises CheckpointError with the reason if nothing was written.
    """
    throttle, capturing = context.throttle, None
    if job.follow is not None and job.follow.wait_s and not job.num_writers:
        capturing = await_capture(
            fds,
            job.world_size,
            job.follow,
            gap_s=job.gap_s(context),
            room=context.room,
            stop=throttle.stop,
        )
    if capturing is not None:
        pace = capturing.paced(throttle)
        try:
            found = write(ChosenVersion(capturing.version, capturing.shards, pace))
        except SlotOverwritten as error:
            _log.info("cannot write the snapshot while it is captured: %s", error)
        else:
            return replace(found, ahead_s=capturing.ahead_s)
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


@contextmanager
def reported(job: WriteJob) -> Iterator[None]:
    """Convert an OSError of the file system into a CheckpointError with a readable text."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and job.version is not None:
            raise CheckpointError(
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
