"""Which rule holds for which name.

Runs in:  the process that converts checkpoints. Pure.
Takes in: `ShardingRules`, names of tensors and what they are state of.
Gives:    for each name what holds for it, or RulesUnfit with all names that have no rule or two.

State of an optimizer goes with its parameter, so rules need not name it: what has its parameter's
shape is shared as that is, and a single number (such as the step) is the same on all that have
the parameter. A rule that names the state itself comes first.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ftrun.errors import RulesMismatch
from ftrun.sharding.cuts import SplitImpossible
from ftrun.sharding.pipeline_stages import runs_of
from ftrun.sharding.rules import (
    REPLICATED,
    ShardingRule,
    ShardingRules,
    SharingKind,
    StagePlacement,
)


class StateOwnership(Enum):
    """How a tensor of an optimizer's state belongs to its parameter."""

    LIKE = "like"
    """It has its shape."""
    NUMBER = "number"
    """It is a single number."""


@dataclass(frozen=True, slots=True)
class OwningParameter:
    """The parameter that a tensor is state of, and how; `how` None: it needs a rule of its own."""

    parameter: str
    how: StateOwnership | None


@dataclass(frozen=True, slots=True)
class MatchedRule:
    """What holds for one name.

    Args:
        rule: how it is shared.
        home: where it lives; None: everywhere.
        numbers: what stood in the name at the words of the home's pattern.
    """

    rule: ShardingRule
    home: StagePlacement | None = None
    numbers: tuple[tuple[str, int], ...] = ()

    def homes(self, size: int) -> frozenset[int]:
        """Coordinates of its home's axis where it lives; there is a home.

        Args:
            size: of that axis.

        Raises:
            CutImpossible: there is no such place.
        """
        assert self.home is not None
        if self.home.at is not None:
            found = frozenset(at % size if at < 0 else at for at in self.home.at)
            if max(found) >= size:
                raise SplitImpossible(f"it lives at {max(found)} of {self.home.axis} {size}")
            return found
        number = dict(self.numbers)[self.home.word]
        if number >= self.home.count:
            raise SplitImpossible(f"its number {number} is not below of: {self.home.count}")
        runs = runs_of(self.home, size)
        return frozenset(at % size for at, run in enumerate(runs) if number in run)


def match(
    rules: ShardingRules, names: Iterable[tuple[str, OwningParameter | None]]
) -> dict[str, MatchedRule]:
    """What holds for each name.

    Args:
        rules: of one file.
        names: each with what it is state of; parameters before their state, or after.

    Raises:
        RulesUnfit: names that no rule matches, or two.
    """
    listed = list(names)
    found: dict[str, MatchedRule] = {}
    twice: list[str] = []
    for name, _ in listed:
        matching = [one for one in rules.rules if one.pattern.match(name) is not None]
        homes = [one for one in rules.homes if one.pattern.match(name) is not None]
        twice += [_matched_twice(name, some) for some in (matching, homes) if len(some) > 1]
        if matching or homes:
            home = homes[0] if homes else None
            numbers = home.pattern.match(name) if home is not None else None
            rule = matching[0] if matching else REPLICATED
            found[name] = MatchedRule(rule, home, tuple((numbers or {}).items()))
    unmatched = []
    for name, kin in listed:
        if name in found:
            continue
        inherited = _inherited(found, kin)
        if inherited is None:
            unmatched.append(_no_rule(name, kin))
        else:
            found[name] = inherited
    if twice or unmatched:
        raise RulesMismatch(source=rules.source, problems=[*twice, *unmatched])
    return found


def lives_at(rules: ShardingRules, where: Mapping[str, int], name: str) -> bool:
    """Whether what is called so lives at these coordinates, as far as one home says where."""
    homes = [home for home in rules.homes if home.pattern.match(name) is not None]
    if len(homes) != 1:
        return True
    (home,) = homes
    numbers = home.pattern.match(name) or {}
    found = MatchedRule(REPLICATED, home, tuple(numbers.items()))
    return where[home.axis] in found.homes(rules.mesh.size_of(home.axis))


def _inherited(found: dict[str, MatchedRule], kin: OwningParameter | None) -> MatchedRule | None:
    if kin is None or kin.how is None or kin.parameter not in found:
        return None
    parents = found[kin.parameter]
    if kin.how is StateOwnership.LIKE or parents.rule.kind is SharingKind.OWN:
        return parents
    return MatchedRule(REPLICATED, parents.home, parents.numbers)


def _matched_twice(name: str, some: Sequence[object]) -> str:
    return f"{name} is matched by {' and by '.join(map(str, some))}"


def _no_rule(name: str, kin: OwningParameter | None) -> str:
    if kin is not None and kin.how is None:
        return f"{name} is matched by no rule, and has not the shape of {kin.parameter}"
    return f"{name} is matched by no rule"
