"""TCP sockets between nodes: made, found and tuned; no protocol.

Runs in:  agent, SMP, cli.
Takes in: hosts by name or address, ports.
Gives:    listening and connected sockets; what the kernel says of a peer, in ftrun's words.

Only one address is listened at, never all of a machine's: nobody else is to reach a run than
those on the network it was given.
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

USER_TIMEOUT_S = 3.0
"""How long sent bytes may stay unacknowledged before the kernel gives a connection up."""

_BACKLOG = 128
_SO_MAX_PACING_RATE = 47
_PACED_UNSENT_BYTES = 1 << 18
_LAST_ACK_AT = 56  # of tcpi_last_ack_recv in struct tcp_info, in ms
_ANYWHERE_ELSE = "192.0.2.1"  # RFC 5737: an address that is nobody's, for the default route
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


def listen_tcp(host: str, port: int, *, any_interface: bool = False) -> socket.socket:
    """A socket that listens at one address of this node; port 0 takes any free one.

    Raises:
        UsageError: the host is no address of this node, or it means all of them.
        AddressTaken: somebody listens there.
    """
    family, kind, number, _, address = _addresses(host, port)[0]
    if ipaddress.ip_address(_plain(address[0])).is_unspecified and not any_interface:
        raise UsageError(
            f"{host or 'an empty host'} means every network of this machine. Name the one address "
            "that the other nodes reach it by, with --bind"
        )
    sock = socket.socket(family, kind, number)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressTaken(host=host, port=port) from error
        raise UsageError(
            f"cannot listen at {host} port {port}: {error.strerror}. Name an address of this "
            "machine with --bind, and a port above 1023"
        ) from error
    return sock


def dial(
    host: str, port: int, deadline_s: float, *, source: tuple[str, str] | None = None
) -> socket.socket:
    """A tuned, blocking socket that is connected to a node.

    Every address of the name is tried. The look-up of a name is the resolver's and keeps to its
    own deadlines: give an address where that matters.

    Args:
        host: name or address.
        port: of the host.
        deadline_s: for all of it.
        source: an interface of this node and its address, by which it is to go.

    Raises:
        PeerLost: `how` says whether it refuses, does not answer, cannot be reached, or has no
            address. It is "refused" only where nothing has left room for a live peer.
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
        sock = socket.socket(family, kind, protocol)
        try:
            tune(sock, bulk=False)
            if source is not None:
                _go_by(sock, *source, host=address[0])
            sock.settimeout(max(left_s, 0.001))
            sock.connect(address)
            check_not_itself(sock)
        except OSError as error:
            sock.close()
            failed.append(error)
            continue
        sock.settimeout(None)
        return sock
    hows = [how_lost(error) for error in failed]
    # A peer that refuses at one address may live at another that is silent.
    order: tuple[HowLost, ...] = ("silent", "reset", "closed", "refused", "unreachable")
    how: HowLost = next((one for one in order if one in hows), "unreachable")
    raise PeerLost(peer=peer, how=how) from failed[-1]


def tune(sock: socket.socket, *, bulk: bool, user_timeout_s: float = USER_TIMEOUT_S) -> None:
    """Messages leave at once, and a peer that vanishes is noticed within `user_timeout_s`.

    Args:
        sock: a TCP socket, connected or not.
        bulk: much data in one go: cubic, where the kernel lets us. Its bbr halved the rate between
            two nodes of one machine (erasure coding study, 2.36 against 1.61 GB/s).
        user_timeout_s: for bytes that nobody acknowledges. It also ends a connection whose reader
            takes nothing for so long.
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
    """Have the kernel send no more than this; 0: as fast as it goes. Whether it does so.

    TCP keeps to it by itself (since Linux 4.13), whatever queue the interface has. Measured
    without fq: 10.4 and 100.8 MB/s where 10 and 100 were asked for (Linux 6.18, loopback).
    """
    if bytes_per_s <= 0:
        return True
    told = max(1, round(bytes_per_s)).to_bytes(8, sys.byteorder)
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, told)
        # Little waits in the kernel: what is not bulk data would wait behind it.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _PACED_UNSENT_BYTES)
    except OSError:
        return False
    return True


def silent_s(sock: socket.socket) -> float:
    """Seconds since the peer's kernel last acknowledged anything; 0 where that cannot be told.

    With the keep-alive probes of `tune` a peer that can be reached acknowledges about once a
    second, also where its process is stopped or reads nothing.
    """
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK_AT + 4)
    except OSError:  # it was closed
        return 0.0
    if len(info) < _LAST_ACK_AT + 4:
        return 0.0
    return int.from_bytes(info[_LAST_ACK_AT:], sys.byteorder) / 1000


def unacknowledged_bytes(fd: int) -> int:
    """So many bytes were given to a TCP socket, and the other kernel has not said that it has them.

    0 where that cannot be told.
    """
    try:
        found = fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # it was closed
        return 0
    return int.from_bytes(found, sys.byteorder)


def name_of_peer(sock: socket.socket) -> str:
    """Where a connection comes from, in words."""
    try:
        host, port = sock.getpeername()[:2]
    except (OSError, ValueError):
        return "a process that has gone"
    return f"{host} port {port}"


def how_lost(error: OSError) -> HowLost:
    """What an error of a socket says about the peer."""
    if isinstance(error, TimeoutError):
        return "silent"
    return _HOW.get(error.errno, "closed")


def interface_for(host: str, port: int) -> str:
    """The address of this node from which a host is reached. Nothing is sent.

    Raises:
        PeerLost: the host has no address, or there is no route to any.
    """
    peer = f"{host} port {port}"
    try:
        found = _addresses(host, port)
    except UsageError as error:
        raise PeerLost(peer=peer, how="unknown") from error
    for family, _, _, _, address in found:
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect(address)
            return str(probe.getsockname()[0])
    raise PeerLost(peer=peer, how="unreachable")


def is_local_address(host: str) -> bool:
    """Whether a host, by name or address, is this node."""
    try:
        found = _addresses(host, 0)
    except UsageError:
        return False
    return any(_is_ours(info) for info in found)


def bind_address(endpoint_host: str, endpoint_port: int) -> str:
    """The address this node is reached by in a run that meets at an endpoint.

    The endpoint's own node may know itself under a loopback address (Debian has 127.0.1.1 for the
    host's name), at which nobody else would find it; unless loopback is what was asked for.

    Raises:
        PeerLost: there is no route.
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


def _go_by(sock: socket.socket, name: str, address: str, *, host: str) -> None:
    """Have a connection leave by this interface: two of them may lie in one network."""
    sock.bind((address, 0))
    if not is_local_address(host):
        # Not every kernel lets everybody; the address alone will do but for that case.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())


def check_not_itself(sock: socket.socket) -> None:
    """A dialled port of this machine that nobody listens at may be the one we dial from.

    TCP allows that: the socket is then connected to itself. To the caller it is refused.
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
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True


def _plain(text: str) -> str:
    """An address without its zone; an IPv4 address in IPv6 form as itself."""
    found = ipaddress.ip_address(text.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)
