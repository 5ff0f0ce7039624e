"""Selects the state that is exported, under the names of the script's own state dicts. Pure.

A tensor of a module has the name that it has in the module's own `state_dict()`, with the name of
the attached module as a prefix if there are several. A tied tensor is saved once in a snapshot; its
other names are in the plain values.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from ftrun.cli.screen.text import listed
from ftrun.errors import CheckpointError
from ftrun.snapshot.plain_values import TensorRef

Plain = Mapping[str, Any]

_SHOWN = 10
_EXTRA_STATE = "_extra_state"
"""torch's own key for what `get_extra_state` gives."""


@dataclass
class NameFilter:
    """Selects names that match a shell pattern; all names if there is no pattern."""

    patterns: Sequence[str] = ()
    _offered: list[str] = field(default_factory=list)
    _fitting: set[str] = field(default_factory=set)

    def takes(self, name: str) -> bool:
        self._offered.append(name)
        fitting = [one for one in self.patterns if fnmatchcase(name, one)]
        self._fitting.update(fitting)
        return bool(fitting) or not self.patterns

    def check_all_used(self) -> None:
        """Raises a CheckpointError with the first pattern that has matched nothing."""
        for one in self.patterns:
            if one not in self._fitting:
                shown = listed(self._offered, _SHOWN)
                raise CheckpointError(f"--only {one!r} matches nothing; existing names: {shown}")


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """One optimizer.

    Args:
        groups: with names in place of parameters.
        state: of each parameter, by name; other keys are the optimizer's own.
        own: names of the parameters in their module, in the order of the groups.
    """

    groups: Sequence[Plain]
    state: Mapping[Any, Any]
    own: Mapping[str, str]

    def tree(self, *, by_index: bool) -> dict[str, Any]:
        """Returns a state dict; see `ExportOutline.tree`."""
        keys: dict[Any, Any] = dict(self.own)
        if by_index:
            keys = {name: at for at, name in enumerate(self.own)}
        return {
            "state": {keys.get(key, key): values for key, values in self.state.items()},
            "param_groups": [
                {**group, "params": [keys[name] for name in group["params"]]}
                for group in self.groups
            ],
        }


@dataclass
class ExportOutline:
    """The exported state, by the names under which it was attached.

    Args:
        modules: of each module, its own names and the names of the tensors in the snapshot.
        extra_state: of each module, the results of `get_extra_state`, by torch's own keys.
        objects: trees of all other objects that have a state.
        session: step and epoch.
    """

    modules: dict[str, dict[str, str]] = field(default_factory=dict)
    extra_state: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: list[str] = field(default_factory=list)
    optimizers: dict[str, SavedOptimizer] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    session: Plain = field(default_factory=dict)

    @property
    def others(self) -> list[str]:
        """Names of all state that is not a tensor of a module."""
        extra = [f"{name}.{key}" for name, found in self.extra_state.items() for key in found]
        return [*extra, *self.tensors, *self.optimizers, *self.objects]

    def flat(self) -> tuple[dict[str, str], dict[str, str]]:
        """Returns names in the snapshot by exported name, and exported names by tied name.

        The names of a single module have no prefix.
        """
        is_one = len(self.modules) == 1
        every = [
            (f"{module}.{own}", own if is_one else f"{module}.{own}", saved)
            for module, names in self.modules.items()
            for own, saved in names.items()
        ]
        names: dict[str, str] = {}
        # A tensor was saved under its first name in the module.
        for _, name, saved in sorted(every, key=lambda one: one[0] != one[2]):
            names.setdefault(saved, name)
        tied = {name: names[saved] for _, name, saved in every if names[saved] != name}
        return {name: saved for saved, name in names.items()}, tied

    def tree(self, *, by_index: bool) -> dict[str, Any]:
        """Returns one state dict, with references in place of tensors.

        With `by_index`, parameters of optimizers have numbers, as in `Optimizer.load_state_dict`;
        else names, as in torch's functions for distributed checkpoints.
        """
        found: dict[str, Any] = {
            module: {own: TensorRef(saved) for own, saved in names.items()}
            for module, names in self.modules.items()
        }
        for module, extra in self.extra_state.items():
            found[module] = {**found.get(module, {}), **extra}
        found |= {name: TensorRef(name) for name in self.tensors}
        for name, optimizer in self.optimizers.items():
            found[name] = optimizer.tree(by_index=by_index)
        found |= self.objects
        if self.session:
            found["ftrun"] = dict(self.session)
        return found


def outline_of(
    parts: Plain,
    optimizer_states: Mapping[str, Mapping[Any, Any]],
    held: Sequence[str],
    choice: NameFilter,
) -> ExportOutline:
    """Builds the outline of a version.

    Args:
        parts: plain values of one rank: `modules`, `groups`, `stateful`, `dicts`, `extra_state`,
            `session`.
        optimizer_states: of each optimizer the state of every parameter, of all ranks together.
        held: names of all tensors without a reference.
    """
    modules, tied = _modules(parts, held)
    found = ExportOutline()
    _add_tensors(found, {**{name: name for name in held}, **tied}, modules, choice)
    for path, state in parts["extra_state"].items():
        module = _module_of(f"{path}.", modules) or path
        key = f"{path}.{_EXTRA_STATE}"[len(module) + 1 :]
        if choice.takes(f"{module}.{key}"):
            found.extra_state.setdefault(module, {})[key] = state
    for name, groups in parts["groups"].items():
        if choice.takes(name):
            own = _own_names(groups, modules)
            found.optimizers[name] = SavedOptimizer(groups, optimizer_states[name], own)
    for name, state in (*parts["stateful"].items(), *parts["dicts"].items()):
        if choice.takes(name):
            found.objects[name] = state
    if not choice.patterns:
        found.session = {k: v for k, v in parts["session"].items() if k in ("step", "epoch")}
    choice.check_all_used()
    return found


def _add_tensors(
    found: ExportOutline, every: Mapping[str, str], modules: Sequence[str], choice: NameFilter
) -> None:
    for name in sorted(every, key=natural):
        if choice.takes(name):
            module = _module_of(name, modules)
            if module is None:
                found.tensors.append(name)
            else:
                found.modules.setdefault(module, {})[name[len(module) + 1 :]] = every[name]


def replaced(tree: object, leaf: Callable[[object], object]) -> object:
    if isinstance(tree, Mapping):
        return {key: replaced(value, leaf) for key, value in tree.items()}
    if isinstance(tree, list | tuple | set | frozenset):
        return type(tree)(replaced(value, leaf) for value in tree)
    return leaf(tree)


def natural(name: str) -> tuple[list[tuple[int, str]], str]:
    """Returns a sort key: layer 2 precedes layer 10."""
    words = re.split(r"(\d+)", name)
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in words], name


def _modules(parts: Plain, held: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the names of the attached modules, and the other names of tied tensors."""
    if "modules" in parts:
        return parts["modules"]["names"], parts["modules"]["tied"]
    # An older format without modules: every name with a dot belongs to a module.
    first = (name.partition(".")[0] for name in held if "." in name)
    return [name for name in dict.fromkeys(first) if name not in parts["groups"]], {}


def _module_of(name: str, modules: Iterable[str]) -> str | None:
    inside = [module for module in modules if name.startswith(f"{module}.")]
    return max(inside, key=len, default=None)


def _own_names(groups: Sequence[Plain], modules: Sequence[str]) -> dict[str, str]:
    """Returns names of an optimizer's parameters, without the prefix if all are of one module."""
    names = [name for group in groups for name in group["params"]]
    inside = {_module_of(name, modules) for name in names}
    module = inside.pop() if len(inside) == 1 else None
    return {name: name if module is None else name[len(module) + 1 :] for name in names}
