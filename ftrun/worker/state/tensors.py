"""Properties of one tensor: dtype's name, strides, bytes, and the part of it that this rank holds.

The placements of a DTensor determine its part. Two cases have no single box: the items of a
dimension are not adjacent (an uneven strided shard), or the values are partial sums. Such a
snapshot can be restored by the same number of ranks only.
"""

import logging
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ftrun.errors import ValueNotStorable
from ftrun.snapshot.boxes import Box, Shape, TensorPart, whole

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0", torch.complex64: "C64", torch.complex128: "C128",
    torch.float4_e2m1fn_x2: "F4",
}  # fmt: skip
"""Name of each dtype that can be stored, as safetensors spells it if it knows the dtype."""

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

PACKED = torch.float4_e2m1fn_x2
"""Two values in each byte. Torch converts no such item, and copies not all strides of them."""

_log = logging.getLogger(__name__)


def local_tensor(tensor: torch.Tensor, key: str) -> torch.Tensor:
    """The detached part of a tensor that this rank holds; for a DTensor its local tensor.

    Raises ValueNotStorable if it has no bytes that can be copied.
    """
    detached = _local(tensor.detach())
    if (
        detached.layout is not torch.strided
        or detached.dtype not in DTYPE_NAMES
        or detached.is_meta
        or (detached.dtype is PACKED and not detached.dim())  # no whole row for safetensors
        or is_traceable_wrapper_subclass(detached)
    ):
        kind = f"{type(tensor).__name__} of {tensor.dtype} ({tensor.layout}, {tensor.device})"
        raise ValueNotStorable(key=key, kind=kind)
    return detached


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor; tested by attributes, because that module may not be loaded."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


def is_castable(dtype: torch.dtype) -> bool:
    """Whether values of this dtype can be converted to another floating dtype, and back."""
    return dtype.is_floating_point and dtype is not PACKED


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with items that torch copies from and to any strides."""
    return tensor.view(torch.uint8) if tensor.dtype is PACKED else tensor


def uninitialized(
    shape: Shape, dtype: torch.dtype, device: torch.device | str, stride: Shape = ()
) -> torch.Tensor:
    """Like torch.empty_strided; row-major without `stride`.

    With `torch.use_deterministic_algorithms`, torch fills new memory, but no packed items.
    """
    items = torch.uint8 if dtype is PACKED else dtype
    stride = stride or _row_major(shape)
    made = torch.empty_strided(shape, stride, dtype=items, device=device)
    return made.view(PACKED) if dtype is PACKED else made


def address_of(tensor: torch.Tensor) -> int:
    return _local(tensor).data_ptr()


def is_view_of(tensor: torch.Tensor, detached: torch.Tensor) -> bool:
    """Whether it still has the memory, shape, strides and dtype of its detached local part."""
    # Tensor.is_set_to is not there for all devices.
    local = _local(tensor)
    return (
        local.data_ptr() == detached.data_ptr()
        and local.shape == detached.shape
        and local.stride() == detached.stride()
        and local.dtype == detached.dtype
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_accelerator(device: torch.device) -> bool:
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == device.type


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Make a device the current one in the block; its end makes no context on the one before."""
    return torch.accelerator.device_index(device.index)


def drop_error(device: torch.device) -> None:
    """Run a kernel, which takes the error that a failed allocation may have left in this thread.

    CUDA keeps such an error, and torch reports it at the next kernel, which may be the script's.
    """
    with suppress(RuntimeError), on_device(device):
        torch.ones(1, device=device)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is captured into a graph, so that a copy or query breaks it."""
    try:
        stream: Any = torch.accelerator.current_stream(device)
        module = torch.get_device_module(device)
    except (RuntimeError, ValueError):
        return False  # a device without streams, or of another type than the accelerator
    ask = getattr(stream, "is_capturing", None)  # from 2.12
    ask = ask or getattr(module, "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def kind_of(tensor: torch.Tensor, kind: str = "tensor") -> str:
    """Kind of a tensor in a reference among plain values: `tensor`, `tensor@cuda`, ...

    The device is relative to the current one of this process: `tensor@cuda:+1` is on the next.
    """
    device = tensor.device
    if device.type == "cpu":
        return kind
    if not is_accelerator(device) or device.index is None:
        return f"{kind}@{device.type}"
    offset = device.index - torch.accelerator.current_device_index()
    offset %= max(1, torch.accelerator.device_count())
    return f"{kind}@{device.type}:+{offset}" if offset else f"{kind}@{device.type}"


def home_of(kind: str) -> torch.device:
    """The device that `kind_of` named; the current device if this process does not have it."""
    _, _, place = kind.partition("@")
    name, _, offset = place.partition(":+")
    if name in ("", "cpu", "meta"):
        return torch.device(name or "cpu")
    found, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    has_device = found is not None and found.type == name and int(offset or 0) < count
    if not has_device:
        _log_missing(place)
    if found is None or not count:
        return torch.device("cpu")
    index = torch.accelerator.current_device_index() + (int(offset or 0) if has_device else 0)
    return torch.device(found.type, index % count)


@lru_cache(maxsize=16)
def _log_missing(place: str) -> None:
    _log.warning("a tensor was saved on %s, which is not here: it is restored elsewhere", place)


def described(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    return DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)


def stride_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The stride to restore a tensor with; empty if it is row-major.

    Only a dense stride is kept. A view with gaps or repeated items is restored row-major, because
    the tensors that share its memory are not known.
    """
    shape, stride = tuple(tensor.shape), tensor.stride()
    if stride == _row_major(shape) or not _is_dense(shape, stride):
        return ()
    return stride


def stride_for(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """A dense stride for this shape, with the dimensions in the order of the given stride."""
    if not stride:
        return _row_major(shape)
    if _is_dense(shape, stride):
        return stride
    found, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim)):
        found[dim], step = step, step * max(1, shape[dim])
    return tuple(found)


def is_expanded(tensor: torch.Tensor) -> bool:
    return any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= max(1, size)
    return tuple(reversed(found))


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    step = 1
    for each, size in sorted(zip(stride, shape, strict=True)):
        if size != 1:
            if each != step:
                return False
            step *= size
    return True


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """[num_bytes] uint8 over the same memory; the tensor is contiguous."""
    return tensor.reshape(-1).view(torch.uint8)


def can_be_cut(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.device.type == "cpu"


def version_of(tensor: torch.Tensor) -> int:
    """Autograd's counter of in-place changes; -1 if the tensor has none."""
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor
        return -1


class LocalPart:
    """The local part of a DTensor; its mesh is taken from the parameter."""

    def __init__(self, local: torch.Tensor) -> None:
        self.local = local

    def like(self, parameter: Any) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            self.local.to(parameter.device),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


Cut = tuple[Any, int, int]
"""A placement, the number of its chunks, and the index of this rank's chunk."""


def part_of(tensor: torch.Tensor, local_shape: Shape) -> TensorPart | None:
    """The part of the global tensor that this rank holds; None if it holds all of it."""
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
    ranges = [range(size) for size in shape]
    for placement, count, index in cuts:
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue  # a replica
        if type(placement).__name__ != "Shard":
            return _by_index(shape, cuts, local)
        # As torch.chunk: equal sizes, except the last ones.
        step = -(-len(ranges[dim]) // count)
        ranges[dim] = ranges[dim][index * step : (index + 1) * step]
    found = tuple(one.start for one in ranges)
    return found if tuple(map(len, ranges)) == local else None


def _by_index(shape: Shape, cuts: tuple[Cut, ...], local: Shape) -> Shape | None:
    """Like `_offsets`, for other placements: apply their split to the item indices."""
    offsets = []
    for dim, size in enumerate(shape):
        # Torch splits along `placement.dim`, so the items lie along that dimension.
        items = torch.arange(size, device="cpu").view([1] * dim + [size])
        for placement, count, index in cuts:
            if getattr(placement, "dim", None) == dim:
                chunks, _ = placement._split_tensor(items, count, with_padding=False)
                items = chunks[index]
        items = items.flatten()
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


class HostCopy:
    """Copy of one tensor in host memory; shares the memory of a CPU tensor.

    The copy of a device's tensor is queued in the current stream, and no thread waits for it.
    """

    def __init__(self, source: torch.Tensor) -> None:
        source = source.detach()
        self.tensor = source
        self._event: torch.Event | None = None
        if source.is_cpu:
            return
        try:
            memory = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
            self.tensor = memory.copy_(source, non_blocking=True)
            stream = torch.accelerator.current_stream(source.device)
            with on_device(source.device):
                self._event = stream.record_event()
        except (RuntimeError, NotImplementedError, ValueError):  # no page-locked memory or events
            drop_error(source.device)
            self.tensor = source.cpu()

    @property
    def has_arrived(self) -> bool:
        """Whether the copy is complete; until then the content of `tensor` is undefined."""
        return self._event is None or self._event.query()

    def awaited(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self.tensor
