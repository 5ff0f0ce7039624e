"""A sealed header opens only with its own key and number, and undamaged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.errors import ProtocolError
from ftrun.wire.transport.framing import (
    MAX_FRAME_BYTES,
    PREFIX_BYTES,
    body_length,
    check_body,
    seal_header,
)

KEY = bytes(range(32))


def open_header(key: bytes, number: int, data: bytes) -> bytes:
    """Open a header as a socket does: read the prefix, then the announced number of bytes."""
    prefix, body = data[:PREFIX_BYTES], data[PREFIX_BYTES:]
    if len(prefix) < PREFIX_BYTES or body_length(prefix, number) != len(body):
        raise ProtocolError("cut")
    check_body(key, prefix, body)
    return body


@given(st.binary(max_size=300), st.integers(0, 2**64 - 1), st.sampled_from([KEY, b""]))
def test_what_was_sealed_opens(body: bytes, number: int, key: bytes) -> None:
    assert open_header(key, number, seal_header(key, number, body)) == body


@given(st.binary(max_size=100), st.data(), st.sampled_from([KEY, b""]))
def test_one_flipped_bit_anywhere_is_found(body: bytes, data: st.DataObject, key: bytes) -> None:
    sealed = bytearray(seal_header(key, 5, body))
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        open_header(key, 5, bytes(sealed))


@pytest.mark.parametrize("number", [3, 5, 2**40])
def test_another_number_is_refused(number: int) -> None:
    with pytest.raises(ProtocolError):
        open_header(KEY, number, seal_header(KEY, 4, b"body"))


def test_the_number_is_under_the_code_too() -> None:
    sealed = bytearray(seal_header(KEY, 4, b"body"))
    sealed[4] = 5
    with pytest.raises(ProtocolError):
        open_header(KEY, 5, bytes(sealed))


@pytest.mark.parametrize("key", [bytes(reversed(KEY)), b""], ids=["another", "none"])
def test_another_key_is_refused(key: bytes) -> None:
    with pytest.raises(ProtocolError):
        open_header(KEY, 0, seal_header(key, 0, b"body"))


def test_a_length_over_the_limit_is_refused_before_its_bytes_come() -> None:
    sealed = bytearray(seal_header(KEY, 0, bytes(MAX_FRAME_BYTES)))
    assert body_length(sealed[:PREFIX_BYTES], 0) == MAX_FRAME_BYTES
    sealed[:4] = (MAX_FRAME_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(ProtocolError):
        body_length(sealed[:PREFIX_BYTES], 0)
    with pytest.raises(ProtocolError):
        seal_header(KEY, 0, bytes(MAX_FRAME_BYTES + 1))


def test_it_works_on_memory_that_was_received_into() -> None:
    sealed = seal_header(KEY, 7, b"header of a block")
    memory = memoryview(bytearray(sealed + b"raw bytes behind it"))
    prefix = memory[:PREFIX_BYTES]
    body = memory[PREFIX_BYTES : PREFIX_BYTES + body_length(prefix, 7)]
    check_body(KEY, prefix, body)
    assert bytes(body) == b"header of a block"


def test_a_message_names_no_key() -> None:
    with pytest.raises(ProtocolError) as caught:
        open_header(KEY, 0, seal_header(b"", 0, b"body"))
    assert KEY.hex() not in str(caught.value)
    assert repr(KEY) not in repr(caught.value)
