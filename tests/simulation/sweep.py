"""Runs of many seeds for tests; a violation fails the test with the command that repeats it."""

from collections.abc import Callable, Iterable, Iterator

from simulation.run import Outcome, Simulation, run_seed
from simulation.scenario import MODES

LAST_LINES = 40


def story(outcome: Outcome, flags: str = "") -> str:
    """The violation, the command, and the end of the trace."""
    command = f"python scripts/simulate.py --seed {outcome.seed} --mode {outcome.mode}{flags}"
    return "\n".join([outcome.problem, command, *outcome.log[-LAST_LINES:]])


def checked(
    seeds: Iterable[int],
    prepare: Callable[[Simulation], None] | None = None,
    *,
    modes: Iterable[str] = MODES,
    flags: str = "",
) -> Iterator[Outcome]:
    """The outcome of each seed in each mode, none of which has a violation."""
    for seed in seeds:
        for mode in modes:
            outcome = run_seed(seed, mode, prepare=prepare)
            assert not outcome.problem, story(outcome, flags)
            yield outcome


def first_violation(
    worlds: Iterable[tuple[int, str]],
    words: Iterable[str],
    prepare: Callable[[Simulation], None] | None = None,
) -> Outcome | None:
    """The first outcome with one of these violations."""
    for seed, mode in worlds:
        outcome = run_seed(seed, mode, prepare=prepare)
        if any(word in outcome.problem for word in words):
            return outcome
    return None
