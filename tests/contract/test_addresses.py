"""The first of several addresses that works is used; a refusal counts only if it is certain."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from ftrun.errors import HandshakeRefused, PeerError, PeerLost
from ftrun.wire.cluster.generation import Rail
from ftrun.wire.transport.address_race import PeerAddress, reach, source_to
from ftrun.wire.transport.tcp import listen_tcp, pace, unacknowledged_bytes
from tests.contract.answering import closed_port, full_port

TIMEOUT_S = 30.0
SOON_S = 1.0
TRIES = 5
"""Attempts of which the quickest counts, so that it is ftrun's time and not the machine's."""


@contextmanager
def listening(host: str) -> Iterator[PeerAddress]:
    with listen_tcp(host, 0) as sock:
        yield PeerAddress(host, sock.getsockname()[1])


@contextmanager
def unresponsive(host: str) -> Iterator[PeerAddress]:
    with full_port(host) as port:
        yield PeerAddress(host, port)


@contextmanager
def nobody(host: str) -> Iterator[PeerAddress]:
    with closed_port(host) as port:
        yield PeerAddress(host, port)


def confidence(way: PeerAddress) -> PeerAddress:
    return PeerAddress(way.host, way.port, way.source, is_sure=True)


def take(sock: socket.socket, way: PeerAddress) -> str:
    assert sock.gettimeout() is None
    with sock:
        return f"{sock.getpeername()[0]} from {sock.getsockname()[0]}"


def lost(*ways: PeerAddress, deadline_s: float = TIMEOUT_S) -> PeerLost:
    with pytest.raises(PeerLost) as caught:
        reach(ways, take, deadline_s=deadline_s)
    return caught.value


def test_the_first_address_is_taken_where_it_answers() -> None:
    with listening("127.0.0.2") as first, listening("127.0.0.3") as second:
        assert reach([first, second], take, deadline_s=TIMEOUT_S)[1] == first
        assert reach([second, first], take, deadline_s=TIMEOUT_S)[1] == second
        assert reach([second], take, deadline_s=TIMEOUT_S)[1] == second


def test_an_address_that_does_not_answer_costs_next_to_nothing() -> None:
    took_s = []
    with unresponsive("127.0.0.2") as first, listening("127.0.0.3") as second:
        for _ in range(TRIES):
            started_s = time.monotonic()
            found, way = reach([confidence(first), second], take, deadline_s=TIMEOUT_S)
            took_s.append(time.monotonic() - started_s)
            assert (way, found.split()[0]) == (second, "127.0.0.3")
    assert min(took_s) < SOON_S


def test_no_answer_anywhere_is_unresponsive() -> None:
    with unresponsive("127.0.0.2") as first, unresponsive("127.0.0.4") as other:
        assert lost(first, other, deadline_s=0.4).how == "silent"


def test_no_node_at_any_address_is_refused() -> None:
    with nobody("127.0.0.2") as one, nobody("127.0.0.3") as other:
        assert lost(one, other).how == "refused"


def test_a_refusal_is_believed_where_it_is_sure_and_nowhere_else() -> None:
    took_s = []
    with unresponsive("127.0.0.2") as cut, nobody("127.0.0.3") as closed:
        assert lost(confidence(cut), closed, deadline_s=0.4).how == "silent"
        assert lost(closed, cut, deadline_s=0.4).how == "silent"
        for _ in range(TRIES):
            started_s = time.monotonic()
            assert lost(confidence(cut), confidence(closed)).how == "refused"
            assert lost(confidence(closed), cut).how == "refused"
            took_s.append(time.monotonic() - started_s)
    assert min(took_s) < SOON_S, "it is acted on at once"


def test_a_refusal_at_an_address_that_is_not_sure_is_passed_over() -> None:
    with nobody("127.0.0.2") as closed, listening("127.0.0.3") as second:
        assert reach([closed, second], take, deadline_s=TIMEOUT_S)[1] == second


def test_a_node_that_is_not_meant_is_passed_over() -> None:
    def meet(sock: socket.socket, way: PeerAddress) -> str:
        if way.host == "127.0.0.2":
            raise HandshakeRefused(peer="n1", reason="it is another", is_ours=True)
        return take(sock, way)

    with listening("127.0.0.2") as first, listening("127.0.0.3") as second:
        assert reach([first, second], meet, deadline_s=TIMEOUT_S)[1] == second
        with pytest.raises(HandshakeRefused):
            reach([confidence(first), second], meet, deadline_s=TIMEOUT_S)
        with pytest.raises(HandshakeRefused):
            reach([first], meet, deadline_s=TIMEOUT_S)
        with nobody("127.0.0.4") as closed, pytest.raises(HandshakeRefused):
            reach([first, closed], meet, deadline_s=TIMEOUT_S)
        with unresponsive("127.0.0.4") as cut, pytest.raises(PeerLost) as caught:
            reach([first, cut], meet, deadline_s=0.4)
        assert caught.value.how == "silent"


def test_sockets_of_a_race_are_closed() -> None:
    seen: list[socket.socket] = []

    def break_off(sock: socket.socket, way: PeerAddress) -> None:
        seen.append(sock)
        raise PeerError("no")

    with (
        listening("127.0.0.2") as first,
        listening("127.0.0.3") as second,
        pytest.raises(PeerError),
    ):
        reach([first, second], break_off, deadline_s=TIMEOUT_S)
    assert [sock.fileno() for sock in seen] == [-1, -1]


def test_it_leaves_over_the_rail_that_was_meant() -> None:
    own = [Rail("lo", "127.0.0.9", 16), Rail("eth1", "127.9.0.1", 16), Rail("eth2", "fd00::1", 64)]
    assert source_to("127.0.77.1", own) == "127.0.0.9"
    assert source_to("127.9.1.1", own) == "127.9.0.1"
    assert source_to("fd00::77", own) == "fd00::1"
    assert source_to("10.0.0.1", own) == source_to("not-an-address", own) == ""
    assert source_to("127.0.0.1", [Rail("lo", "127.0.0.9")]) == "", "its network is not known"
    with listening("127.0.0.2") as first, listening("127.0.0.3") as second:
        bound = PeerAddress(first.host, first.port, source="127.0.0.9")
        gone = PeerAddress(second.host, second.port, source="192.0.2.1")
        assert reach([bound, second], take, deadline_s=TIMEOUT_S)[0] == "127.0.0.2 from 127.0.0.9"
        assert reach([gone, bound], take, deadline_s=TIMEOUT_S)[1] == gone


def test_what_was_not_acknowledged_is_reported() -> None:
    with listen_tcp("127.0.0.1", 0) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with socket.create_connection(listener.getsockname()) as sock:
            assert unacknowledged_bytes(sock.fileno()) == 0
            sock.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    sock.send(bytes(1 << 16))
            assert unacknowledged_bytes(sock.fileno()) > 0
    assert unacknowledged_bytes(sock.fileno()) == 0


@pytest.mark.slow
def test_the_kernel_keeps_to_a_pace() -> None:
    wanted_bytes_s, size = 40e6, 20_000_000
    rates = []
    for _ in range(TRIES):
        rates.append(paced_rate(wanted_bytes_s, size))
        assert rates[-1] < 1.3 * wanted_bytes_s
        if rates[-1] > 0.7 * wanted_bytes_s:
            break
    assert max(rates) > 0.7 * wanted_bytes_s


def paced_rate(wanted_bytes_s: float, size: int) -> float:
    """Bytes per second over a connection with this limit."""
    got = threading.Event()

    def read(sock: socket.socket) -> None:
        with sock:
            while sock.recv(1 << 20):
                pass
        got.set()

    with listen_tcp("127.0.0.1", 0) as listener:
        with socket.create_connection(listener.getsockname()) as sock:
            # Any user may set this one.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
            pace(sock, 0)
            pace(sock, wanted_bytes_s)
            reader = threading.Thread(target=read, args=(listener.accept()[0],))
            reader.start()
            started_s = time.monotonic()
            sock.sendall(bytes(size))
        assert got.wait(TIMEOUT_S)
        took_s = time.monotonic() - started_s
        reader.join(TIMEOUT_S)
    return size / took_s
