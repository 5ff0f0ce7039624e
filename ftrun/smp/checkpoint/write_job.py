"""What is to be written, with what, and what came of it: the same for a directory and a URL.

Runs in:  the SMP, in its disk lane's thread.
Takes in: duplicates of the arenas' descriptors.
Gives:    the version to write, one after the other until one of them is written.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ftrun.errors import CheckpointError
from ftrun.ids import Rank, RunId, Version
from ftrun.smp.checkpoint.index import FORMAT, CheckpointPart, ShardFile
from ftrun.smp.checkpoint.late_copy import CopyBeforeOverwrite
from ftrun.smp.checkpoint.live_capture import CaptureFilter, LiveCapture, await_capture
from ftrun.smp.checkpoint.slot_reader import (
    ArenaFds,
    SealedSlot,
    SlotOverwritten,
    find_shards,
    newest_version,
)
from ftrun.smp.checkpoint.storage.copy_room import CopyBuffers
from ftrun.smp.checkpoint.storage.direct_file import BUFFER_BYTES, Pace
from ftrun.smp.checkpoint.storage.local import Retention
from ftrun.smp.checkpoint.storage.pace import Throttle
from ftrun.urls import is_url

TRIES = 5
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WriterContext:
    """What a writer works with.

    Args:
        run_id: goes into the index of a checkpoint.
        room: memory for a copy of all shards.
        throttle: how fast; it also tells when a write is given up.
    """

    run_id: RunId
    room: CopyBuffers
    throttle: Throttle

    @property
    def gap_s(self) -> float:
        """What a whole buffer waits for the disk at this pace."""
        rate = self.throttle.bytes_per_s
        return BUFFER_BYTES / rate if rate else 0.0


@dataclass(frozen=True, slots=True)
class WriteJob:
    """What is to be written.

    Args:
        where: a directory or a URL; of several nodes the same one on all.
        ranks: the node's own.
        world_size: of the run.
        retention: which checkpoints stay.
        version: just this one; None: all ranks are here, and it is the newest that all hold.
        token: with a version: equal on all nodes that write this together, and on no others.
        life: of the run, for the index.
        follow: without a version: a capture that is under way is written as it goes.
    """

    where: str
    ranks: tuple[Rank, ...]
    world_size: int
    retention: Retention
    version: Version | None = None
    token: str = ""
    life: str = ""
    follow: CaptureFilter | None = None

    @property
    def directory(self) -> Path:
        return Path(self.where)

    def part(
        self, run_id: RunId, version: Version, shards: Sequence[ShardFile] = ()
    ) -> CheckpointPart:
        """This node's part of a version, with these files."""
        return CheckpointPart(
            FORMAT,
            run_id,
            self.token,
            version.generation,
            version.step,
            self.world_size,
            list(shards),
            life=self.life,
        )


@dataclass(frozen=True, slots=True)
class WriteResult:
    """A checkpoint that is durable, or this node's part of one.

    Args:
        path: of the checkpoint, or its URL; of the folder of parts where it is a part.
        total_bytes: of the checkpoint or the part; 0 where it was there already.
        missing_ranks: those whose parts have not come; none: it is finished.
        note: what is odd about that, in words.
        ahead_s: so long before the last byte was captured the first was written; 0: after it.
    """

    version: Version
    path: Path | str
    total_bytes: int
    missing_ranks: tuple[int, ...] = ()
    note: str = ""
    ahead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ChosenVersion:
    """A version to write, and the slots that hold it.

    Args:
        pace: asked before each write.
        is_tight: its slots may be overwritten at any time.
    """

    version: Version
    shards: Sequence[SealedSlot]
    pace: Pace
    is_tight: bool = False

    @property
    def is_sound(self) -> bool:
        """What was read of them is what was captured."""
        return all(shard.is_sound for shard in self.shards)


def choose_own(
    fds: ArenaFds, order: WriteJob, version: Version, throttle: Throttle
) -> ChosenVersion:
    """A version that is named, as far as this node's ranks have it.

    Raises:
        CheckpointError: it runs none.
    """
    if not order.ranks:
        raise CheckpointError("this node runs no ranks, so it has nothing to write")
    own = {rank: fds.get(rank, ()) for rank in order.ranks}
    return ChosenVersion(version, find_shards(own, version, order.world_size), throttle)


def with_own_bytes(found: WriteResult, part: CheckpointPart, *, is_new: bool) -> WriteResult:
    """What came of it; of a checkpoint that is not finished the size is that of the own part.

    Args:
        found: as it was found after the part was there.
        part: this node's.
        is_new: it was written now.
    """
    own_bytes = sum(file.num_bytes for file in part.shards) if is_new else 0
    return replace(found, total_bytes=found.total_bytes or own_bytes)


def write_newest(
    fds: ArenaFds,
    order: WriteJob,
    means: WriterContext,
    write: Callable[[ChosenVersion], WriteResult],
) -> WriteResult:
    """Write what is being captured, or else the newest version that all ranks hold.

    Args:
        fds: of all arenas of each rank.
        order: names no version.
        means: what to write with.
        write: raises Overwritten where another try may help.

    Raises:
        CheckpointError: why it was not written.
    """
    throttle = means.throttle
    capturing = _followed(fds, order, means)
    if capturing is not None:
        pace = capturing.paced(throttle)
        try:
            found = write(ChosenVersion(capturing.version, capturing.shards, pace))
        except SlotOverwritten as error:
            _log.info("not written while it was captured: %s", error)
        else:
            return replace(found, ahead_s=capturing.ahead_s)
    for turn in range(TRIES):
        version = newest_version(fds, order.world_size)
        if version is None:
            raise CheckpointError("no version is sealed by every rank yet; nothing to write")
        shards = find_shards(fds, version, order.world_size)
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
def told(order: WriteJob) -> Iterator[None]:
    """What the file system refuses, in words.

    Raises:
        CheckpointError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint in {order.where} is not written: {error.strerror or error}. The "
            "snapshots in memory go on; make room or name another --checkpoint-dir"
        ) from error


def keep(chosen: ChosenVersion, means: WriterContext, *, gap_s: float) -> None:
    """Have the shards copied where memory allows, so that they may be overwritten.

    Each try to write begins with this: copies of the one before are read no more.

    Args:
        chosen: about to be written.
        means: what to write with.
        gap_s: see `CopyBeforeOverwrite`.

    Raises:
        Overwritten: one was already.
    """
    means.room.begin()
    late = CopyBeforeOverwrite(chosen.version, chosen.shards, means.room, gap_s=gap_s)
    if chosen.is_tight or late.is_tight:
        late.copy()


def _followed(fds: ArenaFds, order: WriteJob, means: WriterContext) -> LiveCapture | None:
    if order.follow is None or not order.follow.wait_s:
        return None
    return await_capture(
        fds,
        order.world_size,
        order.follow,
        gap_s=math.inf if is_url(order.where) else means.gap_s,
        room=means.room,
        stop=means.throttle.stop,
    )
