"""Spares: enough, not too many, and as a simulation of repairs has it."""

import math
import random

import pytest
from failing_run import interval_of, time_without_enough
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.tools.estimate.spare_nodes import best_spares, too_few


@settings(deadline=None)
@given(st.floats(1e-6, 500.0), st.integers(0, 600))
def test_each_spare_helps_and_none_harms(mean: float, spares: int) -> None:
    assert 0.0 <= too_few(mean, spares + 1) <= too_few(mean, spares) + 1e-12 <= 1.0 + 1e-12


@settings(deadline=None)
@given(st.integers(1, 100_000), st.floats(0.0, 200.0))
def test_one_spare_more_or_less_trains_no_more(nodes: int, mean: float) -> None:
    def used(spares: int) -> float:
        return nodes / (nodes + spares) * (1 - too_few(mean, spares))

    best = best_spares(nodes, mean)
    assert used(best) >= used(best + 1) - 1e-9
    assert best == 0 or used(best) >= used(best - 1) - 1e-9


def test_where_no_node_is_lost_none_stands_by() -> None:
    assert too_few(0.0, 0) == 0.0
    assert best_spares(16, 0.0) == 0


def test_of_a_few_nodes_a_spare_costs_more_than_it_saves() -> None:
    assert best_spares(4, 0.001) == 0
    assert best_spares(4000, 0.001) == 1


@pytest.mark.parametrize(("mean", "spares"), [(0.5, 0), (0.5, 1), (4.0, 5)])
def test_repairs_by_chance_take_as_many_nodes(mean: float, spares: int) -> None:
    """Lognormal as LANL's: median 54 min, mean 355."""
    sigma = math.sqrt(2 * math.log(355 / 54))

    def sample(dice: random.Random) -> float:
        return time_without_enough(
            dice,
            lost_per_s=mean / (355 * 60.0),
            repair_s=lambda dice: 60.0 * dice.lognormvariate(math.log(54), sigma),
            spares=spares,
            over_s=3e7,
        )

    found, off = interval_of(sample, runs=30, seed=2)
    assert off < 0.2 * found, "too few runs to tell"
    assert abs(found - too_few(mean, spares)) <= off
