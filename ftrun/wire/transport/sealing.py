"""Bytes with a sequence number and a code that only the two ends of a session can make.

Runs in: agent, SMP. Pure.
Takes in: a session's key for one direction (empty where the run has no secret).
Gives:    a prefix that goes before a body, and its check.

A sealed body is `u32 length | u64 sequence | 16 bytes of keyed blake2b | body`, little-endian; the
code covers all the rest. A control message is one sealed body. Bulk data is a sealed header and
the raw bytes behind it: the header holds their digest, so they are read once, not twice.

Rule 1: a sequence number is used once in a session and direction, and the next one is the only
one that is taken. So nothing can be replayed, dropped or put in another order.
Rule 2: a length is checked before anything is collected for it.
Rule 3: an empty key makes a plain digest. It finds damage, and not malice.
"""

import hmac
import struct
from hashlib import blake2b

from ftrun.errors import ProtocolError

MAX_HEADER_BYTES = 64 * 1024
"""Of a header of bulk data; a control message may be longer."""

Bytes = bytes | bytearray | memoryview

_START = struct.Struct("<IQ")
_CODE_BYTES = 16
PREFIX_BYTES = _START.size + _CODE_BYTES


def seal_header(
    key: bytes, sequence: int, body: bytes, *, limit_bytes: int = MAX_HEADER_BYTES
) -> bytes:
    """Prefix and body, ready to be sent, raw bytes behind it if there are any.

    Raises:
        ProtocolError: the body is longer than the other end would take.
    """
    if len(body) > limit_bytes:
        raise ProtocolError(f"{len(body)} bytes are over the limit of {limit_bytes}")
    start = _START.pack(len(body), sequence)
    return b"".join((start, _code(key, start, body), body))


def body_length(prefix: Bytes, sequence: int, *, limit_bytes: int = MAX_HEADER_BYTES) -> int:
    """How many bytes of body follow a prefix of `PREFIX_BYTES`.

    Not proven yet by anything: read so many, never more, and then ask `check_body`.

    Raises:
        ProtocolError: too many, or this is not the body that is due.
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
    """Whether prefix and body are as the other end of this session has sealed them.

    Raises:
        ProtocolError: they are not.
    """
    view = memoryview(prefix)
    code = _code(key, view[: _START.size], body)
    if not hmac.compare_digest(code, view[_START.size : PREFIX_BYTES]):
        raise ProtocolError("a frame does not carry the code of this session: it is not genuine")


def open_header(
    key: bytes, sequence: int, data: bytes, *, limit_bytes: int = MAX_HEADER_BYTES
) -> bytes:
    """The body of a sealed header that is here as a whole.

    Raises:
        ProtocolError: it is cut, damaged, repeated, or of another session.
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
