"""Sealed frames: a sequence number and a code that only the two ends of a session can compute.

Runs in:  agent, SMP. Pure.
Takes in: a session's key for one direction (empty if the run has no secret).
Gives:    a prefix that precedes a body, and its verification.

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

from ftrun.errors import ProtocolError

MAX_HEADER_BYTES = 64 * 1024
"""Limit for a header of bulk data; a control message may be longer."""

Bytes = bytes | bytearray | memoryview

_START = struct.Struct("<IQ")
_CODE_BYTES = 16
PREFIX_BYTES = _START.size + _CODE_BYTES


def seal_header(
    key: bytes, sequence: int, body: bytes, *, limit_bytes: int = MAX_HEADER_BYTES
) -> bytes:
    """Return prefix and body. Raw bytes may follow them on the wire.

    Raises:
        ProtocolError: the body is longer than the other end accepts.
    """
    if len(body) > limit_bytes:
        raise ProtocolError(f"{len(body)} bytes are over the limit of {limit_bytes}")
    start = _START.pack(len(body), sequence)
    return b"".join((start, _code(key, start, body), body))


def body_length(prefix: Bytes, sequence: int, *, limit_bytes: int = MAX_HEADER_BYTES) -> int:
    """Return the number of body bytes that follow a prefix of `PREFIX_BYTES`.

    The length is not authenticated yet. Read exactly that number of bytes, then call `check_body`.

    Raises:
        ProtocolError: the length is over the limit, or the sequence number is not the next one.
    """
    length, found = _START.unpack_from(prefix)
    if length > limit_bytes:
        raise ProtocolError(f"a frame of {length} bytes is over the limit of {limit_bytes}")
    if found != sequence:
        raise ProtocolError(
            f"frame {found} came where frame {sequence} was due: it is repeated, lost or damaged"
        )
    return int(length)


def check_body(key: bytes, prefix: Bytes, body: Bytes) -> None:
    """Verify that the other end of this session has sealed prefix and body.

    Raises:
        ProtocolError: the code does not match.
    """
    view = memoryview(prefix)
    code = _code(key, view[: _START.size], body)
    if not hmac.compare_digest(code, view[_START.size : PREFIX_BYTES]):
        raise ProtocolError("a frame does not carry the code of this session: it is not genuine")


def open_header(
    key: bytes, sequence: int, data: bytes, *, limit_bytes: int = MAX_HEADER_BYTES
) -> bytes:
    """Verify a complete sealed header, and return its body.

    Raises:
        ProtocolError: it is truncated, damaged, repeated, or of another session.
    """
    if len(data) < PREFIX_BYTES:
        raise ProtocolError(f"a header has {PREFIX_BYTES} bytes at least, and here are {len(data)}")
    length = body_length(data, sequence, limit_bytes=limit_bytes)
    body = data[PREFIX_BYTES:]
    if len(body) != length:
        raise ProtocolError(f"a header announces {length} bytes, and {len(body)} are there")
    check_body(key, data, body)
    return body


def _code(key: bytes, start: Bytes, body: Bytes) -> bytes:
    code = blake2b(start, digest_size=_CODE_BYTES, key=key)
    code.update(body)
    return code.digest()
