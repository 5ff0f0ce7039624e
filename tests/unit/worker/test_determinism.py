"""A synthetic backward makes DDP build its buckets in the recorded order."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ftrun.snapshot.plain_values import decode, encode
from ftrun.worker.state.determinism import (
    DdpWrapperTracker,
    _set_devices,
    put_back,
    ready_order,
    take_all,
    warm_buckets,
)


@pytest.fixture(autouse=True)
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Backwards(nn.Module):
    """Uses its layers in another order than it holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at in (2, 0, 3, 1):
            x = self.layers[at](x).tanh()
        return x


def wrapped() -> DistributedDataParallel:
    return DistributedDataParallel(Backwards(), bucket_cap_mb=0.005)


def one_step(ddp: DistributedDataParallel) -> None:
    ddp(torch.randn(2, 32)).sum().backward()


def test_the_order_of_the_first_backward_is_the_order_of_the_buckets() -> None:
    ddp = wrapped()
    assert ready_order(ddp) == (None, False)
    one_step(ddp)
    early, is_final = ready_order(ddp)
    assert not is_final
    one_step(ddp)
    one_step(ddp)
    assert ready_order(ddp) == (early, True)
    assert early is not None
    assert set(early[:2]) == {2, 3}  # layer 1 comes last in the forward


def test_a_synthetic_backward_gives_the_recorded_order() -> None:
    ddp = wrapped()
    order = [4, 5, 0, 1, 7, 6, 3, 2]
    module_calls: list[object] = []
    ddp.module.register_forward_hook(lambda *_: module_calls.append(1))
    warm_buckets(ddp, order)
    assert not module_calls
    assert all(parameter.grad is None for parameter in ddp.parameters())
    one_step(ddp)
    one_step(ddp)
    assert ready_order(ddp) == (order, True)


def test_an_order_of_another_model_is_not_used() -> None:
    ddp = wrapped()
    warm_buckets(ddp, [0, 1])
    assert ready_order(ddp) == (None, False)


def test_wrappers_are_found_whenever_they_are_made() -> None:
    before, bare = wrapped(), Backwards()
    watch = DdpWrapperTracker()
    try:
        modules = {"raw": before.module, "wrapped": before, "late": bare}
        assert set(watch.wrappers_of(modules)) == {"wrapped"}
        late = DistributedDataParallel(bare)
        watch.find_older()
        found = watch.wrappers_of(modules)
        assert found == {"raw": before, "wrapped": before, "late": late}
    finally:
        watch.close()


class NotInitialised:
    """A device module of torch before its first use: it queues calls, seeds last.

    As in torch.cuda, a lock is held while they run, and `set_rng_state` takes it too.
    """

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.seeds: list[Callable[[], None]] = []
        self.states: dict[int, list[int]] = {}
        self.lock = threading.Lock()
        self.default_generators = [self]

    def set_state(self, state: torch.Tensor) -> None:
        self.states[0] = state.tolist()

    def is_initialized(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self._lazy_call(lambda: self.states.update({index: state.tolist()}))

    def _lazy_call(self, call: Callable[[], None], *, seed_all: bool = False) -> None:
        assert self.lock.acquire(timeout=1.0), "a deadlock"
        (self.seeds if seed_all else self.calls).append(call)
        self.lock.release()

    def initialise(self) -> None:
        with self.lock:
            for call in (*self.calls, *self.seeds[-1:]):  # torch keeps the last of these
                call()


def test_states_of_devices_come_after_the_seeds_that_the_script_has_queued() -> None:
    module = NotInitialised()
    module._lazy_call(lambda: module.states.update({0: [0]}), seed_all=True)  # manual_seed
    _set_devices(module, [torch.tensor([7])])
    module.initialise()
    assert module.states == {0: [7]}


def test_the_state_of_numpy_is_the_one_that_numpy_gives() -> None:
    for _ in range(2):
        name, words, *rest = np.random.get_state()
        assert take_all()["numpy"] == (name, words.tobytes(), *rest)
        np.random.normal()  # draws two numbers, and keeps one


def test_another_bit_generator_of_numpy_continues() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        np.random.random()
        taken = take_all()
        wanted = np.random.random(4)
        np.random.set_bit_generator(np.random.PCG64(9))
        put_back(decode(encode(taken)))
        assert np.array_equal(np.random.random(4), wanted)
    finally:
        np.random.set_bit_generator(before)
