"""The ranks of a world as points of a mesh, such as dp 2, tp 4."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

STAGES = "pp"
"""The axis of pipeline stages: ranks along it hold different parameters without a rule."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes, the slowest first: ranks 0 and 1 differ along the last one.

    Args:
        axes: name and size of each; sizes are at least 1.
        batch_axes: axes along which ranks read different data.
    """

    axes: tuple[tuple[str, int], ...]
    batch_axes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    def size_of(self, axis: str) -> int:
        return dict(self.axes)[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank along each axis."""
        found = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return found

    def rank_at(self, where: Mapping[str, int]) -> int:
        """The rank at these coordinates; a missing axis counts as 0."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + where.get(name, 0)
        return rank

    def batch_index(self, rank: int) -> int:
        """Index of the share of the data that a rank reads, from 0."""
        where = self.coordinates(rank)
        index = 0
        for name in self.batch_axes:
            index = index * self.size_of(name) + where[name]
        return index

    @property
    def num_batches(self) -> int:
        """Number of different shares of the data."""
        return math.prod(self.size_of(name) for name in self.batch_axes)

    def counterpart(self, other: "Mesh", rank: int) -> int:
        """The rank here whose own values a rank of another mesh takes over."""
        where = other.coordinates(rank)
        return self.rank_at({name: where.get(name, 0) % size for name, size in self.axes})

    def beside(self, rank: int) -> list[int]:
        """The ranks that differ from this one only along the batch axes, by `batch_index`."""
        where = self.coordinates(rank)
        found: dict[int, int] = {}
        for other in range(self.size):
            there = self.coordinates(other)
            if all(at == where[axis] or axis in self.batch_axes for axis, at in there.items()):
                found[self.batch_index(other)] = other
        return [found[index] for index in range(self.num_batches)]

    def resized(self, num_ranks: int) -> "Mesh | None":
        """This mesh with another size of the batch axis; None if `num_ranks` does not fit."""
        if len(self.batch_axes) != 1:
            return None
        axis = self.batch_axes[0]
        others = self.size // self.size_of(axis)
        if num_ranks < 1 or num_ranks % others:
            return None
        return self.having({axis: num_ranks // others})

    def having(self, sizes: Mapping[str, int]) -> "Mesh":
        """This mesh with other sizes of some axes."""
        return Mesh(tuple((n, sizes.get(n, size)) for n, size in self.axes), self.batch_axes)

    @property
    def has_stages(self) -> bool:
        """Whether ranks are stages of a pipeline."""
        return dict(self.axes).get(STAGES, 1) > 1

    def __str__(self) -> str:
        return ", ".join(f"{name} {size}" for name, size in self.axes)


def ranks_alone(num_ranks: int) -> Mesh:
    """The mesh of a world without layout rules: each rank reads different data."""
    return Mesh((("dp", num_ranks),), ("dp",))
