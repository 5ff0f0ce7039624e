"""The batches that a loop has handed out since the oldest version that may be restored.

Runs in:  worker, training thread.
Gives:    the same batches again, with the random states that followed each of them.

The loader's iterator and its workers continue behind these batches, so nothing is loaded twice. A
batch is kept as views of its tensors and a copy of the containers around them: a script may remove
items from a dict, or set `requires_grad`. A tensor whose memory has changed cannot be handed out
again.

Rule 1: if a batch cannot be handed out again, or the batches exceed `MAX_BYTES`, the position is
        restored as in a new process.
Rule 2: autograd's counter of changes does not count writes by numpy, through `.data`, or by another
        tensor over the same buffer. So each tensor has a digest; measured: 0.06 s per GB. A batch
        with a tensor on a device is not kept, because a digest would wait for the device.
"""

import collections
import copy
import dataclasses
from collections import deque
from collections.abc import Callable
from ctypes import c_ubyte
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from ftrun.worker.state.tensors import copyable

MAX_BYTES = 1 << 30

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Contents(NamedTuple):
    """What a tensor held when it was handed out."""

    storage_bytes: int
    digest: int


class _NotKept(Exception):
    """A batch contains an object of which it is unknown how to hand it out again."""


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """One batch."""

    step: int
    """Step boundaries before the turn that got it."""
    number: int
    """Batches of this pass up to this one."""
    batch: Any
    tensors: list[tuple[torch.Tensor, Contents]]
    states: dict[str, Any]
    """Random states after the batch was loaded."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor, _ in self.tensors)

    @property
    def is_unchanged(self) -> bool:
        return all(
            tensor.untyped_storage().nbytes() == before.storage_bytes  # else it cannot be read
            and _digest(tensor) == before.digest
            for tensor, before in self.tensors
        )


class KeptBatches:
    """The batches of the current pass of one loader.

    Args:
        step: returns the number of step boundaries so far.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self._kept: deque[KeptBatch] = deque()
        self._num_bytes = 0
        self._from_step = 0
        """Batches of earlier steps are not kept."""

    def begin_pass(self) -> None:
        self._kept.clear()
        self._num_bytes, self._from_step = 0, self._step()

    def add(self, batch: Any, number: int, states: dict[str, Any]) -> None:
        tensors: list[tuple[torch.Tensor, Contents]] = []
        step = self._step()
        try:
            copied = _copied(batch, tensors)
        except Exception:  # noqa: BLE001 - objects of the script may do anything
            self.forget_before(step + 1)
            return
        kept = KeptBatch(step, number, copied, tensors, states)
        self._kept.append(kept)
        self._num_bytes += kept.num_bytes
        while self._num_bytes > MAX_BYTES:
            self.forget_before(self._kept[0].step + 1)

    def forget_before(self, step: int) -> None:
        """Release the batches of turns that no restore repeats any more."""
        self._from_step = max(self._from_step, step)
        while self._kept and self._kept[0].step < step:
            self._num_bytes -= self._kept.popleft().num_bytes

    def since(self, step: int) -> list[KeptBatch] | None:
        """The batches of this step's turn and of later turns; None if one cannot come again."""
        found = [one for one in self._kept if one.step >= step]
        if step < self._from_step or not all(one.is_unchanged for one in found):
            return None
        return found


def handed_out_again(kept: KeptBatch) -> Any:
    return _copied(kept.batch, None)


def _copied(value: Any, tensors: list[tuple[torch.Tensor, Contents]] | None) -> Any:
    """A copy of the containers around views of the same tensors, which are added to `tensors`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return _view(value, tensors)
    if isinstance(value, np.ndarray | np.generic):
        return value.copy()
    if kind is dict:
        return {key: _copied(item, tensors) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(_copied(item, tensors) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return kind(*(_copied(item, tensors) for item in value))
    return _copied_object(value, tensors)


def _view(tensor: torch.Tensor, tensors: list[tuple[torch.Tensor, Contents]] | None) -> Any:
    is_usual = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if not is_usual or not tensor.is_cpu or tensor.requires_grad or vars(tensor):
        raise _NotKept
    view = tensor.detach()
    if tensors is not None:
        tensors.append((view, Contents(view.untyped_storage().nbytes(), _digest(view))))
    return view


def _digest(tensor: torch.Tensor) -> int:
    flat = copyable(tensor.resolve_conj().resolve_neg()).contiguous()
    # Not by numpy(), after which the script could not resize the tensor.
    size = flat.nbytes
    content = (c_ubyte * size).from_address(flat.data_ptr()) if size else b""
    return xxhash.xxh3_64_intdigest(content)


def _copied_object(value: Any, tensors: list[tuple[torch.Tensor, Contents]] | None) -> Any:
    if isinstance(value, collections.UserDict):  # such as the batches of tokenizers
        names = ["data"]
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    else:
        raise _NotKept
    made: Any = copy.copy(value)
    for name in names:
        object.__setattr__(made, name, _copied(getattr(value, name), tensors))
    return made
