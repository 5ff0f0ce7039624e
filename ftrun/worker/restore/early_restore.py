"""Does the part of a restore that does not need the script, and prefaults memory for its result.

Runs in:  worker: a separate thread, from the process's start until `attach` takes over; the
          training thread in `attach`.
Takes in: the context; this rank's arena, which outlived the last worker; the shards of the version
          to restore, which give the size of the optimizer state.
Gives:    the arena with its pages mapped, the pieces that match their digests, and optimizer state
          copied into prefaulted memory; tensors whose pages exist already.
Survives: every error: `attach` repeats the failed work and reports the error. After a wrong
          estimate, missing memory is allocated as usual, and the rest is returned to the system
          when `attach` ends.

A script builds its model and joins the process group before it attaches. If this work is done in
that time, `attach` only has to make a warm copy of the parameters. Optimizer state does not exist
before it is restored. The first access to a page costs ten times a warm copy: it was nine tenths of
a restore (scripts/bench_reshard.py).

Rule 1: no process writes to this arena before `attach` ends: the SMP only reads it, and other ranks
        have their own arenas. A piece that matched its digest therefore stays unchanged.
Rule 2: memory is prefaulted only for state that was in main memory: on a device, only digests are
        compared.
Rule 3: prefaulting continues only while the remaining bytes are at most half of the memory that the
        limits leave to this process. This is checked repeatedly, because a script may need more
        memory before `attach` than after it.
Rule 4: each tensor owns its pages, and they return to the system with it.
"""

import ctypes
import logging
import math
import mmap
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ftrun.errors import FtrunError
from ftrun.ids import Rank, Version
from ftrun.linux import available_memory
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.layout import ITEM_BYTES, PAGE_BYTES, PLAIN_NAME, Layout, LayoutEntry
from ftrun.snapshot.plain_values import TensorRef
from ftrun.snapshot.replica_shares import members_of
from ftrun.wire.shared_memory.arena import Arena, open_slot
from ftrun.wire.shared_memory.mapped_memory import (
    MADV_POPULATE_WRITE,
    advise,
    map_aligned,
    unmap,
)
from ftrun.worker.capture.copying import digest_of
from ftrun.worker.context import WorkerContext
from ftrun.worker.reshard.source import LocalShards
from ftrun.worker.smp_client import WorkerSmpClient
from ftrun.worker.state.tensors import DTYPES, byte_view, stride_for, uninitialized

LEAST_BYTES = 1 << 20
"""Smallest tensor that gets pages of its own."""
_STRIDE_BYTES = 8 << 20
"""Bytes prefaulted by one system call, which cannot be interrupted."""
_RECHECK_BYTES = 64 << 20
_LARGEST_PART = 0.5

_log = logging.getLogger(__name__)


class EarlyRestore:
    """This rank's own shard of the version to restore."""

    def __init__(self, arena: Arena, slot: int, wanted: Version) -> None:
        self.arena = arena
        self.wanted = wanted
        self.right: set[int] = set()
        """Indices of pieces that match their digests."""
        self.copied: dict[str, torch.Tensor] = {}
        """Optimizer state that was copied completely and matched its digests, by name."""
        self.slot = slot
        self._is_taken = threading.Event()

    def read(self, *, with_state: bool) -> None:
        """Compare each piece with its digest, until all are done or `attach` takes over.

        `with_state`: also copy optimizer state, as far as prefaulted memory is available.
        """
        layout, data, table = open_slot(self.arena, self.slot, what=str(self.wanted))
        content = np.frombuffer(data, dtype=np.uint8)
        shard = _Pieces(layout, content, table.tolist(), self.right)
        if with_state:
            self._copy_state(shard)
        for index in range(len(layout.pieces)):
            if self._is_taken.is_set():
                return
            shard.is_right(index)

    def _copy_state(self, shard: "_Pieces") -> None:
        entries = {entry.name: entry for entry in shard.layout.entries}
        values = entries[PLAIN_NAME]
        if not all(shard.is_right(index) for index in shard.layout.pieces_of(values)):
            return
        if members_of(shard.layout.metadata):
            return  # most of the state is in the shards of other ranks
        at = values.offset
        length = int.from_bytes(shard.data[at : at + 8].tobytes(), "little")
        parts = plain.decode(shard.data[at + 8 : at + 8 + length].tobytes())
        for name in state_names(parts):
            entry = entries[name]
            if self._is_taken.is_set() or name in self.copied:
                continue
            tensor = ready_tensor(entry.shape, DTYPES[entry.dtype])
            if tensor is not None and self._copy(shard, entry, tensor):
                self.copied[name] = tensor

    def _copy(self, shard: "_Pieces", entry: LayoutEntry, tensor: torch.Tensor) -> bool:
        """Copy each piece directly after its comparison, while it is in the CPU cache."""
        # Uses numpy, because torch would start additional threads for this thread.
        into = byte_view(tensor).numpy()
        for index in shard.layout.pieces_of(entry):
            if self._is_taken.is_set() or not shard.is_right(index):
                return False
            piece = shard.layout.pieces[index]
            begin = max(piece.offset, entry.offset)
            end = min(piece.offset + piece.num_bytes, entry.offset + entry.num_bytes)
            np.copyto(into[begin - entry.offset : end - entry.offset], shard.data[begin:end])
        return True

    def take_over(self) -> None:
        self._is_taken.set()


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The data of a slot, with one digest for each piece."""

    layout: Layout
    data: "np.ndarray[Any, np.dtype[np.uint8]]"
    table: list[int]
    right: set[int]

    def is_right(self, index: int) -> bool:
        if index in self.right:
            return True
        piece = self.layout.pieces[index]
        view = self.data[piece.offset : piece.offset + piece.num_bytes]
        if digest_of(view) != self.table[index]:
            return False
        self.right.add(index)
        return True


_started: EarlyRestore | None = None


def begin(context: WorkerContext) -> None:
    global _started
    _started = None
    if context.restore is None:
        return
    expect()
    try:
        _started = _opened(context)
    except (FtrunError, OSError, ValueError) as error:
        _log.info("the restore is not prepared: %s", error)
    work = threading.Thread(target=_work, args=[context, _started], name="ftrun-early", daemon=True)
    work.start()


def take(wanted: Version) -> EarlyRestore | None:
    """Stop and return the early restore of this version; only the first call returns it."""
    global _started
    found, _started = _started, None
    if found is None:
        return None
    found.take_over()
    return found if found.wanted == wanted else None


def _opened(context: WorkerContext) -> EarlyRestore | None:
    if context.restore is None or context.arena_fd is None or context.is_resized:
        return None
    arena = Arena(context.arena_fd, writable=True)
    slot = arena.find(context.restore)
    if slot is None:
        arena.close()
        return None
    return EarlyRestore(arena, slot, context.restore)


def _work(context: WorkerContext, ahead: EarlyRestore | None) -> None:
    try:
        if ahead is not None:
            ahead.arena.map_slot(ahead.slot)
        is_ready = make_ready(context)
        if ahead is not None:
            ahead.read(with_state=is_ready)
    except (FtrunError, OSError) as error:
        _log.info("the restore is not prepared: %s", error)
    except Exception:  # noqa: BLE001
        # ftrun's thread in the user's process: a bug here costs time only, and is logged once.
        _log.warning("a bug in ftrun: the restore is not prepared", exc_info=True)


# --- prefaulted memory ---


class PrefaultedMemory:
    """A range of anonymous memory, prefaulted and handed out from its beginning.

    The kernel clears and maps huge pages six times as fast as small ones, where it has them.
    """

    def __init__(self, num_bytes: int) -> None:
        self._end = _pages(num_bytes)
        self._at = 0
        self._lock = threading.Lock()
        self._touching = threading.Lock()
        """Held while the kernel populates pages, which must not be unmapped at that time."""
        self._is_over = threading.Event()
        self._address = map_aligned(self._end, mmap.PROT_READ | mmap.PROT_WRITE)
        advise(self._address, self._end, mmap.MADV_HUGEPAGE)

    def touch(self) -> bool:
        """Populate all pages; return whether all exist.

        It stops early if `close` was called or memory is short. It runs without the interpreter
        lock, and `take` need not wait for it.
        """
        for at in range(0, self._end, _STRIDE_BYTES):
            if at % _RECHECK_BYTES == 0:
                left = self._end - max(at, self._at)
                if left > _LARGEST_PART * available_memory().num_bytes:
                    return False
            with self._touching:
                if self._is_over.is_set():
                    return False
                # Memory that was handed out belongs to its tensor.
                begin, end = max(at, self._at), min(at + _STRIDE_BYTES, self._end)
                num_bytes = max(0, end - begin)
                address = self._address + begin
                if num_bytes and not advise(address, num_bytes, MADV_POPULATE_WRITE):
                    return False  # an older kernel, or no memory: pages fault when they are used
        return True

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """[num_bytes] uint8 with pages of its own; None if the rest of the range is too small."""
        size = _pages(num_bytes)
        with self._lock:
            if self._is_over.is_set() or self._at + size > self._end:
                return None
            address = self._address + self._at
            self._at += size
        memory = (ctypes.c_ubyte * num_bytes).from_address(address)
        # At exit the kernel frees everything; tensors may be used until then.
        weakref.finalize(memory, unmap, address, size).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        """Unmap the memory that was not handed out; the thread ends soon after."""
        self._is_over.set()
        with self._touching, self._lock:
            if self._at < self._end:
                unmap(self._address + self._at, self._end - self._at)
            self._at = self._end


_ready: PrefaultedMemory | None = None
_is_wanted = False
_guard = threading.Lock()


def expect() -> None:
    """Announce a restore; `make_ready` does nothing without it."""
    global _is_wanted
    _is_wanted = True


def make_ready(context: WorkerContext) -> bool:
    """Prefault memory for the optimizer state of the version; return whether all pages exist now.

    Raises FtrunError or OSError if the size cannot be determined, or there is no memory.
    """
    global _ready
    num_bytes = _needed_bytes(context)
    if num_bytes < LEAST_BYTES:
        return False
    with _guard:
        if not _is_wanted:
            return False  # `attach` has ended already
        _ready = ready = PrefaultedMemory(num_bytes)
    return ready.touch()


def ready_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """An uninitialized tensor in prefaulted memory; None if it is small or too little is left."""
    num_bytes = math.prod(shape) * dtype.itemsize
    ready = _ready
    taken = ready.take(num_bytes) if ready is not None and num_bytes >= LEAST_BYTES else None
    return None if taken is None else taken.view(dtype).view(shape)


def empty(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
    stride: tuple[int, ...] = (),
) -> torch.Tensor:
    """Like torch.empty, in prefaulted memory if there is enough.

    `stride`: of a tensor with this number of dimensions; the result gets its dimension order.
    """
    found = ready_tensor(shape, dtype) if torch.device(device).type == "cpu" else None
    stride = stride_for(shape, stride)
    if found is None:
        return uninitialized(shape, dtype, device, stride)
    if stride == found.stride():
        return found
    # Not `as_strided`, because its result is a view that shares the version counter.
    storage, offset = found.untyped_storage(), found.storage_offset()
    return uninitialized((0,), dtype, device).set_(storage, offset, shape, stride)


def release() -> None:
    """Return the prefaulted memory that was not handed out; `make_ready` does nothing now."""
    global _ready, _is_wanted
    with _guard:
        _is_wanted, ready, _ready = False, _ready, None
    if ready is not None:
        ready.close()


def _needed_bytes(context: WorkerContext) -> int:
    """Estimated from the shards on this node."""
    wanted = context.restore
    assert wanted is not None
    previous_size = context.restore_world_size
    if context.is_resized:
        link = WorkerSmpClient(context)
        try:
            fds = link.open_images(wanted, previous_size)
        finally:
            link.close()
    else:
        fds = {} if context.arena_fd is None else {context.rank: os.dup(context.arena_fd)}
    images = LocalShards(fds, wanted)
    try:
        found = [_state_bytes(images, rank) for rank in images.headers()]
    finally:
        images.close()
    if not context.is_resized:
        return sum(whole + part for whole, part in found)
    whole = max((whole for whole, _ in found), default=0)
    parts = sum(part for _, part in found) * previous_size // max(1, len(found))
    return whole + parts // context.world_size + PAGE_BYTES


def _state_bytes(images: LocalShards, rank: Rank) -> tuple[int, int]:
    head = images.headers()[rank]
    parts = plain.plain_bytes(head, partial(images.read, rank))
    entries = [head.entries[name] for name in state_names(parts)]
    if members_of(head.layout.metadata):
        sizes = [math.prod(one.whole_shape) * ITEM_BYTES[one.dtype] for one in entries]
        return sum(_pages(size) for size in sizes if size >= LEAST_BYTES), 0
    large = [one for one in entries if one.num_bytes >= LEAST_BYTES]
    whole = sum(_pages(one.num_bytes) for one in large if one.part is None)
    return whole, sum(_pages(one.num_bytes) for one in large if one.part is not None)


def state_names(parts: Mapping[str, bytes]) -> list[str]:
    """Names of the optimizer state in main memory, in the order in which a restore reads it."""
    if "optimizer_state" not in parts:
        return []  # saved by ftrun.dcp, which fills existing tensors
    refs: list[TensorRef] = []
    plain.decode(parts["optimizer_state"], deref=refs.append)
    return [ref.name for ref in refs if "@" not in ref.kind]


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
