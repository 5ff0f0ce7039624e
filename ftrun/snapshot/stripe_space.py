"""Maps the blocks of a node to bytes in the images of its ranks.

The coded runs of a node, rank after rank, form one row of bytes that is cut into blocks.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ftrun.errors import LayoutUnknown
from ftrun.snapshot.layout import Piece
from ftrun.snapshot.redundancy import NodeRedundancy, PieceRun


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of one rank's image; `offset` counts from the start of its data."""

    rank: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Neighbouring coded pieces of one rank, and their start in the row."""

    start: int
    rank: int
    first: int
    count: int
    offset: int
    num_bytes: int


class StripeSpace:
    """The row of a node's coded bytes.

    Args:
        plan: the node's.
        pieces: of each rank's layout.
        block_bytes: as in the plan of the group.

    Raises:
        LayoutUnknown: plan and layouts do not belong together.
    """

    def __init__(
        self, plan: NodeRedundancy, pieces: Mapping[int, Sequence[Piece]], block_bytes: int
    ) -> None:
        self.block_bytes = block_bytes
        self._pieces = pieces
        self._stretches: list[_Stretch] = []
        start = 0
        for rank in plan.ranks:
            for run in rank.coded:
                stretch = self._stretch(start, rank.rank, run)
                self._stretches.append(stretch)
                start += stretch.num_bytes
        self.num_bytes = start
        self._starts = [stretch.start for stretch in self._stretches]
        if start != plan.coded_bytes:
            raise LayoutUnknown(f"{start} bytes are coded and the plan says {plan.coded_bytes}")

    @property
    def num_blocks(self) -> int:
        return -(-self.num_bytes // self.block_bytes)

    def extents(self, block: int) -> list[Extent]:
        return [Extent(s.rank, s.offset + at - s.start, size) for s, at, size in self._parts(block)]

    def pieces_in(self, block: int) -> list[tuple[int, int]]:
        """(rank, piece) of each piece that has bytes in a block."""
        found = []
        for stretch, at, size in self._parts(block):
            begin = stretch.offset + at - stretch.start
            pieces = self._pieces[stretch.rank]
            index = self._piece_at(stretch, begin)
            while index < stretch.first + stretch.count and pieces[index].offset < begin + size:
                found.append((stretch.rank, index))
                index += 1
        return found

    def blocks_of(self, rank: int) -> list[int]:
        found: set[int] = set()
        for stretch in self._stretches:
            if stretch.rank == rank and stretch.num_bytes:
                last = stretch.start + stretch.num_bytes - 1
                found.update(range(stretch.start // self.block_bytes, last // self.block_bytes + 1))
        return sorted(found)

    def blocks_with(self, rank: int, piece: int) -> list[int]:
        """The blocks with bytes of one piece; empty if it is not coded."""
        for stretch in self._stretches:
            if stretch.rank == rank and 0 <= piece - stretch.first < stretch.count:
                found = self._pieces[rank][piece]
                start = stretch.start + found.offset - stretch.offset
                last = start + max(found.num_bytes, 1) - 1
                return list(range(start // self.block_bytes, last // self.block_bytes + 1))
        return []

    def _stretch(self, start: int, rank: int, run: PieceRun) -> _Stretch:
        pieces = self._pieces.get(rank, ())
        if not 0 < run.count <= len(pieces) - run.first:
            raise LayoutUnknown(f"rank {rank} has {len(pieces)} pieces and the plan has {run}")
        offset = pieces[run.first].offset
        last = pieces[run.first + run.count - 1]
        size = last.offset + last.num_bytes - offset
        return _Stretch(start, rank, run.first, run.count, offset, size)

    def _parts(self, block: int) -> Iterable[tuple[_Stretch, int, int]]:
        """Stretches of a block: stretch, offset in the row, number of bytes."""
        at = block * self.block_bytes
        end = min(at + self.block_bytes, self.num_bytes)
        index = bisect_right(self._starts, at) - 1
        while at < end:
            stretch = self._stretches[index]
            size = min(end, stretch.start + stretch.num_bytes) - at
            if size > 0:
                yield stretch, at, size
                at += size
            index += 1

    def _piece_at(self, stretch: _Stretch, offset: int) -> int:
        pieces = self._pieces[stretch.rank]
        low, high = stretch.first, stretch.first + stretch.count
        while high - low > 1:
            middle = (low + high) // 2
            if pieces[middle].offset <= offset:
                low = middle
            else:
                high = middle
        return low
