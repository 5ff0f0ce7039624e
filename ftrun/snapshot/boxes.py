"""Boxes: the position of a tensor part in the whole tensor.

Offsets and shapes are in items along each dimension. A tensor without dimensions has one item, so
its box is never empty. A box that is empty along any dimension holds nothing, whatever its offsets.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """Items of a tensor: first index and size along each dimension."""

    offsets: Shape
    shape: Shape

    @property
    def num_items(self) -> int:
        return math.prod(self.shape)

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    @property
    def end(self) -> Shape:
        return tuple(at + size for at, size in zip(self.offsets, self.shape, strict=True))

    def __str__(self) -> str:
        ranges = (f"{at}:{end}" for at, end in zip(self.offsets, self.end, strict=True))
        return f"[{', '.join(ranges)}]"


def whole(shape: Shape) -> Box:
    return Box((0,) * len(shape), shape)


def overlap(one: Box, other: Box) -> Box | None:
    """The items that are in both boxes; None if there are none."""
    starts = tuple(map(max, one.offsets, other.offsets))
    shape = tuple(min(a, b) - start for a, b, start in zip(one.end, other.end, starts, strict=True))
    return Box(starts, shape) if all(size > 0 for size in shape) else None


def without(box: Box, taken: Box) -> list[Box]:
    """The rest of a box, as boxes that do not overlap: at most two along each dimension."""
    common = overlap(box, taken)
    if common is None:
        return [box]
    left: list[Box] = []
    starts, ends = list(box.offsets), list(box.end)
    for at, (low, high) in enumerate(zip(common.offsets, common.end, strict=True)):
        if starts[at] < low:
            left.append(_between(starts, [*ends[:at], low, *ends[at + 1 :]]))
        if high < ends[at]:
            left.append(_between([*starts[:at], high, *starts[at + 1 :]], ends))
        starts[at], ends[at] = low, high
    return left


def first_hole(target: Box, chunks: Iterable[Box]) -> Box | None:
    """A part of `target` that no chunk covers; None if all of it is covered."""
    missing = [] if target.is_empty else [target]
    # Sorted, so that the missing part stays one box for the usual chunks, which are row blocks.
    chunks = sorted(chunks, key=lambda box: box.offsets)
    if _are_rows(target, chunks):
        return None
    for chunk in chunks:
        if not missing:
            return None
        missing = [left for box in missing for left in without(box, chunk)]
    return min(missing, key=lambda box: box.offsets, default=None)


def _are_rows(target: Box, chunks: Sequence[Box]) -> bool:
    """Whether chunks cover the target as consecutive row blocks, the usual case."""
    if not target.shape:
        return False
    at = target.offsets[0]
    for chunk in chunks:
        is_row = (chunk.offsets[1:], chunk.shape[1:]) == (target.offsets[1:], target.shape[1:])
        if not is_row or chunk.offsets[0] > at:
            return False
        at = max(at, chunk.offsets[0] + chunk.shape[0])
    return at >= target.offsets[0] + target.shape[0]


def strides_of(shape: Shape) -> Shape:
    """Items from one index to the next along each dimension; the last dimension varies fastest."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def item_at(offsets: Shape, strides: Shape) -> int:
    return sum(index * step for index, step in zip(offsets, strides, strict=True))


def span_of(shape: Shape, strides: Shape) -> int:
    """Items from the first to the last one of a block that is not empty."""
    return 1 + item_at(tuple(size - 1 for size in shape), strides)


def cut_to(part: Box, strides: Shape, most_items: int) -> list[Box]:
    """Cuts a box, in order, into boxes whose spans have at most `most_items` items, or one item.

    The box is not empty; `strides` are those of the memory that holds it.
    """
    if span_of(part.shape, strides) <= max(1, most_items):
        return [part]
    # Such a dimension exists, because the span of a single item has one item.
    dim = next(at for at, size in enumerate(part.shape) if size > 1)
    rows = max(1, most_items // strides[dim])
    found: list[Box] = []
    for at in range(0, part.shape[dim], rows):
        offsets, shape = list(part.offsets), list(part.shape)
        offsets[dim] += at
        shape[dim] = min(rows, part.shape[dim] - at)
        found += cut_to(Box(tuple(offsets), tuple(shape)), strides, most_items)
    return found


def _between(starts: Iterable[int], ends: Iterable[int]) -> Box:
    begin = tuple(starts)
    return Box(begin, tuple(end - at for at, end in zip(begin, ends, strict=True)))


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The whole tensor that an entry is a part of, and the offsets of the part.

    Args:
        shape: of the whole tensor.
        offsets: of the part; None if it is not a single box of the tensor, such as strided shards
            and partial sums. Such a part cannot be joined with others.
    """

    shape: Shape
    offsets: Shape | None

    def __str__(self) -> str:
        offsets = "?" if self.offsets is None else ",".join(map(str, self.offsets))
        return f"{','.join(map(str, self.shape))}@{offsets}"


def parse_part(text: str) -> TensorPart:
    """Raises ValueError if the text is not a part."""
    shape, at, offsets = text.partition("@")
    if not at:
        raise ValueError(f"{text!r} is not a part of a tensor")
    return TensorPart(_numbers(shape), None if offsets == "?" else _numbers(offsets))


def _numbers(text: str) -> Shape:
    return tuple(int(number) for number in text.split(",")) if text else ()
