"""A run of items is cut into boxes that hold just these items, in order."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.sharding.box_copies import RegionMissing, Stock
from ftrun.sharding.mesh import Mesh
from ftrun.sharding.partition import StoredRegion, boxes_of_run, patches_of, view_of
from ftrun.sharding.rules import DimensionSplit
from ftrun.snapshot.boxes import Box

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


def test_what_nobody_stores_is_named() -> None:
    stock = Stock()
    stock.add(0, "w", [StoredRegion("w", Box((0, 0), (2, 3)), 0, (3, 1))])
    with pytest.raises(RegionMissing, match=r"no rank stores w\[2:4, 0:3\]"):
        stock.copies([StoredRegion("w", Box((0, 0), (4, 3)), 0, (3, 1))])
    with pytest.raises(RegionMissing, match="no rank stores other"):
        stock.copies([StoredRegion("other", Box((0,), (4,)), 0, (1,))])


def test_what_overlaps_is_copied_once() -> None:
    stock = Stock()
    for rank, (low, high) in enumerate([(0, 3), (1, 5), (4, 8)]):
        stock.add(rank, "w", [StoredRegion("w", Box((low,), (high - low,)), 0, (1,))])
    (copies,) = stock.copies([StoredRegion("w", Box((0,), (8,)), 0, (1,))])
    assert [(c.rank, c.first, c.to_first, c.num_items) for c in copies] == [
        (0, 0, 0, 3),
        (1, 2, 3, 2),
        (2, 1, 5, 3),
    ]
