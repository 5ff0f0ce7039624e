"""Failover to the other rails of a node: where else to dial it, and when to reconnect.

Runs in:  agent, the cluster thread.
Takes in: the newest cards of nodes; which connections were made, when each last received a frame.
Gives:    addresses to dial; connections that are cut although their machine may be reachable.
Survives: a rail that is cut anywhere, in one direction or in both.

Rule 1: a connection is dialled again over all rails if it has received nothing for two heartbeats,
        while the peer's kernel has not even acknowledged what was sent. The side that detects it
        first dials. A paused process is not dialled again: its kernel acknowledges, and no other
        rail would help.
Rule 2: nothing is decided here. A node whose rails are all cut is as unresponsive as one with one
        rail. The old connection stays until another one is authenticated.
Rule 3: if both sides have dialled at the same time, the connection stays that the node with the
        smaller name has dialled. Both sides must choose the same one, or each closes the other's.
Rule 4: a node with one rail is never dialled again here; its kernel handles the connection.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ftrun.config.cluster import MembershipSettings
from ftrun.recovery.commands import Connect
from ftrun.wire.cluster.generation import Identity, NodeCard
from ftrun.wire.cluster.messages import ClusterEnvelope
from ftrun.wire.transport.address_race import PeerAddress, source_to
from ftrun.wire.transport.peer_connection import PeerConnection
from ftrun.wire.transport.tcp import unacknowledged_bytes

SILENT_BEATS = 2.0
"""Heartbeats without a frame."""

STUCK_BEATS = 0.8
"""Number of heartbeats during which nothing was acknowledged."""

LOOK_S = 0.1
YOUNG_S = 0.5
"""Two connections made within this time were dialled by both sides at once."""

MAX_MET = 10_000

CardOf = Callable[[str], NodeCard | None]
"""Returns the newest card of a node; None if this agent has none."""


@dataclass
class _Line:
    """The state of one connection."""

    incarnation: int
    dialler: str
    """Node id."""
    made_s: float
    heard_s: float
    stuck_s: float | None = None
    """Since when the kernel holds unacknowledged bytes; None: it holds none, or was not asked
    yet."""
    tried_s: float = 0.0
    """When it was last dialled again."""


class ConnectionFailover:
    """The failover of one agent's connections to all others."""

    def __init__(self, me: NodeCard, settings: MembershipSettings, card_of: CardOf) -> None:
        self._me = me
        self._card_of = card_of
        beat_s = settings.times.heartbeat_s
        # Ranks are suspended at `cut_off_s`; by then the other rail must have answered.
        self._silent_s = min(SILENT_BEATS * beat_s, settings.times.stop_cut_off_s / 2)
        self._stuck_s = min(STUCK_BEATS * beat_s, 0.4 * settings.times.stop_cut_off_s)
        self._lines: dict[str, _Line] = {}
        self._met: dict[tuple[Identity, str, int], None] = {}
        self._look_s = 0.0

    # --- where to dial ------------------------------------------------------------------------

    def of(self, command: Connect) -> list[PeerAddress]:
        first = PeerAddress(command.host, command.port, is_sure=True)
        card = self._card_of(command.node_id) if command.node_id else None
        if card is None or (card.host, card.port) != (command.host, command.port):
            # The address is of another incarnation of that node, or of an unknown node.
            return [first]
        who = (card.node_id, card.incarnation)
        others = [
            PeerAddress(
                rail.host,
                rail.port,
                source=source_to(rail.host, self._me.rails),
                is_sure=(who, rail.host, rail.port) in self._met,
            )
            for rail in card.rails
            if rail.port and rail.host != card.host
        ]
        return [first, *others]

    def met(self, who: Identity, host: str, port: int) -> None:
        """This agent itself has answered at this address; for any thread."""
        self._met[who, host, port] = None
        while len(self._met) > MAX_MET:
            self._met.pop(next(iter(self._met)))

    def hosts_of(self, node_id: str) -> set[str]:
        card = self._card_of(node_id)
        return {card.host, *(rail.host for rail in card.rails)} if card is not None else set()

    # --- connections --------------------------------------------------------------------------

    def keeps(self, node_id: str, incarnation: int, *, is_ours: bool, now_s: float) -> bool:
        """Whether the present connection to a node stays, and the new one is closed.

        Args:
            node_id: the node.
            incarnation: of the peer of the new connection.
            is_ours: this side has dialled the new connection.
            now_s: the time.
        """
        line = self._lines.get(node_id)
        if line is None or line.incarnation != incarnation or now_s - line.made_s >= YOUNG_S:
            return False
        return line.dialler < (self._me.node_id if is_ours else node_id)

    def made(self, node_id: str, incarnation: int, *, is_ours: bool, now_s: float) -> None:
        dialler = self._me.node_id if is_ours else node_id
        self._lines[node_id] = _Line(incarnation, dialler, now_s, now_s)

    def heard(self, node_id: str, *, now_s: float) -> None:
        if (line := self._lines.get(node_id)) is not None:
            line.heard_s, line.stuck_s = now_s, None

    def gone(self, node_id: str) -> None:
        self._lines.pop(node_id, None)

    # --- unresponsive connections -----------------------------------------------------------------

    def silent(
        self, connections: Mapping[str, PeerConnection[ClusterEnvelope]], *, now_s: float
    ) -> list[tuple[Connect, list[PeerAddress]]]:
        """Which nodes to dial again, and at which addresses; the present address is last.

        Args:
            connections: by node id.
            now_s: the time; may be called at any rate.
        """
        if now_s < self._look_s:
            return []
        self._look_s = now_s + LOOK_S
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
            ways = self.of(command)
            if len(ways) > 1:
                here = connection.address
                found.append((command, sorted(ways, key=lambda way: way.host == here)))
        return found

    def _is_cut(
        self, line: _Line, connection: PeerConnection[ClusterEnvelope], now_s: float
    ) -> bool:
        # The kernel is asked early enough that its answer is old enough in time.
        if now_s - line.heard_s < self._silent_s - self._stuck_s:
            return False
        if not unacknowledged_bytes(connection.fileno()):
            line.stuck_s = None
            return False
        if line.stuck_s is None:
            line.stuck_s = now_s
        is_silent = now_s - line.heard_s >= self._silent_s
        is_stuck = now_s - line.stuck_s >= self._stuck_s
        return is_silent and is_stuck and now_s - line.tried_s >= self._silent_s / 2
