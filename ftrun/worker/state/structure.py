"""Compares the structure of the attached objects with the saved one, and adapts it at a restore.

Runs in:  worker, training thread: at a walk of the state, and inside `attach`.

A restore registers and resizes buffers in existing modules, resizes attached tensors, adds
parameter groups, and gives uninitialized parameters their shape. Any other change that a script
makes after `attach` cannot be restored, because a restarted script has not made it yet.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ftrun.errors import ShapeChanged
from ftrun.snapshot.boxes import Shape
from ftrun.worker.state.tensors import (
    DTYPE_NAMES,
    DTYPES,
    is_castable,
    is_sharded,
    stride_for,
    uninitialized,
)
from ftrun.worker.state.unprotected import shown

if TYPE_CHECKING:
    from ftrun.worker.state.attached import AttachedState
    from ftrun.worker.state.state_tree import PersistentSources, StateTree

Described = Callable[[str], tuple[str, Shape] | None]
"""Returns the dtype and whole shape saved under a name; None if there is none."""

_log = logging.getLogger(__name__)


# --- what the script builds --------------------------------------------------------------------


@dataclass(frozen=True)
class Structure:
    """The result of a walk, reduced to the facts that a restore needs."""

    parameters: Mapping[str, str]
    """Names with dtype and shape; the latter is empty for an uninitialized parameter."""
    buffers: frozenset[str]
    modules: frozenset[str]
    groups: Mapping[str, list[frozenset[str]]]

    def lost_since(self, built: "Structure") -> list[str]:
        """Describe the changes that a restore cannot apply; one sentence each."""
        return [*self._parameters_since(built), *self._others_since(built)]

    def _parameters_since(self, built: "Structure") -> Iterator[str]:
        for name, now in self.parameters.items():
            then = built.parameters.get(name)
            if then is None:
                yield f"parameter {name} was added after attach"
            elif then and then != now:
                yield f"parameter {name} was {then} at attach and is {now} now"
        for name in built.parameters:
            if name not in self.parameters:
                yield f"parameter {name} was removed after attach"

    def _others_since(self, built: "Structure") -> Iterator[str]:
        for name in self.buffers:
            if name.rpartition(".")[0] not in built.modules:
                yield f"buffer {name} is in a module that was added after attach"
        for name in built.buffers - self.buffers:
            yield f"buffer {name} was removed after attach"
        for name, groups in built.groups.items():
            now = self.groups[name]
            if now[: len(groups)] != groups:
                yield f"the parameter groups of {name} are others than at attach"


def structure_of(persistent: "PersistentSources", attached: "AttachedState") -> Structure:
    described = {e.name: f"{e.dtype}{list(e.whole_shape)}" for e in persistent.entries}
    learned = {id(tensor) for tensor in persistent.parameters}
    learned.update(id(h.tensor) for h in persistent.held if isinstance(h.tensor, nn.Parameter))
    parameters = [name for key, name in persistent.names.items() if key in learned]
    return Structure(
        parameters={name: described.get(name, "") for name in parameters},
        buffers=frozenset(h.name for h in persistent.held if h.is_buffer),
        modules=frozenset(path for path, _ in persistent.submodules),
        groups={
            name: [
                frozenset(persistent.names[id(p)] for p in group["params"])
                for group in optimizer.param_groups
            ]
            for name, optimizer in attached.optimizers.items()
        },
    )


# --- adapt the objects that the script has built -----------------------------------------------


class _Saved(NamedTuple):
    """Dtype, shape and stride of a saved tensor."""

    dtype: str
    shape: Shape
    stride: tuple[int, ...]
    """Empty: row-major, or not known because an older version of ftrun saved it."""


def make_fit(saved: Mapping[str, Any], described: Described, tree: "StateTree") -> None:
    """Adapt buffers, attached tensors and uninitialized parameters to the saved ones.

    Dtypes, shapes and strides are adapted; the values are loaded later. Parameters of another shape
    stay unchanged: `reload` refuses them.
    """
    persistent = tree.persistent()
    for name, tensor in persistent.uninitialized:
        if (found := described(name)) is not None:
            with torch.no_grad():
                tensor.materialize(found[1])  # type: ignore[attr-defined]
    strides = saved.get("strides", {})

    def wanted(name: str) -> _Saved | None:
        found = described(name)
        return None if found is None else _Saved(*found, tuple(strides.get(name, ())))

    changed = [
        *_fit_buffers(saved, wanted, dict(persistent.submodules), casts=tree.attached.casts),
        *_fit_attached(wanted, tree.attached),
    ]
    if changed:
        _log.info("dtype, shape or strides were set to those of the snapshot: %s", shown(changed))


_Wanted = Callable[[str], _Saved | None]


def _fit_attached(wanted: _Wanted, attached: "AttachedState") -> Iterator[str]:
    for name, tensor in attached.tensors.items():
        found = wanted(name)
        if tensor is None or found is None or not _is_other(tensor, found, casts=attached.casts):
            continue
        if not is_sharded(tensor) and tensor.untyped_storage().resizable():
            tensor.data = _made(found, tensor.device)
            yield name


def _fit_buffers(
    saved: Mapping[str, Any], wanted: _Wanted, parts: Mapping[str, nn.Module], *, casts: bool
) -> Iterator[str]:
    for name in saved.get("buffers", ()):
        path, _, key = name.rpartition(".")
        part, found = parts.get(path), wanted(name)
        if part is not None and found is not None and _fit_buffer(part, key, found, casts=casts):
            yield name
    for name in saved.get("no_buffers", ()):
        path, _, key = name.rpartition(".")
        if path in parts and parts[path]._buffers.get(key) is not None:
            parts[path]._buffers[key] = None
            yield name


def _fit_buffer(part: nn.Module, key: str, found: _Saved, *, casts: bool) -> bool:
    present = part._buffers.get(key)
    was_left_out = present is not None and key in part._non_persistent_buffers_set
    if was_left_out:
        part._non_persistent_buffers_set.discard(key)
    if present is None and key not in part._parameters:
        part.__dict__.pop(key, None)  # an attribute would hide the buffer
        part._buffers[key] = _made(found, _device_of(part))
        part._non_persistent_buffers_set.discard(key)
        return True
    if present is None or is_sharded(present) or not _is_other(present, found, casts=casts):
        return was_left_out
    present.data = _made(found, present.device)
    return True


def _is_other(present: torch.Tensor, found: _Saved, *, casts: bool) -> bool:
    dtype, shape, stride = found
    if stride and present.stride() != stride:
        return True
    is_cast = casts and is_castable(DTYPES[dtype]) and is_castable(present.dtype)
    return tuple(present.shape) != tuple(shape) or (
        DTYPE_NAMES.get(present.dtype) != dtype and not is_cast
    )


def _made(found: _Saved, device: torch.device) -> torch.Tensor:
    shape = tuple(found.shape)
    stride = stride_for(shape, found.stride)
    return uninitialized(shape, DTYPES[found.dtype], device, stride)


def _device_of(part: nn.Module) -> torch.device:
    tensors = (t for t in (*part.parameters(), *part.buffers()))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def add_groups(saved: Mapping[str, list[dict[str, Any]]], tree: "StateTree") -> None:
    """Add the parameter groups that the script had added after `attach`."""
    present = {h.name: h.tensor for h in tree.persistent().held}
    for name, groups in saved.items():
        optimizer = tree.attached.optimizers.get(name)
        if optimizer is None:
            raise ShapeChanged(key=name, saved=f"{len(groups)} groups", present="nothing")
        for at in range(len(optimizer.param_groups), len(groups)):
            names = groups[at]["params"]
            if missing := [one for one in names if present.get(one) is None]:
                raise ShapeChanged(
                    key=f"{name}.param_groups[{at}]", saved=missing[0], present="nothing"
                )
            optimizer.add_param_group({"params": [present[one] for one in names]})
