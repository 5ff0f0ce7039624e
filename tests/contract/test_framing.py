"""Messages do not depend on how a stream is divided; other bytes are rejected."""

import contextlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.errors import ProtocolError
from ftrun.wire.cluster.generation import Rail
from ftrun.wire.messages.envelope import Done, Envelope, Refused
from ftrun.wire.messages.smp import (
    BeginGeneration,
    Inventory,
    NodeAddress,
    PersistRunState,
    PreviousGroup,
    ShardOffer,
)
from ftrun.wire.transport.framing import (
    MAX_FRAME_BYTES,
    MAX_LOCAL_FRAME_BYTES,
    FrameReader,
    encode,
    encode_body,
)

MESSAGES = [
    Envelope("run", 1, 2, Done()),
    Envelope("run", 1, 2, Refused("because")),
    Envelope("run", 3, 0, Inventory([ShardOffer(0, 1, 2, 3, 4)]), num_fds=2),
]
STREAM = b"".join(encode(one) for one in MESSAGES)


def test_a_stream_may_be_cut_at_every_byte() -> None:
    for cut in range(len(STREAM) + 1):
        reader = FrameReader()
        assert reader.feed(STREAM[:cut]) + reader.feed(STREAM[cut:]) == MESSAGES


def test_a_stream_may_come_byte_by_byte() -> None:
    reader = FrameReader()
    found = [one for byte in STREAM for one in reader.feed(bytes([byte]))]
    assert found == MESSAGES


def test_a_length_over_the_limit_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(ProtocolError):
        FrameReader().feed(struct.pack("<I", MAX_LOCAL_FRAME_BYTES + 1))


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(ProtocolError):
        encode(Envelope("run", 0, 0, PersistRunState(bytes(MAX_LOCAL_FRAME_BYTES))))
    with pytest.raises(ProtocolError):
        encode_body(Envelope("run", 0, 0, PersistRunState(bytes(MAX_FRAME_BYTES))))


def test_the_addresses_of_16384_nodes_with_8_rails_fit_a_local_frame() -> None:
    def address(node: int) -> NodeAddress:
        rails = [Rail(f"rail{at}", f"10.{at}.{node >> 8}.{node & 255}", 16) for at in range(8)]
        ranks = list(range(8 * node, 8 * node + 8))
        return NodeAddress(f"node-{node:05d}", 1 << 61, rails[0].host, 45_000, ranks, rails)

    groups = [
        PreviousGroup([address(node) for node in range(at, at + 8)], 1, 1)
        for at in range(0, 16384, 8)
    ]
    message = BeginGeneration(2, 8 * 16384, list(range(8)), restored=(1, 9), restore_from=groups)
    sent = Envelope("run", 0, 0, message)
    frame = encode(sent)
    assert len(frame) > 8 << 20
    assert FrameReader().feed(frame) == [sent]


def packed(run_id: object, **body: object) -> bytes:
    return msgspec.msgpack.encode(
        {"run_id": run_id, "generation": 0, "incarnation": 0, "body": body}
    )


NO_MESSAGES = {
    "empty": b"",
    "no msgpack": b"\xc1",
    "fields missing": msgspec.msgpack.encode({"run_id": "run"}),
    "unknown type": packed("r", type="Explode"),
    "unknown field": packed("r", type="Done", x=1),
    "wrong kind": packed(5, type="Done"),
    "no text": msgspec.msgpack.encode(MESSAGES[1]).replace(b"because", b"\xff" * 7),
}


@pytest.mark.parametrize("body", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        FrameReader().feed(struct.pack("<I", len(body)) + body)


@given(st.binary(max_size=200))
def test_noise_is_a_message_or_a_protocol_error_and_nothing_else(noise: bytes) -> None:
    reader = FrameReader()
    with contextlib.suppress(ProtocolError):
        assert all(isinstance(one, Envelope) for one in reader.feed(noise))
