"""The other rails to a node: where else to dial it, and when a connection is to be made anew.

Runs in:  agent, the thread that speaks with the other nodes.
Takes in: the newest cards of nodes; which connections were made, when each was last heard.
Gives:    ways to dial; connections that are cut off although their machine may be reached.
Survives: a rail that is cut anywhere, in one direction or in both.

Rule 1: what is silent for two heartbeats, while what was sent to it is not even acknowledged by its
        kernel, is dialled anew over all its rails, from whichever side sees it first. A process
        that stands still is not: its kernel acknowledges, and no other rail would help.
Rule 2: nothing is decided here. A node whose rails are all cut is as silent as one with one rail,
        and the old connection stays until another one has been proven.
Rule 3: of two connections that both sides have made at the same time the one stays that the node
        with the lesser name has dialled: both sides must choose alike, or each ends the other's.
Rule 4: a node with one rail is left alone, with whatever its kernel makes of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ftrun.recovery.commands import Connect
from ftrun.recovery.settings import MembershipSettings
from ftrun.wire.cluster.generation import Identity, NodeCard
from ftrun.wire.cluster.messages import ClusterEnvelope
from ftrun.wire.transport.address_race import PeerAddress, source_to
from ftrun.wire.transport.peer_connection import PeerConnection
from ftrun.wire.transport.tcp import unacknowledged_bytes

SILENT_BEATS = 2.0
"""So many heartbeats without a word."""

STUCK_BEATS = 0.8
"""For so many of them nothing was acknowledged."""

LOOK_S = 0.1
YOUNG_S = 0.5
"""Two connections made within this time were dialled by both sides at once."""

MAX_MET = 10_000

CardOf = Callable[[str], NodeCard | None]
"""The newest card of a node, as far as this agent has one."""


@dataclass
class _Line:
    """What is known of one connection."""

    incarnation: int
    dialler: str
    """Node id."""
    made_s: float
    heard_s: float
    stuck_s: float | None = None
    """Since when the kernel holds what nobody has acknowledged; None: it does not, or is not
    asked yet."""
    tried_s: float = 0.0
    """When it was last dialled anew."""


class ConnectionFailover:
    """Of one agent to all others."""

    def __init__(self, me: NodeCard, settings: MembershipSettings, card_of: CardOf) -> None:
        self._me = me
        self._card_of = card_of
        beat_s = settings.heartbeat_s
        # Ranks are held at `cut_off_s`; by then the other rail has to have answered.
        self._silent_s = min(SILENT_BEATS * beat_s, settings.cut_off_s / 2)
        self._stuck_s = min(STUCK_BEATS * beat_s, 0.4 * settings.cut_off_s)
        self._lines: dict[str, _Line] = {}
        self._met: dict[tuple[Identity, str, int], None] = {}
        self._look_s = 0.0

    # --- where to dial ------------------------------------------------------------------------

    def of(self, command: Connect) -> list[PeerAddress]:
        """The address that was named, and then the node's others."""
        first = PeerAddress(command.host, command.port, is_sure=True)
        card = self._card_of(command.node_id) if command.node_id else None
        if card is None or (card.host, card.port) != (command.host, command.port):
            return [first]  # of another life of that node, or nobody knows
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
        """This agent itself has answered there; for any thread."""
        self._met[who, host, port] = None
        while len(self._met) > MAX_MET:
            self._met.pop(next(iter(self._met)))

    def hosts_of(self, node_id: str) -> set[str]:
        """The addresses of a node's machine."""
        card = self._card_of(node_id)
        return {card.host, *(rail.host for rail in card.rails)} if card is not None else set()

    # --- connections --------------------------------------------------------------------------

    def keeps(self, node_id: str, incarnation: int, *, is_ours: bool, now_s: float) -> bool:
        """Whether the connection that there is to a node stays, and a new one does not.

        Args:
            node_id: the node.
            incarnation: that the new one is with.
            is_ours: this side has dialled the new one.
            now_s: the time.
        """
        line = self._lines.get(node_id)
        if line is None or line.incarnation != incarnation or now_s - line.made_s >= YOUNG_S:
            return False
        return line.dialler < (self._me.node_id if is_ours else node_id)

    def made(self, node_id: str, incarnation: int, *, is_ours: bool, now_s: float) -> None:
        """There is this connection now, instead of any other."""
        dialler = self._me.node_id if is_ours else node_id
        self._lines[node_id] = _Line(incarnation, dialler, now_s, now_s)

    def heard(self, node_id: str, *, now_s: float) -> None:
        if (line := self._lines.get(node_id)) is not None:
            line.heard_s, line.stuck_s = now_s, None

    def gone(self, node_id: str) -> None:
        self._lines.pop(node_id, None)

    # --- silence ------------------------------------------------------------------------------

    def silent(
        self, connections: Mapping[str, PeerConnection[ClusterEnvelope]], *, now_s: float
    ) -> list[tuple[Connect, list[PeerAddress]]]:
        """Whom to dial anew, and by which ways: that of now last.

        Args:
            connections: by node id.
            now_s: the time; asked as often as one likes.
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
        # The kernel is asked early enough for its answer to be old enough in time.
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
