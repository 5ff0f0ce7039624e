"""Encodes plain values as bytes, and decodes them, without pickle.

Takes None, bool, int, float, str, bytes, complex, numpy scalars, and lists, tuples, sets and dicts
of these, with any plain value as key. Tensors are replaced through `refer`. Gives msgpack; any
other value raises a `ValueNotStorable` that names the whole path to it.

Scalars are encoded as themselves; everything else is a list whose first item is a one-letter tag.
OrderedDict, Counter, bytearray, and defaultdict with a factory such as list, keep their type. A
value of another subclass of dict, list, int, float or str comes back as its base, or is refused if
the caller requires exact types.

Long lists of numbers (the 625 of Python's random state) are packed without a call per item, because
these calls would cost more than everything else at a step boundary.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec

from ftrun.errors import LayoutUnknown, ValueNotStorable
from ftrun.snapshot.layout import PLAIN_NAME
from ftrun.snapshot.shard_header import ShardHeader

_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1
_SELF_TYPES = frozenset({type(None), bool, float, str, bytes})
_NUMPY_KINDS = "biufcSU"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Replaces a tensor that is stored elsewhere in the shard.

    Args:
        name: its entry in the layout.
        kind: its type: `tensor`, `array` (numpy), or `sharded` (the local part of a DTensor). A
            tensor on a device adds the device relative to the current one of the process:
            `tensor@cuda`, `tensor@cuda:+1`. Older versions wrote no device for the state of
            optimizers, which is restored to the CPU first then.
        stride: of its items in memory, in items; empty: row by row.
    """

    name: str
    kind: str = "tensor"
    stride: tuple[int, ...] = ()


Refer = Callable[[object, str], TensorRef | None]
"""Gets a value that is not plain and the path to it; returns its replacement, or None."""

Deref = Callable[[TensorRef], object]


class Skips(Protocol):
    """Decides by its path whether a value is left out; an item of a list becomes None."""

    @property
    def has_items(self) -> bool: ...

    def __call__(self, path: str, /) -> bool: ...


def encode(
    value: object,
    *,
    root: str = "",
    refer: Refer | None = None,
    skip: Skips | None = None,
    is_exact: bool = False,
) -> bytes:
    """The bytes of a tree of plain values.

    Args:
        refer: returns a reference for a value that is not plain.
        skip: values to leave out; None: nothing.
        is_exact: refuse values that would come back as another type.

    Raises:
        ValueNotStorable: a value is not plain, and `refer` returns no reference for it.
    """
    return msgspec.msgpack.encode(_Packer(refer, skip, is_exact).pack(value, root))


def encode_each(
    values: Mapping[str, object], suffix: str, *, refer: Refer, skip: Skips | None = None
) -> bytes:
    """Encodes a mapping as `encode` does, but the path of each value is its key with a suffix.

    A module's extra state may use the names of its parameters, so it needs separate paths.
    """
    packer = _Packer(refer, skip, is_exact=False)
    items: list[object] = ["d"]
    for key, value in values.items():
        path = f"{key}{suffix}"
        if skip is None or not skip(path):
            items += (key, packer.pack(value, path))
    return msgspec.msgpack.encode(items)


def decode(data: bytes | memoryview, *, deref: Deref | None = None) -> Any:  # the tree is dynamic
    """Raises LayoutUnknown if the bytes are not from `encode`; `deref` resolves references."""
    try:
        return _unpack(msgspec.msgpack.decode(data), deref)
    except (msgspec.DecodeError, KeyError, ValueError, TypeError) as error:
        raise LayoutUnknown(f"cannot decode the plain values of a shard: {error!r}") from error


def plain_bytes(head: ShardHeader, read: Callable[[int, int], memoryview]) -> dict[str, bytes]:
    """The plain values of a shard: the bytes of each part, by name.

    `read` takes an offset into the shard's data and a number of bytes.
    """
    at = head.entries[PLAIN_NAME].offset
    length = int.from_bytes(read(at, 8), "little")
    found: dict[str, bytes] = decode(read(at + 8, length))
    return found


@dataclass(frozen=True, slots=True)
class _Packer:
    refer: Refer | None
    skip: Skips | None
    is_exact: bool

    def pack(self, value: object, path: str) -> object:
        kind = type(value)
        if kind in _SELF_TYPES:
            return value
        if kind is int:
            in_range = _INT_MIN <= value <= _INT_MAX  # type: ignore[operator]
            return value if in_range else ["i", str(value)]
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return self._pack_sequence(value, path)
        if isinstance(value, Mapping):
            return self._pack_mapping(value, path)
        return self._pack_rare(value, path)

    def _pack_mapping(self, value: Mapping[Any, object], path: str) -> list[object]:
        kind = type(value)
        items: list[object] = ["d"]
        if kind is not dict:
            name = _mapping_name(value)
            if name is not None:
                items = ["m", name]
            elif self.is_exact:
                raise _changes(value, dict, path)
        for key, item in value.items():
            to = join(path, key)
            key_path = f"{path} key {key!r}"
            if self.skip is not None and (
                self.skip(to) or (not isinstance(key, str) and self.skip(key_path))
            ):
                continue
            items += (self.pack(key, key_path), self.pack(item, to))
        return items

    def _pack_sequence(self, value: list[object] | tuple[object, ...], path: str) -> list[object]:
        tag, base = ("l", list) if isinstance(value, list) else ("t", tuple)
        if self.is_exact and type(value) is not base:
            raise _changes(value, base, path)
        if self.skip is not None and self.skip.has_items:
            paths = [f"{path}[{at}]" for at in range(len(value))]
            pairs = zip(value, paths, strict=True)
            return [tag, *(None if self.skip(to) else self.pack(one, to) for one, to in pairs)]
        kinds = set(map(type, value))
        if kinds <= _SELF_TYPES or (
            kinds == {int} and min(value) >= _INT_MIN and max(value) <= _INT_MAX  # type: ignore[type-var, operator]
        ):
            return [tag.upper(), list(value)]
        return [tag, *(self.pack(item, f"{path}[{at}]") for at, item in enumerate(value))]

    def _pack_rare(self, value: object, path: str) -> object:
        if isinstance(value, TensorRef):
            return _pack_ref(value)
        if self.refer is not None and (ref := self.refer(value, path)) is not None:
            return _pack_ref(ref)
        if _is_numpy_scalar(value):
            return ["n", value.dtype.str, value.tobytes()]  # type: ignore[attr-defined]
        if isinstance(value, (set, frozenset)):
            return self._pack_set(value, f"{path}{{}}")
        if isinstance(value, complex):
            return ["c", value.real, value.imag]
        if isinstance(value, bytearray):
            return ["b", bytes(value)]
        return self._pack_subclass(value, path)

    def _pack_set(self, value: Collection[object], path: str) -> list[object]:
        tag = "s" if isinstance(value, set) else "f"
        if self.skip is not None and self.skip.has_items and self.skip(path):
            return [tag]
        return [tag, *(self.pack(item, path) for item in value)]

    def _pack_subclass(self, value: object, path: str) -> object:
        for base in (str, float, int):
            if isinstance(value, base):
                if self.is_exact:
                    raise _changes(value, base, path)
                return self.pack(base(value) if base is not str else str.__str__(value), path)
        raise ValueNotStorable(key=path or "the value", kind=_kind_name(value))


def _mapping_name(value: Mapping[Any, object]) -> str | None:
    """Name of a supported subclass of dict; None if the value comes back as a dict."""
    kind = type(value)
    if kind is OrderedDict or kind is Counter:
        return kind.__name__
    if isinstance(value, defaultdict) and kind is defaultdict:
        name = f"defaultdict {getattr(value.default_factory, '__name__', None)}"
        made = _MAPPINGS.get(name)
        if made is not None and made().default_factory is value.default_factory:
            return name
    return None


def _changes(value: object, base: type, path: str) -> ValueNotStorable:
    kind = f"{_kind_name(value)} (it would come back as {base.__name__})"
    return ValueNotStorable(key=path or "the value", kind=kind)


def _pack_ref(ref: TensorRef) -> list[object]:
    # ftrun 0.2 reads references of two fields only, so the third is written only if it is needed.
    return ["r", ref.name, ref.kind, *([list(ref.stride)] if ref.stride else [])]


def _is_numpy_scalar(value: object) -> bool:
    # By attributes, because numpy may be missing. Arrays without dimensions have
    # __array_finalize__.
    kind = getattr(getattr(value, "dtype", None), "kind", None)
    return kind in tuple(_NUMPY_KINDS) and not hasattr(value, "__array_finalize__")


def _unpack(value: Any, deref: Deref | None) -> Any:
    if type(value) is not list:
        return value
    tag, *items = value
    if tag in _BUILD:
        return _BUILD[tag](_unpack(item, deref) for item in items)
    if tag == "d":
        pairs = (_unpack(item, deref) for item in items)
        return dict(zip(pairs, pairs, strict=True))
    if tag == "m":
        pairs = (_unpack(item, deref) for item in items[1:])
        made = _MAPPINGS[items[0]]()
        made.update(dict(zip(pairs, pairs, strict=True)))
        return made
    if tag == "r":
        name, kind, *stride = items
        ref = TensorRef(name, kind, tuple(stride[0]) if stride else ())
        return ref if deref is None else deref(ref)
    return _SCALARS[tag](*items)


def _numpy_scalar(dtype: str, raw: bytes) -> object:
    import numpy as np  # imported only if a snapshot holds a numpy scalar

    return np.frombuffer(raw, np.dtype(dtype))[0]


_BUILD: dict[str, Callable[..., object]] = {"l": list, "t": tuple, "s": set, "f": frozenset}
_SCALARS: dict[str, Callable[..., object]] = {
    "L": list, "T": tuple, "i": int, "c": complex, "n": _numpy_scalar, "b": bytearray,
}  # fmt: skip

_FACTORIES = (None, list, dict, set, int, float, str, bool, tuple)
_MAPPINGS: dict[str, Callable[[], Any]] = {
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    **{
        f"defaultdict {getattr(one, '__name__', None)}": partial(defaultdict, one)
        for one in _FACTORIES
    },
}


def refs_in(tree: object) -> Iterator[TensorRef]:
    if isinstance(tree, TensorRef):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from refs_in(value)
    elif isinstance(tree, list | tuple | set | frozenset):
        for value in tree:
            yield from refs_in(value)


def join(path: str, key: object) -> str:
    """The path of a dict's item, in Python syntax."""
    if not isinstance(key, str):
        return f"{path}[{key!r}]"
    return f"{path}.{key}" if path else key


def _kind_name(value: object) -> str:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"
