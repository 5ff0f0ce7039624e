"""Losses and parameters that are NaN or infinite, and losses that jump."""

import math
import random

import pytest

from ftrun.monitor.numerics import NumericsDetector, RankNumerics, finite
from ftrun.monitor.verdicts import Confidence, Verdict, VerdictKind

NODES = {0: "a", 1: "b"}


def poll(
    made: NumericsDetector, step: int, losses: list[float | None], bad: dict[int, int]
) -> Verdict | None:
    ranks = [RankNumerics(r, step, loss, step, bad.get(r, 0)) for r, loss in enumerate(losses)]
    return made.poll(ranks, NODES, now_s=float(step))


def found_by(
    made: NumericsDetector, step: int, losses: list[float | None], bad: dict[int, int]
) -> Verdict:
    verdict = poll(made, step, losses, bad)
    assert verdict is not None
    return verdict


def test_numbers_are_numbers() -> None:
    made = NumericsDetector()
    assert poll(made, 1, [None, None], {}) is None
    assert poll(made, 2, [0.5, 0.6], {}) is None


def test_only_numbers_are_shown() -> None:
    assert [finite(one) for one in (1.5, None, math.nan, math.inf)] == [1.5, None, None, None]


def test_a_node_that_had_it_first_is_named() -> None:
    made = NumericsDetector()
    found = found_by(made, 9, [math.nan, math.nan], {0: 8, 1: 7})
    assert (found.culprits, found.nodes, found.victims) == ((1,), ("b",), (0,))
    assert found.confidence is Confidence.CERTAIN
    assert found.text == "rank 1 has computed NaN or infinity at step 7"
    assert made.bad_since == 7
    assert poll(made, 10, [math.nan, math.nan], {0: 8, 1: 7}) is None, "reported once"
    made.begin()
    assert poll(made, 11, [math.inf, 1.0], {}) is None
    assert poll(made, 12, [math.inf, 1.0], {}) is not None


def test_a_parameter_may_be_bad_before_the_loss_is() -> None:
    found = found_by(NumericsDetector(), 10, [0.5, 0.5], {1: 9})
    assert found.evidence == ("a parameter of rank 1 is NaN or infinite since step 9",)


def test_a_single_bad_loss_is_an_overflow_that_a_scaler_skips() -> None:
    made = NumericsDetector()
    assert poll(made, 9, [math.inf, 0.5], {}) is None
    assert poll(made, 10, [0.5, 0.5], {}) is None
    assert poll(made, 11, [math.inf, 0.5], {}) is None


def test_a_loss_stays_on_the_page_until_the_next_report_and_counts_once() -> None:
    made = NumericsDetector()
    for step in range(51, 99):
        ranks = [RankNumerics(0, step, math.nan, 50, 0), RankNumerics(1, step, 0.5, 50, 0)]
        assert made.poll(ranks, NODES, now_s=float(step)) is None
    for step in range(100, 200):
        assert made.poll([RankNumerics(0, step, 1.0, 100, 0)], NODES, now_s=float(step)) is None
    for step in range(200, 300):
        assert made.poll([RankNumerics(0, step, 2.0, 200, 0)], NODES, now_s=float(step)) is None


def test_a_node_that_has_not_reported_yet_is_waited_for_and_no_node_named_where_it_does_not() -> (
    None
):
    made = NumericsDetector()
    behind = [RankNumerics(0, 9, None, 0, 8), RankNumerics(1, 7, None, 0, 0)]
    assert made.poll(behind, NODES, now_s=1.0) is None
    assert made.poll(behind, NODES, now_s=2.0) is None
    found = made.poll(behind, NODES, now_s=3.0)
    assert found is not None
    assert (found.culprits, found.confidence) == ((), Confidence.LIKELY)


def test_all_had_it_at_once() -> None:
    made = NumericsDetector()
    assert poll(made, 9, [math.nan, math.nan], {}) is None
    found = found_by(made, 10, [math.nan, math.nan], {})
    assert (found.kind, found.culprits, found.victims) == (
        VerdictKind.NUMERICAL_ANOMALY,
        (),
        (0, 1),
    )
    assert found.text.startswith("all ranks have computed")
    assert found.counter_evidence


def test_a_loss_that_jumps_and_stays_there() -> None:
    made = NumericsDetector()
    noise = random.Random(0)
    for step in range(1, 40):
        assert poll(made, step, [2.0 + 0.1 * noise.random()], {}) is None
        assert poll(made, step, [50.0], {}) is None, "a step counts once"
    assert poll(made, 40, [30.0], {}) is None, "one batch may be an outlier"
    found = found_by(made, 41, [40.0], {})
    assert (found.confidence, found.act_immediately) == (Confidence.POSSIBLE, False)
    assert "to 40 by step 41" in found.text
    assert poll(made, 42, [41.0], {}) is None, "reported once"
    assert poll(made, 43, [2.05], {}) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_single_bad_loss_does_not_disturb_the_search_for_jumps(bad: float) -> None:
    made = NumericsDetector()
    noise = random.Random(2)
    for step in range(1, 60):
        loss = bad if step == 8 else 2.0 + 0.1 * noise.random()
        assert poll(made, step, [loss, loss], {}) is None
    assert poll(made, 60, [30.0, 30.0], {}) is None
    found = found_by(made, 61, [40.0, 40.0], {})
    assert "the last 58 losses before it: 2.0" in found.evidence[0]


def test_a_noisy_loss_is_no_spike() -> None:
    made = NumericsDetector()
    noise = random.Random(1)
    for step in range(1, 500):
        assert poll(made, step, [math.exp(noise.gauss(0, 0.5))], {}) is None
