"""Indexes the tensors of a version from the shard headers of all its ranks.

Runs in:  worker, if a version is restored into another number of ranks. Pure.
Takes in: the header of every rank's shard.
Gives:    a `SourceIndex`: by name, the whole tensor and its chunks, each with the ranks that hold
          it; errors that name missing parts.

Rule 1: the name and the offsets identify a chunk, never the number of its rank.
Rule 2: a tensor that belongs to no optimizer and that every rank has whole is each rank's own, even
        if all are equal. Each new rank takes that of one old rank. Every other tensor has one
        content in the world.

Source: atoms by name from which any number of ranks can be assembled are from Universal
        Checkpointing (arXiv 2406.18820). Here they are never written, only read from the shards.
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
"""Prefix of padding and plain values, which are not tensors of the script."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A rank, and the entry of its shard that holds a chunk."""

    rank: Rank
    entry: LayoutEntry


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor and its holders, the preferred one first."""

    box: Box
    holders: tuple[Holder, ...]


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
        """Checks that the chunks cover every item.

        Raises:
            TensorIncomplete: names a part that no chunk covers.
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
        heads: of all ranks, from rank 0.
        prefer: old rank to read from if several hold the same; the others follow in turn.

    Raises:
        LayoutUnknown: a shard does not state what its tensors are parts of.
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
        """Tensors with an entry on every rank, in the order of the preferred rank's shard."""
        first, *others = (self._heads[rank].entries for rank in self._order)
        return [
            name
            for name in first
            if not name.startswith(OURS) and all(name in entries for entries in others)
        ]

    @cached_property
    def names(self) -> list[str]:
        """Tensors with an entry on some rank, in order of first occurrence."""
        met = (name for rank in self._order for name in self._heads[rank].entries)
        return [name for name in dict.fromkeys(met) if not name.startswith(OURS)]

    def tensor(self, name: str) -> WholeTensor | None:
        """The whole tensor of this name; None if no rank has one.

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
