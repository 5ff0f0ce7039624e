"""One end of a TCP connection to a process on another node, after the handshake.

Runs in:  agent (control loop thread), SMP.
Takes in: a connected TCP socket and its `AuthSession`.
Gives:    `send`, which never waits, and `receive_ready`; for a loop that polls many sockets.

Not thread-safe. It reads no clock: the caller records when it last received from a peer. A
connection that has raised stays broken and raises the same error again.
"""

import socket
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec

from ftrun.errors import PeerError, PeerLost, ProtocolError
from ftrun.wire.transport.framing import (
    MAX_FRAME_BYTES,
    PREFIX_BYTES,
    body_length,
    check_body,
    decode_body,
    encode_body,
    seal_header,
)
from ftrun.wire.transport.handshake import AuthSession, PeerIdentity
from ftrun.wire.transport.tcp import how_lost

MAX_QUEUED_BYTES = 8 << 20
_RECEIVE_BYTES = 1 << 16
_RECEIVES_AT_ONCE = 64  # limit per call, so that a peer that sends much does not delay the others


class AnyEnvelope(Protocol):
    """Content of a frame: a struct with exactly these fields in this order."""

    @property
    def run_id(self) -> str: ...
    @property
    def generation(self) -> int: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def body(self) -> Any: ...


E = TypeVar("E", bound=AnyEnvelope)


class PeerConnection(Generic[E]):
    """Sealed messages over one connected socket, which it owns.

    Each direction keeps order or fails. If more than `MAX_QUEUED_BYTES` wait for the peer, it
    counts as lost. `envelope` is the struct of the frames, such as `ClusterEnvelope`.
    """

    def __init__(self, sock: socket.socket, session: AuthSession, envelope: type[E]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._wrap = cast("Callable[[str, int, int, Any], msgspec.Struct]", envelope)
        self._decoder = msgspec.msgpack.Decoder(envelope)
        self._out = bytearray()
        self._in = bytearray()
        self._sent = 0
        self._received = 0
        self._broken: PeerError | None = None
        self.session = session
        self.generation = 0
        self.is_corrupted = False  # flip a bit of the next frame: `ftrun inject-fault bitflip-wire`

    @property
    def peer(self) -> PeerIdentity:
        return self.session.peer

    @property
    def address(self) -> str:
        try:
            return str(self._sock.getpeername()[0])
        except OSError:
            return ""

    @property
    def wants_write(self) -> bool:
        """Data is queued. Call `flush` when the socket is writable."""
        return bool(self._out)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, body: object) -> None:
        """Queue a message, and pass to the kernel what it accepts now.

        Raises PeerLost if the connection is lost or the queue too long. After a ProtocolError (the
        message does not fit into a frame) the connection stays usable.
        """
        self._check_whole()
        own = self.session.own
        reported = encode_body(self._wrap(own.run_id, self.generation, own.incarnation, body))
        self._out += seal_header(self.session.send_key, self._sent, reported)
        self._sent += 1
        if self.is_corrupted:
            self.is_corrupted = False
            self._out[-1] ^= 1
        self.flush()
        if len(self._out) > MAX_QUEUED_BYTES:
            raise self._break(PeerLost(peer=str(self.peer), how="silent"))

    def flush(self) -> None:
        """Pass queued bytes to the kernel as far as it accepts them; raises PeerLost."""
        self._check_whole()
        try:
            while self._out:
                with memoryview(self._out) as view:
                    sent = self._sock.send(view[:MAX_FRAME_BYTES], socket.MSG_NOSIGNAL)
                del self._out[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            lost = PeerLost(peer=str(self.peer), how=how_lost(error))
            raise self._break(lost) from error

    def receive_ready(self) -> list[E]:
        """Return messages that have arrived; never waits, and may leave some for the next call.

        Raises PeerLost, ProtocolError. Messages that arrived before a loss are returned first. The
        next call raises the loss; until then the socket stays readable.
        """
        self._check_whole()
        found: list[E] = []
        try:
            for _ in range(_RECEIVES_AT_ONCE):
                data = self._sock.recv(_RECEIVE_BYTES)
                if not data:
                    self._break(PeerLost(peer=str(self.peer), how="closed"))
                    break
                self._in += data
                found += self._take()
        except BlockingIOError:
            pass
        except OSError as error:
            self._break(PeerLost(peer=str(self.peer), how=how_lost(error)))
        except ProtocolError as error:
            raise self._break(error) from None
        if not found:
            self._check_whole()
        return found

    def close(self) -> None:
        self._sock.close()

    def _take(self) -> list[E]:
        found: list[E] = []
        key, at = self.session.receive_key, 0
        with memoryview(self._in) as view:
            while len(view) - at >= PREFIX_BYTES:
                prefix = bytes(view[at : at + PREFIX_BYTES])
                length = body_length(prefix, self._received)
                if len(view) - at - PREFIX_BYTES < length:
                    break
                body = bytes(view[at + PREFIX_BYTES : at + PREFIX_BYTES + length])
                check_body(key, prefix, body)
                found.append(self._checked(decode_body(self._decoder, body)))
                self._received += 1
                at += PREFIX_BYTES + length
        del self._in[:at]
        return found

    def _checked(self, envelope: E) -> E:
        if envelope.run_id != self.session.own.run_id:
            raise ProtocolError(
                f"{self.peer} sent a message of run {envelope.run_id!r}, not of "
                f"{self.session.own.run_id!r}"
            )
        if envelope.incarnation != self.peer.incarnation:
            raise ProtocolError(f"{self.peer} sent a message of another incarnation")
        return envelope

    def _break(self, reason: PeerError) -> PeerError:
        self._broken = reason
        return reason

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise self._broken
