"""Uploads one file to a store, from its first byte to its last.

Runs in:  the SMP, in its disk lane's thread; the thread of the calls sends.
Takes in: bytes in the order of the file; a pace.
Gives:    the object, complete when `finish` returns; before that the store has at most an
          incomplete one.

While one block is sent the next is filled. Nothing is stored on this node's disk, and memory holds
a few blocks, whatever the size of the file.

Rule 1: a cancelled file is never closed, because closing publishes an object even if it is
        incomplete.
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
"""S3 accepts 10,000 parts of an object, other stores accept more."""


def block_bytes(num_bytes: int) -> int:
    """Return the bytes per request for a file of this size: a multiple of 1 MiB."""
    return max(BLOCK_BYTES, -(-num_bytes // _MOST_BLOCKS >> 20) << 20)


class ObjectWriter:
    """A file with `room` and `take` as in `direct_file.DirectFile`. It always copies.

    Args:
        calls: makes the calls that send.
        opened: opens the object for writing; called in the thread of `calls`.
        size: of a block.
        pace: called before each block.
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
        """Return memory for the next bytes, at least one; `take` adds those written into it.

        Raises:
            CheckpointError: an earlier part could not be sent.
        """
        if self._filled == len(self._block):
            self._send()
        return self._block[self._filled :]

    def take(self, num_bytes: int) -> None:
        self._filled += num_bytes

    def finish(self) -> None:
        """Send the rest and publish the object.

        Raises:
            CheckpointError: the store has not accepted it.
        """
        if self._filled:
            self._send()
        self._wait()
        self._calls(self._file.close)

    def give_up(self) -> None:
        with suppress(AttributeError):  # not all are fsspec's own file type
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
