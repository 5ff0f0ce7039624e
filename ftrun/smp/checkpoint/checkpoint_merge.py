"""Merges the parts of several nodes into one checkpoint.

Runs in:  the SMP of any node that finds the parts complete, in its disk lane's thread.
Takes in: a folder of parts; the description that all parts must match.
Gives:    the finished checkpoint, to which `latest` points; or the ranks whose parts are missing.
Survives: a kill at any point. Before the rename, the next node that checks the folder merges it
          again. After the rename, the next node that is asked for this version finds it finished
          and completes the rest.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from ftrun.errors import CheckpointError
from ftrun.ids import Version
from ftrun.smp.checkpoint.index import (
    CheckpointIndex,
    CheckpointPart,
    ShardFile,
    make_index,
    read_part,
    seal,
)
from ftrun.smp.checkpoint.storage.local import (
    Retention,
    free_name,
    point_latest,
    prune,
    replaced,
    sync,
    sync_folder,
)
from ftrun.smp.checkpoint.storage.storage import part_folders, sweep_finished
from ftrun.smp.checkpoint.write_job import WriteResult
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages.checkpoint import INDEX_NAME


def look(
    folder: Path, like: CheckpointPart, version: Version, retention: Retention, folder_fd: int
) -> WriteResult:
    """Finish the checkpoint if all parts exist; otherwise return the missing ranks.

    Args:
        folder: the folder of this version.
        like: run, token, version and world size that the parts must have.
        version: the same as an object.
        retention: which checkpoints are retained.
        folder_fd: the directory of checkpoints.

    Raises:
        CheckpointError: two parts disagree about a rank, or the folder was swept.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} was swept, for a later version. Ask for a later one")
    parts = sorted(str(path) for path in folder.glob("part-*.json"))
    found, set_aside = gather(
        parts, lambda name: read_part(Path(name)), lambda shard: shard.is_whole(folder), like
    )
    missing = tuple(rank for rank in range(like.world_size) if rank not in found)
    if missing:
        notes = [*set_aside, *_who_never_came(folder.parent, like, version, missing)]
        return WriteResult(version, folder, 0, missing_ranks=missing, note="; ".join(notes))
    index = make_index(
        folder.parent,
        run_id=like.run_id,
        generation=like.generation,
        step=like.step,
        world_size=like.world_size,
        shards=list(found.values()),
        life=like.life,
    )
    with replaced(folder / INDEX_NAME) as write:
        write(seal(index))
    crash_point("smp.checkpoint.merged")
    sync_folder(folder)
    path = free_name(folder.parent, version)
    folder.rename(path)
    crash_point("smp.checkpoint.parts_renamed")
    sync(folder_fd)
    settle(path, like.run_id, version, retention, folder_fd)
    total_bytes = sum(shard.num_bytes for shard in index.shards)
    return WriteResult(version, path, total_bytes, note="; ".join(set_aside))


def settle(path: Path, run_id: str, version: Version, retention: Retention, folder_fd: int) -> None:
    """Complete the steps after the rename; every node that finds the checkpoint repeats them."""
    for pattern in ("part-*.json", ".*"):  # parts, and leftovers of killed file writers
        for other in path.glob(pattern):
            other.unlink(missing_ok=True)
    point_latest(path.parent, path, folder_fd)
    crash_point("smp.checkpoint.latest")
    sweep_finished(path.parent, run_id, version)
    prune(path.parent, retention, newest=path)


def is_of(index: CheckpointIndex, like: CheckpointPart) -> bool:
    """True if the index names the same version.

    A loaded version (generation -1) has lost its run and generation, so these are not compared.
    """
    if (index.step, index.world_size) != (like.step, like.world_size):
        return False
    return like.generation < 0 or (index.run_id, index.generation) == (
        like.run_id,
        like.generation,
    )


def gather(
    parts: Iterable[str],
    read: Callable[[str], CheckpointPart],
    is_whole: Callable[[ShardFile], bool],
    like: CheckpointPart,
) -> tuple[dict[int, ShardFile], list[str]]:
    """Return the files of each rank that has a part, and texts about the rejected parts.

    Args:
        parts: their names.
        read: reads one part; raises CheckpointError.
        is_whole: returns whether both files of a rank exist with their sizes.
        like: run, token, version and world size that the parts must have.

    Raises:
        CheckpointError: two parts disagree about a rank.
    """
    found: dict[int, ShardFile] = {}
    set_aside: list[str] = []
    for path in parts:
        try:
            part = read(path)
            _check(path, part, is_whole, like)
        except CheckpointError as error:
            set_aside.append(str(error))
            continue
        for shard in part.shards:
            if found.setdefault(shard.rank, shard).content != shard.content:
                raise CheckpointError(
                    f"{path} and another part have different bytes of rank {shard.rank}: they "
                    "are of different lives of the run. Ask for a later version"
                )
    return found, set_aside


def _check(
    path: str, part: CheckpointPart, is_whole: Callable[[ShardFile], bool], like: CheckpointPart
) -> None:
    if part.key != like.key:
        raise CheckpointError(f"{path} is of {part.key}, not of {like.key}; it does not count")
    for shard in part.shards:
        if not 0 <= shard.rank < like.world_size or not is_whole(shard):
            raise CheckpointError(
                f"{path} does not count: the files of rank {shard.rank} are not there as it says"
            )


def _who_never_came(
    directory: Path, like: CheckpointPart, version: Version, missing: tuple[int, ...]
) -> list[str]:
    before = [one for one in part_folders(directory, like.run_id) if one.version < version]
    if not before:
        return []
    came: set[int] = set()
    is_known = False
    for path in before[0].path.glob("part-*.json"):
        try:
            part = read_part(path)
        except CheckpointError:
            continue
        is_known = True
        came.update(shard.rank for shard in part.shards)
    never = sorted(set(missing) - came)
    if not is_known or not never:
        return []
    ranks = ", ".join(map(str, never))
    return [f"ranks {ranks} never came: is {directory} on a file system that all nodes share?"]
