"""Checkpoints: the newest snapshot of all ranks, written to a directory.

Runs in:  the SMP, in its disk lane's thread.
Takes in: duplicates of the arenas' descriptors, a directory.
Gives:    a `Written`, or a `CheckpointError` in words; never a half-made checkpoint.
Survives: everything but the disk.

    DIR/step-00000042-g0/   rank-00000.safetensors  rank-00000.digests  ...  index.json
    DIR/latest -> step-00000042-g0

A file is the bytes of a slot as they are; the digests are the slot's table, and the index, which
has a digest itself, holds the digests of tables and headers. Everything is written and synced in
a `.tmp-` sibling and renamed when it is whole; `latest` is renamed last. This is how one node
writes that has all ranks; `checkpoint_parts` is how several do.

Training never waits for a disk, so a slot may be overwritten while it is read. Where memory
allows, all shards are copied first, which takes far less than a step and is repeated where it
took longer; otherwise they are written piece by piece and the headers are compared afterwards.
The digests are those of the bytes written, so a mixed checkpoint is impossible either way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ftrun import clock
from ftrun.errors import CheckpointError, SnapshotCorrupt
from ftrun.ids import RunId, Version
from ftrun.smp.checkpoint_files import (
    Retention,
    free_name,
    locked,
    point_latest,
    prune,
    remove,
    replaced,
    sync,
    sync_folder,
    temporary_name,
)
from ftrun.smp.checkpoint_folders import sweep_alone
from ftrun.smp.checkpoint_index import make_index, seal
from ftrun.smp.checkpoint_shard import (
    ArenaFds,
    Shard,
    copy_where_it_fits,
    find_shards,
    newest_version,
    write_shard,
)
from ftrun.smp.pace import Throttle
from ftrun.wire.checkpoint_messages import INDEX_NAME
from ftrun.wire.crash_points import crash_point

TRIES = 5


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint that is durable, or this node's part of one.

    Args:
        path: of the checkpoint, or its URL; of the folder of parts where it is a part.
        total_bytes: of the checkpoint or the part; 0 where it was there already.
        missing_ranks: those whose parts have not come; none: it is finished.
        note: what is odd about that, in words.
    """

    version: Version
    path: Path | str
    total_bytes: int
    seconds: float = 0.0
    missing_ranks: tuple[int, ...] = ()
    note: str = ""


class CheckpointWriter:
    """Writes checkpoints of one run into one directory at a time.

    Args:
        free_bytes: how much memory may be used for a copy of all shards, asked at each write.
        throttle: how fast; it also tells when a write is given up.
    """

    def __init__(self, run_id: RunId, *, free_bytes: Callable[[], int], throttle: Throttle) -> None:
        self._run_id = run_id
        self._free_bytes = free_bytes
        self._pace = throttle
        self._last: tuple[Path, Version, Path] | None = None
        self._life = ""

    def remember(self, directory: Path, version: Version, path: Path) -> None:
        """This version is in this directory already: written by us, or loaded from it."""
        self._last = (directory, version, path)

    def write(
        self,
        fds: ArenaFds,
        *,
        world_size: int,
        directory: Path,
        retention: Retention,
        life: str = "",
    ) -> Written:
        """Write the newest version that all ranks hold.

        Args:
            fds: of all arenas of each rank.
            world_size: of the run.
            directory: of checkpoints; made where it is not there.
            retention: which of them stay.
            life: of the run, for the index.

        Raises:
            CheckpointError: why it was not written.
        """
        started_s = clock.now_s()
        self._life = life
        try:
            with locked(directory) as folder_fd:
                found = self._write(fds, world_size, directory, folder_fd)
                crash_point("smp.checkpoint.latest")
                prune(directory, retention, newest=Path(found.path))
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint in {directory} is not written: {error.strerror or error}. The "
                "snapshots in memory go on; make room or name another --checkpoint-dir"
            ) from error
        return replace(found, seconds=clock.now_s() - started_s)

    def _write(self, fds: ArenaFds, world_size: int, directory: Path, folder_fd: int) -> Written:
        sweep_alone(directory, self._run_id)
        for _ in range(TRIES):
            version = newest_version(fds, world_size)
            if version is None:
                raise CheckpointError("no version is sealed by every rank yet; nothing to write")
            if self._last is not None and self._last[:2] == (directory, version):
                path = self._last[2]
                if path.is_dir():
                    point_latest(directory, path, folder_fd)
                    return Written(version, path, 0)
            written = self._try(fds, version, world_size, directory)
            if written is None:
                continue
            temporary, total_bytes = written
            path = free_name(directory, version)
            temporary.rename(path)
            crash_point("smp.checkpoint.renamed")
            sync(folder_fd)
            point_latest(directory, path, folder_fd)
            self.remember(directory, version, path)
            return Written(version, path, total_bytes)
        raise CheckpointError(
            f"the slots were overwritten {TRIES} times while they were read: snapshots are taken "
            "faster than memory is copied. Take them less often (--snapshot-every)"
        )

    def _try(
        self, fds: ArenaFds, version: Version, world_size: int, directory: Path
    ) -> tuple[Path, int] | None:
        """The temporary folder with everything in it, or None when a slot was overwritten."""
        shards = find_shards(fds, version, world_size)
        if not copy_where_it_fits(shards, self._free_bytes()):
            return None
        temporary = directory / temporary_name(f"step-{version.step}")
        crash_point("smp.checkpoint.started")
        temporary.mkdir()
        try:
            total = self._fill(temporary, shards, version, world_size)
        except SnapshotCorrupt as error:
            remove(temporary)
            if all(shard.is_unchanged() for shard in shards):
                raise CheckpointError(f"the checkpoint is not written: {error}") from error
            return None
        except BaseException:
            remove(temporary)
            raise
        if not all(shard.is_copied or shard.is_unchanged() for shard in shards):
            remove(temporary)
            return None
        return temporary, total

    def _fill(
        self, folder: Path, shards: Sequence[Shard], version: Version, world_size: int
    ) -> int:
        files = []
        for shard in shards:
            files.append(write_shard(folder, shard, self._pace))
            crash_point("smp.checkpoint.shard_written")
        index = make_index(
            folder.parent,
            run_id=self._run_id,
            generation=version.generation,
            step=version.step,
            world_size=world_size,
            shards=files,
            life=self._life,
        )
        with replaced(folder / INDEX_NAME) as write:
            write(seal(index))
        crash_point("smp.checkpoint.index_written")
        sync_folder(folder)
        crash_point("smp.checkpoint.synced")
        return sum(shard.num_bytes for shard in files)
