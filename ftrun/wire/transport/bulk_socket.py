"""One direction of a link between two SMPs: messages, and bulk bytes from memory to memory.

Runs in:  the SMP, in the sender thread or the receiver thread of a link.
Takes in: a connected TCP socket and the session of its handshake.
Gives:    frames: a message under the session's code and sequence number, then raw bytes, which go
          from mapped memory to mapped memory.

A digest inside the message covers the raw bytes, so that they are hashed once. A mismatch loses
these bytes, not the link.

Rule 1: The length that a frame announces allocates nothing. The receiver supplies the buffers. If
        it has none, it reads the bytes and discards them.
Rule 2: A peer may send nothing between frames for any time. It must not pause inside a frame.
"""

import contextlib
import socket
from collections.abc import Sequence

import msgspec
import xxhash

from ftrun import clock
from ftrun.errors import PeerLost, PeerTimeout, ProtocolError
from ftrun.wire.cluster.transfer import AnyTransfer, TransferEnvelope
from ftrun.wire.transport.framing import (
    PREFIX_BYTES,
    body_length,
    check_body,
    decode_body,
    encode_body,
    seal_header,
)
from ftrun.wire.transport.handshake import AuthSession
from ftrun.wire.transport.tcp import how_lost, sent_bytes, unresponsive_s

MAX_RAW_BYTES = 1 << 31
_MAX_VECTORS = 512
_SCRATCH_BYTES = 1 << 18
# Created once, here: msgspec 0.22 crashes if two threads create a decoder for the same types at
# once.
_DECODER = msgspec.msgpack.Decoder(TransferEnvelope)

Bytes = bytes | bytearray | memoryview


class BulkSocket:
    """One direction of a connected socket. One thread may use it at a time, except for `interrupt`.

    It owns the socket. `timeout_s`: a peer may not accept no data, or pause in a frame, for
    longer.
    """

    def __init__(self, sock: socket.socket, session: AuthSession, *, timeout_s: float) -> None:
        self._sock = sock
        self._session = session
        self._idle_timeout_s = timeout_s
        self._sequence = 0
        self._timeout_s: float | None = None
        self._until_s: float | None = None
        self.num_bytes = 0
        sock.settimeout(None)

    @property
    def peer(self) -> str:
        return str(self._session.peer)

    @property
    def node_id(self) -> str:
        return self._session.peer.node_id

    @property
    def own_host(self) -> str:
        return str(self._sock.getsockname()[0])

    @property
    def wire_bytes(self) -> int:
        """Bytes that the kernel has sent, retransmissions included."""
        return sent_bytes(self._sock)

    @property
    def unresponsive_s(self) -> float:
        return unresponsive_s(self._sock)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(
        self,
        generation: int,
        body: AnyTransfer,
        raw: Sequence[Bytes] = (),
        *,
        raw_digest: int | None = None,
    ) -> None:
        """Send a message, followed by raw buffers in order, without a copy.

        `raw_digest` covers all buffers; None if the body contains it. Raises PeerLost or
        PeerTimeout if the link is unusable.
        """
        size = sum(map(len, raw))
        reported = encode_body(TransferEnvelope(generation, body, size, raw_digest))
        key = self._session.send_key
        head = seal_header(key, self._sequence, reported)
        self._sequence += 1
        left = [memoryview(part).cast("B") for part in (head, *raw) if len(part)]
        try:
            self._wait_at_most(self._idle_timeout_s)
            while left:
                left = _rest(left, self._sock.sendmsg(left[:_MAX_VECTORS]))
        except OSError as error:
            raise self._lost(error) from error
        self.num_bytes += len(head) + size

    def receive(self, *, within_s: float | None = None) -> TransferEnvelope:
        """Receive the next message. `receive_raw` must then read its raw bytes, if there are any.

        `within_s` limits the whole message; None waits without a limit for its first byte. Raises
        PeerLost, PeerTimeout or ProtocolError.
        """
        self._until_s = None if within_s is None else clock.now_s() + within_s
        prefix = bytearray(PREFIX_BYTES)
        self._read([memoryview(prefix)], may_wait=True)
        length = body_length(prefix, self._sequence)
        body = bytearray(length)
        self._read([memoryview(body)])
        check_body(self._session.receive_key, prefix, body)
        self._sequence += 1
        self._until_s = None
        envelope = decode_body(_DECODER, bytes(body))
        if not 0 <= envelope.raw_bytes <= MAX_RAW_BYTES:
            raise ProtocolError(f"{self.peer} announces {envelope.raw_bytes} bytes")
        return envelope

    def receive_raw(self, envelope: TransferEnvelope, into: Sequence[memoryview] | None) -> bool:
        """Read the raw bytes behind a message into buffers of this total size; None discards them.

        Returns whether the bytes are in the buffers and match the message's digest, if it has one.
        """
        if into is None or sum(map(len, into)) != envelope.raw_bytes:
            self._skip(envelope.raw_bytes)
            return False
        self._read(list(into))
        if envelope.raw_digest is None:
            return True
        return digest_of(into) == envelope.raw_digest

    def interrupt(self) -> None:
        """Shut the socket down, from any thread: a call that waits on it raises PeerLost."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _skip(self, num_bytes: int) -> None:
        scratch = memoryview(bytearray(min(num_bytes, _SCRATCH_BYTES)))
        while num_bytes:
            part = scratch[: min(num_bytes, len(scratch))]
            self._read([part])
            num_bytes -= len(part)

    def _read(self, left: list[memoryview], *, may_wait: bool = False) -> None:
        left = [view for view in left if len(view)]
        waits = may_wait
        try:
            while left:
                self._wait_at_most(self._left_s(None if waits else self._idle_timeout_s))
                got, *_ = self._sock.recvmsg_into(left[:_MAX_VECTORS])
                if not got:
                    raise PeerLost(peer=self.peer, how="closed")
                self.num_bytes += got
                left, waits = _rest(left, got), False
        except OSError as error:
            raise self._lost(error) from error

    def _left_s(self, timeout_s: float | None) -> float | None:
        if self._until_s is None:
            return timeout_s
        left_s = self._until_s - clock.now_s()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def _wait_at_most(self, timeout_s: float | None) -> None:
        if timeout_s != self._timeout_s:
            self._sock.settimeout(timeout_s)
            self._timeout_s = timeout_s

    def _lost(self, error: OSError) -> PeerLost | PeerTimeout:
        if isinstance(error, TimeoutError):
            return PeerTimeout(peer=self.peer, waited_s=self._idle_timeout_s)
        return PeerLost(peer=self.peer, how=how_lost(error))


def digest_of(parts: Sequence[Bytes]) -> int:
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0])
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()


def _rest(left: list[memoryview], done: int) -> list[memoryview]:
    at = 0
    while at < len(left) and done >= len(left[at]):
        done -= len(left[at])
        at += 1
    left = left[at:]
    if done:
        left[0] = left[0][done:]
    return left
