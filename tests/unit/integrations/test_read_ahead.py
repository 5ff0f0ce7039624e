"""A loader that the framework reads ahead resumes at the position of the training."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ftrun.integrations.read_ahead import PrefetchingPosition
from ftrun.snapshot.plain_values import decode, encode
from ftrun.worker.state import determinism as rng


class Noisy(Dataset[float]):
    """Twelve samples. Loading adds a random number to each."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return index + random.random() + float(np.random.rand()) + torch.rand(1).item()


class Stream(IterableDataset[int]):
    """Twelve numbers in a row."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


Seen = list[tuple[list[float], float]]


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def train(feed: PrefetchingPosition, passes: int, ahead: int, resolved: Any, boundary: Any) -> Seen:
    """Trains like a framework that holds `ahead` batches in addition to the current one."""
    seen: Seen = []
    for _ in range(passes):
        feed.begin_pass(resolved)
        iterator = iter(feed.loader)
        waiting: list[torch.Tensor] = []
        while True:
            while len(waiting) <= ahead and (batch := next(iterator, None)) is not None:
                waiting.append(batch)
            feed.resolve()
            if not waiting:
                break
            seen.append((waiting.pop(0).tolist(), torch.rand(1).item()))
            feed.trained()
            boundary()
    return seen


def resumed(make: Any, *, after: int, ahead: int, passes: int = 2) -> tuple[Seen, Seen]:
    """The batches of an undisturbed run after `after` batches, and those of a resumed run."""
    states: list[bytes] = []
    seed(1)
    feed = PrefetchingPosition("loader", make())
    undisturbed = train(
        feed, passes, ahead, lambda: None, lambda: states.append(encode([feed.state(), taken()]))
    )
    state, randomness = decode(states[after - 1])
    seed(99)
    again = PrefetchingPosition("loader", make())
    again.load_state(state)
    waiting = [randomness]
    hit = train(
        again,
        passes - state["pass"],
        ahead,
        lambda: waiting and rng.put_back(waiting.pop()),
        lambda: None,
    )
    assert not waiting
    return undisturbed[after:], hit


def taken() -> dict[str, Any]:
    return rng.take_all()


@settings(max_examples=40, deadline=None)
@given(after=st.integers(1, 7), ahead=st.integers(0, 5), shuffle=st.booleans())
def test_what_was_read_ahead_is_read_again_from_the_same_random_states(
    after: int, ahead: int, shuffle: bool
) -> None:
    undisturbed, hit = resumed(
        lambda: DataLoader(Noisy(), batch_size=3, shuffle=shuffle), after=after, ahead=ahead
    )
    assert hit == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_read_further_ahead(persistent: bool) -> None:
    def make() -> DataLoader[int]:
        return DataLoader(
            torch.arange(12),  # type: ignore[arg-type]
            batch_size=2,
            shuffle=True,
            num_workers=1,
            persistent_workers=persistent,
        )

    undisturbed, hit = resumed(make, after=9, ahead=1, passes=3)
    assert hit == undisturbed


def test_a_generator_deep_in_the_samplers_is_taken_along() -> None:
    def make() -> DataLoader[float]:
        generator = torch.Generator().manual_seed(5)
        sampler = torch.utils.data.RandomSampler(range(12), generator=generator)
        batches = torch.utils.data.BatchSampler(sampler, 3, drop_last=False)
        return DataLoader(Noisy(), batch_sampler=batches)

    undisturbed, hit = resumed(make, after=6, ahead=1)
    assert hit == undisturbed


def test_a_pass_that_has_not_been_begun_is_none_of_its_business() -> None:
    feed = PrefetchingPosition("loader", DataLoader(range(4), batch_size=2))
    assert [batch.tolist() for batch in feed.loader] == [[0, 1], [2, 3]]
    assert feed.state()["asked"] == 0


@pytest.mark.parametrize("trained", [1, 2])
def test_another_loop_over_the_loader_has_all_batches_and_leaves_the_position(
    trained: int,
) -> None:
    feed = PrefetchingPosition("loader", DataLoader(range(4), batch_size=2))
    feed.begin_pass(lambda: None)
    batches = iter(feed.loader)
    for _ in range(trained):
        next(batches)
        feed.trained()
    before = encode(feed.state())
    assert [batch.tolist() for batch in feed.loader] == [[0, 1], [2, 3]]
    assert encode(feed.state()) == before
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3]][trained:]


def test_batches_that_the_framework_skips_count_as_trained_on() -> None:
    feed = PrefetchingPosition("loader", DataLoader(range(8), batch_size=2), leaves_out=False)
    feed.begin_pass(lambda: None, behind=2)
    batches = iter(feed.loader)
    for _ in range(3):
        next(batches)
    feed.resolve()
    assert feed.trained_on == 2
    assert list(feed.state()["before"]) == [2]  # no random states for those that are skipped


def test_another_number_of_ranks_continues_behind_what_was_used() -> None:
    feed = PrefetchingPosition("loader", DataLoader(range(8), batch_size=2))
    feed.begin_pass(lambda: None)
    first = iter(feed.loader)
    next(first)
    feed.trained()
    again = PrefetchingPosition("loader", DataLoader(range(8), batch_size=2))
    again.load_state({**feed.state(), "handed_out": 2, "resized": True})
    resolved: list[int] = []
    again.begin_pass(lambda: resolved.append(1))
    assert [batch.tolist() for batch in again.loader] == [[4, 5], [6, 7]]
    assert resolved == [1]


def test_batches_to_be_left_out_are_repeated_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    feed = PrefetchingPosition("loader", DataLoader(range(4)))
    feed.leave_out(0)
    assert not caplog.records
    feed.leave_out(2)
    assert "2 batches are repeated" in caplog.text


def test_what_cannot_be_exact_is_reported() -> None:
    assert PrefetchingPosition("loader", DataLoader(range(4))).warning() is None
    assert "worker processes" in (
        PrefetchingPosition("l", DataLoader(range(4), num_workers=1)).warning() or ""
    )
    assert "iterable" in (PrefetchingPosition("loader", DataLoader(Stream())).warning() or "")
