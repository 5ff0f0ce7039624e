"""Several addresses of one process: they are dialled side by side until one answers.

Runs in:  agent, SMP; `reach` in a thread that may wait.
Takes in: addresses, the best first; what a connection has to pass before it counts.
Gives:    the first that passes; or why there is none.
Survives: an address that is cut off, or that is some other machine's.

Rule 1: each further address is tried a little later than the one before, or at once where that one
        has failed: a better one comes first, and one that is cut off costs next to nothing.
Rule 2: a refusal says that nobody is there only where it is the word of the peer's own machine: at
        the address that the peer is known by, and where it was met before. At any other it may
        be a firewall's, or that of a machine that bears the same address.
"""

import contextlib
import ipaddress
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ftrun import clock
from ftrun.errors import HandshakeRefused, PeerError, PeerLost
from ftrun.wire.cluster.rails import Rail
from ftrun.wire.transport.tcp import check_not_itself, dial, how_lost, tune

NEXT_S = 0.15
"""So much later the next address is tried beside the one before."""

_IP_BIND_ADDRESS_NO_PORT = 24

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """One address of a process.

    Args:
        host: a name or address; an address where there are several ways.
        port: where it listens there.
        source: the address of this node to dial from; empty: the kernel chooses.
        is_sure: a refusal there is the word of the peer's own machine.
    """

    host: str
    port: int
    source: str = ""
    is_sure: bool = False


Greet = Callable[[socket.socket, PeerAddress], T]
"""Makes something of a connected, blocking socket. Raises PeerError where the peer is not the one
that was meant; the socket is closed then."""


def source_to(host: str, own: Sequence[Rail]) -> str:
    """The address of this node that lies in the same network; empty where none is known to.

    With it a packet leaves over the rail that was meant also where two rails share a network.
    """
    try:
        there = ipaddress.ip_address(host)
    except ValueError:
        return ""
    for rail in own:
        if not rail.prefix_bits:
            continue
        here = ipaddress.ip_interface(f"{rail.host}/{rail.prefix_bits}")
        if here.version == there.version and there in here.network:
            return rail.host
    return ""


def reach(
    ways: Sequence[PeerAddress], greet: Greet[T], *, deadline_s: float, next_s: float = NEXT_S
) -> tuple[T, PeerAddress]:
    """Dial all of these until one of them gives something.

    Args:
        ways: at least one, the best first.
        greet: see `Greet`.
        deadline_s: for the connections; `greet` has its own.
        next_s: see NEXT_S.

    Raises:
        PeerLost: nobody has answered. `how` is "refused" only where that is sure, or where all
            have refused.
        PeerError: what has answered is not what was meant.
    """
    if len(ways) == 1:
        sock = dial(ways[0].host, ways[0].port, deadline_s)
        return _greeted(greet, sock, ways[0]), ways[0]
    with contextlib.closing(_Race(ways, deadline_s, next_s)) as race:
        while (found := race.connected()) is not None:
            sock, way = found
            try:
                return _greeted(greet, sock, way), way
            except HandshakeRefused as error:
                if way.is_sure:
                    raise
                race.failed(way, error)
            except PeerError as error:
                race.failed(way, error)
        raise race.why()


class _Race:
    """Connections to several addresses, on their way."""

    def __init__(self, ways: Sequence[PeerAddress], deadline_s: float, next_s: float) -> None:
        self._order = list(ways)
        self._left = deque(ways)
        self._next_s = next_s
        self._begin_s = clock.now_s()
        self._give_up_s = self._begin_s + deadline_s
        self._pending: dict[int, tuple[socket.socket, PeerAddress]] = {}
        self._failed: dict[PeerAddress, PeerError] = {}
        self._poll = select.poll()

    def connected(self) -> tuple[socket.socket, PeerAddress] | None:
        """The next connection, blocking; None where there will be no more.

        Raises:
            PeerLost: a refusal that is sure.
        """
        while True:
            now_s = clock.now_s()
            while self._left and (now_s >= self._begin_s or not self._pending):
                self._begin(self._left.popleft())
                self._begin_s = now_s + self._next_s
            if not self._pending or now_s >= self._give_up_s:
                return None
            until_s = min(self._begin_s, self._give_up_s) if self._left else self._give_up_s
            for fd, _ in self._poll.poll(max(1.0, 1000 * (until_s - now_s))):
                if (found := self._done(fd)) is not None:
                    return found

    def failed(self, way: PeerAddress, error: PeerError) -> None:
        """Remember why a way was none. Raises: PeerLost: nobody is there, and that is sure."""
        self._failed[way] = error
        if way.is_sure and isinstance(error, PeerLost) and error.how == "refused":
            raise error

    def why(self) -> PeerError:
        """Why there is none: of the first that may hide a live peer, if there is one."""
        for _, way in self._pending.values():
            self._failed[way] = PeerLost(peer=_name(way), how="silent")
        for way in self._left:
            self._failed[way] = PeerLost(peer=_name(way), how="silent")
        errors = [self._failed[way] for way in self._order]
        return min(errors, key=_says)

    def close(self) -> None:
        for sock, _ in self._pending.values():
            sock.close()
        self._pending.clear()

    def _begin(self, way: PeerAddress) -> None:
        sock: socket.socket | None = None
        try:
            info = socket.getaddrinfo(
                way.host, way.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )
            family, kind, protocol, _, address = info[0]
            sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            tune(sock, bulk=False)
            if way.source:
                _leave_from(sock, way.source)
            with contextlib.suppress(BlockingIOError):
                sock.connect(address)
        except OSError as error:
            if sock is not None:
                sock.close()
            self._fail(way, error)
        else:
            self._pending[sock.fileno()] = sock, way
            self._poll.register(sock, select.POLLOUT)

    def _done(self, fd: int) -> tuple[socket.socket, PeerAddress] | None:
        sock, way = self._pending.pop(fd)
        self._poll.unregister(fd)
        try:
            _check_connected(sock)
        except OSError as error:
            sock.close()
            self._fail(way, error)
            return None
        sock.setblocking(True)
        return sock, way

    def _fail(self, way: PeerAddress, error: OSError) -> None:
        lost = PeerLost(peer=_name(way), how=how_lost(error))
        lost.__cause__ = error
        self.failed(way, lost)


def _greeted(greet: Greet[T], sock: socket.socket, way: PeerAddress) -> T:
    try:
        return greet(sock, way)
    except BaseException:
        sock.close()
        raise


def _check_connected(sock: socket.socket) -> None:
    if number := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(number, "it was not connected")
    check_not_itself(sock)


def _leave_from(sock: socket.socket, source: str) -> None:
    """Have it leave over the rail of this address; an address that has gone is passed over."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
    with contextlib.suppress(OSError):
        sock.bind((source, 0))


def _says(error: PeerError) -> int:
    """How much it tells: less than silence does a stranger, and a refusal the least."""
    if isinstance(error, HandshakeRefused):
        return 1
    return 2 if isinstance(error, PeerLost) and error.how == "refused" else 0


def _name(way: PeerAddress) -> str:
    return f"{way.host} port {way.port}"
