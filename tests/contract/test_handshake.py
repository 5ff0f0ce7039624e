"""Only two compatible sides that prove the same secret get a session."""

import os
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_settings import make_secret

import ftrun
from ftrun.errors import (
    FtrunError,
    HandshakeRefused,
    PeerError,
    PeerLost,
    PeerTimeout,
    ProtocolError,
)
from ftrun.wire.transport import handshake
from ftrun.wire.transport.handshake import (
    AuthSession,
    PeerIdentity,
    accept_handshake,
    dial_handshake,
)
from ftrun.wire.transport.secret import Secret
from tests.contract import answering

TIMEOUT_S = 30.0
SECRET = Secret(b"canary-canary-canary-canary-0123")
Outcome = AuthSession | Exception
Side = Callable[[socket.socket], AuthSession]
tcp_pair = partial(answering.tcp_pair, TIMEOUT_S)


def who(node_id: str, **other: object) -> PeerIdentity:
    known = {"run_id": "secret-run", "purpose": "agent", "incarnation": 7, "torch": "2.13.0"}
    return msgspec.convert({**known, **other, "node_id": node_id}, PeerIdentity)


A, B = who("node-a"), who("node-b", incarnation=8)


def both(dialler: Side, acceptor: Side) -> tuple[Outcome, Outcome]:
    with tcp_pair() as (left, right):
        return between(left, dialler, right, acceptor)


def between(
    left: socket.socket, dialler: Side, right: socket.socket, acceptor: Side
) -> tuple[Outcome, Outcome]:
    found: dict[str, Outcome] = {}

    def run(name: str, side: Side, sock: socket.socket) -> None:
        try:
            found[name] = side(sock)
        except FtrunError as error:
            found[name] = error
            sock.close()

    other = threading.Thread(target=run, args=("acceptor", acceptor, right))
    other.start()
    run("dialler", dialler, left)
    other.join(TIMEOUT_S)
    assert not other.is_alive()
    return found["dialler"], found["acceptor"]


def dialler(own: PeerIdentity = A, secret: Secret | None = SECRET, **more: object) -> Side:
    how: dict[str, Any] = {"deadline_s": TIMEOUT_S, **more}
    return lambda sock: dial_handshake(sock, own, secret, **how)


def acceptor(own: PeerIdentity = B, secret: Secret | None = SECRET, **more: object) -> Side:
    how: dict[str, Any] = {"deadline_s": TIMEOUT_S, **more}
    return lambda sock: accept_handshake(sock, own, secret, **how)


def sessions(left: Outcome, right: Outcome) -> tuple[AuthSession, AuthSession]:
    assert isinstance(left, AuthSession), left
    assert isinstance(right, AuthSession), right
    return left, right


def test_two_with_one_secret_know_each_other_and_have_a_key_each_way() -> None:
    left, right = sessions(*both(dialler(), acceptor()))
    assert (left.own, left.peer) == (A, B)
    assert (right.own, right.peer) == (B, A)
    assert left.send_key == right.receive_key
    assert left.receive_key == right.send_key
    assert left.send_key != left.receive_key
    assert len(left.send_key) == 32
    assert left.is_authenticated
    assert right.is_authenticated


def test_each_session_has_keys_of_its_own() -> None:
    first, _ = sessions(*both(dialler(), acceptor()))
    again, _ = sessions(*both(dialler(), acceptor()))
    assert len({first.send_key, first.receive_key, again.send_key, again.receive_key}) == 4


def test_two_without_secret_get_a_session_that_is_marked_so() -> None:
    left, right = sessions(*both(dialler(secret=None), acceptor(secret=None)))
    assert (left.peer, right.peer) == (B, A)
    for one in (left, right):
        assert not one.is_authenticated
        assert (one.send_key, one.receive_key) == (b"", b"")


REFUSALS = {
    "wrong secret": (dialler(secret=make_secret()), acceptor(), "secret differs"),
    "only the acceptor has one": (dialler(secret=None), acceptor(), "--secret-file"),
    "only the dialler has one": (dialler(), acceptor(secret=None), "--secret-file"),
    "other run": (dialler(who("node-a", run_id="x")), acceptor(), "--run-id"),
    "other purpose": (dialler(who("node-a", purpose="smp")), acceptor(), "smp"),
    "other torch": (dialler(who("node-a", torch="2.14.1")), acceptor(), "torch 2.14.1"),
    "other ftrun": (dialler(who("node-a", ftrun="9.9")), acceptor(), "ftrun 9.9"),
    "same node": (dialler(who("node-b")), acceptor(), "--node-id"),
    "same node, no secret": (dialler(who("node-b"), None), acceptor(B, None), "--node-id"),
    "not wanted there": (dialler(), acceptor(admit=lambda peer: "full up"), "full up"),
    "not wanted here": (dialler(admit=lambda peer: "not you"), acceptor(), "not you"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_both_sides_get_the_reason(case: str) -> None:
    left, right = both(*REFUSALS[case][:2])
    for outcome in (left, right):
        assert isinstance(outcome, HandshakeRefused), outcome
        assert REFUSALS[case][2] in outcome.reason
        assert "canary" not in str(outcome)
    assert {left.is_ours, right.is_ours} == {True, False}  # type: ignore[union-attr]


@pytest.mark.parametrize("what", ["torch", "ftrun"])
def test_another_version_is_refused_with_both_versions_and_nodes(what: str) -> None:
    own = {what: "2.14.1"}
    left, right = both(dialler(who("node-a", **own)), acceptor(who("node-b", **{what: "2.13.0"})))
    for outcome in (left, right):
        assert isinstance(outcome, HandshakeRefused), outcome
        assert f"node node-a has {what} 2.14.1" in outcome.reason
        assert f"node node-b has {what} 2.13.0" in outcome.reason
        assert "Install the same version on every node" in outcome.reason


def test_another_protocol_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    nonce = os.urandom(32)
    with tcp_pair() as (left, right):
        left.sendall(frame(0xF1, hello(nonce, protocol=999)))
        with pytest.raises(HandshakeRefused) as caught:
            accept_handshake(right, B, SECRET)
        assert "999" in str(caught.value)
        right.close()
        reported = everything(left)
        assert b"your protocol is 999" in reported
        assert f"ftrun {ftrun.__version__}".encode() in reported


def test_admit_sees_the_identity() -> None:
    seen: list[PeerIdentity] = []

    def admit(peer: PeerIdentity) -> str:
        seen.append(peer)
        return ""

    sessions(*both(dialler(admit=admit), acceptor(admit=admit)))
    assert sorted(seen, key=lambda one: one.node_id) == [A, B]


# --- a hostile other side -------------------------------------------------------------------


def frame(kind: int, body: bytes) -> bytes:
    return struct.pack("<BH", kind, len(body)) + body


def hello(nonce: bytes, *, protocol: int = handshake.PROTOCOL_VERSION, secret: int = 1) -> bytes:
    return struct.pack("<8sIB", b"ftrun/hs", protocol, secret) + nonce


HELLO_FRAME_BYTES = len(frame(0xF1, hello(bytes(32))))


def everything(sock: socket.socket) -> bytes:
    found = b""
    with suppress(ConnectionResetError):
        while more := sock.recv(4096):
            found += more
    return found


def answer_to(said: bytes, secret: Secret | None = SECRET) -> tuple[bytes, PeerError]:
    """All bytes that the acceptor sends after this message, and the acceptor's result."""
    with tcp_pair() as (left, right):
        left.sendall(said)
        left.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerError) as caught:
            accept_handshake(right, B, secret, deadline_s=TIMEOUT_S)
        right.close()
        return everything(left), caught.value


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xf1", frame(0xF1, b"short"), frame(0xF2, b"early")],
    ids=["nothing", "http", "cut", "short hello", "claim first"],
)
def test_an_unknown_peer_receives_nothing(said: bytes) -> None:
    message, _ = answer_to(said)
    assert message == b""


def test_a_node_that_cannot_prove_it_receives_a_nonce_and_a_reason_and_nothing_else() -> None:
    claim = bytes(32) + msgspec.msgpack.encode(A)
    message, error = answer_to(frame(0xF1, hello(os.urandom(32))) + frame(0xF2, claim))
    assert isinstance(error, HandshakeRefused)
    greeting, reason = message[:HELLO_FRAME_BYTES], message[HELLO_FRAME_BYTES:]
    assert greeting.startswith(frame(0xF1, hello(bytes(32)))[:-32])
    cause = b"the secret differs. Use the same --secret-file on every node of the run"
    assert reason == frame(0xF4, cause)


def test_what_was_reported_once_opens_nothing_later() -> None:
    said: list[bytes] = []
    left, right = through(lambda name, _, data: said.append(data) if name == "dialler" else None)
    sessions(left, right)
    message, error = answer_to(b"".join(said))
    assert isinstance(error, HandshakeRefused)
    assert len(message) < 2 * HELLO_FRAME_BYTES + 40


def test_what_we_report_cannot_be_reported_back_to_us() -> None:
    with tcp_pair() as (left, right):
        other = threading.Thread(target=mirror, args=(right,))
        other.start()
        with pytest.raises(ProtocolError):
            dial_handshake(left, A, SECRET, deadline_s=TIMEOUT_S)
        left.close()
        other.join(TIMEOUT_S)
        assert not other.is_alive()


def mirror(sock: socket.socket) -> None:
    with suppress(OSError):
        while data := sock.recv(4096):
            sock.sendall(data)


@pytest.mark.parametrize(
    "said",
    [
        *(struct.pack("<BH", kind, 65535) for kind in (0xF1, 0xF2, 0xF4)),
        frame(0xF1, hello(os.urandom(32))) + frame(0xF2, bytes(4090)),
    ],
    ids=["hello", "claim", "reason", "4 KiB in all"],
)
def test_a_long_announcement_is_refused_before_it_comes(said: bytes) -> None:
    with tcp_pair() as (left, right):
        left.sendall(said)
        with pytest.raises(ProtocolError):
            accept_handshake(right, B, SECRET, deadline_s=TIMEOUT_S)


def test_a_process_that_has_dialled_itself_refuses_no_node() -> None:
    with tcp_pair() as (left, right), ThreadPoolExecutor() as threads:
        accepting = threads.submit(accept_handshake, right, A, SECRET, deadline_s=TIMEOUT_S)
        accepting.add_done_callback(lambda _: right.close())
        with pytest.raises(PeerLost):
            dial_handshake(left, A, SECRET, deadline_s=TIMEOUT_S)
        with pytest.raises(ProtocolError, match="is this process itself"):
            accepting.result()


def test_one_that_reports_nothing_is_given_up() -> None:
    with tcp_pair() as (left, right), pytest.raises(PeerTimeout):
        accept_handshake(right, B, SECRET, deadline_s=0.1)
    with tcp_pair() as (left, _), pytest.raises(PeerTimeout):
        dial_handshake(left, A, SECRET, deadline_s=0.1)


def test_one_that_sends_it_byte_by_byte_has_one_deadline_for_all() -> None:
    done = threading.Event()

    def drip(sock: socket.socket) -> None:
        for byte in frame(0xF1, hello(os.urandom(32))) + frame(0xF2, bytes(4000)):
            if done.wait(0.02):
                return
            sock.send(bytes([byte]))

    with tcp_pair() as (left, right):
        other = threading.Thread(target=drip, args=(left,))
        other.start()
        try:
            with pytest.raises(PeerTimeout):
                accept_handshake(right, B, SECRET, deadline_s=0.5)
        finally:
            done.set()
            other.join(TIMEOUT_S)


def test_a_reason_cannot_act_on_a_terminal() -> None:
    with tcp_pair() as (left, right):
        evil = "\x1b[2J\x07red\r\nERROR forged\u202e line " + "x" * 2000
        right.sendall(frame(0xF4, evil.encode() + b"\xff"))
        with pytest.raises(HandshakeRefused) as caught:
            dial_handshake(left, A, SECRET)
    assert caught.value.reason.isprintable()
    assert len(caught.value.reason) <= 500
    assert caught.value.reason.startswith("[2J red ERROR forged line xx")


@pytest.mark.parametrize(
    "identity",
    [
        {"node_id": "a\x1b[2J"},
        {"node_id": "../x"},
        {"node_id": "x" * 101},
        {"run_id": "secret-run\n"},
        {"incarnation": -1},
        {"incarnation": 1 << 63},
        {"purpose": "root"},
        {"torch": "2\n"},
        {"more": 1},
    ],
    ids=repr,
)
def test_an_identity_that_is_none_is_refused_without_secret_too(
    identity: dict[str, object],
) -> None:
    reported = msgspec.msgpack.encode({**msgspec.to_builtins(A), **identity})
    _, error = answer_to(
        frame(0xF1, hello(os.urandom(32), secret=0)) + frame(0xF2, reported), secret=None
    )
    assert isinstance(error, ProtocolError)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_noise_is_refused_and_nothing_else_happens(noise: bytes, greet: bool) -> None:
    start = frame(0xF1, hello(os.urandom(32))) + b"\xf2" if greet else b""
    message, error = answer_to(start + noise)
    assert isinstance(error, PeerLost | ProtocolError | HandshakeRefused)
    assert b"secret-run" not in message
    assert b"node-b" not in message


# --- an attacker in the middle --------------------------------------------------------------


def through(touch: Callable[[str, int, bytes], bytes | None]) -> tuple[Outcome, Outcome]:
    """A handshake through a relay that may change each frame."""
    with tcp_pair() as (left, here), tcp_pair() as (there, right):
        relays = [
            threading.Thread(target=relay, args=("dialler", here, there, touch)),
            threading.Thread(target=relay, args=("acceptor", there, here, touch)),
        ]
        for one in relays:
            one.start()
        outcome = between(left, closing(left, dialler()), right, closing(right, acceptor()))
        for one in relays:
            one.join(TIMEOUT_S)
            assert not one.is_alive()
        return outcome


def closing(sock: socket.socket, side: Side) -> Side:
    def run(_: socket.socket) -> AuthSession:
        try:
            return side(sock)
        finally:
            with suppress(OSError):  # the other side may have closed it already
                sock.shutdown(socket.SHUT_WR)

    return run


def relay(
    name: str,
    source: socket.socket,
    target: socket.socket,
    touch: Callable[[str, int, bytes], bytes | None],
) -> None:
    number = 0
    with suppress(OSError):
        while len(start := source.recv(3, socket.MSG_WAITALL)) == 3:
            body = source.recv(struct.unpack("<BH", start)[1], socket.MSG_WAITALL)
            target.sendall(touch(name, number, start + body) or start + body)
            number += 1
        target.shutdown(socket.SHUT_WR)


FRAMES = [("dialler", 0), ("acceptor", 0), ("dialler", 1), ("acceptor", 1), ("dialler", 2)]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(FRAMES), st.integers(min_value=0))
def test_a_bit_flipped_on_the_way_ends_the_handshake(where: tuple[str, int], bit: int) -> None:
    def flip(name: str, number: int, data: bytes) -> bytes | None:
        if (name, number) != where:
            return None
        changed = bytearray(data)
        at = 24 + bit % (8 * (len(data) - 3))  # behind kind and length: those only stop it
        changed[at // 8] ^= 1 << at % 8
        return bytes(changed)

    left, right = through(flip)
    assert isinstance(right, FtrunError)
    if where != ("dialler", 2):  # by then the dialler has proof of the acceptor already
        assert isinstance(left, FtrunError)


def test_no_attacker_in_the_middle_can_take_the_secret_out_of_use() -> None:
    def report_no_secret(_: str, number: int, data: bytes) -> bytes | None:
        return data[:15] + b"\0" + data[16:] if number == 0 else None

    left, right = through(report_no_secret)
    assert isinstance(left, FtrunError)
    assert isinstance(right, FtrunError)


def test_a_session_does_not_show_its_keys() -> None:
    left, _ = sessions(*both(dialler(), acceptor()))
    shown = repr(replace(left, send_key=b"canary-key", receive_key=b"canary-key"))
    assert "canary" not in shown
