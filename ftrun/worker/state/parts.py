"""Which part of the whole tensor this rank holds.

Runs in:  worker, training thread; at a walk of the state, so once for each layout.
Takes in: tensors, plain ones and DTensors of any mesh.
Gives:    a `TensorPart` for what is a part; None for what is whole.

Placements say it for DTensors. Where the items of a dimension that a rank holds are not
neighbours (a strided shard that does not come out even), or where the values are partial sums, no
box can be told; the snapshot is as good as ever for as many ranks, and of no use to others.
"""

from functools import lru_cache
from typing import Any

import torch

from ftrun.snapshot.boxes import Box, Shape, TensorPart, whole
from ftrun.worker.state.tensors import is_sharded, local_tensor

Cut = tuple[Any, int, int]
"""A placement, into how many it cuts, and which of these is ours."""


def part_of(tensor: torch.Tensor, local_shape: Shape) -> TensorPart | None:
    """What the local tensor is a part of.

    Args:
        tensor: as the script has it.
        local_shape: of what this rank holds of it.
    """
    if not is_sharded(tensor):
        return None
    sharded: Any = tensor
    shape = tuple(sharded.shape)
    coordinate = sharded.device_mesh.get_coordinate()
    offsets = None
    if coordinate is not None:
        cuts = tuple(zip(sharded.placements, sharded.device_mesh.shape, coordinate, strict=True))
        offsets = _offsets(shape, cuts, local_shape)
    is_whole = offsets is not None and local_shape == shape and not any(offsets)
    return None if is_whole else TensorPart(shape, offsets)


@lru_cache(maxsize=1024)
def _offsets(shape: Shape, cuts: tuple[Cut, ...], local: Shape) -> Shape | None:
    """Where the local tensor begins; None where it is no single box."""
    if any(placement.is_partial() for placement, _, _ in cuts):
        return None
    ranges = [_Range(0, size) for size in shape]
    for placement, count, index in cuts:
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue  # a replica
        if type(placement).__name__ != "Shard":
            return _by_index(shape, cuts, local)
        ranges[dim] = ranges[dim].chunk(count, index)
    found = tuple(one.start for one in ranges)
    return found if tuple(one.size for one in ranges) == local else None


class _Range:
    """Neighbouring items of one dimension."""

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self.size = size

    def chunk(self, count: int, index: int) -> "_Range":
        """One of `count` chunks, as torch.chunk cuts: of equal size but for the last ones."""
        step = -(-self.size // count)
        low, high = (min(self.size, at * step) for at in (index, index + 1))
        return _Range(self.start + low, high - low)


def _by_index(shape: Shape, cuts: tuple[Cut, ...], local: Shape) -> Shape | None:
    """The same for placements that cut in other ways: cut the numbers of the items."""
    offsets = []
    for dim, size in enumerate(shape):
        items = torch.arange(size, device="cpu")
        for placement, count, index in cuts:
            if getattr(placement, "dim", None) == dim:
                chunks, _ = placement._split_tensor(items, count, with_padding=False)
                items = chunks[index]
        num_items = items.numel()
        first = int(items[0]) if num_items else size
        if num_items != local[dim] or (num_items and int(items[-1]) - first + 1 != num_items):
            return None
        offsets.append(first)
    return tuple(offsets)


def box_of(tensor: torch.Tensor) -> Box | None:
    """Which items of the whole tensor this rank holds; None where that is no single box."""
    local = tuple(local_tensor(tensor, "a tensor").shape)
    part = part_of(tensor, local)
    if part is None:
        return whole(local)
    return None if part.offsets is None else Box(part.offsets, local)
