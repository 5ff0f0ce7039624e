"""Numbers as bits: from one floating point dtype to another, and the mean of several.

Runs in:  the process that converts checkpoints; numpy is loaded here and in its neighbours only.
Takes in: [items] arrays of unsigned integers that hold the bits, safetensors' names of dtypes.
Gives:    such arrays; rounded to the nearest, ties to even, as torch does. Whatever is not F64
          goes by way of F32, which holds every value of the smaller ones.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ftrun.sharding.source_index import Bits

_NUMPY: dict[str, type[np.floating]] = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
_AT_ONCE = 1 << 20
"""Items that are converted together, so that what is needed meanwhile stays small."""


def bits_type(item_bytes: int) -> np.dtype[np.unsignedinteger]:
    """The dtype of the bits of items of so many bytes: 1, 2, 4 or 8."""
    return np.dtype(f"u{item_bytes}")


def converted(bits: Bits, old: str, new: str) -> Bits:
    """The same numbers in another dtype.

    Args:
        bits: [items].
        old: their dtype, one of `world_layout.FLOATS`.
        new: the dtype wanted, one of `world_layout.FLOATS`.
    """
    made: Bits = np.empty(bits.shape, bits_type(8 if new == "F64" else 4 if new == "F32" else 2))
    for at in range(0, len(bits), _AT_ONCE):
        part = bits[at : at + _AT_ONCE]
        made[at : at + _AT_ONCE] = _to_bits(_numbers(part, old), new)
    return made


def mean(copies: Sequence[Bits], dtype: str) -> Bits:
    """Item by item: added up in F64 in the order given, rounded once.

    Args:
        copies: at least one, each [items].
        dtype: of all of them and of the result, one of `world_layout.FLOATS`.
    """
    made = np.empty_like(copies[0])
    for at in range(0, len(made), _AT_ONCE):
        total = _numbers(copies[0][at : at + _AT_ONCE], dtype).astype(np.float64)
        for copy in copies[1:]:
            total += _numbers(copy[at : at + _AT_ONCE], dtype)
        made[at : at + _AT_ONCE] = _to_bits(total / len(copies), dtype)
    return made


def _numbers(bits: Bits, dtype: str) -> npt.NDArray[np.floating]:
    """F64 stays what it is, all else becomes F32."""
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    found = bits.view(_NUMPY[dtype])
    return found if dtype == "F64" else found.astype(np.float32)


def _to_bits(numbers: npt.NDArray[np.floating], dtype: str) -> Bits:
    with np.errstate(over="ignore", invalid="ignore"):  # what is too large becomes infinite
        if dtype == "F64":
            return numbers.astype(np.float64).view(np.uint64)
        narrow = numbers.astype(np.float32)
        if dtype != "BF16":
            made = narrow.astype(_NUMPY[dtype])
            return made.view(bits_type(made.itemsize))
    raw = narrow.view(np.uint32)
    rounded = (raw + np.uint32(0x7FFF) + ((raw >> 16) & 1)) >> 16
    # A NaN whose upper bits are none would round to infinity.
    rounded = np.where(np.isnan(narrow), (raw >> 16) | 0x40, rounded)
    return rounded.astype(np.uint16)
