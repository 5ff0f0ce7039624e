"""Writes a checkpoint by several nodes together, without a coordinator.

Runs in:  the SMP of each node, in its disk lane's thread.
Takes in: duplicates of the arenas' descriptors, a directory that all nodes share, one version.
Gives:    a `WriteResult`: the checkpoint, or this node's part of it; or a `CheckpointError`.
Survives: the loss of any node at any point. A node writes what is missing when it is asked again.

    DIR/.tmp-step-.../  rank-00002.safetensors  rank-00002.digests  ...  part-00002.json

A node writes the files of its ranks durably. It then writes its part, which lists these files, and
checks whether the existing parts cover all ranks. Each node that finds them complete makes the
index and renames the folder. Several nodes may do so at once, but only one rename succeeds.

Rule 1: a part exists only after all its files are durable. A part is rejected if one of its files
        is missing or has another size.
Rule 2: parts are merged only if run, token, version and world size are equal, in the name of the
        folder and in each part. A version is one set of bytes, so a file or part that is written
        again is replaced by an equal one.
Rule 3: a finished checkpoint counts as this version only if its digests of this node's ranks equal
        this node's own. Another life of the run may have passed the same step.
"""

from collections.abc import Sequence
from pathlib import Path

from ftrun.errors import CheckpointError, SnapshotCorrupt
from ftrun.ids import Rank, Version
from ftrun.ids import version as version_of
from ftrun.smp.checkpoint.checkpoint_merge import is_of, look, settle
from ftrun.smp.checkpoint.index import CheckpointPart, read_indexes, read_part, seal
from ftrun.smp.checkpoint.slot_reader import ArenaFds, SealedSlot, SlotOverwritten, write_shard
from ftrun.smp.checkpoint.storage.local import locked_shortly, replaced, sync, sync_folder
from ftrun.smp.checkpoint.storage.storage import folder_of, sweep_before
from ftrun.smp.checkpoint.write_job import (
    ChosenVersion,
    WriteJob,
    WriterContext,
    WriteResult,
    choose_own,
    keep,
    told,
    with_own_bytes,
)
from ftrun.wire.crash_points import crash_point

Content = tuple[int, int, str, str]


class PartWriter:
    """Writes this node's parts, and finishes complete checkpoints."""

    def __init__(self, means: WriterContext) -> None:
        self._means = means
        self._last: CheckpointPart | None = None

    def write(self, fds: ArenaFds, order: WriteJob, version: Version) -> WriteResult:
        """Write this node's part of a version, and the checkpoint if all other parts exist.

        Raises:
            CheckpointError: the reason why it was not written.
        """
        with told(order):
            try:
                return self._write(fds, order, version)
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"{error.filename} went while the checkpoint was written: another node has "
                    "finished or swept it. Ask again"
                ) from error

    def _write(self, fds: ArenaFds, order: WriteJob, version: Version) -> WriteResult:
        run_id, stop = self._means.run_id, self._means.throttle.stop
        chosen = choose_own(fds, order, version, self._means.throttle)
        blank = order.part(run_id, version)
        folder = folder_of(order.directory, blank)
        contents = known_contents(chosen.shards, order.ranks, blank, self._last)
        part_path = folder / f"part-{order.ranks[0]:05d}.json"
        with locked_shortly(order.directory, stop) as folder_fd:
            found = _finished(order, blank, contents, folder_fd)
            if found is not None:
                return found
            sweep_before(order.directory, run_id, version)
            part = _whole_part(part_path, blank, order, contents)
            if part is None:
                check_all_here(chosen.shards, order.ranks, version)
                folder.mkdir(exist_ok=True)
                sync(folder_fd)
        is_new = part is None
        self._last = part = part or self._fill(part_path, chosen, order)
        with locked_shortly(order.directory, stop) as folder_fd:
            # Once the part exists, another node may have finished the checkpoint.
            found = _finished(order, blank, {one.content for one in part.shards}, folder_fd)
            if found is None:
                found = look(folder, blank, version, order.retention, folder_fd)
            return with_own_bytes(found, part, is_new=is_new)

    def _fill(self, part_path: Path, chosen: ChosenVersion, order: WriteJob) -> CheckpointPart:
        """Write all files of this node durably, then its part.

        Raises:
            SlotOverwritten: a slot was overwritten.
            CheckpointError: a slot is damaged.
        """
        folder = part_path.parent
        keep(chosen, self._means, gap_s=self._means.gap_s)
        crash_point("smp.checkpoint.part_started")
        files = []
        for shard in chosen.shards:
            try:
                files.append(write_shard(folder, shard, chosen.pace))
            except SnapshotCorrupt as error:
                if shard.is_sound:
                    raise CheckpointError(f"the checkpoint is not written: {error}") from error
                raise SlotOverwritten(chosen.version) from error
            crash_point("smp.checkpoint.part_shard_written")
        if not chosen.is_sound:
            raise SlotOverwritten(chosen.version)
        sync_folder(folder)
        part = order.part(self._means.run_id, chosen.version, files)
        with replaced(part_path) as write:
            write(seal(part))
        sync_folder(folder)
        crash_point("smp.checkpoint.part_written")
        return part


def known_contents(
    shards: Sequence[SealedSlot],
    ranks: Sequence[Rank],
    blank: CheckpointPart,
    last: CheckpointPart | None,
) -> set[Content]:
    """Return the content of this node's ranks in this version; empty if it is no longer known.

    Args:
        shards: the shards in memory.
        ranks: the node's own.
        blank: the empty part of this version.
        last: the part that was written last.
    """
    if len(shards) == len(ranks):
        return {shard.content for shard in shards}
    if last is not None and last.key == blank.key:
        known = {shard.content for shard in last.shards}
        if {rank for rank, *_ in known} == set(ranks):
            return known
    return set()


def check_all_here(shards: Sequence[SealedSlot], ranks: Sequence[Rank], wanted: Version) -> None:
    missing = sorted(set(ranks) - {shard.shape.rank for shard in shards})
    if missing:
        raise CheckpointError(
            f"rank {missing[0]} has no slot with {wanted} any more, or never had: it "
            "was overwritten by a later one. Ask for a later version"
        )


def _finished(
    order: WriteJob, blank: CheckpointPart, contents: set[Content], folder_fd: int
) -> WriteResult | None:
    """Return this version if it is a checkpoint already, and complete an interrupted finish."""
    at = version_of(blank.generation, blank.step)
    indexes = read_indexes(order.directory)
    for path, index in indexes:
        if not contents or not contents <= {shard.content for shard in index.shards}:
            continue
        if not is_of(index, blank) or not all(one.is_whole(path) for one in index.shards):
            continue
        if path == indexes[0][0]:
            settle(path, blank.run_id, at, order.retention, folder_fd)
        return WriteResult(at, path, 0)
    return None


def _whole_part(
    path: Path, blank: CheckpointPart, order: WriteJob, contents: set[Content]
) -> CheckpointPart | None:
    try:
        part = read_part(path)
    except CheckpointError:
        return None
    named = {shard.content for shard in part.shards}
    is_it = (
        part.key == blank.key
        and {shard.rank for shard in part.shards} == set(order.ranks)
        and (not contents or named == contents)
        and all(shard.is_whole(path.parent) for shard in part.shards)
    )
    return part if is_it else None
