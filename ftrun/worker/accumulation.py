"""Whether a step boundary lies in the middle of a gradient accumulation.

Runs in:  worker, training thread.
Takes in: torch's global hook before each optimizer step; the gradients at a boundary; the answers
          of attached objects that hold gradients themselves.
Gives:    yes or no. Gradients are not part of a snapshot, so none is taken in the middle.

An optimizer is in the middle if it has not stepped in this turn and a gradient was added since its
last step. The gradients of all its parameters are compared, by identity and version counter,
because a backward may reach only some of them: adapters of a frozen model, one expert of many.
An id alone does not identify a gradient: after it is freed, the next one may have the same id.
A step that GradScaler skips looks the same; it costs the snapshot of that boundary.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ftrun.worker.tensors import version_of
from ftrun.worker.unprotected import Hook

Signature = dict[int, tuple["weakref.ref[torch.Tensor]", int]]
"""Gradients with their versions, by id."""


@runtime_checkable
class Accumulating(Protocol):
    """An attached object with gradients that no optimizer's parameters show."""

    def is_within_accumulation(self) -> bool:
        """Whether this boundary lies in the middle of one; called once at each boundary."""
        ...


class Accumulation:
    """Follows the attached optimizers from boundary to boundary.

    Args:
        optimizers: those that are attached.
        objects: all other attached objects; those that are `Accumulating` are asked.
        guarded: wraps the hook.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        objects: Iterable[object] = (),
        guarded: Callable[[Hook], Hook] = lambda hook: hook,
    ) -> None:
        self._telling = [one for one in objects if isinstance(one, Accumulating)]
        self._optimizers = {id(optimizer): optimizer for optimizer in optimizers}
        self.waiting_turns = 0
        """Turns with a step of some optimizer, since a boundary was outside of accumulations."""
        self.pending: list[Optimizer] = []
        """Those that were in the middle of an accumulation at the last boundary."""
        self._stepped: set[int] = set()
        self._at_step: dict[int, Signature] = {}
        self._versions: dict[int, list[int]] = {}
        self._hook = register_optimizer_step_pre_hook(guarded(self._before_step))

    def close(self) -> None:
        self._hook.remove()

    def boundary(self) -> bool:
        """End a turn; whether some optimizer is in the middle of an accumulation."""
        self.pending = [one for one in self._optimizers.values() if self._is_pending(one)]
        told = [one.is_within_accumulation() for one in self._telling]
        is_pending = bool(self.pending) or any(told)
        self.waiting_turns = self.waiting_turns + bool(self._stepped) if is_pending else 0
        self._stepped.clear()
        return is_pending

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return  # see `_is_pending`
        if id(optimizer) in self._optimizers:
            self._stepped.add(id(optimizer))
            self._at_step[id(optimizer)] = _signature(optimizer)

    def _is_pending(self, optimizer: Optimizer) -> bool:
        key = id(optimizer)
        parameters = _parameters(optimizer)
        versions = [version_of(parameter) for parameter in parameters]
        before, self._versions[key] = self._versions.get(key, versions), versions
        if key in self._stepped:
            return False
        grads = [parameter.grad for parameter in parameters]
        used = [at for at, grad in enumerate(grads) if grad is not None]
        if len(before) == len(versions) and used and all(before[i] != versions[i] for i in used):
            # A compiled step calls no hook. It changes all parameters that have a gradient.
            self._at_step[key] = _signature(optimizer)
            return False
        then = self._at_step.get(key, {})
        return any(_is_new(grad, then) for grad in grads if grad is not None)


def _is_new(grad: torch.Tensor, then: Signature) -> bool:
    """Whether it appeared after the last step, or something was added to it."""
    reference, version = then.get(id(grad), (None, -1))
    return reference is None or reference() is not grad or version != version_of(grad)


def _signature(optimizer: Optimizer) -> Signature:
    grads = [parameter.grad for parameter in _parameters(optimizer)]
    return {id(one): (weakref.ref(one), version_of(one)) for one in grads if one is not None}


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
