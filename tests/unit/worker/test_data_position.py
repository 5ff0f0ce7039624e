"""A loader resumed after k batches yields the batches that would have followed."""

import copy
import random
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from ftrun.sharding.rank_values import WorldResize, loader
from ftrun.snapshot.plain_values import decode, encode
from ftrun.worker.state import determinism as rng
from ftrun.worker.state.data_position import DataPosition


class Counted(Dataset[int]):
    """Twelve numbers, and how many of them were loaded."""

    def __init__(self) -> None:
        self.loaded = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        self.loaded += 1
        return index


class Stream(IterableDataset[int]):
    """Twelve numbers in a row."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


def seed() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


def resumed_like_undisturbed(make: Any, *, after: int, passes: int = 2) -> Any:
    """Compares; returns the resumed run's loader."""

    def draws() -> tuple[float, ...]:
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    seed()
    feed = DataPosition("loader", make())
    seen: list[object] = []
    states = []
    for _ in range(passes):
        for batch in feed.batches(None, lambda: None):
            seen.append((torch.as_tensor(batch).tolist(), draws()))
            states.append(encode([feed.state(), rng.take_all()]))
    state, randomness = decode(states[after - 1])
    random.seed(99)
    torch.manual_seed(99)
    again = DataPosition("loader", make())
    again.load_state(state)
    found: list[object] = []
    waiting = [randomness]
    for _ in range(state["pass"], passes):
        rest = again.batches(None, lambda: waiting and rng.put_back(waiting.pop()))
        found += [(torch.as_tensor(batch).tolist(), draws()) for batch in rest]
    assert found == seen[after:]
    return again.loader


@pytest.mark.parametrize("after", [1, 3])
def test_batches_that_led_to_numerical_anomalies_are_left_out_into_the_next_pass_too(
    after: int,
) -> None:
    """Passes of four batches; five are left out."""
    data = torch.arange(8)
    feed = DataPosition("loader", DataLoader(data, batch_size=2))
    states, seen = [], []
    for _ in range(3):
        for batch in feed.batches(None, lambda: None):
            seen.append(batch.tolist())
            states.append(encode(feed.state()))
    again = DataPosition("loader", DataLoader(data, batch_size=2))
    again.load_state(decode(states[after - 1]))
    again.leave_out(5)
    found = [batch.tolist() for _ in range(3) for batch in again.batches(None, lambda: None)]
    assert found == seen[after + 5 :]


@pytest.mark.parametrize("after", [1, 3, 4, 6])
def test_shuffled_batches_continue_and_nothing_is_loaded_twice(after: int) -> None:
    loader = resumed_like_undisturbed(
        lambda: DataLoader(Counted(), batch_size=3, shuffle=True), after=after
    )
    assert loader.dataset.loaded == (8 - after) * 3


def test_a_loop_that_has_begun_before_its_loader_draws_what_it_would_have_drawn() -> None:
    def make() -> DataLoader[int]:
        return DataLoader(Counted(), batch_size=3, shuffle=True)

    seed()
    feed = DataPosition("loader", make())
    batches = feed.batches(None, lambda: None)
    for _ in range(2):
        next(batches)
        torch.rand(1)
    state, randomness = decode(encode([feed.state(), rng.take_all()]))
    expected = [(next(batches).tolist(), torch.rand(1).item()) for _ in range(2)]
    torch.manual_seed(99)
    again = DataPosition("loader", make())
    again.load_state(state)
    rng.put_back(randomness)  # as the first turn of steps() does
    rest = again.batches(None, lambda: None)
    assert [(next(rest).tolist(), torch.rand(1).item()) for _ in range(2)] == expected


def test_a_generator_of_the_loader_is_taken_along() -> None:
    def make() -> DataLoader[int]:
        generator = torch.Generator().manual_seed(5)
        return DataLoader(Counted(), batch_size=3, shuffle=True, generator=generator)

    resumed_like_undisturbed(make, after=6)


def test_samplers_that_draw_with_replacement_continue() -> None:
    def make() -> DataLoader[int]:
        return DataLoader(Counted(), batch_size=2, sampler=WeightedRandomSampler([1.0] * 12, 12))

    resumed_like_undisturbed(make, after=4)


def test_single_samples_continue_without_a_batch_sampler() -> None:
    resumed_like_undisturbed(lambda: DataLoader(Counted(), batch_size=None, shuffle=True), after=5)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_get_the_right_indices(persistent: bool) -> None:
    resumed_like_undisturbed(
        lambda: DataLoader(
            Counted(), batch_size=3, shuffle=True, num_workers=1, persistent_workers=persistent
        ),
        after=6,
        passes=3,
    )


def test_an_iterable_data_set_is_read_again_and_reported_so() -> None:
    loader = resumed_like_undisturbed(lambda: DataLoader(Stream(), batch_size=3), after=2)
    assert "iterable" in (DataPosition("loader", loader).warning() or "")


def test_worker_processes_are_warned_of() -> None:
    loader = DataLoader(Counted(), num_workers=1)
    assert "StatefulDataLoader" in (DataPosition("loader", loader).warning() or "")
    assert DataPosition("loader", [1, 2]).warning() is None


def test_the_sampler_gets_the_epoch() -> None:
    sampler = torch.utils.data.DistributedSampler(Counted(), 2, 0)
    feed = DataPosition("loader", DataLoader(Counted(), sampler=sampler))
    list(feed.batches(7, lambda: None))
    assert sampler.epoch == 7
    list(feed.batches(None, lambda: None))
    assert sampler.epoch == 1


def resized(make: Any, used: list[int], rank: int, size: int) -> list[int]:
    """The samples of a rank in a new world, after old ranks have used these numbers of batches."""
    states = []
    for previous_rank, count in enumerate(used):
        feed = DataPosition("loader", make(previous_rank, len(used)))
        batches = feed.batches(None, lambda: None)
        for _ in range(count):
            next(batches)
        states.append(decode(encode(feed.state())))
        batches.close()
    again = DataPosition("loader", make(rank, size))
    again.load_state(loader(states, WorldResize(rank, len(used), size)))
    return [index for batch in again.batches(None, lambda: None) for index in batch.tolist()]


def dealt(kind: type[DataLoader[int]]) -> Any:
    """A loader of a world's ranks that distributes one order among them."""

    def make(rank: int, size: int) -> DataLoader[int]:
        sampler = torch.utils.data.DistributedSampler(Counted(), size, rank, seed=4)
        return kind(Counted(), batch_size=1, sampler=sampler)

    return make


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize(("used", "size"), [([2, 2, 2], 2), ([3, 3], 4), ([1, 1, 1, 1], 3)])
def test_another_number_of_ranks_continues_behind_what_was_used(
    kind: type[DataLoader[int]], used: list[int], size: int
) -> None:
    order = list(torch.utils.data.DistributedSampler(Counted(), 1, 0, seed=4))
    rest = [resized(dealt(kind), used, rank, size) for rank in range(size)]
    skipped = -(-sum(used) // size) * size
    assert sorted(index for indices in rest for index in indices) == sorted(order[skipped:])


class Own:
    """A loader of the script's own, with a position but without a known iterator."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 12:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def test_a_loader_with_a_state_dict_of_its_own_continues_where_it_was() -> None:
    resumed_like_undisturbed(Own, after=5)


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
def test_a_loader_that_is_iterated_by_hand_is_not_followed() -> None:
    by_hand, here, own = (DataPosition("loader", DataLoader(range(4))) for _ in range(3))
    next(iter(by_hand.loader))
    next(here.batches(None, lambda: None))
    own.loader = StatefulDataLoader(range(4))
    iterator = iter(own.loader)
    next(iterator)
    assert (by_hand.is_followed, here.is_followed, own.is_followed) == (False, True, True)


Turn = Callable[[DataPosition], object]


def turns(make: Any, turn: Turn, *, killed: Collection[int] = (), total: int = 5) -> list[object]:
    """What each turn of `steps()` sees and draws; a killed one begins with a new loader."""
    seed()
    feed = DataPosition("loader", make())
    found: list[object] = []
    for at in range(total):
        if at in killed:
            state, randomness = copy.deepcopy(feed.state()), rng.take_all()
            seed()
            feed = DataPosition("loader", make())
            feed.load_state(state)
            rng.put_back(randomness)
        found.append((turn(feed), torch.rand(1).item(), random.random()))
    return found


def whole_pass(feed: DataPosition) -> object:
    return [torch.as_tensor(batch).tolist() for batch in feed.batches(None, lambda: None)]


def two_batches() -> Turn:
    """Two batches of a pass that continues in the next turn, as `next(batches)` takes them."""
    held: dict[DataPosition, Iterator[Any]] = {}

    def turn(feed: DataPosition) -> object:
        found = []
        while len(found) < 2:
            batches = held.setdefault(feed, feed.batches(None, lambda: None))
            if (batch := next(batches, None)) is None:
                held.pop(feed)
            else:
                found.append(torch.as_tensor(batch).tolist())
        return found

    return turn


def shuffled(**options: Any) -> DataLoader[int]:
    return DataLoader(Counted(), batch_size=3, shuffle=True, **options)


def stateful() -> StatefulDataLoader[int]:
    return StatefulDataLoader(Counted(), batch_size=3, shuffle=True)


def own_generator() -> DataLoader[int]:
    return shuffled(generator=torch.Generator().manual_seed(5))


def inner_generator() -> DataLoader[int]:
    sampler = RandomSampler(Counted(), generator=torch.Generator().manual_seed(5))
    return DataLoader(Counted(), batch_sampler=BatchSampler(sampler, 3, drop_last=False))


class Converting(DataLoader[int]):
    """A loader whose iterator is a generator, such as one that moves batches to a device."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield batch + 100


class Repeated:
    """A batch sampler without an end, as timm's MultiEpochsDataLoader has it."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class Kept(DataLoader[int]):
    """A loader that keeps one iterator for all passes."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.batches_per_pass = super().__len__()
        self.__dict__["batch_sampler"] = Repeated(self.batch_sampler)
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return self.batches_per_pass

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(self.batches_per_pass):
            yield next(self.iterator)


def converting() -> DataLoader[int]:
    return Converting(Counted(), batch_size=3, shuffle=True)


def kept() -> DataLoader[int]:
    return Kept(Counted(), batch_size=3, shuffle=True)


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
@pytest.mark.parametrize("killed", [[0], [1], [2], [1, 2], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize(
    "make",
    [
        *(shuffled, stateful, own_generator, inner_generator, converting, kept),
        lambda: DataLoader(Stream()),
    ],
)
def test_a_pass_that_begins_after_a_restore_draws_as_in_the_undisturbed_run(
    make: Any, killed: list[int]
) -> None:
    assert turns(make, whole_pass, killed=killed) == turns(make, whole_pass)
    assert turns(make, two_batches(), killed=killed) == turns(make, two_batches())


@pytest.mark.slow
@pytest.mark.parametrize("turn", [lambda: whole_pass, two_batches])
def test_persistent_workers_that_start_again_draw_no_other_seeds(turn: Any) -> None:
    def make() -> DataLoader[int]:
        return shuffled(num_workers=1, persistent_workers=True)

    for killed in ([1], [1, 2], [3]):
        assert turns(make, turn(), killed=killed) == turns(make, turn())


@pytest.mark.parametrize("killed", [[0], [1], [2, 3], [0, 1, 2, 3, 4]])
def test_a_generator_that_the_script_and_two_loaders_use_continues_where_it_was(
    killed: list[int],
) -> None:
    def turn_of(inner: Turn) -> Turn:
        def turn(feed: DataPosition) -> object:
            generator = feed.loader.generator
            before = torch.rand(1, generator=generator).item()
            seen = inner(feed)
            validation = DataLoader(range(9), shuffle=True, generator=generator)  # type: ignore[arg-type]
            return before, seen, [batch.tolist() for batch in validation]

        return turn

    for inner, again in ((whole_pass, whole_pass), (two_batches(), two_batches())):
        found = turns(own_generator, turn_of(inner), killed=killed)
        assert found == turns(own_generator, turn_of(again))


def test_a_snapshot_of_version_0_2_has_other_names_of_generators() -> None:
    feed = DataPosition("loader", own_generator())
    batches = feed.batches(None, lambda: None)
    next(batches)
    state = feed.state()
    del state["generators"]
    names = {"loader.generator": "loader", "loader.sampler.generator": "sampler"}
    began = state["started_with"]["generators"]
    state["started_with"]["generators"] = {names[name]: one for name, one in began.items()}
    again = DataPosition("loader", own_generator())
    again.loader.generator.manual_seed(6)
    again.load_state(state)
    rest = [batch.tolist() for batch in again.batches(None, lambda: None)]
    assert rest == [batch.tolist() for batch in batches]


def test_random_states_are_restored_before_the_first_draw_of_a_new_pass() -> None:
    seed()
    feed = DataPosition("loader", shuffled())
    state, randomness = feed.state(), rng.take_all()
    expected = whole_pass(feed)
    torch.manual_seed(99)
    again = DataPosition("loader", shuffled())
    again.load_state(state)
    rest = again.batches(None, lambda: rng.put_back(randomness))
    assert [batch.tolist() for batch in rest] == expected


def test_an_older_iteration_that_is_closed_late_ends_no_pass() -> None:
    feed = DataPosition("loader", DataLoader(range(4)))
    older = feed.batches(None, lambda: None, ends_if_left=True)
    next(older)
    newer = feed.batches(None, lambda: None, ends_if_left=True)
    next(newer)
    older.close()
    assert feed.state()["handed_out"] == 1
    newer.close()
    assert feed.state()["handed_out"] == 0
