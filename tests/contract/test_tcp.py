"""A socket listens at one address, and the states of an unresponsive peer are distinguished."""

import errno
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftrun.errors import AddressTaken, HowLost, PeerLost, UsageError
from ftrun.wire.transport import tcp
from ftrun.wire.transport.tcp import (
    bind_address,
    dial,
    how_lost,
    interface_for,
    is_local_address,
    is_own_name,
    listen_tcp,
    tune,
)
from tests.contract.answering import closed_port, full_port
from tests.exhausted import no_descriptors

TIMEOUT_S = 30.0
UNKNOWN_FAMILY = socket.AF_UNSPEC
"""No kernel makes a socket of it, as a kernel without IPv6 makes none of that family."""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen_tcp("127.0.0.1", 0) as sock:
        yield sock


@pytest.fixture
def full() -> Iterator[int]:
    with full_port() as port:
        yield port


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def lost(host: str, port: int, deadline_s: float = TIMEOUT_S) -> HowLost:
    with pytest.raises(PeerLost) as caught:
        dial(host, port, deadline_s)
    assert host in str(caught.value)
    return caught.value.how


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "0", "::ffff:0.0.0.0"])
def test_all_networks_at_once_are_refused(host: str) -> None:
    with pytest.raises(UsageError) as caught:
        listen_tcp(host, 0)
    assert "--bind" in str(caught.value)


def test_only_one_address_listens(listener: socket.socket) -> None:
    assert lost("127.0.0.2", port_of(listener)) == "refused"
    dial("127.0.0.1", port_of(listener), TIMEOUT_S).close()


def test_a_port_that_is_taken_is_reported(listener: socket.socket) -> None:
    with pytest.raises(AddressTaken) as caught:
        listen_tcp("127.0.0.1", port_of(listener))
    assert str(port_of(listener)) in str(caught.value)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        listen_tcp("192.0.2.1", 0)
    assert "192.0.2.1" in str(caught.value)
    with pytest.raises(UsageError):
        listen_tcp("no-such-host.invalid", 0)


def test_no_listener_is_refused() -> None:
    with closed_port("127.0.0.1") as port:
        assert lost("127.0.0.1", port) == "refused"


def test_a_socket_that_is_connected_to_itself_is_refused() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.connect(sock.getsockname())
        with pytest.raises(ConnectionRefusedError):
            tcp.check_not_itself(sock)


def test_no_answer_is_unresponsive(full: int) -> None:
    assert lost("127.0.0.1", full, deadline_s=0.3) == "silent"


def test_a_name_without_address_is_unknown() -> None:
    assert lost("no-such-host.invalid", 1) == "unknown"


def test_refused_at_one_address_and_unresponsive_at_another_is_unresponsive(
    full: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    found = [(*kind, ("127.0.0.3", full)), (*kind, ("127.0.0.1", full))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert lost("two-addresses", full, deadline_s=0.4) == "silent"


@pytest.mark.parametrize(
    ("number", "how", "words"),
    [
        (errno.ECONNREFUSED, "refused", "n2 refuses the connection: nothing listens there"),
        # A reset proves no death: the connection may have been cut.
        (errno.ECONNRESET, "reset",
         "n2 has reset the connection: it was killed, or the connection was cut"),
        (errno.EPIPE, "closed",
         "n2 has closed the connection: it ended, or closed this connection alone"),
        (errno.ETIMEDOUT, "silent", "n2 does not answer: it is frozen, off, or cut off"),
        (errno.EHOSTUNREACH, "unreachable", "n2 cannot be reached: the network has no route to it"),
        (errno.ENETUNREACH, "unreachable", "n2 cannot be reached: the network has no route to it"),
        (errno.EIO, "closed",
         "n2 has closed the connection: it ended, or closed this connection alone"),
    ],
)  # fmt: skip
def test_errors_of_the_kernel_have_words(number: int, how: HowLost, words: str) -> None:
    error = OSError(number, "as the kernel says")
    assert how_lost(error) == how
    assert str(PeerLost(peer="n2", how=how)) == words


def test_a_connection_is_tuned(listener: socket.socket) -> None:
    with dial("127.0.0.1", port_of(listener), TIMEOUT_S) as sock:
        tcp_option: Any = lambda name: sock.getsockopt(socket.IPPROTO_TCP, name)  # noqa: E731
        assert sock.gettimeout() is None
        assert tcp_option(socket.TCP_NODELAY)
        assert tcp_option(socket.TCP_USER_TIMEOUT) == 3000
        assert tcp_option(socket.TCP_KEEPIDLE) == 1
        tune(sock, bulk=True, user_timeout_s=7.5)
        assert tcp_option(socket.TCP_USER_TIMEOUT) == 7500
        allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text()
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).strip(b"\0")
        assert name == b"cubic" or "cubic" not in allowed


def test_a_lack_of_descriptors_is_a_connection_that_cannot_be_made(
    listener: socket.socket,
) -> None:
    with no_descriptors():
        assert lost("127.0.0.1", port_of(listener)) == "closed"


def test_a_name_of_this_node_is_its_own_whatever_its_address_is() -> None:
    name = socket.gethostname()
    assert is_own_name(name)
    assert is_own_name(f"{name.upper()}.train.default.svc.cluster.local")
    for other in ("localhost", "10.1.2.3", "::1", f"{name}x", f"x.{name}", ""):
        assert not is_own_name(other)


def test_addresses_of_this_node_are_known() -> None:
    assert is_local_address("127.0.0.1")
    assert is_local_address("localhost")
    assert not is_local_address("192.0.2.1")
    assert not is_local_address("0.0.0.0")
    assert not is_local_address("no-such-host.invalid")
    assert interface_for("127.0.0.1", 1) == "127.0.0.1"
    with pytest.raises(PeerLost):
        interface_for("no-such-host.invalid", 1)


def test_an_address_of_a_family_that_the_kernel_lacks_is_skipped(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def both(host: str, port: int, **flags: Any) -> list[Any]:
        found: list[Any] = real(host, port, **flags)
        return [(UNKNOWN_FAMILY, *info[1:]) for info in found] + found

    monkeypatch.setattr(socket, "getaddrinfo", both)
    assert is_local_address("127.0.0.1")
    assert not is_local_address("192.0.2.1")
    assert interface_for("127.0.0.1", 1) == "127.0.0.1"
    dial("127.0.0.1", port_of(listener), TIMEOUT_S).close()
    with pytest.raises(UsageError, match="cannot listen"):
        listen_tcp("127.0.0.1", 0)


def test_loopback_is_bound_only_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bind_address("127.0.0.1", 1) == "127.0.0.1"
    assert bind_address("localhost", 1) in ("127.0.0.1", "::1")
    # As Debian writes it: the host's own name is 127.0.1.1, at which no other node finds it.
    real = tcp._addresses
    monkeypatch.setattr(
        tcp, "_addresses", lambda host, port: real("127.0.1.1" if host == "me" else host, port)
    )
    try:
        expected = interface_for("192.0.2.1", 1)
    except PeerLost:
        pytest.skip("no route out of this machine")
    assert bind_address("me", 1) == expected
