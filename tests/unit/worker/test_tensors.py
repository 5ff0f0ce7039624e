"""Strides are kept if they are dense, and fit tensors of other shapes."""

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ftrun.snapshot.boxes import TensorPart, whole
from ftrun.worker.capture import device_copies
from ftrun.worker.restore.early_restore import empty
from ftrun.worker.restore.shard import fits
from ftrun.worker.state.tensors import (
    DTYPES,
    box_of,
    copyable,
    is_castable,
    is_expanded,
    part_of,
    stride_for,
    stride_of,
    uninitialized,
)


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


def test_packed_items_are_copied_as_bytes_and_not_converted() -> None:
    packed = torch.randint(256, (80, 90), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    made = torch.empty(90, 80, dtype=torch.float4_e2m1fn_x2)
    copyable(made).copy_(copyable(packed.t()))
    assert torch.equal(made.view(torch.uint8), packed.view(torch.uint8).t())
    plain = torch.zeros(3, 2).t()
    assert copyable(plain) is plain
    assert [is_castable(one) for one in (torch.float8_e5m2, torch.int8, packed.dtype)] == [
        True,
        False,
        False,
    ]
    assert not fits("F4", "F32", casts=True)
    assert fits("BF16", "F32", casts=True)


PLACEMENTS = [
    (Shard(0), Shard(1)),
    (Replicate(), Shard(0)),
    (Shard(0), Shard(0)),
    (Shard(1), Replicate()),
    (Replicate(), Replicate()),
    (_StridedShard(0, split_factor=2), Shard(0)),
    (_StridedShard(1, split_factor=2), Shard(1)),
]


@pytest.fixture(params=[0, 1, 3])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """Makes this process one of four that exchange no messages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=request.param, world_size=4, store=FakeStore())
        yield request.param
        dist.destroy_process_group()


def cut(rows: int, placements: tuple[object, ...]) -> tuple[torch.Tensor, DTensor]:
    """A tensor of numbered items, and what this rank has of it."""
    from torch.distributed.tensor import distribute_tensor

    everything = torch.arange(rows * 3.0).view(rows, 3)
    mesh = init_device_mesh("cpu", (2, 2) if len(placements) == 2 else (4,))
    return everything, distribute_tensor(everything, mesh, placements, src_data_rank=None)


@pytest.mark.parametrize("rows", [1, 5, 7, 8])
@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_the_items_of_the_box_are_those_held(
    rank: int, rows: int, placements: tuple[object, ...]
) -> None:
    everything, sharded = cut(rows, placements)
    box = box_of(sharded)
    assert box is not None
    local = sharded.to_local()
    assert box.shape == tuple(local.shape)
    if not box.is_empty:
        found = everything[tuple(map(slice, box.offsets, box.end))]
        assert torch.equal(found, local)
    part = part_of(sharded, tuple(local.shape))
    assert (part is None) == (box == whole((rows, 3)))


def test_what_is_no_box_is_reported_as_none(rank: int) -> None:
    _, strided = cut(8, (_StridedShard(0, split_factor=2),))
    assert part_of(strided, tuple(strided.to_local().shape)) == TensorPart((8, 3), None)
    mesh = init_device_mesh("cpu", (4,))
    partial = DTensor.from_local(torch.ones(2, 3), mesh, [Partial()], run_check=False)
    assert box_of(partial) is None


def test_a_plain_tensor_is_whole() -> None:
    assert part_of(torch.zeros(3, 4), (3, 4)) is None
    assert box_of(torch.zeros(())) == whole(())


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("stride", [(), (1, 300)])
def test_memory_of_each_dtype_is_made_with_deterministic_algorithms(
    dtype: torch.dtype, stride: tuple[int, ...], deterministic: None
) -> None:
    """Torch fills new memory then, and no packed items."""
    made = uninitialized((300, 200), dtype, "cpu", stride)
    assert (made.dtype, made.stride()) == (dtype, stride or (200, 1))
    assert empty((300, 200), dtype, "cpu", stride).stride() == made.stride()
    assert uninitialized((0, 3), dtype, "cpu").shape == (0, 3)


def test_an_error_of_page_locked_memory_that_is_no_limit_is_shown_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here it is torch's, because this process has no accelerator."""
    monkeypatch.setattr(device_copies, "_refusals", [])
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1, pin_memory=True)
    assert not device_copies._host_memory(100, torch.device("cpu")).is_pinned()
    reason = device_copies.slow_reason()
    assert reason.startswith("page-locked memory cannot be allocated (")
    assert str(caught.value)[:40] in reason
    assert "ulimit" not in reason
