"""Loads a checkpoint at a URL into arenas.

Runs in:  the SMP, in its disk lane's thread.
Takes in: a URL that `url_checkpoint` has written to.
Gives:    a `LoadedCheckpoint` with one new arena per rank, or a `CheckpointError`.

The order is the same as in `load`: `latest` first, then every other whole checkpoint, the last
written first. Every digest is checked. The bytes are read directly into the arenas.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from ftrun.errors import CheckpointError
from ftrun.smp.checkpoint.index import CheckpointIndex
from ftrun.smp.checkpoint.load import LoadedCheckpoint, LoadJob, load_first
from ftrun.smp.checkpoint.reader import CheckpointFiles, OpenFile
from ftrun.smp.checkpoint.storage.fsspec import FsspecStorage
from ftrun.smp.checkpoint.storage.local import LATEST_NAME
from ftrun.smp.checkpoint.storage.url_folders import StoredCheckpoint, read_folders, read_latest
from ftrun.urls import below


@dataclass(frozen=True, slots=True)
class UrlSource:
    """A checkpoint in a store."""

    store: FsspecStorage
    folder: StoredCheckpoint

    @property
    def path(self) -> str:
        return below(self.store.shown, self.folder.name)

    def index(self) -> CheckpointIndex:
        if self.folder.index is None:
            raise CheckpointError(self.folder.problem or f"{self.path} has no index")
        return self.folder.index

    def opened(self, name: str) -> AbstractContextManager[OpenFile]:
        return self.store.opened(f"{self.folder.name}/{name}")

    @contextmanager
    def again(self) -> Iterator[CheckpointFiles]:
        with self.store.anew() as store:
            yield UrlSource(store, self.folder)


def load_from_url(url: str, order: LoadJob, stop: threading.Event) -> LoadedCheckpoint | None:
    """Fill arenas from the newest usable checkpoint; None if there is no checkpoint at all.

    Args:
        url: need not exist.
        order: what to load; `only` may be `latest`.
        stop: when set, all waiting ends.

    Raises:
        CheckpointError: there are checkpoints, and none of them can be used; or the store cannot be
            reached.
        MemoryTooSmall: the arenas do not fit.
    """
    with FsspecStorage(url, stop) as store:
        latest = read_latest(store)
        folders = read_folders(store)
        bad = {one.name: one.problem for one in folders if one.problem}
        chosen = in_order(folders, latest)
        if order.only:
            name = latest if order.only == LATEST_NAME else order.only
            chosen = [one for one in folders if one.name == name and not one.is_half]
            bad = {} if chosen else {order.only: f"{below(store.shown, order.only)} is not there"}
        sources = [UrlSource(store, one) for one in chosen]
        return load_first(sources, bad, order, where=store.shown)


def in_order(folders: Sequence[StoredCheckpoint], latest: str) -> list[StoredCheckpoint]:
    whole = [one for one in folders if one.index is not None]
    return sorted(whole, key=lambda one: one.name != latest)
