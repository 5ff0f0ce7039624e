"""The attached objects, sorted by how they are captured and restored, and their declared layout.

Runs in:  worker; also under plain python, on any system.

DTensors need no rules. A mesh without a file declares which ranks see the same data, because
DTensors do not contain that.
"""

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch import nn

from ftrun.config.layout_file import layout_text
from ftrun.errors import UsageError
from ftrun.sharding.rule_parser import read_carried, read_rules
from ftrun.sharding.rules import ShardingRules
from ftrun.snapshot.plain_values import join
from ftrun.worker.state import determinism as rng
from ftrun.worker.state.module_state import named_parts
from ftrun.worker.state.providers import StateProvider, is_provider


class Stateful(Protocol):
    """An object with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> object: ...


def is_stateful(thing: object) -> TypeGuard[Stateful]:
    """Also for a method from `__getattr__`, which isinstance does not see from Python 3.12 on."""
    return all(callable(getattr(thing, n, None)) for n in ("state_dict", "load_state_dict"))


# --- the state of a GradScaler on a device -------------------------------------------------------


def scaler_state(thing: Any) -> dict[str, Any]:
    """Like `state_dict()`, with tensors in place of the values that are on a device.

    `state_dict()` would make the training thread wait at each boundary until the device gets there.
    """
    kind = torch.amp.GradScaler
    if type(thing).state_dict is kind.state_dict and thing.is_enabled():
        scale, tracker = thing._scale, thing._growth_tracker
        if scale is not None and not scale.is_cpu:
            return {
                "scale": scale,
                "growth_factor": thing.get_growth_factor(),
                "backoff_factor": thing.get_backoff_factor(),
                "growth_interval": thing.get_growth_interval(),
                "_growth_tracker": tracker,
            }
    found: dict[str, Any] = thing.state_dict()
    return found


def loadable(thing: Any, saved: Any) -> Any:
    """The saved state as the `load_state_dict()` of this object takes it."""
    if not isinstance(thing, torch.amp.GradScaler) or not isinstance(saved, dict):
        return saved
    return {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in saved.items()}


# --- what the script leaves out ------------------------------------------------------------------

SESSION_STATE = "session.state"
"""The name of `Session.state` in snapshots; no argument of attach can have it."""


class Skip:
    """Names that the script leaves out of its snapshots: `attach(skip=[...])`.

    They are exact names, or patterns in which `*` matches any text, dots included.
    """

    def __init__(self, patterns: str | Iterable[str] = ()) -> None:
        given = [patterns] if isinstance(patterns, str) else patterns
        self._patterns = {one: _matcher_of(one) for one in given}
        self._matched: set[str] = set()
        self.has_items = any("[" in one or "{" in one for one in self._patterns)

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def __call__(self, name: str) -> bool:
        found = [pattern for pattern, matches in self._patterns.items() if matches(name)]
        self._matched.update(found)
        return bool(found)

    @property
    def unmatched(self) -> list[str]:
        return [pattern for pattern in self._patterns if pattern not in self._matched]

    def completed(self, saved: Any, present: Any, path: str) -> Any:
        """The saved tree, with the skipped values taken from the present tree."""
        if isinstance(saved, Mapping) and isinstance(present, Mapping):
            found = copy.copy(saved)
            for key, value in present.items():
                name = join(path, key)
                if self(name):
                    found[key] = value  # type: ignore[index]
                elif key in found:
                    found[key] = self.completed(found[key], value, name)  # type: ignore[index]
            return found
        if not (
            self.has_items and isinstance(saved, list | tuple) and type(present) is type(saved)
        ):
            return saved
        its = [*present, *[None] * len(saved)]
        return type(saved)(
            its[at] if self(name := f"{path}[{at}]") else self.completed(one, its[at], name)
            for at, one in enumerate(saved)
        )


class SkipWithin:
    """A `Skip` that never skips what a part of a snapshot needs: names that `needed` matches."""

    def __init__(self, skip: Skip, needed: str) -> None:
        self._skip = skip
        self._needed = re.compile(needed)
        self.has_items = skip.has_items

    def __call__(self, name: str) -> bool:
        return self._needed.fullmatch(name) is None and self._skip(name)


def _matcher_of(pattern: str) -> Callable[[str], object]:
    # A key such as notes[3] contains brackets, which in a pattern are a set of characters.
    literal = pattern.replace("[", "[[]")
    expressions = {re.escape(pattern), *map(translate, (pattern, literal))}
    return re.compile("|".join(f"(?:{one})" for one in sorted(expressions))).fullmatch


@dataclass
class AttachedState:
    """All objects that are part of a snapshot, by name."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    wrappers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    """Optimizers without a separate state; the inner optimizer is attached in their place."""
    stateful: dict[str, Stateful] = field(default_factory=dict)
    providers: dict[str, StateProvider] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor | None] = field(default_factory=dict)
    dicts: dict[str, MutableMapping[Any, Any]] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    """`Session.state`."""
    skip: Skip = field(default_factory=Skip)
    layout: ShardingRules | None = None
    """The sharding of plain tensors and data over ranks, if the script declares it."""
    casts: bool = False
    """A value saved in another floating dtype is rounded to the dtype of its tensor."""
    is_strict: bool = False
    """A restore into another layout is refused if old ranks disagree on what to restore."""

    def add(self, name: str, thing: object) -> None:
        """Add one object to the dict of its kind."""
        if isinstance(thing, nn.Module):
            self.modules[name] = thing
        elif isinstance(thing, torch.optim.Optimizer):
            self.optimizers[name] = thing
        elif rng.is_generator(thing):
            self.generators[name] = thing
        elif isinstance(thing, torch.Tensor | np.ndarray):
            # A tensor shares the memory of an array.
            self.tensors[name] = torch.from_numpy(thing) if isinstance(thing, np.ndarray) else thing
        elif is_provider(thing):
            self.providers[name] = thing
        elif is_stateful(thing):
            self.stateful[name] = thing
        elif isinstance(thing, MutableMapping):
            self.dicts[name] = thing
        elif isinstance(thing, list | tuple):
            for index, one in enumerate(thing):
                self.add(f"{name}.{index}", one)
        else:
            raise UsageError(
                f"attach({name}=...) was given a {type(thing).__name__}, which has no state that a "
                "snapshot can hold. Give an object with state_dict() and load_state_dict(), an "
                "ftrun.StateProvider, a module, an optimizer, a tensor, an array, a dict, a random "
                "generator, or a list of these. Put single values into session.state"
            )


def by_name(argument: str, given: object) -> dict[str, Any]:
    """One object, or several in a dict or a list, as `{full name: object}`; empty for None."""
    if given is None:
        return {}
    if isinstance(given, Mapping) and not is_stateful(given):
        return {f"{argument}.{name}": thing for name, thing in given.items()}
    if isinstance(given, list | tuple):
        return {f"{argument}.{index}": thing for index, thing in enumerate(given)}
    return {argument: given}


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor under its key in the dict that holds it, so that its replacement is detected."""

    holder: dict[str, Any]
    key: str
    name: str
    tensor: torch.Tensor | None
    is_buffer: bool = False

    @property
    def is_current(self) -> bool:
        return self.holder.get(self.key) is self.tensor


def held_by(module: nn.Module, prefix: str) -> Iterator[HeldTensor]:
    """Parameters and persistent buffers under their plain names; tied tensors once."""
    seen: set[int] = set()
    for path, part in named_parts(module, prefix):
        for holder, skipped, is_buffer in (
            (part._parameters, frozenset(), False),
            (part._buffers, part._non_persistent_buffers_set, True),
        ):
            for key, tensor in holder.items():
                if key not in skipped and (tensor is None or id(tensor) not in seen):
                    seen.add(id(tensor))
                    yield HeldTensor(holder, key, f"{path}.{key}", tensor, is_buffer)


def is_layout_of(layout: ShardingRules, saved: Mapping[str, Any] | None) -> bool:
    """Whether a snapshot was saved with this layout; also if it was saved without any."""
    return saved is None or read_carried(saved).layout == layout.layout


def declared(
    path: str | Path | None, mesh: Mapping[str, int] | None, world_size: int | None
) -> ShardingRules:
    """Read the rules of this run.

    Args:
        path: the file of rules, or a packaged layout (`config.layout_file`); None: there are no
            rules, and `mesh` has all axes.
        mesh: sizes of axes that differ from those in the file.
        world_size: world size of this run, to which the batch axis is resized; None: not known.
    """
    rules = read_rules(_text_of(path, mesh or {}), source=str(path or "mesh"))
    if unknown := [name for name in mesh or {} if name not in rules.mesh.names]:
        raise UsageError(f"mesh has {unknown[0]}, and {path} has {rules.mesh}")
    fitted = rules.mesh.with_sizes(mesh or {})
    if world_size is not None and fitted.size != world_size:
        resized = fitted.resized(world_size)
        if resized is None:
            raise UsageError(
                f"{rules.source} has a mesh of {fitted.size} ranks ({fitted}), but the run has "
                f"{world_size}: give the sizes of the axes, such as mesh={{'tp': 2}}"
            )
        fitted = resized
    return rules.on(fitted)


def _text_of(path: str | Path | None, mesh: Mapping[str, int]) -> str:
    if path is not None:
        try:
            return layout_text(str(path))
        except OSError as error:
            raise UsageError(f"layout={str(path)!r}: {error.strerror}") from error
    if any(size < 1 for size in mesh.values()):
        raise UsageError(f"mesh={dict(mesh)}: the size of an axis must be at least 1")
    batches = [name for name in mesh if name.startswith("dp")]
    return json.dumps({"mesh": dict(mesh), "batches": batches})
