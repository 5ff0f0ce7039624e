"""Strides are kept where they are dense, and fit tensors of other shapes."""

import pytest
import torch

from ftrun.worker.restore.early_restore import empty
from ftrun.worker.state.tensors import is_expanded, stride_for, stride_of


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.zeros(2, 3), ()),
        (torch.zeros(()), ()),
        (torch.zeros(3, 2).t(), (1, 2)),
        (torch.zeros(0, 3).t(), (1, 3)),
        (torch.zeros(4, 6)[:, ::2], ()),
        (torch.zeros(1, 3).expand(2, 3), ()),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.zeros(8, 3, 1, 1).to(memory_format=torch.channels_last), (3, 1, 3, 3)),
    ],
)
def test_only_dense_strides_are_kept(tensor: torch.Tensor, stride: tuple[int, ...]) -> None:
    assert stride_of(tensor) == stride
    made = empty(tuple(tensor.shape), tensor.dtype, "cpu", stride)
    assert made.stride() == (stride or tensor.contiguous().stride())
    assert not made._is_view()


def test_a_stride_fits_a_tensor_of_another_shape_by_the_order_of_its_dimensions() -> None:
    assert stride_for((4, 2), ()) == (2, 1)
    assert stride_for((4, 2), (1, 8)) == (1, 4)
    assert stride_for((2, 6, 4, 5), (60, 1, 15, 3)) == (120, 1, 30, 6)


def test_repeated_items_are_seen() -> None:
    assert is_expanded(torch.zeros(1, 3).expand(2, 3))
    assert not is_expanded(torch.zeros(3).expand(1, 3))
