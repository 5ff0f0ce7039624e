"""Checkpoints at a URL: one node alone, or several together, without one that leads.

Runs in:  the SMP, in its disk lane's thread.
Takes in: duplicates of the arenas' descriptors, a URL that fsspec can write to.
Gives:    a `Written`: the checkpoint, or this node's part of it; or a `CheckpointError` in words.
Survives: any node and the store, at any point: what has no index is never offered.

A node sends the files of its ranks piece by piece out of the arenas, the digests taken and compared
on the way, then its part: which files they are. Whoever finds the parts of all ranks writes the
index, which publishes it, and the name of the folder into `latest`, last of all. One node alone
does the same with one part.

Rule 1: as in `checkpoint_parts`: a part is there only when all its files are; parts are put
        together only where run, token, version and world size are equal; a finished checkpoint is
        taken for this version only if it names just the digests that this node's ranks have.
Rule 2: the index depends on the parts and on the checkpoints before, not on who makes it, so it
        does not matter how many do.
Rule 3: nothing locks a URL. An index of another life that appears while we write there is told,
        and nothing more is written: both would remove the other's.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ftrun import clock
from ftrun.errors import CheckpointError
from ftrun.ids import Rank, RunId, Version
from ftrun.smp.checkpoint import TRIES, Written
from ftrun.smp.checkpoint_files import Retention
from ftrun.smp.checkpoint_index import FORMAT, Index, Part, parse_part, seal
from ftrun.smp.checkpoint_merge import gather, is_of
from ftrun.smp.checkpoint_parts import Content, check_all_here, known_contents
from ftrun.smp.checkpoint_shard import (
    ArenaFds,
    Shard,
    copy_where_it_fits,
    find_shards,
    newest_version,
)
from ftrun.smp.pace import Throttle
from ftrun.smp.url_folders import (
    UrlFolder,
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
from ftrun.smp.url_part import Overwritten, send_part, whole_part
from ftrun.smp.url_store import UrlStore
from ftrun.urls import below, without_password
from ftrun.wire.checkpoint_messages import INDEX_NAME


@dataclass(frozen=True, slots=True)
class UrlOrder:
    """What is to be written.

    Args:
        url: the same one on all nodes.
        ranks: the node's own.
        world_size: of the run.
        retention: which checkpoints stay.
        version: just this one; None: all ranks are here, and it is the newest that all hold.
        token: with a version: equal on all nodes that write this together, and on no others.
        life: of the run, for the index.
    """

    url: str
    ranks: tuple[Rank, ...]
    world_size: int
    retention: Retention
    version: Version | None = None
    token: str = ""
    life: str = ""

    def blank(self, run_id: RunId, version: Version) -> Part:
        """A part of it without files."""
        return Part(
            FORMAT,
            run_id,
            self.token,
            version.generation,
            version.step,
            self.world_size,
            [],
            life=self.life,
        )


class UrlWriter:
    """Writes this node's parts, and finishes what is complete.

    Args:
        free_bytes: how much memory may be used for a copy of all shards, asked at each write.
        throttle: how fast; it also tells when a write is given up.
    """

    def __init__(self, run_id: RunId, *, free_bytes: Callable[[], int], throttle: Throttle) -> None:
        self._run_id = run_id
        self._free_bytes = free_bytes
        self._pace = throttle
        self._own = os.urandom(8).hex()
        self._last: Part | None = None
        self._written: tuple[str, Version, str] | None = None
        self._lives: set[str] = set()
        self._known: dict[str, set[str]] = {}
        """The checkpoints that were there when we first looked, by URL."""

    def remember(self, url: str, version: Version, path: str) -> None:
        """This version is there already: written by us, or loaded from it."""
        self._written = (url, version, path.rpartition("/")[2])

    def write(self, fds: ArenaFds, order: UrlOrder) -> Written:
        """Write this node's part, and the checkpoint where all others are there.

        Raises:
            CheckpointError: why it was not written.
        """
        started_s = clock.now_s()
        self._lives.add(order.life)
        if not order.ranks:
            raise CheckpointError("this node runs no ranks, so it has nothing to write")
        try:
            with UrlStore(order.url, self._pace.stop) as store:
                found = self._write(store, fds, order)
        except CheckpointError as error:
            raise CheckpointError(
                f"the checkpoint in {without_password(order.url)} is not written: {error}. The one "
                "before stays, and the snapshots in memory go on"
            ) from error
        return replace(found, seconds=clock.now_s() - started_s)

    def _write(self, store: UrlStore, fds: ArenaFds, order: UrlOrder) -> Written:
        if order.version is not None:
            return self._write_version(store, fds, order, order.version)
        order = replace(order, token=self._own)
        for _ in range(TRIES):
            version = newest_version(fds, order.world_size)
            if version is None:
                raise CheckpointError("no version is sealed by every rank yet; nothing to write")
            try:
                return self._write_version(store, fds, order, version)
            except Overwritten:
                continue
        raise CheckpointError(
            f"the slots were overwritten {TRIES} times while they were read: snapshots are taken "
            "faster than they are sent, and memory has no room for a copy. Take them less often "
            "(--snapshot-every)"
        )

    def _write_version(
        self, store: UrlStore, fds: ArenaFds, order: UrlOrder, version: Version
    ) -> Written:
        blank = order.blank(self._run_id, version)
        name = name_of(blank)
        folders = read_folders(store)
        self._check_only_ours(store, folders, order)
        chosen = {rank: fds.get(rank, ()) for rank in order.ranks}
        shards = find_shards(chosen, version, order.world_size)
        contents = known_contents(shards, order.ranks, blank, self._last)
        found = self._finished(store, folders, order, version, contents)
        if found is not None:
            return found
        is_alone = order.version is None
        sweep_before(store, folders, self._run_id, name, is_alone=is_alone)
        part, own_bytes = whole_part(store, name, blank, order.ranks, contents), 0
        if part is None:
            check_all_here(shards, order.ranks, version)
            part = self._send(store, name, shards, blank, is_alone=is_alone)
            own_bytes = sum(shard.num_bytes for shard in part.shards)
        self._last = part
        done = self._look(store, name, blank, order, version)
        return replace(done, total_bytes=done.total_bytes or own_bytes)

    # --- what is there already ----------------------------------------------------------------

    def _check_only_ours(
        self, store: UrlStore, folders: Sequence[UrlFolder], order: UrlOrder
    ) -> None:
        names = {one.name for one in folders}
        known = self._known.setdefault(order.url, names)
        for one in folders:
            if one.index and one.name not in known and one.index.life not in self._lives:
                raise CheckpointError(
                    f"another run, {one.index.run_id}, has written {one.name} there meanwhile. "
                    "Name another --checkpoint-dir"
                )

    def _finished(
        self,
        store: UrlStore,
        folders: Sequence[UrlFolder],
        order: UrlOrder,
        version: Version,
        contents: set[Content],
    ) -> Written | None:
        """This version, where it is a checkpoint already; an unfinished end is made up for."""
        blank = order.blank(self._run_id, version)
        for one in folders:
            if one.index is None:
                continue
            is_loaded = self._written == (order.url, version, one.name)
            has_all = contents and contents <= {shard.content for shard in one.index.shards}
            if not is_loaded and not (has_all and is_of(one.index, blank)):
                continue
            sizes = store.sizes(one.name)
            if not all(is_whole(shard, sizes) for shard in one.index.shards):
                continue
            if one is folders[0]:
                self._settle(store, one.name, order, version, folders)
            return Written(version, below(store.shown, one.name), 0)
        return None

    def _send(
        self, store: UrlStore, name: str, shards: Sequence[Shard], blank: Part, *, is_alone: bool
    ) -> Part:
        if not copy_where_it_fits(shards, self._free_bytes()):
            raise Overwritten(blank)
        try:
            return send_part(store, name, shards, blank, self._pace)
        except CheckpointError:
            if is_alone:  # what is paid for by the byte, or has a quota, is not left lying there
                remove(store, [name])
            raise

    # --- publishing ---------------------------------------------------------------------------

    def _look(
        self, store: UrlStore, name: str, blank: Part, order: UrlOrder, version: Version
    ) -> Written:
        """Finish the checkpoint if all parts are there; else say who is missing."""
        sizes = store.sizes(name)
        path = below(store.shown, name)
        times_s: list[float] = []

        def read(part_name: str) -> Part:
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
            return Written(version, path, 0, missing_ranks=missing, note=note)
        folders = read_folders(store)
        index = Index(
            FORMAT,
            next_serial(folders, besides=name),
            self._run_id,
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
        return Written(version, path, total_bytes, note=note)

    def _settle(
        self,
        store: UrlStore,
        name: str,
        order: UrlOrder,
        version: Version,
        folders: Sequence[UrlFolder],
    ) -> None:
        """What is left to do once the index is there; again by each who finds it finished."""
        put_latest(store, name)
        self.remember(order.url, version, name)
        sweep_finished(store, folders, self._run_id, version, name)
        remove(store, to_prune(folders, order.retention, newest=name))
