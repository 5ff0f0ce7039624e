"""What ftrun knows about one tensor: its dtype's name, its local part, its bytes.

Runs in:  worker.
Takes in: torch tensors of any kind.
Gives:    plain tensors that can be copied byte by byte, and views of them.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ftrun.errors import ValueNotStorable

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}  # fmt: skip
"""Safetensors' name of each dtype that can be stored."""

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def local_tensor(tensor: torch.Tensor, key: str) -> torch.Tensor:
    """The part of a tensor that this rank holds, detached; a DTensor's local tensor.

    Raises:
        ValueNotStorable: it has no bytes of its own that could be copied.
    """
    detached = tensor.detach()
    if is_sharded(detached):
        detached = detached._local_tensor  # type: ignore[attr-defined]
    if (
        detached.layout is not torch.strided
        or detached.dtype not in DTYPE_NAMES
        or detached.is_meta
        or is_traceable_wrapper_subclass(detached)
    ):
        kind = f"{type(tensor).__name__} of {tensor.dtype} ({tensor.layout}, {tensor.device})"
        raise ValueNotStorable(key=key, kind=kind)
    return detached


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor; by its looks, since that module need not be loaded."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


def kind_of(tensor: torch.Tensor) -> str:
    """How a reference names a tensor among plain values: `tensor`, or `tensor@cuda`."""
    kind = tensor.device.type
    return "tensor" if kind == "cpu" else f"tensor@{kind}"


def at_home(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """A restored tensor on the kind of device that `kind_of` named; of several, the current."""
    _, _, device = kind.partition("@")
    return tensor.to(device) if device else tensor


def described(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Name of the dtype, and the shape, as a layout wants them."""
    return DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)


def stride_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The stride to restore a tensor with; empty where its items lie row by row.

    Only a dense stride is kept. A view with gaps or repeated items comes back row by row: what it
    shares its memory with is not known.
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
    """Whether several of its items lie in the same memory, as after `expand`."""
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
    """Whether its bytes can be copied and hashed piece by piece where they lie."""
    return tensor.is_contiguous() and tensor.device.type == "cpu"


def version_of(tensor: torch.Tensor) -> int:
    """How often it was changed in place, as autograd counts; -1 where nobody counts."""
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor
        return -1


class LocalPart:
    """The local part of a DTensor whose mesh only its parameter knows."""

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
