"""Connections that this agent accepts and dials, until each has proven its identity.

Runs in:  agent: called in the cluster thread; a short-lived thread for each handshake.
Takes in: sockets of unauthenticated peers; addresses of agents.
Gives:    authenticated connections, failed dials; probes, answered here.
Survives: any unauthenticated peer, whatever it sends or omits.

Rule 1: a handshake waits for an unauthenticated peer, so no other work waits for a handshake.
Rule 2: an address that is being dialled is not dialled again until that dial has ended.
"""

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from ftrun.agent.cluster.link_probe import serve_probe
from ftrun.agent.cluster.path_probe import serve_road
from ftrun.errors import HandshakeRefused, PeerError, PeerLost
from ftrun.membership.events import ConnectFailed
from ftrun.recovery.commands import Connect
from ftrun.wire.transport.address_race import PeerAddress, reach
from ftrun.wire.transport.doors import Door, Doors
from ftrun.wire.transport.handshake import (
    AuthSession,
    PeerIdentity,
    accept_handshake,
    dial_handshake,
)
from ftrun.wire.transport.secret import Secret
from ftrun.wire.transport.tcp import tune

_log = logging.getLogger(__name__)

DIAL_S = 1.0
MAX_HANDSHAKES = 64
"""Further connections are closed while this number of handshakes is in progress."""

MAX_SAID = 100
"""Maximum number of different refusal reasons that are logged."""

Dialled = Callable[[str, str, int], None]
"""Takes node id, host and port of an agent that was reached and has received nothing from this one
yet. It is called in the handshake's thread, where it may wait."""

_PROBES: dict[str, Callable[[socket.socket], None]] = {"probe": serve_probe, "road": serve_road}
"""By the purpose of the dialling peer."""


@dataclass(frozen=True, slots=True)
class PendingDial:
    """A node to dial, and the addresses to try."""

    dial: Connect
    ways: list[PeerAddress]

    @property
    def at(self) -> tuple[str, int]:
        return (self.dial.host, self.dial.port)


@dataclass(frozen=True, slots=True)
class AuthenticatedConnection:
    """A connection that a handshake has authenticated."""

    sock: socket.socket
    session: AuthSession
    call: PendingDial | None = None
    """The dial that it answers; None: the other side has dialled."""
    way: PeerAddress | None = None
    """The address over which it was made."""


Take = Callable[[AuthenticatedConnection | ConnectFailed], None]
"""Takes the result of a handshake; from any thread."""


class Handshakes:
    """All handshakes in progress at one agent.

    Args:
        identity: of this agent.
        secret: of the run.
        take: receives the result of each handshake, see `Take`.
        dialled: receives the agents that were reached, see `Dialled`.
    """

    def __init__(
        self, identity: PeerIdentity, secret: Secret | None, *, take: Take, dialled: Dialled
    ) -> None:
        self._identity = identity
        self._secret = secret
        self._take = take
        self._dialled = dialled
        self._calling: set[tuple[str, int]] = set()
        self._said: set[str] = set()
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
        """The result of the dial to this address was handled."""
        self._calling.discard(at)

    def say_once(self, text: str) -> None:
        """Log a refusal once.

        The operator watches this node, and the refused peer may belong to another operator.
        """
        if text not in self._said and len(self._said) < MAX_SAID:
            self._said.add(text)
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
            self.say_once(str(error))
        except (PeerError, OSError) as error:
            sock.close()
            _log.debug("a stranger: %s", error)
        else:
            serve = _PROBES.get(session.peer.purpose)
            if serve is None:
                self._take(AuthenticatedConnection(sock, session))
            else:
                with sock, suppress(OSError):
                    serve(sock)
        finally:
            door.leave()

    def _called(self, call: PendingDial) -> None:
        command = call.dial
        try:
            (sock, session), way = reach(
                call.ways, partial(self._greet, command.node_id), deadline_s=DIAL_S
            )
            with ExitStack() as closing:
                closing.enter_context(sock)
                self._dialled(session.peer.node_id, way.host, way.port)
                closing.pop_all()
        except PeerError as error:
            refused = isinstance(error, PeerLost) and error.how == "refused"
            final = isinstance(error, HandshakeRefused)
            what = (command.host, command.port, command.node_id)
            self._take(ConnectFailed(*what, refused, str(error), final))
        except Exception:  # noqa: BLE001
            # See Rule 2: without a result the address would never be dialled again.
            _log.exception("the call to node %s ended in a bug of ftrun", command.node_id)
            why = "a bug in ftrun; the agent's log has it"
            self._take(
                ConnectFailed(command.host, command.port, command.node_id, False, why, False)
            )
        else:
            self._take(AuthenticatedConnection(sock, session, call, way))

    def _greet(
        self, node_id: str, sock: socket.socket, way: PeerAddress
    ) -> tuple[socket.socket, AuthSession]:
        """The handshake; at an address other than that of its card the peer must be that node."""

        def admit(peer: PeerIdentity) -> str:
            is_meant = way.is_sure or peer.node_id == node_id
            return "" if is_meant else f"node {node_id} was to listen at {way.host}"

        return sock, dial_handshake(sock, self._identity, self._secret, admit=admit)


def _started(work: Callable[..., None], what: object) -> bool:
    try:
        threading.Thread(target=work, args=(what,), daemon=True).start()
    except RuntimeError as error:
        _log.debug("no thread: %s", error)
        return False
    return True
