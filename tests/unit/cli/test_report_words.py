"""Numbers in words, and the interval of a rate."""

import math

import pytest

from ftrun.cli.screen.text import (
    by_number,
    clean,
    count,
    duration,
    likely_rates,
    percent,
    ranges,
    ranks,
    size,
    when,
    with_commas,
)
from ftrun.tools.report.render.svg import Axis, nice, ticks


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "not known"),
        (0.0, "0 ms"),
        (0.0004, "0.4 ms"),
        (0.0645, "64 ms"),
        (0.9996, "1.00 s"),
        (3.214, "3.21 s"),
        (59.97, "1 min"),
        (200.0, "3 min 20 s"),
        (7500.0, "2 h 5 min"),
        (356_400.0, "4 d 3 h"),
        (-2.0, "-2.00 s"),
    ],
)
def test_durations(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


def test_small_words() -> None:
    assert ranges([0, 1, 2, 4, 6, 7, 9]) == "0-2, 4, 6, 7, 9"
    assert ranges(range(0, 100, 2), most=3) == "0, 2, 4 and 47 more"
    assert ranks([3, 3]) == "rank 3"
    assert ranks(range(512)) == "ranks 0-511"
    assert count(1, "launch") == "1 launch"
    assert count(2, "launch") == "2 launches"
    assert size(5_253_248) == "5.3 MB"
    assert with_commas("step 15915 (generation 1)") == "step 15,915 (generation 1)"
    assert sorted(["node10", "node9", "a"], key=by_number) == ["a", "node9", "node10"]
    assert when(1e18) == "not known"


def test_what_is_less_than_all_is_never_reported_as_all() -> None:
    assert percent(1.0) == "100.0 %"
    assert percent(0.99995) == "99.995 %"
    assert percent(0.972) == "97.2 %"


@pytest.mark.parametrize("events", [0, 1, 5, 40])
def test_the_interval_is_that_of_a_poisson_process(events: int) -> None:
    low, high = likely_rates(events, 1.0)

    def at_most(most: int, mean: float) -> float:
        return sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(most + 1))

    assert at_most(events, high) == pytest.approx(0.05)
    if events:
        assert 1 - at_most(events - 1, low) == pytest.approx(0.05)
    else:
        assert low == 0.0


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("left\u202eright", "left\\u202eright"),
        ("\ud800", "\\ud800"),
        ("caf\u00e9 \u05d0", "caf\u00e9 \u05d0"),
        ("line\none", "line\none"),
    ],
)
def test_what_cannot_be_seen_is_spelt(hostile: str, shown: str) -> None:
    assert clean(hostile) == shown


def test_long_texts_are_cut_with_the_number_of_the_rest() -> None:
    assert clean("x" * 5000, 100) == "x" * 100 + " ... (4,900 more characters)"


def test_an_axis_changes_its_scale_where_a_quick_part_follows_a_long_one() -> None:
    axis = Axis(-1.0, 13.0, left=0.0, right=1000.0, turn_s=12.5)
    assert axis.is_broken
    (before,) = axis.spans(0.0, 12.0)
    (after,) = axis.spans(12.6, 12.8)
    assert before[1] <= axis.gap[0] < axis.gap[1] <= after[0]
    assert after[1] - after[0] > 100
    assert len(axis.spans(5.0, 12.8)) == 2
    assert not Axis(-1.0, 13.0, left=0.0, right=1000.0, turn_s=4.0).is_broken


@pytest.mark.parametrize("length", [1e-5, 0.064, 1.0, 13.0, 400.0, 7200.0, 3e6])
def test_ticks_are_round_and_neither_many_nor_none(length: float) -> None:
    found = list(ticks(0.0, length, 700.0))
    assert 2 <= len(found) <= 12
    assert len({words for _, words in found}) == len(found)
    assert nice(length) >= length * 0.999
