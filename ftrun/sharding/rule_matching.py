"""Finds the rule of each tensor name, or reports all names without a rule or with two.

Optimizer state follows its parameter, so rules need not name it. State of the parameter's shape is
shared as the parameter is. A single number, such as the step, is equal on all ranks that have the
parameter. A rule that names the state itself takes precedence. A pattern under unique may match
state also where it means parameters, so a placement does not replace the rule of the parameter.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ftrun.errors import RulesMismatch
from ftrun.sharding.partition import SplitImpossible
from ftrun.sharding.pipeline_stages import runs_of
from ftrun.sharding.rules import (
    REPLICATED,
    ShardingRule,
    ShardingRules,
    SharingKind,
    StagePlacement,
)


class StateOwnership(Enum):
    """How a tensor of optimizer state follows its parameter."""

    LIKE = "like"
    """It has the parameter's shape."""
    NUMBER = "number"
    """It is a single number."""


@dataclass(frozen=True, slots=True)
class OwningParameter:
    """The parameter of a state tensor, and how the tensor follows it; None: it needs a rule."""

    parameter: str
    how: StateOwnership | None


@dataclass(frozen=True, slots=True)
class PlacedName:
    """A placement of one name, and the numbers in it by word of the placement."""

    placement: StagePlacement
    numbers: tuple[tuple[str, int], ...]

    @property
    def axis(self) -> str:
        return self.placement.axis

    def coordinates(self, size: int) -> frozenset[int]:
        """Coordinates of the tensor along the placement's axis, which has `size` coordinates.

        Raises SplitImpossible if there is no such coordinate or number.
        """
        if self.placement.at is not None:
            found = frozenset(at % size if at < 0 else at for at in self.placement.at)
            if max(found) >= size:
                raise SplitImpossible(
                    f"it is placed at {max(found)} of {self.placement.axis} {size}"
                )
            return found
        number = dict(self.numbers)[self.placement.word]
        if number >= self.placement.count:
            raise SplitImpossible(f"its number {number} is not below of: {self.placement.count}")
        runs = runs_of(self.placement, size)
        return frozenset(at % size for at, run in enumerate(runs) if number in run)


@dataclass(frozen=True, slots=True)
class MatchedRule:
    """The rule of one name, and its placements: at most one for each axis of the mesh."""

    rule: ShardingRule
    places: tuple[PlacedName, ...] = ()


def match(
    rules: ShardingRules, names: Iterable[tuple[str, OwningParameter | None]]
) -> dict[str, MatchedRule]:
    """The matched rule of each name, given with its owning parameter.

    Raises RulesMismatch if no rule matches a name, or two do. A placement alone is a rule too,
    unless the rules are strict.
    """
    found: dict[str, MatchedRule] = {}
    twice: list[str] = []
    others: list[tuple[str, OwningParameter | None, tuple[PlacedName, ...]]] = []
    for name, owner in names:
        matching, placements = rules.rules_of(name), rules.placements_by_axis(name)
        several: list[Sequence[object]] = [matching, *placements.values()]
        twice += [
            f"{name} is matched by {' and by '.join(map(str, some))}"
            for some in several
            if len(some) > 1
        ]
        places = _placed(name, placements)
        if matching:
            found[name] = MatchedRule(matching[0], places)
        elif places and not rules.is_strict and (owner is None or owner.how is None):
            found[name] = MatchedRule(REPLICATED, places)
        else:
            others.append((name, owner, places))
    unmatched = []
    for name, owner, places in others:
        inherited = _inherited(found, owner)
        if inherited is not None:
            by_axis = {one.axis: one for one in (*inherited.places, *places)}
            found[name] = MatchedRule(inherited.rule, tuple(by_axis.values()))
        elif places and not rules.is_strict:
            found[name] = MatchedRule(REPLICATED, places)
        elif places:
            unmatched.append(
                f"{name} is placed by {places[0].placement}, and with strict: true it needs "
                "another rule too, such as replicate"
            )
        elif owner is not None and owner.how is None:
            unmatched.append(
                f"{name} matches no rule, and does not have the shape of {owner.parameter}"
            )
        else:
            unmatched.append(f"{name} matches no rule")
    if twice or unmatched:
        raise RulesMismatch(source=rules.source, problems=[*twice, *unmatched])
    return found


def lives_at(rules: ShardingRules, where: Mapping[str, int], name: str) -> bool:
    """Whether a name is placed at these coordinates.

    An axis with two matching placements does not count.
    """
    alone = {axis: some for axis, some in rules.placements_by_axis(name).items() if len(some) == 1}
    return all(
        where[one.axis] in one.coordinates(rules.mesh.size_of(one.axis))
        for one in _placed(name, alone)
    )


def _placed(name: str, by_axis: Mapping[str, list[StagePlacement]]) -> tuple[PlacedName, ...]:
    return tuple(
        PlacedName(first, tuple(first.pattern.numbers(name).items()))
        for first, *_ in by_axis.values()
    )


def _inherited(found: dict[str, MatchedRule], owner: OwningParameter | None) -> MatchedRule | None:
    if owner is None or owner.how is None or owner.parameter not in found:
        return None
    parents = found[owner.parameter]
    if owner.how is StateOwnership.LIKE or parents.rule.kind is SharingKind.OWN:
        return parents
    return MatchedRule(REPLICATED, parents.places)
