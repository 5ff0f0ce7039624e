"""Splits one dimension of a tensor among the coordinates of a mesh axis.

The result is a list of runs of neighbouring items, with their offsets in the stored part.
"""

from dataclasses import dataclass

from ftrun.sharding.rules import DimensionSplit, FusedPart, UnevenPolicy


class SplitImpossible(ValueError):
    """A size does not fit a rule; the caller adds the name of the tensor."""


@dataclass(frozen=True, slots=True)
class IndexRun:
    """Neighbouring items of one coordinate.

    Args:
        start: first item in the whole dimension.
        size: number of items; at least 1.
        at: offset in what the coordinate stores.
    """

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

    Raises:
        SplitImpossible: the dimension cannot be split by this rule.
    """
    if cut.size is not None and cut.size != size:
        raise SplitImpossible(
            f"dimension {cut.dim} has {size} items, and the rule's size {cut.size}"
        )
    padded = round_up(size, cut.pad_to * count) if cut.pad_to else size
    weights = sum(part.weight for part in cut.parts)
    runs: list[IndexRun] = []
    start = at = 0
    for part in cut.parts:
        length, rest = divmod(padded * part.weight, weights)
        if rest:
            raise SplitImpossible(
                f"dimension {cut.dim} has {padded} items, which do not divide by parts of "
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
        raise SplitImpossible(f"{length} items do not divide by units of {part.unit}")
    if part.sizes is not None:
        if len(part.sizes) != count or sum(part.sizes) != units:
            raise SplitImpossible(
                f"sizes {list(part.sizes)} are {sum(part.sizes)} units for {len(part.sizes)} "
                f"coordinates, and there are {units} units of {part.unit} for {count}"
            )
        low, high = sum(part.sizes[:index]), sum(part.sizes[: index + 1])
    elif part.is_shared and count > units > 0:
        if count % units:
            raise SplitImpossible(f"{units} units cannot be shared alike by {count} coordinates")
        low = index * units // count
        high = low + 1
    else:
        low, high = divide(units, count, index, uneven)
    return low * part.unit, (high - low) * part.unit


def divide(
    units: int, count: int, index: int, uneven: UnevenPolicy = UnevenPolicy.BALANCED
) -> tuple[int, int]:
    """Begin and end of one of `count` shares."""
    if uneven is UnevenPolicy.CHUNK:
        step = -(-units // count)
        return min(units, index * step), min(units, (index + 1) * step)
    step, more = divmod(units, count)
    return index * step + min(index, more), (index + 1) * step + min(index + 1, more)


def round_up(size: int, step: int) -> int:
    return -(-size // step) * step
