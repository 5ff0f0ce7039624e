"""Saves and loads in memory for scripts that use torch.distributed.checkpoint.

    dcp.save(state, storage_writer=ftrun.dcp.Writer())
    dcp.load(state, storage_reader=ftrun.dcp.Reader())

Runs in:  worker, in the thread that calls dcp.save or dcp.load, or in that of dcp.async_save.
Takes in: the plans of DCP's planners.
Gives:    snapshots like those of `ftrun.attach`: in memory that outlives the ranks, protected
          across nodes, written to --checkpoint-dir when due. A load fills any layout from the
          newest one.
Survives: what those snapshots survive.

A session walks modules and optimizers to find what it captures; here DCP's planner lists the items.
A writer replaces only that walk and the training loop. Its items become the same named sources in
the same arenas (`worker/capture/explicit_save.py` over `slots.py` and `copying.py`), sealed and
committed by the same protocol. The SMP, the agent and the checkpoints on disk see no difference.

A reader opens the same shards as a restore into another number of ranks
(`worker/reshard/source.py`, `tensor_reader.py`). It does so for every load: DCP assigns a
replicated item to one rank, so every rank reads shards of other ranks, whatever the world size. No
layout needs a path of its own.

Rule 1: all ranks call together, because a version is of the whole run; no rank saves a part under
        another name. Rank 0, DCP's coordinator, holds the `Metadata`. It seals last, after DCP
        reports that all ranks have written, so no committed version lacks its metadata.
Rule 2: `save` returns when the snapshot is committed. If it will not be committed, `save` raises
        CheckpointException on all ranks, as DCP does.
Rule 3: memory holds the newest snapshot. A checkpoint_id is its label: the number at its end is the
        step. A load with another checkpoint_id is refused.

Source: torch.distributed.checkpoint, `StorageWriter` and `StorageReader` (read in 2.13).
"""

import contextlib
import dataclasses
import multiprocessing
import os
import re
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any, ClassVar

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ftrun import clock
from ftrun.errors import SnapshotError, UsageError, ValueNotStorable
from ftrun.ids import Version
from ftrun.wire.shared_memory.pages import HeartbeatField
from ftrun.worker import session
from ftrun.worker.capture.explicit_save import ExplicitSaver, saver_of
from ftrun.worker.context import WorkerContext, worker_context
from ftrun.worker.reshard.dcp_items import (
    COORDINATOR,
    ItemsToSave,
    SavedItems,
    packed_metadata,
    room_for,
)
from ftrun.worker.restore.loader import reporting_corruption

WAIT_S = 60.0
"""Default limit of a save for the wait for memory and for its commit."""

AnyPath = str | os.PathLike[str]

_NUMBER = re.compile(r"\d{1,15}")


def exists(fallback: AnyPath | None = None) -> bool:
    """Whether there is a snapshot to load; equal on every rank.

    Outside ftrun the answer is whether the folder `fallback` has a checkpoint of torch.
    """
    if _context() is None:
        return fallback is not None and (Path(fallback) / ".metadata").exists()
    return newest_step() is not None


def newest_step() -> int | None:
    """The step of the snapshot that a load would return, or None if there is none.

    The step is the number at the end of its checkpoint_id, or else a count of saves.
    """
    context = _context()
    if context is None:
        return None
    found = _saver(context).newest(give_up_s=clock.now_s() + WAIT_S)
    return None if found is None else found.step


class _InMemory:
    """Common part of Writer and Reader: the rank, its snapshots, and the label of one.

    Outside ftrun the constructor returns torch's own class instead.
    """

    _torchs: ClassVar[type[FileSystemReader | FileSystemWriter]]

    def __new__(cls, *, fallback: AnyPath | None = None, wait_s: float = WAIT_S) -> Any:
        if _context() is None:
            return cls._torchs(_outside(fallback, cls.__name__))
        return super().__new__(cls)

    def __init__(self, *, fallback: AnyPath | None = None, wait_s: float = WAIT_S) -> None:
        super().__init__()
        context = _context()
        assert context is not None
        self._context = context
        self._saver = _saver(context)
        self._wait_s = wait_s
        self._label: str | None = None

    def reset(self, checkpoint_id: AnyPath | None = None) -> None:
        self._label = None if checkpoint_id is None else str(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Accepts any text, because a checkpoint_id is only a label."""
        return True


class Writer(_InMemory, StorageWriter):
    """A storage_writer that keeps saved state in memory.

    Args:
        fallback: folder of torch's own FileSystemWriter outside ftrun; without it, the constructor
            raises UsageError there.
        wait_s: longest time from the start of a save to its commit.

    Raises:
        UsageError: ftrun did not start this process; or it has called `ftrun.attach`.
    """

    _torchs = FileSystemWriter

    def __init__(self, *, fallback: AnyPath | None = None, wait_s: float = WAIT_S) -> None:
        super().__init__(fallback=fallback, wait_s=wait_s)
        self._give_up_s = 0.0
        self._meta = StorageMeta()
        self._items: ItemsToSave | None = None
        self._step = -1

    # --- all ranks, before the plan ----------------------------------------------------------

    def storage_meta(self) -> StorageMeta:
        # DCP calls this first in each save on every rank, before anything else can fail. So all
        # ranks have counted the same number of saves, whatever their outcome.
        self._step = self._saver.begin(self._number())
        self._meta = StorageMeta(checkpoint_id=self._label, save_id=uuid.uuid4().hex)
        return self._meta

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:
        rank = self._context.rank
        if is_coordinator != (rank == COORDINATOR):
            raise UsageError(
                f"rank {rank} {'is' if is_coordinator else 'is not'} the coordinator of this save, "
                "which is rank 0 of all ranks: a snapshot is of the whole run. Leave out no_dist, "
                "and give a process_group of all ranks or none"
            )
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "use_collectives=False saves each rank by itself, and a snapshot is of all ranks: "
                "leave it out"
            )
        self._give_up_s = clock.now_s() + self._wait_s
        self._items = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return dataclasses.replace(plan, storage_data=self._step)

    # --- rank 0 ------------------------------------------------------------------------------

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if len(plans) != self._context.world_size:
            raise UsageError(
                f"{len(plans)} of {self._context.world_size} ranks save: a snapshot is of the "
                "whole run. Leave out no_dist, and give a process_group of all ranks or none"
            )
        names = Counter(item.index.fqn for plan in plans for item in plan.items)
        self._saver.room_bytes = max(self._saver.room_bytes, room_for(names))
        reported = [plan.storage_data for plan in plans if isinstance(plan.storage_data, int)]
        step = max(reported, default=self._step)
        return [dataclasses.replace(plan, storage_data=step) for plan in plans]

    # --- all ranks ---------------------------------------------------------------------------

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        saver, rank = self._saver, self._context.rank
        # A planner that caches plans may return an old plan, with the step of an older save.
        if isinstance(plan.storage_data, int):
            self._step = saver.begin(max(self._step, plan.storage_data), is_new=False)
        with _naming_no_skip():
            items = self._items = ItemsToSave(plan, planner, rank)
        # Reserves space: `finish` replaces these bytes by the packed metadata, which must fit.
        packed = items.packed(bytes(saver.room_bytes) if rank == COORDINATOR else b"")
        saver.copy(self._step, items.sources, packed, give_up_s=self._give_up_s)
        if rank != COORDINATOR:
            saver.seal()
        done: Future[list[WriteResult]] = Future()
        done.set_result(items.results)
        return done

    # --- rank 0 ------------------------------------------------------------------------------

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._items is not None
        places = {one.index: one.storage_data for some in results for one in some}
        # As in torch's own writers: the planner leaves these two fields to the storage.
        metadata.storage_data, metadata.storage_meta = places, self._meta
        with _naming_no_skip():
            described = packed_metadata(metadata, places)
        self._saver.room_bytes = max(self._saver.room_bytes, len(described))
        packed, self._items = self._items.packed(described), None
        sealed = self._saver.seal(packed)
        self._saver.await_commit(sealed, give_up_s=self._give_up_s)

    def __reduce__(self) -> Any:
        raise UsageError(
            "a Writer of ftrun cannot be sent to another process: only the rank itself has its "
            "memory. Use async_checkpointer_type=AsyncCheckpointerType.THREAD with async_save"
        )

    def _number(self) -> int:
        """The number at the end of the label; -1 if it has none."""
        numbers = _NUMBER.findall(_name(self._label)) if self._label is not None else []
        return int(numbers[-1]) if numbers else -1


class Reader(_InMemory, StorageReader):
    """A storage_reader that loads the newest snapshot of this run.

    Args:
        fallback: folder of torch's own FileSystemReader outside ftrun; without it, the constructor
            raises UsageError there.
        wait_s: longest time that a load waits for the outcome of an earlier save.

    Raises:
        UsageError: ftrun did not start this process; or it has called `ftrun.attach`.
    """

    _torchs = FileSystemReader

    def __init__(self, *, fallback: AnyPath | None = None, wait_s: float = WAIT_S) -> None:
        super().__init__(fallback=fallback, wait_s=wait_s)
        self._saved: SavedItems | None = None

    def read_metadata(self) -> Metadata:
        self._close()
        wanted = self._saver.newest(give_up_s=clock.now_s() + self._wait_s)
        if wanted is None:
            raise SnapshotError(
                "nothing has been saved in this run, and it was resumed from no checkpoint: ask "
                "ftrun.dcp.exists() before dcp.load()"
            )
        self._context.page.set(HeartbeatField.RESTORE_BEGIN_NS, clock.now_ns())
        with self._reporting(wanted):
            saved = self._saved = SavedItems(self._saver, wanted)
        self._check_label(saved)
        return saved.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Does nothing, because `read_metadata` has opened the shards."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self._saved is not None
        found = self._saved.version
        return dataclasses.replace(plan, storage_data=(found.generation, found.step))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        versions = {plan.storage_data for plan in plans}
        if len(versions) > 1:
            found = ", ".join(f"step {step} (generation {of})" for of, step in sorted(versions))
            raise SnapshotError(
                f"the ranks would load different snapshots ({found}): a save before this load has "
                "not come to its end on all of them"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._saved is not None
        saved, page = self._saved, self._context.page
        try:
            with self._reporting(saved.version):
                saved.load(plan, planner)
        finally:
            self._close()
        page.set(HeartbeatField.RESTORED_GENERATION, saved.version.generation)
        page.set(HeartbeatField.RESTORED_STEP, saved.version.step)
        page.set(HeartbeatField.RESTORE_END_NS, clock.now_ns())
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _check_label(self, saved: SavedItems) -> None:
        meta = saved.metadata.storage_meta
        label = meta.checkpoint_id if meta is not None else None
        if self._label is not None and _name(self._label) != _name(str(label or "")):
            raise SnapshotError(
                f"the newest snapshot is {saved.version}, saved as {label}, and {self._label} is "
                "asked for: memory holds the newest only. Leave checkpoint_id out to load it"
            )

    def _reporting(self, wanted: Version) -> Any:
        """Reports a corrupt shard to the agent, if it is of the version that the run restored."""
        if wanted == self._context.restore:
            return reporting_corruption(self._context)
        return contextlib.nullcontext()

    def _close(self) -> None:
        if self._saved is not None:
            self._saved.close()
        self._saved = None


def _context() -> WorkerContext | None:
    """Context of this rank, or None if ftrun did not start it or keeps no snapshots."""
    context = worker_context()
    return context if context is not None and context.settings.enabled else None


def _saver(context: WorkerContext) -> ExplicitSaver:
    if multiprocessing.parent_process() is not None:
        raise UsageError(
            "only the rank itself can save and load snapshots, and this is a process that it has "
            "started: with async_save use AsyncCheckpointerType.THREAD"
        )
    if session.is_attached():
        raise UsageError(
            "this script has called ftrun.attach: its session takes the snapshots. Use one or the "
            "other, or close() the session first"
        )
    return saver_of(context)


def _outside(fallback: AnyPath | None, what: str) -> AnyPath:
    if fallback is None:
        raise UsageError(
            f"ftrun.dcp.{what} needs a process that ftrun started with snapshots enabled. Start "
            "the script with `ftrun`, or pass fallback=FOLDER for torch's own files"
        )
    return fallback


def _name(label: str) -> str:
    """The last component of a label that looks like a path."""
    return PurePath(label).name


@contextlib.contextmanager
def _naming_no_skip() -> Iterator[None]:
    """Removes the advice `attach(skip=...)` from errors, because there is no `attach` here."""
    try:
        yield
    except ValueNotStorable as error:
        error.can_skip = False
        raise
