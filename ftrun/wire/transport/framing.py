"""Frames of a byte stream: a length, then a message of bounded size.

Runs in:  every process. Pure.
Takes in: the bytes of a stream, split at any position.
Gives:    complete messages in an `Envelope`, or a `ProtocolError`.

A frame is a little-endian u32 length and that number of bytes of msgpack. The length is checked
before anything is allocated for it. Decoding rejects unknown message types and unknown fields.
"""

import struct
from typing import TypeVar

import msgspec

from ftrun.errors import ProtocolError
from ftrun.wire.messages.envelope import Envelope

MAX_FRAME_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Envelope)


T = TypeVar("T")


def encode_body(envelope: msgspec.Struct) -> bytes:
    """Encode an envelope without the frame's length.

    Raises:
        ProtocolError: the body is longer than `MAX_FRAME_BYTES`.
    """
    body = _ENCODER.encode(envelope)
    if len(body) > MAX_FRAME_BYTES:
        kind = type(getattr(envelope, "body", envelope)).__name__
        raise ProtocolError(
            f"a {kind} of {len(body)} bytes does not fit a frame of at most {MAX_FRAME_BYTES}"
        )
    return body


def decode_body(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    """Decode a body.

    Raises:
        ProtocolError: the bytes are not a message.
    """
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{len(body)} bytes are no message: {error}") from error


def encode(envelope: Envelope) -> bytes:
    body = encode_body(envelope)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Collects the bytes of one stream and returns complete messages in order."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Envelope]:
        """Return the messages that `data` completes.

        Raises:
            ProtocolError: a length is over the limit, or bytes are not a message.
        """
        self._buffer += data
        found: list[Envelope] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes is over the limit of 1 MiB")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            found.append(decode_body(_DECODER, body))
        return found
