"""What the kernel reports of the ranks: state and work of processes, counters of connections.

Runs in the thread of the rank observer. It reads /proc/PID/fd, and asks the kernel by netlink
(sock_diag with TCP_INFO). Root is not needed: the kernel reports connections of the own network
namespace to every user. If it does not answer, `error` says why, and there are no figures.

Source:   `inet_diag.h` and `tcp.h` of Linux 4.19 and later; older kernels send a shorter tcp_info,
          and missing fields read as 0. pyroute2 would do the same with every field decoded, but
          takes 130 ms and 20 MB to import and 7 ms of CPU for 128 connections, against 1.5 ms here
          (2026-11-21, 2 cores, Python 3.11).

Rule 1: `busy_s` leaves out the time in which the peer had no receive window (`rwnd_limited`),
        because a rank that reads late is slow itself, and its link is not.
Rule 2: A connection stalls if segments in flight are sent again and no new byte is acknowledged, or
        if bytes wait that fit the peer's window and none is in flight, because this node drops what
        it sends. A peer that reads nothing acknowledges what is in flight, and closes its window.
"""

import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ftrun import clock
from ftrun.monitor.slow.delay_matrix import LinkSample
from ftrun.monitor.verdicts import RankConnection

SCAN_EVERY_S = 10.0
"""Between two scans of /proc/PID/fd; a new pid is scanned at once."""
ANSWER_S = 1.0
"""The kernel answers at once, so a poll is abandoned rather than delayed."""

_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_ERROR, _DONE = 2, 3
_ESTABLISHED = 1
_INET_DIAG_INFO = 2
_HEADER = struct.Struct("=IHHII")
_QUERY = struct.Struct("=BBBBI48s")
_DIAG_BYTES = 72
_INODE_AT = 68
_ATTRIBUTE = struct.Struct("=HH")
_PORTS = struct.Struct("!HH")
_INFO_BYTES = 232
MAX_CONNECTIONS = 32
"""Connections of a rank in one report: the stalled ones first."""
_INFO = struct.Struct("=24xI40xI28xI16xQQ8xI12xQQQQ8xQ20xI")
"""Fields of tcp_info: unacked, rtt, total_retrans, bytes_acked, bytes_received, notsent_bytes,
delivery_rate, busy_time, rwnd_limited, sndbuf_limited, bytes_sent, snd_wnd (from 5.4 on)."""

_OPEN_WINDOW_BYTES = 1 << 14
"""The kernel sends into a smaller window only whole segments."""


@dataclass(frozen=True, slots=True)
class SocketCounters:
    """One established connection; counts start at its creation."""

    inode: int
    local: tuple[str, int]
    remote: tuple[str, int]
    rtt_s: float
    """Smoothed by the kernel."""
    bytes_acked: int
    bytes_received: int
    bytes_sent: int
    """Retransmitted bytes included."""
    busy_s: float
    """Time with bytes in flight, without the time in which the peer had no receive window."""
    retransmits: int
    unacked_segments: int
    """In flight."""
    notsent_bytes: int
    window_bytes: int | None
    """What the peer has room for; None if the kernel does not report it."""

    @property
    def is_waiting(self) -> bool:
        room = self.window_bytes
        is_held_back = self.notsent_bytes > 0 and (room or 0) >= _OPEN_WINDOW_BYTES
        return (self.unacked_segments > 0 and room != 0) or is_held_back


class SocketStats:
    """The connections of this node's ranks, poll by poll. Not thread-safe."""

    def __init__(self) -> None:
        self.error = ""
        """Why there are no figures; empty if there are some."""
        self._inodes: dict[int, frozenset[int]] = {}
        self._scanned_s = float("-inf")
        self._before: dict[int, SocketCounters] = {}
        self._moved: dict[int, tuple[float, SocketCounters]] = {}
        """Each connection when it last made progress, or began to wait."""
        self._acked_s: dict[int, float] = {}
        """When a byte of each connection was acknowledged."""

    def poll(self, pids: Iterable[int], now_s: float) -> list[LinkSample]:
        """Changes since the last poll, for each remote address, in a stable order.

        A new connection is counted from its creation only if there was a poll before.
        """
        figures = self.figures(pids, now_s)
        is_first = not self._before
        parts: dict[str, list[LinkSample]] = {}
        for one in figures:
            before = self._before.get(one.inode)
            if before is not None or not is_first:
                parts.setdefault(one.remote[0], []).append(_difference(one, before))
        self._before = {one.inode: one for one in figures}
        self._note_progress(figures, now_s)
        return [LinkSample.together(parts[host]) for host in sorted(parts)]

    def connections(
        self, pids: Iterable[int], now_s: float
    ) -> dict[int, tuple[RankConnection, ...]]:
        """Connections of each process to other machines, the longest stalled first.

        A stall begins at the first poll that has seen it.
        """
        figures = self.figures(pids, now_s)
        self._note_progress(figures, now_s)
        found = {one.inode: self._connection(one, now_s) for one in figures if _is_remote(one)}
        return {
            pid: tuple(
                sorted(
                    (found[inode] for inode in inodes & found.keys()),
                    key=lambda one: (-one.stalled_s, one.remote, one.local),
                )[:MAX_CONNECTIONS]
            )
            for pid, inodes in self._inodes.items()
        }

    def figures(self, pids: Iterable[int], now_s: float) -> list[SocketCounters]:
        inodes = self._sockets_of(tuple(pids), now_s)
        if not inodes:
            return []
        found: list[SocketCounters] = []
        try:
            for family in (socket.AF_INET, socket.AF_INET6):
                found += _established(family, inodes)
        except OSError as error:
            self.error = f"the kernel does not report connections: {error.strerror or error}"
            return []
        self.error = ""
        return found

    def _sockets_of(self, pids: tuple[int, ...], now_s: float) -> frozenset[int]:
        is_due = now_s - self._scanned_s >= SCAN_EVERY_S or set(pids) != set(self._inodes)
        if is_due:
            self._scanned_s = now_s
            self._inodes = {pid: _socket_inodes(pid) for pid in pids}
        return frozenset().union(*self._inodes.values())

    def _note_progress(self, figures: Iterable[SocketCounters], now_s: float) -> None:
        before, self._moved = self._moved, {}
        acked_s, self._acked_s = self._acked_s, {}
        for one in figures:
            at_s, moved = before.get(one.inode, (now_s, one))
            if one.bytes_acked > moved.bytes_acked:
                self._acked_s[one.inode] = now_s
            elif one.inode in acked_s:
                self._acked_s[one.inode] = acked_s[one.inode]
            # What was sent since the last poll may have been sent just now.
            is_as_before = one.is_waiting and moved.is_waiting
            is_stalled = is_as_before and moved.bytes_acked == one.bytes_acked
            self._moved[one.inode] = (at_s, moved) if is_stalled else (now_s, one)

    def _connection(self, one: SocketCounters, now_s: float) -> RankConnection:
        moved_s, moved = self._moved[one.inode]
        again = one.retransmits - moved.retransmits
        return RankConnection(
            local=one.local,
            remote=one.remote,
            stalled_s=round(now_s - moved_s, 2) if again or not one.unacked_segments else 0.0,
            acked_bytes=one.bytes_acked,
            received_bytes=one.bytes_received,
            retransmits=again,
            acked_s=round(now_s - self._acked_s.get(one.inode, now_s + 1.0), 2),
        )


def _is_remote(one: SocketCounters) -> bool:
    return one.local[0] != one.remote[0]


def _difference(now: SocketCounters, before: SocketCounters | None) -> LinkSample:
    sent = now.bytes_acked - (before.bytes_acked if before else 0)
    return LinkSample(
        to_host=now.remote[0],
        bytes=sent,
        busy_s=max(0.0, now.busy_s - (before.busy_s if before else 0.0)),
        rtt_s=now.rtt_s,
        retransmits=now.retransmits - (before.retransmits if before else 0),
        unacked_bytes=max(0, now.bytes_sent - now.bytes_acked),
    )


def _socket_inodes(pid: int) -> frozenset[int]:
    folder = f"/proc/{pid}/fd"
    found = set()
    try:
        names = os.listdir(folder)
    except OSError:
        return frozenset()
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return frozenset(found)


def _established(family: int, inodes: frozenset[int]) -> Iterator[SocketCounters]:
    body = _QUERY.pack(
        family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), 0, 1 << _ESTABLISHED, bytes(48)
    )
    header = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as netlink:  # NETLINK_SOCK_DIAG
        netlink.settimeout(ANSWER_S)
        netlink.sendto(header + body, (0, 0))
        while True:
            data = netlink.recv(1 << 18)
            for kind, start, end in _messages(data):
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    number = -int.from_bytes(data[start : start + 4], "little", signed=True)
                    raise OSError(number, os.strerror(number))
                (inode,) = struct.unpack_from("=I", data, start + _INODE_AT)
                if inode in inodes:
                    yield _figures(family, inode, data, start, end)


def _messages(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Kind, start and end of the body, of each netlink message."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        yield kind, at + _HEADER.size, at + length
        at += (length + 3) & ~3


def _figures(family: int, inode: int, data: bytes, start: int, end: int) -> SocketCounters:
    size = 4 if family == socket.AF_INET else 16
    local_port, remote_port = _PORTS.unpack_from(data, start + 4)
    local = data[start + 8 : start + 8 + size]
    remote = data[start + 24 : start + 24 + size]
    info = _tcp_info(data, start + _DIAG_BYTES, end)
    found = _INFO.unpack(info.ljust(_INFO_BYTES, b"\0"))
    unacked, rtt_us, again, acked, received, notsent, _, busy_us, no_room_us, _, sent, room = found
    return SocketCounters(
        inode=inode,
        local=(_address(family, local), local_port),
        remote=(_address(family, remote), remote_port),
        rtt_s=rtt_us / 1e6,
        bytes_acked=acked,
        bytes_received=received,
        bytes_sent=sent,
        busy_s=max(0, busy_us - no_room_us) / 1e6,
        retransmits=again,
        unacked_segments=unacked,
        notsent_bytes=notsent,
        window_bytes=room if len(info) == _INFO_BYTES else None,
    )


def _tcp_info(data: bytes, at: int, end: int) -> bytes:
    """The kernel's tcp_info, at most of the length of `_INFO`."""
    while at + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if kind == _INET_DIAG_INFO:
            return data[at + 4 : at + length][:_INFO_BYTES]
        at += max(4, (length + 3) & ~3)
    return b""


def _address(family: int, packed: bytes) -> str:
    """The address as text; an IPv4 address in IPv6 form as an IPv4 address."""
    return socket.inet_ntop(family, packed).removeprefix("::ffff:")


# --- processes ------------------------------------------------------------------------------------

# proc(5): processor time is counted in ticks of 10 ms.
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_BAD_STATES = {"T": "is stopped", "D": "hangs in the kernel"}


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One process at one moment."""

    state: str
    cpu_s: float
    """Processor time of all its threads so far."""
    io_bytes: int
    """Bytes read and written by system calls so far; 0 if that cannot be read."""
    blocked_in: str
    """The kernel function in which it sleeps; empty if that cannot be read."""
    is_in_kernel: bool
    """A thread of it waits in the kernel without interruption, as for a disk (state D)."""
    child: str
    """A child that does no more work, in words."""
    children_work: float
    """Grows with all that its descendants compute, read and write."""


def process_facts(pid: int) -> ProcessState | None:
    fields = _stat(pid)
    if fields is None:
        return None
    return ProcessState(
        state=fields[0],
        cpu_s=(int(fields[11]) + int(fields[12])) * _TICK_S,
        io_bytes=_io_bytes(pid),
        blocked_in=_first_line(f"/proc/{pid}/wchan").strip("0"),
        is_in_kernel=_has_thread_in_kernel(pid),
        child=_bad_child(pid),
        children_work=_children_work(pid),
    )


def cores_used(pid: int, *, within_s: float = 0.25) -> float:
    """Cores that a process uses, measured now; 0 if it has ended."""
    before, started_s = process_facts(pid), clock.now_s()
    clock.sleep(within_s)
    after = process_facts(pid)
    if before is None or after is None:
        return 0.0
    return (after.cpu_s - before.cpu_s) / (clock.now_s() - started_s)


def resident_bytes(pid: int) -> int:
    """0 if it has ended. Without pages of files, which can be taken back; called once a second."""
    words = _first_line(f"/proc/{pid}/statm").split()
    pages = int(words[1]) - int(words[2]) if len(words) > 2 else 0
    return max(0, pages) * os.sysconf("SC_PAGE_SIZE")


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name: state, parent ..."""
    text = _first_line(f"/proc/{pid}/stat")
    return text.rpartition(")")[2].split() if text else None


def _io_bytes(pid: int) -> int:
    return _counted(f"/proc/{pid}/io", "rchar", "wchar")


def _counted(path: str, *names: str) -> int:
    """The sum of the numbers behind these names; 0 for those that cannot be read."""
    total = 0
    with suppress(OSError, ValueError, IndexError):
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            if line.startswith(names):
                total += int(line.split()[1])
    return total


def _has_thread_in_kernel(pid: int) -> bool:
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            fields = _first_line(f"/proc/{pid}/task/{thread}/stat").rpartition(")")[2].split()
            if fields[:1] == ["D"]:
                return True
    return False


def _bad_child(pid: int, depth: int = 1) -> str:
    """A child, or a child of a fork server, that does no more work."""
    for word in _first_line(f"/proc/{pid}/task/{pid}/children").split()[:64]:
        fields = _stat(int(word))
        if fields is not None and fields[0] in _BAD_STATES:
            return f"its child process {word} {_BAD_STATES[fields[0]]} (state {fields[0]})"
        if depth and (found := _bad_child(int(word), depth - 1)):
            return found
    return ""


def _children_work(pid: int, depth: int = 4) -> float:
    total = 0.0
    for word in _first_line(f"/proc/{pid}/task/{pid}/children").split()[:64]:
        fields = _stat(int(word))
        if fields is not None and fields[0] != "Z":
            # A process that only communicates uses little processor time, so its voluntary switches
            # count too.
            total += (int(fields[11]) + int(fields[12])) * _TICK_S + _io_bytes(int(word))
            total += _counted(f"/proc/{word}/status", "voluntary_ctxt_switches")
            total += _children_work(int(word), depth - 1) if depth else 0.0
    return total


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline()
    except OSError:
        return ""
