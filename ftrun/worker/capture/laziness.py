"""The lazy copy check: proves that a lazy copy equals the state at the step boundary.

Runs in:  worker: samples in the training thread, at the boundary and before the optimizer steps;
          the comparison with the copy in the copy thread.
Takes in: the lazy sources of a slot, and their targets in the slot.
Gives:    the names of tensors that changed.

A version counter counts each in-place change that autograd records. `p.data.copy_()` is not
recorded, and a script that swaps average weights in and out leaves no trace. Therefore one cache
line of every 64 KiB is read at the boundary, at an offset that is random for each snapshot. The
copy must hold the same lines, and the tensor must still hold them when the optimizer steps. Changes
of fewer bytes can be missed; the verified snapshots of capture.py find those.

If a parameter gets other memory (`p.data = q`), the copy stays correct, because the sources keep
the old memory.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ftrun.snapshot.layout import CopyTiming
from ftrun.worker.state.state_tree import TensorSource
from ftrun.worker.state.tensors import byte_view, can_be_cut

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


def is_lazy(source: TensorSource, hasty: Collection[str]) -> bool:
    """Whether a source is copied while the next forward and backward run.

    Args:
        source: any source of the state.
        hasty: names of sources that have changed between a boundary and an optimizer step.
    """
    tensor = source.tensor
    if source.when is not CopyTiming.LAZY or source.name in hasty or not tensor.numel():
        return False
    if tensor.device.type == "cpu" and tensor.nbytes <= BOUNDARY_BYTES:
        return False
    return not tensor.is_inference()  # it has no version counter


class _Sampler(Protocol):
    names: list[str]

    def sources(self, where: float) -> object: ...

    def targets(self, where: float) -> object: ...

    def differing(self, one: object, two: object) -> set[str]: ...


class LazySamples:
    """Reads samples of the lazy tensors of one slot; created once per set of sources."""

    def __init__(self, tensors: Sequence[LazyTensor]) -> None:
        self.tensors = tensors
        in_lines = [one for one in tensors if _has_lines(one.source)]
        by_device: dict[torch.device, list[LazyTensor]] = {}
        for one in tensors:
            if not _has_lines(one.source):
                by_device.setdefault(one.source.device, []).append(one)
        self.samplers: list[_Sampler] = [_ItemSampler(group) for group in by_device.values()]
        if in_lines:
            self.samplers.append(_LineSampler(in_lines))

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


class _LineSampler:
    """Reads lines of contiguous tensors in CPU memory, and compares all of them in one call."""

    def __init__(self, tensors: Sequence[LazyTensor]) -> None:
        self.names = [one.name for one in tensors]
        self._sources = [_rows(one.source) for one in tensors]
        self._targets = [_rows(one.target) for one in tensors]
        self._ends = np.cumsum([len(rows) for rows in self._sources])

    def sources(self, where: float) -> object:
        return _lines(self._sources, where)

    def targets(self, where: float) -> object:
        return _lines(self._targets, where)

    def differing(self, one: object, two: object) -> set[str]:
        assert isinstance(one, np.ndarray)
        assert isinstance(two, np.ndarray)
        if np.array_equal(one, two):
            return set()
        lines = np.flatnonzero((one != two).any(axis=1))
        return {self.names[at] for at in np.searchsorted(self._ends, lines, side="right")}


class _ItemSampler:
    """Reads single items of tensors with other strides or on another device.

    On a device, reads are queued without waiting; `differing` waits for them.
    """

    def __init__(self, tensors: Sequence[LazyTensor]) -> None:
        self.names = [one.name for one in tensors]
        self._sources = [_bits(one.source) for one in tensors]
        self._targets = [_bits(one.target) for one in tensors]
        counts = [len(_taken(bits, 0.0)) * bits.itemsize for bits in self._targets]
        self._ends = np.cumsum(counts)

    def sources(self, where: float) -> object:
        return _items(self._sources, where)

    def targets(self, where: float) -> object:
        return _items(self._targets, where)

    def differing(self, one: object, two: object) -> set[str]:
        assert isinstance(one, torch.Tensor)
        assert isinstance(two, torch.Tensor)
        found = np.flatnonzero(one.cpu().numpy() != two.cpu().numpy())
        return {self.names[at] for at in np.searchsorted(self._ends, found, side="right")}


def _has_lines(tensor: torch.Tensor) -> bool:
    return can_be_cut(tensor) and tensor.nbytes >= LINE_BYTES


def _rows(tensor: torch.Tensor) -> np.ndarray:
    """View as [rows, bytes per row] of the same memory, without the remainder."""
    array = byte_view(tensor).numpy()
    count = max(1, len(array) // ROW_BYTES)
    return array[: len(array) // count * count].reshape(count, -1)


def _lines(tensors: Sequence[np.ndarray], where: float) -> np.ndarray:
    parts = []
    for rows in tensors:
        start = int(where * (rows.shape[1] // LINE_BYTES)) * LINE_BYTES
        parts.append(rows[:, start : start + LINE_BYTES])
    return np.concatenate(parts)


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


def _items(tensors: Sequence[torch.Tensor], where: float) -> torch.Tensor:
    return torch.cat([_taken(bits, where).view(torch.uint8) for bits in tensors])
