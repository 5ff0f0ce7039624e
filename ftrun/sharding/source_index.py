"""Indexes the tensors of a version: which rank holds which box of which tensor.

Runs in:  the processes that reshard: worker, convert, export. Pure.
Takes in: the header of every rank's shard, and the parts that it states; or the regions of entries
          that sharding rules give.
Gives:    by name, chunks of tensors, each with the ranks that hold it; the copies of boxes that
          fill a target; errors that name missing parts.

Rule 1: the name and the offsets identify a chunk, never the number of its rank.
Rule 2: a tensor that belongs to no optimizer and that every rank has whole is each rank's own, even
        if all are equal. Each new rank takes that of one old rank. Every other tensor has one
        content in the world.
Rule 3: each item of a target is written by exactly one copy. Where boxes overlap, a later chunk
        provides only the items that no earlier one has.

Source: atoms by name from which any number of ranks can be assembled are from Universal
        Checkpointing (arXiv 2406.18820). Here they are never written, only read from the shards.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ftrun.errors import LayoutUnknown, RanksDiffer, TensorIncomplete
from ftrun.ids import Rank
from ftrun.sharding.partition import StoredRegion
from ftrun.snapshot.boxes import (
    Box,
    Shape,
    cut_to,
    first_hole,
    item_at,
    overlap,
    span_of,
    strides_of,
    whole,
    without,
)
from ftrun.snapshot.layout import ITEM_BYTES, CopyTiming, LayoutEntry
from ftrun.snapshot.shard_header import ShardHeader

OURS = "ftrun."
"""Prefix of padding and plain values, which are not tensors of the script."""

MOST_BYTES = 16 << 20
"""Limit of one read, because its bytes are held in memory until they are copied."""

Bits = npt.NDArray[np.unsignedinteger]
"""[items] of unsigned integers, or opaque ones, that hold the bits of numbers of any dtype."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes of one rank's shard; `offset` counts from the start of its data."""

    rank: Rank
    offset: int
    num_bytes: int


class ShardSource(Protocol):
    """The shards of one version."""

    def headers(self) -> Mapping[Rank, ShardHeader]:
        """Layout and digest table of every rank's shard, compared with the sealed digests.

        Raises:
            SnapshotCorrupt: one of them differs; its `rank` is the owner.
            SnapshotError, PeerError: one of them is not available.
        """
        ...

    def expect(self, ranges: Sequence[ByteRange]) -> None:
        """Announce the next reads, in order, as whole pieces; replaces earlier announcements."""
        ...

    def read(self, rank: Rank, offset: int, num_bytes: int) -> memoryview:
        """Bytes of a shard's data, not compared with a digest; raises SnapshotError, PeerError."""
        ...

    def close(self) -> None:
        """Release all memory; existing views keep theirs."""
        ...


@dataclass(frozen=True, slots=True)
class Holder:
    """A rank, and the entry of its shard that holds a chunk."""

    rank: Rank
    entry: LayoutEntry


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor.

    Args:
        box: not empty.
        holders: the preferred one first; the positions of the items in their entries are equal.
        first: item of an entry that is the first one of the box.
        strides: in an entry, in items.
    """

    box: Box
    holders: tuple[Holder, ...]
    first: int
    strides: Shape


def chunk_of(box: Box, holders: Sequence[Holder]) -> Chunk:
    return Chunk(box, tuple(holders), 0, strides_of(box.shape))


@dataclass(frozen=True, slots=True)
class BoxCopy:
    """A box of items that is copied from an entry to a target.

    Args:
        first: first item in the source entry.
        strides: in the source entry, in items.
        to_first: first item in the target.
        to_strides: in the target, in items.
    """

    holders: tuple[Holder, ...]
    first: int
    strides: Shape
    to_first: int
    to_strides: Shape
    shape: Shape

    @property
    def dtype(self) -> str:
        return self.holders[0].entry.dtype

    @property
    def num_items(self) -> int:
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        return span_of(self.shape, self.strides)

    def bytes_in(self, holder: Holder) -> ByteRange:
        """The run of a holder's bytes that contains the box."""
        item_bytes = ITEM_BYTES[self.dtype]
        offset = holder.entry.offset + self.first * item_bytes
        return ByteRange(holder.rank, offset, self.span * item_bytes)

    def cut_to(self, most_bytes: int) -> "list[BoxCopy]":
        """Cuts this copy, in order, into copies of runs of at most `most_bytes`, or one item."""
        most_items = most_bytes // ITEM_BYTES[self.dtype]
        parts = cut_to(whole(self.shape), self.strides, most_items)
        return [
            replace(
                self,
                first=self.first + item_at(part.offsets, self.strides),
                to_first=self.to_first + item_at(part.offsets, self.to_strides),
                shape=part.shape,
            )
            for part in parts
        ]


class RegionMissing(ValueError):
    """No rank stores a part of a tensor; the caller adds the entry that needs it."""


def copies_into(wanted: StoredRegion, chunks: Iterable[Chunk]) -> list[BoxCopy]:
    """The copies that fill a region of a target; raises RegionMissing if no chunk holds a part."""
    missing = [wanted.box]
    found: list[BoxCopy] = []
    for chunk in chunks:
        left: list[Box] = []
        for box in missing:
            common = overlap(box, chunk.box)
            if common is None:
                left.append(box)
                continue
            first = chunk.first + _distance(chunk.box, common, chunk.strides)
            to_first = wanted.first + _distance(wanted.box, common, wanted.strides)
            found.append(
                BoxCopy(chunk.holders, first, chunk.strides, to_first, wanted.strides, common.shape)
            )
            left += without(box, common)
        missing = left
        if not missing:
            return found
    raise RegionMissing(f"no rank stores {wanted.tensor}{missing[0]}")


def _distance(outer: Box, inner: Box, strides: Shape) -> int:
    """Items from the first one of a box to the first one of a box in it."""
    return item_at(inner.offsets, strides) - item_at(outer.offsets, strides)


def gathered(
    copies: Iterable[BoxCopy],
    num_items: int,
    item_bytes: int,
    read: Callable[[BoxCopy], memoryview],
) -> Bits:
    """[num_items] with the bits that copies bring, and 0 where they bring none.

    Items of more than 8 bytes have no unsigned integer and are opaque. `read` returns the bytes of
    a copy, at most `MOST_BYTES`.
    """
    kind = np.dtype(f"u{item_bytes}" if item_bytes <= 8 else f"V{item_bytes}")
    made: Bits = np.zeros(num_items, kind)
    for copy in copies:
        for part in copy.cut_to(MOST_BYTES):
            found = np.frombuffer(read(part), kind)
            target = _strided(made[part.to_first :], part.shape, part.to_strides)
            np.copyto(target, _strided(found, part.shape, part.strides))
    return made


def _strided(items: Bits, shape: Shape, strides: Shape) -> Bits:
    steps = tuple(step * items.itemsize for step in strides)
    return np.lib.stride_tricks.as_strided(items, shape, steps)


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """One tensor of the version.

    Args:
        is_shared: it belongs to an optimizer or is sharded, so all holders of a chunk have equal
            content.
        unplaced: ranks whose part of it is not a single box.
    """

    name: str
    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]
    is_shared: bool
    unplaced: tuple[Rank, ...]

    def check_is_whole(self) -> None:
        """Raises TensorIncomplete, which names a part that no chunk covers."""
        hole = first_hole(whole(self.shape), [chunk.box for chunk in self.chunks])
        if hole is not None:
            raise TensorIncomplete(
                key=self.name,
                shape=self.shape,
                hole=str(hole),
                chunks=[str(chunk.box) for chunk in self.chunks],
                unplaced=self.unplaced,
            )

    def copies_into(self, wanted: StoredRegion) -> list[BoxCopy]:
        found = copies_into(wanted, self.chunks)
        if self.is_shared:
            return found
        # Bytes that each rank has for itself have no replica on another rank, even if they are
        # equal.
        return [replace(copy, holders=copy.holders[:1]) for copy in found]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class SourceIndex:
    """Every tensor of a version by name, from the parts that the headers state.

    Raises LayoutUnknown if a shard does not state what its tensors are parts of. If several ranks
    hold the same, the old rank `prefer` is read; the others follow in turn.
    """

    def __init__(self, headers: Mapping[Rank, ShardHeader], *, prefer: Rank) -> None:
        unknown = [rank for rank, head in headers.items() if not head.layout.knows_parts]
        if unknown:
            raise LayoutUnknown(
                f"the snapshot was taken by an older ftrun, which did not note what each tensor is "
                f"a part of (rank {unknown[0]}): it can only be restored by as many ranks as took "
                f"it, {len(headers)}"
            )
        self._headers = headers
        size = len(headers)
        self._order = sorted(headers, key=lambda rank: (rank - prefer) % size)
        self._found: dict[str, WholeTensor] = {}

    @cached_property
    def common_names(self) -> list[str]:
        """Tensors with an entry on every rank, in the order of the preferred rank's shard."""
        first, *others = (self._headers[rank].entries for rank in self._order)
        return [
            name
            for name in first
            if not name.startswith(OURS) and all(name in entries for entries in others)
        ]

    @cached_property
    def names(self) -> list[str]:
        """Tensors with an entry on some rank, in order of first occurrence."""
        met = (name for rank in self._order for name in self._headers[rank].entries)
        return [name for name in dict.fromkeys(met) if not name.startswith(OURS)]

    def tensor(self, name: str) -> WholeTensor | None:
        """None if no rank has it; raises RanksDiffer if parts are of different tensors."""
        if name not in self._found:
            holders = [
                Holder(rank, entry)
                for rank in self._order
                if (entry := self._headers[rank].entries.get(name)) is not None
            ]
            if not holders:
                return None
            self._found[name] = _put_together(name, holders)
        return self._found[name]


def _put_together(name: str, holders: list[Holder]) -> WholeTensor:
    first = holders[0].entry
    is_shared = any(h.entry.when is CopyTiming.LAZY or h.entry.part is not None for h in holders)
    same = [h for h in holders if _kind(h.entry) == _kind(first)]
    if is_shared and len(same) < len(holders):
        other = next(h for h in holders if _kind(h.entry) != _kind(first))
        raise RanksDiffer(
            key=name,
            ranks=(holders[0].rank, other.rank),
            values=(_described(first), _described(other.entry)),
        )
    by_box: dict[Box, list[Holder]] = {}
    unplaced = []
    for holder in same:
        box = holder.entry.box
        if box is None:
            unplaced.append(holder.rank)
        elif not box.is_empty:
            by_box.setdefault(box, []).append(holder)
    chunks = tuple(chunk_of(box, by_box[box]) for box in by_box)
    return WholeTensor(name, first.dtype, first.whole_shape, chunks, is_shared, tuple(unplaced))


def _kind(entry: LayoutEntry) -> tuple[str, Shape]:
    return entry.dtype, entry.whole_shape


def _described(entry: LayoutEntry) -> str:
    return f"{entry.dtype}{list(entry.whole_shape)}"


@dataclass(frozen=True, slots=True)
class RegionIndex:
    """The chunks of a version by tensor and number of the divergent copy, from sharding rules."""

    _chunks: dict[str, dict[int, list[Chunk]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def add(self, rank: int, entry: LayoutEntry, regions: Iterable[StoredRegion]) -> None:
        holders = (Holder(Rank(rank), entry),)
        for one in regions:
            chunk = Chunk(one.box, holders, one.first, one.strides)
            self._chunks[one.tensor][one.copy].append(chunk)

    def copies(self, wanted: Sequence[StoredRegion]) -> list[list[BoxCopy]]:
        """The copies into an entry, for each divergent copy of its tensors; raises RegionMissing.

        All tensors in `wanted` have equally many copies.
        """
        numbers = sorted({n for one in wanted for n in self._chunks[one.tensor]}) or [0]
        return [
            [copy for one in wanted for copy in copies_into(one, self._chunks[one.tensor][number])]
            for number in numbers
        ]
