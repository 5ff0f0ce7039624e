"""Computes which boxes of which whole tensors are in the entries that a rank stores.

A split of a dimension gives runs of neighbouring items, with their offsets in the stored part. A
`StoredRegion` states only how the items of an entry are reached, not the shape of the entry. A
column of a matrix, a head of a fused projection and the end of a tensor in a flat buffer are
therefore all regions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ftrun.sharding.rules import DimensionSplit, FlatBuffer, FusedPart, Mesh, UnevenPolicy
from ftrun.snapshot.boxes import Box, Shape, item_at, overlap, strides_of, whole, without


class SplitImpossible(ValueError):
    """A size does not fit a rule; the caller adds the name of the tensor."""


@dataclass(frozen=True, slots=True)
class IndexRun:
    """Neighbouring items of one coordinate; `at` is their offset in what the coordinate stores."""

    start: int
    size: int
    at: int


@dataclass(frozen=True, slots=True)
class StoredRuns:
    """The runs that a coordinate stores along a dimension; items outside the runs are padding."""

    size: int
    runs: tuple[IndexRun, ...]


def hold(cut: DimensionSplit, size: int, *, count: int, index: int) -> StoredRuns:
    """The part of a dimension of `size` items that one of `count` coordinates stores.

    Raises SplitImpossible if the rule cannot split the dimension.
    """
    if cut.size is not None and cut.size != size:
        raise SplitImpossible(
            f"dimension {cut.dim} has {size} items, but the rule has size {cut.size}"
        )
    padded = round_up(size, cut.pad_to * count) if cut.pad_to else size
    weights = sum(part.weight for part in cut.parts)
    runs: list[IndexRun] = []
    start = at = 0
    for part in cut.parts:
        length, rest = divmod(padded * part.weight, weights)
        if rest:
            raise SplitImpossible(
                f"dimension {cut.dim} has {padded} items, which is not a multiple of parts of "
                f"{' : '.join(str(one.weight) for one in cut.parts)}"
            )
        first, num = share(part, cut.uneven, length, count=count, index=index)
        real = min(start + first + num, size) - (start + first)
        if real > 0:
            runs.append(IndexRun(start + first, real, at))
        start, at = start + length, at + num
    return StoredRuns(at, tuple(runs))


def share(
    part: FusedPart, uneven: UnevenPolicy, length: int, *, count: int, index: int
) -> tuple[int, int]:
    """First item and number of items that a coordinate has of one fused part."""
    units, rest = divmod(length, part.unit)
    if rest:
        raise SplitImpossible(f"{length} items are not a multiple of units of {part.unit}")
    if part.sizes is not None:
        if len(part.sizes) != count or sum(part.sizes) != units:
            raise SplitImpossible(
                f"sizes {list(part.sizes)} are {sum(part.sizes)} units for {len(part.sizes)} "
                f"coordinates, but there are {units} units of {part.unit} for {count}"
            )
        low, high = sum(part.sizes[:index]), sum(part.sizes[: index + 1])
    elif part.is_shared and count > units > 0:
        if count % units:
            raise SplitImpossible(
                f"{units} units cannot be divided evenly among {count} coordinates"
            )
        low = index * units // count
        high = low + 1
    else:
        low, high = divide(units, count, index, uneven)
    return low * part.unit, (high - low) * part.unit


def divide(
    units: int, count: int, index: int, uneven: UnevenPolicy = UnevenPolicy.BALANCED
) -> tuple[int, int]:
    if uneven is UnevenPolicy.CHUNK:
        step = -(-units // count)
        return min(units, index * step), min(units, (index + 1) * step)
    step, more = divmod(units, count)
    return index * step + min(index, more), (index + 1) * step + min(index + 1, more)


def round_up(size: int, step: int) -> int:
    return -(-size // step) * step


@dataclass(frozen=True, slots=True)
class PartBlock:
    """A box of the whole tensor, and its offset in the stored shape."""

    at: Shape
    box: Box


@dataclass(frozen=True, slots=True)
class StoredView:
    """The part of one tensor that a rank stores; items outside the blocks are padding."""

    shape: Shape
    blocks: tuple[PartBlock, ...]


@dataclass(frozen=True, slots=True)
class StoredRegion:
    """A box of a whole tensor in a stored entry.

    Args:
        box: in the tensor; not empty.
        first: item of the entry that is the first one of the box.
        strides: in the entry, from one index of the box to the next, along each dimension.
        copy: number of the divergent copy (`average` rules); 0 if there is only one.
    """

    tensor: str
    box: Box
    first: int
    strides: Shape
    copy: int = 0


def view_of(
    shape: Shape, cuts: Sequence[DimensionSplit], mesh: Mesh, where: Mapping[str, int]
) -> StoredView:
    """The part of a tensor that the rank at coordinates `where` stores, after all cuts.

    Raises SplitImpossible if a dimension cannot be split by its rule.
    """
    box = whole(shape)
    view = StoredView(shape, () if box.is_empty else (PartBlock(box.offsets, box),))
    for cut in cuts:
        dim = cut.dim % len(shape)
        size = view.shape[dim]
        held = hold(cut, size, count=mesh.size_of(cut.axis), index=where[cut.axis])
        view = _cut(view, dim, held)
    return view


def padded_shape(shape: Shape, cuts: Sequence[DimensionSplit], mesh: Mesh) -> Shape:
    """The shape to which the first split of each dimension pads a tensor."""
    padded = list(shape)
    for dim, cut in _first_cuts(shape, cuts).items():
        if cut.pad_to:
            padded[dim] = round_up(shape[dim], cut.pad_to * mesh.size_of(cut.axis))
    return tuple(padded)


def padded_view(
    shape: Shape, cuts: Sequence[DimensionSplit], mesh: Mesh, where: Mapping[str, int]
) -> StoredView:
    """As `view_of`, with the padding of `padded_shape` as part of the tensor."""
    first = _first_cuts(shape, cuts).values()
    unpadded = [replace(cut, size=None, pad_to=0) if cut in first else cut for cut in cuts]
    return view_of(padded_shape(shape, cuts, mesh), unpadded, mesh, where)


def _first_cuts(shape: Shape, cuts: Sequence[DimensionSplit]) -> dict[int, DimensionSplit]:
    return {cut.dim % len(shape): cut for cut in reversed(cuts)}


def padding_of(tensor: str, shape: Shape, view: StoredView) -> tuple[StoredRegion, ...]:
    """The regions of a padded view that are outside of the tensor."""
    strides = strides_of(view.shape)
    found = []
    for block in view.blocks:
        for box in without(block.box, whole(shape)):
            moved = zip(block.at, box.offsets, block.box.offsets, strict=True)
            first = item_at(tuple(at + to - begin for at, to, begin in moved), strides)
            found.append(StoredRegion(tensor, box, first, strides))
    return tuple(found)


def _cut(view: StoredView, dim: int, held: StoredRuns) -> StoredView:
    shape = (*view.shape[:dim], held.size, *view.shape[dim + 1 :])
    blocks = [_within(block, dim, run) for run in held.runs for block in view.blocks]
    return StoredView(shape, tuple(block for block in blocks if block is not None))


def _within(block: PartBlock, dim: int, run: IndexRun) -> PartBlock | None:
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
    """The regions of an entry that stores exactly this view."""
    strides = strides_of(view.shape)
    return tuple(
        StoredRegion(tensor, block.box, item_at(block.at, strides), strides, copy)
        for block in view.blocks
    )


def flat_part(
    members: Sequence[tuple[str, StoredView]], flat: FlatBuffer, *, count: int, index: int
) -> tuple[int, tuple[StoredRegion, ...]]:
    """One coordinate's range of a flat buffer that stores views one after the other.

    Returns its number of items with padding, and its regions.
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
    return num_items, tuple(patches)


def _run_patches(name: str, view: StoredView, items: range, shift: int) -> list[StoredRegion]:
    """The regions of a run of a view's items, which are `shift` items later in the entry."""
    strides = strides_of(view.shape)
    found = []
    for box in boxes_of_run(view.shape, items.start, items.stop):
        for block in view.blocks:
            common = overlap(box, Box(block.at, block.box.shape))
            if common is not None:
                moved = zip(block.box.offsets, common.offsets, block.at, strict=True)
                offsets = tuple(offset + at - begin for offset, at, begin in moved)
                first = item_at(common.offsets, strides) + shift
                found.append(StoredRegion(name, Box(offsets, common.shape), first, strides))
    return found


def boxes_of_run(shape: Shape, start: int, end: int) -> list[Box]:
    """A run of the items of a tensor, stored row by row, as boxes in order."""
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
