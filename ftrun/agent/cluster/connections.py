"""The cluster thread: it owns the connections to other agents, and the control loop decides in it.

Runs in:  agent, a thread of its own. It never waits for the work of a node: torch, workers, the SMP
          and the disk belong to the main thread.
Takes in: connections, frames, events of the main thread, time.
Gives:    frames, dials, commands for the executor; ranks suspended and resumed at once.
Survives: any peer, whatever it sends; the longest wait of the main thread.
Source:   a peer's standby deadlocked on one store client that heartbeats and a blocking read
          shared. Here heartbeats share nothing with code that can block.

Rule 1: there is one connection to each node: the newest, over any rail. Frames that arrived over an
        older connection are handled. Then it is closed without a message. dialing.py has the one
        exception.
"""

import logging
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from ftrun import clock
from ftrun.agent.cluster.control_loop import ControlLoop
from ftrun.agent.cluster.dialing import (
    AuthenticatedConnection,
    ConnectionFailover,
    Dialled,
    Handshakes,
    PendingDial,
    Serve,
)
from ftrun.errors import FtrunError, PeerError, PeerLost
from ftrun.membership.events import (
    ClockTick,
    ConnectFailed,
    ConnectionClosed,
    ConnectionOpened,
    Happening,
    MessageReceived,
)
from ftrun.records.membership import ConnectionFailedOver
from ftrun.recovery.commands import Connect, JournalEntry, NetworkCommand, Send
from ftrun.wire.cluster.membership import JoinRejected
from ftrun.wire.cluster.messages import (
    AnyClusterMessage,
    ClusterEnvelope,
    ClusterStatusReply,
    ClusterStatusRequest,
    DrainNode,
    JournalLines,
    ProbeLinkRequest,
)
from ftrun.wire.messages.faults import ForwardFault, ForwardFaultReply
from ftrun.wire.transport.handshake import PeerIdentity
from ftrun.wire.transport.peer_connection import PeerConnection
from ftrun.wire.transport.secret import Secret

_log = logging.getLogger(__name__)

TICK_S = 0.05
Connection = PeerConnection[ClusterEnvelope]
SuspendNow = Callable[[bool], None]
"""Suspend (True) or resume (False) this node's ranks: at once, from any thread."""

Lease = Callable[[float | None], None]
"""Time until which this node's ranks may step; None: without a limit. From any thread."""

OtherMessages = Callable[[str, AnyClusterMessage], None]
"""Takes a message that needs no decision, and its sender; in this thread, without waiting."""

_ASIDES = (
    DrainNode, JournalLines, ClusterStatusRequest, ClusterStatusReply, ForwardFault,
    ForwardFaultReply, ProbeLinkRequest,
)  # fmt: skip
"""Messages that need no decision about the run."""


_Inbox = Happening | AuthenticatedConnection | Callable[[], None] | None


class ClusterConnections:
    """The connections of one agent to the others, and the thread of its control loop."""

    def __init__(  # noqa: PLR0913 - the parts that it serves
        self,
        control_loop: ControlLoop,
        identity: PeerIdentity,
        secret: Secret | None,
        listeners: list[socket.socket],
        *,
        wake_executor: Callable[[], None],
        suspend_now: SuspendNow,
        lease: Lease,
        on_other_message: OtherMessages,
        dialled: Dialled,
        serve_ring: Serve,
        each_turn: Callable[[float], None],
    ) -> None:
        self.control_loop = control_loop
        self._node_id = identity.node_id
        self._wake_executor = wake_executor
        self.suspend_now = suspend_now
        self._lease = lease
        self._on_other_message = on_other_message
        self._each_turn = each_turn
        self._handshakes = Handshakes(
            identity, secret, take=self.post, dialled=dialled, serve_ring=serve_ring
        )
        self.failover = ConnectionFailover(
            control_loop.member.me, control_loop.settings, control_loop.card_of
        )
        self._selector = selectors.DefaultSelector()
        self._inbox: SimpleQueue[_Inbox] = SimpleQueue()
        self._connections: dict[str, Connection] = {}
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._listeners = listeners
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self.failure: Exception | None = None
        """The exception that has ended this thread. The ranks are suspended, and the agent must
        end."""
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="ftrun-cluster", daemon=True)

    # --- any thread ---------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def send(self, node_id: str, message: AnyClusterMessage) -> None:
        """Send a message that needs no decision, such as lines for the merged journal."""
        self.post(partial(self._send, node_id, message))

    def corrupt_next(self) -> None:
        """Flip a bit in the next frame to each other agent, see `ftrun inject-fault`."""
        self.post(self._corrupt)

    def wake(self) -> None:
        with suppress(OSError):  # the thread wakes anyway, or has ended
            self._wake_write.send(b"\0")

    def close(self) -> None:
        self.post(None)
        self._thread.join(5.0)

    def post(self, what: _Inbox) -> None:
        self._inbox.put(what)
        self.wake()

    # --- this thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over:
                for key, mask in self._selector.select(TICK_S):
                    self._on_ready(key.fileobj, mask)
                self._take_inbox()
                self._think(ClockTick())
                self._lease(self.control_loop.member.suspension.lease_s)
                now_s = clock.now_s()
                for call in self.failover.unresponsive(self._connections, now_s=now_s):
                    self._handshakes.call(PendingDial(*call))
                self._each_turn(now_s)
        except Exception as error:  # noqa: BLE001 - any of them ends this agent
            _log.exception("the thread that speaks with the other nodes ended in a bug of ftrun")
            self.failure = error
            self.suspend_now(True)
            self._wake_executor()
        finally:
            self._hang_up_all()

    def _on_ready(self, ready: object, mask: int) -> None:
        if ready is self._wake_read:
            with suppress(BlockingIOError):
                self._wake_read.recv(4096)
        elif isinstance(ready, socket.socket):
            self._handshakes.accept(ready)
        elif isinstance(ready, PeerConnection):
            self._serve(ready, mask)

    def _take_inbox(self) -> None:
        with suppress(Empty):
            while True:
                what = self._inbox.get_nowait()
                if what is None:
                    self._is_over = True
                elif isinstance(what, AuthenticatedConnection):
                    self._made(what)
                elif callable(what):
                    what()
                else:
                    if isinstance(what, ConnectFailed):
                        self._handshakes.ended((what.host, what.port))
                    self._think(what)

    def _think(self, event: Happening) -> None:
        before = self.control_loop.orders.qsize()
        network = self.control_loop.think(event)
        if self.control_loop.orders.qsize() != before:
            self._wake_executor()
        for command in network:
            self._carry_out(command)

    def _carry_out(self, command: NetworkCommand) -> None:
        match command:
            case Connect():
                if command.node_id not in self._connections:
                    self._handshakes.call(PendingDial(command, self.failover.of(command)))
            case Send():
                self._send(command.node_id, command.message)
            case _:
                self._drop(command.node_id)

    def _corrupt(self) -> None:
        for connection in self._connections.values():
            connection.is_corrupted = True

    def _send(self, node_id: str, message: AnyClusterMessage) -> None:
        connection = self._connections.get(node_id)
        if connection is None:
            return
        connection.generation = max(0, self.control_loop.member.follower.generation)
        try:
            connection.send(message)
        except PeerLost:
            self._lost(node_id, connection)
        except FtrunError as error:
            _log.warning("not sent to node %s: %s", node_id, error)
        else:
            self._watch(connection)

    # --- connections --------------------------------------------------------------------------

    def _made(self, made: AuthenticatedConnection) -> None:
        if made.call is not None:
            self._handshakes.ended(made.call.at)
        connection = PeerConnection(made.sock, made.session, ClusterEnvelope)
        node_id, incarnation = connection.peer.node_id, connection.peer.incarnation
        if node_id == self._node_id:
            connection.close()
            return
        old = self._connections.get(node_id)
        if old is not None and _are_two(old, connection, self.failover.hosts_of(node_id)):
            self._turn_away(connection, old.address)
            return
        if made.address is not None:
            self.failover.met((node_id, incarnation), made.address.host, made.address.port)
        is_ours, now_s = made.call is not None, clock.now_s()
        if old is not None and self.failover.keeps(
            node_id, incarnation, is_ours=is_ours, now_s=now_s
        ):
            connection.close()
            return
        if old is not None:
            self._drain(node_id, old, connection)
        self._connections[node_id] = connection
        self.failover.made(node_id, incarnation, is_ours=is_ours, now_s=now_s)
        self._selector.register(connection, selectors.EVENT_READ)
        self._report_direction(node_id, made)
        self._think(ConnectionOpened(node_id, incarnation))

    def _turn_away(self, connection: Connection, address: str) -> None:
        text = (
            f"{connection.address} says it is node {connection.peer.node_id}, and so does "
            f"{address}. Name each node differently with --node-id"
        )
        self._handshakes.report_once(text)
        with suppress(PeerError):
            connection.send(JoinRejected(text))
        connection.close()

    def _drain(self, node_id: str, old: Connection, new: Connection) -> None:
        if old.peer.incarnation == new.peer.incarnation:
            with suppress(PeerError):
                for envelope in old.receive_ready():
                    self._received(node_id, envelope.body)
        self._drop(node_id)

    def _report_direction(self, node_id: str, made: AuthenticatedConnection) -> None:
        call, address = made.call, made.address
        if call is None or address is None or address.host == call.dial.host:
            return
        text = f"node {node_id} does not answer at {call.dial.host}; {address.host} is used"
        record = ConnectionFailedOver(text, node_id, address.host, instead_of=call.dial.host)
        self.control_loop.orders.put(JournalEntry(record, announce=True))
        self._wake_executor()

    def _serve(self, connection: Connection, mask: int) -> None:
        node_id = connection.peer.node_id
        if self._connections.get(node_id) is not connection:
            return
        try:
            if mask & selectors.EVENT_WRITE:
                connection.flush()
            if mask & selectors.EVENT_READ:
                envelopes = connection.receive_ready()
                if envelopes:
                    self.failover.received(node_id, now_s=clock.now_s())
                for envelope in envelopes:
                    self._received(node_id, envelope.body)
        except PeerError as error:
            _log.debug("node %s: %s", node_id, error)
            self._lost(node_id, connection)
        else:
            self._watch(connection)

    def _received(self, node_id: str, message: AnyClusterMessage) -> None:
        if isinstance(message, _ASIDES):
            self._on_other_message(node_id, message)
        else:
            self._think(MessageReceived(node_id, message))

    def _lost(self, node_id: str, connection: Connection) -> None:
        if self._connections.get(node_id) is connection:
            self._drop(node_id)
            self._think(ConnectionClosed(node_id))

    def _drop(self, node_id: str) -> None:
        connection = self._connections.pop(node_id, None)
        if connection is not None:
            self.failover.gone(node_id)
            self._selector.unregister(connection)
            connection.close()

    def _watch(self, connection: Connection) -> None:
        """Wait for writability only while bytes are waiting to be sent."""
        if self._connections.get(connection.peer.node_id) is not connection:
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
        if self._selector.get_key(connection).events != wanted:
            self._selector.modify(connection, wanted)

    def _hang_up_all(self) -> None:
        for connection in self._connections.values():
            with suppress(PeerError):
                connection.flush()
            connection.close()
        for listener in self._listeners:
            listener.close()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()


def _are_two(old: Connection, new: Connection, hosts: set[str]) -> bool:
    """Whether two machines use one node id, and it is not one node that was restarted."""
    if old.peer.incarnation == new.peer.incarnation or old.address == new.address:
        return False
    return not {old.address, new.address} <= hosts
