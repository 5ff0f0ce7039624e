"""Copies tensors into a slot, computes the digests, and checks lazy copies.

Runs in:  worker: boundary copies and samples in the training thread; lazy copies, and the
          comparison of the samples with them, in the copy thread.
Takes in: a layout, the sources, a slot's image.
Gives:    bytes in the slot and a digest per piece; the names of tensors that changed before their
          lazy copy was complete, or before the optimizer step.

Rule: digests are computed from the slot, never from a source. A source may change between copy and
      digest, but a sealed slot always matches its digests.

Large tensors are copied piece by piece. Each digest is computed while the piece is in the CPU
cache. With 256 KiB pieces and views that are cut in advance, this reaches 83 % of the rate of a
plain warm copy. Cutting the views on each call, or hashing after the copy, reaches half (2026-11).
np.copyto runs in the calling thread only. Tensor.copy_ would use the threads that compute the
forward, and reaches a third of the rate when all cores are busy. np.copyto and the digest both
release the GIL.

The lazy copy check proves that a lazy copy equals the state at the step boundary. A version counter
counts each in-place change that autograd records. `p.data.copy_()` is not recorded, and a script
that swaps average weights in and out leaves no trace. Therefore one cache line of every 64 KiB is
read at the boundary, at an offset that is random for each snapshot. The copy must hold the same
lines, and the tensor must still hold them when the optimizer steps. Changes of fewer bytes can be
missed; the verified snapshots of capture.py find those.

If a parameter gets other memory (`p.data = q`), the copy stays correct, because the sources keep
the old memory.
"""

import logging
import queue
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xxhash

from ftrun.snapshot.layout import PLAIN_NAME, CopyTiming, Layout, LayoutEntry, Piece, cut
from ftrun.worker.state.state_tree import TensorSource
from ftrun.worker.state.tensors import DTYPES, byte_view, can_be_cut

_log = logging.getLogger(__name__)

digest_of: Callable[[Any], int] = xxhash.xxh3_64_intdigest


# --- the lazy copy check ------------------------------------------------------------------------

LINE_BYTES = 64
ROW_BYTES = 1 << 16
"""One line of each row is read, which takes 1.4 ms per GiB of state (2026-11)."""

BOUNDARY_BYTES = 1 << 14
"""CPU tensors up to this size are copied at the boundary. That takes 3 us each, as long as two
samples."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by item size. torch.take lacks kernels for some float types, and NaN does not equal
itself."""

_random = random.Random()


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is copied lazily, and its target in the slot."""

    name: str
    source: torch.Tensor
    target: torch.Tensor


def is_lazy(source: TensorSource, boundary_names: Collection[str]) -> bool:
    """Whether a source is copied while the next forward and backward run."""
    tensor = source.tensor
    if source.when is not CopyTiming.LAZY or source.name in boundary_names or not tensor.numel():
        return False
    if tensor.device.type == "cpu" and tensor.nbytes <= BOUNDARY_BYTES:
        return False
    return not tensor.is_inference()  # it has no version counter


class _Sampler(ABC):
    """Reads samples of some tensors and of their copies, and compares all of them in one call."""

    def __init__(
        self, tensors: Sequence["LazyTensor"], view: Callable[[torch.Tensor], Any]
    ) -> None:
        self._names = [one.name for one in tensors]
        self._sources = [view(one.source) for one in tensors]
        self._targets = [view(one.target) for one in tensors]
        self._ends = np.cumsum([len(self.read([one], 0.0)) for one in self._targets])

    @abstractmethod
    def read(self, views: Sequence[Any], where: float) -> Any: ...

    def sources(self, where: float) -> Any:
        return self.read(self._sources, where)

    def targets(self, where: float) -> Any:
        return self.read(self._targets, where)

    def differing(self, one: Any, two: Any) -> set[str]:
        one, two = _in_memory(one), _in_memory(two)
        if np.array_equal(one, two):
            return set()
        found = np.flatnonzero((one != two).reshape(len(one), -1).any(axis=1))
        return {self._names[at] for at in np.searchsorted(self._ends, found, side="right")}


class _LineSampler(_Sampler):
    """Reads lines of contiguous tensors in CPU memory."""

    def read(self, views: Sequence[np.ndarray], where: float) -> np.ndarray:
        parts = []
        for rows in views:
            start = int(where * (rows.shape[1] // LINE_BYTES)) * LINE_BYTES
            parts.append(rows[:, start : start + LINE_BYTES])
        return np.concatenate(parts)


class _ItemSampler(_Sampler):
    """Reads single items of tensors with other strides or on another device.

    On a device, reads are queued without waiting; `differing` waits for them.
    """

    def read(self, views: Sequence[torch.Tensor], where: float) -> torch.Tensor:
        return torch.cat([_taken(bits, where).view(torch.uint8) for bits in views])


class LazySamples:
    """Reads samples of the lazy tensors of one slot; created once per set of sources."""

    def __init__(self, tensors: Sequence[LazyTensor]) -> None:
        self.tensors = tensors
        in_lines = [one for one in tensors if _has_lines(one.source)]
        by_device: dict[torch.device, list[LazyTensor]] = {}
        for one in tensors:
            if not _has_lines(one.source):
                by_device.setdefault(one.source.device, []).append(one)
        self.samplers: list[_Sampler] = [_ItemSampler(group, _bits) for group in by_device.values()]
        if in_lines:
            self.samplers.append(_LineSampler(in_lines, _rows))

    def versions(self) -> list[int]:
        return [one.source._version for one in self.tensors]


class LazyCopyCheck:
    """Lazy copy check of one snapshot; must be created at the boundary, before the copy begins."""

    def __init__(self, samples: LazySamples) -> None:
        self._samples = samples
        self._where = _random.random()
        self._versions = samples.versions()
        self._at_boundary = self._sources()
        self._at_step: list[object] | None = None

    def wrong_copies(self) -> list[str]:
        """Names of tensors whose copy may differ from the boundary; call it after the copy."""
        copied = [one.targets(self._where) for one in self._samples.samplers]
        return sorted(self._recorded() | self._differing(copied))

    def observe(self) -> None:
        """Sample the tensors before an optimizer changes them; later calls do nothing."""
        if self._at_step is None:
            self._at_step = self._sources()

    def changed_before_step(self) -> list[str]:
        """Names of tensors that had changed at `observe`."""
        return sorted(self._differing(self._at_step)) if self._at_step is not None else []

    def changed_now(self) -> list[str]:
        return sorted(self._recorded() | self._differing(self._sources()))

    def _sources(self) -> list[object]:
        return [one.sources(self._where) for one in self._samples.samplers]

    def _recorded(self) -> set[str]:
        now = zip(self._samples.tensors, self._versions, self._samples.versions(), strict=True)
        return {tensor.name for tensor, before, after in now if before != after}

    def _differing(self, samples: list[object]) -> set[str]:
        names: set[str] = set()
        for one, before, after in zip(
            self._samples.samplers, self._at_boundary, samples, strict=True
        ):
            names |= one.differing(before, after)
        return names


def _has_lines(tensor: torch.Tensor) -> bool:
    return can_be_cut(tensor) and tensor.nbytes >= LINE_BYTES


def _rows(tensor: torch.Tensor) -> np.ndarray:
    """View as [rows, bytes per row] of the same memory, without the remainder."""
    array = byte_view(tensor).numpy()
    count = max(1, len(array) // ROW_BYTES)
    return array[: len(array) // count * count].reshape(count, -1)


def _in_memory(samples: Any) -> np.ndarray:
    return samples.cpu().numpy() if isinstance(samples, torch.Tensor) else samples


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.itemsize])


def _taken(bits: torch.Tensor, where: float) -> torch.Tensor:
    """Read evenly spaced items: one line's worth per row, or per tensor smaller than a row."""
    per_row = LINE_BYTES // bits.itemsize
    step = max(1, min(ROW_BYTES // bits.itemsize, bits.numel()) // per_row)
    count = bits.numel() // step
    first = int(where * step)
    index = torch.arange(first, first + count * step, step, device=bits.device)
    return torch.take(bits, index)


# --- copies -------------------------------------------------------------------------------------


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

    `whole_*` are lazy tensors that are not cut: small, on a device, or with other strides.
    """

    whole_targets: list[torch.Tensor] = field(default_factory=list)
    whole_sources: list[torch.Tensor] = field(default_factory=list)
    whole_names: list[str] = field(default_factory=list)
    cuts: list[CopyPiece] = field(default_factory=list)
    lazy: list[LazyTensor] = field(default_factory=list)
    boundary_targets: list[torch.Tensor] = field(default_factory=list)
    boundary_sources: list[torch.Tensor] = field(default_factory=list)
    packed: list[tuple[int, Any]] = field(default_factory=list)
    """Index and slot bytes of all other pieces: packs, boundary copies, plain values."""

    @cached_property
    def samples(self) -> LazySamples:
        return LazySamples(self.lazy)

    @cached_property
    def devices(self) -> set[torch.device]:
        """The devices that lazy copies read; not the CPU."""
        return {one.source.device for one in self.lazy if not one.source.is_cpu}

    def copy_boundary(self) -> None:
        if self.boundary_targets:
            torch._foreach_copy_(self.boundary_targets, self.boundary_sources)

    def copy_lazy(self, table: memoryview) -> None:
        if self.whole_targets:
            torch._foreach_copy_(self.whole_targets, self.whole_sources)
        # Nearly in file order, so that live capture can write the file before the copy ends.
        for index, view in self.packed:
            table[index] = digest_of(view)
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
        return sorted(names)


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
            self._targets[name] = entry_view(self.data, self._entries[name])
        return self._targets[name]

    def prepare(
        self,
        persistent: Sequence[TensorSource],
        fresh: Sequence[TensorSource],
        boundary_names: Collection[str],
    ) -> SlotCopy:
        """Prepare the copies of these sources.

        Args:
            persistent: sources of the layout that stay the same objects.
            fresh: sources that are new objects at each boundary; always few.
            boundary_names: names of lazy sources that are copied at the boundary nevertheless.
        """
        made = SlotCopy()
        index_at = {p.offset: i for i, p in enumerate(self.layout.pieces) if p.num_bytes}
        hashed: set[int] = set()
        at_boundary = _names_at_boundary(persistent, boundary_names)
        for source in persistent:
            entry = self._entries[source.name]
            target = self.target(source.name)
            if source.name in at_boundary:
                made.boundary_targets.append(target)
                made.boundary_sources.append(source.tensor)
                continue
            made.lazy.append(LazyTensor(source.name, source.tensor, target))
            if entry.is_small or not can_be_cut(source.tensor):
                made.whole_targets.append(target)
                made.whole_sources.append(source.tensor)
                made.whole_names.append(source.name)
            else:
                cuts = self._cut(entry, source.tensor, index_at)
                made.cuts += cuts
                hashed.update(one.index for one in cuts)
        for source in fresh:
            made.boundary_targets.append(self.target(source.name))
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
        for piece in cut(entry.offset, entry.num_bytes):
            start = piece.offset - entry.offset
            end = start + piece.num_bytes
            index = index_at[piece.offset]
            part = slice(start, end)
            made.append(CopyPiece(source[part], target[part], index, entry.name))
        return made

    def _bytes_of(self, piece: Piece) -> Any:
        return self.bytes[piece.offset : piece.offset + piece.num_bytes]


def entry_view(data: torch.Tensor, entry: LayoutEntry) -> torch.Tensor:
    """Return an entry of a shard's data as a tensor that shares its memory."""
    dtype = DTYPES[entry.dtype]
    raw = data[entry.offset : entry.offset + entry.num_bytes]
    if raw.numel() == 0:
        return torch.empty(entry.shape, dtype=dtype)
    return raw.view(dtype).view(entry.shape)


def _names_at_boundary(
    sources: Sequence[TensorSource], boundary_names: Collection[str]
) -> set[str]:
    """Names of the sources that are copied at the boundary.

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
        tensor = tensor.cpu().contiguous()
    return digest_of(byte_view(tensor).numpy()) if tensor.numel() else 0


class CopyThread:
    """Daemon thread that copies in parallel to the training thread; one job at a time."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return not self._idle.is_set()

    def start(self, job: Callable[[], None]) -> None:
        """Start a job; logs its exceptions. The caller must have waited for the previous job."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="ftrun-copy", daemon=True)
            thread.start()
            self._thread = thread
        self._idle.clear()
        self._jobs.put(job)

    def wait(self) -> None:
        """Wait until the job is done; at most the time to copy all bytes."""
        self._idle.wait()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception:  # noqa: BLE001 - the thread must stay for the next job
                _log.exception("a bug in ftrun: a job of the copy thread failed")
            finally:
                self._idle.set()
