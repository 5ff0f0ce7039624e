"""The order of the gradients in the buckets of the attached DDP instances.

Runs in:  worker, training thread: inside `attach`, and at each step boundary.
Source:   determinism.py says why the order matters.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ftrun.errors import JoinRefused
from ftrun.worker.state.determinism import DdpWrapperTracker, is_needed, ready_order, warm_buckets
from ftrun.worker.survivors.reset import layout, order_problem, problem_of, reset

_log = logging.getLogger(__name__)

Warmup = Callable[[], object]


class BucketOrders:
    """The orders of all attached DDP instances, by name of the module.

    Args:
        warmup: replaces the synthetic backward.
        may_stay: orders are also recorded for two ranks, see `is_needed`.
    """

    def __init__(
        self, modules: dict[str, nn.Module], warmup: Warmup | None, *, may_stay: bool
    ) -> None:
        self._may_stay = may_stay
        self._modules = modules
        self._warmup = warmup
        self._watch = DdpWrapperTracker()
        self._orders: dict[str, list[int]] = {}
        self._final: set[str] = set()
        self._is_restored = False
        self._wrapped_at_load: set[int] = set()
        self.close = self._watch.close

    def find_older(self) -> None:
        """Find the DDP instances that were created before the session."""
        if torch.distributed.is_initialized() and not self.wrappers():
            self._watch.find_older()

    def wrappers(self) -> dict[str, Any]:
        return self._watch.wrappers_of(self._modules)

    def load(self, orders: dict[str, list[int]]) -> None:
        self._orders, self._is_restored = orders, True

    def warm(self) -> None:
        """Put the buckets in the recorded order; a collective call."""
        self._note_wrapped()
        wrappers = {n: ddp for n, ddp in self.wrappers().items() if is_needed(ddp)}
        if not wrappers:
            return
        if self._warmup is not None:
            self._warmup()
            return
        for name, ddp in wrappers.items():
            if name in self._orders:
                warm_buckets(ddp, self._orders[name])
            else:
                _log.warning("not bitwise: no order of gradients is recorded for %s", name)

    def reset(self, optimizers: Iterable[Optimizer], others: Iterable[object]) -> None:
        """Leave nothing of the last turn, and put the buckets in the recorded order, alone.

        `others`: attached objects, of which each GradScaler is reset.
        """
        self._note_wrapped()
        wrappers = self.wrappers()
        if problem := order_problem(wrappers, self._orders):
            raise JoinRefused(f"this process cannot be restored in place: {problem}")
        reset(self._modules.values(), wrappers, self._orders, optimizers, others)

    def digest(self) -> str:
        return layout(self.wrappers())

    def stay_problem(self) -> str:
        """Why `reset` cannot be exact, in words; empty if it can."""
        return problem_of([*self._modules.values(), *self.wrappers().values()])

    def _note_wrapped(self) -> None:
        self._wrapped_at_load = {id(ddp) for ddp in self.wrappers().values()}

    @property
    def is_wrapped_since(self) -> bool:
        """Whether a module was wrapped after `warm`."""
        return bool({id(ddp) for ddp in self.wrappers().values()} - self._wrapped_at_load)

    def known(self) -> dict[str, list[int]]:
        """The orders that are known at this boundary."""
        if not torch.distributed.is_initialized():
            return self._orders
        wrappers = {n: ddp for n, ddp in self.wrappers().items() if n not in self._final}
        for name, ddp in wrappers.items():
            if not is_needed(ddp, may_stay=self._may_stay):
                self._final.add(name)
                continue
            order, is_final = ready_order(ddp)
            if is_final:
                self._final.add(name)
                if name in self._orders and self._is_restored and order != self._orders[name]:
                    _log.warning("not bitwise: the gradient buckets of %s differ", name)
            if order is not None and (is_final or name not in self._orders):
                self._orders[name] = order
        return self._orders
