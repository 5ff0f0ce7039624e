"""Bytes <-> frames: a length, a message, a bound.

Runs in: every process. Pure.
Takes in: the bytes of a stream, in whatever pieces they arrive.
Gives:    whole messages inside an `Envelope`, or a `ProtocolError`.

A frame is a little-endian u32 length and that many bytes of msgpack. The bound is checked
before anything is allocated for it. Unknown message types and unknown fields are refused at
decoding, not later.
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
    """A message in its envelope, without the frame's length.

    Raises:
        ProtocolError: it is longer than a frame may be.
    """
    body = _ENCODER.encode(envelope)
    if len(body) > MAX_FRAME_BYTES:
        kind = type(getattr(envelope, "body", envelope)).__name__
        raise ProtocolError(
            f"a {kind} of {len(body)} bytes does not fit a frame of at most {MAX_FRAME_BYTES}"
        )
    return body


def decode_body(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    """The message again.

    Raises:
        ProtocolError: these bytes are none.
    """
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{len(body)} bytes are no message: {error}") from error


def encode(envelope: Envelope) -> bytes:
    """One frame.

    Raises:
        ProtocolError: the message is longer than a frame may be.
    """
    body = encode_body(envelope)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Collects the bytes of one stream and hands out whole messages, in order."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Envelope]:
        """Messages completed by `data`.

        Raises:
            ProtocolError: a length over the bound, or bytes that are no message.
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
