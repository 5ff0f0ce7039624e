"""The results of the assumptions: limits, order, and the choices with their reasons."""

import dataclasses
import math

import pytest
from failing_run import Costs, Run, interval_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.tools.estimate.assumptions import ABOUT, Assumptions, flag_of, mtbf_s, problems
from ftrun.tools.estimate.outlook import FixedChoices, Outlook, best_every, ftrun_kinds, outlook

NOTHING_DECIDED = FixedChoices()


def at(nodes: int, decided: FixedChoices = NOTHING_DECIDED, **values: float) -> Outlook:
    return outlook(nodes, Assumptions(**values), decided)


# --- failures ---------------------------------------------------------------------------------


def test_llama_3_is_what_it_was() -> None:
    found = at(2048)
    assert found.failures == pytest.approx(419, rel=0.001)
    assert found.mtbf_s / 3600 == pytest.approx(3.09, abs=0.01)


def test_crowded_nodes_fail_more_often_than_alone() -> None:
    given = Assumptions(rate=2.3, crowding=0.9)
    assert mtbf_s(12_500, given) / 60 == pytest.approx(18, abs=0.5)
    assert mtbf_s(4000, given) == mtbf_s(4000, Assumptions(rate=2.3))


# --- limits and order -------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 16, 2048])
def test_without_failures_only_snapshots_cost(nodes: int) -> None:
    found = at(nodes, FixedChoices(every=10), rate=0.0, disk_blocks_s=6.0)
    snapshots = 150.0 / (150.0 + Assumptions().one_snapshot_s)
    assert found.ftrun.goodput == pytest.approx(snapshots * 600 / 606)
    run_s = 54 * 86_400.0
    assert found.periodic.goodput == pytest.approx(run_s / (run_s + 60))
    assert (found.mtbf_s, found.failures, found.code.loss) == (math.inf, 0.0, 0.0)
    assert (found.spares, found.too_few, found.code.share) == (0, 0.0, 0.0)


def test_periodic_checkpoints_are_those_of_the_study() -> None:
    """Llama 3's rate, 60 s per checkpoint, 600 + 600 s per failure, each at its best interval."""
    expected = {16: 0.990, 256: 0.951, 1024: 0.880, 2048: 0.808, 4096: 0.693, 16384: 0.310}
    for nodes, goodput in expected.items():
        found = at(nodes, FixedChoices(code=(6, 2))).periodic.goodput
        assert found == pytest.approx(goodput, abs=0.001)


VALID = st.builds(
    Assumptions,
    days=st.floats(0.1, 1000.0),
    rate=st.floats(0.0, 1e5),
    crowding=st.floats(0.0, 3.0),
    hang_share=st.floats(0.0, 0.3),
    node_share=st.floats(0.0, 0.4),
    domain_share=st.floats(0.0, 0.1),
    disk_share=st.floats(0.0, 0.2),
    domain_nodes=st.integers(1, 64),
    step_s=st.floats(1e-3, 1e4),
    state_gb=st.floats(1e-3, 1e5),
    periodic_cost_s=st.floats(0.0, 1e5),
    snapshot_cost_s=st.none() | st.floats(0.0, 1e4),
    hang_detect_s=st.none() | st.floats(0.0, 1e4),
    restart_more_s=st.floats(0.0, 1e5),
    disk_every_s=st.floats(1e-3, 1e6),
    disk_blocks_s=st.floats(0.0, 1e3),
    risk=st.floats(1e-9, 1.0),
)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), VALID)
def test_whatever_is_assumed_parts_are_parts(nodes: int, given_: Assumptions) -> None:
    assert problems(given_) == []
    found = outlook(nodes, given_, NOTHING_DECIDED)
    for way in (found.periodic, found.noticed, found.ftrun):
        assert 0.0 <= way.goodput <= 1.0
        assert way.interval_s >= given_.step_s * (1 - 1e-9)
    for code in found.codes:
        assert 0.0 <= code.loss <= 1.0
        assert 0.0 <= code.share <= 1.0 + 1e-9
        assert code.data + code.parity <= max(nodes, 1)
    assert found.code in found.codes
    assert 0.0 <= found.too_few <= found.too_few_without <= 1.0


@settings(max_examples=40, deadline=None)
@given(st.integers(8, 300), st.floats(0.1, 100.0), st.floats(1.1, 50.0))
def test_the_more_failures_the_less_goodput_of_each_way(
    nodes: int, rate: float, times: float
) -> None:
    decided = FixedChoices(code=(6, 2))
    few, many = (at(nodes, decided, rate=one) for one in (rate, rate * times))
    for way in ("periodic", "noticed", "ftrun"):
        assert getattr(many, way).goodput <= getattr(few, way).goodput


def test_extremes_are_no_errors() -> None:
    worst = at(512, rate=1e9, restart_more_s=1e9, state_gb=1e9, transfer_gb_per_s=1e-6)
    assert worst.ftrun.goodput == worst.periodic.goodput == 0.0
    assert worst.code.loss == 1.0


def test_a_simulation_of_the_whole_comes_to_the_same() -> None:
    given_, found = Assumptions(), at(2048)
    # For the simulation each kind has only its cost, not the formula.
    kinds = ftrun_kinds(given_, given_.disk_share + found.code.share)
    *most, disk = [Costs(one.share, one.dead_s, one.lag_s) for one in kinds]
    run = Run(
        found.ftrun.interval_s,
        given_.one_snapshot_s,
        found.mtbf_s,
        [*most, dataclasses.replace(disk, needs_disk=True)],
        given_.disk_every_s,
    )
    mean, off = interval_of(lambda dice: run.goodput(dice, lives=400), runs=40, seed=3)
    assert off < 0.003
    assert abs(mean - found.ftrun.goodput) <= off


# --- the interval -----------------------------------------------------------------------------


def test_no_other_number_of_steps_is_better() -> None:
    best = at(2048, FixedChoices(code=(6, 2))).every
    found = [
        at(2048, FixedChoices(code=(6, 2), every=n)).ftrun.goodput
        for n in (best - 1, best, best + 1)
    ]
    assert max(found) == found[1]


def test_no_snapshot_falls_due_before_the_last_one_is_protected() -> None:
    slow = Assumptions(state_gb=100.0, transfer_gb_per_s=0.226, snapshot_cost_s=0.01)
    assert best_every(slow, 600.0) == math.ceil(100 / 0.226 / 15)


def test_snapshots_that_cost_nothing_are_taken_at_each_step() -> None:
    assert best_every(Assumptions(snapshot_cost_s=0.0, state_gb=1e-3), 1e5) == 1


# --- code and spares --------------------------------------------------------------------------


def test_the_least_parity_that_bears_the_risk_is_chosen() -> None:
    assert at(2048, risk=0.05).code.name == "7+1"
    assert at(2048, risk=0.001).code.name == "6+2"
    assert at(2048, risk=1e-10).code.name == "9+3"
    assert at(16, risk=1.0).code.name == "none"


def test_parity_that_does_not_help_is_not_taken() -> None:
    """All 16 nodes are one domain: its loss costs the snapshots with any code."""
    found = at(16)
    assert (found.code.name, found.code.taken, found.code.tolerates_domain_loss) == (
        "7+1",
        8,
        False,
    )
    assert found.code.loss > Assumptions().risk


def test_one_node_has_no_code() -> None:
    found = at(1)
    assert [code.name for code in found.codes] == ["none"]
    assert found.auto_code == "none"
    assert found.code.share == pytest.approx(0.274)


def test_what_is_decided_is_not_chosen() -> None:
    found = at(64, FixedChoices(code=(3, 1), every=7, spares=5))
    assert (found.code.name, found.every, found.spares) == ("3+1", 7, 5)
    assert found.ftrun.interval_s == 7 * 15.0


def test_domains_spread_are_better_than_neighbours() -> None:
    for code in at(2048).codes[1:]:
        assert code.loss < code.loss_side_by_side / 10


# --- assumptions ------------------------------------------------------------------------------


def test_each_assumption_has_its_words() -> None:
    names = [field.name for field in dataclasses.fields(Assumptions)]
    assert names == [name for name in names if name in ABOUT]
    assert len(ABOUT) == len(names)
    assert len({flag_of(name) for name in names}) == len(names)
    assert problems(Assumptions()) == []


@pytest.mark.parametrize("name", ABOUT)
def test_a_value_beyond_its_limits_is_named(name: str) -> None:
    about = ABOUT[name]
    for value in (about.low - 1, about.high * 1.01, math.nan, math.inf):
        (problem,) = problems(dataclasses.replace(Assumptions(), **{name: value}))
        assert problem.startswith(f"{flag_of(name)} ")
        assert about.meaning in problem


def test_shares_are_no_more_than_all() -> None:
    (problem,) = problems(Assumptions(hang_share=0.6, node_share=0.6))
    assert "--hang-share" in problem
    assert "1.214" in problem


def test_hangs_are_seen_later_where_steps_are_long() -> None:
    assert Assumptions(step_s=1.0).hang_noticed_s == 10.0
    assert Assumptions(step_s=60.0).hang_noticed_s == 180.0
    assert Assumptions(step_s=60.0, hang_detect_s=9.0).hang_noticed_s == 9.0
