"""Decoding returns the encoded values; a value that cannot be encoded is named by its path."""

import enum
import math
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.errors import LayoutUnknown, ValueNotStorable
from ftrun.snapshot.plain_values import TensorRef, decode, encode, encode_each

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
keys = scalars | st.tuples(st.integers(), st.text())
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.sets(scalars)
        | st.frozensets(scalars)
    ),
    max_leaves=10,
)


def same(one: object, other: object) -> bool:
    """Equal, with equal types in all parts."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))  # type: ignore[arg-type]
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(  # type: ignore[call-overload]
            map(same, one.values(), other.values())  # type: ignore[attr-defined]
        )
    return one == other


@settings(deadline=None, max_examples=60)
@given(trees)
def test_any_plain_tree_comes_back_the_same(tree: object) -> None:
    assert same(decode(encode(tree)), tree)


def test_floats_that_are_no_numbers_come_back() -> None:
    nan, inf, minus = decode(encode([math.nan, math.inf, -math.inf]))
    assert math.isnan(nan)
    assert (inf, minus) == (math.inf, -math.inf)


@pytest.mark.parametrize("value", [2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**40])
def test_integers_of_any_size_come_back(value: int) -> None:
    assert decode(encode(value)) == value
    assert decode(encode([1, value])) == [1, value]


@pytest.mark.parametrize(
    "value",
    [np.float32(0.1), np.float64(0.1), np.int16(-3), np.uint8(4), np.bool_(True), np.str_("ab"),
     np.complex64(1 + 2j), np.bytes_(b"ab")],
)  # fmt: skip
def test_numpy_scalars_keep_their_type(value: Any) -> None:
    found = decode(encode({"best": value}))["best"]
    assert type(found) is type(value)
    assert found == value


class Level(enum.IntEnum):
    """An int with a name."""

    HIGH = 3


class Name(str):
    """Text of its own type."""

    __slots__ = ()


class Share(float):
    """A number of its own type."""

    __slots__ = ()


class Row(list):  # type: ignore[type-arg]
    """A list of its own type."""


class Settings(dict):  # type: ignore[type-arg]
    """A dict of its own type."""


def test_dicts_of_the_standard_library_and_bytearrays_keep_their_type() -> None:
    tree = {
        "ordered": OrderedDict(b=1, a=[OrderedDict()]),
        "count": Counter("aab"),
        "default": defaultdict(list, x=[1]),
        "none": defaultdict(None, x=1),
        "array": bytearray(b"xy"),
    }
    for is_exact in (False, True):
        found = decode(encode(tree, is_exact=is_exact))
        assert same(found, tree)
        assert found["default"]["y"] == []
        assert found["none"].default_factory is None


OTHERS = [
    (Level.HIGH, 3),
    (Name("n"), "n"),
    (Share(0.5), 0.5),
    (Row([1]), [1]),
    (Settings(a=1), {"a": 1}),
    (UserDict(a=1), {"a": 1}),
    (defaultdict(lambda: 1, x=2), {"x": 2}),
]


@pytest.mark.parametrize(("value", "base"), OTHERS, ids=lambda value: type(value).__name__)
def test_other_subclasses_come_back_as_their_base_or_are_refused(
    value: object, base: object
) -> None:
    assert same(decode(encode([value])), [base])
    with pytest.raises(ValueNotStorable) as caught:
        encode({"a": value}, is_exact=True)
    assert caught.value.key == "a"
    assert type(value).__name__ in caught.value.kind
    assert f"come back as {type(base).__name__}" in caught.value.kind


class Left:
    """Skips by exact paths."""

    def __init__(self, *paths: str) -> None:
        self._paths = paths
        self.has_items = any("[" in one or "{" in one for one in paths)

    def __call__(self, path: str) -> bool:
        return path in self._paths


def test_what_is_skipped_is_not_packed() -> None:
    tree = {"a": {"lock": object(), "best": 1}, "b": [1, object(), 3], "c": {object}, "d": {1}}
    skip = Left("a.lock", "b[1]", "c{}")
    found = decode(encode(tree, skip=skip))
    assert found == {"a": {"best": 1}, "b": [1, None, 3], "c": set(), "d": {1}}
    assert decode(encode({object: 1}, skip=Left(f" key {object!r}"))) == {}
    with pytest.raises(ValueNotStorable):
        encode(tree, skip=Left("a.lock"))
    given = {"m": object(), "n": {"lock": object()}}
    packed = encode_each(given, ".x", refer=lambda *_: None, skip=Left("m.x", "n.x.lock"))
    assert decode(packed) == {"n": {}}


class Tensor:
    """Stands for one."""


def test_tensors_are_left_to_the_caller() -> None:
    def refer(value: object, path: str) -> TensorRef | None:
        return TensorRef(path) if isinstance(value, Tensor) else None

    packed = encode({"ema": [Tensor(), 1]}, refer=refer)
    assert decode(packed) == {"ema": [TensorRef("ema[0]"), 1]}
    assert decode(packed, deref=lambda ref: f"<{ref.name}>") == {"ema": ["<ema[0]>", 1]}
    assert decode(encode(TensorRef("a", "array"))) == TensorRef("a", "array")


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("tree", "key", "kind"),
    [
        ({"scheduler": {"lr_lambdas": [len]}}, "scheduler.lr_lambdas[0]", "function"),
        ({"a": {3: {(1, 2): object()}}}, "a[3][(1, 2)]", "object"),
        ({"a": {object}}, "a{}", "type"),
        ({"a": Pair(1, 2)}, "a", "Pair"),
        ({"a": np.zeros(2)}, "a", "ndarray"),
        (object(), "the value", "object"),
        ({"a": {object: 1}}, f"a key {object!r}", "type"),
    ],
)
def test_a_value_that_cannot_be_stored_is_named_by_its_path(
    tree: object, key: str, kind: str
) -> None:
    with pytest.raises(ValueNotStorable) as caught:
        encode(tree, refer=lambda *_: None)
    assert caught.value.key == key
    assert kind in caught.value.kind


def test_the_root_precedes_every_path() -> None:
    with pytest.raises(ValueNotStorable) as caught:
        encode({"x": object()}, root="scaler")
    assert caught.value.key == "scaler.x"


@pytest.mark.parametrize("data", [b"\xc1", b"", encode("x")[:-1], b"\x91\xa1z", b"\x90"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(LayoutUnknown):
        decode(data)


def test_references_keep_their_stride_and_are_read_without_one() -> None:
    refs = [TensorRef("a"), TensorRef("b", "array", (1, 3))]
    assert decode(encode(refs)) == refs
    # As ftrun 0.2 reads and writes them.
    assert msgspec.msgpack.decode(encode(refs[0])) == ["r", "a", "tensor"]
    assert decode(msgspec.msgpack.encode(["r", "a", "sharded"])) == TensorRef("a", "sharded")


def test_each_value_of_a_mapping_may_have_a_path_of_its_own() -> None:
    paths: list[str] = []

    def refer(_: object, path: str) -> TensorRef:
        paths.append(path)
        return TensorRef(path)

    values = {"model.0": {"weight": Tensor()}}
    packed = encode_each(values, "._extra_state", refer=refer)
    assert decode(packed) == {"model.0": {"weight": TensorRef("model.0._extra_state.weight")}}
    assert paths == ["model.0._extra_state.weight"]
