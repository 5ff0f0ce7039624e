"""What the script has attached, sorted by how it is captured and put back.

Runs in:  worker.
Takes in: the arguments of `ftrun.attach`.
Gives:    an `Attached`: modules, optimizers, objects with a state_dict, tensors, dicts and
          generators, each under the name that its part of a snapshot carries.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from ftrun.errors import UsageError

if TYPE_CHECKING:
    from ftrun.worker.declared_layout import Declared


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state and takes it back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> object: ...


@dataclass
class Attached:
    """Everything that is part of a snapshot, by name."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    stateful: dict[str, Stateful] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor | None] = field(default_factory=dict)
    dicts: dict[str, MutableMapping[Any, Any]] = field(default_factory=dict)
    generators: dict[str, torch.Generator] = field(default_factory=dict)
    layout: "Declared | None" = None
    """How ranks share plain tensors and data, where the script says so."""
    casts: bool = False
    """What was saved in another floating dtype is rounded to the one that is here."""

    def add(self, name: str, thing: object) -> None:
        """Sort one object in.

        Raises:
            UsageError: it has no state that ftrun could take.
        """
        if isinstance(thing, nn.Module):
            self.modules[name] = thing
        elif isinstance(thing, torch.optim.Optimizer):
            self.optimizers[name] = thing
        elif isinstance(thing, torch.Generator):
            self.generators[name] = thing
        elif isinstance(thing, torch.Tensor):
            self.tensors[name] = thing
        elif isinstance(thing, np.ndarray):
            self.tensors[name] = torch.from_numpy(thing)  # shares the array's memory
        elif isinstance(thing, Stateful):
            self.stateful[name] = thing
        elif isinstance(thing, MutableMapping):
            self.dicts[name] = thing
        else:
            raise UsageError(
                f"attach({name}=...) was given a {type(thing).__name__}: it needs state_dict() and "
                "load_state_dict(), or to be a tensor, a dict or a torch.Generator"
            )


def by_name(argument: str, given: object) -> dict[str, Any]:
    """One object, or a dict of them, as `{full name: object}`; empty for None."""
    if given is None:
        return {}
    if isinstance(given, Mapping) and not isinstance(given, Stateful):
        return {f"{argument}.{name}": thing for name, thing in given.items()}
    return {argument: given}


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor under its key in the dict that holds it, so that a change of it is seen."""

    holder: dict[str, Any]
    key: str
    name: str
    tensor: torch.Tensor | None

    @property
    def is_current(self) -> bool:
        return self.holder.get(self.key) is self.tensor


def held_by(module: nn.Module, prefix: str) -> Iterator[Held]:
    """Parameters and persistent buffers under their plain names, tied ones once."""
    seen: set[int] = set()
    for path, part in named_parts(module, prefix):
        for holder, skipped in (
            (part._parameters, frozenset()),
            (part._buffers, part._non_persistent_buffers_set),
        ):
            for key, tensor in holder.items():
                if key not in skipped and (tensor is None or id(tensor) not in seen):
                    seen.add(id(tensor))
                    yield Held(holder, key, f"{path}.{key}", tensor)


def every_name(module: nn.Module, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """What `held_by` gives, with each of the names that a tied tensor has in `state_dict()`."""
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and key not in module._non_persistent_buffers_set:
            yield f"{path}.{key}", tensor
    inner = wrapped_key(module)
    for key, child in module._modules.items():
        if child is not None:
            yield from every_name(child, path if key == inner else f"{path}.{key}")


def named_parts(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Every submodule once, with wrappers (DDP, torch.compile) left out of the names."""
    seen: set[int] = set()
    waiting = [(path, module)]
    while waiting:
        path, part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        inner = wrapped_key(part)
        waiting += [
            (path if key == inner else f"{path}.{key}", child)
            for key, child in reversed(part._modules.items())
            if child is not None
        ]


def wrapped_key(module: nn.Module) -> str | None:
    """Under which key a wrapper keeps the module it wraps."""
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return "module"
    return "_orig_mod" if "_orig_mod" in module._modules else None


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's own module behind DDP and torch.compile."""
    while (key := wrapped_key(module)) is not None:
        inner = module._modules[key]
        assert inner is not None
        module = inner
    return module
