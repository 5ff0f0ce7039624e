"""The state of all attached objects, as named tensors and one tree of plain values.

Runs in:  worker, training thread, at each step boundary.
Gives:    a `BoundaryState`: the sources that an optimizer owns (lazy copy), the other sources
          (boundary copy), and the packed plain values.

Names do not contain wrappers such as DDP or torch.compile. Walking the modules takes milliseconds.
The result is therefore cached, and a boundary only checks it: same objects in the same dicts, at
the same addresses. The state_dict of other objects is read each time, because it is small.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ftrun.errors import UsageError, ValueNotStorable
from ftrun.ids import Rank
from ftrun.sharding.rule_parser import carried
from ftrun.snapshot.boxes import TensorPart
from ftrun.snapshot.layout import DEVICE_PIECE_BYTES, PIECE_BYTES, CopyTiming, LayoutEntry
from ftrun.snapshot.plain_values import Skips, TensorRef, encode, encode_each, join
from ftrun.worker.state import determinism as rng
from ftrun.worker.state import module_state
from ftrun.worker.state.attached import (
    SESSION_STATE,
    AttachedState,
    HeldTensor,
    SkipWithin,
    held_by,
    scaler_state,
)
from ftrun.worker.state.module_state import every_name, given_by, named_parts
from ftrun.worker.state.optimizer_state import (
    GroupReader,
    own_keys,
    present_gradients,
    state_of,
    state_values,
)
from ftrun.worker.state.providers import (
    ProviderSizes,
    ProviderState,
    StateProvider,
    packed_sizes,
)
from ftrun.worker.state.structure import Structure, structure_of
from ftrun.worker.state.tensors import (
    address_of,
    described,
    is_sharded,
    is_view_of,
    kind_of,
    local_tensor,
    part_of,
    stride_of,
)

_GROUP_KEYS = r"[^\[\]]*(\[\d+\](\.params(\[\d+\])?)?)?"
"""An optimizer, its groups and their parameters; `skip` does not leave these out."""

_LOADER_KEYS = r"((?!\.own[.\[]).)*"
"""All keys of a loader's position except those of its own state_dict()."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A detached tensor to copy, local to this rank; `part` is its part of a global tensor."""

    name: str
    tensor: torch.Tensor
    when: CopyTiming
    part: TensorPart | None = None

    @property
    def entry(self) -> LayoutEntry:
        dtype, shape = described(self.tensor)
        return LayoutEntry(self.name, dtype, shape, self.when, part=self.part)


def source_of(name: str, tensor: torch.Tensor, when: CopyTiming) -> TensorSource:
    local = local_tensor(tensor, name)
    return TensorSource(name, local, when, part_of(tensor, tuple(local.shape)))


@dataclass(frozen=True)
class PersistentSources:
    """Sources that remain the same objects from step to step; a change requires a new walk.

    Sources for one copy need none of the other fields.
    """

    sources: tuple[TensorSource, ...]
    originals: tuple[torch.Tensor, ...] = ()
    addresses: Sequence[int] = ()
    held: tuple[HeldTensor, ...] = ()
    num_held: int = 0
    parameters: Sequence[torch.Tensor] = ()
    state_values: Sequence[object] = ()
    optimizer_state: bytes = b""
    modules: bytes = b""
    names: dict[int, str] = field(default_factory=dict)
    submodules: module_state.Submodules = ()
    children: Sequence[object] = ()
    uninitialized: tuple[tuple[str, torch.Tensor], ...] = ()
    with_own_keys: tuple[tuple[str, torch.optim.Optimizer], ...] = ()
    """Optimizers, and wrappers of them, whose class adds keys to `state_dict()`."""
    members: tuple[Rank, ...] = ()
    """The ranks that share the tensors; the sources are then this rank's shares."""

    @cached_property
    def learned(self) -> tuple[tuple[str, torch.Tensor], ...]:
        return tuple((h.name, h.tensor) for h in self.held if isinstance(h.tensor, nn.Parameter))

    @cached_property
    def others(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """Leaf tensors that are no parameters of modules; some belong to an optimizer only."""
        named = set(self.names.values()) - {name for name, _ in self.learned}
        pairs = zip(self.sources, self.originals, strict=True)
        return tuple((s.name, t) for s, t in pairs if s.name in named and t.is_leaf)

    @cached_property
    def may_change_shape(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors that no optimizer owns, and their sources; the others keep their shape."""
        pairs = zip(self.originals, self.sources, strict=True)
        return [(t, source.tensor) for t, source in pairs if source.when is CopyTiming.BOUNDARY]

    @cached_property
    def entries(self) -> tuple[LayoutEntry, ...]:
        return tuple(source.entry for source in self.sources)

    @cached_property
    def piece_bytes(self) -> int:
        on_cpu = all(source.tensor.is_cpu for source in self.sources)
        return PIECE_BYTES if on_cpu else DEVICE_PIECE_BYTES


@dataclass(frozen=True, slots=True)
class BoundaryState:
    """Everything to copy at one boundary."""

    persistent: PersistentSources
    fresh: tuple[TensorSource, ...]
    plain: bytes
    provided: tuple[ProviderState, ...] = ()


class StateTree:
    """Collects the state at each boundary."""

    def __init__(self, attached: AttachedState) -> None:
        self.attached = attached
        self.lost: list[str] = []
        """Changes since `attach` that a restore cannot apply to the script."""
        self._persistent: PersistentSources | None = None
        self._built: Structure | None = None
        self._groups = GroupReader()
        self.sizes = ProviderSizes()
        self._not_taken_back: dict[str, dict[str, bytes]] = {}
        skip = attached.skip
        self._skips: dict[str, Skips] = {}
        if skip:
            self._skips = {
                "groups": SkipWithin(skip, _GROUP_KEYS),
                "stateful": skip,
                "dicts": skip,
                "loaders": SkipWithin(skip, _LOADER_KEYS),
            }
        self._roots = {SESSION_STATE}
        """Names of attached objects whose keys may appear later."""

    def collect(self, extra: dict[str, Any]) -> BoundaryState:
        """The state now. Raises ValueNotStorable for a value that is neither tensor nor plain."""
        persistent = self.persistent()
        fresh = _References(CopyTiming.BOUNDARY)
        attached = self.attached
        parts = {
            "groups": self._groups.read(attached.optimizers, persistent.names, attached.skip),
            "stateful": dict(_states(attached)),
            "dicts": _dicts(attached),
            "generators": {n: rng.generator_state(g) for n, g in attached.generators.items()},
            "frozen": [name for name, tensor in persistent.learned if not tensor.requires_grad],
            "learned_others": [name for name, tensor in persistent.others if tensor.requires_grad],
            "gradients": present_gradients(persistent.parameters, persistent.names),
            "training": module_state.training_flags(persistent.submodules),
            "rng": rng.take_all(),
            **extra,
        }
        if attached.layout is not None:
            parts["layout"] = carried(attached.layout)
        # Encoded part by part, so that the path in an error starts at the name given to attach.
        skips = self._skips
        packed = {
            key: encode(part, refer=fresh, skip=skips.get(key), is_exact=key == "dicts")
            for key, part in parts.items()
        }
        self._roots.update(extra.get("loaders", ()))
        skip = attached.skip or None
        extra_states = module_state.extra_states(persistent.submodules)
        packed["extra_state"] = encode_each(
            extra_states, module_state.EXTRA_STATE, refer=fresh, skip=skip
        )
        if of_modules := self._own_keys(persistent):
            packed["own_keys"] = encode_each(
                of_modules, module_state.OWN_KEYS, refer=fresh, skip=skip
            )
        if own := {name: own_keys(one) for name, one in persistent.with_own_keys}:
            packed["optimizer_keys"] = encode(own, skip=skip)
        packed["optimizer_state"] = persistent.optimizer_state
        packed["modules"] = persistent.modules
        if provided := self.sizes.describe(self.providers):
            packed["providers"] = packed_sizes(provided)
        return BoundaryState(persistent, tuple(fresh.sources), encode(packed), provided)

    @property
    def providers(self) -> dict[str, StateProvider]:
        every, skip = self.attached.providers, self.attached.skip
        return {name: one for name, one in every.items() if not skip(name)}

    def persistent(self) -> PersistentSources:
        if self._persistent is None or not self._holds(self._persistent):
            self._persistent = self._walk()
            now = structure_of(self._persistent, self.attached)
            self._built = self._built or now
            self.lost = now.lost_since(self._built)
        return self._persistent

    def _holds(self, persistent: PersistentSources) -> bool:
        return (
            all(h.is_current for h in persistent.held)
            and _same(persistent.children, _children(persistent.submodules))
            and persistent.num_held == _num_held(persistent.submodules)
            and _same(persistent.parameters, self._parameters())
            and _same(persistent.state_values, self._state_values())
            and persistent.addresses == [address_of(t) for t in persistent.originals]
            and all(is_view_of(t, source) for t, source in persistent.may_change_shape)
            and all(is_lazy(tensor) for _, tensor in persistent.uninitialized)
        )

    def _walk(self) -> PersistentSources:
        submodules = self._submodules()
        module_state.reshard(submodules)
        held = tuple(self._held())
        found = self._named(held)
        names = {id(tensor): name for name, tensor in found.items()}
        # They have no bytes until the first forward gives them a shape.
        uninitialized = tuple((name, tensor) for name, tensor in found.items() if is_lazy(tensor))
        for name, _ in uninitialized:
            del found[name]
        owned = {id(parameter) for parameter in self._parameters()}
        sources = [self._source_of(name, t, is_owned=id(t) in owned) for name, t in found.items()]
        originals = list(found.values())
        references = _References(CopyTiming.LAZY)
        packed = self._optimizer_state(names, references)
        originals += references.originals
        return PersistentSources(
            sources=(*sources, *references.sources),
            originals=tuple(originals),
            addresses=[address_of(tensor) for tensor in originals],
            held=held,
            submodules=submodules,
            children=_children(submodules),
            num_held=_num_held(submodules),
            parameters=self._parameters(),
            state_values=self._state_values(),
            optimizer_state=packed,
            modules=encode(self._modules(held, names)),
            names=names,
            uninitialized=uninitialized,
            with_own_keys=tuple(
                (name, one)
                for name, one in (self.attached.optimizers | self.attached.wrappers).items()
                if own_keys(one)
            ),
        )

    def names(self) -> dict[int, str]:
        """Names of attached tensors by id; reads no state, which may hold refused values."""
        return {id(tensor): name for name, tensor in self._named(self._held()).items()}

    def _named(self, held: Iterable[HeldTensor]) -> dict[str, torch.Tensor]:
        names: set[int] = set()
        found: dict[str, torch.Tensor] = {}
        for one in held:
            if one.tensor is not None and id(one.tensor) not in names:
                names.add(id(one.tensor))
                found[one.name] = one.tensor
        for name, parameter in self._nameless(names):
            names.add(id(parameter))
            found[name] = parameter
        return found

    def _optimizer_state(self, names: dict[int, str], refer: "_References") -> bytes:
        optimizers, skip = self.attached.optimizers, self.attached.skip
        state = {name: state_of(name, o, names, skip) for name, o in optimizers.items()}
        needed = "|".join(re.escape(name) + r"(\.state)?" for name in optimizers)
        return encode(state, refer=refer, skip=SkipWithin(skip, needed) if skip else None)

    @staticmethod
    def _source_of(name: str, tensor: torch.Tensor, *, is_owned: bool) -> TensorSource:
        try:
            return source_of(name, tensor, CopyTiming.LAZY if is_owned else CopyTiming.BOUNDARY)
        except ValueNotStorable as error:
            error.can_skip = not is_owned
            raise

    def check_skip(self) -> None:
        """Check the patterns of `attach(skip=...)`, after `collect`.

        A pattern may match nothing yet, because keys may appear later in the state of an optimizer
        or in `session.state`.
        """
        skip = self.attached.skip
        owned = {id(parameter) for parameter in self._parameters()}
        for held in self._every_held():
            if id(held.tensor) in owned and skip(held.name):
                raise UsageError(
                    f"attach(skip=...) matches {held.name}, which an attached optimizer updates. "
                    "Only what no optimizer owns can be left out of a snapshot"
                )
        if wrong := [one for one in skip.unmatched if not self._may_match(one)]:
            raise UsageError(
                f"attach(skip=...): {', '.join(wrong)} matches nothing. Patterns match "
                "the names of tensors and keys in a snapshot, such as model.rope.cos, "
                "progress.history or model.*.cache"
            )

    def _may_match(self, pattern: str) -> bool:
        attached = self.attached
        literal = re.split(r"[*?\[]", pattern)[0]
        groups = (attached.modules, attached.optimizers, attached.stateful, attached.tensors,
                  attached.dicts, attached.providers, self._roots)  # fmt: skip
        names = (name for group in groups for name in group)
        return any(
            one.startswith(literal) or re.match(rf"{re.escape(one)}\W", literal) for one in names
        )

    def _modules(self, held: tuple[HeldTensor, ...], names: dict[int, str]) -> dict[str, Any]:
        buffers = [(one.name, one.tensor is None) for one in held if one.is_buffer]
        attached = self.attached.tensors
        strides = {
            one.name: stride
            for one in held
            if one.tensor is not None and (one.is_buffer or one.holder is attached)
            if not is_lazy(one.tensor) and (stride := stride_of(one.tensor))
        }
        return {
            "names": list(self.attached.modules),
            "tied": self._tied(names),
            "buffers": [name for name, is_none in buffers if not is_none],
            "no_buffers": [name for name, is_none in buffers if is_none],
            **({"strides": strides} if strides else {}),
        }

    def _own_keys(self, persistent: PersistentSources) -> dict[str, object]:
        """Entries that modules add to their own `state_dict()`, by the module's path."""
        found: dict[str, object] = {}
        for path, part in module_state.with_own_code(persistent.submodules):
            keys = module_state.own_keys(part, path, persistent.names)
            root = path + module_state.OWN_KEYS
            named = {name: key for key in keys if not self.attached.skip(name := join(root, key))}
            if named:
                found[path] = {key: keys[key] for key in named.values()}
            if module_state.takes_own_keys(part):
                continue
            skip = self.attached.skip or None
            contents = {n: module_state.content(keys[k], n, skip) for n, k in named.items()}
            first = self._not_taken_back.setdefault(path, contents)
            for name in {**first, **contents}:
                if first.get(name) != contents.get(name):
                    raise ValueNotStorable(
                        key=name,
                        kind=f"key of {type(part).__qualname__}.state_dict() that changes and that "
                        "load_state_dict() does not take back",
                    )
        return found

    def _submodules(self) -> module_state.Submodules:
        return [
            one
            for name, module in self.attached.modules.items()
            for one in named_parts(module, name)
        ]

    def _held(self) -> Iterator[HeldTensor]:
        skip = self.attached.skip
        if not skip:
            yield from self._every_held()
            return
        owned = {id(parameter) for parameter in self._parameters()}
        for held in self._every_held():
            if id(held.tensor) in owned or not skip(held.name):
                yield held

    def _every_held(self) -> Iterator[HeldTensor]:
        for name, module in self.attached.modules.items():
            yield from held_by(module, name)
        holder = self.attached.tensors
        for name, tensor in holder.items():
            yield HeldTensor(holder, name, name, tensor)

    def _tied(self, names: dict[int, str]) -> dict[str, str]:
        """Other names of tied tensors, with the name under which each is saved; for exports."""
        every = (
            (name, names[id(tensor)])
            for path, module in self.attached.modules.items()
            for name, tensor in every_name(module, path)
            if id(tensor) in names
        )
        return {name: saved for name, saved in every if name != saved}

    def _nameless(self, names: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, optimizer in self.attached.optimizers.items():
            for at, group in enumerate(optimizer.param_groups):
                for index, parameter in enumerate(group["params"]):
                    if id(parameter) not in names:
                        yield f"{name}.params[{at}][{index}]", parameter

    def _parameters(self) -> list[torch.Tensor]:
        return [
            parameter
            for optimizer in self.attached.optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    def _state_values(self) -> list[object]:
        return [v for o in self.attached.optimizers.values() for v in state_values(o)]


class _References:
    """Collects tensors while a tree is encoded, and replaces them by references."""

    def __init__(self, when: CopyTiming) -> None:
        self.sources: list[TensorSource] = []
        self.originals: list[torch.Tensor] = []
        self._when = when

    def __call__(self, value: object, path: str) -> TensorRef | None:
        if isinstance(value, torch.Tensor):
            sharded = is_sharded(value)
            if sharded and self._when is CopyTiming.BOUNDARY:
                raise ValueNotStorable(key=path, kind="DTensor outside of a module or optimizer")
            return self._add(path, value, kind_of(value, "sharded" if sharded else "tensor"))
        if isinstance(value, np.ndarray):
            return self._add(path, _as_tensor(value, path), "array")
        return None

    def _add(self, path: str, tensor: torch.Tensor, kind: str) -> TensorRef:
        source = source_of(path, tensor, self._when)
        self.sources.append(source)
        self.originals.append(tensor)
        return TensorRef(path, kind, stride_of(source.tensor))


def _children(submodules: module_state.Submodules) -> list[object]:
    return [child for _, part in submodules for child in part._modules.values()]


def _num_held(submodules: module_state.Submodules) -> int:
    return sum(
        len(part._parameters) + len(part._buffers) - len(part._non_persistent_buffers_set)
        for _, part in submodules
    )


def _states(attached: AttachedState) -> Iterator[tuple[str, object]]:
    for name, thing in attached.stateful.items():
        is_scaler = isinstance(thing, torch.amp.GradScaler)
        yield name, given_by(partial(scaler_state, thing) if is_scaler else thing.state_dict, name)


def _dicts(attached: AttachedState) -> dict[str, Any]:
    # An empty session.state is left out, so that such a snapshot equals one of version 0.2.
    holders = {**attached.dicts, **({SESSION_STATE: attached.state} if attached.state else {})}
    # A restore fills the existing holder, so the type of the saved one does not matter.
    return {name: dict(holder) for name, holder in holders.items()}


def _as_tensor(array: np.ndarray, path: str) -> torch.Tensor:
    try:
        # torch has no negative strides, and warns about read-only memory.
        is_fit = array.flags.writeable and min(array.strides, default=0) >= 0
        return torch.from_numpy(array if is_fit else array.copy())
    except TypeError as error:
        raise ValueNotStorable(key=path, kind=f"numpy array of {array.dtype}") from error


def _same(before: Sequence[Any], now: Sequence[Any]) -> bool:
    return len(before) == len(now) and all(map(is_, before, now))
