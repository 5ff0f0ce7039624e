"""The requests of one fetch, which tracks lost nodes and can be cancelled at any time.

Runs in:  the SMP, in the thread that fetches. Lost links are reported in their own threads.
          `cancel` may be called in any thread.
Takes in: items, and the requests for them.
Gives:    the items, as `Downloader` receives them.
"""

import threading
from collections.abc import Callable, Sequence

from ftrun.smp.peer_link import OutgoingFrame
from ftrun.smp.restore.downloader import Downloader, DownloadItem
from ftrun.smp.restore.rpc import FetchRpc
from ftrun.smp.waits import Steps, drive
from ftrun.wire.cluster import transfer as t

Question = Callable[[int, Sequence[DownloadItem]], t.GetPieces | t.RebuildBlock]
"""Builds a request from its number and items of one kind."""


class DownloadSession:
    """Downloads one set of items after another.

    Args:
        desk: sends the requests.
        patience_s: seconds for which a source may deliver nothing.
    """

    def __init__(self, desk: FetchRpc, *, patience_s: float) -> None:
        self.is_cancelled = False
        self.num_bytes = 0
        """Received so far."""
        self._desk = desk
        self._patience_s = patience_s
        self._running: set[Downloader] = set()
        self._lost: dict[str, str] = {}
        self._lock = threading.Lock()

    def begin(self, name: str, work: Steps[None]) -> None:
        self._desk.on_lost(self.note_lost)
        self._desk.runner.start(name, work)

    def why_lost(self, node_id: str) -> str:
        """Return the reason why a node is unreachable, or ""."""
        return self._lost.get(node_id, "")

    @property
    def has_lost(self) -> bool:
        """True if a node was unreachable, or if a connection to one is missing now."""
        return bool(self._lost or self._desk.unlinked)

    def note_lost(self, node_id: str, why: str) -> None:
        """Record that a node is unreachable; called in the threads of links."""
        with self._lock:
            self._lost[node_id] = why
            for downloads in self._running:
                downloads.lost(node_id, why)

    def cancel(self) -> None:
        """Cancel without waiting; no result is reported."""
        with self._lock:
            self.is_cancelled = True
            for downloads in self._running:
                downloads.cancel()

    def run(self, items: Sequence[DownloadItem], question: Question) -> list[DownloadItem]:
        """Do the same as `steps`, in the calling thread."""
        return drive(self.steps(items, question))

    def steps(self, items: Sequence[DownloadItem], question: Question) -> Steps[list[DownloadItem]]:
        """Download all items; return those that no source could deliver.

        When this returns, no answer is written to an item's memory any more.
        """

        def ask(node_id: str, number: int, batch: Sequence[DownloadItem]) -> bool:
            return self._desk.tell(node_id, OutgoingFrame(question(number, batch)))

        downloads = Downloader(
            self._desk.requests,
            ask,
            patience_s=self._patience_s,
            now_s=self._desk.runner.now_s,
        )
        with self._lock:
            self._running.add(downloads)
            if self.is_cancelled:
                downloads.cancel()
            for node_id, why in self._lost.items():
                downloads.lost(node_id, why)
        try:
            return (yield from downloads.steps(items))
        finally:
            with self._lock:
                self._running.discard(downloads)
                self.num_bytes += downloads.num_bytes
