"""Sharding rules: meshes, name patterns, and the values of a parsed file of rules.

`rule_parser` makes them.

Source: the patterns are those of Universal Checkpointing (arXiv 2406.18820, section 3): Unique,
        Replicate, Partial (here `average`), Shard in one or several dimensions, Shard-NC (here
        `fragment`) and the stripping of padding (`size`, `pad_to`, and what `flat` leaves out).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from ftrun.snapshot.boxes import Shape

STAGES = "pp"
"""The axis of pipeline stages: ranks along it hold different parameters without a rule."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes with their sizes, the slowest first: ranks 0 and 1 differ along the last one.

    Ranks read different data along `batch_axes`.
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
        """This mesh with another size of the first batch axis; None if `num_ranks` does not fit.

        The other batch axes, such as that of experts, must have size 1.
        """
        axis = next(iter(self.batch_axes), None)
        if axis is None or self.num_batches != self.size_of(axis):
            return None
        others = self.size // self.size_of(axis)
        if num_ranks < 1 or num_ranks % others:
            return None
        return self.with_sizes({axis: num_ranks // others})

    def with_sizes(self, sizes: Mapping[str, int]) -> "Mesh":
        return Mesh(tuple((n, sizes.get(n, size)) for n, size in self.axes), self.batch_axes)

    @property
    def has_stages(self) -> bool:
        return dict(self.axes).get(STAGES, 1) > 1

    def __str__(self) -> str:
        return ", ".join(f"{name} {size}" for name, size in self.axes)


def ranks_alone(num_ranks: int) -> Mesh:
    """The mesh of a world without layout rules: each rank reads different data."""
    return Mesh((("dp", num_ranks),), ("dp",))


_SPECIAL = re.compile(r"\*|\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class NamePattern:
    """One pattern."""

    text: str

    @cached_property
    def is_special(self) -> bool:
        """Whether it matches other names than its own text."""
        return _SPECIAL.search(self.text) is not None

    @cached_property
    def words(self) -> tuple[str, ...]:
        return tuple(match[1] for match in _SPECIAL.finditer(self.text) if match[1])

    def match(self, name: str) -> dict[str, int] | None:
        """The numbers in a name, by word; None if it does not match."""
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        return {word: int(number) for word, number in found.groupdict().items()}

    def numbers(self, name: str) -> dict[str, int]:
        """As `match`, of a name that matches."""
        found = self.match(name)
        assert found is not None, name
        return found

    def with_numbers(self, name: str, numbers: Mapping[str, int]) -> str:
        """A matching name, with these numbers in place of its own."""
        found = self._regex.fullmatch(name)
        assert found is not None, name
        made, at = "", 0
        for word in self.words:
            made += f"{name[at : found.start(word)]}{numbers[word]}"
            at = found.end(word)
        return made + name[at:]

    def filled(self, numbers: Mapping[str, int]) -> str:
        """The name that matches with these numbers; the pattern has no `*`."""
        return _SPECIAL.sub(lambda found: str(numbers[found[1]]), self.text)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        made, at = "", 0
        for match in _SPECIAL.finditer(self.text):
            made += re.escape(self.text[at : match.start()])
            made += f"(?P<{match[1]}>(?<![0-9])[0-9]+(?![0-9]))" if match[1] else "(?s:.*)"
            at = match.end()
        return re.compile(made + re.escape(self.text[at:]))

    def __str__(self) -> str:
        return self.text


class SharingKind(Enum):
    """How ranks share the tensors that a rule names."""

    REPLICATE = "replicate"
    """All ranks have the same."""
    SHARD = "shard"
    """Each rank has a part, along one or several dimensions."""
    FRAGMENT = "fragment"
    """As SHARD, with parts that are uneven, or cut from several tensors that were joined."""
    FLAT = "flat"
    """Each rank has a range of one flat buffer: tensors one after the other, then padding."""
    AVERAGE = "average"
    """Copies that have diverged; their mean is used."""
    OWN = "own"
    """Each rank has its own, which it shares with no other rank."""


class UnevenPolicy(Enum):
    """Which coordinates get more if a size does not divide evenly."""

    BALANCED = "balanced"
    """The first coordinates have one unit more."""
    CHUNK = "chunk"
    """As torch.chunk and DTensor: all but the last ones are as large as the first."""


@dataclass(frozen=True, slots=True)
class FusedPart:
    """One of several parts that are joined along a dimension; each is split separately.

    Args:
        weight: its size relative to the other parts.
        unit: number of items that stay together, such as those of one head.
        sizes: units for each coordinate; None: by `uneven`.
        is_shared: if there are more coordinates than units, several have the same unit.
    """

    weight: int = 1
    unit: int = 1
    sizes: tuple[int, ...] | None = None
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class DimensionSplit:
    """How a mesh axis splits a dimension.

    Args:
        dim: of the tensor; negative ones count from the last.
        parts: the parts that are joined along it; a single part if none are joined.
        size: of the whole dimension, without padding; None: the sum over the ranks.
        pad_to: the dimension is padded to a multiple of this number of items per coordinate; 0: it
            is not padded.
    """

    axis: str
    dim: int
    parts: tuple[FusedPart, ...] = (FusedPart(),)
    size: int | None = None
    pad_to: int = 0
    uneven: UnevenPolicy = UnevenPolicy.BALANCED


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """A flat buffer of items that is split along an axis of the mesh.

    Args:
        pad_to: the buffer is padded to a multiple of this number of items per coordinate.
        tensors: name and whole shape of the tensors in it, in order. Rules for these names
            apply within the buffer: each coordinate of another axis has a buffer with its own part.
    """

    axis: str
    pad_to: int
    tensors: tuple[tuple[str, Shape], ...]


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """The rule for all names that match its pattern."""

    kind: SharingKind
    pattern: NamePattern
    line: int
    cuts: tuple[DimensionSplit, ...] = ()
    flat: FlatBuffer | None = None
    axis: str = ""
    """The axis along which copies have diverged."""

    def __str__(self) -> str:
        return f"{self.kind.value} {self.pattern} (line {self.line})"


TURN = "turn"
"""The word in a pattern for the turn of a run of layers."""

REPLICATED = ShardingRule(SharingKind.REPLICATE, NamePattern("*"), 0)


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """The coordinates of a tensor along an axis; other coordinates do not have it.

    Args:
        at: the coordinates; negative ones count from the last. None: by its number.
        count: number of layer numbers.
        sizes: number of layers of each run, in order; None: balanced.
        turns: number of runs at each coordinate; consecutive runs are at consecutive coordinates.
        is_anew: names count from 0 within a run, or within a coordinate if they do not contain the
            turn.
        empty: numbers of layers without tensors.
        tied: the name at all coordinates except the first; None: the same name.
    """

    pattern: NamePattern
    line: int
    axis: str
    at: tuple[int, ...] | None
    count: int = 0
    sizes: tuple[int, ...] | None = None
    turns: int = 1
    is_anew: bool = False
    empty: tuple[int, ...] = ()
    tied: NamePattern | None = None

    @property
    def word(self) -> str:
        """The word of the layer number in the pattern; there is exactly one."""
        return next(word for word in self.pattern.words if word != TURN)

    @property
    def renames(self) -> bool:
        return self.is_anew or TURN in self.pattern.words or self.tied is not None

    def matches(self, name: str) -> bool:
        """Whether this is a name of its tensors on some rank."""
        patterns = (self.pattern,) if self.tied is None else (self.pattern, self.tied)
        return any(one.match(name) is not None for one in patterns)

    def __str__(self) -> str:
        return f"unique {self.pattern} (line {self.line})"


@dataclass(frozen=True)
class ShardingRules:
    """One file of rules.

    Args:
        placements: of tensors that are not on all ranks, axis by axis.
        is_strict: a name needs a rule also if it has a placement.
    """

    source: str
    mesh: Mesh
    rules: tuple[ShardingRule, ...] = ()
    placements: tuple[StagePlacement, ...] = ()
    text: str = ""
    is_strict: bool = False

    def on(self, mesh: Mesh) -> "ShardingRules":
        return replace(self, mesh=mesh)

    def rules_of(self, name: str) -> list[ShardingRule]:
        """In the order of the file."""
        exact = self._by_name.get(name, ())
        matching = [at for at in self._with_words if self.rules[at].pattern.match(name) is not None]
        return [self.rules[at] for at in sorted([*exact, *matching])]

    def placements_by_axis(self, name: str) -> dict[str, list[StagePlacement]]:
        found: dict[str, list[StagePlacement]] = {}
        for one in self.placements:
            if one.pattern.match(name) is not None:
                found.setdefault(one.axis, []).append(one)
        return found

    @property
    def is_empty(self) -> bool:
        """Whether it only describes a mesh."""
        return not self.rules and not self.placements

    @cached_property
    def _by_name(self) -> dict[str, list[int]]:
        """Positions of the rules for one name each; a file may have one for each tensor."""
        found: dict[str, list[int]] = {}
        for at, rule in enumerate(self.rules):
            if not rule.pattern.is_special:
                found.setdefault(rule.pattern.text, []).append(at)
        return found

    @cached_property
    def _with_words(self) -> list[int]:
        return [at for at, rule in enumerate(self.rules) if rule.pattern.is_special]

    @property
    def layout(self) -> tuple[object, ...]:
        """Equal for two files with the same rules, whatever their names and lines."""
        rules = tuple(replace(rule, line=0) for rule in self.rules)
        placements = tuple(replace(placement, line=0) for placement in self.placements)
        return self.mesh, rules, placements
