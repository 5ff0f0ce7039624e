"""Samples are counted over the whole world, and random streams go on without meeting."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.snapshot import regroup
from ftrun.snapshot.plain_values import decode, encode
from ftrun.snapshot.regroup import WorldResize
from ftrun.worker.state import determinism as rng

counts = st.lists(st.integers(0, 50), min_size=1, max_size=6)


def feed(handed_out: int, *, own: object = None, seed: int | None = None) -> dict[str, object]:
    began = None
    if seed is not None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        generator = torch.Generator().manual_seed(seed)
        began = {"rng": rng.take_all(), "generators": {"loader": rng.generator_bytes(generator)}}
    return {
        "pass": 2,
        "handed_out": handed_out,
        "started_with": began,
        "had_workers": False,
        "own": own,
    }


@settings(deadline=None)
@given(counts, st.integers(1, 7))
def test_no_sample_is_seen_twice_and_less_than_a_batch_of_each_rank_is_left_out(
    handed_out: list[int], size: int
) -> None:
    states = [feed(count) for count in handed_out]
    resize = WorldResize(0, len(states), size)
    used = regroup.batches_used(states, resize) * size
    assert 0 <= used - sum(handed_out) < size
    for rank in range(size):
        state = regroup.loader(states, WorldResize(rank, len(states), size))
        assert state["handed_out"] * size == used
        assert (state["pass"], state["own"], state["resized"]) == (2, None, True)


def test_what_happens_to_a_loader_is_said() -> None:
    resize = WorldResize(0, 3, 4)
    assert regroup.loader_note("loader", [feed(0)] * 3, resize) is None
    note = regroup.loader_note("loader", [feed(6)] * 3, resize)
    assert note is not None
    assert "3 ranks have used 18 batches" in note
    assert "after 5 in each of 4 ranks" in note
    assert "2 batches are left out" in note
    own = regroup.loader_note("loader", [feed(6, own={"at": 6})] * 3, WorldResize(0, 3, 2))
    assert own is not None
    assert "left out" not in own
    assert "dropped" in own


def taken(seed: int) -> dict[str, object]:
    found = feed(0, seed=seed)["started_with"]["rng"]  # type: ignore[index]
    return decode(encode(found))  # type: ignore[no-any-return]


def draw(states: dict[str, object]) -> tuple[float, float, float]:
    rng.put_back(states)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_rank_that_was_there_goes_on_with_its_own_random_numbers() -> None:
    old = [taken(seed) for seed in range(3)]
    for rank in range(2):
        assert draw(regroup.streams(old, WorldResize(rank, 3, 2))) == draw(old[rank])


def test_a_rank_that_was_not_there_draws_as_nobody_else_does_and_the_same_each_time() -> None:
    old = [taken(seed) for seed in range(2)]
    drawn = [draw(regroup.streams(old, WorldResize(rank, 2, 6))) for rank in range(6)]
    for stream in zip(*drawn, strict=True):
        assert len(set(stream)) == 6
    assert drawn[5] == draw(regroup.streams(old, WorldResize(5, 2, 6)))


@pytest.mark.parametrize("size", [1, 2])
def test_a_stream_that_several_ranks_have_in_common_stays_in_common(size: int) -> None:
    old = [{**taken(9), "python": taken(seed)["python"]} for seed in range(size)]
    python, numpy, own = draw(regroup.streams(old, WorldResize(3, size, 4)))
    shared = draw(taken(9))
    assert ((numpy, own) == shared[1:]) == (size > 1)
    assert python not in {draw(state)[0] for state in old}


def test_generators_go_on_or_get_a_seed() -> None:
    made = [{"dice": bytes([seed]), "shared": b"same"} for seed in range(2)]
    assert regroup.generators(made, WorldResize(1, 2, 3)) == made[1]
    derived = regroup.generators(made, WorldResize(2, 2, 3))
    assert derived["shared"] == b"same"
    assert isinstance(derived["dice"], int)
    assert derived == regroup.generators(made, WorldResize(2, 2, 3))


def test_the_shuffle_of_a_pass_is_that_of_the_old_rank_or_a_derived_one() -> None:
    states = [feed(4, seed=seed) for seed in range(2)]
    kept = regroup.loader(states, WorldResize(1, 2, 3))["started_with"]
    assert kept == states[1]["started_with"]
    derived = regroup.loader(states, WorldResize(2, 2, 3))["started_with"]
    drawn = set()
    for state in (*kept["generators"].values(), *derived["generators"].values()):
        generator = torch.Generator()
        rng.set_generator(generator, state)
        drawn.add(float(torch.rand((), generator=generator)))
    assert len(drawn) == 2


def test_what_follows_from_what_follows_is_another_one_again() -> None:
    old = [taken(seed) for seed in range(2)]
    once = [regroup.streams(old, WorldResize(rank, 2, 3)) for rank in range(3)]
    twice = regroup.streams(decode(encode(once)), WorldResize(5, 3, 6))
    assert twice[regroup.DERIVED] == once[2]
    assert len({draw(states)[2] for states in (*old, *once, twice)}) == 4
