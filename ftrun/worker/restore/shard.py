"""Reads one version of this rank's shard, and checks the bytes while it reads them.

Runs in:  worker, training thread, inside `attach`.

A piece is compared with its digest when it is first read, or before that by `early_restore`. In a
large tensor the comparison of a piece directly precedes its copy, while the piece is in the CPU
cache. Data loaded into the model before a digest fails does no harm: the process ends, and the next
one restores another version.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ftrun.errors import LayoutUnknown, ShapeChanged, SnapshotCorrupt
from ftrun.ids import Version
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.layout import PLAIN_NAME, LayoutEntry
from ftrun.snapshot.plain_values import TensorRef
from ftrun.snapshot.replica_shares import members_of
from ftrun.wire.shared_memory.arena import Arena, open_slot
from ftrun.wire.shared_memory.pages import HeartbeatField
from ftrun.worker.capture.copying import digest_of, entry_view
from ftrun.worker.capture.device_copies import Bytes, Device, device_at, in_two_threads
from ftrun.worker.context import WorkerContext
from ftrun.worker.restore import early_restore
from ftrun.worker.state.tensors import (
    DTYPES,
    LocalPart,
    byte_view,
    can_be_cut,
    copyable,
    home_of,
    is_castable,
)


class LocalShardReader:
    """Reads one version of a shard."""

    def __init__(
        self,
        arena: Arena,
        wanted: Version,
        context: WorkerContext,
        right: Collection[int] = (),
        copied: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """Check the digest table and the plain values.

        Pieces in `right` were already compared with their digests. Tensors in `copied` were already
        copied, and each is returned once.

        Raises:
            SnapshotCorrupt: a digest does not match, here or later. The heartbeat page names the
                slot, so that the agent rejects it and restores another version.
        """
        self.version = wanted
        self._what = f"{wanted} of rank {context.rank}"
        self._page = context.page
        slot = arena.find(wanted)
        if slot is None:
            raise LayoutUnknown(f"rank {context.rank}'s arena does not hold {wanted}")
        self._slot = slot
        with self._reporting_to_agent():
            layout, data, table = open_slot(arena, slot, what=self._what)
        self._layout = layout
        self.members = members_of(layout.metadata)
        """The ranks that share the tensors of this shard; empty if it holds whole tensors."""
        self._table = table.tolist()
        self._data = torch.frombuffer(data, dtype=torch.uint8)
        self._bytes = np.frombuffer(data, dtype=np.uint8)
        self._pieces = layout.pieces
        self._unchecked = {index for index, piece in enumerate(self._pieces) if piece.num_bytes}
        self._unchecked.difference_update(right)
        self._entries = {entry.name: entry for entry in layout.entries}
        self._copied = dict(copied)
        self._present: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._used: set[str] = set()
        at = self._entries[PLAIN_NAME].offset
        self._check_entry(self._entries[PLAIN_NAME])
        length = int.from_bytes(data[at : at + 8], "little")
        self._parts: dict[str, bytes] = plain.decode(data[at + 8 : at + 8 + length])

    def part(self, name: str) -> Any:
        """A part of the plain values, with its tensors; each tensor is a separate copy."""
        if name not in self._parts:
            raise LayoutUnknown(
                f"{self._what} has no {name}: it was saved by ftrun.dcp, not by a session of "
                "ftrun.attach. Load it by ftrun.dcp.Reader(), or start with --resume never"
            )
        return plain.decode(self._parts[name], deref=self._deref)

    def reuse_memory(self, present: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Let parts contain these tensors, filled in place, where they fit.

        `present`: by name, the memory of this rank and the tensor that has it, such as a DTensor.
        """
        self._present = present

    def optional_part(self, name: str) -> Any:
        return self.part(name) if name in self._parts else None

    def entry(self, name: str) -> LayoutEntry | None:
        return self._entries.get(name)

    def is_cut_like(self, entries: Sequence[LayoutEntry]) -> bool:
        """Whether this rank saved the same parts of the same tensors; True if that is not known.

        `entries`: the present ones, without optimizer state.
        """
        if not self._layout.knows_parts:
            return True
        groups = (group for some in self.part("groups").values() for group in some)
        learned = {name for group in groups for name in group["params"]}
        pairs = [(self.entry(one.name), one) for one in entries]
        return learned <= {one.name for one in entries} and all(
            saved is not None
            and (saved.dtype, saved.shape, saved.part) == (one.dtype, one.shape, one.part)
            for saved, one in pairs
        )

    def tensor(self, name: str) -> torch.Tensor:
        """A checked tensor that shares the arena's memory; copy from it at once."""
        self._used.add(name)
        self._check_entry(self._entries[name])
        return entry_view(self._data, self._entries[name])

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        entry = self._entries[name]
        pieces = self._layout.pieces_of(entry)
        is_checked = self._unchecked.isdisjoint(pieces)
        is_cast = DTYPES[entry.dtype] != target.dtype
        target = copyable(target)
        device = None if target.is_cpu else device_at(target.device)
        if device is not None and not entry.is_small and not is_cast:
            self._put(device, entry, target)
            return
        if is_checked or entry.is_small or is_cast or not can_be_cut(target):
            target.copy_(copyable(self.tensor(name)))
            return
        self._used.add(name)
        into = byte_view(target)
        with self._reporting_to_agent():
            for index in pieces:
                piece = self._pieces[index]
                begin, end = piece.offset, piece.offset + piece.num_bytes
                self._check_piece(index)
                into[begin - entry.offset : end - entry.offset].copy_(self._data[begin:end])

    def _put(self, device: Device, entry: LayoutEntry, target: torch.Tensor) -> None:
        """Copy through page-locked buffers; the current stream waits on the device."""
        pieces = self._layout.pieces_of(entry)

        def fill(begin: int, end: int, buffer: Bytes) -> None:
            begin, end = begin + entry.offset, end + entry.offset

            def read(some: Sequence[int]) -> None:
                for index in some:
                    self._check_piece(index)
                    piece = self._pieces[index]
                    at = piece.offset - begin
                    content = self._bytes[piece.offset : piece.offset + piece.num_bytes]
                    np.copyto(buffer[at : at + piece.num_bytes], content)

            inside = [index for index in pieces if begin <= self._pieces[index].offset < end]
            in_two_threads(read, inside)

        self._used.add(entry.name)
        device.follow()
        with self._reporting_to_agent():
            device.put(target, fill)
        device.precede(device.record())

    def check_all_used(self) -> None:
        """Check that every saved tensor was used, and compare the remaining pieces."""
        names = (name for name in self._entries if not name.startswith("ftrun."))
        check_used({name: str(self._entries[name]) for name in names}, self._used)
        self.check_all()

    def check_all(self) -> None:
        """Compare all pieces that are not compared yet."""
        with self._reporting_to_agent():
            for index in sorted(self._unchecked):
                self._check_piece(index)

    # --- digests ------------------------------------------------------------------------------

    def _check_entry(self, entry: LayoutEntry) -> None:
        with self._reporting_to_agent():
            for index in self._layout.pieces_of(entry):
                self._check_piece(index)

    def _check_piece(self, index: int) -> None:
        if index not in self._unchecked:
            return
        piece = self._pieces[index]
        view = self._bytes[piece.offset : piece.offset + piece.num_bytes]
        if digest_of(view) != self._table[index]:
            raise SnapshotCorrupt(what=self._what, piece=index, pieces=len(self._pieces))
        self._unchecked.discard(index)

    @contextmanager
    def _reporting_to_agent(self) -> Iterator[None]:
        try:
            yield
        except (SnapshotCorrupt, LayoutUnknown) as error:
            self._page.note = str(error)
            self._page.set(HeartbeatField.CORRUPT_SLOT, 1 + self._slot)
            raise

    def _deref(self, ref: TensorRef) -> object:
        entry = self._entries[ref.name]
        copied = self._copied.pop(ref.name, None)
        home = home_of(ref.kind)
        memory, present = self._present.get(ref.name, (None, None))
        if memory is not None and _fits_into(entry, ref, memory):
            self.copy_into(ref.name, memory)
            return present
        if copied is None or ref.stride or home.type != "cpu":
            made = early_restore.empty(entry.shape, DTYPES[entry.dtype], home, ref.stride)
            if copied is None:
                self.copy_into(ref.name, made)
            else:
                copyable(made).copy_(copyable(copied))
            copied = made
        self._used.add(ref.name)
        if ref.kind == "array":
            return copied.numpy()
        return LocalPart(copied) if ref.kind.startswith("sharded") else copied


def _fits_into(entry: LayoutEntry, ref: TensorRef, memory: torch.Tensor) -> bool:
    made = (tuple(entry.shape), DTYPES[entry.dtype], home_of(ref.kind).type)
    is_dense = memory.stride() == ref.stride if ref.stride else memory.is_contiguous()
    is_same = made == (tuple(memory.shape), memory.dtype, memory.device.type)
    return is_same and is_dense and ref.kind != "array"


def check_used(saved: Mapping[str, str], used: Iterable[str]) -> None:
    """Raise ShapeChanged with the names of saved tensors that were not used."""
    used = set(used)
    check_fits([(name, was, "nothing") for name, was in saved.items() if name not in used])


def fits(saved: str, now: str, casts: bool) -> bool:
    """Whether a saved dtype may be loaded into another, both by safetensors' names."""
    return saved == now or (casts and is_castable(DTYPES[saved]) and is_castable(DTYPES[now]))


def check_fits(changed: Sequence[tuple[str, str, str]]) -> None:
    """Raise ShapeChanged for changed tensors: (name, saved entry, present entry) for each."""
    if changed:
        (key, saved, present), *others = changed
        raise ShapeChanged(key=key, saved=saved, present=present, others=others)
