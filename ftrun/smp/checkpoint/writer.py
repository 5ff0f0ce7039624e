"""Writes the newest snapshot of all ranks to a directory.

Runs in:  the SMP, in its disk lane's thread.
Takes in: duplicates of the arenas' descriptors, a directory.
Gives:    a `WriteResult`, or a `CheckpointError`; never an incomplete checkpoint.
Survives: everything but the loss of the disk.

    DIR/step-00000042-g0/   rank-00000.safetensors  rank-00000.digests  ...  index.json
    DIR/latest -> step-00000042-g0

A file contains the unchanged bytes of a slot. The digests file is the table of the slot. The index
holds the digests of tables and headers, and a digest of itself. Everything is written and synced in
a `.tmp-` sibling, which is renamed when it is complete. `latest` is renamed last. This module
serves one node that has all ranks; `checkpoint_parts` serves several nodes.

Training never waits for a disk, so a slot may be overwritten while it is read. If a capture begins
soon enough, the snapshot is written while it is captured (`live_capture`). The rest of a slot is
copied before it is overwritten if memory allows (`slot_reader`). Otherwise it is written piece by
piece. The digests are computed from the bytes written and compared with those of the capture, so a
checkpoint cannot mix two versions.
"""

from pathlib import Path

from ftrun.errors import CheckpointError, SnapshotCorrupt
from ftrun.ids import Version
from ftrun.smp.checkpoint.index import make_index, seal
from ftrun.smp.checkpoint.slot_reader import ArenaFds, SlotOverwritten, write_shard
from ftrun.smp.checkpoint.storage.local import (
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
from ftrun.smp.checkpoint.storage.storage import sweep_alone
from ftrun.smp.checkpoint.write_job import (
    ChosenVersion,
    WriteJob,
    WriterContext,
    WriteResult,
    keep,
    told,
    write_newest,
)
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages.checkpoint import INDEX_NAME


class CheckpointWriter:
    """Writes checkpoints of one run into one directory at a time."""

    def __init__(self, means: WriterContext) -> None:
        self._means = means
        self._last: tuple[Path, Version, Path] | None = None

    def remember(self, directory: Path, version: Version, path: Path) -> None:
        self._last = (directory, version, path)

    def write(self, fds: ArenaFds, order: WriteJob) -> WriteResult:
        """Write the newest version that all ranks hold, or the one that they are capturing.

        Raises:
            CheckpointError: the reason why it was not written.
        """
        with told(order), locked(order.directory) as folder_fd:
            sweep_alone(order.directory, self._means.run_id)
            found = write_newest(
                fds, order, self._means, lambda chosen: self._write(chosen, order, folder_fd)
            )
            crash_point("smp.checkpoint.latest")
            prune(order.directory, order.retention, newest=Path(found.path))
        return found

    def _write(self, chosen: ChosenVersion, order: WriteJob, folder_fd: int) -> WriteResult:
        directory, version = order.directory, chosen.version
        if self._last is not None and self._last[:2] == (directory, version):
            path = self._last[2]
            if path.is_dir():
                point_latest(directory, path, folder_fd)
                return WriteResult(version, path, 0)
        keep(chosen, self._means, gap_s=self._means.gap_s)
        temporary = directory / temporary_name(f"step-{version.step}")
        crash_point("smp.checkpoint.started")
        temporary.mkdir()
        try:
            total_bytes = self._fill(temporary, chosen, order)
        except SnapshotCorrupt as error:
            remove(temporary)
            if chosen.is_sound:
                raise CheckpointError(f"the checkpoint is not written: {error}") from error
            raise SlotOverwritten(version) from error
        except BaseException:
            remove(temporary)
            raise
        path = free_name(directory, version)
        temporary.rename(path)
        crash_point("smp.checkpoint.renamed")
        sync(folder_fd)
        point_latest(directory, path, folder_fd)
        self.remember(directory, version, path)
        return WriteResult(version, path, total_bytes)

    def _fill(self, folder: Path, chosen: ChosenVersion, order: WriteJob) -> int:
        """Write all files of the checkpoint durably; return the number of bytes of the ranks.

        Raises:
            SlotOverwritten: a slot was overwritten.
            SnapshotCorrupt: a slot is damaged.
        """
        files = []
        for shard in chosen.shards:
            files.append(write_shard(folder, shard, chosen.pace))
            crash_point("smp.checkpoint.shard_written")
        if not chosen.is_sound:
            raise SlotOverwritten(chosen.version)
        index = make_index(
            folder.parent,
            run_id=self._means.run_id,
            generation=chosen.version.generation,
            step=chosen.version.step,
            world_size=order.world_size,
            shards=files,
            life=order.life,
        )
        with replaced(folder / INDEX_NAME) as write:
            write(seal(index))
        crash_point("smp.checkpoint.index_written")
        sync_folder(folder)
        crash_point("smp.checkpoint.synced")
        return sum(shard.num_bytes for shard in files)
