"""Questions of other nodes about the restored version, and the answers to our own.

Runs in:  the SMP, in the threads of the links to fetch; begun and ended in the server's.
Takes in: asks and answers.
Gives:    answers from this node's slots and vaults; work for `Rebuilder`; bytes to whoever asked.

An answer leaves over the link that goes the other way, from where its bytes lie. Who asks decides
how many questions are open, so what waits here is bounded by that.
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
from ftrun.wire.messages.protected import NodeAddress
from ftrun.wire.transport.bulk_socket import digest_of

_log = logging.getLogger(__name__)

Rebuild = Callable[[str, t.RebuildBlock], None]
SetAside = Callable[[str, t.FetchRequest], None]


class FetchRpc:
    """One generation's traffic to fetch.

    Args:
        peers: the links.
        set_aside: told, in a link's thread, of what was found damaged here, and of the question.
        runner: drives work that asks other nodes.
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
        """Serve this version from now on; before any link of its generation is let in.

        Args:
            served: the version, as it is here; None: nothing is served.
            rebuild: takes what is to be rebuilt.
            own: this SMP's place, for whoever is asked to answer to.
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
        """This SMP's place."""
        return self._own

    def on_lost(self, told: Callable[[str, str], None]) -> None:
        """Whom to tell of lost links too, until another generation begins: whoever fetches."""
        self._on_lost = [*self._on_lost, told]

    def meet(self, places: list[NodeAddress]) -> None:
        """These can be asked."""
        with self._lock:
            self._places.update({place.node_id: place for place in places})

    def tell(self, node_id: str, frame: OutgoingFrame) -> bool:
        """Send something to a node; False where it is not known.

        What this node asks itself is answered at once, in the thread that asks.
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
                # Whoever is asked must know where to answer to.
                self._greeted.add(node_id)
                link.tell(OutgoingFrame(t.FetchPeers([own])))
        link.tell(frame)
        return True

    def linked(self, node_id: str) -> None:
        """A lost connection is there again: repeat what it may have lost."""
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
        """Take one frame.

        Raises:
            PeerError: the link is of no more use.
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
        """Nodes that were asked something and to which there is no connection now."""
        with self._lock:
            links = {node_id: self._peers.find(node_id, FETCH) for node_id in self._places}
        return [one for one, link in links.items() if link is not None and not link.is_connected]

    def why_gone(self, node_id: str) -> str:
        """Why a node cannot be reached; empty where it can, as far as is known."""
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
        """Say why something is not to be had here; what is damaged is told the agent too."""
        if isinstance(error, SnapshotCorrupt):
            _log.warning("%s", error)
            self._set_aside(str(error), ask)
        self.tell(asker, OutgoingFrame(t.FetchMissing(ask.request, index, str(error))))
