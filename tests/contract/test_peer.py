"""Messages between nodes arrive complete, in order and from this session, or not at all."""

import gc
import os
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_settings import make_secret

from ftrun.errors import PeerLost, ProtocolError
from ftrun.wire.messages.envelope import Done, Envelope, Refused
from ftrun.wire.messages.smp import PersistRunState
from ftrun.wire.transport.framing import MAX_FRAME_BYTES, PREFIX_BYTES, encode_body, seal_header
from ftrun.wire.transport.handshake import (
    AuthSession,
    PeerIdentity,
    accept_handshake,
    dial_handshake,
)
from ftrun.wire.transport.peer_connection import PeerConnection
from ftrun.wire.transport.secret import Secret
from ftrun.wire.transport.tcp import listen_tcp
from tests.contract import descriptors

TIMEOUT_S = 30.0
A, B = (PeerIdentity("run", "agent", name, number) for name, number in (("a", 5), ("b", 6)))
Connection = PeerConnection[Envelope]

each_kind = pytest.mark.parametrize("secret", [make_secret(), None], ids=["secret", "no secret"])


def tcp_sockets() -> tuple[socket.socket, socket.socket]:
    with listen_tcp("127.0.0.1", 0) as listener:
        left = socket.create_connection(listener.getsockname(), TIMEOUT_S)
        return left, listener.accept()[0]


def met(secret: Secret | None) -> tuple[socket.socket, AuthSession, socket.socket, AuthSession]:
    left, right = tcp_sockets()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept_handshake, right, B, secret, deadline_s=TIMEOUT_S)
        dialled = dial_handshake(left, A, secret, deadline_s=TIMEOUT_S)
        return left, dialled, right, accepted.result(TIMEOUT_S)


@contextmanager
def ends(secret: Secret | None) -> Iterator[tuple[Connection, Connection]]:
    gc.collect()  # what other tests have left is not counted
    before = len(os.listdir("/proc/self/fd"))
    left, mine, right, theirs = met(secret)
    a, b = PeerConnection(left, mine, Envelope), PeerConnection(right, theirs, Envelope)
    yield a, b
    a.close()
    b.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def wait_for(connection: Connection, count: int) -> list[Envelope]:
    found: list[Envelope] = []
    while len(found) < count:
        assert descriptors.select([connection], [], [], TIMEOUT_S)[0]
        found += connection.receive_ready()
    return found


@pytest.fixture(scope="module")
def sealed_with() -> AuthSession:
    """A's session with B; its keys make the frames of the tests below."""
    left, mine, right, _ = met(make_secret())
    left.close()
    right.close()
    return mine


def frames(session: AuthSession, count: int, *, first: int = 0, **other: object) -> list[bytes]:
    """Numbered messages as A sends them."""
    known = {"run_id": "run", "generation": 1, "incarnation": A.incarnation, **other}
    return [
        seal_header(
            session.send_key,
            number,
            encode_body(Envelope(**known, body=Refused(f"number {number}"))),  # type: ignore[arg-type]
        )
        for number in range(first, first + count)
    ]


def swapped(session: AuthSession) -> AuthSession:
    return AuthSession(B, A, session.receive_key, session.send_key, session.is_authenticated)


def fed(session: AuthSession, data: bytes) -> tuple[list[str], Exception | None]:
    """The messages that B reads from these bytes of A, and how the stream ends."""
    left, right = tcp_sockets()
    connection = PeerConnection(right, swapped(session), Envelope)
    found: list[str] = []
    try:
        left.sendall(data)
        left.shutdown(socket.SHUT_WR)
        while descriptors.select([connection], [], [], TIMEOUT_S)[0]:
            found += [one.body.reason for one in connection.receive_ready()]  # type: ignore[union-attr]
    except (ProtocolError, PeerLost) as error:
        return found, error
    finally:
        left.close()
        connection.close()
    raise AssertionError("the end of the stream was not seen")


def is_refused(session: AuthSession, data: bytes) -> bool:
    found, error = fed(session, data)
    return not found and type(error) is ProtocolError


def words(count: int) -> list[str]:
    return [f"number {number}" for number in range(count)]


@each_kind
def test_messages_arrive_in_order_both_ways(secret: Secret | None) -> None:
    with ends(secret) as (a, b):
        a.generation = 3
        for number in range(20):
            a.send(Refused(f"number {number}"))
            b.send(Done())
        assert wait_for(b, 20) == [
            Envelope("run", 3, A.incarnation, Refused(text)) for text in words(20)
        ]
        assert wait_for(a, 20) == [Envelope("run", 0, B.incarnation, Done())] * 20
        assert (a.peer, b.peer) == (B, A)
        assert b.receive_ready() == []


def test_a_message_longer_than_any_buffer_goes_in_parts() -> None:
    with ends(make_secret()) as (a, b):
        body = PersistRunState(os.urandom(900_000))
        for _ in range(5):
            a.send(body)
        assert a.wants_write
        found: list[Envelope] = []
        while len(found) < 5:
            readable, writable, _ = descriptors.select(
                [b], [a] if a.wants_write else [], [], TIMEOUT_S
            )
            assert readable or writable
            if writable:
                a.flush()
            if readable:
                found += b.receive_ready()
        assert not a.wants_write
        assert [one.body for one in found] == [body] * 5


def test_a_peer_that_takes_nothing_counts_as_lost_and_never_holds_us_up() -> None:
    with ends(make_secret()) as (a, _):
        with pytest.raises(PeerLost) as caught:
            flood(a)
        assert caught.value.how == "silent"
        for again in (lambda: a.send(Done()), a.flush, a.receive_ready):
            with pytest.raises(PeerLost):
                again()


def flood(connection: Connection) -> None:
    for _ in range(1000):
        connection.send(PersistRunState(bytes(900_000)))


def test_a_message_over_the_limit_is_refused_and_the_next_one_goes() -> None:
    with ends(make_secret()) as (a, b):
        with pytest.raises(ProtocolError):
            a.send(PersistRunState(bytes(MAX_FRAME_BYTES)))
        a.send(Done())
        assert wait_for(b, 1)[0].body == Done()


def test_one_talkative_peer_does_not_keep_us() -> None:
    with ends(make_secret()) as (a, b):
        stop = threading.Event()

        def talk() -> None:
            while not stop.is_set():
                descriptors.select([], [a], [], 0.1)
                if a.wants_write:
                    a.flush()
                else:
                    a.send(PersistRunState(bytes(10_000)))

        talker = threading.Thread(target=talk)
        talker.start()
        try:
            for _ in range(20):
                assert descriptors.select([b], [], [], TIMEOUT_S)[0]
                assert b.receive_ready() is not None
        finally:
            stop.set()
            talker.join(TIMEOUT_S)


def test_the_messages_before_an_end_are_given_first() -> None:
    with ends(make_secret()) as (a, b):
        a.send(Refused("last words"))
        a.close()
        assert [one.body for one in wait_for(b, 1)] == [Refused("last words")]
        with pytest.raises(PeerLost) as caught:
            wait_for(b, 1)
        assert caught.value.how == "closed"
        with pytest.raises(PeerLost) as again:
            b.send(Done())
        assert again.value.how == "closed"


def test_a_reset_is_distinguished_from_an_end() -> None:
    left, mine, right, theirs = met(make_secret())
    connection = PeerConnection(right, theirs, Envelope)
    left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    left.close()
    with pytest.raises(PeerLost) as caught:
        wait_for(connection, 1)
    assert caught.value.how == "reset"
    assert "node a" in str(caught.value)
    connection.close()
    assert mine.peer == B


# --- what is not genuine --------------------------------------------------------------------


def test_frames_of_this_session_are_taken(sealed_with: AuthSession) -> None:
    found, error = fed(sealed_with, b"".join(frames(sealed_with, 5)))
    assert found == words(5)
    assert isinstance(error, PeerLost)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_they_may_come_in_any_pieces(sealed_with: AuthSession, data: st.DataObject) -> None:
    stream = b"".join(frames(sealed_with, 3))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    left, right = tcp_sockets()
    connection = PeerConnection(right, swapped(sealed_with), Envelope)
    found: list[Envelope] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        left.sendall(stream[start:end])
        found += connection.receive_ready()
    found += wait_for(connection, 3 - len(found))
    assert [one.body for one in found] == [Refused(text) for text in words(3)]
    left.close()
    connection.close()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_flipped_bit_anywhere_is_never_a_message(
    sealed_with: AuthSession, data: st.DataObject
) -> None:
    for session in (sealed_with, AuthSession(A, B, b"", b"", is_authenticated=False)):
        sent = frames(session, 3)
        stream = bytearray(b"".join(sent))
        bit = data.draw(st.integers(0, 8 * len(stream) - 1))
        stream[bit // 8] ^= 1 << bit % 8
        found, error = fed(session, bytes(stream))
        whole = (bit // 8) // len(sent[0])
        assert found in (words(whole), [])
        # A longer length waits for bytes that never come: lost, and no message either.
        is_length = (bit // 8) % len(sent[0]) < 4
        assert isinstance(error, ProtocolError) or (is_length and isinstance(error, PeerLost))


@settings(max_examples=150, deadline=None)
@given(noise=st.binary(max_size=400), whole=st.integers(0, 2))
def test_noise_is_never_a_message(sealed_with: AuthSession, noise: bytes, whole: int) -> None:
    found, error = fed(sealed_with, b"".join(frames(sealed_with, whole)) + noise)
    assert found in (words(whole), [])
    assert isinstance(error, ProtocolError | PeerLost)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_cut_stream_gives_its_whole_messages(
    sealed_with: AuthSession, data: st.DataObject
) -> None:
    sent = frames(sealed_with, 3)
    stream = b"".join(sent)
    cut = data.draw(st.integers(0, len(stream)))
    found, error = fed(sealed_with, stream[:cut])
    assert found == words(cut // len(sent[0]))
    assert isinstance(error, PeerLost)


@pytest.mark.parametrize(
    "order",
    [[0, 0], [0, 1, 0], [1], [0, 2], [1, 0], [0, 1, 1, 2]],
    ids=["twice", "replayed", "first lost", "lost", "reordered", "twice in between"],
)
def test_repeated_lost_and_reordered_frames_are_refused(
    sealed_with: AuthSession, order: list[int]
) -> None:
    sent = frames(sealed_with, 3)
    assert is_refused(sealed_with, b"".join(sent[number] for number in order))


def test_frames_of_another_session_are_refused(sealed_with: AuthSession) -> None:
    left, other, right, _ = met(make_secret())
    left.close()
    right.close()
    assert is_refused(sealed_with, frames(other, 1)[0])


def test_our_own_frames_reported_back_to_us_are_refused(sealed_with: AuthSession) -> None:
    # What A has sent, to A: the two directions have two keys.
    assert is_refused(swapped(sealed_with), frames(sealed_with, 1)[0])


@pytest.mark.parametrize("other", [{"run_id": "other"}, {"incarnation": 4}], ids=repr)
def test_another_run_or_incarnation_in_the_envelope_is_refused(
    sealed_with: AuthSession, other: dict[str, object]
) -> None:
    assert is_refused(sealed_with, frames(sealed_with, 1, **other)[0])


NO_TEXT = encode_body(Envelope("run", 1, A.incarnation, Refused("abcd")))
NO_TEXT = NO_TEXT.replace(b"abcd", b"\xff\xfe\xfd\xfc")


@pytest.mark.parametrize("text", [b"\xff\xfe", b"\xc1", b"", NO_TEXT])
def test_what_is_sealed_and_no_message_is_refused(sealed_with: AuthSession, text: bytes) -> None:
    assert is_refused(sealed_with, seal_header(sealed_with.send_key, 0, text))


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 0xFFFFFFFF])
def test_a_length_over_the_limit_is_refused_before_anything_is_collected(
    sealed_with: AuthSession, length: int
) -> None:
    prefix = struct.pack("<IQ", length, 0) + bytes(16)
    assert len(prefix) == PREFIX_BYTES
    assert is_refused(sealed_with, prefix)


def test_a_stream_of_large_forged_frames_costs_bounded_memory(sealed_with: AuthSession) -> None:
    left, right = tcp_sockets()
    connection = PeerConnection(right, swapped(sealed_with), Envelope)
    forged = struct.pack("<IQ", MAX_FRAME_BYTES, 0) + bytes(16 + 3 * MAX_FRAME_BYTES)
    sender = threading.Thread(target=send_all, args=(left, forged))
    tracemalloc.start()
    try:
        sender.start()
        with pytest.raises(ProtocolError):
            wait_for(connection, 1)
        assert tracemalloc.get_traced_memory()[1] < 5 * MAX_FRAME_BYTES
    finally:
        tracemalloc.stop()
        connection.close()
        sender.join(TIMEOUT_S)
        left.close()


def send_all(sock: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        sock.sendall(data)
