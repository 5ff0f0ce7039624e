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

from ftrun.monitor.order.messages import RecordedMessage

CAPACITY = 512
_ENTRY = struct.Struct("<qqqqqIIIiB7x")
"""Number, step, times of call, wait and end, group, tag, count, peer, whether it is a send."""
ENTRY_BYTES = _ENTRY.size
RING_BYTES = CAPACITY * ENTRY_BYTES
_WAITED_AT, _ENDED_AT = 24, 32
_NS = struct.Struct("<q")
_MASK = (1 << 32) - 1


def write_message(memory: memoryview, one: RecordedMessage) -> None:
    """Store a new message; the caller then writes its number to the page."""
    at = one.number % CAPACITY * ENTRY_BYTES
    _ENTRY.pack_into(
        memory, at, one.number, one.step, one.called_ns, one.waited_ns, one.ended_ns,
        one.group, one.tag & _MASK, one.count & _MASK, one.peer, one.is_send,
    )  # fmt: skip


def write_wait(memory: memoryview, number: int, *, waited_ns: int = 0, ended_ns: int = 0) -> None:
    """Store the begin or the end of a wait, if the message is still in the ring."""
    at = number % CAPACITY * ENTRY_BYTES
    if _NS.unpack_from(memory, at)[0] == number:
        place, value = (_ENDED_AT, ended_ns) if ended_ns else (_WAITED_AT, waited_ns)
        _NS.pack_into(memory, at + place, value)


def read_messages(raw: bytes, *, newest: int, newest_after: int) -> Iterator[RecordedMessage]:
    """Entries of a copy of the ring, the oldest first.

    `newest` and `newest_after` are the values of `HeartbeatField.MESSAGES` before and after the
    copy was made.
    """
    # The message after the newest one may be in the middle of being written.
    first = max(1, newest_after + 2 - CAPACITY)
    for number in range(first, newest + 1):
        *numbers, is_send = _ENTRY.unpack_from(raw, number % CAPACITY * ENTRY_BYTES)
        if numbers[0] == number:
            yield RecordedMessage(*numbers, is_send=bool(is_send))
