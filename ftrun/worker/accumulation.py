"""Whether a step boundary lies in the middle of a gradient accumulation.

Runs in:  worker, training thread.
Takes in: torch's global hook before each optimizer step, gradients as they stand at a boundary;
          what an attached object says, where a framework keeps gradients for itself.
Gives:    yes or no; gradients are no part of a snapshot, so nothing is taken in the middle.

An optimizer is in the middle when it has not stepped in this turn and gradients have been
added since its last step. That is read off identity and version counter of a few gradients:
a backward adds to all of them. An id alone is no identity: a gradient that was freed leaves its
own to the next one. A step that GradScaler skips looks the same, and costs no more
than waiting for the next boundary.
"""

import weakref
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ftrun.worker.tensors import version_of

_SAMPLED = 16

Signature = tuple[tuple["weakref.ref[torch.Tensor]", int], ...]
"""Gradients as they stood, with their versions."""


@runtime_checkable
class Accumulating(Protocol):
    """Something attached that knows of gradients which no optimizer's parameters show."""

    def is_within_accumulation(self) -> bool:
        """Whether this boundary lies in the middle of one; asked once at each."""
        ...


class Accumulation:
    """Follows the attached optimizers from boundary to boundary.

    Args:
        optimizers: those that are attached.
        objects: whatever else is; those that are `Accumulating` are asked.
    """

    def __init__(self, optimizers: Iterable[Optimizer], objects: Iterable[object] = ()) -> None:
        self._telling = [one for one in objects if isinstance(one, Accumulating)]
        self._optimizers = {id(optimizer): optimizer for optimizer in optimizers}
        self._stepped: set[int] = set()
        self._at_step: dict[int, Signature] = {}
        self._versions: dict[int, list[int]] = {}
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        self._hook.remove()

    def boundary(self) -> bool:
        """End a turn; whether some optimizer is in the middle of an accumulation."""
        found = [self._is_pending(optimizer) for optimizer in self._optimizers.values()]
        found += [one.is_within_accumulation() for one in self._telling]
        self._stepped.clear()
        return any(found)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return  # see `_is_pending`
        if id(optimizer) in self._optimizers:
            self._stepped.add(id(optimizer))
            self._at_step[id(optimizer)] = _signature(optimizer)

    def _is_pending(self, optimizer: Optimizer) -> bool:
        key = id(optimizer)
        versions = [version_of(parameter) for parameter in _sample(optimizer)]
        before, self._versions[key] = self._versions.get(key, versions), versions
        if key in self._stepped:
            return False
        if versions != before:
            # A compiled step has no hook; the parameters show that it has been.
            self._at_step[key] = _signature(optimizer)
            return False
        grads = _grads(optimizer)
        return bool(grads) and not _are_those(grads, self._at_step.get(key, ()))


def _grads(optimizer: Optimizer) -> list[torch.Tensor]:
    grads = (parameter.grad for parameter in _sample(optimizer))
    return [grad for grad in grads if grad is not None]


def _signature(optimizer: Optimizer) -> Signature:
    return tuple((weakref.ref(grad), version_of(grad)) for grad in _grads(optimizer))


def _are_those(grads: list[torch.Tensor], before: Signature) -> bool:
    """The very same gradients, and nothing was added to them."""
    return len(grads) == len(before) and all(
        then() is grad and version == version_of(grad)
        for grad, (then, version) in zip(grads, before, strict=True)
    )


def _sample(optimizer: Optimizer) -> list[torch.Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return parameters[:: max(1, len(parameters) // _SAMPLED)]
