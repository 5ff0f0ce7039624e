"""Whatever ranks have cut a tensor into, any other cut of it can be read from their shards."""

import itertools
import math
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.errors import LayoutUnknown, RanksDiffer, TensorIncomplete
from ftrun.ids import Rank
from ftrun.sharding.source_index import SourceIndex, WholeTensor
from ftrun.snapshot.boxes import Box, TensorPart, overlap, span_of, whole
from ftrun.snapshot.layout import CopyTiming, LayoutEntry, make_layout, parse_header
from ftrun.snapshot.shard_header import ShardHeader


def head_of(*entries: LayoutEntry, knows_parts: bool = True) -> ShardHeader:
    """As it is read from a shard's own header."""
    made = make_layout(entries, plain_bytes=1)
    header = bytearray(made.header)
    if not knows_parts:
        header = bytearray(header.replace(b'"ftrun.parts"', b'"ftrun.other"'))
    layout, start = parse_header(memoryview(header), image_bytes=made.image_bytes)
    return ShardHeader(layout, start, memoryview(array("Q", range(len(layout.pieces)))))


def heads_of(*ranks: list[LayoutEntry]) -> dict[Rank, ShardHeader]:
    return {Rank(at): head_of(*entries) for at, entries in enumerate(ranks)}


def cuts(size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """A dimension cut into ranges, empty ones among them."""
    inner = st.lists(st.integers(0, size), max_size=3).map(sorted)
    return inner.map(lambda at: list(itertools.pairwise([0, *at, size])))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor's shape, and the box that each rank of a mesh holds; some hold the same."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    grid = itertools.product(*(draw(cuts(size)) for size in shape))
    found = [
        Box(tuple(low for low, _ in cell), tuple(high - low for low, high in cell)) for cell in grid
    ]
    found += draw(st.lists(st.sampled_from(found), max_size=4))
    return shape, draw(st.permutations(found))


def entry_of(shape: tuple[int, ...], box: Box) -> LayoutEntry:
    part = None if box == whole(shape) else TensorPart(shape, box.offsets)
    return LayoutEntry("w", "I64", box.shape, CopyTiming.LAZY, part=part)


def read(tensor: WholeTensor, held: list[np.ndarray], wanted: Box) -> np.ndarray:
    """A box, put together of the first holder of each chunk, run by run."""
    found = np.full(wanted.shape, -1)
    for chunk in tensor.chunks:
        common = overlap(chunk.box, wanted)
        if common is None:
            continue
        at = [tuple(a - b for a, b in zip(common.offsets, box.offsets, strict=True))
              for box in (chunk.box, wanted)]  # fmt: skip
        span = span_of(chunk.box.shape, at[0], common.shape)
        run = held[chunk.holders[0].rank].reshape(-1)[span.first : span.first + span.count]
        strides = [step * run.itemsize for step in span.strides]
        part = np.lib.stride_tricks.as_strided(run, span.shape, strides)
        found[tuple(slice(a, a + size) for a, size in zip(at[1], common.shape, strict=True))] = part
    return found


@settings(deadline=None, max_examples=150)
@given(worlds(), st.data())
def test_any_box_is_put_together_from_any_cut(
    world: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, held = world
    everything = np.arange(math.prod(shape)).reshape(shape)
    contents = [
        np.ascontiguousarray(everything[tuple(map(slice, box.offsets, box.end))]) for box in held
    ]
    prefer = data.draw(st.integers(0, len(held) - 1))
    index = SourceIndex(heads_of(*([entry_of(shape, box)] for box in held)), prefer=Rank(prefer))
    tensor = index.tensor("w")
    assert tensor is not None
    tensor.check_is_whole()
    assert (tensor.shape, tensor.dtype, index.common_names) == (shape, "I64", ["w"])
    starts = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(data.draw(st.integers(1, n - at)) for n, at in zip(shape, starts, strict=True))
    wanted = Box(starts, sizes)
    expected = everything[tuple(map(slice, wanted.offsets, wanted.end))]
    assert np.array_equal(read(tensor, contents, wanted), expected)
    mine = [chunk for chunk in tensor.chunks if chunk.box == held[prefer]]
    assert all(chunk.holders[0].rank == prefer for chunk in mine)


@settings(deadline=None, max_examples=80)
@given(worlds(), st.data())
def test_a_box_that_nobody_holds_is_named(
    world: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, held = world
    gone = data.draw(st.sampled_from([box for box in held if not box.is_empty]))
    left = [box for box in held if box != gone]
    entries = [[entry_of(shape, box)] for box in left] or [
        [LayoutEntry("v", "U8", (1,), CopyTiming.LAZY)]
    ]
    index = SourceIndex(heads_of(*entries), prefer=Rank(0))
    tensor = index.tensor("w")
    if tensor is None:
        assert not left
        return
    with pytest.raises(TensorIncomplete) as caught:
        tensor.check_is_whole()
    assert caught.value.hole == str(gone)


def lazy(shape: tuple[int, ...], part: TensorPart | None = None, dtype: str = "F32") -> LayoutEntry:
    return LayoutEntry("w", dtype, shape, CopyTiming.LAZY, part=part)


@pytest.mark.parametrize(
    "other",
    [lazy((3,)), lazy((4,), dtype="F64"), lazy((2,), TensorPart((6,), (0,)))],
)
def test_ranks_that_hold_parts_of_different_tensors_are_named(other: LayoutEntry) -> None:
    index = SourceIndex(heads_of([lazy((4,))], [lazy((4,))], [other]), prefer=Rank(0))
    with pytest.raises(RanksDiffer) as caught:
        index.tensor("w")
    assert (caught.value.key, caught.value.ranks) == ("w", (0, 2))


def test_what_no_optimizer_owns_is_each_ranks_own_and_may_differ_in_shape() -> None:
    ranks = [[LayoutEntry("mean", "F32", (size,), CopyTiming.BOUNDARY)] for size in (3, 4)]
    for prefer in (0, 1):
        tensor = SourceIndex(heads_of(*ranks), prefer=Rank(prefer)).tensor("mean")
        assert tensor is not None
        assert not tensor.is_shared
        assert tensor.shape == (3 + prefer,)
        assert [holder.rank for holder in tensor.chunks[0].holders] == [prefer]


def test_a_part_that_is_no_box_counts_for_nothing_and_is_told() -> None:
    strided = lazy((2,), TensorPart((4,), None))
    index = SourceIndex(heads_of([strided], [lazy((2,), TensorPart((4,), (2,)))]), prefer=Rank(0))
    tensor = index.tensor("w")
    assert tensor is not None
    with pytest.raises(TensorIncomplete) as caught:
        tensor.check_is_whole()
    assert (caught.value.hole, caught.value.unplaced) == ("[0:2]", (0,))
    also_whole = SourceIndex(heads_of([strided], [lazy((4,))]), prefer=Rank(0)).tensor("w")
    assert also_whole is not None
    also_whole.check_is_whole()


def test_padding_and_plain_values_are_no_tensors_and_unknown_names_are_none() -> None:
    odd = [
        LayoutEntry("a", "U8", (3,), CopyTiming.BOUNDARY),
        LayoutEntry("b", "F32", (5,), CopyTiming.LAZY),
    ]
    index = SourceIndex(heads_of(odd, odd[1:]), prefer=Rank(1))
    assert index.common_names == ["b"]
    assert index.tensor("nobody") is None


def test_shards_without_parts_are_refused() -> None:
    heads = {Rank(0): head_of(lazy((2,))), Rank(1): head_of(lazy((2,)), knows_parts=False)}
    with pytest.raises(LayoutUnknown):
        SourceIndex(heads, prefer=Rank(0))


def test_a_tensor_is_put_together_once_and_reads_as_dtype_and_shape() -> None:
    index = SourceIndex(heads_of([lazy((4, 2))]), prefer=Rank(0))
    found = index.tensor("w")
    assert found is index.tensor("w")
    assert str(found) == "F32[4, 2]"


def test_names_are_those_that_any_rank_has() -> None:
    w, v = (LayoutEntry(name, "F32", (2,), CopyTiming.LAZY) for name in "wv")
    assert SourceIndex(heads_of([w], [w, v]), prefer=Rank(0)).names == ["w", "v"]
