"""Pins blocks and checks them before a C library may write to their addresses.

A C library does not check its arguments: a length that is wrong by one corrupts the heap, and a
read-only mapping ends the process with SIGSEGV. Everything is therefore checked here, for both
codecs, and a wrong argument raises an InternalError.

Rule 1: all targets have one length. Sources have the same length, or a smaller one if that is
        allowed.
Rule 2: a target overlaps no other block. Several sources may be the same block.
Rule 3: while pinned, a mapping cannot be closed and a bytearray cannot be resized: Python refuses
        it.
"""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ftrun.errors import InternalError

if TYPE_CHECKING:
    from typing_extensions import Buffer as Buffer
else:
    # collections.abc has the name from Python 3.12 on.
    Buffer = object

MAX_BLOCK_BYTES = 1 << 25
"""Both libraries count in C ints: 32 data blocks of this length stay below 2 GiB."""

_SIMPLE, _WRITABLE = 0, 1


class _PyBuffer(ctypes.Structure):
    """CPython's Py_buffer, part of its stable interface since 3.11."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


# Separate prototypes, because the attributes of ctypes.pythonapi belong to the whole process. These
# keep the GIL, as calls into Python must.
_get_buffer = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int
)(("PyObject_GetBuffer", ctypes.pythonapi))
_release_buffer = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_PyBuffer))(
    ("PyBuffer_Release", ctypes.pythonapi)
)


class PinnedBuffers:
    """Blocks whose addresses stay valid while the `with` block runs."""

    __slots__ = ("_held", "_may_be_shorter", "num_bytes", "source_bytes", "sources", "targets")

    def __init__(
        self, sources: Sequence[Buffer], targets: Sequence[Buffer], *, may_be_shorter: bool = False
    ) -> None:
        """Pins and checks the blocks; if a check fails, nothing stays pinned."""
        self._held: list[_PyBuffer] = []
        self._may_be_shorter = may_be_shorter
        try:
            reads = [self._pin(f"source {i}", one, _SIMPLE) for i, one in enumerate(sources)]
            writes = [self._pin(f"target {i}", one, _WRITABLE) for i, one in enumerate(targets)]
            self._check(reads, writes)
        except InternalError:
            self.__exit__()
            raise
        self.sources = [address for address, _ in reads]
        self.source_bytes = [length for _, length in reads]
        self.targets = [address for address, _ in writes]
        self.num_bytes = writes[0][1]

    def __enter__(self) -> "PinnedBuffers":
        return self

    def __exit__(self, *_: object) -> None:
        while self._held:
            _release_buffer(self._held.pop())

    def _pin(self, what: str, block: Buffer, how: int) -> tuple[int, int]:
        view = _PyBuffer()
        try:
            _get_buffer(block, view, how)
        except (BufferError, TypeError, ValueError) as error:
            kind = "writable, contiguous" if how == _WRITABLE else "contiguous"
            name = type(block).__name__
            raise InternalError(f"{what}, a {name}, is not a {kind} buffer: {error}") from error
        self._held.append(view)
        return view.buf or 0, view.len

    def _check(self, reads: list[tuple[int, int]], writes: list[tuple[int, int]]) -> None:
        if not writes:
            raise InternalError("there is no block to write to")
        whole = writes[0][1]
        if not 0 < whole <= MAX_BLOCK_BYTES:
            raise InternalError(f"a block has 1 to {MAX_BLOCK_BYTES} bytes, not {whole}")
        for i, (_, length) in enumerate(writes):
            if length != whole:
                raise InternalError(f"target {i} has {length} bytes and target 0 has {whole}")
        for i, (_, length) in enumerate(reads):
            if length > whole or (length < whole and not self._may_be_shorter):
                raise InternalError(f"source {i} has {length} bytes and the targets have {whole}")
        for i, (start, _) in enumerate(writes):
            others = [*reads, *writes[i + 1 :]]
            if any(at < start + whole and start < at + size for at, size in others):
                raise InternalError(f"target {i} overlaps another block of the same stripe")
