"""A rule splits a dimension; a run of items is cut into boxes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.sharding.partition import (
    SplitImpossible,
    boxes_of_run,
    divide,
    hold,
    patches_of,
    share,
    view_of,
)
from ftrun.sharding.rules import DimensionSplit, FusedPart, Mesh, UnevenPolicy

counts = st.integers(1, 7)


@given(st.integers(0, 40), counts, st.sampled_from(UnevenPolicy), st.integers(0, 3))
def test_all_items_are_somewhere_once(
    size: int, count: int, uneven: UnevenPolicy, pad_to: int
) -> None:
    cut = DimensionSplit("tp", 0, uneven=uneven, pad_to=pad_to)
    held = [hold(cut, size, count=count, index=index) for index in range(count)]
    items = [
        at for one in held for run in one.runs for at in range(run.start, run.start + run.size)
    ]
    assert items == list(range(size))
    if pad_to:
        assert len({one.size for one in held}) == 1
        assert sum(one.size for one in held) - size < pad_to * count
    else:
        assert sum(one.size for one in held) == size


@given(st.integers(0, 40), counts)
def test_a_balanced_cut_differs_by_one_and_a_chunk_only_at_the_end(size: int, count: int) -> None:
    sizes = [high - low for low, high in (divide(size, count, at) for at in range(count))]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    chunks = [
        high - low
        for low, high in (divide(size, count, i, UnevenPolicy.CHUNK) for i in range(count))
    ]
    assert sum(chunks) == size
    assert all(one == chunks[0] for one in chunks[: size // max(1, chunks[0])])


def test_sizes_may_be_given() -> None:
    part = FusedPart(unit=4, sizes=(2, 0, 1))
    found = [share(part, UnevenPolicy.BALANCED, 12, count=3, index=index) for index in range(3)]
    assert found == [(0, 8), (8, 0), (8, 4)]


def test_units_that_are_fewer_than_the_coordinates_may_be_shared() -> None:
    part = FusedPart(unit=2, is_shared=True)
    found = [share(part, UnevenPolicy.BALANCED, 4, count=4, index=index) for index in range(4)]
    assert found == [(0, 2), (0, 2), (2, 2), (2, 2)]
    assert share(part, UnevenPolicy.BALANCED, 8, count=2, index=1) == (4, 4)
    assert share(part, UnevenPolicy.BALANCED, 0, count=2, index=1) == (0, 0)


@pytest.mark.parametrize(
    ("cut", "size", "reported"),
    [
        (DimensionSplit("tp", 0, size=9), 8, "rule has size 9"),
        (DimensionSplit("tp", 0, (FusedPart(2), FusedPart(1))), 8, "parts of 2 : 1"),
        (DimensionSplit("tp", 0, (FusedPart(unit=3),)), 8, "units of 3"),
        (DimensionSplit("tp", 0, (FusedPart(sizes=(4, 4)),)), 8, "for 2 coordinates"),
        (DimensionSplit("tp", 0, (FusedPart(sizes=(4, 4, 1)),)), 8, "there are 8 units"),
        (
            DimensionSplit("tp", 0, (FusedPart(unit=4, is_shared=True),)),
            8,
            "2 units cannot be divided",
        ),
    ],
)
def test_what_cannot_be_cut_is_reported(cut: DimensionSplit, size: int, reported: str) -> None:
    with pytest.raises(SplitImpossible, match=reported):
        hold(cut, size, count=3, index=0)


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@settings(deadline=None)
@given(shapes, st.data())
def test_a_run_of_items_as_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    items = np.arange(size).reshape(shape)
    boxes = boxes_of_run(shape, start, end)
    found = [items[tuple(map(slice, box.offsets, box.end))].reshape(-1) for box in boxes]
    assert np.concatenate([*found, []]).tolist() == list(range(start, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_tensor_of_nothing_has_no_patches() -> None:
    view = view_of((0, 3), (DimensionSplit("tp", 1),), Mesh((("tp", 2),)), {"tp": 1})
    assert view.shape == (0, 1)
    assert patches_of("w", view) == ()
