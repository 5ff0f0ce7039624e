"""What bench_survivors.py computes from the notes of its ranks."""

from typing import Any

import pytest
from bench_survivors import Kill, Measured, figures_of, pause_of, seconds_to_step, wrong_steps


def line(step: int, generation: int, at_s: float, digest: str = "") -> dict[str, Any]:
    ns = int(at_s * 1e9)
    return {"step": step, "generation": generation, "ns": ns, "digest": digest or f"of {step}"}


STAYED = [line(7, 0, 1.0), line(8, 0, 1.5), line(8, 1, 2.25), line(9, 1, 2.5)]
KILLED = [line(7, 0, 1.0), line(8, 0, 1.4)]
REPLACED = [*KILLED, line(8, 1, 2.5), line(9, 1, 2.75)]
KILL = Kill(rank=1, generation=0, ns=2_000_000_000)


def test_the_time_ends_when_every_rank_has_stepped_again() -> None:
    assert seconds_to_step([STAYED, KILLED], KILL) == []
    assert seconds_to_step([STAYED, REPLACED], KILL) == [0.25, 0.5]


def test_a_later_kill_looks_at_later_generations_only() -> None:
    assert seconds_to_step([STAYED, REPLACED], Kill(0, 1, KILL.ns)) == []


def test_a_pause_is_between_two_steps_of_one_rank() -> None:
    assert pause_of(STAYED, KILL) == 0.75


def test_a_measurement_tells_the_killed_rank_from_the_other() -> None:
    found = Measured()
    found.add([STAYED, REPLACED], KILL)
    assert (found.all_s, found.replaced_s, found.pause_s) == ([0.5], [0.5], [0.75])


def test_medians_have_the_name_of_their_launcher_and_job() -> None:
    small = Measured(all_s=[3.0, 1.0, 2.0], replaced_s=[1.5], pause_s=[2.5])
    found = figures_of(
        {
            ("survivors", "small"): small,
            ("full", "small"): small,
            ("torchrun", "setup"): Measured(all_s=[9.0, 8.0, 7.0]),
        }
    )
    assert found == {
        "small_s": 2.0,
        "replaced_rank_s": 1.5,
        "survivor_pause_s": 2.5,
        "full_small_s": 2.0,
        "full_replaced_rank_s": 1.5,
        "full_survivor_pause_s": 2.5,
        "torchrun_setup_s": 8.0,
    }


@pytest.mark.parametrize(
    ("changed", "steps"),
    [
        ([], []),
        ([line(9, 1, 3.0, "another")], [9]),
        ([line(8, 1, 3.0)], []),  # a repeated step is equal
        ([line(10, 1, 3.0)], [10]),  # no step of the undisturbed run
    ],
)
def test_steps_are_compared_with_those_of_the_undisturbed_run(
    changed: list[dict[str, Any]], steps: list[int]
) -> None:
    expected = [[line(7, 0, 0.0), line(8, 0, 0.0), line(9, 0, 0.0)]] * 2
    assert wrong_steps([STAYED, [*REPLACED, *changed]], expected) == steps
