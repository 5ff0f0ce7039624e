"""Requests between nodes for the restored version, and their answers.

Runs in:  the SMP, in the threads of the fetch links; the server thread begins and ends it.
Takes in: requests and answers.
Gives:    answers from this node's slots and parity regions; work for `Rebuilder`; bytes to the
          requester.

An answer is sent in place, over the link in the opposite direction. The requester limits its open
requests, and this bounds the queue of answers.
"""

import logging
import threading
from collections.abc import Callable

from ftrun.errors import LayoutUnknown, ProtocolError, SnapshotCorrupt
from ftrun.smp.link_rules import FETCH
from ftrun.smp.peer_link import OutgoingFrame
from ftrun.smp.peer_listener import IncomingLink, PeerListener
from ftrun.smp.restore.requests import PendingRequests
from ftrun.smp.restore.restore_server import RestoreServer
from ftrun.smp.waits import Runner
from ftrun.wire.cluster import transfer as t
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages.smp import NodeAddress
from ftrun.wire.transport.bulk_socket import digest_of

_log = logging.getLogger(__name__)

Rebuild = Callable[[str, t.RebuildBlock], None]
SetAside = Callable[[SnapshotCorrupt, t.FetchRequest], None]


class FetchRpc:
    """The fetch traffic of one generation.

    Args:
        peers: the links.
        set_aside: called in a link's thread with an error and its request if data here is damaged.
        runner: drives work that requests data from other nodes.
    """

    def __init__(self, peers: PeerListener, *, set_aside: SetAside, runner: Runner) -> None:
        self.runner = runner
        self.requests = PendingRequests()
        self.served: RestoreServer | None = None
        self.rebuild: Rebuild | None = None
        self._peers = peers
        self._set_aside = set_aside
        self._places: dict[str, NodeAddress] = {}
        self._greeted: set[str] = set()
        self._gone: dict[str, str] = {}
        self._own: NodeAddress | None = None
        self._on_lost: list[Callable[[str, str], None]] = []
        self._lock = threading.Lock()

    def begin(
        self, served: RestoreServer | None, rebuild: Rebuild | None, own: NodeAddress | None = None
    ) -> None:
        """Serve this version from now on; called before a link of its generation is admitted.

        Args:
            served: the version on this node; None if nothing is served.
            rebuild: receives the requests to rebuild blocks.
            own: the address to which other nodes send their answers.
        """
        before, self.served, self.rebuild = self.served, served, rebuild
        self._on_lost = []
        with self._lock:
            self._places.clear()
            self._greeted.clear()
            self._gone.clear()
            self._own = own
        if before is not None:
            before.close()

    @property
    def own(self) -> NodeAddress | None:
        return self._own

    def on_lost(self, told: Callable[[str, str], None]) -> None:
        """Add a callback for lost links, valid until the next generation begins."""
        self._on_lost = [*self._on_lost, told]

    def meet(self, places: list[NodeAddress]) -> None:
        with self._lock:
            self._places.update({place.node_id: place for place in places})

    def tell(self, node_id: str, frame: OutgoingFrame) -> bool:
        """Send a frame to a node; return False if the node is unknown.

        A request of this node to itself is answered at once, in the calling thread.
        """
        with self._lock:
            place, own = self._places.get(node_id), self._own
            if place is None or own is None:
                return False
            is_own = node_id == own.node_id
        if is_own:
            self._tell_self(own.node_id, frame)
            return True
        if isinstance(frame.body, t.FetchRequest):
            self.requests.sent(node_id, frame.body.request, frame)
        with self._lock:
            link = self._peers.link(place, FETCH)
            if node_id not in self._greeted:
                # The receiver needs the address for its answers.
                self._greeted.add(node_id)
                link.tell(OutgoingFrame(t.FetchPeers([own])))
        link.tell(frame)
        return True

    def linked(self, node_id: str) -> None:
        """Repeat what a lost connection may have dropped, after it is restored."""
        self._gone.pop(node_id, None)
        with self._lock:
            self._greeted.discard(node_id)
            places = [place for place in self._places.values() if place.smp_port > 0]
        owed = self.requests.owed_by(node_id)
        if owed:
            self.tell(node_id, OutgoingFrame(t.FetchPeers(places)))
        for frame in owed:
            self.tell(node_id, frame)

    # --- threads of links ------------------------------------------------------------------

    def received(self, source: IncomingLink, envelope: t.TransferEnvelope) -> None:
        """Handle one frame.

        Raises:
            PeerError: the link must be closed.
        """
        body = envelope.body
        self._gone.pop(source.node_id, None)
        if isinstance(body, t.FetchData | t.FetchMissing):
            self.requests.take(source, envelope)
            return
        if envelope.raw_bytes:
            raise ProtocolError(f"a {type(body).__name__} of {source.node_id} comes with bytes")
        crash_point("smp.fetch.asked")
        self._answer(source.node_id, body)

    def _answer(self, asker: str, body: t.AnyTransfer) -> None:
        match body:
            case t.FetchPeers():
                self.meet(body.places)
            case t.GetMirror():
                self._give_mirror(asker, body)
            case t.GetShardHeader():
                self._give_head(asker, body)
            case t.GetPieces():
                self._give_pieces(asker, body)
            case t.GetBlock():
                self._give_unit(asker, body)
            case t.RebuildBlock():
                self._have_rebuilt(asker, body)
            case _:
                raise ProtocolError(f"{type(body).__name__} is not for a link to {FETCH}")

    def _tell_self(self, own_id: str, frame: OutgoingFrame) -> None:
        if isinstance(frame.body, t.FetchData | t.FetchMissing):
            self.requests.take_own(frame.body, frame.raw, frame.raw_digest)
        else:
            self._answer(own_id, frame.body)

    @property
    def unlinked(self) -> list[str]:
        """Nodes that were asked and have no connection now."""
        with self._lock:
            links = {node_id: self._peers.find(node_id, FETCH) for node_id in self._places}
        return [one for one, link in links.items() if link is not None and not link.is_connected]

    def why_gone(self, node_id: str) -> str:
        """Return the reason why a node is unreachable, or "" if none is known."""
        return self._gone.get(node_id, "")

    def lost(self, node_id: str, why: str) -> None:
        self._gone[node_id] = why
        for told in self._on_lost:
            told(node_id, why)

    def _give_mirror(self, asker: str, ask: t.GetMirror) -> None:
        try:
            parts = self._serving(ask).mirror(ask)
        except (LayoutUnknown, SnapshotCorrupt) as error:
            self.refuse(asker, ask, 0, error)
        else:
            self.tell(asker, OutgoingFrame(t.FetchData(ask.request, 0), parts, digest_of(parts)))

    def _give_head(self, asker: str, ask: t.GetShardHeader) -> None:
        try:
            parts = self._serving(ask).head(ask)
        except (LayoutUnknown, SnapshotCorrupt) as error:
            self.refuse(asker, ask, 0, error)
        else:
            self.tell(asker, OutgoingFrame(t.FetchData(ask.request, 0), parts, digest_of(parts)))

    def _give_pieces(self, asker: str, ask: t.GetPieces) -> None:
        digests = memoryview(ask.digests).cast("Q")
        for index, digest in enumerate(digests):
            if index in ask.settled:
                continue
            try:
                found = self._serving(ask).piece(digest)
            except (LayoutUnknown, SnapshotCorrupt) as error:
                self.refuse(asker, ask, index, error)
            else:
                self.tell(asker, OutgoingFrame(t.FetchData(ask.request, index), [found], digest))

    def _give_unit(self, asker: str, ask: t.GetBlock) -> None:
        try:
            header, views = self._serving(ask).unit(ask)
        except (LayoutUnknown, SnapshotCorrupt) as error:
            self.refuse(asker, ask, 0, error)
        else:
            self.tell(asker, OutgoingFrame(t.FetchData(ask.request, 0, header), views))

    def _have_rebuilt(self, asker: str, ask: t.RebuildBlock) -> None:
        rebuild = self.rebuild
        if rebuild is None:
            self.refuse(asker, ask, 0, LayoutUnknown("this node serves nothing"))
        else:
            rebuild(asker, ask)

    def _serving(self, ask: t.FetchRequest) -> RestoreServer:
        served = self.served
        if served is None or (served.version.generation, served.version.step) != (
            ask.generation,
            ask.step,
        ):
            raise LayoutUnknown("this node does not serve that version")
        return served

    def refuse(self, asker: str, ask: t.FetchRequest, index: int, error: Exception) -> None:
        """Refuse a request; damaged data is reported to the agent too."""
        if isinstance(error, SnapshotCorrupt):
            _log.warning("%s", error)
            self._set_aside(error, ask)
        self.tell(asker, OutgoingFrame(t.FetchMissing(ask.request, index, str(error))))
