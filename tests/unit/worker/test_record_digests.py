"""What `ftrun verify` records: equal things have equal digests, and reading changes nothing."""

import collections
import itertools
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ftrun.worker.capture import record_digests as digests
from ftrun.worker.state.attached import AttachedState
from ftrun.worker.state.state_tree import StateTree

_PLAIN = [
    *(None, True, 3, 2.5, "a", b"b", 1j, range(4), np.float32(1.5), np.arange(4)),
    *([1, [2.0]], (1,), {"k": {"n": 1}}, {1, 2}, collections.deque([1])),
]


@pytest.mark.parametrize("value", _PLAIN, ids=repr)
def test_equal_values_have_equal_digests(value: object) -> None:
    found = digests.digest(value)
    assert found is not None
    assert digests.digest(value) == found
    others = [digests.digest(other) for other in _PLAIN if other is not value]
    assert found not in others


def _counting() -> Any:
    for number in range(10):
        square = number**2
        yield square


@pytest.mark.parametrize(
    ("make", "advance"),
    [
        (lambda: torch.Generator().manual_seed(1), lambda g: torch.rand(1, generator=g)),
        (lambda: random.Random(1), lambda r: r.random()),
        (lambda: np.random.default_rng(1), lambda r: r.random()),
        (lambda: np.random.RandomState(1), lambda r: r.rand()),
        (_counting, next),
        (itertools.count, next),
        (lambda: iter(torch.utils.data.DataLoader([1, 2, 3])), next),
        (lambda: nn.Linear(2, 2), lambda m: m.weight.data.add_(1)),
    ],
    ids=["torch", "python", "numpy", "legacy numpy", "generator", "count", "loader", "module"],
)
def test_state_of_objects(make: Any, advance: Any) -> None:
    thing = make()
    before = digests.digest(thing)
    assert before is not None
    assert digests.digest(thing) == before  # reading it has not advanced it
    advance(thing)
    assert digests.digest(thing) != before


def test_what_cannot_be_compared_is_left_out() -> None:
    class Hostile:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

    assert digests.digest(Hostile()) is None
    assert digests.digest(sys.stdout) is None
    assert digests.digest([object(), 3]) == digests.digest([object(), 3])


def test_tensor_digest_is_of_the_elements() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    assert digests.tensor_digest(tensor.t().contiguous().t()) == digests.tensor_digest(tensor)
    assert digests.tensor_digest(tensor.reshape(4, 3)) != digests.tensor_digest(tensor)
    assert digests.tensor_digest(tensor.double()) != digests.tensor_digest(tensor)
    for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn):
        assert digests.tensor_digest(torch.ones(3).to(dtype))
    assert digests.tensor_digest(torch.tensor(1.0))


def test_state_has_a_key_for_each_tensor_and_value() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    attached = AttachedState()
    attached.add("model", model)
    attached.add("optimizer", optimizer)
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    model[0].weight.grad = None
    tree = StateTree(attached)
    before = torch.get_rng_state()
    found = digests.state_digests(tree.collect({"session": {"step": 3}}))
    assert torch.equal(torch.get_rng_state(), before)
    assert {key.split(" ")[0] for key in found} == {"tensor", "value", "random", "position"}
    assert "tensor model.0.weight" in found
    assert "tensor model.1.running_mean" in found
    assert any("momentum_buffer" in key for key in found)
    assert "position session.step" in found
    gradients = digests.gradient_digests(tree.persistent().names, optimizer)
    assert gradients["gradient model.0.weight"] == "none"
    assert gradients["gradient model.0.bias"] != "none"


def test_variables_of_the_script_are_found() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.best = 1.5
            self.model = held

    held = nn.Linear(2, 2)
    trainer = Trainer()  # noqa: F841 - read through the frame
    text = "x"  # noqa: F841 - read through the frame
    found = {
        key.rpartition("|")[2]: value
        for key, value in digests.local_variables(sys._getframe(), {id(held)})
    }
    assert found["trainer.best"] == 1.5
    assert found["text"] == "x"
    assert not {"held", "Trainer", "trainer.model"} & found.keys()


def test_frames_of_libraries_are_not_the_scripts() -> None:
    assert digests.script_frame(sys._getframe()) is sys._getframe()
    assert not digests.is_of_script(torch.__file__)
    assert not digests.is_of_script(random.__file__)
    assert not digests.is_of_script(digests.__file__)
    assert not digests.is_of_script("<frozen importlib>")
