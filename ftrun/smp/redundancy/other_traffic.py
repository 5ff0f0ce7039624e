"""Lets the protection of a version yield to the collectives of a training on the same interface.

Runs in:  the SMP, in the threads of the outgoing protect links.
Takes in: bytes that each interface has sent (/proc/net/dev), and its RDMA device (/sys); bytes that
          each protect link has sent (TCP_INFO).
Gives:    pauses between two frames of bulk data.
Source:   REFT (arXiv 2310.12670) schedules snapshots around the communication of the training. No
          library reports its collectives at this rate. The counters of the kernel show them for
          each library that sends over a network interface. RDMA bypasses these, so the counters of
          the RDMA device are read too (Documentation/ABI/stable/sysfs-class-infiniband).

Rule 1: the rest of what an interface has sent is other traffic. While there is other traffic,
        bulk data wait.
Rule 2: pauses take at most four times the time in which bulk data were sent, so that protection
        has a fifth of the time on a network that is never idle.
"""

import fcntl
import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path

from ftrun import clock
from ftrun.linux import rdma_devices
from ftrun.wire.transport.bulk_socket import BulkSocket

_SAMPLE_S = 0.005
"""Time between two samples, and length of one pause."""
_GAP_S = 0.25
"""After a longer time without a sample, the last one is forgotten."""
_WIRE_SHARE = 1.1
"""Largest ratio of bytes on the wire to bytes of TCP: headers, and retransmissions."""
_OTHER_SHARE = 0.15
_LEAST_SHARE = 0.1
"""Other traffic below this part of the highest rate so far is no collective: acknowledgements of
incoming bulk data, heartbeats."""
_LEAST_BYTES_S = 1e6
_DECAY = 0.999
"""Of the highest rate, at each sample: by one half in 3.5 s."""
_PAUSE_SHARE = 4.0
_MAX_CREDIT_S = 1.0
_SIOCGIFADDR = 0x8915
_WORD_BYTES = 4
"""Unit of `port_xmit_data`."""


class YieldRule:
    """Decides for one interface whether bulk data wait. Pure: time and counters are arguments."""

    def __init__(self) -> None:
        self._last: tuple[float, int, int] | None = None
        self._highest_bytes_s = 0.0
        self._credit_s = 0.0
        self._is_waiting = False

    def waits_still(self, now_s: float) -> bool | None:
        """The last answer; None if it is older than a sample."""
        if self._last is not None and 0 <= now_s - self._last[0] < _SAMPLE_S:
            return self._is_waiting
        return None

    def waits(self, sent: int, own: int, *, now_s: float) -> bool:
        """Whether to send nothing for the next `_SAMPLE_S`.

        Args:
            sent: bytes that the interface has sent so far.
            own: the part of it that are bulk data of protect links, without headers.
            now_s: the time.
        """
        last = self._last
        if last is None or not 0 < now_s - last[0] < _GAP_S:
            self._last, self._is_waiting = (now_s, sent, own), False
            return False
        passed_s = now_s - last[0]
        self._last = now_s, sent, own
        all_bytes, own_bytes = sent - last[1], own - last[2]
        self._highest_bytes_s = max(_DECAY * self._highest_bytes_s, all_bytes / passed_s)
        if self._is_waiting:
            self._credit_s -= passed_s
        else:
            self._credit_s = min(_MAX_CREDIT_S, self._credit_s + _PAUSE_SHARE * passed_s)
        least = max(_LEAST_BYTES_S, _LEAST_SHARE * self._highest_bytes_s) * passed_s
        others = all_bytes - _WIRE_SHARE * own_bytes
        is_busy = others > max(least, _OTHER_SHARE * all_bytes)
        self._is_waiting = is_busy and self._credit_s > 0
        return self._is_waiting


class RdmaPorts:
    """The ports of the RDMA device of an interface; none if it has no device with counters."""

    def __init__(self, interface: str, system: Path = Path("/sys")) -> None:
        ports = [p for one in rdma_devices(interface, system) for p in sorted(one.glob("ports/*"))]
        counters = [port / "counters" / "port_xmit_data" for port in ports]
        self._counters = [one for one in counters if one.exists()]
        self._has_all = any(_text(port / "link_layer") == "InfiniBand" for port in ports)
        """The counters of InfiniBand have the bytes of the network interface too."""

    def with_interface(self, sent: int) -> int:
        """Bytes that interface and device have sent; `sent`: those of the interface."""
        words = sum(int(one.read_text(encoding="ascii")) for one in self._counters)
        found = _WORD_BYTES * words
        return found if self._counters and self._has_all else sent + found


class OtherTraffic:
    """The interfaces of this node over which versions are protected; used by several threads."""

    def __init__(self, system: Path = Path("/sys")) -> None:
        self._lock = threading.Lock()
        self._system = system
        self._ports: dict[str, RdmaPorts] = {}
        self._rules: dict[str, YieldRule] = {}
        self._sockets: dict[BulkSocket, str] = {}
        self._past_bytes: dict[str, int] = {}
        """Bytes of connections that are closed, by interface."""

    def add(self, sock: BulkSocket) -> None:
        """Count this connection as bulk data until `remove`."""
        try:
            interface = interface_of(sock.own_host)
        except OSError:
            return
        with self._lock:
            self._sockets[sock] = interface
            if interface not in self._rules:
                self._rules[interface] = YieldRule()
                self._ports[interface] = RdmaPorts(interface, self._system)

    def remove(self, sock: BulkSocket) -> None:
        with self._lock:
            interface = self._sockets.pop(sock, None)
            if interface is not None:
                past = self._past_bytes.get(interface, 0)
                with suppress(OSError):  # its last bytes then count as other traffic, for a moment
                    self._past_bytes[interface] = past + sock.wire_bytes

    def pause_s(self, sock: BulkSocket) -> float:
        """Seconds for which this connection sends no bulk data; 0: none."""
        with self._lock:
            interface = self._sockets.get(sock)
            if interface is None:
                return 0.0
            rule, now_s = self._rules[interface], clock.now_s()
            waits = rule.waits_still(now_s)
            if waits is None:
                try:
                    waits = rule.waits(*self._sent(interface), now_s=now_s)
                except (OSError, ValueError, KeyError):  # protection is worth more than this
                    waits = False
        return _SAMPLE_S if waits else 0.0

    def _sent(self, interface: str) -> tuple[int, int]:
        """Bytes that the interface has sent, and the part of it that are bulk data."""
        mine = (one.wire_bytes for one, at in self._sockets.items() if at == interface)
        own = self._past_bytes.get(interface, 0) + sum(mine)
        return self._ports[interface].with_interface(_interface_bytes()[interface]), own


def interface_of(address: str) -> str:
    """The interface with this IPv4 address; raises OSError if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    raise OSError(f"no interface has the address {address}")


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii").strip()
    return ""


def _interface_bytes() -> dict[str, int]:
    """Bytes that each interface has sent."""
    found = {}
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines()[2:]:
        name, _, counters = line.partition(":")
        found[name.strip()] = int(counters.split()[8])
    return found
