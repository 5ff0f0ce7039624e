"""TCP-like connections between agents, over links that fail.

A dead process on a living kernel refuses, and its connections are reset. A node that is off, frozen
or cut off does not answer: sent data waits, and after `USER_TIMEOUT_S` the sender's end closes. The
kernel of a frozen process accepts data. A firewall that resets looks like a dead process. Within a
connection everything arrives in order, or the connection ends. Only an unruly world loses,
duplicates or reorders messages.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ftrun.membership.events import (
    ConnectFailed,
    ConnectionClosed,
    ConnectionOpened,
    MessageReceived,
)
from ftrun.wire.cluster.messages import AnyClusterMessage, ClusterEnvelope

if TYPE_CHECKING:
    from simulation.node import Agent, Node
    from simulation.world import World

USER_TIMEOUT_S = 3.0
DIAL_S = 1.0
HANDSHAKE_S = 3.0
_POLL_S = 0.1
_RESEND_S = 0.3

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ClusterEnvelope).decode


class End:
    """One end of a connection."""

    __slots__ = ("agent", "backlog", "early", "is_open", "is_ready", "last_s", "peer", "unacked_s")

    def __init__(self, agent: "Agent") -> None:
        self.agent = agent
        self.is_open = True
        self.is_ready = False
        self.early: list[bytes] = []
        """Messages that arrived before the handshake was complete at this end."""
        self.last_s = 0.0
        self.backlog: list[bytes] = []
        self.unacked_s = -1.0
        self.peer: End


class Network:
    """All links between agents, and the messages on them."""

    def __init__(self, world: "World", *, unruly: float) -> None:
        self.world = world
        self.nodes: dict[str, Node] = {}
        self.cuts: set[tuple[str, str]] = set()
        """Directed: packets from the first node do not arrive at the second."""
        self.refused: set[tuple[str, str]] = set()
        """Cuts in which a firewall resets and refuses connections although the process is alive."""
        self.slow: dict[tuple[str, str], float] = {}
        self.refusing: set[tuple[str, str]] = set()
        """A firewall refuses connections that the first dials to the second, whose agent may be
        alive.
        """
        self.num_messages = 0
        self.num_bytes = 0
        self.on_send: Callable[[str, str, AnyClusterMessage], None] | None = None
        """Observes messages: sender, receiver, message."""
        self._random = world.stream("network")
        self._unruly = unruly
        self._encoded: tuple[object, int, bytes] | None = None

    # --- links --------------------------------------------------------------------------------

    def passes(self, source: str, target: str) -> bool:
        """Whether a packet that leaves now arrives."""
        if (source, target) in self.cuts:
            return False
        nodes = self.nodes
        return nodes[source].is_running and nodes[target].is_running

    def refuse(self, pairs: list[tuple[str, str]]) -> None:
        """A firewall is inserted between these nodes."""
        self.refused.update(pairs)
        for source, target in pairs:
            agent = self.nodes[source].agent
            end = agent.ends.get(target) if agent is not None else None
            if end is not None:
                self.world.after(self.delay_s(source, target), self._closed, end)

    def delay_s(self, source: str, target: str) -> float:
        base_s = 0.0005 + 0.004 * self._random.random()
        return base_s + self.slow.get((source, target), 0.0) * self._random.random()

    # --- connections --------------------------------------------------------------------------

    def dial(self, agent: "Agent", host: str, port: int, node_id: str) -> None:
        if (host, port) in agent.dialling or node_id in agent.ends:
            return
        agent.dialling.add((host, port))
        mine = agent.node.node_id
        there = self.delay_s(mine, host)
        if (mine, host) in self.refused and self.nodes[host].is_on:
            self.world.after(there, self._dial_failed, agent, host, port, node_id, True)
            return
        if not (self.passes(mine, host) and self.passes(host, mine)):
            self.world.after(DIAL_S, self._dial_failed, agent, host, port, node_id, False)
            return
        self.world.after(there, self._arrive, agent, host, port, node_id)

    def _arrive(
        self, agent: "Agent", host: str, port: int, node_id: str, waited_s: float = 0.0
    ) -> None:
        mine, there = agent.node.node_id, self.nodes[host]
        if not (self.passes(mine, host) and self.passes(host, mine)):
            self.world.after(DIAL_S, self._dial_failed, agent, host, port, node_id, False)
            return
        back_s = self.delay_s(host, mine)
        other = there.agent
        is_there = other is not None and other.is_alive and other.card.port == port
        if other is None or not is_there or (mine, host) in self.refusing:
            self.world.after(back_s, self._dial_failed, agent, host, port, node_id, True)
        elif other.is_frozen and waited_s < HANDSHAKE_S:
            # Its kernel has the connection. It completes the handshake once it continues.
            after_s = waited_s + _POLL_S
            self.world.after(_POLL_S, self._arrive, agent, host, port, node_id, after_s)
        elif other.is_frozen:
            self._dial_failed(agent, host, port, node_id, False)
        elif host == mine:
            self.world.after(back_s, self._forget_dial, agent, host, port)
        else:
            ours, theirs = End(agent), End(other)
            ours.peer, theirs.peer = theirs, ours
            self.world.after(back_s, self._dialled, ours, host, port)
            self._opened(theirs)

    def _forget_dial(self, agent: "Agent", host: str, port: int) -> None:
        agent.dialling.discard((host, port))

    def _dial_failed(
        self, agent: "Agent", host: str, port: int, node_id: str, refused: bool
    ) -> None:
        if not agent.is_alive:
            return
        agent.dialling.discard((host, port))
        reason = f"{host} is refused" if refused else f"{host} does not answer"
        agent.happens(ConnectFailed(host, port, node_id, refused, reason))

    def _dialled(self, end: End, host: str, port: int) -> None:
        if not end.agent.is_alive:
            self._reset(end.peer)
            return
        if not end.is_open:  # the other side ended before the handshake was complete here
            self._dial_failed(end.agent, host, port, end.peer.agent.node.node_id, False)
            return
        end.agent.dialling.discard((host, port))
        self._opened(end)

    def _opened(self, end: End) -> None:
        agent, peer = end.agent, end.peer.agent
        old = agent.ends.get(peer.node.node_id)
        if old is not None:
            self.hang_up(agent, peer.node.node_id)
        agent.ends[peer.node.node_id] = end
        end.is_ready = True
        agent.happens(ConnectionOpened(peer.node.node_id, peer.card.incarnation))
        early, end.early = end.early, []
        for data in early:
            self._deliver(end, data)

    def hang_up(self, agent: "Agent", node_id: str) -> None:
        """Closes this end; the other end notices it if it is reachable."""
        end = agent.ends.pop(node_id, None)
        if end is not None:
            end.is_open = False
            self._reset(end.peer)

    def reset(self, agent: "Agent", node_id: str) -> None:
        """A firewall ends a connection, and this end notices it."""
        end = agent.ends.get(node_id)
        if end is not None:
            self._closed(end)

    def _reset(self, end: End) -> None:
        """The other end no longer exists; this end notices it if the network passes the packet."""
        source, target = end.peer.agent.node.node_id, end.agent.node.node_id
        if self.passes(source, target):
            self.world.after(self.delay_s(source, target), self._closed, end)

    def _closed(self, end: End) -> None:
        if not end.is_open:
            return
        end.is_open = False
        agent, node_id = end.agent, end.peer.agent.node.node_id
        if agent.is_alive and end.is_ready:
            agent.happens_to(end, ConnectionClosed(node_id))

    def process_died(self, agent: "Agent") -> None:
        """The kernel of the process closes its connections."""
        for node_id in sorted(agent.ends):
            self.hang_up(agent, node_id)

    # --- messages -----------------------------------------------------------------------------

    def send(self, agent: "Agent", node_id: str, body: AnyClusterMessage) -> None:
        end = agent.ends.get(node_id)
        if end is None:
            return
        if self.on_send is not None:
            self.on_send(agent.node.node_id, node_id, body)
        data = self._encode(agent, body)
        self.num_messages += 1
        self.num_bytes += len(data)
        if self._unruly and self._random.random() < self._unruly:
            self._misbehave(end, data)
            return
        self._send(end, data)

    def _encode(self, agent: "Agent", body: AnyClusterMessage) -> bytes:
        last = self._encoded
        if last is not None and last[0] is body and last[1] == agent.card.incarnation:
            return last[2]
        generation = max(0, agent.member.follower.generation)
        data = _encode(ClusterEnvelope("run", generation, agent.card.incarnation, body))
        self._encoded = (body, agent.card.incarnation, data)
        return data

    def _send(self, end: End, data: bytes) -> None:
        source, target = end.agent.node.node_id, end.peer.agent.node.node_id
        if end.backlog or not self.passes(source, target):
            end.backlog.append(data)
            self._unacked(end)
            return
        now_s = self.world.now_s
        end.last_s = max(end.last_s, now_s + self.delay_s(source, target))
        self.world.after(end.last_s - now_s, self._deliver, end.peer, data)
        if not self.passes(target, source):
            self._unacked(end)

    def _unacked(self, end: End) -> None:
        if end.unacked_s < 0:
            end.unacked_s = self.world.now_s
            self.world.after(_RESEND_S, self._resend, end)

    def _resend(self, end: End) -> None:
        if not end.is_open or not end.agent.is_alive:
            return
        source, target = end.agent.node.node_id, end.peer.agent.node.node_id
        if not self.nodes[source].is_running:
            end.unacked_s = self.world.now_s  # its own clock is paused
            self.world.after(_RESEND_S, self._resend, end)
            return
        if self.passes(source, target) and self.passes(target, source):
            end.unacked_s = -1.0
            backlog, end.backlog = end.backlog, []
            for data in backlog:
                self._send(end, data)
        elif self.world.now_s - end.unacked_s >= USER_TIMEOUT_S:
            self._closed(end)
        else:
            self.world.after(_RESEND_S, self._resend, end)

    def _deliver(self, end: End, data: bytes) -> None:
        agent = end.agent
        if not end.is_open or not agent.is_alive:
            if agent.node.is_running:
                self._reset(end.peer)
            return
        if not end.is_ready:
            end.early.append(data)
            return
        sender = end.peer.agent.node.node_id
        agent.happens_to(end, MessageReceived(sender, self._decode(agent, data)))

    def _decode(self, agent: "Agent", data: bytes) -> AnyClusterMessage:
        return _decode(data).body

    def _misbehave(self, end: End, data: bytes) -> None:
        """Loses, duplicates or delays one message."""
        what = self._random.randrange(3)
        if what == 0:
            return
        if what == 1:
            self._send(end, data)
        self.world.after(self._random.random(), self._deliver_late, end, data)

    def _deliver_late(self, end: End, data: bytes) -> None:
        source, target = end.agent.node.node_id, end.peer.agent.node.node_id
        if end.is_open and self.passes(source, target):
            self._deliver(end.peer, data)
