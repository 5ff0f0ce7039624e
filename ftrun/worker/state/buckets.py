"""Restores the order of DDP's gradient buckets to that of an undisturbed run.

Runs in:  worker, training thread, inside `attach` and at the first turn of the loop.
Takes in: the order in which gradients became ready, recorded at earlier boundaries.
Gives:    a DDP whose next forward builds the same buckets.

DDP rebuilds its buckets after its first backward, in the order in which gradients became ready. The
first step of a restored run would therefore sum gradients in other buckets than the step it
repeats, and floating-point sums of more than two terms depend on the order. To prevent that, one
backward without the user's model runs through DDP. It is a chain of functions, each of which makes
one parameter's gradient ready, in the recorded order.

Source: measured with torch 2.13 and 4 gloo ranks; with two ranks the order of a sum has no effect.
"""

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ftrun.worker.state.attached import unwrapped

_MATTERS_FROM = 3

_log = logging.getLogger(__name__)


class DdpWrapperTracker:
    """Tracks the DDP instances that wrap a module, including later ones."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._original: Callable[..., None] = DistributedDataParallel.__init__
        seen, original = self._seen, self._original

        def noting(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            original(ddp, *args, **kwargs)
            seen.add(ddp)

        DistributedDataParallel.__init__ = noting  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        DistributedDataParallel.__init__ = self._original  # type: ignore[method-assign]

    def find_older(self) -> None:
        """Find instances created before; takes 15 ms, so only for an attached bare module."""
        self._seen.update(o for o in gc.get_objects() if type(o) is DistributedDataParallel)

    def wrappers_of(self, modules: dict[str, nn.Module]) -> dict[str, DistributedDataParallel]:
        found = {}
        for name, module in modules.items():
            candidates = [module, *getattr(module, "_modules", {}).values(), *self._seen]
            for one in candidates:
                if isinstance(one, DistributedDataParallel) and unwrapped(one) is unwrapped(module):
                    found[name] = one
        return found


def ready_order(ddp: DistributedDataParallel) -> tuple[list[int] | None, bool]:
    """Indices of DDP's parameters in the order of its buckets, and whether that order is final.

    The order is None while it is unknown, and always if DDP never rebuilds its buckets.
    """
    if ddp.static_graph:
        return None, True
    told = ddp._get_ddp_logging_data().get(  # type: ignore[no-untyped-call]
        "rebuilt_per_bucket_param_indices"
    )
    if told:
        return [int(index) for index in str(told).replace(",", " ").split()], True
    # Before the buckets are rebuilt, only the times of the first backward give the order.
    times = list(ddp.reducer.get_backward_stats())
    return (sorted(range(len(times)), key=times.__getitem__) if any(times) else None), False


def is_needed(ddp: DistributedDataParallel) -> bool:
    world_size = torch.distributed.get_world_size(ddp.process_group)
    return world_size >= _MATTERS_FROM and not ddp.find_unused_parameters


def warm_buckets(ddp: DistributedDataParallel, order: list[int]) -> None:
    """Run one backward through DDP in which gradients become ready in this order.

    A collective call: every rank of DDP's process group makes it. Gradients are None afterwards.
    """
    learned = [p for p in ddp.module.parameters() if p.requires_grad]
    if sorted(order) != list(range(len(learned))):
        _log.warning("not bitwise: the recorded order of gradients is of another model")
        return
    in_order = [learned[index] for index in order]
    with _forward_replaced(ddp, lambda: _chain(in_order)):
        ddp().backward()
    for parameter in learned:
        parameter.grad = None


class _forward_replaced:  # noqa: N801 - a context manager used like a function
    """Replaces the forward inside DDP, so that the module and its hooks do not run."""

    def __init__(self, ddp: DistributedDataParallel, forward: Callable[[], torch.Tensor]) -> None:
        self._ddp = ddp
        self._forward = forward

    def __enter__(self) -> None:
        self._ddp.__dict__["_run_ddp_forward"] = lambda *_, **__: self._forward()

    def __exit__(self, *_: object) -> None:
        del self._ddp.__dict__["_run_ddp_forward"]


class _MakeReady(torch.autograd.Function):
    """Returns its scalar unchanged; its backward gives the parameter a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, scalar: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        ctx.parameter = parameter.detach()
        return scalar.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], torch.zeros_like(ctx.parameter)


def _chain(in_order: list[torch.Tensor]) -> torch.Tensor:
    # The last function's backward runs first.
    scalar = torch.zeros((), device=in_order[0].device, requires_grad=True)
    for parameter in reversed(in_order):
        scalar = _MakeReady.apply(scalar, parameter)  # type: ignore[no-untyped-call]
    return scalar
