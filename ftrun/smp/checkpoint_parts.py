"""A checkpoint that several nodes write together, without one that leads.

Runs in:  the SMP of each node, in its disk lane's thread.
Takes in: duplicates of the arenas' descriptors, a directory that all nodes share, one version.
Gives:    a `Written`: the checkpoint, or this node's part of it; or a `CheckpointError` in words.
Survives: any node, at any point: what it had not written it writes when it is asked again.

    DIR/.tmp-step-.../  rank-00002.safetensors  rank-00002.digests  ...  part-00002.json

A node writes the files of its ranks, each durable, then its part: which files they are. Then it
looks whether the parts that are there cover all ranks. Whoever finds it so, be it several at
once, makes the index of them and renames the folder, which only one can.

Rule 1: a part is there only when all its files are durable; one whose files are not all there
        with their sizes counts for nothing.
Rule 2: parts are put together only where run, token, version and world size are equal, in the
        name of the folder and in each part. A version is one set of bytes, so a file or part
        that is written again is replaced by an equal one.
Rule 3: a finished checkpoint is taken for this version only if it names just the digests that
        this node's ranks have: another life of the run may have passed the same step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ftrun import clock
from ftrun.errors import CheckpointError, SnapshotCorrupt
from ftrun.ids import Rank, RunId, Version
from ftrun.smp.checkpoint import Written
from ftrun.smp.checkpoint_files import Retention, locked_shortly, replaced, sync, sync_folder
from ftrun.smp.checkpoint_folders import folder_of, sweep_before
from ftrun.smp.checkpoint_index import FORMAT, Part, ShardFile, read_indexes, read_part, seal
from ftrun.smp.checkpoint_merge import is_of, look, settle
from ftrun.smp.checkpoint_shard import (
    ArenaFds,
    Shard,
    copy_where_it_fits,
    find_shards,
    write_shard,
)
from ftrun.smp.pace import Throttle
from ftrun.wire.crash_points import crash_point

Content = tuple[int, int, str, str]


@dataclass(frozen=True, slots=True)
class PartOrder:
    """What is to be written.

    Args:
        version: just this one.
        ranks: the node's own.
        world_size: of the run.
        directory: the same one on all nodes.
        retention: which checkpoints stay.
        token: equal on all nodes that write this together, and on no others.
        life: of the run, for the index.
    """

    version: Version
    ranks: tuple[Rank, ...]
    world_size: int
    directory: Path
    retention: Retention
    token: str = ""
    life: str = ""


class PartWriter:
    """Writes this node's parts, and finishes what is complete.

    Args:
        free_bytes: how much memory may be used for a copy of all shards, asked at each write.
        throttle: how fast; it also tells when a write is given up.
    """

    def __init__(self, run_id: RunId, *, free_bytes: Callable[[], int], throttle: Throttle) -> None:
        self._run_id = run_id
        self._free_bytes = free_bytes
        self._pace = throttle
        self._stop = throttle.stop
        self._last: Part | None = None

    def write(self, fds: ArenaFds, order: PartOrder) -> Written:
        """Write this node's part, and the checkpoint where all others are there.

        Raises:
            CheckpointError: why it was not written.
        """
        started_s = clock.now_s()
        try:
            found = self._write(fds, order)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{error.filename} went while the checkpoint was written: another node has "
                "finished or swept it. Ask again"
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint in {order.directory} is not written: {error.strerror or error}. "
                "The snapshots in memory go on; make room or name another --checkpoint-dir"
            ) from error
        return replace(found, seconds=clock.now_s() - started_s)

    def _write(self, fds: ArenaFds, order: PartOrder) -> Written:
        if not order.ranks:
            raise CheckpointError("this node runs no ranks, so it has nothing to write")
        blank = self._part(order, [])
        folder = folder_of(order.directory, blank)
        chosen = {rank: fds.get(rank, ()) for rank in order.ranks}
        shards = find_shards(chosen, order.version, order.world_size)
        contents = known_contents(shards, order.ranks, blank, self._last)
        part_path = folder / f"part-{order.ranks[0]:05d}.json"
        with locked_shortly(order.directory, self._stop) as folder_fd:
            found = _finished(order, blank, contents, folder_fd)
            if found is not None:
                return found
            sweep_before(order.directory, self._run_id, order.version)
            part = _whole_part(part_path, blank, order, contents)
            if part is None:
                check_all_here(shards, order.ranks, order.version)
                folder.mkdir(exist_ok=True)
                sync(folder_fd)
        own_bytes = 0
        if part is None:
            part = self._fill(folder, part_path, shards, order)
            own_bytes = sum(file.num_bytes for file in part.shards)
        self._last = part
        with locked_shortly(order.directory, self._stop) as folder_fd:
            # As soon as the part was there, another node may have finished the checkpoint.
            found = _finished(order, blank, {one.content for one in part.shards}, folder_fd)
            if found is None:
                found = look(folder, blank, order.version, order.retention, folder_fd)
            return replace(found, total_bytes=found.total_bytes or own_bytes)

    def _part(self, order: PartOrder, shards: list[ShardFile]) -> Part:
        return Part(
            format=FORMAT,
            run_id=self._run_id,
            token=order.token,
            generation=order.version.generation,
            step=order.version.step,
            world_size=order.world_size,
            shards=shards,
            life=order.life,
        )

    def _fill(
        self, folder: Path, part_path: Path, shards: Sequence[Shard], order: PartOrder
    ) -> Part:
        """All files of this node, durable, and its part."""
        overwritten = CheckpointError(
            f"a slot with {order.version} was overwritten while it was read. Ask for a later "
            "version; if this comes again and again, snapshot less often (--snapshot-every)"
        )
        if not copy_where_it_fits(shards, self._free_bytes()):
            raise overwritten
        crash_point("smp.checkpoint.part_started")
        files = []
        for shard in shards:
            try:
                files.append(write_shard(folder, shard, self._pace))
            except SnapshotCorrupt as error:
                if shard.is_copied or shard.is_unchanged():
                    raise CheckpointError(f"the checkpoint is not written: {error}") from error
                raise overwritten from error
            crash_point("smp.checkpoint.part_shard_written")
        if not all(shard.is_copied or shard.is_unchanged() for shard in shards):
            raise overwritten
        sync_folder(folder)
        part = self._part(order, files)
        with replaced(part_path) as write:
            write(seal(part))
        sync_folder(folder)
        crash_point("smp.checkpoint.part_written")
        return part


def known_contents(
    shards: Sequence[Shard], ranks: Sequence[Rank], blank: Part, last: Part | None
) -> set[Content]:
    """What the ranks here have of this version; empty where that is no longer known.

    Args:
        shards: those that are in memory.
        ranks: the node's own.
        blank: of this version.
        last: the part that was written last.
    """
    if len(shards) == len(ranks):
        return {shard.content for shard in shards}
    if last is not None and last.key == blank.key:
        known = {shard.content for shard in last.shards}
        if {rank for rank, *_ in known} == set(ranks):
            return known
    return set()


def check_all_here(shards: Sequence[Shard], ranks: Sequence[Rank], wanted: Version) -> None:
    """Raises: CheckpointError: a rank's slot is not there."""
    missing = sorted(set(ranks) - {shard.shape.rank for shard in shards})
    if missing:
        raise CheckpointError(
            f"rank {missing[0]} has no slot with {wanted} any more, or never had: it "
            "was overwritten by a later one. Ask for a later version"
        )


def _finished(
    order: PartOrder, blank: Part, contents: set[Content], folder_fd: int
) -> Written | None:
    """This version, where it is a checkpoint already; an unfinished end is made up for."""
    indexes = read_indexes(order.directory)
    for path, index in indexes:
        if not contents or not contents <= {shard.content for shard in index.shards}:
            continue
        if not is_of(index, blank) or not all(one.is_whole(path) for one in index.shards):
            continue
        if path == indexes[0][0]:
            settle(path, blank.run_id, order.version, order.retention, folder_fd)
        return Written(order.version, path, 0)
    return None


def _whole_part(path: Path, blank: Part, order: PartOrder, contents: set[Content]) -> Part | None:
    """This node's part, where it was written before just as it would be now."""
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
