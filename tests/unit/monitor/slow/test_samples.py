"""The true offset is within the bound for any network; a clock jump is detected."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.monitor.slow.samples import CONTRADICTIONS, KEPT_CALLS, RUN, ClockOffset, thinned

MS = 1_000_000


def exchange(clock: ClockOffset, at_ns: int, offset_ns: int, way: tuple[int, int, int]) -> int:
    """`way`: ns of the request, ns on the peer, ns of the reply. Returns the arrival time."""
    there, spent, back = way
    received = at_ns + there + offset_ns
    arrived = at_ns + there + spent + back
    clock.add(at_ns, received, received + spent, arrived)
    return arrived


def test_nothing_is_known_before_the_first_answer() -> None:
    clock = ClockOffset()
    assert not clock.is_known
    with pytest.raises(ValueError, match="not known"):
        clock.at(0.0)


def test_even_ways_give_the_offset_itself() -> None:
    clock = ClockOffset()
    arrived = exchange(clock, 5_000 * MS, 777 * MS, (MS, 40 * MS, MS))
    offset_s, error_s = clock.at(arrived / 1e9)
    assert offset_s == pytest.approx(0.777)
    assert error_s == pytest.approx(0.001)


def test_the_shortest_way_counts() -> None:
    clock = ClockOffset()
    exchange(clock, 0, 100 * MS, (50 * MS, 0, MS))
    exchange(clock, 1000 * MS, 100 * MS, (MS, 0, MS))
    exchange(clock, 2000 * MS, 100 * MS, (MS, 0, 80 * MS))
    offset_s, error_s = clock.at(2.1)
    assert offset_s == pytest.approx(0.1)
    assert error_s < 0.002


@given(
    offset=st.integers(-(10**15), 10**15),
    ways=st.lists(
        st.tuples(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9)),
        min_size=1,
        max_size=60,
    ),
)
def test_the_truth_is_within_the_bound(offset: int, ways: list[tuple[int, int, int]]) -> None:
    clock, at = ClockOffset(), 0
    for way in ways:
        at = exchange(clock, at, offset, way)
        known_s, error_s = clock.at(at / 1e9)
        assert abs(known_s - offset / 1e9) <= error_s + 1e-6


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), drift=st.floats(-5e-5, 5e-5))
def test_a_drifting_clock_stays_within_the_bound(seed: int, drift: float) -> None:
    chance, clock, at = random.Random(seed), ClockOffset(), 0
    for _ in range(300):
        way = (chance.randrange(20 * MS), 0, chance.randrange(20 * MS))
        now_offset = round(at * drift)
        arrived = exchange(clock, at, now_offset, way)
        known_s, error_s = clock.at(arrived / 1e9)
        assert abs(known_s - now_offset / 1e9) <= error_s + 1e-5
        at += 500 * MS


def test_a_clock_that_has_jumped_is_learnt_again() -> None:
    clock, at = ClockOffset(), 0
    for _ in range(10):
        at = exchange(clock, at, 0, (MS, 0, MS)) + 100 * MS
    for number in range(CONTRADICTIONS):
        assert clock.at(at / 1e9)[0] == pytest.approx(0.0), number
        at = exchange(clock, at, 3600_000 * MS, (MS, 0, MS)) + 100 * MS
    assert clock.at(at / 1e9)[0] == pytest.approx(3600.0)


def test_one_exchange_that_contradicts_is_ignored() -> None:
    clock = ClockOffset()
    exchange(clock, 0, 0, (MS, 0, MS))
    exchange(clock, 100 * MS, 9000 * MS, (MS, 0, MS))
    exchange(clock, 200 * MS, 0, (MS, 0, MS))
    exchange(clock, 300 * MS, 9000 * MS, (MS, 0, MS))
    exchange(clock, 400 * MS, 9000 * MS, (MS, 0, MS))
    assert clock.at(0.5)[0] == pytest.approx(0.0)


@pytest.mark.parametrize("times", [(10, 100, 90, 20), (10, 100, 150, 20)])
def test_what_cannot_be_is_left_out(times: tuple[int, int, int, int]) -> None:
    clock = ClockOffset()
    clock.add(*times)
    assert not clock.is_known


def test_thinned_samples_agree_on_what_is_left() -> None:
    one = thinned([("0", seq, 0.0) for seq in range(1, 200)] + [("1", 5, 0.0)])
    other = thinned([("0", seq, 0.0) for seq in range(7, 190)])
    assert len([entry for entry in one if entry[0] == "0"]) <= KEPT_CALLS + RUN
    common = {entry[1] for entry in one} & {entry[1] for entry in other}
    assert len(common) >= KEPT_CALLS // 3
    assert ("1", 5, 0.0) in one
    steps = {entry[1] // 2 for entry in one if entry[0] == "0"}
    whole = [step for step in steps if {2 * step, 2 * step + 1} <= {entry[1] for entry in one}]
    assert len(whole) >= len(steps) - 8, "both collectives of a step are kept"
