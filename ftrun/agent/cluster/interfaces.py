"""The network interfaces of this machine: addresses, speed, driver, RDMA device.

Runs in:  agent.
Takes in: getifaddrs(3); the ethtool queries that need no privilege; /sys/class.
Gives:    one `NetworkInterface` for each device that has an address.
Survives: devices and drivers that do not answer: what they do not report stays empty.
Source:   getifaddrs(3), netdevice(7), linux/ethtool.h.

The kernel is queried over a socket if possible, not through /sys, because a container may see the
/sys of another network namespace. A value that only /sys has is used only if its device has the
same interface index.
"""

import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

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
    """It is switched on and has a carrier (IFF_UP and IFF_RUNNING)."""
    is_loopback: bool = False
    addresses: list[tuple[str, int]] = field(default_factory=list)
    """Each with the length of its network prefix in bits; IPv6 addresses without their zone."""
    driver: str = ""
    """For example mlx5_core, virtio_net, veth, bridge."""
    speed_mbit: int = 0
    duplex: str = ""
    """`full` or `half`."""
    hca: str = ""
    """The RDMA device behind it."""

    def bits(self, host: str) -> int | None:
        """Length of the prefix of this address; None: the interface does not have the address."""
        return next((bits for address, bits in self.addresses if address == host), None)


def interfaces(system: Path = Path("/sys")) -> list[NetworkInterface]:
    """All interfaces that have an address, in the kernel's order.

    Args:
        system: /sys, or a tree like it.

    Raises:
        OSError: the kernel does not list them.
    """
    found: dict[str, NetworkInterface] = {}
    for name, flags, host, bits in _addresses():
        one = found.setdefault(name, NetworkInterface(name))
        one.is_up = bool(flags & _UP and flags & _RUNNING)
        one.is_loopback = bool(flags & _LOOPBACK)
        one.addresses.append((host, bits))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for one in found.values():
            one.driver = _driver(asker, one.name)
            one.speed_mbit, one.duplex = _speed(asker, one.name)
            one.hca = _hca(system, one.name)
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
                yield _device(entry.name), entry.flags, host, _bits(mask)
            at = entry.next
    finally:
        libc.freeifaddrs(first)


def _device(label: bytes) -> str:
    """The device name; further addresses may have labels such as eth0:1."""
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


def _bits(mask: str | None) -> int:
    return int(ipaddress.ip_address(mask)).bit_count() if mask is not None else 0


def _driver(asker: socket.socket, name: str) -> str:
    answer = _ethtool(asker, name, _DRIVER.pack(_GET_DRIVER, b""))
    return _DRIVER.unpack(answer)[1].split(b"\0")[0].decode(errors="replace") if answer else ""


def _speed(asker: socket.socket, name: str) -> tuple[int, str]:
    answer = _ethtool(asker, name, _SETTINGS.pack(_GET_SETTINGS, *[0] * 15))
    if not answer:
        return 0, ""
    told = _SETTINGS.unpack(answer)
    speed_mbit = told[3] | told[12] << 16
    is_known = told[3] not in _NO_SPEED[:2] and speed_mbit not in _NO_SPEED
    return (speed_mbit, _DUPLEX.get(told[4], "")) if is_known else (0, "")


def _ethtool(asker: socket.socket, name: str, question: bytes) -> bytes:
    room = ctypes.create_string_buffer(question, len(question))
    request = struct.pack("16sP16x", name.encode()[:15], ctypes.addressof(room))
    with suppress(OSError):
        fcntl.ioctl(asker, _SIOCETHTOOL, request)
        return room.raw
    return b""


def _hca(system: Path, name: str) -> str:
    """The RDMA device of this device, or of the first one below it if it is a bond or a VLAN."""
    device = system / "class" / "net" / name
    with suppress(OSError, ValueError):
        if int((device / "ifindex").read_text()) != socket.if_nametoindex(name):
            return ""
        for one in (device, *sorted(device.glob("lower_*"))):
            found = sorted(path.name for path in one.glob("device/infiniband/*"))
            if found:
                return found[0]
    return ""
