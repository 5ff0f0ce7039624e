"""The order of the gradients in the buckets of the attached DDP instances.

Runs in:  worker, training thread: inside `attach`, and at each step boundary.
Source:   determinism.py says why the order matters.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ftrun.worker.state.determinism import DdpWrapperTracker, is_needed, ready_order, warm_buckets

_log = logging.getLogger(__name__)

Warmup = Callable[[], object]


class BucketOrders:
    """The orders of all attached DDP instances, by name of the module."""

    def __init__(self, modules: dict[str, nn.Module], warmup: Warmup | None) -> None:
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
        self._wrapped_at_load = {id(ddp) for ddp in self.wrappers().values()}
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
            if not is_needed(ddp):
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
