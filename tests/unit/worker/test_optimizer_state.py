"""The parameters that had a gradient are kept in few names, and restored as zeros."""

import pytest
import torch
from torch import nn

from ftrun.worker.state.optimizer_state import present_gradients, put_back_gradients


def parameters() -> tuple[list[nn.Parameter], dict[int, str]]:
    made = [nn.Parameter(torch.ones(2, 3).t().contiguous().t()) for _ in range(6)]
    return made, {id(one): f"p{at}" for at, one in enumerate(made)}


@pytest.mark.parametrize(
    ("have", "frozen", "saved"),
    [
        ("012345", "", {"usual": True, "except": []}),
        ("", "", {"usual": False, "except": []}),
        ("01245", "", {"usual": True, "except": ["p3"]}),
        ("3", "", {"usual": False, "except": ["p3"]}),
        ("45", "0123", {"usual": True, "except": []}),
        ("345", "0123", {"usual": True, "except": ["p3"]}),
    ],
)
def test_gradients_are_noted_by_their_exceptions_and_put_back(
    have: str, frozen: str, saved: dict[str, object]
) -> None:
    before, names = parameters()
    for at in map(int, have):
        before[at].grad = torch.ones_like(before[at])
    for at in map(int, frozen):
        before[at].requires_grad_(False)
    assert present_gradients(before, names) == saved
    after, names = parameters()
    for at in map(int, frozen):
        after[at].requires_grad_(False)
    put_back_gradients(saved, after, names)
    assert "".join(str(at) for at, one in enumerate(after) if one.grad is not None) == have
    for one in (after[int(at)].grad for at in have):
        assert one is not None
        assert one.stride() == after[0].stride()
        assert not one.any()


def test_a_gradient_that_is_there_stays_and_a_sparse_one_is_left_out() -> None:
    (one, other, *_), names = parameters()
    one.grad = torch.ones_like(one)
    other.grad = torch.ones(2, 3).to_sparse()
    assert present_gradients([one, other], names) == {"usual": False, "except": ["p0"]}
    put_back_gradients({"usual": True, "except": []}, [one], names)
    assert one.grad.all()
