"""The state of all that is attached, as named tensors and one tree of plain values.

Runs in:  worker, training thread, at each step boundary.
Takes in: an `Attached`.
Gives:    a `State`: the sources that are owned by an optimizer (lazy), those that are not
          (boundary), and the packed plain values.

Names carry no trace of DDP or torch.compile. Walking the modules costs milliseconds, so the
walk's result is kept and only checked at a boundary: same objects in the same dicts, at the
same addresses. Objects with a state_dict are asked each time; what they give is small.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

from ftrun.errors import StateDictFailed, UsageError, ValueNotStorable
from ftrun.snapshot.boxes import Part
from ftrun.snapshot.layout import Entry, When
from ftrun.snapshot.plain import TensorRef, encode
from ftrun.worker import rng
from ftrun.worker.attached import (
    SESSION_STATE,
    Attached,
    Held,
    every_name,
    held_by,
    named_parts,
)
from ftrun.worker.parts import part_of
from ftrun.worker.tensors import described, is_sharded, kind_of, local_tensor


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor to copy: detached, and local to this rank; `part` says of which one it is a part."""

    name: str
    tensor: torch.Tensor
    when: When
    part: Part | None = None

    @property
    def entry(self) -> Entry:
        dtype, shape = described(self.tensor)
        return Entry(self.name, dtype, shape, self.when, part=self.part)


def source_of(name: str, tensor: torch.Tensor, when: When) -> Source:
    """The source of a tensor, plain or sharded.

    Raises:
        ValueNotStorable: it has no bytes that could be copied.
    """
    local = local_tensor(tensor, name)
    return Source(name, local, when, part_of(tensor, tuple(local.shape)))


@dataclass(frozen=True)
class Lasting:
    """Sources that stay the same objects from step to step; one that changes makes a new one."""

    sources: tuple[Source, ...]
    originals: tuple[torch.Tensor, ...]
    addresses: list[int]
    held: tuple[Held, ...]
    num_held: int
    parameters: list[torch.Tensor]
    state_values: list[object]
    optimizer_state: bytes
    modules: bytes
    names: dict[int, str]

    @cached_property
    def learned(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """Parameters, without buffers."""
        return tuple((h.name, h.tensor) for h in self.held if isinstance(h.tensor, nn.Parameter))

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(source.entry for source in self.sources)


@dataclass(frozen=True, slots=True)
class State:
    """All there is to copy at one boundary."""

    lasting: Lasting
    fresh: tuple[Source, ...]
    plain: bytes


class StateTree:
    """Collects the state at each boundary."""

    def __init__(self, attached: Attached) -> None:
        self.attached = attached
        self._lasting: Lasting | None = None

    def collect(self, extra: dict[str, Any]) -> State:
        """The state as it is now.

        Args:
            extra: plain values of ftrun's own: counters, loader positions.

        Raises:
            ValueNotStorable: names the key of a value that is neither tensor nor plain.
        """
        lasting = self.lasting()
        fresh = _References(When.BOUNDARY)
        attached = self.attached
        parts = {
            "groups": {name: groups_of(o, lasting) for name, o in attached.optimizers.items()},
            "stateful": attached.skip.without(dict(_states(attached))),
            "dicts": attached.skip.without(_dicts(attached)),
            "extra_state": dict(_extra_states(attached)),
            "generators": {n: rng.generator_state(g) for n, g in attached.generators.items()},
            "frozen": [name for name, tensor in lasting.learned if not tensor.requires_grad],
            "rng": rng.take_all(),
            **extra,
        }
        if attached.layout is not None:
            parts["layout"] = attached.layout.saved
        # Part by part, so that the path in an error starts at the name given to attach.
        packed = {key: encode(part, refer=fresh) for key, part in parts.items()}
        packed["optimizer_state"] = lasting.optimizer_state
        packed["modules"] = lasting.modules
        return State(lasting, tuple(fresh.sources), encode(packed))

    def lasting(self) -> Lasting:
        """The walk's result: the last one while it still holds."""
        if self._lasting is None or not self._holds(self._lasting):
            self._lasting = self._walk()
        return self._lasting

    def _holds(self, lasting: Lasting) -> bool:
        return (
            all(h.is_current for h in lasting.held)
            and lasting.num_held == self._num_held()
            and _same(lasting.parameters, self._parameters())
            and _same(lasting.state_values, self._state_values())
            and lasting.addresses == [address_of(t) for t in lasting.originals]
        )

    def _walk(self) -> Lasting:
        self._reshard()
        held = tuple(self._held())
        names: dict[int, str] = {}
        found: dict[str, torch.Tensor] = {}
        for one in held:
            if one.tensor is not None and id(one.tensor) not in names:
                names[id(one.tensor)] = one.name
                found[one.name] = one.tensor
        for name, parameter in self._nameless(names):
            names[id(parameter)] = name
            found[name] = parameter
        owned = {id(parameter) for parameter in self._parameters()}
        sources = [
            source_of(name, t, When.LAZY if id(t) in owned else When.BOUNDARY)
            for name, t in found.items()
        ]
        originals = list(found.values())
        references = _References(When.LAZY)
        state = {name: _state_of(o, names) for name, o in self.attached.optimizers.items()}
        packed = encode(state, refer=references)
        originals += references.originals
        return Lasting(
            sources=(*sources, *references.sources),
            originals=tuple(originals),
            addresses=[address_of(tensor) for tensor in originals],
            held=held,
            num_held=self._num_held(),
            parameters=self._parameters(),
            state_values=self._state_values(),
            optimizer_state=packed,
            modules=encode({"names": list(self.attached.modules), "tied": self._tied(names)}),
            names=names,
        )

    def check_skip(self) -> None:
        """Check the patterns of `attach(skip=...)`, after `collect`.

        Raises:
            UsageError: one matches nothing, or a tensor that an optimizer owns.
        """
        skip = self.attached.skip
        owned = {id(parameter) for parameter in self._parameters()}
        for held in self._every_held():
            if id(held.tensor) in owned and skip(held.name):
                raise UsageError(
                    f"attach(skip=...) matches {held.name}, which an attached optimizer updates. "
                    "Only what no optimizer owns can be left out of a snapshot"
                )
        if skip.unmatched:
            raise UsageError(
                f"attach(skip=...): {', '.join(skip.unmatched)} matches nothing. Patterns match "
                "the names of tensors and keys in a snapshot, such as model.rope.cos, "
                "progress.history or model.*.cache"
            )

    def _held(self) -> Iterator[Held]:
        skip = self.attached.skip
        if not skip:
            yield from self._every_held()
            return
        owned = {id(parameter) for parameter in self._parameters()}
        for held in self._every_held():
            if id(held.tensor) in owned or not skip(held.name):
                yield held

    def _every_held(self) -> Iterator[Held]:
        for name, module in self.attached.modules.items():
            yield from held_by(module, name)
        holder = self.attached.tensors
        for name, tensor in holder.items():
            yield Held(holder, name, name, tensor)

    def _tied(self, names: dict[int, str]) -> dict[str, str]:
        """Other names of tensors, with the one under which each is saved; for exports."""
        every = (
            (name, names[id(tensor)])
            for path, module in self.attached.modules.items()
            for name, tensor in every_name(module, path)
            if id(tensor) in names
        )
        return {name: saved for name, saved in every if name != saved}

    def _nameless(self, names: dict[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, optimizer in self.attached.optimizers.items():
            for at, group in enumerate(optimizer.param_groups):
                for index, parameter in enumerate(group["params"]):
                    if id(parameter) not in names:
                        yield f"{name}.params[{at}][{index}]", parameter

    def _num_held(self) -> int:
        return sum(
            len(part._modules) + len(part._parameters) + len(part._buffers)
            for module in self.attached.modules.values()
            for part in module.modules()
        )

    def _parameters(self) -> list[torch.Tensor]:
        return [
            parameter
            for optimizer in self.attached.optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    def _state_values(self) -> list[object]:
        # Numbers among them are other objects after each step, so an optimizer that keeps some is
        # walked each time; torch's own keep tensors only.
        return [
            value
            for optimizer in self.attached.optimizers.values()
            for state in optimizer.state.values()
            for value in state.values()
        ]

    def _reshard(self) -> None:
        # FSDP2 hangs whole parameters into the module between forward and backward, and leaves
        # the root's there after a forward without gradients.
        for module in self.attached.modules.values():
            for _, part in named_parts(module, ""):
                if callable(reshard := getattr(part, "reshard", None)):
                    reshard()


class _References:
    """Puts tensors aside while a tree is packed, and leaves references in their place."""

    def __init__(self, when: When) -> None:
        self.sources: list[Source] = []
        self.originals: list[torch.Tensor] = []
        self._when = when

    def __call__(self, value: object, path: str) -> TensorRef | None:
        if isinstance(value, torch.Tensor):
            sharded = is_sharded(value)
            if sharded and self._when is When.BOUNDARY:
                raise ValueNotStorable(key=path, kind="DTensor outside of a module or optimizer")
            self._add(path, value)
            if self._when is When.BOUNDARY:
                return TensorRef(path, kind_of(value))
            return TensorRef(path, "sharded" if sharded else "tensor")
        if isinstance(value, np.ndarray):
            self._add(path, _as_tensor(value, path))
            return TensorRef(path, "array")
        return None

    def _add(self, path: str, tensor: torch.Tensor) -> None:
        self.sources.append(source_of(path, tensor, self._when))
        self.originals.append(tensor)


def groups_of(optimizer: torch.optim.Optimizer, lasting: Lasting) -> list[dict[str, Any]]:
    """The parameter groups, with names instead of parameters."""
    return [
        {**group, "params": [lasting.names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def _state_of(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Any]:
    # A key that is no parameter belongs to the optimizer as a whole and stays as it is.
    return {"state": {names.get(id(k), k): state for k, state in optimizer.state.items()}}


def _states(attached: Attached) -> Iterator[tuple[str, object]]:
    for name, thing in attached.stateful.items():
        yield name, given_by(thing.state_dict, name)


def _dicts(attached: Attached) -> dict[str, Any]:
    # An empty session.state is left out, so that a snapshot without one is as in 0.2.
    return {**attached.dicts, **({SESSION_STATE: attached.state} if attached.state else {})}


def _extra_states(attached: Attached) -> Iterator[tuple[str, object]]:
    for name, module in attached.modules.items():
        for path, part in named_parts(module, name):
            if type(part).get_extra_state is not nn.Module.get_extra_state:
                yield path, given_by(part.get_extra_state, path)


def given_by(method: Callable[[], Any], name: str) -> Any:
    """What a method of an attached object gives.

    Args:
        method: its `state_dict` or the like.
        name: under which the object is attached.

    Raises:
        StateDictFailed: it raised; its own exception is the cause.
    """
    try:
        return method()
    except Exception as error:
        raise StateDictFailed(name=name, method=method.__qualname__, error=error) from error


def _as_tensor(array: np.ndarray, path: str) -> torch.Tensor:
    try:
        return torch.from_numpy(
            np.ascontiguousarray(array) if array.flags.writeable else array.copy()
        )
    except TypeError as error:
        raise ValueNotStorable(key=path, kind=f"numpy array of {array.dtype}") from error


def address_of(tensor: torch.Tensor) -> int:
    if is_sharded(tensor):
        tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return tensor.data_ptr()


def _same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(map(is_, before, now))
