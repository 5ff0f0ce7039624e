"""Writes checkpoints to a URL, by one node or by several without a coordinator.

Runs in:  the SMP, in its disk lane's thread.
Takes in: duplicates of the arenas' descriptors, a URL that fsspec can write to.
Gives:    a `WriteResult`: the checkpoint, or this node's part of it; or a `CheckpointError`.
Survives: the loss of any node and of the store, at any point. A folder without an index is never
          offered.

A node sends the files of its ranks piece by piece from the arenas, and computes and compares the
digests on the way. It then sends its part, which lists these files. Each node that finds the parts
of all ranks writes the index, which publishes the checkpoint. Last, it writes the name of the
folder to `latest`. A single node does the same with one part.

Rule 1: as in `checkpoint_parts`. A part exists only after all its files do. Parts are merged only
        if run, token, version and world size are equal. A finished checkpoint counts as this
        version only if its digests of this node's ranks equal this node's own.
Rule 2: the index depends on the parts and on the earlier checkpoints, not on the node that makes
        it. Several nodes may therefore write it.
Rule 3: a URL cannot be locked. If an index of another life appears there, the writer reports it and
        stops writing, because both runs would remove each other's checkpoints.
"""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ftrun.errors import CheckpointError
from ftrun.ids import Version
from ftrun.smp.checkpoint.checkpoint_merge import gather, is_of
from ftrun.smp.checkpoint.checkpoint_parts import Content, check_all_here, known_contents
from ftrun.smp.checkpoint.index import FORMAT, CheckpointIndex, CheckpointPart, parse_part, seal
from ftrun.smp.checkpoint.slot_reader import ArenaFds
from ftrun.smp.checkpoint.storage.fsspec import FsspecStorage
from ftrun.smp.checkpoint.storage.url_folders import (
    StoredCheckpoint,
    is_whole,
    name_of,
    next_serial,
    put_latest,
    read_folders,
    remove,
    sweep_before,
    sweep_finished,
    to_prune,
)
from ftrun.smp.checkpoint.url_part import send_part, whole_part
from ftrun.smp.checkpoint.write_job import (
    ChosenVersion,
    WriteJob,
    WriterContext,
    WriteResult,
    choose_own,
    keep,
    with_own_bytes,
    write_newest,
)
from ftrun.urls import below, without_password
from ftrun.wire.messages.checkpoint import INDEX_NAME


class UrlWriter:
    """Writes this node's parts, and finishes complete checkpoints."""

    def __init__(self, means: WriterContext) -> None:
        self._means = means
        self._own = os.urandom(8).hex()
        self._last: CheckpointPart | None = None
        self._written: tuple[str, Version, str] | None = None
        self._lives: set[str] = set()
        self._known: dict[str, set[str]] = {}
        """The checkpoints that existed at the first listing, by URL."""

    def remember(self, url: str, version: Version, path: str) -> None:
        self._written = (url, version, path.rpartition("/")[2])

    def write(self, fds: ArenaFds, order: WriteJob) -> WriteResult:
        """Write this node's part, and the checkpoint if all other parts exist.

        Raises:
            CheckpointError: the reason why it was not written.
        """
        self._lives.add(order.life)
        try:
            with FsspecStorage(order.where, self._means.throttle.stop) as store:
                return self._write(store, fds, order)
        except CheckpointError as error:
            raise CheckpointError(
                f"the checkpoint in {without_password(order.where)} is not written: {error}. The "
                "one before stays, and the snapshots in memory go on"
            ) from error

    def _write(self, store: FsspecStorage, fds: ArenaFds, order: WriteJob) -> WriteResult:
        if order.version is not None:
            chosen = choose_own(fds, order, order.version, self._means.throttle)
            return self._write_version(store, chosen, order)
        alone = replace(order, token=self._own)
        return write_newest(
            fds, order, self._means, lambda chosen: self._write_version(store, chosen, alone)
        )

    def _write_version(
        self, store: FsspecStorage, chosen: ChosenVersion, order: WriteJob
    ) -> WriteResult:
        version, shards = chosen.version, chosen.shards
        blank = order.part(self._means.run_id, version)
        name = name_of(blank)
        folders = read_folders(store)
        self._check_only_ours(store, folders, order)
        contents = known_contents(shards, order.ranks, blank, self._last)
        found = self._finished(store, folders, order, version, contents)
        if found is not None:
            return found
        is_alone = order.version is None
        sweep_before(store, folders, self._means.run_id, name, is_alone=is_alone)
        part = whole_part(store, name, blank, order.ranks, contents)
        is_new = part is None
        if part is None:
            check_all_here(shards, order.ranks, version)
            part = self._send(store, name, chosen, blank, is_alone=is_alone)
        self._last = part
        done = self._look(store, name, blank, order, version)
        return with_own_bytes(done, part, is_new=is_new)

    # --- existing checkpoints --- ------------------------------------------------------------

    def _check_only_ours(
        self, store: FsspecStorage, folders: Sequence[StoredCheckpoint], order: WriteJob
    ) -> None:
        names = {one.name for one in folders}
        known = self._known.setdefault(order.where, names)
        for one in folders:
            if one.index and one.name not in known and one.index.life not in self._lives:
                raise CheckpointError(
                    f"another run, {one.index.run_id}, has written {one.name} there meanwhile. "
                    "Name another --checkpoint-dir"
                )

    def _finished(
        self,
        store: FsspecStorage,
        folders: Sequence[StoredCheckpoint],
        order: WriteJob,
        version: Version,
        contents: set[Content],
    ) -> WriteResult | None:
        """Return this version if it is a checkpoint already, and complete an interrupted finish."""
        blank = order.part(self._means.run_id, version)
        for one in folders:
            if one.index is None:
                continue
            is_loaded = self._written == (order.where, version, one.name)
            has_all = contents and contents <= {shard.content for shard in one.index.shards}
            if not is_loaded and not (has_all and is_of(one.index, blank)):
                continue
            sizes = store.sizes(one.name)
            if not all(is_whole(shard, sizes) for shard in one.index.shards):
                continue
            if one is folders[0]:
                self._settle(store, one.name, order, version, folders)
            return WriteResult(version, below(store.shown, one.name), 0)
        return None

    def _send(
        self,
        store: FsspecStorage,
        name: str,
        chosen: ChosenVersion,
        blank: CheckpointPart,
        *,
        is_alone: bool,
    ) -> CheckpointPart:
        keep(chosen, self._means, gap_s=math.inf)  # copied at once: a network may be slow
        try:
            return send_part(store, name, chosen, blank)
        except CheckpointError:
            if is_alone:  # an unfinished upload may cost money or count against a quota
                # Another connection is used: on this one the failed call may still be answered, or
                # it hangs. `sweep_before` finds what is stored even later.
                with suppress(CheckpointError), store.anew() as fresh:
                    remove(fresh, [name])
            raise

    # --- publishing ---------------------------------------------------------------------------

    def _look(
        self,
        store: FsspecStorage,
        name: str,
        blank: CheckpointPart,
        order: WriteJob,
        version: Version,
    ) -> WriteResult:
        sizes = store.sizes(name)
        path = below(store.shown, name)
        times_s: list[float] = []

        def read(part_name: str) -> CheckpointPart:
            data = store.read(f"{name}/{part_name}") or b""
            part = parse_part(data, what=f"{path}/{part_name}")
            if part.key == blank.key:
                times_s.append(part.written_s)
            return part

        parts = sorted(one for one in sizes if one.startswith("part-"))
        found, set_aside = gather(parts, read, lambda shard: is_whole(shard, sizes), blank)
        missing = tuple(rank for rank in range(blank.world_size) if rank not in found)
        note = "; ".join(set_aside)
        if missing:
            return WriteResult(version, path, 0, missing_ranks=missing, note=note)
        folders = read_folders(store)
        index = CheckpointIndex(
            FORMAT,
            next_serial(folders, besides=name),
            self._means.run_id,
            max(0, blank.generation),
            blank.step,
            blank.world_size,
            sorted(found.values(), key=lambda shard: shard.rank),
            life=order.life,
            written_s=max(times_s),
        )
        store.put(f"{name}/{INDEX_NAME}", seal(index))
        self._settle(store, name, order, version, folders)
        total_bytes = sum(shard.num_bytes for shard in index.shards)
        return WriteResult(version, path, total_bytes, note=note)

    def _settle(
        self,
        store: FsspecStorage,
        name: str,
        order: WriteJob,
        version: Version,
        folders: Sequence[StoredCheckpoint],
    ) -> None:
        """Complete the steps after the index; every node that finds the checkpoint repeats them."""
        put_latest(store, name)
        self.remember(order.where, version, name)
        sweep_finished(store, folders, self._means.run_id, version, name)
        remove(store, to_prune(folders, order.retention, newest=name))
