"""Proves that a lazy copy equals the state at the step boundary.

Runs in:  worker: samples in the training thread, the comparison with the copies in the copy thread.

A version counter counts each in-place change that autograd records. `p.data.copy_()` is not
recorded, and a script that swaps average weights in and out leaves no trace. Therefore one cache
line of every 64 KiB is read at the boundary, at an offset that is random for each snapshot. The
copy must hold the same lines, and the tensor must still hold them when the optimizer steps. Changes
of fewer bytes can be missed; the verified snapshots of capture.py find those.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ftrun.worker.state.tensors import HostCopy, byte_view, can_be_cut

LINE_BYTES = 64
ROW_BYTES = 1 << 16
"""One line of each row is read, which takes 1.4 ms per GiB of state (2026-11)."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by item size. torch.take lacks kernels for some float types, and NaN does not equal
itself."""
_WIDEST_BYTES = 16

_random = random.Random()

_HINT = " (code inside `with session.phase(...)` would run after the copy)"
UNDER_COPY = (
    "changed while the snapshot of step {step} was copied, by code that is no optimizer step; the "
    "snapshot is discarded" + _HINT
)
BEFORE_STEP = "changed between a step boundary and the optimizer step" + _HINT
WITHOUT_HOOK = "changed in a step in which no optimizer hook ran"


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is copied lazily, and its target in the slot."""

    name: str
    source: torch.Tensor
    target: torch.Tensor


class _Sampler(ABC):
    """Reads samples of some tensors and of their copies, and compares all of them in one call."""

    def __init__(self, tensors: Sequence[LazyTensor], view: Callable[[torch.Tensor], Any]) -> None:
        self._names = [one.name for one in tensors]
        self._sources = [view(one.source) for one in tensors]
        self._targets = [view(one.target) for one in tensors]
        self._ends = np.cumsum([self.length(one) for one in self._targets])

    @abstractmethod
    def length(self, view: Any) -> int:
        """Length of the samples of one tensor in the array of all."""

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

    def length(self, view: np.ndarray) -> int:
        return len(view)

    def read(self, views: Sequence[np.ndarray], where: float) -> np.ndarray:
        return np.concatenate([line_of(rows, where) for rows in views])


class _ItemSampler(_Sampler):
    """Reads single items of tensors with other strides or on another device.

    On a device, reads are queued without waiting; `differing` waits for them.
    """

    _cut: tuple[float, list[torch.Tensor]] | None = None
    """The views of the last read of the sources: a step is read at the places of its boundary."""

    def length(self, view: torch.Tensor) -> int:
        _, count = _places(view)
        return count * view.itemsize

    def read(self, views: Sequence[torch.Tensor], where: float) -> HostCopy:
        if views is self._sources and self._cut is not None and self._cut[0] == where:
            items = self._cut[1]
        else:
            items = [items_at(bits, where) for bits in views]
            if views is self._sources and all(bits.is_contiguous() for bits in views):
                self._cut = where, items
        return HostCopy(torch.cat(items).view(torch.uint8))


class LazySamples:
    """Reads samples of the lazy tensors of one slot; created once per set of sources."""

    def __init__(self, tensors: Sequence[LazyTensor]) -> None:
        self.tensors = tensors
        in_lines = [one for one in tensors if _has_lines(one.source)]
        alike: dict[tuple[torch.device, int], list[LazyTensor]] = {}
        for one in tensors:
            if not _has_lines(one.source):
                alike.setdefault((one.source.device, one.source.itemsize), []).append(one)
        self.samplers: list[_Sampler] = [_ItemSampler(group, bits_of) for group in alike.values()]
        if in_lines:
            self.samplers.append(_LineSampler(in_lines, rows_of))

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
        self._versions_at_step: list[int] | None = None
        self.hook_fired = False
        """Whether an optimizer has stepped in the turn after the boundary."""

    def wrong_copies(self) -> list[str]:
        """Names of tensors whose copy may differ from the boundary; call it after the copy."""
        copied = [one.targets(self._where) for one in self._samples.samplers]
        return sorted(self._recorded_before_step() | self._differing(copied))

    def observe(self) -> None:
        """Sample the tensors before an optimizer changes them; later calls do nothing."""
        if self._at_step is None:
            self._versions_at_step = self._samples.versions()
            self._at_step = self._sources()

    @property
    def has_arrived(self) -> bool:
        """Whether `changed_before_step` waits for no device."""
        samples = [*self._at_boundary, *(self._at_step or ())]
        return all(one.has_arrived for one in samples if isinstance(one, HostCopy))

    def changed_before_step(self) -> list[str]:
        """Names of tensors that had changed at `observe`."""
        return sorted(self._differing(self._at_step)) if self._at_step is not None else []

    def changed_now(self) -> list[str]:
        return sorted(self._recorded(self._samples.versions()) | self._differing(self._sources()))

    def _sources(self) -> list[object]:
        return [one.sources(self._where) for one in self._samples.samplers]

    def _recorded_before_step(self) -> set[str]:
        # The step may run in parallel, so its first changes are not compared. `observe` precedes
        # it: if it has not run after this read, the step has changed nothing before the read.
        now = self._samples.versions()
        return self._recorded(self._versions_at_step or now)

    def _recorded(self, now: list[int]) -> set[str]:
        trios = zip(self._samples.tensors, self._versions, now, strict=True)
        return {tensor.name for tensor, before, after in trios if before != after}

    def _differing(self, samples: list[object]) -> set[str]:
        trios = zip(self._samples.samplers, self._at_boundary, samples, strict=True)
        return {name for one, before, after in trios for name in one.differing(before, after)}


def _has_lines(tensor: torch.Tensor) -> bool:
    return can_be_cut(tensor) and tensor.nbytes >= LINE_BYTES


def rows_of(tensor: torch.Tensor) -> np.ndarray:
    """View as [rows, bytes per row] of the same memory, without the remainder."""
    array = byte_view(tensor).numpy()
    count = max(1, len(array) // ROW_BYTES)
    return array[: len(array) // count * count].reshape(count, -1)


def line_of(rows: np.ndarray, where: float) -> np.ndarray:
    """One line of each row, at this fraction of it."""
    start = int(where * (rows.shape[1] // LINE_BYTES)) * LINE_BYTES
    return rows[:, start : start + LINE_BYTES]


def _in_memory(samples: Any) -> np.ndarray:
    return samples.awaited().numpy() if isinstance(samples, HostCopy) else samples


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """View as integers of the same size; of 8 bytes if the items have 16."""
    if tensor.itemsize == _WIDEST_BYTES:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.itemsize])


def items_at(bits: torch.Tensor, where: float) -> torch.Tensor:
    """Read evenly spaced items: one line's worth per row, or per tensor smaller than a row."""
    step, count = _places(bits)
    first = int(where * step)
    if bits.is_contiguous():
        return bits.view(-1)[first : first + count * step : step]
    index = torch.arange(first, first + count * step, step, device=bits.device)
    return torch.take(bits, index)


def _places(bits: torch.Tensor) -> tuple[int, int]:
    """Distance and number of the items that are read."""
    per_row = LINE_BYTES // bits.itemsize
    step = max(1, min(ROW_BYTES // bits.itemsize, bits.numel()) // per_row)
    return step, bits.numel() // step
