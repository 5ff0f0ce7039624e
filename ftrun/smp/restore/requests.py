"""Requests to other SMPs, and the destinations of their answers.

Runs in:  the SMP: requests in the threads that fetch, answers in the threads of links.
Takes in: answers, with their bytes.
Gives:    the bytes in the requester's memory; an event for each answer.

Rule 1: when `close` returns, no thread writes any more to memory of that request. An answer that
        arrives later, from a peer that was frozen, is read and dropped.
Rule 2: after a lost connection is restored, everything that it may have dropped is requested again.
        An answer may therefore arrive twice. It is accepted once, and never by two threads at a
        time.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from msgspec import structs

from ftrun.smp.peer_link import OutgoingFrame
from ftrun.smp.peer_listener import IncomingLink
from ftrun.wire.cluster import transfer as t
from ftrun.wire.transport.bulk_socket import Bytes


class ResponseSink(Protocol):
    """The requester. Only `room` may block; all methods are called in the threads of links."""

    def room(self, index: int, num_bytes: int) -> Sequence[memoryview] | None:
        """Return the destination of an answer's bytes; None if they are not needed.

        It is called again for the same answer if the connection broke while that answer was
        received.
        """
        ...

    def arrived(self, index: int, header: bytes, digest: int | None) -> None:
        """Report an answer; `digest` is the digest of its bytes, if the answer carries one."""
        ...

    def refused(self, index: int, why: str) -> None:
        """Report that this source will not deliver the item."""
        ...


class PendingRequests:
    """Open requests by number. Thread-safe."""

    def __init__(self) -> None:
        self._sinks: dict[int, ResponseSink] = {}
        self._next = 1
        self._inside: dict[int, int] = {}
        self._sent: dict[int, tuple[str, OutgoingFrame]] = {}
        self._settled: dict[int, set[int]] = {}
        self._reading: set[tuple[int, int]] = set()
        self._changed = threading.Condition()

    def open(self, sink: ResponseSink) -> int:
        with self._changed:
            number, self._next = self._next, self._next + 1
            self._sinks[number] = sink
            return number

    def close(self, number: int) -> None:
        """Accept no more answers to this request; wait for a thread that is reading one.

        The wait is bounded by the patience of a link, which a peer may not exceed within a frame.
        """
        with self._changed:
            self._sinks.pop(number, None)
            self._sent.pop(number, None)
            self._settled.pop(number, None)
            self._changed.wait_for(lambda: not self._inside.get(number))

    def sent(self, node_id: str, number: int, frame: OutgoingFrame) -> None:
        with self._changed:
            if number in self._sinks:
                self._sent[number] = node_id, frame

    def owed_by(self, node_id: str) -> list[OutgoingFrame]:
        """Return the open requests to a node, without the parts that are answered."""
        with self._changed:
            return [
                self._rest_of(number, frame)
                for number, (asked, frame) in self._sent.items()
                if asked == node_id
            ]

    def _rest_of(self, number: int, frame: OutgoingFrame) -> OutgoingFrame:
        settled = self._settled.get(number)
        if not settled or not isinstance(frame.body, t.GetPieces):
            return frame
        return replace(frame, body=structs.replace(frame.body, settled=sorted(settled)))

    def take(self, source: IncomingLink, envelope: t.TransferEnvelope) -> None:
        """Handle an answer, in its link's thread.

        Raises:
            PeerError: the link is lost while the answer is read.
        """
        body = envelope.body
        assert isinstance(body, t.FetchData | t.FetchMissing)
        sink = self._enter(body)
        if sink is None:
            source.socket.receive_raw(envelope, None)
            return
        try:
            self._hand_over(source, envelope, sink)
        except BaseException:
            self._leave(body, is_settled=False)
            raise
        self._leave(body, is_settled=True)

    def take_own(
        self, body: t.FetchData | t.FetchMissing, raw: Sequence[Bytes], digest: int | None
    ) -> None:
        """Handle an answer of this node to its own request."""
        with self._changed:
            sink = self._sinks.get(body.request)
        if sink is None:
            return
        if isinstance(body, t.FetchMissing):
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

    def _enter(self, body: t.FetchData | t.FetchMissing) -> ResponseSink | None:
        key = (body.request, body.index)

        def is_wanted() -> bool:
            settled = self._settled.get(body.request, ())
            return body.request in self._sinks and body.index not in settled

        with self._changed:
            # The other connection was interrupted, so its thread leaves the read soon.
            self._changed.wait_for(lambda: key not in self._reading or not is_wanted())
            if not is_wanted():
                return None
            self._reading.add(key)
            self._inside[body.request] = self._inside.get(body.request, 0) + 1
            return self._sinks[body.request]

    def _leave(self, body: t.FetchData | t.FetchMissing, *, is_settled: bool) -> None:
        number = body.request
        with self._changed:
            self._reading.discard((number, body.index))
            if is_settled and number in self._sinks:
                self._settled.setdefault(number, set()).add(body.index)
            self._inside[number] -= 1
            if not self._inside[number]:
                del self._inside[number]
            self._changed.notify_all()

    @staticmethod
    def _hand_over(source: IncomingLink, envelope: t.TransferEnvelope, sink: ResponseSink) -> None:
        body = envelope.body
        if isinstance(body, t.FetchMissing):
            sink.refused(body.index, body.why)
            return
        assert isinstance(body, t.FetchData)
        room = sink.room(body.index, envelope.raw_bytes)
        is_good = source.socket.receive_raw(envelope, room)
        if room is None:
            return
        if is_good:
            sink.arrived(body.index, body.header, envelope.raw_digest)
        else:
            sink.refused(body.index, f"what {source.node_id} has sent was damaged on the way")
