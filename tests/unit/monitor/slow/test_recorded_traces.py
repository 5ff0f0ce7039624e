"""The detectors on recordings of real runs name the right culprit, and no other at any time."""

import pytest

from ftrun.monitor.slow.links import SlowLinkDetector
from ftrun.monitor.slow.stragglers import StragglerDetector
from ftrun.monitor.verdicts import VerdictKind
from tests.unit.monitor.recorded import FOLDER, NAMES, recording

SLOW_RANKS = {
    "slow_rank_of_2": 1,
    "slow_rank_of_2_nodes": 3,
    "slow_rank_quick_steps": 1,
    "slow_rank_tensor_parallel": 0,
}
SLOW_LINKS = {
    "slow_link_2_nodes": ("node0", "node1"),
    "slow_link_4_nodes": ("node1",),
    "long_link_4_nodes": ("node2",),
}
SAMPLE_S = 4.0
"""The allowed delay if steps are short; an observation arrives every half second."""


def test_all_recordings_are_small_and_used() -> None:
    used = {*SLOW_RANKS, *SLOW_LINKS, "slow_rank_seen_from_links", "noisy_slow_rank_of_4"}
    assert {name for name in NAMES if not name.startswith("healthy")} == used
    assert max(path.stat().st_size for path in FOLDER.iterdir()) < 20_000


@pytest.mark.parametrize(("name", "rank"), SLOW_RANKS.items())
def test_the_slow_rank_is_named_within_20_steps(name: str, rank: int) -> None:
    trace, detector = recording(name), StragglerDetector()
    first = None
    step_before = 0
    for second, samples in trace.seconds_of_ranks():
        verdict = detector.poll(samples, trace.groups)
        step = max([poll.step for poll in samples], default=step_before)
        if second <= 0:
            assert verdict is None
            step_before = step
        elif verdict is not None:
            assert verdict.kind is VerdictKind.SLOW_COMPUTATION
            assert verdict.culprits == (rank,)
            first = first or (second, step - step_before)
    assert first is not None
    seconds, steps = first
    assert steps <= 20 or seconds <= SAMPLE_S


def test_on_a_machine_without_time_none_is_named_or_the_right_one() -> None:
    trace, detector = recording("noisy_slow_rank_of_4"), StragglerDetector()
    for second, samples in trace.seconds_of_ranks():
        verdict = detector.poll(samples, trace.groups)
        assert verdict is None or (second > 0 and verdict.culprits == (2,))


@pytest.mark.parametrize(("name", "nodes"), SLOW_LINKS.items())
def test_the_slow_link_is_named(name: str, nodes: tuple[str, ...]) -> None:
    trace, links = recording(name), SlowLinkDetector()
    first = None
    for second, samples in trace.seconds_of_links():
        verdict = links.poll(samples, trace.hosts, now_s=second)
        if verdict is not None:
            assert second > 0
            assert verdict.kind is VerdictKind.SLOW_COMMUNICATION
            assert verdict.nodes == nodes
            first = first or second
    assert first is not None
    assert first <= 8
    hot = {(cell.sender, cell.receiver) for cell in links.table() if cell.is_hot}
    assert hot
    assert all(set(pair) & set(nodes) for pair in hot)


@pytest.mark.parametrize("name", [name for name in NAMES if recording(name).link_samples])
def test_no_link_is_named_for_a_slow_rank_or_for_nothing(name: str) -> None:
    trace, links = recording(name), SlowLinkDetector()
    is_link = name in SLOW_LINKS
    for second, samples in trace.seconds_of_links():
        verdict = links.poll(samples, trace.hosts, now_s=second)
        assert verdict is None or (is_link and second > 0)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("healthy")])
def test_on_healthy_recordings_none_is_named(name: str) -> None:
    trace, detector = recording(name), StragglerDetector()
    for _, samples in trace.seconds_of_ranks():
        assert detector.poll(samples, trace.groups) is None
