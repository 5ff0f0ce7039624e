"""From which stored items those of another layout come.

Runs in:  the process that converts checkpoints. Pure.
Takes in: the patches of all ranks of one world, those of one entry of another.
Gives:    copies of boxes: each item of the entry that is no padding is written by just one.

Where several ranks have the same, the first one that is listed is read; a box that overlaps
another is read as far as nothing before it has it.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ftrun.sharding.partition import StoredRegion
from ftrun.snapshot.boxes import Box, Shape, overlap, without


@dataclass(frozen=True, slots=True)
class BoxCopy:
    """Items of one shape that go from one entry into another.

    Args:
        rank: that stores the entry they come from.
        entry: its name.
        first: item of that entry with which they begin.
        strides: in it, in items.
        to_first: item of the entry they go to with which they begin.
        to_strides: in that.
        shape: of both; no dimension is 0.
    """

    rank: int
    entry: str
    first: int
    strides: Shape
    to_first: int
    to_strides: Shape
    shape: Shape

    @property
    def num_items(self) -> int:
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """Items of the entry they come from, from the first to the last of them."""
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))

    def cut_to(self, most_items: int) -> "list[BoxCopy]":
        """The same in copies whose spans are no longer than so many items, in order."""
        if self.span <= most_items:
            return [self]
        # There is such a dimension, as a single item has a span of one.
        dim = next(at for at, size in enumerate(self.shape) if size > 1)
        rows = max(1, most_items // self.strides[dim])
        found: list[BoxCopy] = []
        for at in range(0, self.shape[dim], rows):
            shape = list(self.shape)
            shape[dim] = min(rows, self.shape[dim] - at)
            part = replace(
                self,
                first=self.first + at * self.strides[dim],
                to_first=self.to_first + at * self.to_strides[dim],
                shape=tuple(shape),
            )
            found += part.cut_to(most_items)
        return found


@dataclass(frozen=True, slots=True)
class MissingRegion:
    """A part of a tensor that nobody stores."""

    tensor: str
    box: Box

    def __str__(self) -> str:
        return f"{self.tensor}{self.box}"


@dataclass(frozen=True, slots=True)
class Stock:
    """What all ranks of a world store, by tensor and copy: rank, entry, patch."""

    _held: dict[str, dict[int, list[tuple[int, str, StoredRegion]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def add(self, rank: int, entry: str, patches: Iterable[StoredRegion]) -> None:
        for patch in patches:
            self._held[patch.tensor][patch.copy].append((rank, entry, patch))

    def copies(self, wanted: Sequence[StoredRegion]) -> list[list[BoxCopy]]:
        """What is to be copied into an entry, for each copy that went its own way.

        Args:
            wanted: the patches of the entry, all of tensors with as many copies.

        Raises:
            HoleFound: a part is nowhere.
        """
        numbers = sorted({n for patch in wanted for n in self._held[patch.tensor]}) or [0]
        return [
            [copy for patch in wanted for copy in self._for_patch(patch, number)]
            for number in numbers
        ]

    def _for_patch(self, wanted: StoredRegion, number: int) -> list[BoxCopy]:
        missing = [wanted.box]
        found = []
        for rank, entry, patch in self._held[wanted.tensor][number]:
            left = []
            for box in missing:
                common = overlap(box, patch.box)
                if common is not None:
                    found.append(_copy(rank, entry, patch, wanted, common))
                    left += without(box, common)
                else:
                    left.append(box)
            missing = left
            if not missing:
                return found
        raise RegionMissing(MissingRegion(wanted.tensor, missing[0]))


class RegionMissing(ValueError):
    """A part of a tensor is nowhere; in words, to be told with what wants it."""

    def __init__(self, missing: MissingRegion) -> None:
        self.missing = missing
        super().__init__(f"no rank stores {missing}")


def _copy(rank: int, entry: str, source: StoredRegion, target: StoredRegion, box: Box) -> BoxCopy:
    return BoxCopy(
        rank,
        entry,
        _item_of(source, box),
        source.strides,
        _item_of(target, box),
        target.strides,
        box.shape,
    )


def _item_of(patch: StoredRegion, box: Box) -> int:
    """Where a box of the tensor begins in the entry of a patch."""
    steps = zip(box.offsets, patch.box.offsets, patch.strides, strict=True)
    return patch.first + sum((at - begin) * stride for at, begin, stride in steps)
