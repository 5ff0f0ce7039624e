"""Frames of a byte stream, plain and sealed.

Runs in:  every process. Pure.
Takes in: the bytes of a stream, split at any position; of sealed frames, a session's key for one
          direction (empty if the run has no secret).
Gives:    complete messages in an `Envelope`; sealed bodies and their verification; or a
          `ProtocolError`.

A frame is a little-endian u32 length and that number of bytes of msgpack. Decoding rejects unknown
message types and unknown fields.

A sealed body is `u32 length | u64 sequence | 16 bytes of keyed blake2b | body`, little-endian. The
code covers all other fields. A control message is one sealed body. Bulk data is a sealed header
followed by the raw bytes. The header contains their digest, so that they are read once, not twice.

Rule 1: A sequence number is used once per session and direction, and only the next number is
        accepted. Nothing can therefore be replayed, dropped or reordered.
Rule 2: A length is checked before any byte is collected for it.
Rule 3: An empty key makes a plain digest. It detects damage, but not an attacker.
"""

import hmac
import struct
from hashlib import blake2b
from typing import TypeVar

import msgspec

from ftrun.errors import ProtocolError
from ftrun.wire.messages.envelope import Envelope

MAX_FRAME_BYTES = 16 << 20  # between nodes; the plan of 1,200 nodes with 8 rails has 1 MiB
MAX_LOCAL_FRAME_BYTES = 64 << 20
"""Between the processes of a node, which have the same user. The addresses of a run's SMPs exceed
1 MiB from 600 nodes with 8 rails on.
"""

_LENGTH = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Envelope)


T = TypeVar("T")


def encode_body(envelope: msgspec.Struct, limit: int = MAX_FRAME_BYTES) -> bytes:
    """Encode an envelope without the length; raises ProtocolError above `limit` bytes."""
    body = _ENCODER.encode(envelope)
    if len(body) > limit:
        kind = type(getattr(envelope, "body", envelope)).__name__
        raise ProtocolError(
            f"a {kind} of {len(body)} bytes does not fit a frame of at most {limit}"
        )
    return body


def decode_body(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    """Raises ProtocolError if the bytes are not a message."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{len(body)} bytes are not a message: {error}") from error


def encode(envelope: Envelope) -> bytes:
    """A frame between processes of a node."""
    body = encode_body(envelope, MAX_LOCAL_FRAME_BYTES)
    return _LENGTH.pack(len(body)) + body


def _check_length(length: int, limit: int = MAX_FRAME_BYTES) -> None:
    if length > limit:
        raise ProtocolError(f"a frame of {length} bytes is over the limit of {limit}")


class FrameReader:
    """Collects the bytes of one local stream and returns complete messages in order."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Envelope]:
        """Return the messages that `data` completes; raises ProtocolError."""
        self._buffer += data
        found: list[Envelope] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            _check_length(length, MAX_LOCAL_FRAME_BYTES)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            found.append(decode_body(_DECODER, body))
        return found


Bytes = bytes | bytearray | memoryview

_START = struct.Struct("<IQ")
_CODE_BYTES = 16
PREFIX_BYTES = _START.size + _CODE_BYTES


def seal_header(key: bytes, sequence: int, body: bytes) -> bytes:
    """Return prefix and body. Raw bytes may follow them on the wire."""
    _check_length(len(body))
    start = _START.pack(len(body), sequence)
    return b"".join((start, _code(key, start, body), body))


def body_length(prefix: Bytes, sequence: int) -> int:
    """Return the number of body bytes that follow a prefix of `PREFIX_BYTES`.

    The length is not authenticated yet. Read exactly that number of bytes, then call `check_body`.
    Raises ProtocolError if the length is over the limit, or the sequence number is not the next
    one.
    """
    length, found = _START.unpack_from(prefix)
    _check_length(length)
    if found != sequence:
        raise ProtocolError(
            f"received frame {found} instead of {sequence}: a frame is repeated, lost or damaged"
        )
    return int(length)


def check_body(key: bytes, prefix: Bytes, body: Bytes) -> None:
    """Raises ProtocolError unless the other end of this session has sealed prefix and body."""
    view = memoryview(prefix)
    code = _code(key, view[: _START.size], body)
    if not hmac.compare_digest(code, view[_START.size : PREFIX_BYTES]):
        raise ProtocolError("a frame does not have the code of this session: it is not authentic")


def _code(key: bytes, start: Bytes, body: Bytes) -> bytes:
    code = blake2b(start, digest_size=_CODE_BYTES, key=key)
    code.update(body)
    return code.digest()
