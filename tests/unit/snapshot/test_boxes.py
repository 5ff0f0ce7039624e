"""Boxes that are cut and joined hold each item once, and a part is found in its chunk's bytes."""

import itertools
import math
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.snapshot.boxes import (
    Box,
    TensorPart,
    cut_to,
    first_hole,
    overlap,
    parse_part,
    span_of,
    strides_of,
    whole,
    without,
)

MOST = 6


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...], *, can_be_empty: bool = True) -> Box:
    """A box within a tensor of this shape."""
    least = 0 if can_be_empty else 1
    starts = tuple(draw(st.integers(0, size - least)) for size in shape)
    sizes = tuple(
        draw(st.integers(least, size - at)) for size, at in zip(shape, starts, strict=True)
    )
    return Box(starts, sizes)


shapes = st.lists(st.integers(1, MOST), max_size=3).map(tuple)
pairs = shapes.flatmap(lambda shape: st.tuples(boxes(shape), boxes(shape)))


def items(box: Box) -> set[tuple[int, ...]]:
    ranges = (range(at, end) for at, end in zip(box.offsets, box.end, strict=True))
    return set(itertools.product(*ranges))


@settings(deadline=None)
@given(pairs)
def test_an_overlap_is_what_is_in_both_and_the_rest_is_all_that_is_left(
    pair: tuple[Box, Box],
) -> None:
    one, other = pair
    common = overlap(one, other)
    assert (items(common) if common else set()) == items(one) & items(other)
    assert common is None or not common.is_empty
    left = without(one, other)
    assert sum(box.num_items for box in left) == len(items(one) - items(other))
    assert set().union(*map(items, left)) == items(one) - items(other)


@settings(deadline=None)
@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), st.lists(boxes(shape), max_size=8))))
def test_a_hole_is_found_where_there_is_one(given_boxes: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, chunks = given_boxes
    hole = first_hole(whole(shape), chunks)
    missing = items(whole(shape)) - set().union(*map(items, chunks))
    assert (hole is None) == (not missing)
    assert hole is None or (items(hole) and items(hole) <= missing)


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 6), st.randoms())
def test_rows_that_follow_one_another_leave_no_hole(
    heights: list[int], missing: int, order: random.Random
) -> None:
    starts = [sum(heights[:at]) for at in range(len(heights))]
    rows = [Box((at, 0), (size, 3)) for at, size in zip(starts, heights, strict=True)]
    target = whole((sum(heights), 3))
    order.shuffle(rows)
    assert first_hole(target, rows) is None
    gone = rows[missing % len(rows)]
    hole = first_hole(target, [row for row in rows if row is not gone])
    assert hole == (None if gone.is_empty else gone)


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes(shape, can_be_empty=False))))
def test_the_span_of_a_box_is_from_its_first_item_to_its_last(
    case: tuple[tuple[int, ...], Box],
) -> None:
    shape, box = case
    chunk = np.arange(math.prod(shape)).reshape(shape)
    found = chunk[tuple(map(slice, box.offsets, box.end))]
    assert span_of(box.shape, strides_of(shape)) == found.max() - found.min() + 1


@settings(deadline=None)
@given(
    shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes(shape, can_be_empty=False))),
    st.integers(1, 40),
)
def test_a_part_is_cut_into_runs_that_are_short_enough(
    case: tuple[tuple[int, ...], Box], most_items: int
) -> None:
    shape, part = case
    cut = cut_to(part, strides_of(shape), most_items)
    assert sum(box.num_items for box in cut) == part.num_items
    assert set().union(*map(items, cut)) == items(part)
    assert all(span_of(box.shape, strides_of(shape)) <= most_items for box in cut)


def test_a_box_is_written_as_ranges_and_a_part_comes_back_from_its_text() -> None:
    assert str(Box((2, 0), (3, 4))) == "[2:5, 0:4]"
    for part in (TensorPart((8, 4), (4, 0)), TensorPart((3,), None), TensorPart((), ())):
        assert parse_part(str(part)) == part
