"""The thread that speaks with the other nodes' agents, and decides.

Runs in:  agent, a thread of its own. It never waits for anything a node does: torch, workers, the
          SMP and the disk are the main thread's.
Takes in: connections, frames, the hands' events, time.
Gives:    frames, dials, orders for the hands; ranks stopped and let go at once.
Survives: any peer, whatever it sends; the main thread's longest wait.
Source:   a peer's standby deadlocked on one store client that heartbeats and a blocking read had
          in common; here heartbeats share nothing with what can block.

Rule 1: a handshake waits for a stranger, so each has a short-lived thread of its own.
Rule 2: there is one connection to each node: the newest. An older one is closed without a word.
"""

import logging
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from ftrun.agent.brain import Brain, NetworkCommand, Wake
from ftrun.agent.link_probe import serve_probe
from ftrun.errors import FtrunError, HandshakeRefused, PeerError, PeerLost
from ftrun.recovery.commands import Command, Dial, HoldRanks, ReleaseRanks, Send
from ftrun.recovery.happenings import Closed, DialFailed, Happening, Heard, Opened, Passing
from ftrun.wire.ballot_messages import TurnedAway
from ftrun.wire.cluster import (
    AnyClusterMessage,
    AskClusterStatus,
    AskProbe,
    ClusterEnvelope,
    ClusterStatus,
    JournalLines,
)
from ftrun.wire.fault_messages import FaultAnswer, FaultOrdered
from ftrun.wire.handshake import Session, accept_handshake, dial_handshake
from ftrun.wire.identity import PeerIdentity
from ftrun.wire.peer import PeerConnection
from ftrun.wire.secret import Secret
from ftrun.wire.tcp import dial, tune

_log = logging.getLogger(__name__)

TICK_S = 0.05
DIAL_S = 1.0
MAX_HANDSHAKES = 64
"""More strangers at once than this are not listened to."""

MAX_SAID = 100
"""Different reasons for refusing strangers that are shown."""

Connection = PeerConnection[ClusterEnvelope]
HoldNow = Callable[[bool], None]
"""Stop this node's ranks, or let them go on: at once, from any thread."""

Dialled = Callable[[str, str, int], None]
"""Takes node id, host and port of an agent that was reached and has not heard of us yet; in the
handshake's thread, where it may wait."""

Aside = Callable[[str, AnyClusterMessage], None]
"""Takes a message that asks for no decision, and its sender; in this thread, without waiting."""

_ASIDES = (
    JournalLines, AskClusterStatus, ClusterStatus, FaultOrdered, FaultAnswer, AskProbe,
)  # fmt: skip
"""What asks for no decision about the run."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A connection that a handshake has proven."""

    sock: socket.socket
    session: Session
    dialled: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class _Out:
    """Something to send."""

    node_id: str
    message: AnyClusterMessage


@dataclass(frozen=True, slots=True)
class _Spoil:
    """A bit flips in the next frame to each other agent, see `ftrun inject-fault`."""


class ClusterThread:
    """One agent's connections to the others, with its brain among them."""

    def __init__(  # noqa: PLR0913 - whom its work concerns
        self,
        brain: Brain,
        identity: PeerIdentity,
        secret: Secret | None,
        listeners: list[socket.socket],
        *,
        wake_hands: Wake,
        hold_now: HoldNow,
        aside: Aside,
        dialled: Dialled,
    ) -> None:
        self.brain = brain
        self._identity = identity
        self._secret = secret
        self._wake_hands = wake_hands
        self.hold_now = hold_now
        self._aside = aside
        self._dialled_at = dialled
        self._selector = selectors.DefaultSelector()
        self._inbox: SimpleQueue[Happening | _Made | _Out | _Spoil | None] = SimpleQueue()
        self._connections: dict[str, Connection] = {}
        self._dialling: set[tuple[str, int]] = set()
        self._said: set[str] = set()
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._listeners = listeners
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="ftrun-cluster", daemon=True)

    # --- any thread ---------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def tell(self, event: Happening) -> None:
        self._inbox.put(event)
        self._wake()

    def send(self, node_id: str, message: AnyClusterMessage) -> None:
        """Something that asks for no decision, such as lines for the merged journal."""
        self._inbox.put(_Out(node_id, message))
        self._wake()

    def spoil_next(self) -> None:
        """Have a bit flip in the next frame to each other agent."""
        self._inbox.put(_Spoil())
        self._wake()

    def close(self) -> None:
        """Say what is still to be said, and close all connections."""
        self._inbox.put(None)
        self._wake()
        self._thread.join(5.0)

    # --- this thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over:
                for key, mask in self._selector.select(TICK_S):
                    self._on_ready(key.fileobj, mask)
                self._take_inbox()
                self._think(Passing())
        except Exception:
            _log.exception("the thread that speaks with the other nodes ended in a bug of ftrun")
            raise
        finally:
            self._hang_up_all()

    def _on_ready(self, ready: object, mask: int) -> None:
        if ready is self._wake_read:
            with suppress(BlockingIOError):
                self._wake_read.recv(4096)
        elif isinstance(ready, socket.socket):
            self._accept(ready)
        elif isinstance(ready, PeerConnection):
            self._serve(ready, mask)

    def _take_inbox(self) -> None:
        with suppress(Empty):
            while True:
                what = self._inbox.get_nowait()
                if what is None:
                    self._is_over = True
                elif isinstance(what, _Made):
                    self._made(what)
                elif isinstance(what, _Out):
                    self._send(what.node_id, what.message)
                elif isinstance(what, _Spoil):
                    for connection in self._connections.values():
                        connection.is_spoilt = True
                else:
                    if isinstance(what, DialFailed):
                        self._dialling.discard((what.host, what.port))
                    self._think(what)

    def _think(self, event: Happening) -> None:
        before = self.brain.orders.qsize()
        network = self.brain.think(event)
        if self.brain.orders.qsize() != before:
            self._wake_hands()
        for command in network:
            self._carry_out(command)

    def _carry_out(self, command: NetworkCommand) -> None:
        match command:
            case Dial():
                self._dial(command)
            case Send():
                self._send(command.node_id, command.message)
            case _:
                self._drop(command.node_id)

    def _send(self, node_id: str, message: AnyClusterMessage) -> None:
        connection = self._connections.get(node_id)
        if connection is None:
            return
        connection.generation = max(0, self.brain.member.follower.generation)
        try:
            connection.send(message)
        except PeerLost:
            self._lost(node_id, connection)
        except FtrunError as error:
            _log.warning("not sent to node %s: %s", node_id, error)
        else:
            self._watch(connection)

    # --- connections --------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        if not self._handshakes.acquire(blocking=False):
            sock.close()
            return
        if not _started(self._accepted, sock):
            sock.close()
            self._handshakes.release()

    def _accepted(self, sock: socket.socket) -> None:
        try:
            tune(sock, bulk=False)
            session = accept_handshake(sock, self._identity, self._secret)
        except HandshakeRefused as error:
            sock.close()
            self._say_once(str(error))
        except (PeerError, OSError) as error:
            sock.close()
            _log.debug("a stranger: %s", error)
        else:
            if session.peer.purpose == "probe":
                self._serve_probe(sock)
            else:
                self._inbox.put(_Made(sock, session, None))
                self._wake()
        finally:
            self._handshakes.release()

    def _serve_probe(self, sock: socket.socket) -> None:
        """In the handshake's thread: no connection of this node's is concerned."""
        with sock, suppress(OSError):
            serve_probe(sock)

    def _say_once(self, text: str) -> None:
        """The operator watches this node, and the one that is refused may be another's."""
        if text not in self._said and len(self._said) < MAX_SAID:
            self._said.add(text)
            _log.warning("%s", text)

    def _dial(self, command: Dial) -> None:
        at = (command.host, command.port)
        if at in self._dialling or command.node_id in self._connections:
            return
        self._dialling.add(at)
        if not _started(self._dialled, command):
            self._dialling.discard(at)

    def _dialled(self, command: Dial) -> None:
        host, port, node_id = command.host, command.port, command.node_id
        sock: socket.socket | None = None
        try:
            sock = dial(host, port, DIAL_S)
            session = dial_handshake(sock, self._identity, self._secret)
        except PeerError as error:
            if sock is not None:
                sock.close()
            refused = isinstance(error, PeerLost) and error.how == "refused"
            final = isinstance(error, HandshakeRefused)
            self._inbox.put(DialFailed(host, port, node_id, refused, str(error), final))
        else:
            self._dialled_at(session.peer.node_id, host, port)
            self._inbox.put(_Made(sock, session, (host, port)))
        self._wake()

    def _made(self, made: _Made) -> None:
        """A handshake has succeeded."""
        if made.dialled is not None:
            self._dialling.discard(made.dialled)
        connection = PeerConnection(made.sock, made.session, ClusterEnvelope)
        node_id = connection.peer.node_id
        if node_id == self._identity.node_id:
            connection.close()
            return
        old = self._connections.get(node_id)
        if old is not None and _are_two(old, connection):
            text = (
                f"{connection.address} says it is node {node_id}, and so does {old.address}. Name "
                "each node differently with --node-id"
            )
            self._say_once(text)
            with suppress(PeerError):
                connection.send(TurnedAway(text))
            connection.close()
            return
        if old is not None:
            del self._connections[node_id]
            self._close(old)
        self._connections[node_id] = connection
        self._selector.register(connection, selectors.EVENT_READ)
        self._think(Opened(node_id, connection.peer.incarnation))

    def _serve(self, connection: Connection, mask: int) -> None:
        node_id = connection.peer.node_id
        if self._connections.get(node_id) is not connection:
            return
        try:
            if mask & selectors.EVENT_WRITE:
                connection.flush()
            if mask & selectors.EVENT_READ:
                for envelope in connection.receive_ready():
                    self._heard(node_id, envelope.body)
        except PeerError as error:
            _log.debug("node %s: %s", node_id, error)
            self._lost(node_id, connection)
        else:
            self._watch(connection)

    def _heard(self, node_id: str, message: AnyClusterMessage) -> None:
        if isinstance(message, _ASIDES):
            self._aside(node_id, message)
        else:
            self._think(Heard(node_id, message))

    def _lost(self, node_id: str, connection: Connection) -> None:
        if self._connections.get(node_id) is connection:
            del self._connections[node_id]
            self._close(connection)
            self._think(Closed(node_id))

    def _drop(self, node_id: str) -> None:
        connection = self._connections.pop(node_id, None)
        if connection is not None:
            self._close(connection)

    def _watch(self, connection: Connection) -> None:
        """Look for room to write just while something waits for it."""
        if self._connections.get(connection.peer.node_id) is not connection:
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
        if self._selector.get_key(connection).events != wanted:
            self._selector.modify(connection, wanted)

    def _close(self, connection: Connection) -> None:
        self._selector.unregister(connection)
        connection.close()

    def _hang_up_all(self) -> None:
        for connection in self._connections.values():
            with suppress(PeerError):
                connection.flush()
            connection.close()
        for listener in self._listeners:
            listener.close()
        self._selector.close()

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            self._wake_write.send(b"\0")


def _started(work: Callable[..., None], what: object) -> bool:
    """Whether a thread could be had for it; the machine may have run out of them."""
    try:
        threading.Thread(target=work, args=(what,), daemon=True).start()
    except RuntimeError as error:
        _log.debug("no thread: %s", error)
        return False
    return True


def _are_two(old: Connection, new: Connection) -> bool:
    """Two agents under one name, and not one that was started again."""
    return old.peer.incarnation != new.peer.incarnation and old.address != new.address


class ClusterBrain(Brain):
    """A brain in a thread of its own: the hands' events cross over to it."""

    thread: ClusterThread | None = None

    def tell(self, event: Happening) -> None:
        assert self.thread is not None
        self.thread.tell(event)

    def passing(self) -> None:
        """It has a clock of its own."""

    def close(self) -> None:
        if self.thread is not None:
            self.thread.close()

    def _sort(self, command: Command, network: list[NetworkCommand]) -> None:
        # Ranks are stopped before anybody could have replaced them, whatever the hands do now.
        if isinstance(command, HoldRanks | ReleaseRanks) and self.thread is not None:
            self.thread.hold_now(isinstance(command, HoldRanks))
        super()._sort(command, network)
