"""The values of a parsed file of layout rules; `rule_parser` makes them.

Source: the patterns are those of Universal Checkpointing (arXiv 2406.18820, section 3): Unique,
        Replicate, Partial (here `average`), Shard in one or several dimensions, Shard-NC (here
        `fragment`) and the stripping of padding (`size`, `pad_to`, and what `flat` leaves out).
"""

from dataclasses import dataclass, replace
from enum import Enum

from ftrun.sharding.mesh import Mesh
from ftrun.sharding.name_patterns import NamePattern
from ftrun.snapshot.boxes import Shape


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
        axis: of the mesh.
        dim: of the tensor; negative ones count from the last.
        parts: the parts that are joined along it; a single part if none are joined.
        size: of the whole dimension, without padding; None: the sum over the ranks.
        pad_to: the dimension is padded to a multiple of this number of items per coordinate; 0: it
            is not padded.
        uneven: which coordinates get more.
    """

    axis: str
    dim: int
    parts: tuple[FusedPart, ...] = (FusedPart(),)
    size: int | None = None
    pad_to: int = 0
    uneven: UnevenPolicy = UnevenPolicy.BALANCED


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """A flat buffer of items that is split along an axis.

    Args:
        axis: of the mesh.
        pad_to: the buffer is padded to a multiple of this number of items per coordinate.
        tensors: name and whole shape of the tensors in it, in order. Rules for these names apply
            within the buffer: each coordinate of another axis has a buffer with its own part.
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

    @property
    def word(self) -> str:
        """The word of the layer number in the pattern; there is exactly one."""
        return next(word for word in self.pattern.words if word != TURN)

    @property
    def renames(self) -> bool:
        """Whether a tensor's name depends on its coordinate."""
        return self.is_anew or TURN in self.pattern.words

    def __str__(self) -> str:
        return f"unique {self.pattern} (line {self.line})"


@dataclass(frozen=True, slots=True)
class ShardingRules:
    """One file of rules.

    Args:
        source: its name, for messages.
        mesh: of the world that the rules describe.
        rules: how tensors are shared.
        homes: placements of tensors that are not on all ranks.
        text: of the file.
    """

    source: str
    mesh: Mesh
    rules: tuple[ShardingRule, ...] = ()
    homes: tuple[StagePlacement, ...] = ()
    text: str = ""

    def on(self, mesh: Mesh) -> "ShardingRules":
        """The same rules for another mesh of the same axes."""
        return replace(self, mesh=mesh)

    @property
    def layout(self) -> tuple[object, ...]:
        """Equal for two files with the same rules, whatever their names and lines."""
        rules = tuple(replace(rule, line=0) for rule in self.rules)
        homes = tuple(replace(home, line=0) for home in self.homes)
        return self.mesh, rules, homes
