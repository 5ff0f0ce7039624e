"""Connections that this agent accepts and dials, and the failover to other rails of a node.

Runs in:  agent: called in the cluster thread; a short-lived thread for each handshake.
Takes in: sockets of unauthenticated peers; addresses of agents; the newest cards of nodes; for each
          connection, the time of its start and of its last received frame.
Gives:    authenticated connections, failed dials; answers to probes; addresses to dial; connections
          that are cut although their machine may be reachable.
Survives: any behaviour of unauthenticated peers; a rail that is cut at any place, in one or both
          directions.

Rule 1: an unauthenticated peer may delay a handshake, so no other work waits for a handshake.
Rule 2: an address that is being dialled is not dialled again until that dial has ended.
Rule 3: a connection is dialled again over all rails if it has received nothing for two heartbeat
        intervals, and the peer's kernel has not acknowledged the sent bytes. The side that detects
        this first dials. A paused process is not dialled again: its kernel acknowledges bytes, and
        another rail would not help.
Rule 4: this module does not decide that a node is lost. If all rails of a node are cut, the node is
        unresponsive, like a node with one rail. The old connection stays until a new connection is
        authenticated.
Rule 5: if both sides have dialled at the same time, the connection dialled by the node with the
        smaller name stays. If the sides chose differently, each would close the other's connection.
Rule 6: this module never dials a node with one rail again; the kernel repeats what was not
        acknowledged.
"""

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from ftrun.agent.cluster.path_probe import serve_path_probe, serve_probe
from ftrun.config.cluster import MembershipSettings
from ftrun.errors import HandshakeRefused, PeerError, PeerLost
from ftrun.membership.events import ConnectFailed
from ftrun.recovery.commands import Connect
from ftrun.wire.cluster.generation import Identity, NodeCard
from ftrun.wire.cluster.messages import ClusterEnvelope
from ftrun.wire.transport.address_race import PeerAddress, reach, source_to
from ftrun.wire.transport.doors import Door, Doors
from ftrun.wire.transport.handshake import (
    AuthSession,
    PeerIdentity,
    accept_handshake,
    dial_handshake,
)
from ftrun.wire.transport.peer_connection import PeerConnection
from ftrun.wire.transport.secret import Secret
from ftrun.wire.transport.tcp import tune, unacknowledged_bytes

_log = logging.getLogger(__name__)

DIAL_S = 1.0
MAX_HANDSHAKES = 64
"""Further connections are closed while this number of handshakes is in progress."""

MAX_LOGGED = 100
"""Maximum number of different refusal reasons that are logged."""

Dialled = Callable[[str, str, int], None]
"""Called with node id, host and port of an agent after its handshake, before other messages are
sent to it. The call is in the handshake's thread and may wait."""

Serve = Callable[[socket.socket, AuthSession], None]
"""Called with a connection for one measurement, in the handshake's thread. It is closed then."""

_PROBES: dict[str, Serve] = {
    "probe": lambda sock, _: serve_probe(sock),
    "path": lambda sock, _: serve_path_probe(sock),
}
"""Functions that answer probes, by the purpose of the dialling peer."""


@dataclass(frozen=True, slots=True)
class PendingDial:
    """A node to dial, and the addresses to try."""

    dial: Connect
    addresses: list[PeerAddress]

    @property
    def at(self) -> tuple[str, int]:
        return (self.dial.host, self.dial.port)


@dataclass(frozen=True, slots=True)
class AuthenticatedConnection:
    """A connection that a handshake has authenticated."""

    sock: socket.socket
    session: AuthSession
    call: PendingDial | None = None
    """The dial of this agent that led to it; None: the other side has dialled."""
    address: PeerAddress | None = None


Take = Callable[[AuthenticatedConnection | ConnectFailed], None]
"""Called with the result of a handshake, in any thread."""


class Handshakes:
    """All handshakes in progress at one agent."""

    def __init__(
        self,
        identity: PeerIdentity,
        secret: Secret | None,
        *,
        take: Take,
        dialled: Dialled,
        serve_ring: Serve,
    ) -> None:
        self._identity = identity
        self._secret = secret
        self._take = take
        self._dialled = dialled
        self._serve = {**_PROBES, "ring": serve_ring}
        self._calling: set[tuple[str, int]] = set()
        self._logged: set[str] = set()
        self._doors = Doors(MAX_HANDSHAKES)

    # --- called without waiting -------------------------------------------------------------------

    def accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        door = self._doors.enter(sock)
        if door is None:
            sock.close()
            return
        if not _started(partial(self._accepted, sock), door):
            sock.close()
            door.leave()

    def call(self, call: PendingDial) -> None:
        if call.at in self._calling:
            return
        self._calling.add(call.at)
        if not _started(self._called, call):
            self._calling.discard(call.at)

    def ended(self, at: tuple[str, int]) -> None:
        self._calling.discard(at)

    def report_once(self, text: str) -> None:
        """Log a refusal once, because the refused peer may belong to another operator."""
        if text not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(text)
            _log.warning("%s", text)

    # --- in a handshake's thread --------------------------------------------------------------

    def _accepted(self, sock: socket.socket, door: Door) -> None:
        try:
            tune(sock, bulk=False)
            session = accept_handshake(
                sock,
                self._identity,
                self._secret,
                deadline_s=door.handshake_s,
                hello_s=door.hello_s,
            )
        except HandshakeRefused as error:
            sock.close()
            self.report_once(str(error))
        except (PeerError, OSError) as error:
            sock.close()
            _log.debug("an unauthenticated peer: %s", error)
        else:
            serve = self._serve.get(session.peer.purpose)
            if serve is None:
                self._take(AuthenticatedConnection(sock, session))
            else:
                with sock, suppress(OSError):
                    serve(sock, session)
        finally:
            door.leave()

    def _called(self, call: PendingDial) -> None:
        command = call.dial
        what = (command.host, command.port, command.node_id)
        try:
            (sock, session), address = reach(
                call.addresses, partial(self._greet, command.node_id), deadline_s=DIAL_S
            )
            with ExitStack() as closing:
                closing.enter_context(sock)
                self._dialled(session.peer.node_id, address.host, address.port)
                closing.pop_all()
        except PeerError as error:
            refused = isinstance(error, PeerLost) and error.how == "refused"
            final = isinstance(error, HandshakeRefused)
            self._take(ConnectFailed(*what, refused, str(error), final))
        except Exception:  # noqa: BLE001
            # Rule 2: without a result, the address would never be dialled again.
            _log.exception("a bug in ftrun has ended the dial of node %s", command.node_id)
            reason = "a bug in ftrun; see the agent's log"
            self._take(ConnectFailed(*what, False, reason, False))
        else:
            self._take(AuthenticatedConnection(sock, session, call, address))

    def _greet(
        self, node_id: str, sock: socket.socket, address: PeerAddress
    ) -> tuple[socket.socket, AuthSession]:
        """The handshake. At an address other than the card's, the peer must be the dialled node."""

        def admit(peer: PeerIdentity) -> str:
            is_meant = address.is_sure or peer.node_id == node_id
            return "" if is_meant else f"another node than {node_id} listens at {address.host}"

        return sock, dial_handshake(sock, self._identity, self._secret, admit=admit)


def _started(work: Callable[..., None], what: object) -> bool:
    try:
        threading.Thread(target=work, args=(what,), daemon=True).start()
    except RuntimeError as error:
        _log.debug("no thread: %s", error)
        return False
    return True


MISSED_HEARTBEATS = 2.0
"""Number of heartbeat intervals without a frame."""

STUCK_HEARTBEATS = 0.8
"""Number of heartbeat intervals in which no byte was acknowledged."""

POLL_S = 0.1
YOUNG_S = 0.5
"""If two connections were made within this time, both sides have dialled at once."""

MAX_MET = 10_000

CardOf = Callable[[str], NodeCard | None]


@dataclass
class _Line:
    """The state of one connection."""

    incarnation: int
    dialler: str
    """Node id."""
    made_s: float
    received_s: float
    stuck_s: float | None = None
    """Time of the first poll that found unacknowledged bytes; None: the last poll found none."""
    tried_s: float = 0.0
    """Time of the last new dial."""


class ConnectionFailover:
    """The failover of this agent's connections to all other agents."""

    def __init__(self, me: NodeCard, settings: MembershipSettings, card_of: CardOf) -> None:
        self._me = me
        self._card_of = card_of
        heartbeat_s = settings.times.heartbeat_interval_s
        # Another rail must answer before ranks are suspended at `self_fencing_timeout_s`.
        self._unresponsive_s = min(
            MISSED_HEARTBEATS * heartbeat_s, settings.times.self_fencing_timeout_s / 2
        )
        self._stuck_s = min(
            STUCK_HEARTBEATS * heartbeat_s, 0.4 * settings.times.self_fencing_timeout_s
        )
        self._lines: dict[str, _Line] = {}
        self._met: dict[tuple[Identity, str, int], None] = {}
        self._next_poll_s = 0.0

    # --- where to dial ------------------------------------------------------------------------

    def of(self, command: Connect) -> list[PeerAddress]:
        first = PeerAddress(command.host, command.port, is_sure=True)
        card = self._card_of(command.node_id) if command.node_id else None
        if card is None or (card.host, card.port) != (command.host, command.port):
            # The address is that of another incarnation of the node, or of an unknown node.
            return [first]
        identity = (card.node_id, card.incarnation)
        others = [
            PeerAddress(
                rail.host,
                rail.port,
                source=source_to(rail.host, self._me.rails),
                is_sure=(identity, rail.host, rail.port) in self._met,
            )
            for rail in card.rails
            if rail.port and rail.host != card.host
        ]
        return [first, *others]

    def met(self, identity: Identity, host: str, port: int) -> None:
        """Record that this incarnation of an agent has answered at an address; for any thread."""
        self._met[identity, host, port] = None
        while len(self._met) > MAX_MET:
            self._met.pop(next(iter(self._met)))

    def hosts_of(self, node_id: str) -> set[str]:
        card = self._card_of(node_id)
        return {card.host, *(rail.host for rail in card.rails)} if card is not None else set()

    # --- connections --------------------------------------------------------------------------

    def keeps(self, node_id: str, incarnation: int, *, is_ours: bool, now_s: float) -> bool:
        """Whether the present connection to a node stays and the new connection is closed."""
        line = self._lines.get(node_id)
        if line is None or line.incarnation != incarnation or now_s - line.made_s >= YOUNG_S:
            return False
        return line.dialler < (self._me.node_id if is_ours else node_id)

    def made(self, node_id: str, incarnation: int, *, is_ours: bool, now_s: float) -> None:
        dialler = self._me.node_id if is_ours else node_id
        self._lines[node_id] = _Line(incarnation, dialler, now_s, now_s)

    def received(self, node_id: str, *, now_s: float) -> None:
        if (line := self._lines.get(node_id)) is not None:
            line.received_s, line.stuck_s = now_s, None

    def gone(self, node_id: str) -> None:
        self._lines.pop(node_id, None)

    # --- unresponsive connections -----------------------------------------------------------------

    def unresponsive(
        self, connections: Mapping[str, PeerConnection[ClusterEnvelope]], *, now_s: float
    ) -> list[tuple[Connect, list[PeerAddress]]]:
        """Nodes to dial again, and their addresses, the address of the connection last."""
        if now_s < self._next_poll_s:
            return []
        self._next_poll_s = now_s + POLL_S
        found = []
        for node_id, connection in connections.items():
            line = self._lines.get(node_id)
            if line is None or not self._is_cut(line, connection, now_s):
                continue
            line.tried_s = now_s
            card = self._card_of(node_id)
            if card is None or card.incarnation != line.incarnation:
                continue
            command = Connect(card.host, card.port, node_id)
            addresses = self.of(command)
            if len(addresses) > 1:
                here = connection.address
                found.append((command, sorted(addresses, key=lambda address: address.host == here)))
        return found

    def _is_cut(
        self, line: _Line, connection: PeerConnection[ClusterEnvelope], now_s: float
    ) -> bool:
        # Poll the kernel early, so that `_stuck_s` can pass before `_unresponsive_s` is over.
        if now_s - line.received_s < self._unresponsive_s - self._stuck_s:
            return False
        if not unacknowledged_bytes(connection.fileno()):
            line.stuck_s = None
            return False
        if line.stuck_s is None:
            line.stuck_s = now_s
        is_unresponsive = now_s - line.received_s >= self._unresponsive_s
        is_stuck = now_s - line.stuck_s >= self._stuck_s
        return is_unresponsive and is_stuck and now_s - line.tried_s >= self._unresponsive_s / 2
