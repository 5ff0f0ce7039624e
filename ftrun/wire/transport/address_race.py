"""Dials several addresses of one process in parallel until one passes.

Runs in:  agent, SMP; `reach` in a thread that may wait.
Takes in: addresses, the best first; a check that a connection must pass.
Gives:    the first connection that passes; or the reason why there is none.
Survives: an address that is unreachable, or that belongs to another machine.

Rule 1: Each further address is dialled a short time after the previous one, or at once if that one
        has failed. A better address therefore wins, and an unreachable one costs little time.
Rule 2: A refused connection proves that the process has ended only if the peer's own machine
        refused it. This holds only for the address by which the peer is known, and at which it was
        reached before. At any other address the refusal may come from a firewall, or from a machine
        with the same address.
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
from ftrun.wire.cluster.generation import Rail
from ftrun.wire.transport.tcp import check_not_itself, dial, how_lost, tune

NEXT_S = 0.15  # seconds after which the next address is dialled in parallel to the previous one
_IP_BIND_ADDRESS_NO_PORT = 24

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """One address of a process."""

    host: str
    port: int
    source: str = ""  # address of this node to dial from; empty: the kernel chooses
    is_sure: bool = False  # a refusal there comes from the peer's own machine

    def __str__(self) -> str:
        return f"{self.host} port {self.port}"


Greet = Callable[[socket.socket, PeerAddress], T]
"""Makes a result of a connected, blocking socket. Raises PeerError if the peer is not the intended
one; the caller then closes the socket."""


def source_to(host: str, own: Sequence[Rail]) -> str:
    """Address of this node in the same network as `host`; empty if none is known.

    Binding to it makes a packet leave over the intended rail, even if two rails share a network.
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
    addresses: Sequence[PeerAddress], greet: Greet[T], *, deadline_s: float, next_s: float = NEXT_S
) -> tuple[T, PeerAddress]:
    """Dial all addresses, the best first, until one gives a result. `greet` has its own deadline.

    Raises PeerLost if no address has answered; `how` is "refused" only if that is sure, or if all
    have refused. Raises PeerError if the process that has answered is not the intended one.
    """
    if len(addresses) == 1:
        sock = dial(addresses[0].host, addresses[0].port, deadline_s)
        return _greet(greet, sock, addresses[0]), addresses[0]
    with contextlib.closing(_Race(addresses, deadline_s, next_s)) as race:
        while (found := race.connected()) is not None:
            sock, target = found
            try:
                return _greet(greet, sock, target), target
            except HandshakeRefused as error:
                if target.is_sure:
                    raise
                race.failed(target, error)
            except PeerError as error:
                race.failed(target, error)
        raise race.reason()


class _Race:
    """Pending connections to several addresses."""

    def __init__(self, addresses: Sequence[PeerAddress], deadline_s: float, next_s: float) -> None:
        self._order = list(addresses)
        self._left = deque(addresses)
        self._next_s = next_s
        self._begin_s = clock.now_s()
        self._give_up_s = self._begin_s + deadline_s
        self._pending: dict[int, tuple[socket.socket, PeerAddress]] = {}
        self._failed: dict[PeerAddress, PeerError] = {}
        self._poll = select.poll()

    def connected(self) -> tuple[socket.socket, PeerAddress] | None:
        """Wait for the next connection; None if there will be no more. Raises as `failed`."""
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

    def failed(self, target: PeerAddress, error: PeerError) -> None:
        """Record it; raises PeerLost for a sure refusal, which proves that the peer has ended."""
        self._failed[target] = error
        if target.is_sure and isinstance(error, PeerLost) and error.how == "refused":
            raise error

    def reason(self) -> PeerError:
        for target in (*(one for _, one in self._pending.values()), *self._left):
            self._failed[target] = PeerLost(peer=str(target), how="silent")
        return min((self._failed[target] for target in self._order), key=_sort_key)

    def close(self) -> None:
        for sock, _ in self._pending.values():
            sock.close()
        self._pending.clear()

    def _begin(self, target: PeerAddress) -> None:
        sock: socket.socket | None = None
        try:
            info = socket.getaddrinfo(
                target.host, target.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )
            family, kind, protocol, _, address = info[0]
            sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            tune(sock, bulk=False)
            if target.source:
                _leave_from(sock, target.source)
            with contextlib.suppress(BlockingIOError):
                sock.connect(address)
        except OSError as error:
            if sock is not None:
                sock.close()
            self._fail(target, error)
        else:
            self._pending[sock.fileno()] = sock, target
            self._poll.register(sock, select.POLLOUT)

    def _done(self, fd: int) -> tuple[socket.socket, PeerAddress] | None:
        sock, target = self._pending.pop(fd)
        self._poll.unregister(fd)
        try:
            if number := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(number, "not connected")  # noqa: TRY301 - as a failed connect()
            check_not_itself(sock)
        except OSError as error:
            sock.close()
            self._fail(target, error)
            return None
        sock.setblocking(True)
        return sock, target

    def _fail(self, target: PeerAddress, error: OSError) -> None:
        lost = PeerLost(peer=str(target), how=how_lost(error))
        lost.__cause__ = error
        self.failed(target, lost)


def _greet(greet: Greet[T], sock: socket.socket, target: PeerAddress) -> T:
    try:
        return greet(sock, target)
    except BaseException:
        sock.close()
        raise


def _leave_from(sock: socket.socket, source: str) -> None:
    """Bind the socket to the rail of this address; an address that no longer exists is ignored."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
    with contextlib.suppress(OSError):
        sock.bind((source, 0))


def _sort_key(error: PeerError) -> int:
    """Sort key of an error: no answer first, then a refused handshake, then a refusal."""
    if isinstance(error, HandshakeRefused):
        return 1
    return 2 if isinstance(error, PeerLost) and error.how == "refused" else 0
