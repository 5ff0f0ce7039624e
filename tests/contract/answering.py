"""Agents for tests: one that answers a connection, one that sends nothing, and a refusing port."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ftrun.errors import PeerError
from ftrun.wire.transport.handshake import PeerIdentity, accept_handshake
from ftrun.wire.transport.secret import Secret
from ftrun.wire.transport.tcp import listen_tcp
from tests.contract import descriptors

WAIT_S = 600.0


@contextmanager
def answering(
    own: PeerIdentity,
    secret: Secret | None,
    serve: Callable[[socket.socket], None],
    *,
    is_unresponsive: bool = False,
) -> Iterator[tuple[str, int]]:
    """The address of an agent that accepts one connection.

    `serve` runs after the handshake; a mute agent does nothing instead.
    """
    listener = listen_tcp("127.0.0.1", 0)
    done = threading.Event()

    def answer() -> None:
        with suppress(OSError, PeerError):
            sock, _ = listener.accept()
            with sock:
                accept_handshake(sock, own, secret, deadline_s=WAIT_S)
                if is_unresponsive:
                    done.wait(WAIT_S)
                else:
                    serve(sock)

    server = threading.Thread(target=answer)
    server.start()
    try:
        yield listener.getsockname()
    finally:
        done.set()
        # Closing alone would not wake the thread that waits in accept.
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        server.join(WAIT_S)


@contextmanager
def closed_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A port that refuses connections and is reserved, so that no other process gets it."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        yield sock.getsockname()[1]


@contextmanager
def full_port(host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """A port whose kernel gives no answer, as after a cut: its queue of connections is full."""
    with socket.socket() as sock, socket.socket() as one, socket.socket() as two:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(0)
        for client in (one, two):
            client.setblocking(False)
            client.connect_ex(sock.getsockname())
        # The kernel may need a moment.
        assert descriptors.select([sock], [], [], WAIT_S)[0]
        yield sock.getsockname()[1]


@contextmanager
def tcp_pair(timeout_s: float | None = None) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Dialler's and acceptor's end of one TCP connection."""
    with listen_tcp("127.0.0.1", 0) as listener:
        left = socket.create_connection(listener.getsockname(), timeout_s)
        right, _ = listener.accept()
    left.settimeout(timeout_s)
    right.settimeout(timeout_s)
    with left, right:
        yield left, right
