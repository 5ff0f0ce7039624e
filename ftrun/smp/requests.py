"""Questions to other SMPs, and where their answers go.

Runs in:  the SMP: asked in the threads that fetch, answered in those of the links.
Takes in: answers, with their bytes.
Gives:    the bytes where the asker wants them; word of each answer.

Rule: when `close` returns, no thread writes any more to memory that belonged to that question. An
      answer that comes later, from a peer that was frozen, is read and forgotten.
"""

import threading
from collections.abc import Sequence
from typing import Protocol

from ftrun.smp.peers import Incoming
from ftrun.wire import transfer as t
from ftrun.wire.transfer_socket import Bytes


class Sink(Protocol):
    """Who has asked. All but `room` must return at once; all are called in links' threads."""

    def room(self, index: int, num_bytes: int) -> Sequence[memoryview] | None:
        """Where the bytes of an answer go; None where they are not wanted."""
        ...

    def arrived(self, index: int, header: bytes, digest: int | None) -> None:
        """They are there; `digest` is that of the bytes, where the answer carries one."""
        ...

    def refused(self, index: int, why: str) -> None:
        """They will not come from there."""
        ...


class Requests:
    """Open questions by number. Thread-safe."""

    def __init__(self) -> None:
        self._sinks: dict[int, Sink] = {}
        self._next = 1
        self._inside: dict[int, int] = {}
        self._changed = threading.Condition()

    def open(self, sink: Sink) -> int:
        """The number of a new question."""
        with self._changed:
            number, self._next = self._next, self._next + 1
            self._sinks[number] = sink
            return number

    def close(self, number: int) -> None:
        """No more answers to this one; waits for a thread that is just reading one.

        That is no longer than the patience of a link, which a peer may not exceed within a frame.
        """
        with self._changed:
            self._sinks.pop(number, None)
            self._changed.wait_for(lambda: not self._inside.get(number))

    def take(self, source: Incoming, envelope: t.TransferEnvelope) -> None:
        """Handle an answer, in its link's thread.

        Raises:
            PeerError: the link is lost in the midst of it.
        """
        body = envelope.body
        assert isinstance(body, t.Found | t.NotHeld)
        with self._changed:
            sink = self._sinks.get(body.request)
            if sink is not None:
                self._inside[body.request] = self._inside.get(body.request, 0) + 1
        try:
            self._hand_over(source, envelope, sink)
        finally:
            if sink is not None:
                self._leave(body.request)

    def take_own(self, body: t.Found | t.NotHeld, raw: Sequence[Bytes], digest: int | None) -> None:
        """Handle an answer of this node to itself."""
        with self._changed:
            sink = self._sinks.get(body.request)
        if sink is None:
            return
        if isinstance(body, t.NotHeld):
            sink.refused(body.index, body.why)
            return
        room = sink.room(body.index, sum(map(len, raw)))
        if room is not None:
            joined = raw[0] if len(raw) == 1 else b"".join(raw)
            at = 0
            for view in room:
                view[:] = memoryview(joined)[at : at + len(view)]
                at += len(view)
            sink.arrived(body.index, body.header, digest)

    def _hand_over(self, source: Incoming, envelope: t.TransferEnvelope, sink: Sink | None) -> None:
        body = envelope.body
        if isinstance(body, t.NotHeld):
            if sink is not None:
                sink.refused(body.index, body.why)
            return
        assert isinstance(body, t.Found)
        room = sink.room(body.index, envelope.raw_bytes) if sink is not None else None
        is_good = source.socket.receive_raw(envelope, room)
        if sink is None or room is None:
            return
        if is_good:
            sink.arrived(body.index, body.header, envelope.raw_digest)
        else:
            sink.refused(body.index, f"what {source.node_id} has sent was damaged on the way")

    def _leave(self, number: int) -> None:
        with self._changed:
            self._inside[number] -= 1
            if not self._inside[number]:
                del self._inside[number]
                self._changed.notify_all()
