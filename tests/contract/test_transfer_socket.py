"""Frames between SMPs arrive complete and in order, with their bytes in the receiver's buffers."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from ftrun.errors import PeerError, PeerLost, PeerTimeout, ProtocolError
from ftrun.wire.cluster.transfer import BlockData, LinkHello, RoundStored, TransferEnvelope
from ftrun.wire.transport.bulk_socket import BulkSocket, digest_of
from ftrun.wire.transport.handshake import AuthSession, PeerIdentity

TIMEOUT_S = 60.0
SHORT_S = 0.5
"""Limit for a side whose wait is to end."""

KEY = bytes(range(32))
Ends = tuple[BulkSocket, BulkSocket, socket.socket]


def session(name: str, peer: str, key: bytes = KEY) -> AuthSession:
    own, other = (PeerIdentity("run", "smp", one, 1) for one in (name, peer))
    return AuthSession(own, other, key, key, bool(key))


def link(
    sock: socket.socket, own: str, key: bytes = KEY, timeout_s: float = TIMEOUT_S
) -> BulkSocket:
    peer = "b" if own == "a" else "a"
    return BulkSocket(sock, session(own, peer, key), timeout_s=timeout_s)


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """The sender, the receiver, and the raw socket under the sender."""
    timeout_s = getattr(request, "param", TIMEOUT_S)
    ours, theirs = socket.socketpair()
    sender, receiver = link(ours, "a", KEY, timeout_s), link(theirs, "b", KEY, timeout_s)
    yield sender, receiver, ours
    sender.close()
    receiver.close()


impatient = pytest.mark.parametrize("ends", [SHORT_S], indirect=True, ids=["impatient"])


def test_bytes_go_from_many_buffers_to_many_others(ends: Ends) -> None:
    sender, receiver, _ = ends
    parts = [bytes([at % 251]) * (at * 37) for at in range(700)]
    whole = b"".join(parts)
    body = BlockData(0, 1, 1, b"header")
    thread = threading.Thread(
        target=lambda: sender.send(3, body, parts, raw_digest=digest_of(parts))
    )
    thread.start()
    got = receiver.receive()
    assert got == TransferEnvelope(3, body, len(whole), digest_of([whole]))
    room = memoryview(bytearray(len(whole)))
    cuts = [0, 1, 4096, 5000, len(whole)]
    views = [room[a:b] for a, b in pairwise(cuts)]
    assert receiver.receive_raw(got, views)
    assert bytes(room) == whole
    thread.join()


def test_what_no_node_wants_is_skipped_and_the_next_frame_comes(ends: Ends) -> None:
    sender, receiver, _ = ends
    sender.send(0, BlockData(0, 1, 1, b""), [b"x" * 10_000])
    sender.send(0, RoundStored(0, 1, 1))
    first = receiver.receive()
    assert not receiver.receive_raw(first, None)
    assert receiver.receive().body == RoundStored(0, 1, 1)


def test_a_place_of_another_length_counts_as_none(ends: Ends) -> None:
    sender, receiver, _ = ends
    sender.send(0, BlockData(0, 1, 1, b""), [b"x" * 1000])
    sender.send(0, RoundStored(0, 1, 1))
    room = memoryview(bytearray(999))
    assert not receiver.receive_raw(receiver.receive(), [room])
    assert not any(room)
    assert receiver.receive().body == RoundStored(0, 1, 1)


def test_bytes_that_do_not_match_cost_the_bytes_and_not_the_link(ends: Ends) -> None:
    sender, receiver, _ = ends
    sender.send(0, BlockData(0, 1, 1, b""), [b"x" * 1000], raw_digest=digest_of([b"y"]))
    sender.send(0, RoundStored(0, 1, 1))
    room = memoryview(bytearray(1000))
    assert not receiver.receive_raw(receiver.receive(), [room])
    assert receiver.receive().body == RoundStored(0, 1, 1)


@pytest.mark.parametrize("at", [0, 4, 12, 20, 40])
def test_a_flipped_bit_in_a_message_ends_the_link(at: int) -> None:
    ours, theirs = socket.socketpair()
    between, last = socket.socketpair()
    sender, receiver = link(ours, "a"), link(last, "b")
    try:
        sender.send(0, LinkHello(0, "protect", 5))
        data = bytearray(theirs.recv(1000))
        data[at] ^= 2
        between.sendall(data)
        between.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerError):
            receiver.receive()
    finally:
        for one in (sender, receiver, theirs, between):
            one.close()


def test_a_repeated_frame_and_a_strange_key_end_the_link(ends: Ends) -> None:
    ours, theirs = socket.socketpair()
    unknown_peer, receiver = link(ours, "a", bytes(32)), link(theirs, "b")
    unknown_peer.send(0, RoundStored(0, 1, 1))
    with pytest.raises(ProtocolError):
        receiver.receive()
    unknown_peer.close()
    receiver.close()
    sender, receiver, raw = ends
    sender.send(0, RoundStored(0, 1, 1))
    assert receiver.receive().body == RoundStored(0, 1, 1)
    again = link(raw, "a")
    again.send(0, RoundStored(0, 1, 1))
    with pytest.raises(ProtocolError):
        receiver.receive()


@impatient
def test_a_peer_that_stops_in_the_midst_of_a_frame_is_given_up(ends: Ends) -> None:
    _, receiver, raw = ends
    raw.sendall(b"\x20")
    with pytest.raises(PeerTimeout):
        receiver.receive()


@impatient
def test_a_peer_that_takes_nothing_is_given_up(ends: Ends) -> None:
    sender, _, _ = ends
    with pytest.raises(PeerTimeout):
        sender.send(0, BlockData(0, 1, 1, b""), [bytes(1 << 26)])


def test_a_closed_peer_is_lost_and_an_interrupt_ends_a_wait(ends: Ends) -> None:
    sender, receiver, _ = ends
    waiting = threading.Timer(0.05, receiver.interrupt)
    waiting.start()
    with pytest.raises(PeerLost):
        receiver.receive()
    waiting.join()
    receiver.close()
    with pytest.raises(PeerLost):
        sender.send(0, RoundStored(0, 1, 1))


def test_sessions_have_no_place_in_words() -> None:
    assert KEY.hex() not in repr(replace(session("a", "b")))
