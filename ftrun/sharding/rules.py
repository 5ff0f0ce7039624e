"""Layout rules: what a file of them says, once it is read.

Runs in:  the process that converts checkpoints. Pure.
Takes in: nothing; `rule_file` makes these values.
Gives:    `ShardingRules`.

Source: the patterns are those of Universal Checkpointing (arXiv 2406.18820, section 3): Unique,
Replicate, Partial (here `average`), Shard in one or several dimensions, Shard-NC (here `fragment`)
and the stripping of padding (`size`, `pad_to`, and what `flat` leaves out).
"""

from dataclasses import dataclass, replace
from enum import Enum

from ftrun.sharding.mesh import Mesh
from ftrun.sharding.name_patterns import NamePattern
from ftrun.snapshot.boxes import Shape


class SharingKind(Enum):
    """How ranks share what a rule names."""

    REPLICATE = "replicate"
    """All have the same."""
    SHARD = "shard"
    """Each has a part, along one or several dimensions."""
    FRAGMENT = "fragment"
    """The same with parts that are uneven, or cut out of several that were joined."""
    FLAT = "flat"
    """Each has a run of one long row of items: tensors one after the other, then padding."""
    AVERAGE = "average"
    """Copies that went their own ways; their mean is what goes on."""
    OWN = "own"
    """Each has its own, which nobody else shares."""


class UnevenPolicy(Enum):
    """Who gets more where a size does not divide."""

    BALANCED = "balanced"
    """The first ones have one unit more."""
    CHUNK = "chunk"
    """As torch.chunk and DTensor: all but the last ones are as large as the first."""


@dataclass(frozen=True, slots=True)
class FusedPart:
    """One of several that are joined along a dimension, each cut by itself.

    Args:
        weight: its size beside that of the others.
        unit: items that stay together, such as those of one head.
        sizes: units for each coordinate; None: as `uneven` says.
        is_shared: where there are more coordinates than units, several have the same unit.
    """

    weight: int = 1
    unit: int = 1
    sizes: tuple[int, ...] | None = None
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class DimensionSplit:
    """How an axis of the mesh cuts a dimension.

    Args:
        axis: of the mesh.
        dim: of the tensor; negative ones count from the last.
        parts: what is joined along it; one part: nothing is.
        size: of the whole dimension, without padding; None: what the ranks have, in all.
        pad_to: padded to a multiple of so many items for each coordinate; 0: not padded.
        uneven: who gets more.
    """

    axis: str
    dim: int
    parts: tuple[FusedPart, ...] = (FusedPart(),)
    size: int | None = None
    pad_to: int = 0
    uneven: UnevenPolicy = UnevenPolicy.BALANCED


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """A long row of items, shared along an axis.

    Args:
        axis: of the mesh.
        pad_to: the row is padded to a multiple of so many items for each coordinate.
        tensors: what lies in it, in this order: name and whole shape. What rules say of these
            names holds for them here: a coordinate of another axis has its own part in its row.
    """

    axis: str
    pad_to: int
    tensors: tuple[tuple[str, Shape], ...]


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """What holds for all names that match."""

    kind: SharingKind
    pattern: NamePattern
    line: int
    cuts: tuple[DimensionSplit, ...] = ()
    flat: FlatBuffer | None = None
    axis: str = ""
    """Along which copies went their own ways."""

    def __str__(self) -> str:
        return f"{self.kind.value} {self.pattern} (line {self.line})"


TURN = "turn"
"""The word of a pattern that stands for the turn in which a run of layers is."""

REPLICATED = ShardingRule(SharingKind.REPLICATE, NamePattern("*"), 0)


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """Where along an axis a tensor lives; it is nowhere else.

    Args:
        at: the coordinates; negative ones count from the last. None: by its number.
        count: how many numbers there are.
        sizes: numbers for each run of them, in order; None: balanced.
        turns: so many runs are at each coordinate, one after another run of every other.
        is_anew: names count from 0 within a run, or within a coordinate where they do not say
            their turn.
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
        """What the number is called in the pattern; there is one."""
        return next(word for word in self.pattern.words if word != TURN)

    @property
    def renames(self) -> bool:
        """Whether a tensor's name depends on where it lives."""
        return self.is_anew or TURN in self.pattern.words

    def __str__(self) -> str:
        return f"unique {self.pattern} (line {self.line})"


@dataclass(frozen=True, slots=True)
class ShardingRules:
    """One file of rules.

    Args:
        source: its name, for messages.
        mesh: of the world that they describe.
        rules: how tensors are shared.
        homes: where those live that are not everywhere.
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
        """Equal for two files that say the same, whatever their names and lines."""
        rules = tuple(replace(rule, line=0) for rule in self.rules)
        homes = tuple(replace(home, line=0) for home in self.homes)
        return self.mesh, rules, homes
