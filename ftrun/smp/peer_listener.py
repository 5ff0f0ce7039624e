"""Owns the links between this SMP and those of other nodes.

Runs in:  the SMP: one thread that accepts per listening address, and one for each link in either
          direction; the rest in the server's thread.
Takes in: addresses to listen at; the session, which names the generation and the group.
Gives:    links for sending; each received frame, in the thread of its link.

Rule 1: a link belongs to one generation. A protect link also belongs to one session: the digest of
        the group with its positions. A peer that enters the next session earlier is admitted when
        this side enters it too. A peer that is behind is rejected and retries.
Rule 2: a new generation or session ends every link of the previous one at once.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ftrun.errors import (
    AddressTaken,
    HandshakeRefused,
    PeerError,
    PeerLost,
    ProtocolError,
    UsageError,
)
from ftrun.linux import lower_thread_priority
from ftrun.smp.peer_link import FETCH, PROTECT, LinkEndpoints, PeerLink, admits
from ftrun.smp.redundancy.other_traffic import OtherTraffic
from ftrun.wire.cluster.generation import Rail
from ftrun.wire.cluster.transfer import LinkHello, TransferEnvelope
from ftrun.wire.messages.smp import NodeAddress
from ftrun.wire.transport.bulk_socket import BulkSocket
from ftrun.wire.transport.doors import Door, Doors
from ftrun.wire.transport.handshake import PeerIdentity, accept_handshake
from ftrun.wire.transport.secret import Secret
from ftrun.wire.transport.tcp import listen_tcp, tune

_MAX_HANDSHAKES = 128
_PARK_S = 60.0
_REST_S = 0.2
_MAX_PORTS = 20
_MAX_REPORTED = 100
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IncomingLink:
    """The receiving end of a link."""

    node_id: str
    hello: LinkHello
    socket: BulkSocket


class PeerEvents(Protocol):
    """Callbacks for received frames and link changes. All run in threads of links."""

    def received(self, source: IncomingLink, envelope: TransferEnvelope) -> None:
        """Handle a message; read the bytes behind it before this returns."""
        ...

    def lost(self, node_id: str, purpose: str, reason: str) -> None: ...

    def linked(self, node_id: str, purpose: str) -> None:
        """Handle a connection made after a loss; the data in flight at the loss is lost."""
        ...


@dataclass(frozen=True, slots=True)
class PeerSession:
    """The generation and group that links belong to, and their settings.

    Args:
        number: digest of the group with its positions.
        timeout_s: time that a peer may accept no bytes, or pause in the middle of a frame.
        pace_bytes_s: limit of bulk data to protect, in bytes per second and link; 0: no limit.
    """

    own: PeerIdentity
    generation: int
    number: int
    timeout_s: float
    pace_bytes_s: float = 0.0
    own_rails: tuple[Rail, ...] = ()


class PeerListener:
    """All links of this SMP."""

    def __init__(self) -> None:
        self.events: PeerEvents
        """Receiver of events; set before the first `listen`."""
        self._secret: Secret | None = None
        self._listeners: list[socket.socket] = []
        self._at: tuple[Sequence[str], Secret | None] | None = None
        self._session: PeerSession | None = None
        self._changed = threading.Condition()
        self._links: dict[tuple[str, str], PeerLink] = {}
        self._incoming: dict[tuple[str, str], IncomingLink] = {}
        self._seen: set[tuple[str, str]] = set()
        self._other_traffic = OtherTraffic()
        self._doors = Doors(_MAX_HANDSHAKES)
        self._reported: set[str] = set()

    @property
    def num_sent_bytes(self) -> int:
        return sum(link.num_bytes for link in self._links.values())

    def listen(self, hosts: Sequence[str], secret: Secret | None) -> int:
        """Open one port at each of these addresses, unless they are open already.

        Return its number.

        It is open at the first address. At another address it may be missing. Raises UsageError if
        the first host is no address of this node.
        """
        if self._at != (hosts, secret) or not self._listeners:
            self._stop_listening()
            self._secret = secret
            self._listeners = _opened(hosts)
            try:
                for listener in self._listeners:
                    threading.Thread(
                        target=self._accept, args=(listener,), name="ftrun-accept", daemon=True
                    ).start()
            except RuntimeError:  # the limit of threads is reached
                self._stop_listening()
                raise
            self._at = (hosts, secret)
        return int(self._listeners[0].getsockname()[1])

    def begin(self, session: PeerSession) -> None:
        with self._changed:
            if self._session == session:
                return
            self._drop_links()
            self._session = session
            self._changed.notify_all()

    def link(self, position: NodeAddress, purpose: str) -> PeerLink:
        """The link to a node for one purpose; the first call creates it."""
        with self._changed:
            session = self._session
            assert session is not None
            key = (position.node_id, purpose)
            if key not in self._links:
                number = session.number if purpose == PROTECT else 0
                hello = LinkHello(session.generation, purpose, number)
                pace_bytes_s = session.pace_bytes_s if purpose == PROTECT else 0.0
                ends = LinkEndpoints(
                    session.own,
                    position,
                    hello,
                    self._secret,
                    session.timeout_s,
                    pace_bytes_s,
                    session.own_rails,
                    self._other_traffic if purpose == PROTECT else None,
                )
                link = PeerLink(
                    ends,
                    lost=lambda reason: self._report_lost(session, key, reason),
                    linked=lambda: self.events.linked(*key),
                )
                link.start()
                self._links[key] = link
            return self._links[key]

    def find(self, node_id: str, purpose: str) -> PeerLink | None:
        return self._links.get((node_id, purpose))

    def is_current(self, source: IncomingLink) -> bool:
        return self._incoming.get((source.node_id, source.hello.purpose)) is source

    def close(self) -> None:
        with self._changed:
            self._drop_links()
            self._session = None
            self._changed.notify_all()
        self._stop_listening()
        self._at = None

    def _drop_links(self) -> None:
        for link in self._links.values():
            link.close()
        for incoming in self._incoming.values():
            incoming.socket.interrupt()
        self._links.clear()
        self._incoming.clear()
        self._seen.clear()

    def _report_lost(self, session: PeerSession, key: tuple[str, str], reason: str) -> None:
        if self._session is session:
            self.events.lost(*key, reason)

    def _stop_listening(self) -> None:
        with self._changed:
            listeners, self._listeners = self._listeners, []
            self._changed.notify_all()
        for listener in listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    # --- threads of incoming links ---------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            # This SMP has no identity before the first generation. Until then connections wait in
            # the kernel's backlog.
            with self._changed:
                self._changed.wait_for(lambda: self._session or listener not in self._listeners)
            if listener not in self._listeners:
                return
            try:
                sock, _ = listener.accept()
            except OSError as error:
                with self._changed:
                    if listener in self._listeners:
                        _log.warning("cannot accept a connection: %s", error)
                        self._changed.wait(_REST_S)
                continue
            door = self._doors.enter(sock)
            if door is None:
                sock.close()
                continue
            try:
                threading.Thread(
                    target=self._meet, args=(sock, door), name="ftrun-from-?", daemon=True
                ).start()
            except RuntimeError as error:  # the limit of threads is reached
                _log.debug("no thread: %s", error)
                sock.close()
                door.leave()

    def _meet(self, sock: socket.socket, door: Door) -> None:
        try:
            incoming = self._greet(sock, door)
        except HandshakeRefused as error:
            self._report_once(error)
            incoming = None
        except (PeerError, OSError) as error:
            _log.debug("rejected a connection: %s", error)
            incoming = None
        if incoming is None:
            sock.close()
            return
        threading.current_thread().name = f"ftrun-from-{incoming.node_id}"[:15]
        if incoming.hello.purpose == PROTECT:
            lower_thread_priority()
        try:
            self._receive(incoming)
        finally:
            incoming.socket.close()

    def _report_once(self, error: HandshakeRefused) -> None:
        """Log each reason once, because any host that reaches the port can be refused."""
        if error.reason not in self._reported and len(self._reported) < _MAX_REPORTED:
            self._reported.add(error.reason)
            _log.warning("rejected a connection: %s", error)

    def _greet(self, sock: socket.socket, door: Door) -> IncomingLink | None:
        """Return the link if it belongs to the running session; raises PeerError."""
        session = self._session
        try:
            if session is None:
                return None
            proven = accept_handshake(
                sock, session.own, self._secret, deadline_s=door.handshake_s, hello_s=door.hello_s
            )
            tune(sock, bulk=True, user_timeout_s=session.timeout_s)
            made = BulkSocket(sock, proven, timeout_s=session.timeout_s)
            hello = made.receive(within_s=door.hello_s).body
        finally:
            door.leave()  # a peer of a later generation waits without a handshake place
        if not isinstance(hello, LinkHello) or hello.purpose not in (PROTECT, FETCH):
            raise ProtocolError(f"{made.peer} did not send a LinkHello with a known purpose")
        incoming = IncomingLink(made.node_id, hello, made)
        return incoming if self._let_in(incoming) else None

    def _let_in(self, incoming: IncomingLink) -> bool:
        """Wait until this side has entered the link's session; False if that session is over."""
        hello, key = incoming.hello, (incoming.node_id, incoming.hello.purpose)
        with self._changed:
            self._changed.wait_for(lambda: self._admits(hello) is not None, _PARK_S)
            if not self._admits(hello):
                return False
            before = self._incoming.get(key)
            if before is not None:
                before.socket.interrupt()
            is_again = key in self._seen
            self._incoming[key] = incoming
            self._seen.add(key)
            self._changed.notify_all()
        if is_again:
            self.events.linked(*key)
        return True

    def _admits(self, hello: LinkHello) -> bool | None:
        session = self._session
        if session is None:
            return False
        return admits(hello, generation=session.generation, session=session.number)

    def _receive(self, incoming: IncomingLink) -> None:
        reason, may_come_back = "", False
        try:
            while True:
                self.events.received(incoming, _next(incoming))
        except PeerLost as error:
            reason, may_come_back = str(error), self._may_come_back(incoming)
        except PeerError as error:
            reason = str(error)
            _log.warning("%s", reason)
        except Exception:  # noqa: BLE001
            # One of the process loops: a bug must cost a link, not the snapshots of a run.
            _log.exception("internal error in the link from %s", incoming.node_id)
            reason = "internal error in ftrun; see the SMP's log"
        if may_come_back:
            incoming.socket.close()
            self._wait_for_next(incoming)
        if self.is_current(incoming):
            self.events.lost(incoming.node_id, incoming.hello.purpose, reason)

    def _wait_for_next(self, incoming: IncomingLink) -> None:
        with self._changed:
            if self._session is not None:
                timeout_s = self._session.timeout_s
                self._changed.wait_for(lambda: not self.is_current(incoming), timeout_s)

    def _may_come_back(self, incoming: IncomingLink) -> bool:
        """The node may reconnect; this node's own link to it detects whether it is lost."""
        link = self._links.get((incoming.node_id, incoming.hello.purpose))
        return link is not None and link.dials_again_first


def _opened(hosts: Sequence[str]) -> list[socket.socket]:
    """Sockets that listen at one port of all addresses.

    Only the first one, if `_MAX_PORTS` ports were in use at one of the others. Raises UsageError if
    the first host is no address of this node.
    """
    for _ in range(_MAX_PORTS):
        first = listen_tcp(hosts[0], 0)
        others = _listen_on_others(first, hosts[1:])
        if others is not None:
            return [first, *others]
        first.close()
    return [listen_tcp(hosts[0], 0)]


def _listen_on_others(first: socket.socket, hosts: Sequence[str]) -> list[socket.socket] | None:
    """Sockets at the same port of the other addresses; None if one of them has it in use."""
    found: list[socket.socket] = []
    for host in hosts:
        try:
            found.append(listen_tcp(host, first.getsockname()[1]))
        except AddressTaken:
            for sock in found:
                sock.close()
            return None
        except UsageError as error:
            _log.warning("the SMPs of other nodes cannot connect to %s: %s", host, error)
    return found


def _next(incoming: IncomingLink) -> TransferEnvelope:
    envelope = incoming.socket.receive()
    if envelope.generation != incoming.hello.generation:
        raise ProtocolError(f"{incoming.socket.peer} sent a frame of another generation")
    return envelope
