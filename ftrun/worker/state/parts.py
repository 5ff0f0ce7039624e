"""Determines which part of a global tensor this rank holds.

Runs in:  worker, training thread; at a walk of the state, so once for each layout.
Takes in: tensors, plain ones and DTensors of any mesh.
Gives:    a `TensorPart` for a part; None for a whole tensor.

The placements of a DTensor determine its part. Two cases have no single box: the items of a
dimension are not adjacent (an uneven strided shard), or the values are partial sums. Such a
snapshot can be restored by the same number of ranks only.
"""

from functools import lru_cache
from typing import Any

import torch

from ftrun.snapshot.boxes import Box, Shape, TensorPart, whole
from ftrun.worker.state.tensors import is_sharded, local_tensor

Cut = tuple[Any, int, int]
"""A placement, the number of its chunks, and the index of this rank's chunk."""


def part_of(tensor: torch.Tensor, local_shape: Shape) -> TensorPart | None:
    """The part of the global tensor that this rank holds; None if it holds all of it.

    Args:
        tensor: as the script has it.
        local_shape: of the local tensor.
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
    """Adjacent items of one dimension."""

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self.size = size

    def chunk(self, count: int, index: int) -> "_Range":
        """One of `count` chunks as torch.chunk cuts them: equal sizes, except the last ones."""
        step = -(-self.size // count)
        low, high = (min(self.size, at * step) for at in (index, index + 1))
        return _Range(self.start + low, high - low)


def _by_index(shape: Shape, cuts: tuple[Cut, ...], local: Shape) -> Shape | None:
    """Like `_offsets`, for other placements: apply their split to the item indices."""
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
    local = tuple(local_tensor(tensor, "a tensor").shape)
    part = part_of(tensor, local)
    if part is None:
        return whole(local)
    return None if part.offsets is None else Box(part.offsets, local)
