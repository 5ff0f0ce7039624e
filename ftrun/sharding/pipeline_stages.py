"""Maps the layer names of pipeline stages to the names of a pipeline with one stage, and back.

Runs in:  the process that converts checkpoints; worker, if a restore uses layout rules. Pure.
Takes in: placements that distribute layer numbers, a mesh.
Gives:    the numbers at each coordinate; names of one rank in a pipeline of one stage, and back.

Layers are distributed run by run, in the order of the pipeline: run r is at coordinate r % size, in
turn r // size. The names of a stage may number its layers from 0, or contain the turn. Such layers
get their names of a pipeline of one stage before any rule is matched, so all other modules use one
name for each layer. The name of a tensor of optimizer state contains the name of its parameter, and
is renamed with it.

Source: stages with several runs of layers are the interleaved schedule of Megatron-LM (arXiv
        2104.04473, section 2.2).
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from ftrun.sharding.partition import SplitImpossible, divide
from ftrun.sharding.rules import TURN, Mesh, ShardingRules, StagePlacement


def runs_of(placement: StagePlacement, size: int) -> list[range]:
    """The numbers of each run of layers, in the order of the pipeline.

    Raises SplitImpossible if the sizes of the placement are for another number of runs.
    """
    count = size * placement.turns
    sizes = placement.sizes
    if sizes is None:
        return [range(*divide(placement.count, count, index)) for index in range(count)]
    if len(sizes) != count or sum(sizes) != placement.count:
        raise SplitImpossible(
            f"sizes {list(sizes)} are {sum(sizes)} numbers for {len(sizes)} runs of layers, and "
            f"there are {placement.count} for {count}: {placement.axis} {size}, turns "
            f"{placement.turns}"
        )
    ends = [sum(sizes[:at]) for at in range(count + 1)]
    return [range(*pair) for pair in pairwise(ends)]


class FixedStageNames:
    """Names of tensors at fixed coordinates, at one of them: in the first turn, or the last."""

    def __init__(self, placement: StagePlacement, coordinate: int) -> None:
        self.placement = placement
        self._where = f"{placement.axis} {coordinate}"
        is_early = placement.at is not None and coordinate in [at for at in placement.at if at >= 0]
        self._turn = 0 if is_early else placement.turns - 1

    def whole(self, name: str) -> str:
        """As `StageNames.whole`; raises SplitImpossible if the name is of another turn."""
        found = self.placement.pattern.numbers(name)
        if found[TURN] != self._turn:
            raise SplitImpossible(
                f"its turn is {found[TURN]}, and that of {self._where} is {self._turn} by "
                f"{self.placement}, turns: {self.placement.turns}"
            )
        return self.placement.pattern.with_numbers(name, {**found, TURN: 0})

    def own(self, name: str) -> str:
        found = self.placement.pattern.numbers(name)
        return self.placement.pattern.with_numbers(name, {**found, TURN: self._turn})


class TiedStageNames:
    """The names of a tensor that stages hold as a copy, at one coordinate."""

    def __init__(self, placement: StagePlacement, coordinate: int) -> None:
        assert placement.tied is not None
        self.placement = placement
        self._where = f"{placement.axis} {coordinate}"
        names = (placement.pattern, 0) if coordinate == 0 else (placement.tied, placement.turns - 1)
        self._own = names[0].filled({TURN: names[1]})

    def whole(self, name: str) -> str:
        """As `StageNames.whole`; raises SplitImpossible if it has another name here."""
        if name != self._own:
            raise SplitImpossible(f"{self._where} has it as {self._own} by {self.placement}")
        return self.placement.pattern.filled({TURN: 0})

    def own(self, name: str) -> str:
        return self._own


class StageNames:
    """Names of the layers of one placement with `count`, at one coordinate of its axis."""

    def __init__(self, placement: StagePlacement, size: int, coordinate: int) -> None:
        self.placement = placement
        self._where = f"{placement.axis} {coordinate}"
        self._turns = runs_of(placement, size)[coordinate::size]
        self._says_turn = TURN in placement.pattern.words

    def whole(self, name: str) -> str:
        """The name in a pipeline of one stage.

        Raises SplitImpossible if the layer is not at this coordinate.
        """
        numbers = self.placement.pattern.numbers(name)
        turn, number = numbers.get(TURN, 0), numbers[self.placement.word]
        if turn >= len(self._turns):
            raise SplitImpossible(f"its turn {turn} is not below turns: {len(self._turns)}")
        here = self._in_turn(turn)
        if self.placement.is_anew:
            if number >= len(here):
                there = f"numbers 0 to {len(here) - 1}" if here else "none"
                where = f"turn {turn} of {self._where}" if self._says_turn else self._where
                raise SplitImpossible(
                    f"its number is {number}, and {where} has {there} by {self.placement}"
                )
            number = here[number]
        elif number not in here:
            raise SplitImpossible(f"number {number} is not in turn {turn} of {self._where}")
        return self._with(name, 0, number)

    def own(self, name: str) -> str:
        """The inverse of `whole`, for a tensor of this coordinate."""
        number = self.placement.pattern.numbers(name)[self.placement.word]
        turns = range(len(self._turns))
        turn = next(turn for turn in turns if number in self._in_turn(turn))
        if self.placement.is_anew:
            number = self._in_turn(turn).index(number)
        return self._with(name, turn, number)

    def _in_turn(self, turn: int) -> Sequence[int]:
        """The numbers in a turn, or in all turns if names do not contain the turn."""
        if self._says_turn:
            return self._turns[turn]
        return [number for run in self._turns for number in run]

    def _with(self, name: str, turn: int, number: int) -> str:
        return self.placement.pattern.with_numbers(name, {TURN: turn, self.placement.word: number})


_Names = StageNames | FixedStageNames | TiedStageNames


class RankNames:
    """The names of one rank's tensors, from the renaming placements at its coordinates."""

    def __init__(self, stages: Sequence[_Names] = ()) -> None:
        self._stages = stages

    def whole(self, name: str, *, of: str | None = None) -> str:
        """The name in a pipeline of one stage.

        Raises SplitImpossible if the layer is on other ranks. `of` is this rank's name of the
        parameter whose optimizer state the tensor is.
        """
        if of is not None:
            return _within(name, of, self.whole(of))
        for stage in self._matching(name):
            name = stage.whole(name)
        return name

    def own(self, name: str, *, of: str | None = None) -> str:
        if of is not None:
            return _within(name, of, self.own(of))
        for stage in self._matching(name):
            name = stage.own(name)
        return name

    def _matching(self, name: str) -> list[_Names]:
        """One for each axis, because each changes other numbers of the name."""
        found = [one for one in self._stages if one.placement.matches(name)]
        axes = [one.placement.axis for one in found]
        # A name that two placements of an axis match is reported by the matching of rules.
        return [one for one in found if axes.count(one.placement.axis) == 1]


def names_of_ranks(rules: ShardingRules) -> list[RankNames]:
    """The names of all ranks' tensors; ranks with equal names share one object.

    Raises SplitImpossible if the sizes of a placement do not fit the mesh.
    """
    placements = [placement for placement in rules.placements if placement.renames]
    if not placements:
        return [RankNames()] * rules.mesh.size
    made: dict[tuple[int, ...], RankNames] = {}
    found = []
    for where in map(rules.mesh.coordinates, range(rules.mesh.size)):
        key = tuple(where[placement.axis] for placement in placements)
        if key not in made:
            made[key] = RankNames(
                [_at(placement, rules.mesh, where[placement.axis]) for placement in placements]
            )
        found.append(made[key])
    return found


def absent(rules: ShardingRules, names: Iterable[str]) -> list[str]:
    """Layers that a placement counts and that no rank has, in words; it has others.

    `names` are those of all tensors in a pipeline of one stage.
    """
    found = []
    listed = list(names)
    for placement in rules.placements:
        if placement.is_anew:
            matched = [placement.pattern.match(name) for name in listed]
            there = {numbers[placement.word] for numbers in matched if numbers is not None}
            missing = sorted(set(range(placement.count)) - there - set(placement.empty))
            if missing and there:  # rules for several models may name what this one does not have
                found.append(
                    f"{placement} declares {placement.count} layers, but no rank holds "
                    f"{_listed(missing)}: set their number (of:), the number of each stage "
                    "(sizes:), or the layers without tensors (empty:)"
                )
    return found


def _at(placement: StagePlacement, mesh: Mesh, coordinate: int) -> _Names:
    if placement.tied is not None:
        return TiedStageNames(placement, coordinate)
    if placement.at is not None:
        return FixedStageNames(placement, coordinate)
    try:
        return StageNames(placement, mesh.size_of(placement.axis), coordinate)
    except SplitImpossible as error:
        raise SplitImpossible(f"{placement}: {error}") from error


def _within(name: str, old: str, new: str) -> str:
    before, found, after = name.partition(old)
    return f"{before}{new}{after}" if found else name


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    rest = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return f"{'layers' if len(numbers) > 1 else 'layer'} {shown}{rest}"
