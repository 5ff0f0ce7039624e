"""Writes snapshots to a storage, by one node or by several without a coordinator.

Runs in:  the SMP of each node, in its disk lane's thread.
Takes in: duplicates of the arenas' descriptors; a directory that all nodes share, or a URL.
Gives:    a `WriteResult`: the checkpoint, or this node's part of it; or a `CheckpointError`.
Survives: the loss of any node and of the storage, at any point. A node writes what is missing when
          it is asked again. An incomplete checkpoint is never offered.

    FOLDER/   rank-00002.safetensors  rank-00002.digests  ...  part-00002.json  index.json

A file contains the unchanged bytes of a slot. The digests file is the table of the slot. Bytes that
several nodes hold equally are in the files of one of them (`shared_write`). A node writes the files
of its ranks durably. It then writes its part, which lists these files, and checks
whether the existing parts cover all ranks. Each node that finds them complete writes the index,
which has the digests of tables and headers and a digest of itself. It then publishes the folder and
points `latest` to it. Several nodes may do so at once. A node that has all ranks does the same with
one part. The last checkpoint of a run on one node excludes other writers until it has finished.

Training never waits for a storage, so a slot may be overwritten while it is read. A snapshot that
was requested for a checkpoint is written while it is captured (`live_capture`). The rest of a
slot is copied before it is overwritten if memory allows (`slot_reader`). Otherwise it is written
piece by piece. The digests are computed from the bytes written and compared with those of the
capture, so a checkpoint cannot mix two versions.

Rule 1: a part exists only after all its files are durable. A part is rejected if one of its files
        is missing or has another size.
Rule 2: parts are merged only if run, token, version and world size are equal, in the name of the
        folder and in each part. A version is one set of bytes, so a file that is written again is
        replaced by an equal one: a file with parts of images is named after these parts.
Rule 3: a finished checkpoint counts as this version only if its digests of this node's ranks equal
        this node's own. Another life of the run may have passed the same step. If that life has
        written the same bytes, they are written again, because its files may be damaged by now.
Rule 4: the index depends on the parts and on the earlier checkpoints, not on the node that makes
        it. Several nodes may therefore write it.
Rule 5: a URL cannot be locked. If an index of another life appears there, the writer reports it and
        stops writing, because both runs would remove each other's checkpoints.
"""

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import msgspec

from ftrun import clock
from ftrun.errors import CheckpointError, CheckpointSuperseded, SnapshotCorrupt
from ftrun.ids import Rank, Version, version
from ftrun.smp.checkpoint.index import (
    CheckpointIndex,
    CheckpointPart,
    ShardFile,
    Sizes,
    StoredCheckpoint,
    file_sizes,
    format_of,
    is_whole,
    offer_names,
    parse_part,
    part_name,
    part_names,
    seal,
    stored_bytes,
    with_places,
)
from ftrun.smp.checkpoint.shared_write import LOOK_S, divided, write_files
from ftrun.smp.checkpoint.slot_reader import ArenaFds, SealedSlot, SlotOverwritten
from ftrun.smp.checkpoint.storage.storage import (
    Storage,
    earlier_of_run,
    next_serial,
    open_storage,
    prune,
    remove_all,
    sweep_finished,
    sweep_started,
    to_prune,
)
from ftrun.smp.checkpoint.write_job import (
    ChosenVersion,
    WriteJob,
    WriterContext,
    WriteResult,
    choose_own,
    keep,
    reported,
    write_newest,
)
from ftrun.urls import is_url, without_password
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages.checkpoint import INDEX_NAME

Content = tuple[int, int, str, str]

MOST_UNSEEN = 2
"""Checkpoints in a row without a file of another node, before their offers are not awaited."""

_log = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes this node's parts, and finishes complete checkpoints."""

    def __init__(self, context: WriterContext) -> None:
        self._context = context
        self._own = os.urandom(8).hex()
        """The token of what this node writes alone."""
        self._last: CheckpointPart | None = None
        self._lives: set[str] = set()
        self._known: dict[str, set[str]] = {}
        """The checkpoints that existed at the first listing, by URL."""
        self._unseen: dict[str, int] = {}
        """Checkpoints in a row for which no other node has put a file there, by place."""

    def write(self, fds: ArenaFds, job: WriteJob) -> WriteResult:
        """Write the own part, and the checkpoint if all parts exist; raises CheckpointError."""
        self._lives.add(job.life)
        if job.version is None and not job.token:
            job = replace(job, token=self._own, is_alone=True)
        context = self._context
        with _explained(job), open_storage(job.where, context.throttle.stop) as storage:
            if job.version is not None:
                chosen = choose_own(fds, job, job.version, context.throttle)
                if job.share_wait_s and self._unseen.get(job.where, 0) >= MOST_UNSEEN:
                    job = replace(job, share_wait_s=LOOK_S)
                return self._write(_Attempt(context, storage, job, chosen))
            with storage.exclusive() if job.is_alone else nullcontext():
                return write_newest(
                    fds,
                    job,
                    context,
                    lambda chosen: self._write(_Attempt(context, storage, job, chosen)),
                )

    def _write(self, attempt: "_Attempt") -> WriteResult:
        with self._context.claims.claimed(attempt.chosen.version):
            return self._written(attempt)

    def _written(self, attempt: "_Attempt") -> WriteResult:
        storage, job, chosen = attempt.storage, attempt.job, attempt.chosen
        contents = _known_contents(chosen.shards, job.ranks, attempt.blank, self._last)
        with storage.lock():
            found = storage.checkpoints()
            if not storage.is_local:
                self._check_only_ours(found, job)
            found = attempt.sweep(found)
            done = attempt.finished(found, contents)
            if done is not None:
                self._unseen.pop(job.where, None)
                return done
            part = attempt.whole_part(contents)
            if part is None:
                _check_all_here(chosen.shards, job.ranks, chosen.version)
                crash_point("smp.checkpoint.started")
                attempt.begin()
        is_new = part is None
        if part is None:
            with attempt.discarded_if_sole():
                part = attempt.fill()
        self._last = part
        with storage.lock():
            found = storage.checkpoints()
            # Once the part exists, another node may have finished the checkpoint.
            done = attempt.finished(found, {shard.content for shard in part.shards})
            is_seen = done is not None or attempt.has_others()
            if done is None:
                done = attempt.merge(found)
        if job.share_wait_s and (is_new or is_seen):
            self._unseen[job.where] = 0 if is_seen else self._unseen.get(job.where, 0) + 1
        own_bytes = sum(file_sizes(part.shards).values()) if is_new else 0
        return replace(done, total_bytes=done.total_bytes or own_bytes)

    def _check_only_ours(self, found: Sequence[StoredCheckpoint], job: WriteJob) -> None:
        known = self._known.setdefault(job.where, {one.name for one in found})
        for one in found:
            if one.index and one.name not in known and one.index.life not in self._lives:
                raise CheckpointError(
                    f"another run, {one.index.run_id}, has written {one.name} there. Use "
                    "another --checkpoint-dir"
                )


class _Attempt:
    """One attempt to write one version."""

    def __init__(
        self, context: WriterContext, storage: Storage, job: WriteJob, chosen: ChosenVersion
    ) -> None:
        self.storage = storage
        self.job = replace(job, share_wait_s=0.0, num_writers=0) if chosen.is_live else job
        self.chosen = chosen
        self.blank = job.part(context.run_id, chosen.version)
        """The part without files."""
        self._context = context
        self._is_alone = job.is_alone
        self.folder = storage.pending_name(self.blank, is_alone=self._is_alone)

    def finished(
        self, found: Sequence[StoredCheckpoint], contents: set[Content]
    ) -> WriteResult | None:
        """Return this version if it is a checkpoint already, and complete an interrupted finish."""
        for one in whole_checkpoints(self.storage, found, self.blank, contents):
            if one is found[0] or self._is_alone:
                self._resolve(one.name, found)
            return WriteResult(self.chosen.version, self.storage.path_of(one.name), 0)
        return None

    def sweep(self, found: Sequence[StoredCheckpoint]) -> list[StoredCheckpoint]:
        return sweep_started(
            self.storage,
            found,
            self.blank.run_id,
            self.chosen.version,
            self.folder,
            is_alone=self._is_alone,
        )

    def has_others(self) -> bool:
        """True if another node has put an offer or a part into the folder."""
        names = self.storage.names(self.folder)
        return len(part_names(names)) > 1 or len(offer_names(names)) > 1

    def begin(self) -> None:
        self.storage.make(self.folder)
        self._sync_started()

    def whole_part(self, contents: set[Content]) -> CheckpointPart | None:
        """Return this node's part if an earlier attempt has written it."""
        try:
            part = _read_part(self.storage, f"{self.folder}/{part_name(self.job.ranks)}")
        except (CheckpointError, OSError):
            return None
        sizes = self.storage.sizes(self.folder)
        is_it = (
            part.key == self.blank.key
            and {shard.rank for shard in part.shards} == set(self.job.ranks)
            and (not contents or {shard.content for shard in part.shards} == contents)
            and all(is_whole(shard, sizes) for shard in part.shards)
        )
        return part if is_it else None

    def fill(self) -> CheckpointPart:
        """Write all files durably, then the part; raises SlotOverwritten or CheckpointError."""
        storage, chosen, folder = self.storage, self.chosen, self.folder
        keep(chosen, self._context, gap_s=self.job.gap_s(self._context))
        try:
            shared = divided(storage, folder, chosen.shards, self.job, self.blank, self._context)
            crash_point("smp.checkpoint.part_started")
            files = write_files(
                *(storage, folder, chosen.shards, shared, chosen.pace),
                num_writers=self.job.num_writers,
            )
        except SnapshotCorrupt as error:
            if chosen.is_sound:
                raise CheckpointError(f"a slot is damaged: {error}") from error
            raise SlotOverwritten(chosen.version) from error
        if not chosen.is_sound:
            raise SlotOverwritten(chosen.version)
        chosen.await_commit()
        if self.job.share_wait_s:
            self._context.equal_bytes.note(chosen.version.generation, were_found=bool(shared))
        self._sync_started(folder)  # Rule 1
        written_s = 0.0 if storage.is_local else clock.wall_s()
        part = msgspec.structs.replace(
            self.blank, format=format_of(files), shards=files, written_s=written_s
        )
        storage.put(f"{folder}/{part_name(self.job.ranks)}", seal(part))
        self._sync_started(folder)
        crash_point("smp.checkpoint.part_written")
        return part

    def merge(self, found: Sequence[StoredCheckpoint]) -> WriteResult:
        """Finish it if all parts exist, or return the missing ranks; raises CheckpointError."""
        storage, blank, wanted = self.storage, self.blank, self.chosen.version
        sizes, path = storage.sizes(self.folder), storage.path_of(self.folder)
        if part_name(self.job.ranks) not in sizes:
            raise CheckpointSuperseded(
                f"{path} was removed for a later version. Request a later one"
            )
        shards, written_s, notes = gather(storage, self.folder, sizes, blank)
        missing = tuple(rank for rank in range(blank.world_size) if rank not in shards)
        if missing:
            before = earlier_of_run(found, blank.run_id, wanted)
            notes += _never_written(storage, before, missing)
            return WriteResult(wanted, path, 0, missing_ranks=missing, note="; ".join(notes))
        files = with_places(shards)
        whole = msgspec.structs.replace(blank, shards=files, written_s=written_s)
        name, index = publish_whole(storage, self.folder, whole, found, self.discarded_if_sole())
        self._resolve(name, [StoredCheckpoint(name, wanted, index=index), *found])
        limit, total_bytes = self.job.retention.keep_bytes, stored_bytes(index)
        if 0 < limit < 2 * total_bytes and self.job.retention.keep > 1:
            _log.warning(
                "checkpoint.keep_bytes (%d bytes) keeps only the newest checkpoint, of %d bytes. "
                "If that is damaged, there is no other one: allow twice as much",
                limit,
                total_bytes,
            )
        total_bytes = sum(file_sizes(files).values())
        return WriteResult(wanted, storage.path_of(name), total_bytes, note="; ".join(notes))

    @contextmanager
    def discarded_if_sole(self) -> Iterator[None]:
        """Remove the unfinished checkpoint if it fails here and no other node writes to it."""
        try:
            yield
        except BaseException:
            if self.job.has_all_ranks:
                self.storage.discard(self.folder)
            raise

    def _sync_started(self, folder: str = "") -> None:
        """Make names in an unfinished checkpoint durable, unless no later writer will use it."""
        if not self.job.has_all_ranks:
            self.storage.sync(folder)

    def _resolve(self, name: str, found: Sequence[StoredCheckpoint]) -> None:
        """Complete the steps after publishing; each node that finds the checkpoint repeats them."""
        storage, run_id = self.storage, self.blank.run_id
        storage.clean_up(name)
        storage.point_latest(name)
        crash_point("smp.checkpoint.latest")
        sweep_finished(storage, found, run_id, self.chosen.version, name)
        obsolete = to_prune(found, self.job.retention, newest=name)
        prune(storage, obsolete, lambda one: remove_all(storage, [one]))


@contextmanager
def _explained(job: WriteJob) -> Iterator[None]:
    try:
        with reported(job):
            yield
    except CheckpointError as error:
        if not is_url(job.where) or isinstance(error, CheckpointSuperseded):
            raise
        raise CheckpointError(
            f"cannot write the checkpoint in {without_password(job.where)}: {error}. The "
            "previous one is kept, and snapshots in memory continue"
        ) from error


def _known_contents(
    shards: Sequence[SealedSlot],
    ranks: Sequence[Rank],
    blank: CheckpointPart,
    last: CheckpointPart | None,
) -> set[Content]:
    """Return what this node's ranks hold of this version; empty if it is not known any more."""
    if len(shards) == len(ranks):
        return {shard.content for shard in shards}
    if last is not None and last.key == blank.key:
        known = {shard.content for shard in last.shards}
        if {rank for rank, *_ in known} == set(ranks):
            return known
    return set()


def _check_all_here(shards: Sequence[SealedSlot], ranks: Sequence[Rank], wanted: Version) -> None:
    missing = sorted(set(ranks) - {shard.shape.rank for shard in shards})
    if missing:
        raise CheckpointError(
            f"rank {missing[0]} has no slot with {wanted}: it "
            "was overwritten by a later one. Request a later version"
        )


def _is_of(index: CheckpointIndex, like: CheckpointPart) -> bool:
    """True if it is the same version; a loaded one (-1) has lost its run and generation."""
    if (index.step, index.world_size) != (like.step, like.world_size):
        return False
    found = index.run_id, index.life, index.generation
    return like.generation < 0 or found == (like.run_id, like.life, like.generation)


def whole_checkpoints(
    storage: Storage,
    found: Sequence[StoredCheckpoint],
    like: CheckpointPart,
    contents: Collection[Content],
) -> Iterator[StoredCheckpoint]:
    """Yield the checkpoints of a version that have these contents, with all their files."""
    for one in found:
        if one.index is None or not _is_of(one.index, like):
            continue
        if not contents or not {*contents} <= {shard.content for shard in one.index.shards}:
            continue
        sizes = storage.sizes(one.name)
        if all(is_whole(shard, sizes) for shard in one.index.shards):
            yield one


# --- parts ------------------------------------------------------------------------------------


def publish_whole(
    storage: Storage,
    folder: str,
    whole: CheckpointPart,
    found: Sequence[StoredCheckpoint],
    unfinished: AbstractContextManager[None],
) -> tuple[str, CheckpointIndex]:
    """Write the index, and publish the folder; return its name and the index.

    The parts stay, so that another node finds them; they are removed afterwards.

    Args:
        whole: a part that has the files of all ranks, in their order.
        unfinished: entered until the index is durable.
    """
    crash_point("smp.checkpoint.merged")
    index = CheckpointIndex(
        format_of(whole.shards),
        next_serial(found, besides=folder),
        whole.run_id,
        max(0, whole.generation),
        whole.step,
        whole.world_size,
        whole.shards,
        life=whole.life,
        written_s=whole.written_s,
    )
    with unfinished:
        storage.put(f"{folder}/{INDEX_NAME}", seal(index))
        crash_point("smp.checkpoint.index_written")
        storage.sync(folder)
    crash_point("smp.checkpoint.synced")
    name = storage.publish(folder, version(whole.generation, whole.step))
    crash_point("smp.checkpoint.renamed")
    storage.sync()
    crash_point("smp.checkpoint.parts_renamed")
    return name, index


def gather(
    storage: Storage, folder: str, sizes: Sizes, like: CheckpointPart
) -> tuple[dict[int, ShardFile], float, list[str]]:
    """Return the files of each rank, the time of the newest part, and texts about rejected parts.

    The parts must have the key of `like`. Raises CheckpointError if two disagree about a rank.
    """
    found: dict[int, ShardFile] = {}
    written_s, rejected = 0.0, list[str]()
    for name in part_names(sizes):
        path = storage.path_of(f"{folder}/{name}")
        try:
            part = _read_part(storage, f"{folder}/{name}")
            _check_part(path, part, sizes, like)
        except (CheckpointError, OSError) as error:
            rejected.append(str(error))
            continue
        written_s = max(written_s, part.written_s)
        for shard in part.shards:
            if found.setdefault(shard.rank, shard).content != shard.content:
                raise CheckpointError(
                    f"{path} and another part have different bytes of rank {shard.rank}: they "
                    "are of different lives of the run. Request a later version"
                )
    return found, written_s, rejected


def _read_part(storage: Storage, name: str) -> CheckpointPart:
    """Raises CheckpointError if the part is missing, or differs from what was written."""
    data, path = storage.read(name), storage.path_of(name)
    if data is None:
        raise CheckpointError(f"{path}: the part does not exist")
    return parse_part(data, what=path)


def _check_part(path: str, part: CheckpointPart, sizes: Sizes, like: CheckpointPart) -> None:
    if part.key != like.key:
        raise CheckpointError(f"{path} is of {part.key}, not of {like.key}; it is ignored")
    for shard in part.shards:
        if not 0 <= shard.rank < like.world_size or not is_whole(shard, sizes):
            raise CheckpointError(
                f"{path} is ignored: the files of rank {shard.rank} do not match it"
            )


def _never_written(
    storage: Storage, before: Sequence[StoredCheckpoint], missing: Sequence[int]
) -> list[str]:
    """Return a text about ranks that are missing also in the previous incomplete version."""
    came: set[int] = set()
    is_known = False
    for folder in (one.name for one in before[:1]):
        for name in part_names(storage.sizes(folder)):
            try:
                part = _read_part(storage, f"{folder}/{name}")
            except (CheckpointError, OSError):
                continue
            is_known = True
            came.update(shard.rank for shard in part.shards)
    never = sorted(set(missing) - came)
    if not is_known or not never:
        return []
    ranks = ", ".join(map(str, never))
    return [f"ranks {ranks} have written no part: is {storage.shown} shared by all nodes?"]
