"""The newest messages between ranks (send, recv) that a rank has called, on its heartbeat page.

Runs in:  worker (writes), agent (reads, also after the worker's end and while it is stopped).
Takes in: the memory of a page.
Gives:    `RecordedMessage` objects, the oldest first. The ring holds the last `CAPACITY` messages.
Survives: the worker.

Rule 1: `HeartbeatField.MESSAGES` is written after an entry. A reader reads it before and after the
        entries, and leaves out those that may have been overwritten in between.
"""

import struct
from collections.abc import Iterator
from dataclasses import replace

from ftrun.monitor.order.messages import RecordedMessage

CAPACITY = 512
_ENTRY = struct.Struct("<qqqqqqIIIiB7x")
"""Number, step, times of call, wait and end, total wait, group, tag, count, peer, is it a send."""
ENTRY_BYTES = _ENTRY.size
RING_BYTES = CAPACITY * ENTRY_BYTES
_WAITED_AT = 24
_NS = struct.Struct("<q")
_END = struct.Struct("<qq")
_END_AT = 32
_MASK = (1 << 32) - 1


def write_message(memory: memoryview, one: RecordedMessage) -> None:
    """Store a new message; the caller then writes its number to the page."""
    at = one.number % CAPACITY * ENTRY_BYTES
    _ENTRY.pack_into(
        memory, at, one.number, one.step, one.called_ns, one.waited_ns, one.ended_ns,
        one.total_ns, one.group, one.tag & _MASK, one.count & _MASK, one.peer, one.is_send,
    )  # fmt: skip


def write_wait(memory: memoryview, number: int, waited_ns: int) -> None:
    """Store the begin of a wait, if the message is still in the ring."""
    at = number % CAPACITY * ENTRY_BYTES
    if _NS.unpack_from(memory, at)[0] == number:
        _NS.pack_into(memory, at + _WAITED_AT, waited_ns)


def write_end(memory: memoryview, number: int, ended_ns: int, total_ns: int) -> None:
    """Store the end of a wait, if the message is still in the ring."""
    at = number % CAPACITY * ENTRY_BYTES
    if _NS.unpack_from(memory, at)[0] == number:
        _END.pack_into(memory, at + _END_AT, ended_ns, total_ns)


def read_messages(raw: bytes, *, newest: int, newest_after: int) -> Iterator[RecordedMessage]:
    """Entries of a copy of the ring, the oldest first.

    `newest` and `newest_after` are the values of `HeartbeatField.MESSAGES` before and after the
    copy was made.
    """
    # The message after the newest one may be in the middle of being written.
    first = max(1, newest_after + 2 - CAPACITY)
    for number in range(first, newest + 1):
        fields = _ENTRY.unpack_from(raw, number % CAPACITY * ENTRY_BYTES)
        one = RecordedMessage(*fields)
        if one.number == number:
            yield replace(one, is_send=bool(one.is_send))
