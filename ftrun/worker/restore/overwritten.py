"""Detects what the script overwrites between a restore and its first step.

Runs in:  worker, training thread; created right after a restore.

Moving a module to a device is no change: the version counter stays, and the new memory is on
another device. This module keeps no reference to the tensors.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ftrun.errors import ValueNotStorable
from ftrun.snapshot.layout import CopyTiming
from ftrun.worker.state.module_state import content
from ftrun.worker.state.optimizer_state import into, is_identity, mapped
from ftrun.worker.state.state_tree import StateTree, TensorSource
from ftrun.worker.state.tensors import address_of, copyable, version_of

_SAMPLED = 16


@dataclass(frozen=True, slots=True)
class _Mark:
    original: "weakref.ref[torch.Tensor]"
    version: int
    address: int
    place: tuple[torch.device, torch.dtype]
    sample: torch.Tensor
    is_owned: bool


class RestoredMarks:
    """Identity and samples of the tensors after a restore."""

    def __init__(self, tree: StateTree) -> None:
        self._tree = tree
        self._marks = {
            source.name: _Mark(
                weakref.ref(original),
                version_of(original),
                address_of(original),
                _place(original),
                _sample(source.tensor),
                source.when is CopyTiming.LAZY,
            )
            for source, original in self._now()
        }

    def compare(self, *, owned_only: bool = False) -> dict[str, bool]:
        """The tensors that were replaced or written to, and whether their values differ.

        `owned_only`: check only tensors that optimizers own, because a forward changes buffers.
        """
        now = {source.name: (source.tensor, original) for source, original in self._now()}
        found: dict[str, bool] = {}
        for name, mark in self._marks.items():
            if owned_only and not mark.is_owned:
                continue
            if name not in now:
                found[name] = True
                continue
            tensor, original = now[name]
            if _is_touched(mark, original):
                found[name] = not torch.equal(_sample(tensor).cpu(), mark.sample.cpu())
        return found

    def mostly_overwritten(self) -> list[str]:
        """Names of changed parameters, and of changed optimizer state, if at least half changed.

        The two are counted separately, because a script may load only one of them.
        """
        changed = [n for n, is_other in self.compare(owned_only=True).items() if is_other]
        parameters = set(self._tree.persistent().names.values())
        owned = [name for name, mark in self._marks.items() if mark.is_owned]
        found = []
        for is_parameter in (True, False):
            these = [name for name in changed if (name in parameters) == is_parameter]
            all_of_them = sum((name in parameters) == is_parameter for name in owned)
            if 2 * len(these) >= all_of_them:
                found += these
        return found

    def _now(self) -> "zip[tuple[TensorSource, torch.Tensor]]":
        persistent = self._tree.persistent()
        return zip(persistent.sources, persistent.originals, strict=True)


class RestoredSettings:
    """Flags of modules and tensors, and values of parameter groups, after a restore."""

    def __init__(self, tree: StateTree) -> None:
        self._tree = tree
        self._learned = {name: tensor.requires_grad for name, tensor in self._leaves()}
        self._training = self._present_training()
        self._groups = {
            (name, at): {
                key: mapped(value, _copied)
                for key, value in group.items()
                if key != "params" and not is_identity(value)
            }
            for name, at, group in self._present_groups()
        }

    def put_back(self) -> list[str]:
        found = []
        for name, tensor in self._leaves():
            was = self._learned.get(name, tensor.requires_grad)
            if was != tensor.requires_grad:
                tensor.requires_grad_(was)
                found.append(f"{name}.requires_grad")
        training = self._present_training()
        other = {path for path, flag in training.items() if self._training.get(path, flag) != flag}
        for path, part in self._tree.persistent().submodules:
            if path in other:
                part.training = self._training[path]
        found += [f"{path}.training" for path in training if path in other]
        for name, at, group in self._present_groups():
            for key, value in self._groups.get((name, at), {}).items():
                if key not in group or _differs(group[key], value):
                    group[key] = into(group.get(key), value)
                    found.append(f"{name}.param_groups[{at}].{key}")
        return found

    def _leaves(self) -> Iterator[tuple[str, torch.Tensor]]:
        persistent = self._tree.persistent()
        yield from persistent.learned
        yield from persistent.others

    def _present_training(self) -> dict[str, bool]:
        # A wrapper and its wrapped module have the same path; the flag of the wrapped module
        # counts.
        return {path: part.training for path, part in self._tree.persistent().submodules}

    def _present_groups(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        for name, optimizer in self._tree.attached.optimizers.items():
            for at, group in enumerate(optimizer.param_groups):
                yield name, at, group


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _differs(present: Any, restored: Any) -> bool:
    try:
        return content(present) != content(restored)
    except ValueNotStorable:
        return present is not restored


def _is_touched(mark: _Mark, now: torch.Tensor) -> bool:
    if mark.original() is not now or version_of(now) != mark.version:
        return True
    return address_of(now) != mark.address and _place(now) == mark.place


def _place(tensor: torch.Tensor) -> tuple[torch.device, torch.dtype]:
    return tensor.device, tensor.dtype


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a few elements on the same device, which does not synchronize with the device."""
    flat = copyable(tensor.detach()).reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED)].clone()
