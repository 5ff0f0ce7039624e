"""The batches that a loop has handed out since the oldest version that may be restored.

Runs in:  worker, training thread.
Gives:    the same batches again, with the random states that followed each of them.

The loader's iterator and its workers continue behind these batches, so nothing is loaded twice. A
batch is kept as its tensors and a copy of the containers around them: a script may remove items
from a dict. A tensor that the script has changed in place cannot be handed out again.

Rule: if a batch cannot be handed out again, or the batches exceed `MAX_BYTES`, the position is
      restored as in a new process.
"""

import collections
import copy
import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ftrun.worker.state.tensors import version_of

MAX_BYTES = 1 << 30

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


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
    tensors: list[tuple[torch.Tensor, int]]
    """Tensors in the batch, with their version counters."""
    states: dict[str, Any]
    """Random states after the batch was loaded."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor, _ in self.tensors)

    @property
    def is_unchanged(self) -> bool:
        return all(version_of(tensor) == version for tensor, version in self.tensors)


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
        tensors: list[tuple[torch.Tensor, int]] = []
        step = self._step()
        try:
            copied = _copied(batch, tensors)
        except _NotKept:
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
    return _copied(kept.batch, [])


def _copied(value: Any, tensors: list[tuple[torch.Tensor, int]]) -> Any:
    """A copy of the containers around the same tensors, which are added to `tensors`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        if (version := version_of(value)) < 0:
            raise _NotKept  # a change in place leaves no trace
        tensors.append((value, version))
        return value
    if isinstance(value, np.ndarray | np.generic):
        return value.copy()
    if kind is dict:
        return {key: _copied(item, tensors) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(_copied(item, tensors) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return kind(*(_copied(item, tensors) for item in value))
    return _copied_object(value, tensors)


def _copied_object(value: Any, tensors: list[tuple[torch.Tensor, int]]) -> Any:
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
