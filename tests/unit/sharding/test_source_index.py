"""For any parts that the ranks have of a tensor, any other part can be read from their shards."""

import itertools
import math
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.errors import LayoutUnknown, RanksDiffer, TensorIncomplete
from ftrun.ids import Rank
from ftrun.sharding.partition import StoredRegion
from ftrun.sharding.source_index import (
    BoxCopy,
    ByteRange,
    RegionIndex,
    RegionMissing,
    SourceIndex,
    WholeTensor,
    gathered,
)
from ftrun.snapshot.boxes import Box, TensorPart, strides_of, whole
from ftrun.snapshot.layout import CopyTiming, LayoutEntry, make_layout, parse_header
from ftrun.snapshot.shard_header import ShardHeader


def header_of(*entries: LayoutEntry, knows_parts: bool = True) -> ShardHeader:
    """As read from a shard's own header."""
    made = make_layout(entries, plain_bytes=1)
    header = bytearray(made.header)
    if not knows_parts:
        header = bytearray(header.replace(b'"ftrun.parts"', b'"ftrun.other"'))
    layout, start = parse_header(memoryview(header), image_bytes=made.image_bytes)
    return ShardHeader(layout, start, memoryview(array("Q", range(len(layout.pieces)))))


def headers_of(*ranks: list[LayoutEntry]) -> dict[Rank, ShardHeader]:
    return {Rank(at): header_of(*entries) for at, entries in enumerate(ranks)}


def tensor_of(*ranks: list[LayoutEntry], prefer: int = 0) -> WholeTensor:
    """The tensor of the first entry."""
    found = SourceIndex(headers_of(*ranks), prefer=Rank(prefer)).tensor(ranks[0][0].name)
    assert found is not None
    return found


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
    """A box, assembled from the first holder of each chunk, a few items at a time."""

    def raw(copy: BoxCopy) -> memoryview:
        items = held[copy.holders[0].rank].reshape(-1)
        return items[copy.first : copy.first + copy.span].data

    region = StoredRegion("w", wanted, 0, strides_of(wanted.shape))
    copies = [part for copy in tensor.copies_into(region) for part in copy.cut_to(3 * 8)]
    assert sum(copy.num_items for copy in copies) == wanted.num_items
    assert all(copy.span <= 3 for copy in copies)
    return gathered(copies, wanted.num_items, 8, raw).view(np.int64).reshape(wanted.shape)


@settings(deadline=None, max_examples=100)
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
    index = SourceIndex(headers_of(*([entry_of(shape, box)] for box in held)), prefer=Rank(prefer))
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
def test_a_box_that_no_process_holds_is_named(
    world: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, held = world
    gone = data.draw(st.sampled_from([box for box in held if not box.is_empty]))
    left = [box for box in held if box != gone]
    entries = [[entry_of(shape, box)] for box in left] or [
        [LayoutEntry("v", "U8", (1,), CopyTiming.LAZY)]
    ]
    index = SourceIndex(headers_of(*entries), prefer=Rank(0))
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
    "other", [lazy((3,)), lazy((4,), dtype="F64"), lazy((2,), TensorPart((6,), (0,)))]
)
def test_ranks_that_hold_parts_of_different_tensors_are_named(other: LayoutEntry) -> None:
    index = SourceIndex(headers_of([lazy((4,))], [lazy((4,))], [other]), prefer=Rank(0))
    with pytest.raises(RanksDiffer) as caught:
        index.tensor("w")
    assert (caught.value.key, caught.value.ranks) == ("w", (0, 2))


def test_what_no_optimizer_owns_is_each_ranks_own_and_may_differ_in_shape() -> None:
    ranks = [[LayoutEntry("mean", "F32", (size,), CopyTiming.BOUNDARY)] for size in (3, 4)]
    for prefer in (0, 1):
        tensor = tensor_of(*ranks, prefer=prefer)
        assert not tensor.is_shared
        assert tensor.shape == (3 + prefer,)
        assert [holder.rank for holder in tensor.chunks[0].holders] == [prefer]


def test_a_part_that_is_no_box_counts_for_nothing_and_is_reported() -> None:
    strided = lazy((2,), TensorPart((4,), None))
    tensor = tensor_of([strided], [lazy((2,), TensorPart((4,), (2,)))])
    with pytest.raises(TensorIncomplete) as caught:
        tensor.check_is_whole()
    assert (caught.value.hole, caught.value.unplaced) == ("[0:2]", (0,))
    tensor_of([strided], [lazy((4,))]).check_is_whole()


def test_padding_and_plain_values_are_no_tensors_and_unknown_names_are_none() -> None:
    odd = [
        LayoutEntry("a", "U8", (3,), CopyTiming.BOUNDARY),
        LayoutEntry("b", "F32", (5,), CopyTiming.LAZY),
    ]
    index = SourceIndex(headers_of(odd, odd[1:]), prefer=Rank(1))
    assert index.common_names == ["b"]
    assert index.tensor("nobody") is None


def test_shards_without_parts_are_refused() -> None:
    headers = {Rank(0): header_of(lazy((2,))), Rank(1): header_of(lazy((2,)), knows_parts=False)}
    with pytest.raises(LayoutUnknown):
        SourceIndex(headers, prefer=Rank(0))


def test_a_tensor_is_put_together_once_and_reads_as_dtype_and_shape() -> None:
    index = SourceIndex(headers_of([lazy((4, 2))]), prefer=Rank(0))
    found = index.tensor("w")
    assert found is index.tensor("w")
    assert str(found) == "F32[4, 2]"


def test_names_are_those_that_any_rank_has() -> None:
    w, v = (LayoutEntry(name, "F32", (2,), CopyTiming.LAZY) for name in "wv")
    assert SourceIndex(headers_of([w], [w, v]), prefer=Rank(0)).names == ["w", "v"]


def index_of(*entries: list[StoredRegion]) -> RegionIndex:
    """Of ranks with one entry each."""
    index = RegionIndex()
    for rank, regions in enumerate(entries):
        index.add(rank, LayoutEntry("w", "F32", (9,), CopyTiming.LAZY), regions)
    return index


def test_what_no_node_stores_is_named() -> None:
    index = index_of([StoredRegion("w", Box((0, 0), (2, 3)), 0, (3, 1))])
    with pytest.raises(RegionMissing, match=r"no rank stores w\[2:4, 0:3\]"):
        index.copies([StoredRegion("w", Box((0, 0), (4, 3)), 0, (3, 1))])
    with pytest.raises(RegionMissing, match="no rank stores other"):
        index.copies([StoredRegion("other", Box((0,), (4,)), 0, (1,))])


def test_what_overlaps_is_copied_once() -> None:
    ends = [(0, 3), (1, 5), (4, 8)]
    index = index_of(*([StoredRegion("w", Box((a,), (b - a,)), 0, (1,))] for a, b in ends))
    (copies,) = index.copies([StoredRegion("w", Box((0,), (8,)), 0, (1,))])
    assert [(c.holders[0].rank, c.first, c.to_first, c.num_items) for c in copies] == [
        (0, 0, 0, 3),
        (1, 2, 3, 2),
        (2, 1, 5, 3),
    ]


def test_divergent_copies_are_filled_one_by_one() -> None:
    box = Box((0,), (4,))
    index = index_of(*([StoredRegion("w", box, 0, (1,), copy)] for copy in (0, 1)))
    copies = index.copies([StoredRegion("w", box, 0, (1,))])
    assert [one.holders[0].rank for (one,) in copies] == [0, 1]


def test_replicas_are_read_from_any_holder_and_own_tensors_from_one() -> None:
    region = StoredRegion("w", Box((1,), (2,)), 0, (1,))
    for when, ranks in ((CopyTiming.LAZY, [1, 0]), (CopyTiming.BOUNDARY, [1])):
        entry = LayoutEntry("w", "F32", (4,), when)
        tensor = tensor_of([entry], [entry], prefer=1)
        (copy,) = tensor.copies_into(region)
        assert [holder.rank for holder in copy.holders] == ranks
        at = [copy.bytes_in(holder) for holder in copy.holders]
        assert at == [ByteRange(Rank(rank), 4, 8) for rank in ranks]
