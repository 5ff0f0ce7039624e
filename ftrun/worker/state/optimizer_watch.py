"""Finds optimizers whose state is in no snapshot.

Runs in:  worker, training thread.
Takes in: torch's global hook before each optimizer step; the optimizers that are attached.
Gives:    reasons for lost protection.

An optimizer that is created and used within one turn of the loop, and keeps no state, loses
nothing. An optimizer is therefore reported at a boundary only if it has state, or if it also
stepped in an earlier turn.
"""

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ftrun.worker.state.inner_optimizers import tensors_outside_state
from ftrun.worker.state.unprotected import UnprotectedReasons

_log = logging.getLogger(__name__)


class OptimizerWatch:
    """Compares the optimizers that step with those that are attached.

    Args:
        known: all optimizers whose state is captured.
        names: returns the names of attached tensors by id; called only for a report.
        reasons: receives the reports.
        before_first_step: called once, before the first step of a known optimizer.
    """

    def __init__(
        self,
        known: Iterable[Optimizer],
        names: Callable[[], dict[int, str]],
        reasons: UnprotectedReasons,
        before_first_step: Callable[[], None],
    ) -> None:
        self._known = list(known)
        self._known_ids = {id(one) for one in self._known}
        self._names = names
        self._reasons = reasons
        self._before_first_step: Callable[[], None] | None = before_first_step
        self._now: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._before: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._reported: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._has_logged = self._is_checked = False
        self._hook = register_optimizer_step_pre_hook(reasons.guarded(self._before_step))

    def close(self) -> None:
        self._hook.remove()

    def boundary(self) -> None:
        if not self._is_checked:
            self._is_checked = True
            self._check_attributes()
        if self._now:
            for one in list(self._now):
                if one in self._before or any(one.state.values()):
                    self._reported.add(one)
                    self._report(one)
            self._before |= self._now
            self._now.clear()

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if id(optimizer) in self._known_ids:
            first, self._before_first_step = self._before_first_step, None
            if first is not None:
                first()
        elif optimizer not in self._reported:
            self._now.add(optimizer)

    def _report(self, optimizer: Optimizer) -> None:
        kind, names = type(optimizer).__name__, self._names()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        updated = [names[id(one)] for one in parameters if id(one) in names]
        if updated:
            self._reasons.add(
                f"optimizer {kind} {updated[0]}",
                f"optimizer {kind}, which updates {shown(updated, limit=1)}, is not attached: its "
                "state is in no snapshot; pass it to attach(optimizer={...})",
            )
        elif not self._has_logged:
            self._has_logged = True
            _log.warning(
                "optimizer %s updates %d parameters that are not attached: a restart begins with "
                "new ones; pass their model and this optimizer to attach() if the training needs "
                "them",
                kind,
                len(parameters),
            )

    def _check_attributes(self) -> None:
        for one in self._known:
            if found := tensors_outside_state(one):
                kind = type(one).__name__
                self._reasons.add(
                    f"optimizer {kind} attributes",
                    f"optimizer {kind} keeps tensors in {shown(found)}, outside of its state: they "
                    "are in no snapshot; pass them to attach() by name",
                )


def shown(names: list[str], limit: int = 3) -> str:
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
