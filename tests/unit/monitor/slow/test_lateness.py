"""A rank is named if its lateness exceeds the noise, and cleared if it no longer does."""

from ftrun.monitor.slow.lateness import LEARNT, LEFT_OUT, WINDOWS, LatenessSeries
from ftrun.monitor.verdicts import Confidence

STEP_S = 0.14
FLOOR_S = 0.003
NOISY_MS = [7, -38, 10, 33, -34, 15, 17, -21, 25, -13, 5, 31]
"""Lateness of a rank on a machine with other work, before it was slow."""
SLOW_MS = [60, 133, 177, 132, 121, 182, 149, 146, 134, 119, 211, 188]
AFTERWARDS_MS = [28, -26, 25, 48, 22, 24, 21, 30, 26, 23, -18, 22, 27, 25, 24, 21]
"""More often late than early, by no more than before."""


def fed(series: LatenessSeries, values_ms: list[int]) -> list[Confidence | None]:
    said = []
    for value in values_ms:
        series.add(value / 1000)
        said.append(series.judge(STEP_S, FLOOR_S, 0.02, may_name=True))
    return said


def test_lateness_within_the_noise_is_removed() -> None:
    series = LatenessSeries()
    assert set(fed(series, (NOISY_MS * 3)[: LEFT_OUT + LEARNT + WINDOWS])) == {None}
    assert fed(series, SLOW_MS)[-1] is Confidence.LIKELY
    assert fed(series, AFTERWARDS_MS)[WINDOWS] is None
    assert fed(series, SLOW_MS)[-1] is Confidence.LIKELY


def test_a_node_that_is_less_late_than_before_keeps_its_name() -> None:
    series = LatenessSeries()
    fed(series, (NOISY_MS * 3)[: LEFT_OUT + LEARNT + WINDOWS])
    assert fed(series, SLOW_MS)[-1] is Confidence.LIKELY
    assert set(fed(series, [value * 2 // 3 for value in SLOW_MS])) == {Confidence.LIKELY}
