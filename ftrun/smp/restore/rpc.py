"""Requests between nodes for the restored version, and their answers.

Runs in:  the SMP: requests in the threads that fetch, answers in the threads of the fetch links.
          The server thread begins and ends it.
Takes in: requests and answers, with their bytes.
Gives:    answers from this node's slots and parity regions; work for `Rebuilder`; bytes in the
          requester's memory, and an event for each answer.

An answer is sent in place, over the link in the opposite direction. The requester limits its open
requests, and this bounds the queue of answers.

Rule 1: when `PendingRequests.close` returns, no thread writes any more to memory of that request.
        An answer that arrives later, from a peer that was frozen, is read and dropped.
Rule 2: after a lost connection is restored, everything that it may have dropped is requested again.
        An answer may therefore arrive twice. It is accepted once, and never by two threads at a
        time.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from msgspec import structs

from ftrun.errors import LayoutUnknown, ProtocolError, SnapshotCorrupt
from ftrun.ids import version
from ftrun.smp.jobs import Runner
from ftrun.smp.peer_link import FETCH, OutgoingFrame
from ftrun.smp.peer_listener import IncomingLink, PeerListener
from ftrun.smp.restore.restore_server import RestoreServer
from ftrun.wire.cluster import transfer as t
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages.smp import NodeAddress
from ftrun.wire.transport.bulk_socket import Bytes, digest_of

MAX_ANSWER_BYTES = 1 << 30
"""Limit of an answer whose length the requester cannot predict."""

_log = logging.getLogger(__name__)

Rebuild = Callable[[str, t.RebuildBlock], None]
Excluded = Callable[[SnapshotCorrupt, t.FetchRequest], None]


class ResponseSink(Protocol):
    """The requester. Only `room` may block; all methods are called in the threads of links."""

    def room(self, index: int, num_bytes: int) -> Sequence[memoryview] | None:
        """Destination of an answer, or None; called again if its connection breaks."""
        ...

    def arrived(self, index: int, header: bytes, digest: int | None) -> None:
        """Report an answer; `digest` is the digest of its bytes, if the answer carries one."""
        ...

    def refused(self, index: int, reason: str) -> None:
        """Report that this source will not deliver the item."""
        ...


class PendingRequests:
    """Open requests by number. Thread-safe."""

    def __init__(self) -> None:
        self._sinks: dict[int, ResponseSink] = {}
        self._next = 1
        self._inside: dict[int, int] = {}
        self._sent: dict[int, tuple[str, OutgoingFrame]] = {}
        self._resolved: dict[int, set[int]] = {}
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
            self._resolved.pop(number, None)
            self._changed.wait_for(lambda: not self._inside.get(number))

    def sent(self, node_id: str, number: int, frame: OutgoingFrame) -> None:
        with self._changed:
            if number in self._sinks:
                self._sent[number] = node_id, frame

    def outstanding_from(self, node_id: str) -> list[OutgoingFrame]:
        """Return the open requests to a node, without the parts that are answered."""
        with self._changed:
            return [
                self._rest_of(number, frame)
                for number, (asked, frame) in self._sent.items()
                if asked == node_id
            ]

    def _rest_of(self, number: int, frame: OutgoingFrame) -> OutgoingFrame:
        resolved = self._resolved.get(number)
        if not resolved or not isinstance(frame.body, t.GetPieces):
            return frame
        return replace(frame, body=structs.replace(frame.body, resolved=sorted(resolved)))

    def take(self, source: IncomingLink, envelope: t.TransferEnvelope) -> None:
        """Handle an answer, in its link's thread; raises PeerError if the link is lost."""
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
            sink.refused(body.index, body.reason)
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
            resolved = self._resolved.get(body.request, ())
            return body.request in self._sinks and body.index not in resolved

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
                self._resolved.setdefault(number, set()).add(body.index)
            self._inside[number] -= 1
            if not self._inside[number]:
                del self._inside[number]
            self._changed.notify_all()

    @staticmethod
    def _hand_over(source: IncomingLink, envelope: t.TransferEnvelope, sink: ResponseSink) -> None:
        body = envelope.body
        if isinstance(body, t.FetchMissing):
            sink.refused(body.index, body.reason)
            return
        assert isinstance(body, t.FetchData)
        room = sink.room(body.index, envelope.raw_bytes)
        is_good = source.socket.receive_raw(envelope, room)
        if room is None:
            return
        if is_good:
            sink.arrived(body.index, body.header, envelope.raw_digest)
        else:
            sink.refused(body.index, f"the data of {source.node_id} was damaged in transit")


class WholeResponse:
    """One answer of unpredictable length; `answers` gets this object when it is resolved."""

    def __init__(
        self, answers: "queue.SimpleQueue[Any]", max_bytes: int = MAX_ANSWER_BYTES
    ) -> None:
        self.header = b""
        self.raw = bytearray()
        self.digest: int | None = None
        self.problem = ""
        """The reason why the bytes do not arrive."""
        self._answers = answers
        self._max_bytes = max_bytes
        self._is_here = False

    def room(self, index: int, num_bytes: int) -> Sequence[memoryview] | None:
        if index or self._is_here or not 0 < num_bytes <= self._max_bytes:
            return None
        self.raw = bytearray(num_bytes)
        return [memoryview(self.raw)]

    def arrived(self, index: int, header: bytes, digest: int | None) -> None:
        self._is_here = True
        self.header, self.digest = header, digest
        self._answers.put(self)

    def refused(self, index: int, reason: str) -> None:
        self.problem = reason or "the request was refused"
        self._answers.put(self)


class FetchRpc:
    """The traffic of one generation; `excluded` runs in the thread of a link or of a fetch."""

    def __init__(self, peers: PeerListener, *, excluded: Excluded, runner: Runner) -> None:
        self.runner = runner
        self.requests = PendingRequests()
        self.served: RestoreServer | None = None
        self.rebuild: Rebuild | None = None
        self._peers = peers
        self._excluded = excluded
        self._places: dict[str, NodeAddress] = {}
        self._greeted: set[str] = set()
        self._gone: dict[str, str] = {}
        self.own: NodeAddress | None = None
        self._on_lost: list[Callable[[str, str], None]] = []
        self._lock = threading.Lock()

    def begin(
        self, served: RestoreServer | None, rebuild: Rebuild | None, own: NodeAddress | None = None
    ) -> None:
        """Serve this version; no link is admitted yet. Other nodes send answers to `own`."""
        before, self.served, self.rebuild = self.served, served, rebuild
        self._on_lost = []
        with self._lock:
            self._places.clear()
            self._greeted.clear()
            self._gone.clear()
            self.own = own
        if before is not None:
            before.close()

    def on_lost(self, reported: Callable[[str, str], None]) -> None:
        """Add a callback for lost links, valid until the next generation begins."""
        self._on_lost = [*self._on_lost, reported]

    def meet(self, places: Sequence[NodeAddress]) -> None:
        with self._lock:
            self._places.update({position.node_id: position for position in places})

    def send(self, node_id: str, frame: OutgoingFrame) -> bool:
        """Return False if the node is unknown. A request to itself is answered at once."""
        with self._lock:
            position, own = self._places.get(node_id), self.own
            if position is None or own is None:
                return False
            is_own = node_id == own.node_id
        if is_own:
            if isinstance(frame.body, t.FetchData | t.FetchMissing):
                self.requests.take_own(frame.body, frame.raw, frame.raw_digest)
            else:
                self._answer(own.node_id, frame.body)
            return True
        if isinstance(frame.body, t.FetchRequest):
            self.requests.sent(node_id, frame.body.request, frame)
        with self._lock:
            link = self._peers.link(position, FETCH)
            if node_id not in self._greeted:
                # The receiver needs the address for its answers.
                self._greeted.add(node_id)
                link.send(OutgoingFrame(t.FetchPeers([own])))
        link.send(frame)
        return True

    def linked(self, node_id: str) -> None:
        """Repeat what a lost connection may have dropped, after it is restored."""
        self._gone.pop(node_id, None)
        with self._lock:
            self._greeted.discard(node_id)
            places = [position for position in self._places.values() if position.smp_port > 0]
        owed = self.requests.outstanding_from(node_id)
        if owed:
            self.send(node_id, OutgoingFrame(t.FetchPeers(places)))
        for frame in owed:
            self.send(node_id, frame)

    # --- threads of links ------------------------------------------------------------------

    def received(self, source: IncomingLink, envelope: t.TransferEnvelope) -> None:
        """Raises PeerError if the link must be closed."""
        body = envelope.body
        self._gone.pop(source.node_id, None)
        if isinstance(body, t.FetchData | t.FetchMissing):
            self.requests.take(source, envelope)
            return
        if envelope.raw_bytes:
            raise ProtocolError(f"a {type(body).__name__} of {source.node_id} must not have bytes")
        crash_point("smp.fetch.asked")
        self._answer(source.node_id, body)

    def _answer(self, requester: str, body: t.AnyTransfer) -> None:
        rebuild = self.rebuild  # the server thread may clear it
        match body:
            case t.FetchPeers():
                self.meet(body.places)
            case t.GetMirror() | t.GetShardHeader() | t.GetBlock():
                self._give(requester, body)
            case t.GetPieces():
                self._give_pieces(requester, body)
            case t.RebuildBlock() if rebuild is not None:
                rebuild(requester, body)
            case t.RebuildBlock():
                self.refuse(requester, body, 0, LayoutUnknown("this node serves nothing"))
            case _:
                raise ProtocolError(f"{type(body).__name__} is not allowed on a {FETCH} link")

    @property
    def unlinked(self) -> list[str]:
        """Nodes that were asked and have no connection now."""
        with self._lock:
            links = {node_id: self._peers.find(node_id, FETCH) for node_id in self._places}
        return [one for one, link in links.items() if link is not None and not link.is_connected]

    def loss_reason(self, node_id: str) -> str:
        return self._gone.get(node_id, "")

    def lost(self, node_id: str, reason: str) -> None:
        self._gone[node_id] = reason
        for reported in self._on_lost:
            reported(node_id, reason)

    def _give(self, requester: str, ask: t.GetMirror | t.GetShardHeader | t.GetBlock) -> None:
        try:
            frame = self._data_for(ask)
        except (LayoutUnknown, SnapshotCorrupt) as error:
            self.refuse(requester, ask, 0, error)
        else:
            self.send(requester, frame)

    def _data_for(self, ask: t.GetMirror | t.GetShardHeader | t.GetBlock) -> OutgoingFrame:
        served = self._serving(ask)
        if isinstance(ask, t.GetBlock):
            # The header of the fragment contains the digest.
            header, views = served.unit(ask)
            return OutgoingFrame(t.FetchData(ask.request, 0, header), views)
        parts = served.mirror(ask) if isinstance(ask, t.GetMirror) else served.head(ask)
        return OutgoingFrame(t.FetchData(ask.request, 0), parts, digest_of(parts))

    def _give_pieces(self, requester: str, ask: t.GetPieces) -> None:
        digests = memoryview(ask.digests).cast("Q")
        for index, digest in enumerate(digests):
            if index in ask.resolved:
                continue
            try:
                found = self._serving(ask).piece(digest)
            except (LayoutUnknown, SnapshotCorrupt) as error:
                self.refuse(requester, ask, index, error)
            else:
                self.send(
                    requester, OutgoingFrame(t.FetchData(ask.request, index), [found], digest)
                )

    def _serving(self, ask: t.FetchRequest) -> RestoreServer:
        served = self.served
        if served is None or served.version != version(ask.generation, ask.step):
            raise LayoutUnknown("this node does not serve that version")
        return served

    def exclude(self, error: SnapshotCorrupt, ask: t.FetchRequest) -> None:
        """Stop offering damaged data of this node, found by this request; report it."""
        _log.warning("%s", error)
        self._excluded(error, ask)

    def refuse(self, requester: str, ask: t.FetchRequest, index: int, error: Exception) -> None:
        """Refuse a request; damaged data is reported to the agent too."""
        if isinstance(error, SnapshotCorrupt):
            self.exclude(error, ask)
        self.send(requester, OutgoingFrame(t.FetchMissing(ask.request, index, str(error))))
