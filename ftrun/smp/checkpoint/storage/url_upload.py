"""One file on its way to a store, from its first byte to its last.

Runs in:  the SMP, in its disk lane's thread; the calls' thread sends.
Takes in: bytes in the order of the file; a pace.
Gives:    the object, whole, when `finish` returns; before that the store has a half at most.

While one block is on its way the next is filled, so nothing lies on this node's disk and in
memory there are a few blocks, whatever the size of the file.

Rule 1: a file that is given up is never closed: closing is what publishes an object, also half.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from ftrun.errors import CheckpointError
from ftrun.smp.checkpoint.storage.direct_file import Pace
from ftrun.smp.checkpoint.storage.url_calls import CallResult, CallThread

BLOCK_BYTES = 16 << 20
_MOST_BLOCKS = 8_000
"""S3 takes 10,000 parts of an object, others take more."""


def block_bytes(num_bytes: int) -> int:
    """How much of a file of this size goes in one request: a multiple of 1 MiB."""
    return max(BLOCK_BYTES, -(-num_bytes // _MOST_BLOCKS >> 20) << 20)


class ObjectWriter:
    """A file with `room` and `take`, as `direct_file.DiskFile` has them; it copies always.

    Args:
        calls: where it is sent from.
        opened: opens it for writing; called there.
        size: of a block.
        pace: asked before each block.
    """

    is_in_place = False

    def __init__(self, calls: CallThread, opened: Callable[[], Any], size: int, pace: Pace) -> None:
        self._calls = calls
        self._pace = pace
        self._block = memoryview(bytearray(size))
        self._filled = 0
        self._sending: CallResult[None] | None = None
        self._file = calls(opened)

    def room(self, source: memoryview | None = None) -> memoryview:
        """Memory for the bytes that come next, at least one; `take` says how many were put there.

        Raises:
            CheckpointError: an earlier part could not be sent.
        """
        if self._filled == len(self._block):
            self._send()
        return self._block[self._filled :]

    def take(self, num_bytes: int) -> None:
        """So many bytes of `room` belong to the file now."""
        self._filled += num_bytes

    def finish(self) -> None:
        """All is there: have the store keep it.

        Raises:
            CheckpointError: it does not.
        """
        if self._filled:
            self._send()
        self._wait()
        self._calls(self._file.close)

    def give_up(self) -> None:
        """Nobody will ever ask for it."""
        with suppress(AttributeError):  # not all are fsspec's own kind of file
            self._file.closed = True
        with suppress(CheckpointError):
            self._calls(partial(_discard, self._file))

    def _send(self) -> None:
        self._wait()
        self._pace(self._filled)
        data = bytes(self._block[: self._filled])
        self._sending = self._calls.start(partial(_write, self._file, data))
        self._filled = 0

    def _wait(self) -> None:
        if self._sending is not None:
            sending, self._sending = self._sending, None
            self._calls.wait(sending)


def _write(file: Any, data: bytes) -> None:
    file.write(data)


def _discard(file: Any) -> None:
    try:
        file.discard()
    except Exception:  # noqa: BLE001 - whatever it cannot do, a later checkpoint removes
        with suppress(Exception):
            file.close()
