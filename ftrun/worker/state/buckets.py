"""DDP's gradient buckets, put into the order that the undisturbed run has.

Runs in:  worker, training thread, inside `attach` and at the first turn of the loop.
Takes in: the order in which gradients became ready, recorded at earlier boundaries.
Gives:    a DDP whose next forward builds the same buckets.

DDP builds its buckets anew after its first backward, in the order in which gradients became
ready, so the first step of a restored run would add up gradients in other buckets than the
step it repeats, and floating-point sums of more than two terms depend on that. Therefore one
backward without the user's model is driven through DDP: a chain of functions, each of which
makes one parameter's gradient ready, in the recorded order.

Source: measured with torch 2.13 and 4 gloo ranks; two ranks have no order to lose.
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
    """Knows the DDP instances that wrap a module, those made later included."""

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
        """Look for instances made before; 15 ms, so only where a bare module was attached."""
        self._seen.update(o for o in gc.get_objects() if type(o) is DistributedDataParallel)

    def wrappers_of(self, modules: dict[str, nn.Module]) -> dict[str, DistributedDataParallel]:
        """The DDP around each attached module, by the module's name."""
        found = {}
        for name, module in modules.items():
            candidates = [module, *getattr(module, "_modules", {}).values(), *self._seen]
            for one in candidates:
                if isinstance(one, DistributedDataParallel) and unwrapped(one) is unwrapped(module):
                    found[name] = one
        return found


def ready_order(ddp: DistributedDataParallel) -> tuple[list[int] | None, bool]:
    """Indices of DDP's parameters in the order its buckets follow, and whether that is final.

    None while it is unknown, for good where DDP never orders its buckets anew.
    """
    if ddp.static_graph:
        return None, True
    told = ddp._get_ddp_logging_data().get(  # type: ignore[no-untyped-call]
        "rebuilt_per_bucket_param_indices"
    )
    if told:
        return [int(index) for index in str(told).replace(",", " ").split()], True
    # Before the buckets are rebuilt only the times of the first backward tell.
    times = list(ddp.reducer.get_backward_stats())
    return (sorted(range(len(times)), key=times.__getitem__) if any(times) else None), False


def is_needed(ddp: DistributedDataParallel) -> bool:
    """Whether the order of buckets can change the bits of a step."""
    world_size = torch.distributed.get_world_size(ddp.process_group)
    return world_size >= _MATTERS_FROM and not ddp.find_unused_parameters


def warm_buckets(ddp: DistributedDataParallel, order: list[int]) -> None:
    """One backward through DDP in which gradients become ready in this order.

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
    """DDP does all its work around a forward, but the module and its hooks stay asleep."""

    def __init__(self, ddp: DistributedDataParallel, forward: Callable[[], torch.Tensor]) -> None:
        self._ddp = ddp
        self._forward = forward

    def __enter__(self) -> None:
        self._ddp.__dict__["_run_ddp_forward"] = lambda *_, **__: self._forward()

    def __exit__(self, *_: object) -> None:
        del self._ddp.__dict__["_run_ddp_forward"]


class _MakeReady(torch.autograd.Function):
    """Passes a scalar on; its backward gives the parameter a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, scalar: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        ctx.parameter = parameter.detach()
        return scalar.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], torch.zeros_like(ctx.parameter)


def _chain(in_order: list[torch.Tensor]) -> torch.Tensor:
    # The last link's backward runs first.
    scalar = torch.zeros((), device=in_order[0].device, requires_grad=True)
    for parameter in reversed(in_order):
        scalar = _MakeReady.apply(scalar, parameter)  # type: ignore[no-untyped-call]
    return scalar
