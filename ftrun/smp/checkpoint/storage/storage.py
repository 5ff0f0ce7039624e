"""Opens a storage of checkpoints, and has the rules that hold on each of them.

Runs in:  the SMP, in its disk lane's thread; the process of ftrun.tools.checkpoints.catalog.
Takes in: a directory or a URL.
Gives:    the storage; which checkpoints are abandoned, obsolete or too old, and their removal.

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
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from ftrun.errors import CheckpointError
from ftrun.ids import Version
from ftrun.smp.checkpoint.index import StoredCheckpoint, is_stale, stored_bytes, tag_of
from ftrun.smp.checkpoint.storage.direct_file import DirectFile
from ftrun.smp.checkpoint.storage.fsspec import FsspecStorage, ObjectReader, ObjectWriter
from ftrun.smp.checkpoint.storage.local import LocalFile, LocalStorage
from ftrun.urls import is_url

Storage = LocalStorage | FsspecStorage
"""The place of all checkpoints of a run. Names are relative to it.

Each method raises OSError (a directory) or CheckpointError (a URL) if the storage fails.
`is_local`: it has locks, links, an atomic rename and its own times. A file of `stream` is complete
and durable when the block ends, or discarded. `publish` makes a folder with an index visible.
`clean_up` and `discard` remove what they can, also after a failure.
"""

FileSink = DirectFile | ObjectWriter
OpenFile = LocalFile | ObjectReader

_log = logging.getLogger(__name__)


def open_storage(where: str, stop: threading.Event) -> AbstractContextManager[Storage]:
    """Open a place that need not exist, or raise CheckpointError; `stop` ends all waiting."""
    if is_url(where):
        return FsspecStorage(where, stop)
    return nullcontext(LocalStorage(Path(where), stop))


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints are retained, in addition to the last written one.

    Args:
        keep: number of retained checkpoints, including the last written one.
        keep_s: checkpoints written longer ago than this are removed; 0: age does not matter.
        keep_bytes: the oldest are removed while all of `runs` have more bytes; 0: no limit.
        runs: only checkpoints of these runs may be removed; empty: of all runs.
    """

    keep: int
    keep_s: float = 0.0
    runs: frozenset[str] = frozenset()
    keep_bytes: int = 0

    def covers(self, run_id: str) -> bool:
        return not self.runs or run_id in self.runs


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
    doomed = [one.name for one in [*others[spare:], *old]]
    if retention.keep_bytes:
        sizes = {one.name: stored_bytes(one.index) for one in found if one.index is not None}
        left = [one.name for one in others if one.name not in doomed]
        total = sizes.get(newest, 0) + sum(sizes[name] for name in left)
        for name in reversed(left):
            if total <= retention.keep_bytes:
                break
            total -= sizes[name]
            doomed.append(name)
    return doomed


def prune(
    storage: Storage, names: Iterable[str], remove: Callable[[str], None]
) -> tuple[list[str], list[str]]:
    """Remove these checkpoints; return those removed, and those that a process reads and remain."""
    removed, being_read = list[str](), list[str]()
    for name in names:
        with storage.without_readers(name) as has_none:
            if has_none:
                remove(name)
            (removed if has_none else being_read).append(name)
    return removed, being_read


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
    own = [one for one in found if one.index is None and one.run_tag == tag_of(run_id)]
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


def _is_started_by(one: StoredCheckpoint, run_id: str) -> bool:
    return one.is_incomplete and one.run_tag == tag_of(run_id)
