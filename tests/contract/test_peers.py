"""A link from another node that ends is reported if its node has not connected again."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest
from made_settings import make_secret

from ftrun.smp.peer_link import FETCH
from ftrun.smp.peer_listener import PeerListener, PeerSession
from ftrun.wire.cluster.transfer import LinkHello, RoundStored
from ftrun.wire.messages.smp import NodeAddress
from ftrun.wire.transport.bulk_socket import BulkSocket
from ftrun.wire.transport.handshake import PeerIdentity, accept_handshake, dial_handshake
from ftrun.wire.transport.tcp import dial, listen_tcp

WAIT_S = 600.0
TIMEOUT_S = 1.0
"""Timeout of tests that wait for its end."""
LONG_S = 30.0
"""Timeout that must not end, however busy the machine is."""
SECRET = make_secret()
HOST = "127.0.0.1"


class Reported:
    """The events that the server receives."""

    def __init__(self) -> None:
        self.events: SimpleQueue[tuple[str, str]] = SimpleQueue()

    def received(self, *_: Any) -> None:
        self.events.put(("received", ""))

    def lost(self, node_id: str, purpose: str, reason: str) -> None:
        self.events.put(("lost", reason))

    def linked(self, node_id: str, purpose: str) -> None:
        self.events.put(("linked", ""))


def identity(node_id: str) -> PeerIdentity:
    return PeerIdentity("run", "smp", node_id, 1)


class Here:
    """An SMP's links; the one to node b stays connected."""

    def __init__(self, timeout_s: float) -> None:
        self.reported = Reported()
        self.peers = PeerListener()
        self.peers.events = self.reported
        self.port = self.peers.listen([HOST], SECRET)
        self.peers.begin(PeerSession(identity("a"), 0, 7, timeout_s))
        self.b = listen_tcp(HOST, 0)
        place = NodeAddress("b", 1, HOST, self.b.getsockname()[1], [1])
        self.peers.link(place, FETCH)
        self.b.settimeout(WAIT_S)
        self.own, _ = self.b.accept()
        accept_handshake(self.own, identity("b"), SECRET, deadline_s=WAIT_S)

    def linked_by_b(self) -> BulkSocket:
        sock = dial(HOST, self.port, WAIT_S)
        session = dial_handshake(sock, identity("b"), SECRET, deadline_s=WAIT_S)
        made = BulkSocket(sock, session, timeout_s=WAIT_S)
        made.send(0, LinkHello(0, FETCH, 0))
        made.send(0, RoundStored(0, 0, 0))
        self.next("received")
        return made

    def next(self, kind: str) -> str:
        """The reason of the next event of this kind."""
        while True:
            found, reason = self.reported.events.get(timeout=WAIT_S)
            if found == kind:
                return reason


@pytest.fixture
def here(request: pytest.FixtureRequest) -> Iterator[Here]:
    made = Here(getattr(request, "param", LONG_S))
    yield made
    made.peers.close()
    made.own.close()
    made.b.close()


@pytest.mark.parametrize("here", [TIMEOUT_S], indirect=True)
def test_a_node_that_does_not_connect_again_is_reported_in_the_end(here: Here) -> None:
    made = here.linked_by_b()
    started_s = time.monotonic()
    made.close()
    assert "closed" in here.next("lost")
    assert time.monotonic() - started_s >= TIMEOUT_S * 0.9


def test_a_node_that_connects_again_is_not_lost(here: Here) -> None:
    here.linked_by_b().close()
    second = here.linked_by_b()
    # The thread of the first link has waited for the second, and ends without an event.
    give_up_s = time.monotonic() + LONG_S / 2
    while [thread.name for thread in threading.enumerate()].count("ftrun-from-b") > 1:
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    reported = [here.reported.events.get() for _ in range(here.reported.events.qsize())]
    assert "lost" not in [kind for kind, _ in reported]
    second.close()


def test_unresponsive_unknown_peers_of_one_address_keep_no_node_out(here: Here) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(150):  # more than there are slots
            unknown_peer = socket.create_connection(
                (HOST, here.port), WAIT_S, source_address=("127.0.0.66", 0)
            )
            stack.enter_context(unknown_peer)
        here.linked_by_b().close()


def test_a_node_that_breaks_the_rules_is_lost_at_once(here: Here) -> None:
    made = here.linked_by_b()
    made.send(1, RoundStored(0, 0, 0))
    started_s = time.monotonic()
    assert "another generation" in here.next("lost")
    assert time.monotonic() - started_s < LONG_S / 2
    made.close()
