"""Finds optimizers inside attached optimizers (SAM, Lookahead), and optimizers not attached.

Runs in:  worker, training thread.
Gives:    attached inner optimizers, named by the attribute that holds them, such as
          `optimizer.base_optimizer`; after a load, groups and state shared as before; reasons for
          lost protection.

A wrapper shares its groups with the inner optimizer, so that a scheduler of one of them sets the
learning rate of both. The wrapper's own `load_state_dict` may end this sharing, so the sharing is
restored after each load.

If an optimizer is created and used within one turn of the loop, and has no state, nothing is lost.
An optimizer is therefore reported at a boundary only if it has state, or if it also stepped in an
earlier turn.
"""

import logging
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ftrun.errors import UsageError
from ftrun.worker.state.attached import AttachedState
from ftrun.worker.state.unprotected import UnprotectedReasons, shown

_REFERRING = ("scheduler", "scaler")
"""Arguments of `attach` whose objects refer to an optimizer without containing it."""
_MAX_DEPTH = 4

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A wrapper that shares its groups or its state with its inner optimizer."""

    outer: Any
    inner: Optimizer
    shares_list: bool
    shared_groups: tuple[tuple[int, int], ...]
    shares_state: bool


class InnerOptimizers:
    """Finds the optimizers inside attached objects, and attaches them.

    Raises UsageError if an optimizer steps where ftrun cannot observe it.
    """

    def __init__(self, attached: AttachedState) -> None:
        self.covered: list[Optimizer] = []
        """Inner optimizers whose state is in the state_dict() of an attached object."""
        self._attached = attached
        self._added: dict[str, Optimizer] = {}
        self._pairs: list[_Pair] = []
        for name, optimizer in list(attached.optimizers.items()):
            self._unwrap(name, optimizer)
        for name, thing in list(attached.stateful.items()):
            self.covered += getattr(thing, "covered_optimizers", ())
            is_reference = isinstance(thing, LRScheduler | ReduceLROnPlateau)
            if not is_reference and name.partition(".")[0] not in _REFERRING:
                self._inspect(name, thing)

    @property
    def has_wrappers(self) -> bool:
        return bool(self._pairs)

    def every(self) -> Iterator[Optimizer]:
        """All optimizers that may step without a loss of protection."""
        yield from self._attached.optimizers.values()
        yield from self.covered
        yield from self._attached.wrappers.values()

    @contextmanager
    def leaving_out(self, saved: Container[str]) -> Iterator[None]:
        """During a load, detach inner optimizers that the version does not contain.

        The version is of a script without the wrapper, or of an older ftrun.
        """
        missing = {name: one for name, one in self._added.items() if name not in saved}
        for name in missing:
            _log.warning("not bitwise: the version to restore has no state of %s", name)
            del self._attached.optimizers[name]
        try:
            yield
        finally:
            self._attached.optimizers.update(missing)

    def share_again(self) -> None:
        for pair in self._pairs:
            for at, to in pair.shared_groups:
                pair.inner.param_groups[to] = pair.outer.param_groups[at]
            if pair.shares_list and pair.outer.param_groups is not pair.inner.param_groups:
                pair.inner.param_groups = pair.outer.param_groups
            if pair.shares_state and pair.outer.state is not pair.inner.state:
                pair.outer.state = pair.inner.state

    # --- details -----------------------------------------------------------------------------

    def _unwrap(self, name: str, outer: Optimizer) -> None:
        if getattr(outer, "_overlap_with_ddp", False):
            raise UsageError(
                f"{name} is a {type(outer).__name__} with overlap_with_ddp=True: it steps inside "
                "DDP's hooks, where its state cannot be captured. Leave overlap_with_ddp out"
            )
        found = list(_optimizers_in(outer))
        states = [inner.state for _, inner in found]
        if found and (not hasattr(outer, "state") or any(outer.state is one for one in states)):
            # The wrapper has no separate state, such as Accelerate's wrapper.
            del self._attached.optimizers[name]
            free = f"{name}.wrapper"
            while free in self._attached.wrappers:
                free += ".wrapper"
            self._attached.wrappers[free] = outer
        for attribute, inner in found:
            if not self._is_known(inner):
                is_alone = name not in self._attached.optimizers and len(found) == 1
                self._add(name if is_alone else f"{name}.{attribute}", inner)
            self._pair(outer, inner)

    def _inspect(self, name: str, thing: Any) -> None:
        found = [(a, o) for a, o in _optimizers_in(thing) if not self._is_known(o)]
        saved = thing.state_dict() if found else None
        for attribute, inner in found:
            if _holds_groups_of(inner, saved):
                self.covered.append(inner)
            else:
                self._add(f"{name}.{attribute}", inner)
            self._pair(thing, inner)

    def _add(self, name: str, inner: Optimizer) -> None:
        self._attached.optimizers[name] = self._added[name] = inner
        self._unwrap(name, inner)

    def _is_known(self, inner: Optimizer) -> bool:
        return any(inner is one for one in self.every())

    def _pair(self, outer: Any, inner: Optimizer) -> None:
        groups = getattr(outer, "param_groups", None) or []
        places = {id(group): at for at, group in enumerate(groups)}
        shared = tuple(
            (places[id(group)], at)
            for at, group in enumerate(inner.param_groups)
            if id(group) in places
        )
        shares_list = groups is inner.param_groups
        shares_state = getattr(outer, "state", None) is inner.state
        if shared or shares_list or shares_state:
            self._pairs.append(_Pair(outer, inner, shares_list, shared, shares_state))


def _optimizers_in(thing: object) -> Iterator[tuple[str, Optimizer]]:
    for name, value in list(getattr(thing, "__dict__", {}).items()):
        if isinstance(value, Optimizer):
            yield name, value
        elif isinstance(value, list | tuple | Mapping):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            yield from ((f"{name}.{k}", v) for k, v in items if isinstance(v, Optimizer))


def _holds_groups_of(optimizer: Optimizer, saved: object, depth: int = 0) -> bool:
    """Whether a state_dict() contains this optimizer's, at any depth up to `_MAX_DEPTH`."""
    if isinstance(saved, Mapping):
        if "state" in saved and "param_groups" in saved:
            sizes = [len(group["params"]) for group in saved["param_groups"]]
            return sizes == [len(group["params"]) for group in optimizer.param_groups]
        saved = list(saved.values())
    if depth > _MAX_DEPTH or not isinstance(saved, list | tuple):
        return False
    return any(_holds_groups_of(optimizer, one, depth + 1) for one in saved)


def tensors_outside_state(optimizer: Optimizer) -> list[str]:
    """Attributes that hold tensors of a parameter's shape: state that no snapshot contains.

    Buckets of ZeroRedundancyOptimizer are not such attributes: they are memory of parameters.
    """
    groups = getattr(optimizer, "param_groups", None) or []
    parameters = [p for group in groups for p in group["params"]]
    shapes = {p.shape for p in parameters if p.numel() > 1}
    held = _tensors_in(list(getattr(optimizer, "state", {}).values()))
    known = {_address(tensor) for tensor in (*parameters, *held)}
    return [
        name
        for name, value in vars(optimizer).items()
        if name not in {"state", "param_groups", "defaults"}
        and any(t.shape in shapes and _address(t) not in known for t in _tensors_in(value))
    ]


def _address(tensor: torch.Tensor) -> int:
    """Address of the tensor's memory; for a sparse tensor, which has several, its id."""
    return tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)


def _tensors_in(value: object, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth <= _MAX_DEPTH and isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(one, depth + 1)


class OptimizerWatch:
    """Compares the optimizers that step with those that are attached."""

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
                "optimizer %s updates %d parameters that are not attached: a restart does not "
                "restore them. If the training needs them, pass their model and this optimizer to "
                "attach()",
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
