"""Copies tensors into a slot, and computes the digests.

Runs in:  worker: boundary copies in the training thread, lazy copies in the copy thread.

Rule: digests are computed from the slot, never from a source. A source may change between copy and
      digest, but a sealed slot always matches its digests.

Large tensors are copied piece by piece. Each digest is computed while the piece is in the CPU
cache. With 256 KiB pieces and views that are cut in advance, this reaches 83 % of the rate of a
plain warm copy. Cutting the views on each call, or hashing after the copy, reaches half (2026-11).
np.copyto runs in the calling thread only. Tensor.copy_ would use the threads that compute the
forward, and reaches a third of the rate when all cores are busy. np.copyto and the digest both
release the GIL.

If a parameter gets other memory (`p.data = q`), the copy stays correct, because the sources keep
the old memory.
"""

import logging
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xxhash

from ftrun import clock
from ftrun.linux import available_memory
from ftrun.snapshot.layout import PLAIN_NAME, CopyTiming, Layout, LayoutEntry, Piece, cut
from ftrun.worker.capture.device_copies import device_at, synchronize
from ftrun.worker.capture.device_sources import DeviceCopies, DeviceSource
from ftrun.worker.capture.lazy_check import LazySamples, LazyTensor
from ftrun.worker.state.providers import ProviderState
from ftrun.worker.state.state_tree import TensorSource
from ftrun.worker.state.tensors import DTYPES, byte_view, can_be_cut, copyable, uninitialized

_log = logging.getLogger(__name__)

digest_of: Callable[[Any], int] = xxhash.xxh3_64_intdigest


BOUNDARY_BYTES = 1 << 14
"""CPU tensors up to this size are copied at the boundary. That takes 3 us each, as long as two
samples."""


def is_lazy(source: TensorSource, boundary_names: Collection[str]) -> bool:
    tensor = source.tensor
    if source.when is not CopyTiming.LAZY or source.name in boundary_names or not tensor.numel():
        return False
    is_small = tensor.device.type == "cpu" and tensor.nbytes <= BOUNDARY_BYTES
    if is_small or (tensor.device.type != "cpu" and device_at(tensor.device) is None):
        return False
    return not tensor.is_inference()  # it has no version counter


@dataclass(frozen=True, slots=True)
class CopyPiece:
    """One piece of a large lazy source: byte views of source and target, and its digest's index."""

    source: np.ndarray
    target: np.ndarray
    index: int
    name: str


@dataclass
class SlotCopy:
    """Copies into one slot for one set of persistent sources, with all views cut in advance.

    `whole_*` are lazy tensors of the CPU that are not cut: small, or with other strides.
    """

    whole_targets: list[torch.Tensor] = field(default_factory=list)
    whole_sources: list[torch.Tensor] = field(default_factory=list)
    whole_names: list[str] = field(default_factory=list)
    cuts: list[CopyPiece] = field(default_factory=list)
    lazy: list[LazyTensor] = field(default_factory=list)
    boundary_targets: list[torch.Tensor] = field(default_factory=list)
    boundary_sources: list[torch.Tensor] = field(default_factory=list)
    on_devices: DeviceCopies = field(default_factory=lambda: DeviceCopies(()))
    packed: list[tuple[int, Any]] = field(default_factory=list)
    """Index and slot bytes of all other pieces: packs, boundary copies, providers, plain values."""
    provided: list[tuple[ProviderState, np.ndarray]] = field(default_factory=list)
    """Providers, and their targets, that are written lazily."""
    provided_now: list[tuple[ProviderState, np.ndarray]] = field(default_factory=list)
    """The same for providers that are written at the boundary."""

    @cached_property
    def samples(self) -> LazySamples:
        return LazySamples(self.lazy)

    def provide(
        self,
        states: Sequence[ProviderState],
        views: "SlotViews",
        boundary_names: Collection[str],
    ) -> None:
        """Set what the providers write in this snapshot."""
        pairs = [(one, byte_view(views.target(one.name)).numpy()) for one in states]
        self.provided = [pair for pair in pairs if pair[0].name not in boundary_names]
        self.provided_now = [pair for pair in pairs if pair[0].name in boundary_names]

    def copy_boundary(self, *, is_staged: bool = False, gb_s: float = 0.0) -> None:
        """Copy the boundary sources; on devices, queue the copies and the state to copy later.

        `is_staged`: clone the state to copy later on its device, if there is room. `gb_s`: limit of
        the rate at which a device's state is copied later; 0: none.
        """
        # A step does not wait for the copies of staged state, but for those of state in CPU memory.
        is_staged = is_staged and not (self.cuts or self.whole_targets)
        targets, sources = self.boundary_targets, self.boundary_sources
        if not all(source.is_cpu for source in sources):
            far = [i for i, source in enumerate(sources) if not source.is_cpu]
            near = [i for i, source in enumerate(sources) if source.is_cpu]
            pairs = [sources[i] for i in far], [targets[i] for i in far]
            self.on_devices.begin(*pairs, is_staged=is_staged, gb_s=gb_s)
            targets, sources = [targets[i] for i in near], [sources[i] for i in near]
        elif self.on_devices:
            self.on_devices.begin((), (), is_staged=is_staged, gb_s=gb_s)
        if targets:
            torch._foreach_copy_(targets, sources)
        for state, target in self.provided_now:
            state.write(target)
        self.provided_now.clear()

    def synchronize(self) -> None:
        """Wait for all work on the devices of the sources, in whatever stream it is."""
        synchronize((*self.boundary_sources, *(one.source for one in self.lazy)))

    def copy_lazy(self, table: memoryview) -> None:
        for state, target in self.provided:
            state.write(target)
        if self.whole_targets:
            torch._foreach_copy_(self.whole_targets, self.whole_sources)
        if self.on_devices:
            self._copy_cuts(table)
            self.on_devices.copy(table, lambda: self._digest_packs(table))
        else:
            # Nearly in file order, so that live capture can write the file before the copy ends.
            self._digest_packs(table)
            self._copy_cuts(table)

    def _digest_packs(self, table: memoryview) -> None:
        for index, view in self.packed:
            table[index] = digest_of(view)

    def _copy_cuts(self, table: memoryview) -> None:
        for one in self.cuts:
            np.copyto(one.target, one.source)
            table[one.index] = digest_of(one.target)

    def differing(self, table: memoryview) -> list[str]:
        """Names of lazy sources that differ in any byte from their copies."""
        names = {one.name for one in self.cuts if table[one.index] != digest_of(one.source)}
        for name, source, target in zip(
            self.whole_names, self.whole_sources, self.whole_targets, strict=True
        ):
            if content_digest(source) != content_digest(target):
                names.add(name)
        provided, self.provided = self.provided, []
        for state, written in provided:
            has_room = available_memory().num_bytes > 2 * state.num_bytes
            if has_room and state.differs_from(written):
                names.add(state.name)
        return sorted(names | self.on_devices.differing())


class SlotViews:
    """Typed views of a slot's entries; created once per slot."""

    def __init__(self, layout: Layout, image: memoryview) -> None:
        self.layout = layout
        self._start = len(layout.header)
        self.image = image
        self.data = torch.frombuffer(image, dtype=torch.uint8)[self._start :]
        self.bytes = np.frombuffer(image, dtype=np.uint8)[self._start :]
        self._entries = {entry.name: entry for entry in layout.entries}
        self._targets: dict[str, torch.Tensor] = {}

    def write_header(self) -> None:
        self.image[: self._start] = self.layout.header

    def write_plain(self, plain: bytes) -> None:
        at = self._start + self._entries[PLAIN_NAME].offset
        self.image[at : at + 8] = len(plain).to_bytes(8, "little")
        self.image[at + 8 : at + 8 + len(plain)] = plain

    def target(self, name: str) -> torch.Tensor:
        if name not in self._targets:
            self._targets[name] = copyable(entry_view(self.data, self._entries[name]))
        return self._targets[name]

    def prepare(
        self,
        persistent: Sequence[TensorSource],
        fresh: Sequence[TensorSource],
        boundary_names: Collection[str],
    ) -> SlotCopy:
        """Prepare the copies of these sources; `fresh` ones are new objects at each boundary.

        Lazy sources of `boundary_names` are copied at the boundary nevertheless.
        """
        made = SlotCopy()
        index_at = {p.offset: i for i, p in enumerate(self.layout.pieces) if p.num_bytes}
        hashed: set[int] = set()
        on_devices: list[DeviceSource] = []
        at_boundary = names_at_boundary(persistent, boundary_names)
        for source in persistent:
            entry, tensor = self._entries[source.name], copyable(source.tensor)
            target = self.target(source.name)
            if source.name in at_boundary:
                made.boundary_targets.append(target)
                made.boundary_sources.append(tensor)
                continue
            made.lazy.append(LazyTensor(source.name, tensor, target))
            if not tensor.is_cpu:
                one = self._on_device(entry, tensor, index_at)
                on_devices.append(one)
                hashed.update(index for index, _ in one.pieces)
            elif entry.is_small or not can_be_cut(tensor):
                made.whole_targets.append(target)
                made.whole_sources.append(tensor)
                made.whole_names.append(source.name)
            else:
                cuts = self._cut(entry, tensor, index_at)
                made.cuts += cuts
                hashed.update(one.index for one in cuts)
        made.on_devices = DeviceCopies(on_devices)
        made.boundary_targets += [self.target(source.name) for source in fresh]
        made.packed = [
            (index, self._bytes_of(piece))
            for index, piece in enumerate(self.layout.pieces)
            if index not in hashed
        ]
        return made

    def _cut(
        self, entry: LayoutEntry, tensor: torch.Tensor, index_at: dict[int, int]
    ) -> list[CopyPiece]:
        source = byte_view(tensor).numpy()
        target = byte_view(self.target(entry.name)).numpy()
        made = []
        for piece in cut(entry.offset, entry.num_bytes, self.layout.piece_bytes):
            start = piece.offset - entry.offset
            part = slice(start, start + piece.num_bytes)
            index = index_at[piece.offset]
            made.append(CopyPiece(source[part], target[part], index, entry.name))
        return made

    def _on_device(
        self, entry: LayoutEntry, tensor: torch.Tensor, index_at: dict[int, int]
    ) -> DeviceSource:
        target = byte_view(self.target(entry.name)).numpy()
        if entry.is_small:
            return DeviceSource(entry.name, tensor, target)
        pieces = [
            (index_at[piece.offset], self._bytes_of(piece))
            for piece in cut(entry.offset, entry.num_bytes, self.layout.piece_bytes)
        ]
        return DeviceSource(entry.name, tensor, target, pieces)

    def _bytes_of(self, piece: Piece) -> Any:
        return self.bytes[piece.offset : piece.offset + piece.num_bytes]


def entry_view(data: torch.Tensor, entry: LayoutEntry) -> torch.Tensor:
    """An entry of a shard's data as a tensor that shares its memory."""
    dtype = DTYPES[entry.dtype]
    raw = data[entry.offset : entry.offset + entry.num_bytes]
    if raw.numel() == 0:
        return uninitialized(entry.shape, dtype, "cpu")
    return raw.view(dtype).view(entry.shape)


def names_at_boundary(sources: Sequence[TensorSource], boundary_names: Collection[str]) -> set[str]:
    """Names of the sources that are copied at the boundary, because others may change later.

    A buffer may be a view of a parameter. A change of the buffer then changes the parameter, so
    sources that share memory with a boundary source are included.
    """
    found = {source.name for source in sources if not is_lazy(source, boundary_names)}
    changing = {_memory(source) for source in sources if source.when is CopyTiming.BOUNDARY}
    return found | {source.name for source in sources if _memory(source) in changing}


def _memory(source: TensorSource) -> int:
    return source.tensor.untyped_storage().data_ptr()


def content_digest(tensor: torch.Tensor) -> int:
    """Digest of a tensor's bytes; copies the tensor only if it cannot be cut."""
    if not can_be_cut(tensor):
        tensor = tensor.contiguous()
    return digest_of(byte_view(tensor).numpy()) if tensor.numel() else 0


_LOOK_S = 1.0
"""Interval of a wait for the copy thread at which it is checked that the thread lives."""


class CopyThread:
    """Daemon thread that copies in parallel to the training thread; one job at a time."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return not self._idle.is_set()

    def start(self, job: Callable[[], object]) -> None:
        """Start a job; logs its exceptions. The caller must have waited for the previous job."""
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._work, name="ftrun-copy", daemon=True)
            thread.start()
            self._thread = thread
        self._idle.clear()
        self._jobs.put(job)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the job is done, and return whether it is. A job whose thread died is done."""
        give_up_s = None if timeout_s is None else clock.now_s() + timeout_s
        while True:
            left_s = _LOOK_S if give_up_s is None else min(_LOOK_S, give_up_s - clock.now_s())
            if self._idle.wait(max(0.0, left_s)):
                return True
            if self._thread is None or not self._thread.is_alive():
                self._idle.set()
            elif give_up_s is not None and clock.now_s() >= give_up_s:
                return False

    def close(self) -> None:
        """End the thread, after the job in progress; `start` may be called again."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:  # noqa: BLE001 - the thread must stay for the next job
                _log.exception("a bug in ftrun: a job of the copy thread failed")
            finally:
                del job  # it holds an arena, whose memory may be freed before the next job
                self._idle.set()
