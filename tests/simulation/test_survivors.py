"""Worlds in which ranks keep their processes: no violation, and one if a rule is left out."""

from collections import Counter
from collections.abc import Callable

import pytest

from ftrun.membership.leader import survivors
from simulation.node import SimulatedExecutor
from simulation.scenario import MODES
from simulation.survivors import Parking, have_survivors
from simulation.sweep import checked, first_violation
from simulation.training import Ranks

SEEDS, ALL_SEEDS = 12, 1000
RUNS_TO_FIND = 400

Patch = pytest.MonkeyPatch


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(at, marks=pytest.mark.full) for at in range(100, ALL_SEEDS, 100))]
)
def test_worlds_with_survivors_have_no_violation(first: int) -> None:
    faults: Counter[str] = Counter()
    seeds = range(first, first + (100 if first else SEEDS))
    for outcome in checked(seeds, have_survivors, flags=" --survivors"):
        faults.update(outcome.faults)
    assert faults["ranks stay"] > len(seeds)


def _two_attempts(patch: Patch) -> None:
    """Ranks stay after a generation in which they have made no step."""
    patch.setattr(Parking, "problem", staticmethod(lambda ranks: ""))
    patch.setattr(Ranks, "has_stepped", property(lambda self: self.are_ready))


def _unnamed_live_on(patch: Patch) -> None:
    """Parked processes that the plan does not name run the next generation."""
    patch.setattr(SimulatedExecutor, "_end_unnamed", lambda self, plan: None)


def _goes_back_too_far(patch: Patch) -> None:
    patch.setattr(survivors, "_problems_of_ranks", lambda parked, step, limit: iter(()))


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("break_it", "found_as"),
    [
        (_two_attempts, "survivors of one without a step"),
        (_unnamed_live_on, "its process on"),
        (_goes_back_too_far, "with RankProcesses"),
    ],
)
def test_a_rule_that_is_left_out_is_missed(
    break_it: Callable[[Patch], None], found_as: str, monkeypatch: Patch
) -> None:
    worlds = ((seed, mode) for seed in range(RUNS_TO_FIND // 2) for mode in MODES)
    with monkeypatch.context() as patch:
        break_it(patch)
        found = first_violation(worlds, (found_as,), have_survivors)
    assert found is not None, f"{RUNS_TO_FIND} runs without the rule have no violation"
