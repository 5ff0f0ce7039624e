"""Computes the copies of boxes from the stored entries of one world to an entry of another.

Each item of the target entry that is not padding is written by exactly one copy. If several ranks
store the same items, the first listed one is read. Where boxes overlap, a later box provides only
the items that no earlier one has.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ftrun.sharding.partition import StoredRegion
from ftrun.snapshot.boxes import Box, Shape, overlap, without


@dataclass(frozen=True, slots=True)
class BoxCopy:
    """A box of items that is copied from one entry to another.

    Args:
        rank: rank that stores the source entry.
        entry: name of the source entry.
        first: first item in the source entry.
        strides: in the source entry, in items.
        to_first: first item in the target entry.
        to_strides: in the target entry, in items.
        shape: of the box; no dimension is 0.
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
        """Items of the source entry from the first to the last one of the box."""
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))

    def cut_to(self, most_items: int) -> "list[BoxCopy]":
        """Cuts this copy, in order, into copies whose spans have at most `most_items` items."""
        if self.span <= most_items:
            return [self]
        # Such a dimension exists, because a single item has a span of one.
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
    """A part of a tensor that no rank stores."""

    tensor: str
    box: Box

    def __str__(self) -> str:
        return f"{self.tensor}{self.box}"


@dataclass(frozen=True, slots=True)
class Stock:
    """The stored regions of all ranks of a world, by tensor and copy: rank, entry, region."""

    _held: dict[str, dict[int, list[tuple[int, str, StoredRegion]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def add(self, rank: int, entry: str, patches: Iterable[StoredRegion]) -> None:
        for patch in patches:
            self._held[patch.tensor][patch.copy].append((rank, entry, patch))

    def copies(self, wanted: Sequence[StoredRegion]) -> list[list[BoxCopy]]:
        """The copies into an entry, for each divergent copy of its tensors.

        Args:
            wanted: the regions of the entry, all of tensors with equally many copies.

        Raises:
            RegionMissing: no rank stores a part.
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
    """No rank stores a part of a tensor; the caller adds the entry that needs it."""

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
    """Item of the entry of a region at which a box of the tensor begins."""
    steps = zip(box.offsets, patch.box.offsets, patch.strides, strict=True)
    return patch.first + sum((at - begin) * stride for at, begin, stride in steps)
