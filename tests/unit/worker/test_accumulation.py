"""A boundary with gradients that no optimizer has used yet is in the middle of an accumulation."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ftrun.worker.accumulation import Accumulation


@pytest.fixture
def pair() -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Accumulation]]:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = Accumulation([optimizer])
    yield model, optimizer, made
    made.close()


Pair = tuple[nn.Module, torch.optim.Optimizer, Accumulation]


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def test_before_any_backward_nothing_is_pending(pair: Pair) -> None:
    assert not pair[2].boundary()


def test_gradients_are_pending_until_the_optimizer_steps(pair: Pair) -> None:
    model, optimizer, accumulation = pair
    backward(model)
    assert accumulation.boundary()
    backward(model)
    assert accumulation.boundary()
    backward(model)
    optimizer.step()
    assert not accumulation.boundary()
    assert not accumulation.boundary()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_after_a_step_the_next_backward_is_pending_again(pair: Pair, set_to_none: bool) -> None:
    model, optimizer, accumulation = pair
    backward(model)
    optimizer.step()
    assert not accumulation.boundary()
    optimizer.zero_grad(set_to_none=set_to_none)
    backward(model)
    assert accumulation.boundary()


def test_a_gradient_at_the_place_of_one_that_was_freed_is_another() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulation = Accumulation([optimizer])
    backward(model)
    optimizer.step()
    assert not accumulation.boundary()
    place = id(model.weight.grad)
    optimizer.zero_grad()
    elsewhere = []
    while id(grad := torch.ones(1, 3)) != place:
        elsewhere.append(grad)
        assert len(elsewhere) < 10_000, "the freed place is not given out again"
    model.weight.grad = grad
    assert accumulation.boundary()
    accumulation.close()


def test_one_of_several_optimizers_in_the_middle_is_enough(pair: Pair) -> None:
    model, optimizer, accumulation = pair
    other = nn.Linear(3, 1)
    both = Accumulation([optimizer, torch.optim.SGD(other.parameters(), lr=0.1)])
    backward(model)
    backward(other)
    optimizer.step()
    assert both.boundary()
    assert not accumulation.boundary()
    both.close()


def test_a_step_that_no_hook_sees_is_seen_by_the_parameters(pair: Pair) -> None:
    model, _, accumulation = pair
    accumulation.boundary()
    backward(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1)
    assert not accumulation.boundary()


class Told:
    """An object that says by itself where it is."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)

    def is_within_accumulation(self) -> bool:
        return self.answers.pop(0)


def test_an_object_that_keeps_gradients_for_itself_is_asked_at_each_boundary(pair: Pair) -> None:
    model, optimizer, _ = pair
    both = Accumulation([optimizer], [object(), Told(True, False, False)])
    assert both.boundary()
    assert not both.boundary()
    backward(model)
    assert both.boundary()
    both.close()
