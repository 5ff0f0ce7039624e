"""What ftrun knows about one tensor: its dtype's name, its local part, its bytes.

Runs in:  worker.
Takes in: torch tensors of any kind.
Gives:    plain tensors that can be copied byte by byte, and views of them.
"""

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
