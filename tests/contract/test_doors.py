"""Connections that have proven nothing: how many there may be, and for how long."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from ftrun.errors import PeerTimeout
from ftrun.wire.doors import HELLO_S, Door, Doors
from ftrun.wire.handshake import HANDSHAKE_S, accept_handshake
from ftrun.wire.identity import PeerIdentity

WAIT_S = 60.0


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


def enter(doors: Doors, stack: contextlib.ExitStack, source: str) -> Door | None:
    return doors.enter(connected(stack, source)[1])


def test_one_address_gets_a_quarter_of_the_slots(stack: contextlib.ExitStack) -> None:
    doors = Doors(8)
    taken = [enter(doors, stack, "127.0.0.66") for _ in range(3)]
    assert [door is not None for door in taken] == [True, True, False]
    assert enter(doors, stack, "127.0.0.67") is not None
    assert taken[0] is not None
    taken[0].leave()
    assert enter(doors, stack, "127.0.0.66") is not None


def test_half_of_the_slots_are_held_for_a_short_time_only(stack: contextlib.ExitStack) -> None:
    doors = Doors(8)
    taken = [enter(doors, stack, f"127.0.0.{70 + at}") for at in range(9)]
    times_s = [door.hello_s for door in taken if door is not None]
    assert times_s == [HANDSHAKE_S] * 4 + [HELLO_S] * 4


def identity(node_id: str) -> PeerIdentity:
    return PeerIdentity("run", "agent", node_id, 1)


def test_a_peer_that_says_nothing_is_given_up_after_the_time_for_its_hello(
    stack: contextlib.ExitStack,
) -> None:
    _, here = connected(stack, "127.0.0.66")
    with pytest.raises(PeerTimeout, match=r"0\.1 s"):
        accept_handshake(here, identity("a"), None, hello_s=0.1)
