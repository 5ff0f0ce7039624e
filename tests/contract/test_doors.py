"""Limits of connections that are not authenticated: their number and their time."""

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
from made_settings import make_secret

from ftrun.agent.cluster import dialing as handshakes
from ftrun.agent.cluster.dialing import AuthenticatedConnection, Handshakes
from ftrun.errors import HandshakeRefused, PeerError, PeerTimeout
from ftrun.membership.events import ConnectFailed
from ftrun.smp import peer_listener as peers
from ftrun.smp.peer_listener import PeerListener, PeerSession
from ftrun.wire.messages.envelope import PROTOCOL_VERSION
from ftrun.wire.transport import doors, handshake
from ftrun.wire.transport.doors import CROWDED_S, HELLO_S, Door, Doors
from ftrun.wire.transport.handshake import (
    HANDSHAKE_S,
    PeerIdentity,
    accept_handshake,
    dial_handshake,
)
from ftrun.wire.transport.secret import Secret
from ftrun.wire.transport.tcp import dial, listen_tcp
from tests.exhausted import no_threads

WAIT_S = 600.0


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


def connected(stack: contextlib.ExitStack, source: str) -> tuple[socket.socket, socket.socket]:
    """The dialler's and the acceptor's end of a connection from this address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname(), WAIT_S, source_address=(source, 0))
        here, _ = listener.accept()
    return stack.enter_context(there), stack.enter_context(here)


def enter(slots: Doors, stack: contextlib.ExitStack, source: str) -> Door | None:
    return slots.enter(connected(stack, source)[1])


def test_one_address_gets_a_quarter_of_the_slots(stack: contextlib.ExitStack) -> None:
    slots = Doors(8)
    taken = [enter(slots, stack, "127.0.0.66") for _ in range(3)]
    assert [door is not None for door in taken] == [True, True, False]
    assert enter(slots, stack, "127.0.0.67") is not None
    assert taken[0] is not None
    taken[0].leave()
    assert enter(slots, stack, "127.0.0.66") is not None


def test_half_of_the_slots_are_held_for_a_short_time_only(stack: contextlib.ExitStack) -> None:
    slots = Doors(8)
    taken = [enter(slots, stack, f"127.0.0.{70 + at}") for at in range(9)]
    times_s = [(door.hello_s, door.handshake_s) for door in taken if door is not None]
    assert times_s == [(HANDSHAKE_S, HANDSHAKE_S)] * 4 + [(HELLO_S, CROWDED_S)] * 4


def identity(node_id: str) -> PeerIdentity:
    return PeerIdentity("run", "agent", node_id, 1)


def test_a_peer_that_reports_nothing_is_given_up_after_the_time_for_its_hello(
    stack: contextlib.ExitStack,
) -> None:
    _, here = connected(stack, "127.0.0.66")
    with pytest.raises(PeerTimeout, match=r"0\.1 s"):
        accept_handshake(here, identity("a"), None, hello_s=0.1)


SLOTS = 8
HOST = "127.0.0.1"
SECRET = make_secret()


@pytest.fixture
def agent_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of an agent with few slots."""
    monkeypatch.setattr(handshakes, "MAX_HANDSHAKES", SLOTS)
    taken: SimpleQueue[AuthenticatedConnection | ConnectFailed] = SimpleQueue()
    accepting = Handshakes(
        identity("a"), SECRET, take=taken.put, dialled=lambda *_: None, serve_ring=lambda _: None
    )
    with contextlib.closing(listen_tcp(HOST, 0)) as listener:
        is_over = threading.Event()

        def accept() -> None:
            with selectors.DefaultSelector() as selector:
                selector.register(listener, selectors.EVENT_READ)
                while not is_over.is_set():
                    if selector.select(0.1):
                        accepting.accept(listener)

        thread = threading.Thread(target=accept)
        thread.start()
        yield int(listener.getsockname()[1])
        is_over.set()
        thread.join()
    while not taken.empty():
        made = taken.get()
        assert isinstance(made, AuthenticatedConnection)
        made.sock.close()


@contextlib.contextmanager
def smp(secret: Secret | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of an SMP with few slots and a long timeout."""
    monkeypatch.setattr(peers, "_MAX_HANDSHAKES", SLOTS)
    listening = PeerListener()
    port = listening.listen([HOST], secret)
    listening.begin(PeerSession(PeerIdentity("run", "smp", "a", 1), 0, 7, timeout_s=10 * WAIT_S))
    yield port
    listening.close()


@pytest.fixture
def smp_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    with smp(SECRET, monkeypatch) as port:
        yield port


def unknown_peer(stack: contextlib.ExitStack, port: int, at: int) -> socket.socket:
    """A connection that sends its first message, which needs no secret, and then nothing more."""
    source = (f"127.0.0.{70 + at}", 0)
    sock = stack.enter_context(socket.create_connection((HOST, port), WAIT_S, source))
    hello = handshake._HELLO.pack(b"ftrun/hs", PROTOCOL_VERSION, True, os.urandom(32))
    sock.sendall(handshake._FRAME.pack(0xF1, len(hello)) + hello)
    size = handshake._FRAME.size + handshake._HELLO.size
    assert len(sock.recv(size, socket.MSG_WAITALL)) == size  # it has a slot
    return sock


@pytest.mark.parametrize("where", ["agent_port", "smp_port"])
def test_a_first_message_without_proof_holds_no_crowded_slot(
    where: str,
    stack: contextlib.ExitStack,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doors, "HANDSHAKE_S", 10 * WAIT_S)
    port = request.getfixturevalue(where)
    held = [unknown_peer(stack, port, at) for at in range(SLOTS)]
    ended = []
    with selectors.DefaultSelector() as selector:
        for at, sock in enumerate(held):
            selector.register(sock, selectors.EVENT_READ, at)
        while len(ended) < SLOTS // 2:
            ready = selector.select(WAIT_S)
            assert ready
            for key, _ in ready:
                with contextlib.suppress(ConnectionResetError):
                    assert held[key.data].recv(1) == b""
                selector.unregister(key.fileobj)
                ended.append(key.data)
    assert sorted(ended) == list(range(SLOTS // 2, SLOTS))


def test_an_unknown_peer_without_a_link_holds_no_slot(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a secret any host completes the handshake, so that must not hold a slot either."""
    monkeypatch.setattr(doors, "HANDSHAKE_S", 1.0)
    with smp(None, monkeypatch) as port:
        sock = stack.enter_context(dial(HOST, port, WAIT_S))
        dial_handshake(sock, PeerIdentity("run", "smp", "b", 1), None, deadline_s=WAIT_S)
        sock.settimeout(WAIT_S)
        assert sock.recv(1) == b""


def test_connections_without_a_thread_hold_no_slot(smp_port: int) -> None:
    with no_threads():
        for _ in range(SLOTS):
            with dial(HOST, smp_port, WAIT_S) as sock:
                sock.settimeout(30)
                assert sock.recv(1) == b""
    with dial(HOST, smp_port, WAIT_S) as sock:
        dial_handshake(sock, PeerIdentity("run", "smp", "b", 1), SECRET, deadline_s=30)


def test_a_host_without_the_secret_writes_one_line(
    smp_port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "HANDSHAKE_S", WAIT_S)  # a loaded machine is slow
    num_refused = 0
    while num_refused < 3:
        me = PeerIdentity("run", "smp", "b", num_refused)
        with dial(HOST, smp_port, WAIT_S) as sock, pytest.raises(PeerError) as caught:
            dial_handshake(sock, me, None, deadline_s=WAIT_S)
        num_refused += caught.type is HandshakeRefused  # or the last ones still have the slots
    for _ in range(3):
        with dial(HOST, smp_port, WAIT_S) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(b"GET / HTTP/1.1")
            assert sock.recv(1) == b""
    give_up_s = time.monotonic() + WAIT_S
    while is_any_named("ftrun-from-?"):  # it writes the line after its answer
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    refused = [one for one in caplog.messages if "rejected" in one]
    assert len(refused) == 1, refused


def is_any_named(thread: str) -> bool:
    return any(one.name == thread for one in threading.enumerate())
