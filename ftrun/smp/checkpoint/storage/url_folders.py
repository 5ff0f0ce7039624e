"""The checkpoints at a URL: their names, their validity, and the removal of leftovers.

Runs in:  the SMP, in its disk lane's thread; the process of ftrun.tools.checkpoints.catalog.
Takes in: a store.
Gives:    the checkpoints there, finished and incomplete; the removal of those that are not needed.

    URL/step-00000042-g3-1f2e3d4c-5b6a7988/  rank-00000.safetensors ... part-00000.json  index.json
                         run      run, token and world size

A store has no rename, no lock and no link. A folder therefore has its final name from the first
byte on, and is a checkpoint once its index exists. The removal has the reverse order.

Rule 1: the name of a folder identifies one version in one life of a run. All nodes that write there
        therefore write the same bytes, and two that finish it write the same index.
Rule 2: a folder without a readable index is incomplete. Of this run, a finished version makes
        earlier incomplete ones obsolete. A single node removes all incomplete ones at the start of
        a version; several nodes leave the newest, which may still be finished.
Rule 3: incomplete folders of other runs are removed if nothing was added to them for `STALE_S` and
        the store reports times.
Rule 4: a failed removal never makes a checkpoint fail.
"""

import contextlib
import logging
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from ftrun import clock
from ftrun.errors import CheckpointError
from ftrun.ids import Version, version
from ftrun.smp.checkpoint.index import CheckpointIndex, CheckpointPart, ShardFile, parse_index
from ftrun.smp.checkpoint.storage.fsspec import FsspecStorage, Sizes
from ftrun.smp.checkpoint.storage.local import LATEST_NAME, STALE_S, Retention
from ftrun.wire.messages.checkpoint import INDEX_NAME

_NAME = re.compile(r"step-(\d{8,})-g(\d+)-([0-9a-f]{8})-([0-9a-f]{8})")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint folder in a store."""

    name: str
    version: Version
    run_tag: str
    index: CheckpointIndex | None
    """None if it is incomplete or damaged."""
    problem: str = ""
    """The reason why its index cannot be used; empty if it has no index."""

    @property
    def is_half(self) -> bool:
        return self.index is None and not self.problem


def name_of(key: CheckpointPart) -> str:
    tag = tag_of(f"{key.run_id}/{key.token}/{key.world_size}")
    return f"step-{key.step:08d}-g{max(0, key.generation)}-{tag_of(key.run_id)}-{tag}"


def tag_of(text: str) -> str:
    return xxhash.xxh32_hexdigest(text.encode())


def read_folders(store: FsspecStorage) -> list[StoredCheckpoint]:
    found = []
    for name in sorted(store.folders(), reverse=True):
        match = _NAME.fullmatch(name)
        if match is not None:
            step, generation, run_tag, _ = match.groups()
            index, problem = _read_index(store, name)
            of = version(int(generation), int(step))
            found.append(StoredCheckpoint(name, of, run_tag, index, problem))
    return sorted(found, key=_order, reverse=True)


def read_latest(store: FsspecStorage) -> str:
    data = store.read(LATEST_NAME)
    return data.decode(errors="replace").strip() if data is not None else ""


def put_latest(store: FsspecStorage, name: str) -> None:
    store.put(LATEST_NAME, f"{name}\n".encode())


def is_whole(shard: ShardFile, sizes: Sizes) -> bool:
    """True if both files exist, with their sizes if the store reports these."""
    wanted = zip(shard.names, (shard.num_bytes, 8 * shard.num_pieces), strict=True)
    return all(name in sizes and sizes[name] in (size, None) for name, size in wanted)


def next_serial(folders: Iterable[StoredCheckpoint], *, besides: str) -> int:
    """Return the serial of the next index; equal on all nodes that write that index."""
    serials = [one.index.serial for one in folders if one.index and one.name != besides]
    return 1 + max(serials, default=0)


def to_prune(
    folders: Sequence[StoredCheckpoint], retention: Retention, *, newest: str
) -> list[str]:
    others = [
        one
        for one in folders
        if one.index is not None and one.name != newest and retention.covers(one.index.run_id)
    ]
    spare = max(0, retention.keep - 1)
    old = [one for one in others[:spare] if age_s(one) > retention.keep_s > 0]
    return [one.name for one in [*others[spare:], *old]]


def age_s(folder: StoredCheckpoint) -> float:
    """Seconds since the index was written, by its own time; 0 if it has none."""
    written_s = folder.index.written_s if folder.index is not None else 0.0
    return clock.wall_s() - written_s if written_s else 0.0


def remove(store: FsspecStorage, names: Iterable[str]) -> list[str]:
    """Remove these folders as far as possible; each index first, so that it is never offered."""
    removed = []
    for name in names:
        try:
            store.remove(name, first=INDEX_NAME)
        except CheckpointError as error:
            _log.warning("%s is not removed: %s", name, str(error))
        else:
            removed.append(name)
    return removed


def sweep_before(
    store: FsspecStorage,
    folders: Iterable[StoredCheckpoint],
    run_id: str,
    begun: str,
    *,
    is_alone: bool,
) -> None:
    """Remove abandoned folders at the start of a version (rules 2 and 3)."""
    halves = [one for one in folders if one.is_half and one.name != begun]
    own = sorted((one for one in halves if one.run_tag == tag_of(run_id)), key=_order)
    doomed = own if is_alone else own[:-1]
    others = [one for one in halves if one.run_tag != tag_of(run_id) and _is_stale(store, one)]
    remove(store, [one.name for one in (*doomed, *others)])


def sweep_finished(
    store: FsspecStorage,
    folders: Iterable[StoredCheckpoint],
    run_id: str,
    finished: Version,
    name: str,
) -> None:
    remove(
        store,
        [
            one.name
            for one in folders
            if one.index is None and one.run_tag == tag_of(run_id)
            if one.version <= finished and one.name != name
        ],
    )


def sweep_url(url: str, stop: threading.Event, run_id: str) -> None:
    with contextlib.suppress(CheckpointError), FsspecStorage(url, stop) as store:
        halves = [one for one in read_folders(store) if one.is_half]
        remove(store, [one.name for one in halves if one.run_tag == tag_of(run_id)])


def _read_index(store: FsspecStorage, name: str) -> tuple[CheckpointIndex | None, str]:
    data = store.read(f"{name}/{INDEX_NAME}")
    if data is None:
        return None, ""
    try:
        return parse_index(data, what=f"{store.shown}/{name}"), ""
    except CheckpointError as error:
        return None, str(error)


def _order(folder: StoredCheckpoint) -> tuple[int, Version]:
    return (folder.index.serial if folder.index is not None else 0, folder.version)


def _is_stale(store: FsspecStorage, folder: StoredCheckpoint) -> bool:
    modified_s = store.modified_s(folder.name)
    return modified_s is not None and clock.wall_s() - modified_s > STALE_S
