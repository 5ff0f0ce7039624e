"""The codec that computes in place: Intel's ISA-L, called through ctypes.

The library is that of pyeclib's wheel, or the system's. Finding it reads the list of the wheel's
files and loads a library. This is the only impure operation of this folder, and it happens once,
before any decision.

Rule 1: tables that ISA-L has expanded never leave the process, because their format depends on the
        processor. The nodes share only the matrix, which `self_test` checks.
Rule 2: no address is used after the `PinnedBuffers` that it came from is released.
"""

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product

from ftrun.erasure.codec import Buffer, check_counts, check_position, check_shape, sources_of
from ftrun.erasure.pinned_buffers import PinnedBuffers
from ftrun.errors import InternalError, NotSupportedHere

_TABLE_BYTES = 32
"""Largest size of the table that ISA-L expands one factor to."""

_MAX_KEPT = 256
"""Cached tables at most. Rebuilding uses few sets of blocks: one for each turn of the rotation."""

_INT, _POINTER = ctypes.c_int, ctypes.c_void_p
_SIGNATURES = {
    "ec_init_tables": ([_INT, _INT, _POINTER, _POINTER], None),
    "ec_encode_data": ([_INT, _INT, _INT, _POINTER, _POINTER, _POINTER], None),
    "ec_encode_data_update": ([_INT, _INT, _INT, _INT, _POINTER, _POINTER, _POINTER], None),
    "gf_gen_cauchy1_matrix": ([_POINTER, _INT, _INT], None),
    "gf_invert_matrix": ([_POINTER, _POINTER, _INT], _INT),
}

Tables = ctypes.Array[ctypes.c_char]


class IsalCodec:
    """Reed-Solomon by ISA-L, in place."""

    name = "isa-l"

    def __init__(self, k: int, m: int) -> None:
        """Raises NotSupportedHere if the library is not found, or is not the expected ISA-L."""
        check_shape(k, m)
        self.k, self.m = k, m
        self._isal = load_isal(find_isal())
        matrix = ctypes.create_string_buffer((k + m) * k)
        self._isal.gf_gen_cauchy1_matrix(matrix, k + m, k)
        self._rows = [matrix.raw[at : at + k] for at in range(0, (k + m) * k, k)]
        self._encoding = self._expand(self._rows[k:])
        self._factors = {
            (position, j): self._expand([self._rows[k + j][position : position + 1]])
            for position, j in product(range(k), range(m))
        }
        self._kept: dict[tuple[tuple[int, ...], tuple[int, ...]], Tables] = {}

    def encode(self, data: Sequence[Buffer], parity: Sequence[Buffer]) -> None:
        check_counts(self, data, parity)
        with PinnedBuffers(data, parity) as blocks:
            self._multiply(blocks.num_bytes, self._encoding, blocks.sources, blocks.targets)

    def update(
        self, position: int, data: Buffer, parity_index: int, parity: Buffer, *, first: bool
    ) -> None:
        check_position(self, position, parity_index)
        with PinnedBuffers([data], [parity], may_be_shorter=True) as blocks:
            factor = self._factors[position, parity_index]
            (source,), (target,), (length,) = blocks.sources, blocks.targets, blocks.source_bytes
            if first:
                self._multiply(length, factor, [source], [target])
                ctypes.memset(target + length, 0, blocks.num_bytes - length)
            else:
                self._isal.ec_encode_data_update(
                    length, 1, 1, 0, factor, source, _pointers([target])
                )

    def rebuild(self, have: Mapping[int, Buffer], want: Mapping[int, Buffer]) -> None:
        used = sources_of(self, have, want)
        with PinnedBuffers([have[i] for i in used], [*want.values()]) as blocks:
            tables = self._rebuilding(tuple(used), tuple(want))
            self._multiply(blocks.num_bytes, tables, blocks.sources, blocks.targets)

    def _multiply(
        self, length: int, tables: Tables, sources: list[int], targets: list[int]
    ) -> None:
        self._isal.ec_encode_data(
            length, len(sources), len(targets), tables, _pointers(sources), _pointers(targets)
        )

    def _rebuilding(self, used: tuple[int, ...], wanted: tuple[int, ...]) -> Tables:
        # Two threads may compute the same tables at once; both results are correct.
        tables = self._kept.get((used, wanted))
        if tables is None:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            tables = self._expand(self._rows_from(used, wanted))
            self._kept[used, wanted] = tables
        return tables

    def _rows_from(self, used: tuple[int, ...], wanted: tuple[int, ...]) -> list[bytes]:
        square = b"".join(self._rows[i] for i in used)
        inverse = ctypes.create_string_buffer(len(square))
        # gf_invert_matrix() overwrites its input, so the input is a copy.
        if self._isal.gf_invert_matrix(ctypes.create_string_buffer(square), inverse, self.k):
            raise InternalError(f"blocks {list(used)} do not determine their stripe")
        to_data = [inverse.raw[at : at + self.k] for at in range(0, len(square), self.k)]
        # Rows of factors add up as blocks do, so the product of the matrices is one more encoding.
        rows = [bytearray(self.k) for _ in wanted]
        with PinnedBuffers(to_data, rows) as blocks:
            tables = self._expand([self._rows[i] for i in wanted])
            self._multiply(self.k, tables, blocks.sources, blocks.targets)
        return [bytes(row) for row in rows]

    def _expand(self, rows: Sequence[bytes]) -> Tables:
        num_factors = len(rows) * len(rows[0])
        tables = ctypes.create_string_buffer(_TABLE_BYTES * num_factors)
        self._isal.ec_init_tables(len(rows[0]), len(rows), b"".join(rows), tables)
        return tables


@cache
def load_isal(path: str | None) -> ctypes.CDLL:
    """Loads the library that `find_isal` has found; raises NotSupportedHere if it is unusable."""
    if path is None:
        raise NotSupportedHere("ISA-L is neither in pyeclib's wheel nor on this system")
    try:
        library = ctypes.CDLL(path)
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
    except (OSError, AttributeError) as error:
        raise NotSupportedHere(f"cannot use {path}: {error}") from error
    return library


def find_isal(distribution: str = "pyeclib") -> str | None:
    """The path of the library in pyeclib's wheel, or the name of the system's library."""
    from ctypes.util import find_library
    from importlib.metadata import PackageNotFoundError, files

    try:
        listed = files(distribution) or []
    except PackageNotFoundError:
        listed = []
    for file in listed:
        if file.name.startswith("libisal") and ".so" in file.name:
            return str(file.locate())
    return find_library("isal")


def _pointers(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(addresses))(*addresses)
