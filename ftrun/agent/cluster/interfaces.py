"""Finds the network interfaces of this machine, and the rails of this node among them.

Runs in the main thread, before the run begins. Values of devices and drivers that do not answer
stay empty. An interface without a listening socket is no rail.

Source:   getifaddrs(3), netdevice(7), linux/ethtool.h.

The kernel is queried over a socket if possible, not through /sys, because a container may see the
/sys of another network namespace. A value that only /sys has is used only if its device has the
same interface index.

Rule 1: the first rail is the interface that has the card's address.
Rule 2: if the user has named interfaces, exactly these are rails, in addition to the first.
Rule 3: without names, interfaces that lead to no other node are no rails: loopback, interfaces that
        are down, bridges and tunnels of containers and virtual machines, link-local addresses. If
        the card's address is private, globally reachable addresses are not used either.
Rule 4: a run without a secret, or with --bind, listens only on the card's address. It listens on
        other addresses if the user has named their interfaces. Without a secret, it does so too if
        the user has requested a network plan that uses them.
"""

import ctypes
import fcntl
import ipaddress
import logging
import os
import re
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ftrun.errors import AddressTaken, UsageError
from ftrun.linux import rdma_devices
from ftrun.wire.cluster.generation import NodeCard, Rail
from ftrun.wire.transport.tcp import listen_tcp

_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40  # netdevice(7): IFF_UP, IFF_LOOPBACK, IFF_RUNNING
_SIOCETHTOOL = 0x8946
_GET_SETTINGS, _GET_DRIVER = 0x1, 0x3  # ETHTOOL_GSET, ETHTOOL_GDRVINFO
_SETTINGS = struct.Struct("=IIIHBBBBBBIIHBBI8x")  # struct ethtool_cmd
_DRIVER = struct.Struct("=I32s160x")  # struct ethtool_drvinfo
_NO_SPEED = (0, 0xFFFF, 0xFFFFFFFF)
_DUPLEX = {0: "half", 1: "full"}


@dataclass(slots=True)
class NetworkInterface:
    """One network device. Empty or 0: unknown."""

    name: str
    is_up: bool = False
    """The device is up and has a carrier (IFF_UP and IFF_RUNNING)."""
    is_loopback: bool = False
    addresses: list[tuple[str, int]] = field(default_factory=list)
    """Addresses with the length of the network prefix in bits; IPv6 without the zone."""
    driver: str = ""
    """For example mlx5_core, virtio_net, veth, bridge."""
    speed_mbit: int = 0
    duplex: str = ""
    """`full` or `half`."""
    hca: str = ""
    """The RDMA device of this interface."""

    def bits(self, host: str) -> int | None:
        return next((bits for address, bits in self.addresses if address == host), None)


def interfaces(system: Path = Path("/sys")) -> list[NetworkInterface]:
    """All interfaces that have an address, in the kernel's order; OSError if it lists none."""
    found: dict[str, NetworkInterface] = {}
    for name, flags, host, bits in _addresses():
        one = found.setdefault(name, NetworkInterface(name))
        one.is_up = bool(flags & _UP and flags & _RUNNING)
        one.is_loopback = bool(flags & _LOOPBACK)
        one.addresses.append((host, bits))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as requester:
        for one in found.values():
            one.driver = _driver(requester, one.name)
            one.speed_mbit, one.duplex = _speed(requester, one.name)
            one.hca = next((path.name for path in rdma_devices(one.name, system)), "")
    return list(found.values())


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def _addresses() -> Iterator[tuple[str, int, str, int]]:
    """Name, flags, address and prefix bits of each address."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the interfaces cannot be listed: {os.strerror(number)}")
    try:
        at = first
        while bool(at):  # not null
            entry = at.contents
            host = _host(entry.address)
            if host is not None:
                mask = _host(entry.netmask)
                bits = int(ipaddress.ip_address(mask)).bit_count() if mask is not None else 0
                yield _device(entry.name), entry.flags, host, bits
            at = entry.next
    finally:
        libc.freeifaddrs(first)


def _device(label: bytes) -> str:
    """The device name, from a name or a label such as eth0:1."""
    return label.decode(errors="replace").partition(":")[0]


def _host(address: int | None) -> str | None:
    if not address:
        return None
    family = ctypes.c_ushort.from_address(address).value
    if family == socket.AF_INET:
        return socket.inet_ntop(family, ctypes.string_at(address + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, ctypes.string_at(address + 8, 16))
    return None


def _driver(requester: socket.socket, name: str) -> str:
    answer = _ethtool(requester, name, _DRIVER.pack(_GET_DRIVER, b""))
    return _DRIVER.unpack(answer)[1].split(b"\0")[0].decode(errors="replace") if answer else ""


def _speed(requester: socket.socket, name: str) -> tuple[int, str]:
    answer = _ethtool(requester, name, _SETTINGS.pack(_GET_SETTINGS, *[0] * 15))
    if not answer:
        return 0, ""
    reported = _SETTINGS.unpack(answer)
    speed_mbit = reported[3] | reported[12] << 16
    is_known = reported[3] not in _NO_SPEED[:2] and speed_mbit not in _NO_SPEED
    return (speed_mbit, _DUPLEX.get(reported[4], "")) if is_known else (0, "")


def _ethtool(requester: socket.socket, name: str, question: bytes) -> bytes:
    buffer = ctypes.create_string_buffer(question, len(question))
    request = struct.pack("16sP16x", name.encode()[:15], ctypes.addressof(buffer))
    with suppress(OSError):
        fcntl.ioctl(requester, _SIOCETHTOOL, request)
        return buffer.raw
    return b""


_log = logging.getLogger(__name__)

MAX_RAILS = 8
"""Limit of the rails of a node: a plan with the cards of 1,024 nodes must fit in one frame."""

_INNER_DRIVERS = frozenset(
    {"bridge", "dummy", "geneve", "ifb", "openvswitch", "tun", "vxlan", "wireguard"}
)
_INNER_NAMES = re.compile(
    r"(docker|br-|virbr|veth|cni|cali|flannel|cilium|kube|nodelocaldns|podman|lxc|lxd|vmnet|"
    r"tailscale|zt|wg|tun|tap|tunl|ip6tnl|sit|gre|dummy|ifb)"
)


def own_rails(
    host: str, named: Sequence[str] = (), *, only_first: bool = False, is_again: bool = False
) -> list[Rail]:
    """The rails of this node, without ports.

    Args:
        host: the address of this node's card.
        named: interfaces that the user has named; empty: all interfaces to other nodes.
        only_first: use only the interface of that address, and named interfaces.
        is_again: this node has been part of the run, so a named interface that cannot be used is
            no UsageError.
    """
    try:
        found = interfaces()
    except (OSError, ValueError) as error:
        _log.warning("only %s is known as a rail: %s", host, error)
        return []
    return rails_among(found, host, named, only_first=only_first, is_again=is_again)


def rails_among(
    found: Sequence[NetworkInterface],
    host: str,
    named: Sequence[str],
    *,
    only_first: bool,
    is_again: bool = False,
) -> list[Rail]:
    first = next((one for one in found if one.bits(host) is not None), None)
    if first is None:
        return []
    rails = [_rail(first, host)]
    others = _named(found, named, host, is_again=is_again) if named else found
    for one in others:
        address = _address(one, host, is_named=bool(named))
        if one is first or address is None:
            continue
        if named or not (only_first or first.is_loopback or _is_inner(one)):
            rails.append(_rail(one, address))
    return rails[:MAX_RAILS]


def listen_on(
    rails: Sequence[Rail], first: socket.socket, before: NodeCard | None
) -> tuple[list[Rail], list[socket.socket]]:
    """Open a listening socket on each rail; return rails with their ports, and all sockets.

    A rail without a socket is left out. `first` already listens on the first rail; `before` is the
    card of this node's last agent, whose ports the other nodes know.
    """
    found, sockets = [], [first]
    number = first.getsockname()[1]
    old = {rail.host: rail.port for rail in before.rails} if before is not None else {}
    for rail in rails:
        if rail is not rails[0]:
            try:
                sock = _listen(rail.host, old.get(rail.host, number))
            except UsageError as error:
                _log.warning("%s is no rail of this run: %s", rail.name, error)
                continue
            sockets.append(sock)
            number = sock.getsockname()[1]
        found.append(msgspec.structs.replace(rail, port=sockets[-1].getsockname()[1]))
    return found, sockets


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen_tcp(host, port)
    except AddressTaken:
        return listen_tcp(host, 0)


def _named(
    found: Sequence[NetworkInterface], named: Sequence[str], host: str, *, is_again: bool
) -> list[NetworkInterface]:
    by_name = {one.name: one for one in found}
    usable = []
    for name in dict.fromkeys(named):
        one = by_name.get(name)
        if one is not None and one.is_up and _address(one, host, is_named=True) is not None:
            usable.append(one)
            continue
        there = ", ".join(sorted(by_name))
        reason = "is down" if one is not None and not one.is_up else "has no address here"
        reason += f" of the kind of {host}" if one is not None and one.is_up else ""
        text = f"network.rails names {name}, which {reason}. With an address there are: {there}"
        if not is_again:
            raise UsageError(text)
        _log.warning("%s", text)
    return usable


def _is_inner(one: NetworkInterface) -> bool:
    is_inner = one.driver in _INNER_DRIVERS or _INNER_NAMES.match(one.name) is not None
    return one.is_loopback or not one.is_up or is_inner


def _address(one: NetworkInterface, like: str, *, is_named: bool) -> str | None:
    """The first usable address of an interface with the IP version of the card's address."""
    card = ipaddress.ip_address(like)
    for host in (ipaddress.ip_address(text) for text, _ in one.addresses):
        is_too_open = host.is_global and not card.is_global and not is_named
        if host.version == card.version and not host.is_link_local and not is_too_open:
            return str(host)
    return None


def _rail(one: NetworkInterface, host: str) -> Rail:
    return Rail(
        name=one.name,
        host=host,
        prefix_bits=one.bits(host) or 0,
        speed_mbit=one.speed_mbit,
        duplex=one.duplex,
        hca=one.hca,
    )
