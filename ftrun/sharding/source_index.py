"""All that a version holds, put together from the shards of all its ranks.

Runs in:  worker, where a version is restored into another number of ranks. Pure.
Takes in: the head of every rank's shard.
Gives:    a `SourceIndex`: by name, the whole tensor and its chunks, each with the ranks that hold
          it; errors that name what is not there.

Rule 1: what a chunk is part of is told by name and offsets, never by the number of its rank.
Rule 2: a tensor of no optimizer that every rank has whole is each rank's own, however equal they
        look: each new rank takes that of one old rank. All else has one content in the world.

Source: atoms by name that any number of ranks can be put together from are those of Universal
Checkpointing (arXiv 2406.18820); here they are never written, only read where they lie.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ftrun.errors import LayoutUnknown, RanksDiffer, TensorIncomplete
from ftrun.ids import Rank
from ftrun.snapshot.boxes import Box, Shape, first_hole, whole
from ftrun.snapshot.layout import CopyTiming, LayoutEntry
from ftrun.snapshot.shard_header import ShardHeader

OURS = "ftrun."
"""Entries with such names are padding and plain values, and no tensors of the script."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A rank, and the entry of its shard that holds a chunk."""

    rank: Rank
    entry: LayoutEntry


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor and those who hold it, the one to read from first."""

    box: Box
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """One tensor of the version.

    Args:
        is_shared: it belongs to an optimizer or is sharded, so all who hold a chunk hold the same.
        unplaced: ranks whose part of it is no single box.
    """

    name: str
    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]
    is_shared: bool
    unplaced: tuple[Rank, ...]

    def check_is_whole(self) -> None:
        """Every item is in some chunk.

        Raises:
            TensorIncomplete: names a part that is in none.
        """
        hole = first_hole(whole(self.shape), [chunk.box for chunk in self.chunks])
        if hole is not None:
            raise TensorIncomplete(
                key=self.name,
                shape=self.shape,
                hole=str(hole),
                chunks=[str(chunk.box) for chunk in self.chunks],
                unplaced=self.unplaced,
            )

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class SourceIndex:
    """Every tensor of a version, by name.

    Args:
        heads: of all ranks from 0 on.
        prefer: old rank to read from where several hold the same; the others follow in turn.

    Raises:
        LayoutUnknown: a shard does not say what its tensors are parts of.
    """

    def __init__(self, heads: Mapping[Rank, ShardHeader], *, prefer: Rank) -> None:
        unknown = [rank for rank, head in heads.items() if not head.layout.knows_parts]
        if unknown:
            raise LayoutUnknown(
                f"the snapshot was taken by an older ftrun, which did not note what each tensor is "
                f"a part of (rank {unknown[0]}): it can only be restored by as many ranks as took "
                f"it, {len(heads)}"
            )
        self._heads = heads
        size = len(heads)
        self._order = sorted(heads, key=lambda rank: (rank - prefer) % size)
        self._found: dict[str, WholeTensor] = {}

    @cached_property
    def common_names(self) -> list[str]:
        """Tensors of which every rank holds something, in the order of the first rank's shard."""
        first, *others = (self._heads[rank].entries for rank in self._order)
        return [
            name
            for name in first
            if not name.startswith(OURS) and all(name in entries for entries in others)
        ]

    @cached_property
    def names(self) -> list[str]:
        """Tensors of which some rank holds something, in the order in which they are met."""
        met = (name for rank in self._order for name in self._heads[rank].entries)
        return [name for name in dict.fromkeys(met) if not name.startswith(OURS)]

    def tensor(self, name: str) -> WholeTensor | None:
        """The whole tensor of this name; None where no rank has one.

        Raises:
            RanksDiffer: ranks hold parts of different tensors under this name.
        """
        if name not in self._found:
            holders = [
                Holder(rank, entry)
                for rank in self._order
                if (entry := self._heads[rank].entries.get(name)) is not None
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
    chunks = tuple(Chunk(box, tuple(by_box[box])) for box in by_box)
    return WholeTensor(name, first.dtype, first.whole_shape, chunks, is_shared, tuple(unplaced))


def _kind(entry: LayoutEntry) -> tuple[str, Shape]:
    return entry.dtype, entry.whole_shape


def _described(entry: LayoutEntry) -> str:
    return f"{entry.dtype}{list(entry.whole_shape)}"
