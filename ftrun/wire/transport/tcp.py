"""Creates, resolves and tunes TCP sockets between nodes; no protocol.

A process listens at one address only, never at all addresses of a machine. Only hosts on the
network that the user named can therefore reach a run.
"""

import contextlib
import errno
import fcntl
import ipaddress
import socket
import sys
import termios
from typing import Any

from ftrun import clock
from ftrun.errors import AddressTaken, HowLost, PeerLost, UsageError

USER_TIMEOUT_S = 3.0  # sent bytes that stay unacknowledged longer end a connection
_BACKLOG = 128
_SO_MAX_PACING_RATE = 47
_PACED_UNSENT_BYTES = 1 << 18
_BYTES_SENT_AT = 200  # offset of tcpi_bytes_sent, since Linux 4.19
_LAST_ACK_AT = 56  # offset of tcpi_last_ack_recv in struct tcp_info, in ms
_ANYWHERE_ELSE = "192.0.2.1"  # RFC 5737: an unassigned address, to find the default route
_HOW: dict[int | None, HowLost] = {
    errno.ECONNREFUSED: "refused",
    errno.ECONNRESET: "reset",
    errno.ECONNABORTED: "reset",
    errno.EPIPE: "closed",
    errno.ENOTCONN: "closed",
    errno.ETIMEDOUT: "silent",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETUNREACH: "unreachable",
    errno.EHOSTDOWN: "unreachable",
    errno.ENETDOWN: "unreachable",
    errno.EADDRNOTAVAIL: "unreachable",
    errno.EAFNOSUPPORT: "unreachable",
}
_Info = tuple[int, int, int, str, Any]


def listen_tcp(host: str, port: int) -> socket.socket:
    """Listen at one address of this node; port 0 takes any free port.

    Raises UsageError if the host is no address of this node or means all of them, AddressTaken if
    another process listens there.
    """
    family, kind, number, _, address = _addresses(host, port)[0]
    if ipaddress.ip_address(_plain(address[0])).is_unspecified:
        raise UsageError(
            f"{host or 'an empty host'} means every network of this machine. Pass the address "
            "at which other nodes reach it with --bind"
        )
    sock: socket.socket | None = None
    try:
        sock = socket.socket(family, kind, number)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        if sock is not None:
            sock.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressTaken(host=host, port=port) from error
        raise UsageError(
            f"cannot listen at {host} port {port}: {error.strerror}. Pass an address of this "
            "machine with --bind, and use a port above 1023"
        ) from error
    return sock


def dial(
    host: str, port: int, deadline_s: float, *, source: tuple[str, str] | None = None
) -> socket.socket:
    """Return a tuned, blocking socket that is connected to a node.

    All addresses of the name are tried within `deadline_s`. The resolver has its own deadlines for
    the name look-up. `source` is an interface of this node and its address, over which to connect.
    Raises PeerLost; `how` is "refused" only if no other address may hide a live peer.
    """
    peer = f"{host} port {port}"
    give_up_s = clock.now_s() + deadline_s
    try:
        found = _addresses(host, port)
    except UsageError as error:
        raise PeerLost(peer=peer, how="unknown") from error
    failed: list[OSError] = []
    for number, (family, kind, protocol, _, address) in enumerate(found):
        left_s = (give_up_s - clock.now_s()) / (len(found) - number)
        sock: socket.socket | None = None
        try:
            sock = socket.socket(family, kind, protocol)
            tune(sock, bulk=False)
            if source is not None:
                _bind_source(sock, *source, host=address[0])
            sock.settimeout(max(left_s, 0.001))
            sock.connect(address)
            check_not_itself(sock)
        except OSError as error:
            if sock is not None:
                sock.close()
            failed.append(error)
            continue
        sock.settimeout(None)
        return sock
    hows = [how_lost(error) for error in failed]
    # A peer that refuses at one address may be alive at another address that does not answer.
    order: tuple[HowLost, ...] = ("silent", "reset", "closed", "refused", "unreachable")
    how: HowLost = next((one for one in order if one in hows), "unreachable")
    raise PeerLost(peer=peer, how=how) from failed[-1]


def tune(sock: socket.socket, *, bulk: bool, user_timeout_s: float = USER_TIMEOUT_S) -> None:
    """Send messages without delay, and detect a vanished peer within `user_timeout_s`.

    That limit for unacknowledged bytes also ends a connection whose reader takes nothing for this
    time. Large transfers (`bulk`) use cubic if the kernel permits it. The kernel's bbr lowered the
    rate between two nodes of one machine (erasure coding study: 2.36 GB/s with cubic, 1.61 GB/s
    with bbr).
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(user_timeout_s * 1000))
    if bulk:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


def pace(sock: socket.socket, bytes_per_s: float) -> bool:
    """Limit the send rate in the kernel; 0: no limit. Returns whether the kernel accepts it.

    TCP enforces the limit itself (since Linux 4.13), with any queue discipline. Measured without
    fq: 10.4 and 100.8 MB/s for limits of 10 and 100 MB/s (Linux 6.18, loopback).
    """
    if bytes_per_s <= 0:
        return True
    reported = max(1, round(bytes_per_s)).to_bytes(8, sys.byteorder)
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, reported)
        # A short kernel queue, because data that is not bulk would wait behind it.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _PACED_UNSENT_BYTES)
    except OSError:
        return False
    return True


def sent_bytes(sock: socket.socket) -> int:
    """Bytes of data that this connection has sent, retransmissions included.

    Raises OSError if it is closed or the kernel does not count them (before Linux 4.19).
    """
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT_AT + 8)
    if len(info) < _BYTES_SENT_AT + 8:
        raise OSError(errno.ENOPROTOOPT, "the kernel does not count sent bytes")
    return int.from_bytes(info[_BYTES_SENT_AT:], sys.byteorder)


def unresponsive_s(sock: socket.socket) -> float:
    """Seconds since the peer's kernel last acknowledged anything; 0 if unknown.

    With the keep-alive probes of `tune`, a reachable peer acknowledges about once a second. It does
    so even if its process is stopped or reads nothing.
    """
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK_AT + 4)
    except OSError:  # it was closed
        return 0.0
    if len(info) < _LAST_ACK_AT + 4:
        return 0.0
    return int.from_bytes(info[_LAST_ACK_AT:], sys.byteorder) / 1000


def unacknowledged_bytes(fd: int) -> int:
    """Bytes given to a TCP socket that the other kernel has not acknowledged; 0 if unknown."""
    try:
        found = fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # it was closed
        return 0
    return int.from_bytes(found, sys.byteorder)


def name_of_peer(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except (OSError, ValueError):
        return "a disconnected process"
    return f"{host} port {port}"


def how_lost(error: OSError) -> HowLost:
    if isinstance(error, TimeoutError):
        return "silent"
    return _HOW.get(error.errno, "closed")


def interface_for(host: str, port: int) -> str:
    """Own address from which a host is reached; nothing is sent. PeerLost if there is no route."""
    peer = f"{host} port {port}"
    try:
        found = _addresses(host, port)
    except UsageError as error:
        raise PeerLost(peer=peer, how="unknown") from error
    for family, _, _, _, address in found:
        # A kernel without IPv6 refuses the socket of such an address.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    raise PeerLost(peer=peer, how="unreachable")


def is_own_name(host: str) -> bool:
    """Whether it is this machine's name; its address in the DNS may be that of an earlier pod."""
    label = host.partition(".")[0].lower()
    is_name = bool(label) and not label.isdigit() and ":" not in host and label != "localhost"
    return is_name and label == socket.gethostname().partition(".")[0].lower()


def is_local_address(host: str) -> bool:
    try:
        found = _addresses(host, 0)
    except UsageError:
        return False
    return any(_is_ours(info) for info in found)


def bind_address(endpoint_host: str, endpoint_port: int) -> str:
    """Address at which other nodes reach this node, in a run with this rendezvous endpoint.

    On the endpoint's own node, the name may resolve to a loopback address (Debian maps the host
    name to 127.0.1.1), at which no other node reaches it. Loopback is returned only if the endpoint
    names it. Raises PeerLost if there is no route.
    """
    if not is_local_address(endpoint_host):
        return interface_for(endpoint_host, endpoint_port)
    found = [str(info[4][0]) for info in _addresses(endpoint_host, endpoint_port) if _is_ours(info)]
    for text in found:
        if not ipaddress.ip_address(_plain(text)).is_loopback:
            return text
    if endpoint_host.startswith(("localhost", "127.")) or endpoint_host == "::1":
        return found[0]
    return interface_for(_ANYWHERE_ELSE, endpoint_port)


def _bind_source(sock: socket.socket, name: str, address: str, *, host: str) -> None:
    """Bind to this interface, because two interfaces may be in one network."""
    sock.bind((address, 0))
    if not is_local_address(host):
        # Some kernels need a privilege for this. The address alone suffices, except in that case.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())


def check_not_itself(sock: socket.socket) -> None:
    """Raise if a dialled local port is the socket's own source port.

    TCP permits this if no process listens there: the socket is then connected to itself. For the
    caller it counts as refused.
    """
    if sock.getsockname() == sock.getpeername():
        raise ConnectionRefusedError(errno.ECONNREFUSED, "connected to itself")


def _addresses(host: str, port: int) -> list[_Info]:
    try:
        found = socket.getaddrinfo(
            host or "0.0.0.0", port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{host!r} has no address: {error}") from error
    return list(found)


def _is_ours(info: _Info) -> bool:
    family, _, _, _, address = info
    if ipaddress.ip_address(_plain(address[0])).is_unspecified:
        return False
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((address[0], 0, *address[2:]))
        return True
    return False


def _plain(text: str) -> str:
    found = ipaddress.ip_address(text.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)
