"""Sends the files of one node's ranks to a store.

Runs in:  the SMP, in its disk lane's thread.
Takes in: shards; the folder of their version.
Gives:    a `CheckpointPart` that is stored with all its files, or a `CheckpointError`.
"""

from collections.abc import Sequence

import msgspec

from ftrun import clock
from ftrun.errors import CheckpointError, SnapshotCorrupt
from ftrun.ids import Rank
from ftrun.smp.checkpoint.checkpoint_parts import Content
from ftrun.smp.checkpoint.index import CheckpointPart, ShardFile, parse_part, seal
from ftrun.smp.checkpoint.slot_reader import SealedSlot, SlotOverwritten, file_names, write_image
from ftrun.smp.checkpoint.storage.direct_file import Pace
from ftrun.smp.checkpoint.storage.fsspec import FsspecStorage
from ftrun.smp.checkpoint.storage.url_folders import is_whole
from ftrun.smp.checkpoint.write_job import ChosenVersion


def part_name(ranks: Sequence[int]) -> str:
    return f"part-{ranks[0]:05d}.json"


def send_part(
    store: FsspecStorage, name: str, chosen: ChosenVersion, blank: CheckpointPart
) -> CheckpointPart:
    """Send all files of this node, then its part.

    Args:
        store: the destination.
        name: of the folder.
        chosen: the shards of all ranks of this node.
        blank: the part, without files.

    Raises:
        SlotOverwritten: a slot was overwritten that had not been copied.
        CheckpointError: the store has not accepted it, or the shard is corrupt.
    """
    store.make(name)
    try:
        files = [_send(store, name, shard, chosen.pace) for shard in chosen.shards]
    except SnapshotCorrupt as error:
        if chosen.is_sound:
            raise CheckpointError(str(error)) from error
        raise SlotOverwritten(chosen.version) from error
    if not chosen.is_sound:
        raise SlotOverwritten(chosen.version)
    part = msgspec.structs.replace(blank, shards=files, written_s=clock.wall_s())
    store.put(f"{name}/{part_name([file.rank for file in files])}", seal(part))
    return part


def whole_part(
    store: FsspecStorage,
    name: str,
    blank: CheckpointPart,
    ranks: Sequence[Rank],
    contents: set[Content],
) -> CheckpointPart | None:
    path = f"{name}/{part_name(ranks)}"
    data = store.read(path)
    if data is None:
        return None
    try:
        part = parse_part(data, what=path)
    except CheckpointError:
        return None
    sizes = store.sizes(name)
    is_it = (
        part.key == blank.key
        and {shard.rank for shard in part.shards} == set(ranks)
        and (not contents or {shard.content for shard in part.shards} == contents)
        and all(is_whole(shard, sizes) for shard in part.shards)
    )
    return part if is_it else None


def _send(store: FsspecStorage, name: str, shard: SealedSlot, pace: Pace) -> ShardFile:
    data_name, table_name = file_names(shard)
    with store.uploaded(f"{name}/{data_name}", shard.shape.image_bytes, pace) as file:
        described = write_image(file, shard)
    store.put(f"{name}/{table_name}", shard.table().tobytes())
    return described
