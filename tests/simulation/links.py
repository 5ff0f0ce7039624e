"""Links between SMPs, over the network of the simulation.

The SMP's own code (`ftrun/smp/peer_link.py`) decides when a link connects again, when its node is
lost and which links a session admits. A dead process on a living kernel refuses, and its
connections are reset. A node that is off, frozen or cut off does not answer: sent data waits, and
is lost after the timeout.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ftrun.smp.peer_link import FETCH, PROTECT, UNRESPONSIVE_S, LinkRules, OutgoingFrame, admits
from ftrun.wire.cluster.transfer import LinkHello
from ftrun.wire.messages.smp import NodeAddress

if TYPE_CHECKING:
    from ftrun.smp.peer_listener import PeerEvents, PeerSession
    from simulation.snapshots import Smp

_RESEND_S = 0.5
_SYN_S = 1.0
"""Time until an unacknowledged packet is sent again."""


class Incoming:
    """The receiving end of a connection."""

    def __init__(self, link: "Link", peers: "Peers") -> None:
        self.link = link
        self.peers = peers
        self.node_id = link.peers.smp.node.node_id
        self.hello = link.hello
        self.is_open = True
        self.is_admitted = False
        self.waiting: list[OutgoingFrame] = []
        """Frames that arrived before this side received the session."""


class Envelope:
    """One frame as it arrives; it is also its own socket."""

    __slots__ = ("_raw", "body", "generation", "raw_bytes", "raw_digest", "socket")

    def __init__(self, generation: int, frame: OutgoingFrame) -> None:
        self.generation = generation
        self.body = frame.body
        self._raw = b"".join(frame.raw) if frame.raw else b""
        self.raw_bytes = len(self._raw)
        self.raw_digest = frame.raw_digest

    def receive_raw(self, _: object, room: Sequence[memoryview] | None) -> bool:
        at = 0
        for view in room or ():
            view[:] = self._raw[at : at + len(view)]
            at += len(view)
        return True


class Source:
    """The receiver's view of the connection over which a frame arrived."""

    __slots__ = ("hello", "node_id", "socket")

    def __init__(self, incoming: Incoming, envelope: Envelope) -> None:
        self.node_id = incoming.node_id
        self.hello = incoming.hello
        self.socket = envelope


class Link:
    """The sending end, which dials by itself."""

    def __init__(
        self, peers: "Peers", position: NodeAddress, purpose: str, session: "PeerSession"
    ) -> None:
        number = session.number if purpose == PROTECT else 0
        self.peers = peers
        self.position = position
        self.purpose = purpose
        self.hello = LinkHello(session.generation, purpose, number)
        self.is_closed = False
        self._timeout_s = session.timeout_s
        self._rules = LinkRules(dials_again_first=purpose == FETCH, timeout_s=session.timeout_s)
        self._there: Incoming | None = None
        self._frames: list[OutgoingFrame] = []
        self._streams: list[Any] = []
        self._is_awake = False
        self._last_s = 0.0
        self._unresponsive_s: float | None = None
        """Time since which no frame arrives at the other end."""

    @property
    def is_connected(self) -> bool:
        return self._there is not None

    @property
    def dials_again_first(self) -> bool:
        return self._rules.dials_again_first

    @property
    def carries_nothing(self) -> bool:
        if self._there is None:
            return self._rules.is_lost
        self._probe()
        unresponsive_s = self._unresponsive_s
        return unresponsive_s is not None and self._now_s - unresponsive_s > UNRESPONSIVE_S

    @property
    def _now_s(self) -> float:
        return self.peers.smp.world.now_s

    def start(self) -> None:
        self._rules.begin_dialing(self._now_s)
        self._later(0.0, self._dial)

    def send(self, frame: OutgoingFrame) -> None:
        if self.is_closed:
            _release(frame)
            return
        self._frames.append(frame)
        self.wake()

    def add(self, stream: Any) -> None:
        self._streams.append(stream)
        self.wake()

    def wake(self) -> None:
        if not self._is_awake and self._there is not None:
            self._is_awake = True
            self._later(0.0, self._flush)

    def reset(self) -> None:
        """The network ends the connection, and both ends notice it."""
        there = self._there
        if there is not None:
            self.ended(there)
            there.peers.ended(there)

    def close(self) -> None:
        self.is_closed = True
        self._hang_up()
        self._forget()

    # --- dialing ------------------------------------------------------------------------------

    def _dial(self) -> None:
        node, network = self.peers.smp.node, self.peers.smp.node.network
        mine, there = node.node_id, self.position.node_id
        if not network.connects(mine, there):
            self._dial_failed("no answer", _SYN_S)
            return
        target = network.nodes[there].smp
        if target is None or not target.is_alive or target.port != self.position.smp_port:
            self._dial_failed("it is refused", 0.0, is_refused=True)
            return
        peers = target.peers
        if peers.session is None:
            self._dial_failed("it does not answer", _SYN_S)
        elif peers.session.own.incarnation != self.position.incarnation:
            self._dial_failed("another life", 0.0)
        else:
            self._there = Incoming(self, peers)
            self._unresponsive_s = None
            self._last_s = self._now_s + network.delay_s(mine, there)
            self._later(self._last_s - self._now_s, peers.accept, self._there)
            if self._rules.connected(self._now_s):
                self.peers.events.linked(there, self.purpose)
            self.wake()

    def _dial_failed(self, cause: str, after_s: float, *, is_refused: bool = False) -> None:
        reason = self._rules.dial_failed(
            f"{self.position.node_id}: {cause}",
            is_refused=is_refused,
            is_turned_away=False,
            now_s=self._now_s,
        )
        if reason:
            self.peers.events.lost(self.position.node_id, self.purpose, reason)
        self._later(after_s + self._rules.pause_s(), self._dial)

    def ended(self, there: Incoming) -> None:
        """The other side or the kernel has closed this connection."""
        if self._there is not there:
            return
        self._there = None
        self._forget()
        reason = self._rules.disconnected(f"{self.position.node_id}: the connection is closed")
        if reason:
            self.peers.events.lost(self.position.node_id, self.purpose, reason)
        rest_s = self._rules.rest_s(self._now_s)
        self._rules.begin_dialing(self._now_s + rest_s)
        self._later(rest_s, self._dial)

    def _hang_up(self) -> None:
        there, self._there = self._there, None
        if there is not None:
            self.peers.smp.world.after(self._delay_s(), there.peers.ended, there)

    def _forget(self) -> None:
        frames, self._frames = self._frames, []
        self._streams.clear()
        for frame in frames:
            _release(frame)

    # --- frames -------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Sends the pending frames if the network passes them."""
        self._is_awake = False
        there = self._there
        if there is None:
            return
        self._probe()
        if self._unresponsive_s is not None:
            if self._there is there:
                self._is_awake = True
                self._later(_RESEND_S, self._flush)
            return
        frames, self._frames = self._frames, []
        if frames:
            self._send(there, frames, self._delay_s())
        bulk = [frame for stream in self._streams for frame in iter(stream.take, None)]
        self._streams = [stream for stream in self._streams if not stream.is_over]
        if bulk:
            scenario, random = self.peers.smp.node.simulation.scenario, self.peers.smp.random
            self._send(there, bulk, 0.01 + scenario.transfer_s * random.random())

    def _send(self, there: Incoming, frames: list[OutgoingFrame], delay_s: float) -> None:
        now_s = self._now_s
        self._last_s = max(self._last_s, now_s + delay_s)
        self.peers.smp.world.after(self._last_s - now_s, self._arrive, there, frames)
        for frame in frames:
            _release(frame)

    def _arrive(self, there: Incoming, frames: list[OutgoingFrame]) -> None:
        network = self.peers.smp.node.network
        if not network.passes(self.peers.smp.node.node_id, self.position.node_id):
            # The kernel sends it again until its timeout, if the sender is alive.
            if self._there is there and not self.is_closed:
                self._probe()
                self.peers.smp.world.after(_RESEND_S, self._arrive, there, frames)
            return
        there.peers.arrive(there, frames)

    def _probe(self) -> None:
        """Checks whether the other end is reachable; closes the link after the timeout."""
        there, node = self._there, self.peers.smp.node
        if there is None:
            return
        network = node.network
        mine, target = node.node_id, self.position.node_id
        if not network.connects(mine, target):
            if self._unresponsive_s is None:
                self._unresponsive_s = self._now_s
            elif self._now_s - self._unresponsive_s > self._timeout_s:
                self.ended(there)
            return
        self._unresponsive_s = None
        if not there.is_open or not there.peers.smp.is_alive:
            self.ended(there)

    def _delay_s(self) -> float:
        return self.peers.smp.node.network.delay_s(
            self.peers.smp.node.node_id, self.position.node_id
        )

    def _later(self, delay_s: float, what: Any, *args: Any) -> None:
        self.peers.smp.later(delay_s, self._unless_closed, what, args)

    def _unless_closed(self, what: Any, args: tuple[Any, ...]) -> None:
        if not self.is_closed:
            what(*args)


class Peers:
    """All links of one SMP."""

    def __init__(self, smp: "Smp") -> None:
        self.smp = smp
        self.session: PeerSession | None = None
        self.events: PeerEvents
        self._links: dict[tuple[str, str], Link] = {}
        self._incoming: dict[tuple[str, str], Incoming] = {}
        self._parked: list[Incoming] = []
        self._seen: set[tuple[str, str]] = set()

    def begin(self, session: "PeerSession") -> None:
        if self.session == session:
            return
        self._drop()
        self.session = session
        parked, self._parked = self._parked, []
        for incoming in parked:
            self._let_in(incoming)

    def link(self, position: NodeAddress, purpose: str) -> Link:
        key = (position.node_id, purpose)
        if key not in self._links:
            assert self.session is not None
            self._links[key] = link = Link(self, position, purpose, self.session)
            link.start()
        return self._links[key]

    @property
    def links(self) -> list[Link]:
        return [link for _, link in sorted(self._links.items())]

    def find(self, node_id: str, purpose: str) -> Link | None:
        return self._links.get((node_id, purpose))

    def close(self) -> None:
        self._drop()
        self.session = None

    def die(self) -> None:
        """The process is dead: its kernel closes its connections."""
        self._drop()
        for incoming in self._parked:
            self._hang_up(incoming)

    def _drop(self) -> None:
        for link in self._links.values():
            link.close()
        for incoming in self._incoming.values():
            self._hang_up(incoming)
        self._links.clear()
        self._incoming.clear()
        self._seen.clear()

    # --- incoming connections -----------------------------------------------------------------

    def accept(self, incoming: Incoming) -> None:
        """A peer has connected."""
        if self.smp.is_alive and incoming.is_open:
            self.smp.run(self._let_in, incoming)

    def _let_in(self, incoming: Incoming) -> None:
        session, hello = self.session, incoming.hello
        if not incoming.is_open:
            return
        if session is None:
            self._parked.append(incoming)
            return
        admitted = admits(hello, generation=session.generation, session=session.number)
        if admitted is None:
            self._parked.append(incoming)
        elif not admitted:
            self._hang_up(incoming)
        else:
            key = (incoming.node_id, hello.purpose)
            before = self._incoming.get(key)
            if before is not None:
                self._hang_up(before)
            self._incoming[key] = incoming
            is_again = key in self._seen
            self._seen.add(key)
            incoming.is_admitted = True
            if is_again:
                self.events.linked(*key)
            waiting, incoming.waiting = incoming.waiting, []
            self._take(incoming, waiting)

    def arrive(self, incoming: Incoming, frames: list[OutgoingFrame]) -> None:
        if not self.smp.is_alive or not incoming.is_open:
            self._reset(incoming)
        elif incoming.is_admitted:
            self.smp.run(self._take, incoming, frames)
        else:
            incoming.waiting += frames

    def _take(self, incoming: Incoming, frames: list[OutgoingFrame]) -> None:
        generation = incoming.hello.generation
        for frame in frames:
            envelope = Envelope(generation, frame)
            self.events.received(Source(incoming, envelope), envelope)

    def ended(self, incoming: Incoming) -> None:
        """The other side has closed the connection."""
        if not incoming.is_open or not self.smp.is_alive:
            return
        incoming.is_open = False
        self.smp.run(self._lost, incoming)

    def _lost(self, incoming: Incoming) -> None:
        key = (incoming.node_id, incoming.hello.purpose)
        if self._incoming.get(key) is not incoming:
            return
        link = self._links.get(key)
        if link is not None and link.dials_again_first:
            assert self.session is not None
            self.smp.later(self.session.timeout_s, self._report_lost, key, incoming)
        else:
            self._report_lost(key, incoming)

    def _report_lost(self, key: tuple[str, str], incoming: Incoming) -> None:
        if self._incoming.get(key) is incoming:
            self.events.lost(*key, f"{incoming.node_id}: the connection is closed")

    def _hang_up(self, incoming: Incoming) -> None:
        if incoming.is_open:
            incoming.is_open = False
            self._reset(incoming)

    def _reset(self, incoming: Incoming) -> None:
        """The sender notices it if the network passes the packet."""
        link, network = incoming.link, self.smp.node.network
        mine = self.smp.node.node_id
        if network.passes(mine, incoming.node_id):
            delay_s = network.delay_s(mine, incoming.node_id)
            link.peers.smp.later(delay_s, link.ended, incoming)


def _release(frame: OutgoingFrame) -> None:
    if frame.release is not None:
        frame.release()
