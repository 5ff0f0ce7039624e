"""Detects step boundaries in the middle of a gradient accumulation.

Runs in:  worker, training thread.
Takes in: torch's global hook before each optimizer step; the gradients at a boundary; the answers
          of attached objects that hold gradients themselves.
Gives:    yes or no. Snapshots do not contain gradients, so none is taken during an accumulation.

An optimizer accumulates if it has not stepped in this turn and a gradient was added since its last
step. The gradients of all its parameters are compared, by identity and version counter, because a
backward may reach only some of them: adapters of a frozen model, or one expert of many. An id alone
does not identify a gradient, because after it is freed the next one may have the same id. A step
that GradScaler skips looks like an accumulation; it costs the snapshot of that boundary.

If other optimizers step in the turn, gradients that are all zero do not count as accumulation,
because `zero_grad(set_to_none=False)` of the optimizer also writes to them. Values are read only
in this case, because a read waits for the device.

A loop that steps first and runs backward at the end of its turn also has gradients at each
boundary. They look like gradients that the next turn sets to zero, as in a GAN, until the next step
uses them.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ftrun.worker.state.tensors import is_sharded, version_of
from ftrun.worker.state.unprotected import Hook

_SAMPLED = 16

Signature = dict[int, tuple["weakref.ref[torch.Tensor]", int]]
"""Gradients with their version counters, by id."""


@runtime_checkable
class AccumulationAware(Protocol):
    """An attached object with gradients that are not in `grad` of an optimizer's parameters."""

    def is_within_accumulation(self) -> bool:
        """Whether an accumulation is in progress; called once at each boundary."""
        ...


class AccumulationTracker:
    """Tracks the gradients of the attached optimizers from boundary to boundary.

    Args:
        optimizers: the attached optimizers.
        objects: all other attached objects; only `AccumulationAware` ones are used.
        guarded: wraps the hook so that its exceptions do not reach the script.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        objects: Iterable[object] = (),
        guarded: Callable[[Hook], Hook] = lambda hook: hook,
    ) -> None:
        self._telling = [one for one in objects if isinstance(one, AccumulationAware)]
        self._optimizers = {id(optimizer): optimizer for optimizer in optimizers}
        self.waiting_turns = 0
        """Turns with a step of some optimizer, since the last boundary without an accumulation."""
        self.pending: list[Optimizer] = []
        """Optimizers with an accumulation in progress at the last boundary."""
        self.crossing: list[Optimizer] = []
        """Optimizers that have used gradients computed after a step and before a boundary."""
        self._stepped: set[int] = set()
        self._hooked: set[int] = set()
        self._sampled: dict[int, list[torch.Tensor]] = {}
        self._at_boundary: dict[int, list[tuple[weakref.ref[torch.Tensor], int]]] = {}
        self._at_step: dict[int, Signature] = {}
        self._versions: dict[int, list[int]] = {}
        self._hook = register_optimizer_step_pre_hook(guarded(self.before_step))

    def close(self) -> None:
        self._hook.remove()

    def restored(self) -> None:
        """Treat the present gradients, which a restore has created, as those of the last step."""
        for key, optimizer in self._optimizers.items():
            self._at_step[key] = _signature(p.grad for p in _parameters(optimizer))

    def boundary(self) -> bool:
        """End a turn; return whether an accumulation is in progress."""
        self.pending = [one for one in self._optimizers.values() if self._is_pending(one)]
        told = [one.is_within_accumulation() for one in self._telling]
        is_pending = bool(self.pending) or any(told)
        self.waiting_turns = self.waiting_turns + bool(self._stepped) if is_pending else 0
        for key in self._stepped:
            then = self._at_step[key]
            grads = [p.grad for p in self._sampled[key] if p.grad is not None]
            new = [(weakref.ref(one), version_of(one)) for one in grads if _is_new(one, then)]
            self._at_boundary[key] = new
        self._stepped.clear()
        return is_pending

    def before_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        """Called by torch before a step, and before the replay of a graph that contains it."""
        if torch.compiler.is_compiling():
            return  # see `_has_compiled_step`
        key = id(optimizer)
        if key not in self._optimizers:
            return
        has_closure = any(callable(one) for one in (*args, *(kwargs or {}).values()))
        new = self._at_boundary.pop(key, [])
        if not has_closure and optimizer not in self.crossing:
            grads = {id(p.grad) for p in self._sampled[key]} if new else set()
            held = [(reference(), version) for reference, version in new]
            if any(id(g) in grads and version_of(g) == v for g, v in held if g is not None):
                self.crossing.append(optimizer)
        with_grad = [p for p in _parameters(optimizer) if p.grad is not None]
        self._sampled[key] = with_grad[:: max(1, len(with_grad) // _SAMPLED)]
        self._stepped.add(key)
        self._hooked.add(key)
        self._at_step[key] = _signature(p.grad for p in with_grad)

    def _is_pending(self, optimizer: Optimizer) -> bool:
        key = id(optimizer)
        if key in self._stepped:
            return False
        parameters = _parameters(optimizer)
        grads = [parameter.grad for parameter in parameters]
        if key not in self._hooked and self._has_compiled_step(key, parameters, grads):
            self._at_step[key] = _signature(grads)
            return False
        then = self._at_step.get(key, {})
        new = [grad for grad in grads if grad is not None and _is_new(grad, then)]
        return bool(new) and not (self._stepped and all(map(_is_zero, new)))

    def _has_compiled_step(
        self, key: int, parameters: list[torch.Tensor], grads: list[torch.Tensor | None]
    ) -> bool:
        """Detect a compiled step, which calls no hook: all parameters with a gradient changed."""
        versions = [version_of(parameter) for parameter in parameters]
        before, self._versions[key] = self._versions.get(key, versions), versions
        used = [at for at, grad in enumerate(grads) if grad is not None]
        return bool(
            len(before) == len(versions) and used and all(before[i] != versions[i] for i in used)
        )


def _is_new(grad: torch.Tensor, then: Signature) -> bool:
    """Whether the gradient was created or written after the last step."""
    reference, version = then.get(id(grad), (None, -1))
    return reference is None or reference() is not grad or version != version_of(grad)


def _is_zero(grad: torch.Tensor) -> bool:
    # If this rank's part of a sharded gradient is zero, other parts may not be.
    is_readable = grad.layout is torch.strided and not is_sharded(grad)
    return is_readable and not bool(grad.any())


def _signature(grads: Iterable[torch.Tensor | None]) -> Signature:
    return {id(one): (weakref.ref(one), version_of(one)) for one in grads if one is not None}


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
