"""Generated worlds for tests: tensors cut by numpy, and rules for the same cuts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from hypothesis import strategies as st

from ftrun.sharding.partition import StoredRegion
from ftrun.sharding.rules import (
    DimensionSplit,
    FlatBuffer,
    FusedPart,
    Mesh,
    NamePattern,
    ShardingRule,
    ShardingRules,
    SharingKind,
    StagePlacement,
    UnevenPolicy,
)
from ftrun.sharding.world_layout import PlacedEntry, StoredEntry, WorldLayout
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.boxes import TensorPart
from ftrun.snapshot.layout import PLAIN_NAME, CopyTiming, LayoutEntry, make_layout
from ftrun.snapshot.plain_values import plain_bytes
from ftrun.snapshot.shard_header import ShardHeader

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Made:
    """One entry: its whole tensors, the rules for it, and each coordinate's part from numpy."""

    name: str
    wholes: dict[str, Array]
    rule: ShardingRule
    cut: Callable[[Mapping[str, int], Mesh], Array]
    others: tuple[ShardingRule, ...] = ()
    placement: StagePlacement | None = None
    places: Callable[[Mesh], set[int]] = field(default=lambda mesh: set(range(99)))

    def array(self, rank: int, mesh: Mesh) -> Array | None:
        where = mesh.coordinates(rank)
        if where["pp"] not in self.places(mesh):
            return None
        return self.cut(where, mesh)


def named(kind: SharingKind, name: str, **more: Any) -> ShardingRule:
    return ShardingRule(kind, NamePattern(name), 1, **more)


def split(
    array: Array, dim: int, count: int, index: int, *, unit: int, uneven: UnevenPolicy
) -> Array:
    """As torch.chunk or numpy.array_split cut it, unit by unit."""
    units = array.shape[dim] // unit
    if uneven is UnevenPolicy.CHUNK:
        step = -(-units // count)
        ends = [min(units, at * step) for at in range(count + 1)]
    else:
        sizes = [len(part) for part in np.array_split(np.arange(units), count)]
        ends = [0, *np.cumsum(sizes).tolist()]
    items = np.arange(ends[index] * unit, ends[index + 1] * unit)
    return np.take(array, items, axis=dim)


def fused(array: Array, dim: int, sizes: Sequence[int], cut: Callable[[Array], Array]) -> Array:
    """Each of several joined parts cut by itself, joined again."""
    parts = np.split(array, np.cumsum(sizes)[:-1].tolist(), axis=dim)
    return np.concatenate([cut(part) for part in parts], axis=dim)


def padded(array: Array, dim: int, step: int) -> Array:
    width = [(0, 0)] * array.ndim
    width[dim] = (0, -array.shape[dim] % step)
    return np.pad(array, width)


_next_value = 0


def numbers(shape: Sequence[int]) -> Array:
    """No two items of a test are equal, and none is 0."""
    global _next_value
    start = _next_value + 1
    _next_value += math.prod(shape)
    return np.arange(start, start + math.prod(shape), dtype=np.int64).reshape(shape)


shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)
axes = st.sampled_from(["dp", "tp"])


@st.composite
def replicated(draw: st.DrawFn, name: str) -> Made:
    whole = numbers(draw(st.lists(st.integers(0, 5), max_size=3)))
    return Made(name, {name: whole}, named(SharingKind.REPLICATE, name), lambda where, mesh: whole)


@st.composite
def sharded(draw: st.DrawFn, name: str) -> Made:
    """Along one or two dimensions, or one dimension twice."""
    whole = numbers(draw(shapes))
    cuts = []
    for axis in draw(st.sampled_from([["tp"], ["dp"], ["tp", "dp"], ["dp", "tp"]])):
        dim = draw(st.integers(-whole.ndim, whole.ndim - 1))
        cuts.append(DimensionSplit(axis, dim, uneven=draw(st.sampled_from(UnevenPolicy))))

    def cut(where: Mapping[str, int], mesh: Mesh) -> Array:
        part = whole
        for one in cuts:
            count, index = mesh.size_of(one.axis), where[one.axis]
            part = split(part, one.dim, count, index, unit=1, uneven=one.uneven)
        return part

    return Made(name, {name: whole}, named(SharingKind.SHARD, name, cuts=tuple(cuts)), cut)


@st.composite
def padded_vocabulary(draw: st.DrawFn, name: str) -> Made:
    whole = numbers((draw(st.integers(1, 20)), draw(st.integers(1, 3))))
    pad_to = draw(st.integers(1, 5))
    rule = DimensionSplit("tp", 0, size=len(whole), pad_to=pad_to)

    def cut(where: Mapping[str, int], mesh: Mesh) -> Array:
        count = mesh.size_of("tp")
        return np.split(padded(whole, 0, pad_to * count), count)[where["tp"]]

    return Made(name, {name: whole}, named(SharingKind.SHARD, name, cuts=(rule,)), cut)


@st.composite
def fragmented(draw: st.DrawFn, name: str) -> Made:
    """Fused projections with units, such as heads of queries, keys and values."""
    unit = draw(st.integers(1, 3))
    weights = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, 1))
    shape = [draw(st.integers(1, 4))] * 2
    shape[dim] = unit * sum(weights)
    whole = numbers(shape)
    uneven = draw(st.sampled_from(UnevenPolicy))
    parts = tuple(FusedPart(weight, unit) for weight in weights)
    rule = named(
        SharingKind.FRAGMENT, name, cuts=(DimensionSplit("tp", dim, parts, uneven=uneven),)
    )

    def cut(where: Mapping[str, int], mesh: Mesh) -> Array:
        count, index = mesh.size_of("tp"), where["tp"]
        sizes = [weight * unit for weight in weights]
        return fused(
            whole, dim, sizes, lambda part: split(part, dim, count, index, unit=unit, uneven=uneven)
        )

    return Made(name, {name: whole}, rule, cut)


@st.composite
def flat_row(draw: st.DrawFn, name: str) -> Made:
    """A ZeRO buffer over dp; a part of it is also sharded over tp."""
    given = draw(st.lists(shapes, min_size=1, max_size=4))
    wholes = {f"{name}.w{at}": numbers(shape) for at, shape in enumerate(given)}
    is_cut = {one: draw(st.booleans()) for one in wholes}
    pad_to = draw(st.integers(1, 4))
    flat = FlatBuffer("dp", pad_to, tuple((one, whole.shape) for one, whole in wholes.items()))
    others = tuple(
        named(SharingKind.SHARD, one, cuts=(DimensionSplit("tp", 0),))
        for one, cut in is_cut.items()
        if cut
    )

    def cut(where: Mapping[str, int], mesh: Mesh) -> Array:
        count, index = mesh.size_of("tp"), where["tp"]
        local = [
            split(whole, 0, count, index, unit=1, uneven=UnevenPolicy.BALANCED)
            if is_cut[one]
            else whole
            for one, whole in wholes.items()
        ]
        row = np.concatenate([part.reshape(-1) for part in local])
        return np.split(padded(row, 0, pad_to * mesh.size_of("dp")), mesh.size_of("dp"))[
            where["dp"]
        ]

    whole_names = {f"{name}/{one}": whole for one, whole in wholes.items()}
    return Made(name, whole_names, named(SharingKind.FLAT, name, flat=flat), cut, others)


@st.composite
def at_one_stage(draw: st.DrawFn, name: str) -> Made:
    whole = numbers(draw(shapes))
    at = draw(st.sampled_from([(0,), (-1,), (0, -1)]))
    placement = StagePlacement(NamePattern(name), 2, "pp", at)
    rule = named(SharingKind.SHARD, name, cuts=(DimensionSplit("tp", 0),))

    def cut(where: Mapping[str, int], mesh: Mesh) -> Array:
        count, index = mesh.size_of("tp"), where["tp"]
        return split(whole, 0, count, index, unit=1, uneven=UnevenPolicy.BALANCED)

    def places(mesh: Mesh) -> set[int]:
        return {one % mesh.size_of("pp") for one in at}

    return Made(name, {name: whole}, rule, cut, placement=placement, places=places)


@st.composite
def models(draw: st.DrawFn) -> list[Made]:
    kinds = [replicated, sharded, padded_vocabulary, fragmented, flat_row, at_one_stage]
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))
    return [draw(kind(f"t{at}")) for at, kind in enumerate(chosen)]


meshes = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 4)).map(
    lambda sizes: Mesh(tuple(zip(("pp", "dp", "tp"), sizes, strict=True)), ("dp",))
)


def rules_of(model: Sequence[Made], mesh: Mesh) -> ShardingRules:
    rules = tuple(rule for one in model for rule in (one.rule, *one.others))
    return ShardingRules(
        "made", mesh, rules, tuple(one.placement for one in model if one.placement is not None)
    )


def arrays_of(model: Sequence[Made], mesh: Mesh) -> list[dict[str, Array]]:
    """The parts of each rank, cut by numpy."""
    found = []
    for rank in range(mesh.size):
        held = {one.name: one.array(rank, mesh) for one in model}
        found.append({name: array for name, array in held.items() if array is not None})
    return found


def assert_same(found: list[dict[str, Array]], expected: list[dict[str, Array]]) -> None:
    assert [set(held) for held in found] == [set(held) for held in expected]
    for here, there in zip(found, expected, strict=True):
        for name, held in there.items():
            assert np.array_equal(here[name], held), name


def stored_of(arrays: Sequence[Mapping[str, Array]]) -> list[list[StoredEntry]]:
    return [[StoredEntry(n, "I64", array.shape) for n, array in held.items()] for held in arrays]


def filled(placed: PlacedEntry, wholes: Mapping[str, Array]) -> Array:
    """An entry that is filled from whole tensors, region by region."""
    items = np.zeros(placed.num_items, np.int64)
    for patch in placed.patches:
        slices = tuple(map(slice, patch.box.offsets, patch.box.end))
        view_of(items, patch.first, patch.box.shape, patch.strides)[...] = wholes[patch.tensor][
            slices
        ]
    return items.reshape(placed.shape)


def view_of(items: Array, first: int, shape: Sequence[int], strides: Sequence[int]) -> Array:
    steps = [step * items.itemsize for step in strides]
    return np.lib.stride_tricks.as_strided(items[first:], shape, steps)


def entry_named(rank: int, name: str) -> LayoutEntry:
    """An entry of a shard that is copied by items."""
    return LayoutEntry(name, "I64", (), CopyTiming.LAZY)


def moved(
    world: WorldLayout, arrays: Sequence[Mapping[str, Array]], target: WorldLayout
) -> list[dict[str, Array]]:
    """The arrays of another world, copied box by box; each item that is not padding once."""
    index = world.index(entry_named)
    found: list[dict[str, Array]] = []
    for entries in target.entries:
        made = {}
        for placed in entries.values():
            items = np.zeros(placed.num_items, np.int64)
            times = np.zeros(placed.num_items, np.int64)
            (copies,) = index.copies(placed.patches)
            for whole in copies:
                for copy in whole.cut_to(5 * 8):
                    assert copy.span <= 5
                    (holder,) = copy.holders
                    held = arrays[holder.rank][holder.entry.name]
                    source = np.ascontiguousarray(held).reshape(-1)
                    to = (copy.to_first, copy.shape, copy.to_strides)
                    view_of(items, *to)[...] = view_of(source, copy.first, copy.shape, copy.strides)
                    view_of(times, *to)[...] += 1
            wanted = np.zeros(placed.num_items, np.int64)
            for patch in placed.patches:
                _count(wanted, patch)
            assert np.array_equal(times, wanted)
            assert wanted.max(initial=0) <= 1
            made[placed.name] = items.reshape(placed.shape)
        found.append(made)
    return found


def _count(times: Array, patch: StoredRegion) -> None:
    view_of(times, patch.first, patch.box.shape, patch.strides)[...] += 1


class MadeShards:
    """Shards in memory."""

    def __init__(
        self,
        ranks: Sequence[Mapping[str, Array]],
        state: object = None,
        part: TensorPart | None = None,
        values: Mapping[str, object] | None = None,
    ) -> None:
        saved = {"optimizer_state": {"opt": {"state": state or {}}}, **(values or {})}
        self.plain = plain.encode({name: plain.encode(value) for name, value in saved.items()})
        made = [self._shard(held, part) for held in ranks]
        self.headers = [head for head, _ in made]
        self.data = [data for _, data in made]
        self.num_reads = 0

    def _shard(
        self, held: Mapping[str, Array], part: TensorPart | None
    ) -> tuple[ShardHeader, bytes]:
        entries = [
            LayoutEntry(n, "F32", a.shape, CopyTiming.LAZY, part=part) for n, a in held.items()
        ]
        layout = make_layout(entries, plain_bytes=len(self.plain) + 8)
        data = bytearray(layout.data_bytes)
        for entry in layout.entries:
            raw = held[entry.name].tobytes() if entry.name in held else b""
            if entry.name == PLAIN_NAME:
                raw = len(self.plain).to_bytes(8, "little") + self.plain
            data[entry.offset : entry.offset + len(raw)] = raw
        digests = [
            xxhash.xxh3_64_intdigest(data[p.offset : p.offset + p.num_bytes]) for p in layout.pieces
        ]
        table = memoryview(np.array(digests, np.uint64).tobytes()).cast("Q")
        return ShardHeader(layout, 0, table), bytes(data)

    def read(self, rank: int, name: str, first_byte: int, num_bytes: int) -> memoryview:
        self.num_reads += 1
        at = self.headers[rank].entries[name].offset + first_byte
        return memoryview(self.data[rank])[at : at + num_bytes]

    def parts(self) -> list[dict[str, bytes]]:
        return [
            plain_bytes(head, lambda at, size, data=data: memoryview(data)[at : at + size])
            for head, data in zip(self.headers, self.data, strict=True)
        ]


def array(*items: float) -> Array:
    return np.array(items, np.float32)
