"""Plain values as bytes, and back, without pickle.

Runs in:  worker. Pure.
Takes in: None, bool, int, float, str, bytes, complex, numpy scalars, and lists, tuples, sets and
          dicts of these, with whatever plain value as key; tensors through `refer`.
Gives:    msgpack; every other value is a `ValueNotStorable` that names the whole path to it.

Scalars stand for themselves; everything else is a list whose first item is a one-letter tag.
OrderedDict, defaultdict and other dicts come back as dict, subclasses of int, float and str as
their base. Long runs of numbers (the 625 of Python's random state) are packed without a visit
to each, because that visit would cost more than everything else at a step boundary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ftrun.errors import LayoutUnknown, ValueNotStorable

_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1
_SELF_TYPES = frozenset({type(None), bool, float, str, bytes})
_NUMPY_KINDS = "biufcSU"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands for a tensor that lies elsewhere in the shard.

    Args:
        name: its entry in the layout.
        kind: what it was: `tensor`, `array` (numpy), `sharded` (the local part of a DTensor), or
            `tensor@cuda` for a tensor on a device of that type.
        stride: of its items in memory, in items; empty: row by row.
    """

    name: str
    kind: str = "tensor"
    stride: tuple[int, ...] = ()


Refer = Callable[[object, str], TensorRef | None]
"""Given a value that is not plain and the path to it: what stands for it, or None."""

Deref = Callable[[TensorRef], object]


def encode(value: object, *, root: str = "", refer: Refer | None = None) -> bytes:
    """The bytes of a tree of plain values.

    Raises:
        ValueNotStorable: a value is neither plain nor known to `refer`.
    """
    return msgspec.msgpack.encode(_pack(value, root, refer))


def encode_each(values: Mapping[str, object], suffix: str, *, refer: Refer) -> bytes:
    """As `encode` of the mapping, but the path of each value is its key with a suffix.

    A module's extra state may use the names of its parameters, so it needs paths of its own.

    Raises:
        ValueNotStorable: a value is neither plain nor known to `refer`.
    """
    items: list[object] = ["d"]
    for key, value in values.items():
        items += (key, _pack(value, f"{key}{suffix}", refer))
    return msgspec.msgpack.encode(items)


def decode(data: bytes | memoryview, *, deref: Deref | None = None) -> Any:  # the tree is dynamic
    """The tree that `encode` was given, with references resolved by `deref`.

    Raises:
        LayoutUnknown: these are not such bytes.
    """
    try:
        return _unpack(msgspec.msgpack.decode(data), deref)
    except (msgspec.DecodeError, KeyError, ValueError, TypeError) as error:
        raise LayoutUnknown(f"the plain values of a shard are not readable: {error!r}") from error


def _pack(value: object, path: str, refer: Refer | None) -> object:
    kind = type(value)
    if kind in _SELF_TYPES:
        return value
    if kind is int:
        return _pack_int(value)  # type: ignore[arg-type]
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return _pack_sequence(value, path, refer)
    if isinstance(value, Mapping):
        items: list[object] = ["d"]
        for key, item in value.items():
            items += (_pack(key, f"{path} key {key!r}", refer), _pack(item, join(path, key), refer))
        return items
    return _pack_rare(value, path, refer)


def _pack_sequence(
    value: list[object] | tuple[object, ...], path: str, refer: Refer | None
) -> list[object]:
    tag = "l" if isinstance(value, list) else "t"
    kinds = set(map(type, value))
    if kinds <= _SELF_TYPES or (
        kinds == {int} and min(value) >= _INT_MIN and max(value) <= _INT_MAX  # type: ignore[type-var, operator]
    ):
        return [tag.upper(), list(value)]
    return [tag, *(_pack(item, f"{path}[{at}]", refer) for at, item in enumerate(value))]


def _pack_rare(value: object, path: str, refer: Refer | None) -> object:
    if isinstance(value, TensorRef):
        return _pack_ref(value)
    if refer is not None and (ref := refer(value, path)) is not None:
        return _pack_ref(ref)
    if _is_numpy_scalar(value):
        return ["n", value.dtype.str, value.tobytes()]  # type: ignore[attr-defined]
    if isinstance(value, (set, frozenset)):
        tag = "s" if isinstance(value, set) else "f"
        return [tag, *(_pack(item, f"{path}{{}}", refer) for item in value)]
    if isinstance(value, complex):
        return ["c", value.real, value.imag]
    if isinstance(value, bytearray):
        return bytes(value)
    for base in (str, float, int):
        if isinstance(value, base):
            return _pack(base(value) if base is not str else str.__str__(value), path, None)
    raise ValueNotStorable(key=path or "the value", kind=_kind_name(value))


def _pack_ref(ref: TensorRef) -> list[object]:
    # ftrun 0.2 reads references of two fields only, so the third is written where it is needed.
    return ["r", ref.name, ref.kind, *([list(ref.stride)] if ref.stride else [])]


def _is_numpy_scalar(value: object) -> bool:
    # By its looks: numpy need not be there. Arrays without dimensions have __array_finalize__.
    kind = getattr(getattr(value, "dtype", None), "kind", None)
    return kind in tuple(_NUMPY_KINDS) and not hasattr(value, "__array_finalize__")


def _pack_int(value: int) -> object:
    return value if _INT_MIN <= value <= _INT_MAX else ["i", str(value)]


def _unpack(value: Any, deref: Deref | None) -> Any:
    if type(value) is not list:
        return value
    tag, *items = value
    if tag in _BUILD:
        return _BUILD[tag](_unpack(item, deref) for item in items)
    if tag == "d":
        pairs = (_unpack(item, deref) for item in items)
        return dict(zip(pairs, pairs, strict=True))
    if tag == "r":
        name, kind, *stride = items
        ref = TensorRef(name, kind, tuple(stride[0]) if stride else ())
        return ref if deref is None else deref(ref)
    return _SCALARS[tag](*items)


def _numpy_scalar(dtype: str, raw: bytes) -> object:
    import numpy as np  # only where a snapshot holds one

    return np.frombuffer(raw, np.dtype(dtype))[0]


_BUILD: dict[str, Callable[..., object]] = {"l": list, "t": tuple, "s": set, "f": frozenset}
_SCALARS: dict[str, Callable[..., object]] = {
    "L": list, "T": tuple, "i": int, "c": complex, "n": _numpy_scalar,
}  # fmt: skip


def join(path: str, key: object) -> str:
    """The path of a dict's item, as one would write it in Python."""
    if not isinstance(key, str):
        return f"{path}[{key!r}]"
    return f"{path}.{key}" if path else key


def _kind_name(value: object) -> str:
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else (f"{kind.__module__}.{kind.__qualname__}")
    )
