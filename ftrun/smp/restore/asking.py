"""The questions of one fetch, which hears of lost nodes and may be given up at any time.

Runs in:  the SMP, in the thread that fetches; lost links are told in theirs, `cancel` in any.
Takes in: items, and what to ask for them.
Gives:    the items, as `Downloader` gets them.
"""

import threading
from collections.abc import Callable, Sequence

from ftrun.smp.peer_link import OutgoingFrame
from ftrun.smp.restore.downloader import Downloader, DownloadItem
from ftrun.smp.restore.rpc import FetchRpc
from ftrun.smp.waits import Steps, drive
from ftrun.wire.cluster import transfer as t

Question = Callable[[int, Sequence[DownloadItem]], t.GetPieces | t.RebuildBlock]
"""What to ask: the number of the question, items of one kind."""


class DownloadSession:
    """One set of items after the other.

    Args:
        desk: where questions go.
        patience_s: how long a source may deliver nothing.
    """

    def __init__(self, desk: FetchRpc, *, patience_s: float) -> None:
        self.is_cancelled = False
        self.num_bytes = 0
        """That have come so far."""
        self._desk = desk
        self._patience_s = patience_s
        self._running: set[Downloader] = set()
        self._lost: dict[str, str] = {}
        self._lock = threading.Lock()

    def begin(self, name: str, work: Steps[None]) -> None:
        """Do the work of a fetch in a thread of this name."""
        self._desk.on_lost(self.note_lost)
        self._desk.runner.start(name, work)

    def why_lost(self, node_id: str) -> str:
        """Why a node cannot be asked any more; empty where it can."""
        return self._lost.get(node_id, "")

    @property
    def has_lost(self) -> bool:
        """A node could not be reached, or there is no connection to it now."""
        return bool(self._lost or self._desk.unlinked)

    def note_lost(self, node_id: str, why: str) -> None:
        """A node cannot be reached any more; called in links' threads."""
        with self._lock:
            self._lost[node_id] = why
            for downloads in self._running:
                downloads.lost(node_id, why)

    def cancel(self) -> None:
        """Give up; nobody is told. Does not wait."""
        with self._lock:
            self.is_cancelled = True
            for downloads in self._running:
                downloads.cancel()

    def run(self, items: Sequence[DownloadItem], question: Question) -> list[DownloadItem]:
        """As `steps`, in this thread."""
        return drive(self.steps(items, question))

    def steps(self, items: Sequence[DownloadItem], question: Question) -> Steps[list[DownloadItem]]:
        """Get all of these; those that nobody could give.

        When this returns no answer is written to an item's memory any more.
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
