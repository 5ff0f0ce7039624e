"""Fetches bytes of a version from other nodes: one engine, and the loads that several nodes share.

Runs in:  the SMP, in a thread of its own for the duration of a fetch, or in the calling thread.
          Lost links are reported in their own threads. `cancel` may be called in any thread.
Takes in: a `FetchSource`: a lost node (`lost_node.py`), a previous world (`previous_world.py`), or
          a load whose pieces other nodes read (`SharedPieces`).
Gives:    its items, as `Downloader` receives them; or the reason of the failure.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ftrun.errors import FetchFailed, FtrunError, LayoutUnknown, SnapshotCorrupt
from ftrun.smp.checkpoint.shared_load import SharedLoad
from ftrun.smp.jobs import Steps, Wait
from ftrun.smp.peer_link import OutgoingFrame
from ftrun.smp.restore.downloader import Downloader, DownloadItem, get_pieces, piece_item
from ftrun.smp.restore.rpc import FetchRpc, WholeResponse
from ftrun.snapshot.load_shares import Place
from ftrun.wire.cluster import transfer as t
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages.smp import NodeAddress

SHARE_TIMEOUT_S = 60.0
"""Seconds for which another node may deliver nothing, because it may still be reading its share.

The wait ends earlier if the node is known to be unreachable.
"""

_TICK_S = 0.1
_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class FetchSource(Protocol):
    """What is fetched, and from which nodes."""

    def items(self) -> Sequence[DownloadItem]: ...

    def question(self, number: int, batch: Sequence[DownloadItem]) -> t.GetPieces | t.RebuildBlock:
        """Build a request from its number and items of one kind."""
        ...

    def next_items(self, failed: Sequence[DownloadItem]) -> Sequence[DownloadItem]:
        """Handle what has arrived, and return what to download next; nothing: all is here.

        `failed` are the items that no node could deliver. Raises FtrunError if the fetch is not
        possible.
        """
        ...


class Fetch:
    """The requests of one fetch; a node may deliver nothing for `timeout_s`."""

    def __init__(self, rpc: FetchRpc, *, timeout_s: float) -> None:
        self.is_cancelled = False
        self.num_bytes = 0
        """Received so far."""
        self.rpc = rpc
        self.timeout_s = timeout_s
        self._running: set[Downloader] = set()
        self._lost: dict[str, str] = {}
        self._lock = threading.Lock()
        rpc.on_lost(self._note_lost)

    def start(
        self,
        name: str,
        work: Steps[Result],
        *,
        done: Callable[[Result], None],
        failed: Callable[[str], None],
    ) -> None:
        """Run the work in its own thread, then `done`, or `failed` unless it was cancelled."""
        self.rpc.runner.start(name, self._run(work, done, failed))

    def cancel(self) -> None:
        with self._lock:
            self.is_cancelled = True
            for downloader in self._running:
                downloader.cancel()

    def check(self) -> None:
        """Raise FetchFailed if the fetch is cancelled."""
        if self.is_cancelled:
            raise FetchFailed("cancelled, because a new generation begins")

    def loss_reason(self, node_id: str) -> str:
        return self._lost.get(node_id, "")

    @property
    def has_lost(self) -> bool:
        """True if a node was unreachable, or if a connection to one is missing now."""
        return bool(self._lost or self.rpc.unlinked)

    def meet(self, nodes: Sequence[NodeAddress]) -> None:
        """Send the nodes the addresses of each other, so that each can answer all others."""
        self.rpc.meet(nodes)
        alive = [node for node in nodes if node.smp_port > 0]
        for node in alive:
            self.rpc.send(node.node_id, OutgoingFrame(t.FetchPeers(alive)))

    def ask(
        self, node_id: str, question: Callable[[int], t.GetShardHeader | t.GetMirror]
    ) -> Steps[bytearray]:
        """Await an answer of any length; raises LayoutUnknown if it does not arrive."""
        answers: queue.SimpleQueue[WholeResponse] = queue.SimpleQueue()
        requests, now_s = self.rpc.requests, self.rpc.runner.now_s
        number = requests.open(WholeResponse(answers))
        give_up_s = now_s() + self.timeout_s
        try:
            if not self.rpc.send(node_id, OutgoingFrame(question(number))):
                raise LayoutUnknown("its address is unknown")
            while (answer := (yield Wait(answers, _TICK_S))) is None:
                reason = self.loss_reason(node_id) or "the fetch was cancelled" * self.is_cancelled
                if reason or now_s() > give_up_s:
                    raise LayoutUnknown(reason or f"no answer for {self.timeout_s:.0f} s")
            if answer.problem or answer.digest is None:
                raise LayoutUnknown(answer.problem or "its answer has no digest")
            raw: bytearray = answer.raw
            return raw
        finally:
            requests.close(number)

    def download(self, source: FetchSource) -> Steps[None]:
        """Download items of a source until it needs no more; raises FtrunError.

        When this returns, no answer is written to the memory of its items any more.
        """
        items = source.items()
        while True:
            failed: Sequence[DownloadItem] = ()
            if items:
                failed = yield from self._download(items, source)
                self.check()
            items = source.next_items(failed)
            if not items:
                return

    # --- details -----------------------------------------------------------------------------

    def _run(
        self, work: Steps[Result], done: Callable[[Result], None], failed: Callable[[str], None]
    ) -> Steps[None]:
        try:
            result = yield from work
        except FtrunError as error:
            problem = str(error)
        except Exception:  # noqa: BLE001
            # This is the main loop of a thread, so a bug must give an answer and not a hang.
            _log.exception("internal error in a fetch")
            problem = "internal error in ftrun; see the SMP's log"
        else:
            done(result)
            return
        if not self.is_cancelled:
            failed(problem)

    def _note_lost(self, node_id: str, reason: str) -> None:
        with self._lock:
            self._lost[node_id] = reason
            for downloader in self._running:
                downloader.lost(node_id, reason)

    def _download(
        self, items: Sequence[DownloadItem], source: FetchSource
    ) -> Steps[list[DownloadItem]]:
        def ask(node_id: str, number: int, batch: Sequence[DownloadItem]) -> bool:
            return self.rpc.send(node_id, OutgoingFrame(source.question(number, batch)))

        downloader = Downloader(
            self.rpc.requests, ask, timeout_s=self.timeout_s, now_s=self.rpc.runner.now_s
        )
        with self._lock:
            self._running.add(downloader)
            if self.is_cancelled:
                downloader.cancel()
            for node_id, reason in self._lost.items():
                downloader.lost(node_id, reason)
        try:
            return (yield from downloader.steps(items))
        finally:
            with self._lock:
                self._running.discard(downloader)
                self.num_bytes += downloader.num_bytes


class SharedPieces:
    """A load of several nodes; `nodes` by reader number. Pieces that do not come are read."""

    def __init__(
        self, load: SharedLoad, nodes: Sequence[NodeAddress], notice: Callable[[str], None]
    ) -> None:
        self._load = load
        self._nodes = nodes
        self._notice = notice
        self._wanted: dict[Place, DownloadItem] = {}

    def steps(self, fetch: Fetch) -> Steps[None]:
        with self._load.lock:  # a cancelled fetch may still be running
            if not self._load.is_whole:
                fetch.rpc.meet([position for position in self._nodes if position.smp_port > 0])
                yield from fetch.download(self)

    def items(self) -> list[DownloadItem]:
        self._wanted = {
            position: self._item(position, at) for position, at in self._load.left.items()
        }
        return list(self._wanted.values())

    def question(self, number: int, batch: Sequence[DownloadItem]) -> t.GetPieces:
        return get_pieces(number, self._load.version, batch)

    def next_items(self, failed: Sequence[DownloadItem]) -> list[DownloadItem]:
        load, problems = self._load, list[str]()
        for position, item in self._wanted.items():
            try:
                load.took(position)
            except SnapshotCorrupt as error:
                problems += item.problems or [str(error)]
        if load.left:
            said = "; ".join(dict.fromkeys(problems))
            self._notice(
                f"other nodes did not deliver {len(load.left)} pieces of {load.version}, which are "
                f"read here: {said}"
            )
            try:
                load.read_too(list(load.left))
            except OSError as error:
                raise FetchFailed(str(error)) from error
        crash_point("smp.checkpoint.share_taken")
        load.seal()
        return []

    def _item(self, position: Place, reader: int) -> DownloadItem:
        room, digest = self._load.room(position), self._load.digest(position)
        # The reader is unknown if the generation started with other nodes than those that loaded.
        return piece_item(digest, room, [n.node_id for n in self._nodes[reader : reader + 1]])
