"""Which boxes of which whole tensors lie in what a rank stores, item by item.

Runs in:  the process that converts checkpoints. Pure.
Takes in: the shape of a whole tensor, how it is cut, the coordinates of a rank.
Gives:    a `StoredView`: the shape of what the rank stores, and its blocks; `StoredRegion`es,
          which say the
          same of a stored entry, also of a run of a long row of items.

A patch does not say of what shape the entry is, only how its items are reached: so a column of a
matrix, a head of a fused projection and the end of a tensor in a flat buffer are all the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftrun.sharding.cuts import IndexRun, StoredRuns, hold, round_up
from ftrun.sharding.mesh import Mesh
from ftrun.sharding.rules import DimensionSplit, FlatBuffer
from ftrun.snapshot.boxes import Box, Shape, overlap, strides_of, whole


@dataclass(frozen=True, slots=True)
class PartBlock:
    """A box of the whole tensor, and where it begins in what is stored."""

    at: Shape
    box: Box


@dataclass(frozen=True, slots=True)
class StoredView:
    """What a rank stores of one tensor; what no block covers is padding."""

    shape: Shape
    blocks: tuple[PartBlock, ...]


@dataclass(frozen=True, slots=True)
class StoredRegion:
    """A box of a whole tensor in a stored entry.

    Args:
        tensor: name of the whole one.
        box: in it; not empty.
        first: the entry's item that is the box's first.
        strides: in the entry, from one index of the box to the next, along each dimension.
        copy: which of the copies that went their own ways; 0 where there is one.
    """

    tensor: str
    box: Box
    first: int
    strides: Shape
    copy: int = 0


def view_of(
    shape: Shape, cuts: Sequence[DimensionSplit], mesh: Mesh, where: Mapping[str, int]
) -> StoredView:
    """What the rank at these coordinates stores, one cut after the other.

    Args:
        shape: of the whole tensor.
        cuts: their dimensions are there.
        mesh: of the world.
        where: coordinates of the rank.

    Raises:
        CutImpossible: a dimension cannot be cut so.
    """
    box = whole(shape)
    view = StoredView(shape, () if box.is_empty else (PartBlock(box.offsets, box),))
    for cut in cuts:
        dim = cut.dim % len(shape)
        size = view.shape[dim]
        held = hold(cut, size, count=mesh.size_of(cut.axis), index=where[cut.axis])
        view = _cut(view, dim, held)
    return view


def _cut(view: StoredView, dim: int, held: StoredRuns) -> StoredView:
    shape = (*view.shape[:dim], held.size, *view.shape[dim + 1 :])
    blocks = [_within(block, dim, run) for run in held.runs for block in view.blocks]
    return StoredView(shape, tuple(block for block in blocks if block is not None))


def _within(block: PartBlock, dim: int, run: IndexRun) -> PartBlock | None:
    """What of a block lies in a run of a dimension, where the run is stored."""
    low = max(block.at[dim], run.start)
    high = min(block.at[dim] + block.box.shape[dim], run.start + run.size)
    if low >= high:
        return None
    return PartBlock(
        _with(block.at, dim, low - run.start + run.at),
        Box(
            _with(block.box.offsets, dim, block.box.offsets[dim] + low - block.at[dim]),
            _with(block.box.shape, dim, high - low),
        ),
    )


def _with(numbers: Shape, dim: int, number: int) -> Shape:
    return (*numbers[:dim], number, *numbers[dim + 1 :])


def patches_of(tensor: str, view: StoredView, *, copy: int = 0) -> tuple[StoredRegion, ...]:
    """The patches of an entry that stores just this view."""
    strides = strides_of(view.shape)
    return tuple(
        StoredRegion(tensor, block.box, _item(block.at, strides), strides, copy)
        for block in view.blocks
    )


@dataclass(frozen=True, slots=True)
class FlatRange:
    """What a coordinate stores of a row of items: so many, padding included, and where from."""

    num_items: int
    patches: tuple[StoredRegion, ...]


def flat_part(
    members: Sequence[tuple[str, StoredView]], flat: FlatBuffer, *, count: int, index: int
) -> FlatRange:
    """One coordinate's run of a row in which views lie one after the other.

    Args:
        members: name of each whole tensor, and what of it lies in this row.
        flat: how the row is padded.
        count: how many coordinates share the row.
        index: which of them.
    """
    used = sum(math.prod(view.shape) for _, view in members)
    num_items = round_up(used, max(1, flat.pad_to) * count) // count
    start, end = index * num_items, (index + 1) * num_items
    patches: list[StoredRegion] = []
    at = 0
    for name, view in members:
        size = math.prod(view.shape)
        low, high = max(start - at, 0), min(end - at, size)
        if low < high:
            patches += _run_patches(name, view, range(low, high), at - start)
        at += size
    return FlatRange(num_items, tuple(patches))


def _run_patches(name: str, view: StoredView, items: range, shift: int) -> list[StoredRegion]:
    """The patches of a run of a view's items, which lie `shift` further in the entry."""
    strides = strides_of(view.shape)
    found = []
    for box in boxes_of_run(view.shape, items.start, items.stop):
        for block in view.blocks:
            common = overlap(box, Box(block.at, block.box.shape))
            if common is not None:
                moved = zip(block.box.offsets, common.offsets, block.at, strict=True)
                offsets = tuple(offset + at - begin for offset, at, begin in moved)
                first = _item(common.offsets, strides) + shift
                found.append(StoredRegion(name, Box(offsets, common.shape), first, strides))
    return found


def boxes_of_run(shape: Shape, start: int, end: int) -> list[Box]:
    """A run of the items of a tensor, which lie row by row, as boxes in order.

    Args:
        shape: of the tensor.
        start: first item.
        end: behind the last one; `start <= end <=` items of the tensor.
    """
    if start >= end:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    (first, low), (last, high) = divmod(start, row), divmod(end, row)
    if first == last:
        return _in_row(first, shape, low, high)
    found = []
    if low:
        found += _in_row(first, shape, low, row)
        first += 1
    if first < last:
        found.append(Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    return found + _in_row(last, shape, 0, high)


def _in_row(index: int, shape: Shape, low: int, high: int) -> list[Box]:
    inner = boxes_of_run(shape[1:], low, high)
    return [Box((index, *box.offsets), (1, *box.shape)) for box in inner]


def _item(at: Shape, strides: Shape) -> int:
    return sum(index * step for index, step in zip(at, strides, strict=True))
