"""The formula of goodput: its limits, its order, and an independent simulation."""

import math

import pytest
from failing_run import Costs, Run, interval_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ftrun.tools.estimate.goodput import (
    FailureKind,
    best_interval_s,
    goodput,
    life_s,
    over_disk,
)

seconds = st.floats(0.1, 1e5)
mtbfs = st.floats(10.0, 1e8)


def one(dead_s: float, lag_s: float = 0.0) -> list[FailureKind]:
    return [FailureKind(1.0, dead_s, lag_s)]


def daly(interval_s: float, save_s: float, dead_s: float, mtbf_s: float) -> float:
    """The formula as printed in the papers."""
    whole = math.exp((interval_s + save_s) / mtbf_s) - 1
    return interval_s / (mtbf_s * math.exp(dead_s / mtbf_s) * whole)


# --- limits -----------------------------------------------------------------------------------


@settings(deadline=None)
@given(seconds, seconds, seconds)
def test_without_failures_only_saves_are_lost(
    interval_s: float, save_s: float, dead_s: float
) -> None:
    found = goodput(interval_s=interval_s, save_s=save_s, mtbf_s=math.inf, kinds=one(dead_s))
    assert found == interval_s / (interval_s + save_s)
    almost = goodput(interval_s=interval_s, save_s=save_s, mtbf_s=1e15, kinds=one(dead_s))
    assert almost == pytest.approx(found, rel=1e-6)


def test_with_failures_that_never_let_a_save_be_made_nothing_is_gained() -> None:
    assert goodput(interval_s=1e4, save_s=1e4, mtbf_s=10.0, kinds=one(10.0)) == 0.0


@settings(deadline=None)
@given(seconds, st.floats(0.0, 1e3), st.floats(0.0, 1e3), st.floats(100.0, 1e8))
def test_one_kind_of_failure_gives_the_formula_of_the_papers(
    interval_s: float, save_s: float, dead_s: float, mtbf_s: float
) -> None:
    if (interval_s + save_s + dead_s) / mtbf_s > 600:
        return
    found = goodput(interval_s=interval_s, save_s=save_s, mtbf_s=mtbf_s, kinds=one(dead_s))
    assert found == pytest.approx(daly(interval_s, save_s, dead_s, mtbf_s), rel=1e-6)


@settings(deadline=None)
@given(seconds, seconds, seconds, mtbfs)
def test_kinds_that_cost_the_same_are_one_kind(
    interval_s: float, save_s: float, dead_s: float, mtbf_s: float
) -> None:
    def found(kinds: list[FailureKind]) -> float:
        return goodput(interval_s=interval_s, save_s=save_s, mtbf_s=mtbf_s, kinds=kinds)

    assert found([FailureKind(0.3, dead_s), FailureKind(0.7, dead_s)]) == pytest.approx(
        found(one(dead_s))
    )


# --- order ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(seconds, seconds, seconds, mtbfs, st.floats(1.01, 100.0))
def test_the_more_failures_the_less_goodput(
    interval_s: float, save_s: float, dead_s: float, mtbf_s: float, times: float
) -> None:
    def found(mtbf_s: float) -> float:
        return goodput(interval_s=interval_s, save_s=save_s, mtbf_s=mtbf_s, kinds=one(dead_s, 1.0))

    assert 0.0 <= found(mtbf_s) <= found(mtbf_s * times) <= 1.0


@settings(deadline=None)
@given(seconds, seconds, seconds, seconds, mtbfs, st.floats(0.1, 1e4))
def test_whatever_costs_more_is_worse(
    interval_s: float, save_s: float, dead_s: float, lag_s: float, mtbf_s: float, more_s: float
) -> None:
    def found(save_s: float, dead_s: float, lag_s: float) -> float:
        kinds = one(dead_s, lag_s)
        return goodput(interval_s=interval_s, save_s=save_s, mtbf_s=mtbf_s, kinds=kinds)

    best = found(save_s, dead_s, lag_s)
    assert found(save_s + more_s, dead_s, lag_s) <= best
    assert found(save_s, dead_s + more_s, lag_s) <= best
    assert found(save_s, dead_s, lag_s + more_s) <= best


# --- the best interval ------------------------------------------------------------------------


@settings(deadline=None)
@given(seconds, st.floats(1.0, 1e8), seconds, st.floats(0.5, 2.0))
@example(save_s=1e5, mtbf_s=1.0, dead_s=1.0, times=0.9)
def test_no_other_interval_is_better(
    save_s: float, mtbf_s: float, dead_s: float, times: float
) -> None:
    best_s = best_interval_s(save_s=save_s, mtbf_s=mtbf_s, longest_s=1e12)
    assert 0.0 < best_s <= mtbf_s

    def found(interval_s: float) -> float:
        return goodput(interval_s=interval_s, save_s=save_s, mtbf_s=mtbf_s, kinds=one(dead_s))

    assert found(best_s * times) <= found(best_s) * (1 + 1e-9)


@settings(deadline=None)
@given(st.floats(0.1, 100.0), st.floats(1e-6, 1e-3))
def test_young_and_daly_come_near_where_saves_are_cheap(save_s: float, part: float) -> None:
    mtbf_s = save_s / part
    best_s = best_interval_s(save_s=save_s, mtbf_s=mtbf_s, longest_s=math.inf)
    young_s = math.sqrt(2.0 * save_s * mtbf_s)
    assert young_s == pytest.approx(best_s, rel=0.02)
    daly_s = young_s * (1.0 + math.sqrt(part / 2.0) / 3.0 + part / 18.0) - save_s
    assert daly_s == pytest.approx(best_s, rel=1e-4)


def test_the_best_interval_is_no_longer_than_it_may_be() -> None:
    assert best_interval_s(save_s=1.0, mtbf_s=1e9, longest_s=60.0) == pytest.approx(60.0)
    assert best_interval_s(save_s=1.0, mtbf_s=math.inf, longest_s=60.0) == 60.0
    assert best_interval_s(save_s=0.0, mtbf_s=1e4, longest_s=60.0) == 0.0


# --- the disk ---------------------------------------------------------------------------------


def test_a_disk_that_is_never_needed_costs_only_its_writing() -> None:
    whole = over_disk(0.9, every_s=600.0, blocks_s=0.0, share=0.0, recovery_s=1e4)
    assert whole == 0.9
    written = over_disk(0.9, every_s=600.0, blocks_s=60.0, share=0.0, recovery_s=math.inf)
    assert written == pytest.approx(0.9 * 600 / 660)


@settings(deadline=None)
@given(st.floats(1e-3, 1.0), st.floats(1.0, 1e5), st.floats(0.0, 1.0), st.floats(10.0, 1e8))
@example(memory=0.75, every_s=600.0, share=1e-9, recovery_s=1e4)
@example(memory=0.75, every_s=1.0, share=5e-324, recovery_s=1e8)
def test_going_back_to_the_disk_costs_something(
    memory: float, every_s: float, share: float, recovery_s: float
) -> None:
    found = over_disk(memory, every_s=every_s, blocks_s=0.0, share=share, recovery_s=recovery_s)
    assert 0.0 <= found <= memory * (1 + 1e-12)


def test_if_snapshots_gain_nothing_the_disk_costs_nothing() -> None:
    assert over_disk(0.0, every_s=600.0, blocks_s=1.0, share=0.1, recovery_s=1e4) == 0.0


def test_a_life_is_longer_than_the_time_between_failures_by_its_recovery() -> None:
    assert life_s(mtbf_s=math.inf, kinds=one(60.0)) == math.inf
    assert life_s(mtbf_s=1e9, kinds=one(60.0)) == pytest.approx(1e9 + 60.0)
    assert life_s(mtbf_s=1.0, kinds=one(1e6)) == math.inf


# --- a simulation -----------------------------------------------------------------------------

LLAMA_S = 86_400 / (2048 * 3.79e-3)
RUNS = {
    "checkpoints, 2,048 nodes": Run(1116.0, 60.0, LLAMA_S, [Costs(1.0, 1200.0)]),
    "checkpoints, 16,384 nodes": Run(370.0, 60.0, LLAMA_S / 8, [Costs(1.0, 1200.0)]),
    "a save takes longer than failures let it": Run(50.0, 40.0, 60.0, [Costs(1.0, 30.0)]),
    "three kinds, one with lag": Run(
        180.0, 1.6, LLAMA_S, [Costs(0.63, 75.0), Costs(0.1, 120.0), Costs(0.27, 122.0, 44.0)]
    ),
    "the lag is longer than the interval": Run(
        30.0, 2.0, 1400.0, [Costs(0.5, 20.0), Costs(0.5, 90.0, 70.0)]
    ),
    "some need the disk": Run(
        60.0, 1.6, 1400.0,
        [Costs(0.7, 75.0), Costs(0.27, 122.0, 44.0), Costs(0.03, 603.0, needs_disk=True)], 600.0
    ),
}  # fmt: skip


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_simulation_comes_to_the_same(run: Run) -> None:
    mean, off = interval_of(lambda dice: run.goodput(dice, lives=600), runs=40, seed=1)
    assert off < 0.05 * mean, "too few runs for a comparison"
    kinds = [FailureKind(one.share, one.dead_s, one.lag_s) for one in run.kinds]
    expected = goodput(interval_s=run.interval_s, save_s=run.save_s, mtbf_s=run.mtbf_s, kinds=kinds)
    expected = over_disk(
        expected,
        every_s=min(run.disk_every_s, 1e12),
        blocks_s=0.0,
        share=sum(one.share for one in run.kinds if one.needs_disk),
        recovery_s=life_s(mtbf_s=run.mtbf_s, kinds=kinds),
    )
    assert abs(mean - expected) <= off
