"""Batches are handed out again as they were, and the iterator continues behind them."""

import collections
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ftrun.worker.state import determinism as rng
from ftrun.worker.state.data_position import DataPosition
from ftrun.worker.survivors import replay
from ftrun.worker.survivors.replay import KeptBatches, handed_out_again


class Noisy(Dataset[dict[str, torch.Tensor]]):
    """Twelve samples with random draws; counts how many were loaded."""

    def __init__(self) -> None:
        self.loaded = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.loaded += 1
        return {"x": index + torch.rand(2) + random.random() + np.random.rand()}


class Pair(NamedTuple):
    """A named tuple."""

    x: Any
    y: Any


@dataclass
class Record:
    """A data class."""

    x: Any
    y: Any


def kept_batches(*batches: Any) -> KeptBatches:
    """One batch per step."""
    step = 0
    kept = KeptBatches(lambda: step)
    kept.begin_pass()
    for number, batch in enumerate(batches, 1):
        kept.add(batch, number, {"number": number})
        step += 1
    return kept


# --- kept batches -------------------------------------------------------------------------------


def make(x: torch.Tensor) -> list[Any]:
    return [
        x, [x, 3], (x, "text"), {"x": x, "n": None}, Pair(x, 1.5), Record(x, b"bytes"),
        {"nested": [(x, {"deep": x})]}, collections.UserDict({"x": x, "y": 1}), np.arange(3),
    ]  # fmt: skip


@pytest.mark.parametrize("at", range(9))
def test_each_kind_of_batch_comes_again(at: int) -> None:
    x = torch.arange(3)
    batch = make(x)[at]
    found = kept_batches(batch).since(0)
    assert found is not None
    again = handed_out_again(found[0])
    assert type(again) is type(batch)
    assert repr(again) == repr(batch)
    for tensor, _ in found[0].tensors:
        assert tensor.data_ptr() == x.data_ptr()


def test_what_the_script_removes_from_a_container_is_there_again() -> None:
    x = torch.ones(2)
    batch = {"x": x, "labels": [torch.zeros(1), 7]}
    kept = kept_batches(batch)
    batch.pop("labels").clear()  # type: ignore[union-attr]
    for _ in range(2):
        found = kept.since(0)
        assert found is not None
        again = handed_out_again(found[0])
        assert again["x"].data_ptr() == x.data_ptr()
        assert len(again.pop("labels")) == 2


def test_a_tensor_that_was_changed_in_place_does_not_come_again() -> None:
    x, y = torch.ones(2), torch.ones(2)
    kept = kept_batches([x], [y])
    x.mul_(2)
    assert kept.since(0) is None
    found = kept.since(1)
    assert found is not None
    assert found[0].tensors[0][0].data_ptr() == y.data_ptr()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.data.mul_(5),
        lambda x: x.detach().numpy().__setitem__(0, 7.0),
        lambda x: torch.frombuffer(x.numpy(), dtype=torch.float32).fill_(3),
        lambda x: x.untyped_storage().resize_(0),
    ],
)
def test_a_change_that_autograd_does_not_count_is_found(change: Callable[[Any], object]) -> None:
    x, y = torch.ones(2), torch.ones(2)
    kept = kept_batches([x], [y])
    change(x)
    assert kept.since(0) is None
    assert kept.since(1) is not None


def test_batches_over_one_reused_buffer_do_not_come_again() -> None:
    buffer = np.zeros(4, np.float32)

    def batches() -> Iterator[torch.Tensor]:
        for number in range(2):
            buffer[:] = number
            yield torch.from_numpy(buffer)

    step = 0
    kept = KeptBatches(lambda: step)
    for number, batch in enumerate(batches(), 1):
        kept.add(batch, number, {})
        step += 1
    assert kept.since(0) is None
    found = kept.since(1)
    assert found is not None
    assert handed_out_again(found[0]).tolist() == [1.0] * 4


def test_what_the_script_sets_of_a_tensor_is_not_handed_out_again() -> None:
    x = torch.ones(2, 3)
    kept = kept_batches([x])
    for batch in ([x], None, None):
        found = kept.since(0)
        assert found is not None
        (given,) = batch or handed_out_again(found[0])
        assert (given.requires_grad, given.grad, given.shape) == (False, None, (2, 3))
        given.requires_grad_().sum().backward()
        given.detach_().unsqueeze_(0)


@pytest.mark.parametrize(
    "x",
    [
        torch.rand(4, 4)[:, 1], torch.rand(4, 1).expand(4, 3), torch.rand(3).bfloat16(),
        torch.tensor(True), torch.empty(0, 3), torch.complex(torch.rand(2), torch.rand(2)).conj(),
    ],
)  # fmt: skip
def test_each_kind_of_tensor_comes_again(x: torch.Tensor) -> None:
    found = kept_batches(x).since(0)
    assert found is not None
    assert torch.equal(handed_out_again(found[0]), x)


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, requires_grad=True), torch.ones(2).to_sparse(), torch.ones(2, device="meta"),
        torch.nn.Parameter(torch.ones(2)),
    ],
)  # fmt: skip
def test_other_tensors_do_not_come_again(x: torch.Tensor) -> None:
    assert kept_batches(x).since(0) is None


class Unknown:
    """An object of the script."""


@pytest.mark.parametrize("batch", [Unknown(), [Unknown()], {"x": Unknown()}])
def test_a_batch_with_an_unknown_object_does_not_come_again(batch: Any) -> None:
    kept = kept_batches(torch.ones(1), batch, torch.ones(1))
    assert kept.since(0) is None
    assert kept.since(1) is None
    found = kept.since(2)
    assert found is not None
    assert [one.number for one in found] == [3]


def test_an_inference_tensor_comes_again_unless_it_has_changed() -> None:
    with torch.inference_mode():
        x = torch.ones(2)
    kept = kept_batches(x)
    assert kept.since(0) is not None
    with torch.inference_mode():
        x.mul_(2)
    assert kept.since(0) is None


def test_batches_are_kept_from_the_oldest_step_on() -> None:
    kept = kept_batches(*(torch.ones(1) for _ in range(5)))
    kept.forget_before(3)
    assert kept.since(2) is None
    found = kept.since(3)
    assert found is not None
    assert [(one.step, one.number) for one in found] == [(3, 4), (4, 5)]
    kept.forget_before(1)
    assert kept.since(5) == []


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_BYTES", 1000)
    kept = kept_batches(*(torch.ones(100) for _ in range(5)))  # 400 bytes each
    assert kept.since(2) is None
    found = kept.since(3)
    assert found is not None
    assert len(found) == 2
    assert kept_batches(torch.ones(300)).since(0) is None


# --- the position -------------------------------------------------------------------------------


def seed_all() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


class Loop:
    """A loop over one loader with one boundary per batch, that draws random numbers itself."""

    def __init__(self, loader: Any, others: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        seed_all()
        self.position = DataPosition("loader", loader)
        self.step = 0
        self.position.keep_batches(lambda: self.step, set(others))
        self.seen: dict[int, Any] = {}
        self.versions: dict[int, tuple[Any, Any]] = {}
        self.batches = self.every()
        self.note()

    def every(self) -> Iterator[Any]:
        while True:
            yield from self.position.batches(None, lambda: None)

    def note(self) -> None:
        self.versions[self.step] = (self.position.state(), rng.take_all())

    def go(self, count: int) -> None:
        for _ in range(count):
            batch = next(self.batches)
            drawn = (batch["x"].tolist(), torch.rand(1).item(), random.random())
            assert self.seen.setdefault(self.step, drawn) == drawn, f"step {self.step}"
            self.step += 1
            self.note()

    def go_back(self, step: int) -> None:
        state, states = self.versions[step]
        self.step = step
        self.position.rewind(state, step)
        rng.put_back(states)


def loader(kind: type = DataLoader, **options: Any) -> Any:
    return kind(Noisy(), batch_size=2, shuffle=True, **options)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("back", [0, 1, 3])
def test_a_loop_that_goes_back_in_a_pass_continues_as_if_it_had_not(
    seed: int | None, back: int
) -> None:
    def made() -> Loop:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return Loop(loader(generator=generator))

    loop, undisturbed = made(), made()
    seed_all()
    loop.go(4)
    loop.go_back(4 - back)
    loop.go(2 + back)
    loop.go_back(5)
    loop.go(7)  # into the second pass
    seed_all()
    undisturbed.go(12)
    assert loop.seen == undisturbed.seen


def test_no_sample_is_loaded_again() -> None:
    made = loader()
    loop = Loop(made)
    loop.go(4)
    loop.go_back(1)
    loop.go(5)
    assert made.dataset.loaded == 12


def test_the_positions_of_replayed_batches_are_those_of_the_first_time() -> None:
    loop = Loop(loader(generator=torch.Generator().manual_seed(3)))
    loop.go(5)
    before = dict(loop.versions)
    loop.go_back(2)
    loop.go(3)
    for step in range(2, 5):
        assert loop.versions[step][0] == before[step][0]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda loop: loop.position.forget_before(3),
        lambda loop: next(iter(loop.position._kept._kept)).tensors[0][0].mul_(2),
    ],
)
def test_a_batch_that_cannot_come_again_is_loaded_again(
    spoil: Callable[[Loop], object],
) -> None:
    made = loader()
    loop = Loop(made)
    loop.go(4)
    spoil(loop)
    loop.go_back(0)
    loop.go(6)
    assert made.dataset.loaded == 8 + 12
    undisturbed = Loop(loader())
    undisturbed.go(6)
    assert loop.seen == undisturbed.seen


def test_a_loop_that_goes_back_to_the_pass_before_makes_the_rest_of_it() -> None:
    """The script holds one iterator over all passes."""
    made = loader()
    loop = Loop(made)
    loop.go(8)  # 6 batches in a pass
    loop.go_back(4)
    loop.go(6)
    loop.go_back(7)
    loop.go(7)
    undisturbed = Loop(loader())
    undisturbed.go(14)
    assert loop.seen == undisturbed.seen


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
def test_a_stateful_loader_goes_back_by_its_own_state() -> None:
    seed_all()
    loop = Loop(loader(StatefulDataLoader))
    loop.go(4)
    loop.go_back(2)
    loop.go(8)
    seed_all()
    undisturbed = Loop(loader(StatefulDataLoader))
    undisturbed.go(10)
    assert loop.seen == undisturbed.seen


def test_workers_continue_behind_the_batches_that_come_again() -> None:
    made = loader(num_workers=1)
    loop = Loop(made)
    loop.go(4)
    workers = loop.position._is_running
    loop.go_back(1)
    loop.go(8)
    assert workers
    undisturbed = Loop(loader(num_workers=1))
    undisturbed.go(9)
    assert loop.seen == undisturbed.seen


def test_a_generator_that_a_restore_sets_is_not_ahead() -> None:
    generator = torch.Generator()
    made = loader(generator=generator)
    loop = Loop(made, {id(generator)})
    loop.go(4)
    loop.go_back(2)
    loop.go(2)
    assert made.dataset.loaded == 8 + 4
