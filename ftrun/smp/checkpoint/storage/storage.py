"""What a storage of checkpoints offers, and the rules that hold on each of them.

Runs in:  the SMP, in its disk lane's thread; the process of ftrun.tools.checkpoints.catalog.
Takes in: a storage.
Gives:    the names of folders; which checkpoints are abandoned, obsolete or too old, and their
          removal.

    step-00000042-g3                            a checkpoint in a directory
    .tmp-step-00000042-g3-1f2e3d4c-5b6a7988     the same, begun by several nodes
    step-00000042-g3-1f2e3d4c-5b6a7988          a checkpoint at a URL, begun or finished
                     run      run, token and world size

Parts of another run, of another world size or of other nodes go to another folder. They are
therefore never in the way of this run's parts, and never merged with them.

Rule 1: an incomplete checkpoint of another run may be in progress. It is removed only if nothing
        was added to it for `STALE_S`.
Rule 2: of this run, a finished version makes earlier incomplete ones obsolete. At the start of a
        version, a single node removes all incomplete ones. Several nodes leave the newest of the
        earlier ones, which may still be finished and shows the ranks that never arrived.
Rule 3: when a checkpoint is loaded, all nodes start again. Every incomplete checkpoint of the run
        then belongs to a life that is over, and its versions may occur again with other bytes.
Rule 4: a failed removal never makes a checkpoint fail.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import xxhash

from ftrun import clock
from ftrun.errors import CheckpointError
from ftrun.ids import Version, version
from ftrun.smp.checkpoint.index import CheckpointIndex, CheckpointPart, ShardFile, parse_index
from ftrun.smp.checkpoint.storage.direct_file import Pace

LATEST_NAME = "latest"
STALE_S = 86_400.0
"""An incomplete checkpoint of another run is abandoned after this number of seconds."""

_NAME = re.compile(r"step-(\d{8,})-g(-?\d+)-([0-9a-f]{8})-([0-9a-f]{8})")
_log = logging.getLogger(__name__)

Sizes = Mapping[str, int | None]
"""Of the files in a folder, by name; None if the storage does not report a size."""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A folder of a checkpoint.

    Args:
        run_tag: of the run that began it; empty if the name does not contain it.
        index: None if it is incomplete or damaged.
        problem: the reason why its index cannot be used; empty if it has none yet.
        may_pass: the index could not be read just now, which may pass.
        written_s: wall time at which the index was written; 0 if unknown.
    """

    name: str
    version: Version
    run_tag: str = ""
    index: CheckpointIndex | None = None
    problem: str = ""
    may_pass: bool = False
    written_s: float = 0.0

    @property
    def is_incomplete(self) -> bool:
        return self.index is None and not self.problem

    @property
    def age_s(self) -> float:
        """Seconds since the index was written; 0 if unknown."""
        return clock.wall_s() - self.written_s if self.written_s else 0.0

    @property
    def order(self) -> tuple[int, Version]:
        return (self.index.serial if self.index is not None else 0, self.version)


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints are retained, in addition to the last written one.

    Args:
        keep: number of retained checkpoints, including the last written one.
        keep_s: checkpoints written longer ago than this are removed; 0: age does not matter.
        runs: only checkpoints of these runs may be removed; empty: of all runs.
    """

    keep: int
    keep_s: float = 0.0
    runs: frozenset[str] = frozenset()

    def covers(self, run_id: str) -> bool:
        return not self.runs or run_id in self.runs


class FileSink(Protocol):
    """A file that is filled in place, on a disk or on its way to a store."""

    is_in_place: bool
    """The newest `room` has the file's bytes already."""

    def room(self, source: memoryview | None = None) -> memoryview:
        """Return memory for the next bytes, at least one; see `DirectFile.room`."""

    def take(self, num_bytes: int) -> None:
        """Append the first `num_bytes` of `room` to the file."""


class OpenFile(Protocol):
    """A file of a checkpoint that is being read."""

    @property
    def size(self) -> int: ...

    def read(self, at: int, num_bytes: int) -> bytes:
        """Read `num_bytes` from offset `at`, or fewer at the end of the file."""

    def read_into(self, target: memoryview, at: int = 0) -> int:
        """Fill `target` from offset `at`; return the number of bytes read."""


class Storage(Protocol):
    """The place of all checkpoints of a run. Names are relative to it.

    Each method raises OSError (a directory) or CheckpointError (a URL) if the storage fails.
    """

    @property
    def shown(self) -> str: ...

    @property
    def is_local(self) -> bool:
        """It has locks, links, an atomic rename and its own times."""

    def path_of(self, name: str) -> str: ...

    # --- reading ------------------------------------------------------------------------------

    def folders(self) -> list[str]: ...

    def checkpoints(self) -> list[StoredCheckpoint]:
        """Return all that this package has named, the last written first; empty without a place."""

    def describe(self, name: str) -> StoredCheckpoint:
        """Return one checkpoint, whatever its name; with a problem if it is missing."""

    def latest_name(self) -> str: ...

    def read(self, name: str) -> bytes | None: ...

    def sizes(self, folder: str) -> Sizes:
        """Return the sizes of the files; empty if the folder does not exist."""

    def changed_s(self, folder: str) -> float | None:
        """Return the wall time of the last addition; None if unknown."""

    def open(self, name: str) -> AbstractContextManager[OpenFile]: ...

    def again(self) -> "AbstractContextManager[Storage]":
        """Return the same storage, usable also after this one is closed or has failed."""

    # --- writing ------------------------------------------------------------------------------

    def exclusive(self) -> AbstractContextManager[None]:
        """Exclude other runs while a single node writes."""

    def lock(self) -> AbstractContextManager[None]:
        """Exclude other nodes of the run while this one inspects and merges."""

    def pending_name(self, key: CheckpointPart, *, is_alone: bool) -> str:
        """Return the folder of all parts that can be merged with this one."""

    def make(self, folder: str) -> None: ...

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write a file; it is complete and durable, or as it was before."""

    def stream(self, name: str, num_bytes: int, pace: Pace) -> AbstractContextManager[FileSink]:
        """Write a large file; on exit it is complete and durable, or discarded."""

    def sync(self, folder: str = "") -> None:
        """Make the names in the folder durable."""

    def publish(self, folder: str, version: Version) -> str:
        """Make a folder with an index visible; return its final name."""

    def clean_up(self, name: str) -> None:
        """Remove what a finished checkpoint does not need."""

    def point_latest(self, name: str) -> None: ...

    def remove(self, name: str) -> None:
        """Remove a checkpoint, so that it is never offered while it is incomplete."""

    def discard(self, folder: str) -> None:
        """Remove an unfinished checkpoint as far as possible, also after a failure."""

    def sweep_rest(self, *, is_alone: bool) -> None:
        """Remove what killed processes have left outside of checkpoints."""


# --- names ------------------------------------------------------------------------------------


def tagged_name(key: CheckpointPart, generation: int) -> str:
    tag = _tag(f"{key.run_id}/{key.token}/{key.world_size}")
    return f"step-{key.step:08d}-g{generation}-{_tag(key.run_id)}-{tag}"


def parse_tagged(name: str) -> tuple[Version, str] | None:
    """Return version and run tag of a name; None if it is another name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    step, generation, run_tag, _ = match.groups()
    return version(int(generation), int(step)), run_tag


def part_name(ranks: Sequence[int]) -> str:
    return f"part-{ranks[0]:05d}.json"


def part_names(sizes: Sizes) -> list[str]:
    return sorted(name for name in sizes if name.startswith("part-"))


def parse_stored(
    data: bytes | None, name: str, path: str, tagged: tuple[Version, str] | None
) -> StoredCheckpoint:
    """Return the checkpoint with this index; it is incomplete if there is none."""
    at, run_tag = tagged if tagged is not None else (version(0, 0), "")
    if data is None:
        return StoredCheckpoint(name, at, run_tag)
    try:
        index = parse_index(data, what=path)
    except CheckpointError as error:
        return StoredCheckpoint(name, at, run_tag, problem=str(error))
    if tagged is None:
        at = version(index.generation, index.step)
    return StoredCheckpoint(name, at, run_tag, index, written_s=index.written_s)


# --- what is whole, abandoned or too old ------------------------------------------------------


def is_whole(shard: ShardFile, sizes: Sizes) -> bool:
    """True if both files exist, with their sizes if the storage reports these."""
    wanted = zip(shard.names, (shard.num_bytes, 8 * shard.num_pieces), strict=True)
    return all(name in sizes and sizes[name] in (size, None) for name, size in wanted)


def next_serial(found: Iterable[StoredCheckpoint], *, besides: str) -> int:
    """Return the serial of the next index; equal on all nodes that write that index."""
    serials = [one.index.serial for one in found if one.index and one.name != besides]
    return 1 + max(serials, default=0)


def to_prune(found: Sequence[StoredCheckpoint], retention: Retention, *, newest: str) -> list[str]:
    others = [
        one
        for one in found
        if one.index is not None and one.name != newest and retention.covers(one.index.run_id)
    ]
    spare = max(0, retention.keep - 1)
    old = [one for one in others[:spare] if one.age_s > retention.keep_s > 0]
    return [one.name for one in [*others[spare:], *old]]


def earlier_of_run(
    found: Iterable[StoredCheckpoint], run_id: str, before: Version
) -> list[StoredCheckpoint]:
    """Return the incomplete checkpoints of a run before this version, the newest first."""
    own = [one for one in found if _is_started_by(one, run_id) and one.version < before]
    return sorted(own, key=lambda one: one.version, reverse=True)


def sweep_started(
    storage: Storage,
    found: Sequence[StoredCheckpoint],
    run_id: str,
    started: Version,
    name: str,
    *,
    is_alone: bool,
) -> list[StoredCheckpoint]:
    """Remove abandoned checkpoints at the start of a version (rules 1 and 2); return the others."""
    others = [one for one in found if one.is_incomplete and one.name != name]
    if is_alone:
        doomed = [one for one in others if _is_started_by(one, run_id)]
    else:
        doomed = earlier_of_run(others, run_id, started)[1:]
    doomed += [one for one in others if one not in doomed and is_stale(storage.changed_s(one.name))]
    remove_all(storage, [one.name for one in doomed])
    storage.sweep_rest(is_alone=is_alone)
    return [one for one in found if one not in doomed]


def sweep_finished(
    storage: Storage, found: Iterable[StoredCheckpoint], run_id: str, finished: Version, name: str
) -> None:
    own = [one for one in found if one.index is None and one.run_tag == _tag(run_id)]
    remove_all(storage, [one.name for one in own if one.version <= finished and one.name != name])


def sweep_run(storage: Storage, run_id: str) -> None:
    """Remove all incomplete checkpoints of a run (rule 3)."""
    remove_all(storage, [one.name for one in storage.checkpoints() if _is_started_by(one, run_id)])


def remove_all(storage: Storage, names: Iterable[str]) -> None:
    for name in names:
        try:
            storage.remove(name)
        except (CheckpointError, OSError) as error:
            _log.warning("cannot remove %s: %s", name, str(error))


def is_stale(changed_s: float | None) -> bool:
    return changed_s is not None and clock.wall_s() - changed_s > STALE_S


def _is_started_by(one: StoredCheckpoint, run_id: str) -> bool:
    return one.is_incomplete and one.run_tag == _tag(run_id)


def _tag(text: str) -> str:
    return xxhash.xxh32_hexdigest(text.encode())
