"""Does the part of a restore that does not need the script.

Runs in:  worker: a separate thread, from the process's start until `attach` takes over.
Takes in: the context; this rank's arena, which outlived the last worker.
Gives:    the arena with its pages mapped, the pieces that match their digests, and optimizer state
          copied into prefaulted memory (ready_memory.py).
Survives: every error: `attach` repeats the failed work and reports the error.

A script builds its model and joins the process group before it attaches. If this work is done in
that time, `attach` only has to make a warm copy of the parameters (scripts/bench_reshard.py).

No process writes to this arena before `attach` ends: the SMP only reads it, and other ranks have
their own arenas. A piece that matched its digest therefore stays unchanged.
"""

import logging
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ftrun.errors import FtrunError
from ftrun.ids import Version
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.layout import PLAIN_NAME, Layout, LayoutEntry
from ftrun.wire.shared_memory.arena import Arena, open_slot
from ftrun.worker.capture.copying import digest_of
from ftrun.worker.context import WorkerContext
from ftrun.worker.restore import ready_memory
from ftrun.worker.state.tensors import DTYPES, byte_view

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
        self._slot = slot
        self._is_taken = threading.Event()

    def map_pages(self) -> None:
        self.arena.map_slot(self._slot)

    def read(self, *, with_state: bool) -> None:
        """Compare each piece with its digest, until all are done or `attach` takes over.

        Args:
            with_state: also copy optimizer state, as far as prefaulted memory is available.
        """
        layout, data, table = open_slot(self.arena, self._slot, what=str(self.wanted))
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
        at = values.offset
        length = int.from_bytes(shard.data[at : at + 8].tobytes(), "little")
        parts = plain.decode(shard.data[at + 8 : at + 8 + length].tobytes())
        for name in ready_memory.state_names(parts):
            entry = entries[name]
            if self._is_taken.is_set() or name in self.copied:
                continue
            tensor = ready_memory.ready_tensor(entry.shape, DTYPES[entry.dtype])
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


_begun: EarlyRestore | None = None


def begin(context: WorkerContext) -> None:
    global _begun
    _begun = None
    if context.restore is None:
        return
    ready_memory.expect()
    try:
        _begun = _opened(context)
    except (FtrunError, OSError, ValueError) as error:
        _log.info("the restore is not prepared: %s", error)
    work = threading.Thread(target=_work, args=[context, _begun], name="ftrun-early", daemon=True)
    work.start()


def take(wanted: Version) -> EarlyRestore | None:
    """Stop and return the early restore of this version; only the first call returns it."""
    global _begun
    found, _begun = _begun, None
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
            ahead.map_pages()
        is_ready = ready_memory.make_ready(context)
        if ahead is not None:
            ahead.read(with_state=is_ready)
    except (FtrunError, OSError) as error:
        _log.info("the restore is not prepared: %s", error)
    except Exception:  # noqa: BLE001
        # ftrun's thread in the user's process: a bug here costs time only, and is logged once.
        _log.warning("a bug in ftrun: the restore is not prepared", exc_info=True)
