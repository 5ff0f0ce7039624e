"""Downloads items from several sources; if a source fails, an item moves to its next source.

Runs in:  the SMP, in the thread that fetches (jobs.py). Answers arrive in the threads of links.
Takes in: items, each with its destination memory and the nodes that may have it.
Gives:    the items, checked by digest; for items that no source could deliver, the reasons.

Rule 1: the bytes requested from one source at a time are bounded. Memory and queues therefore stay
        small on both sides, and all sources are busy.
Rule 2: a source that delivers nothing for longer than the patience gets no more requests. Its open
        items are requested from the next source. A late answer is dropped (see `rpc.py`).
"""

import queue
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ftrun.ids import Version
from ftrun.smp.jobs import Steps, Wait
from ftrun.smp.restore.rpc import PendingRequests
from ftrun.wire.cluster import transfer as t

PIECE, BLOCK = "piece", "block"
"""Kinds of items. One request names several pieces, but only one block."""

WINDOW_BYTES = 16 << 20
_MAX_BATCH = 16
_TICK_S = 0.2


@dataclass(eq=False)
class DownloadItem:
    """A requested run of bytes.

    Args:
        kind: PIECE or BLOCK.
        views: the destination, `num_bytes` in total.
        sources: node ids, the best first.
        digest: of its bytes, if known.
        is_coded: it can be rebuilt instead.
        key: identifies it in a request: a digest, or a stripe.
    """

    kind: str
    key: int
    num_bytes: int
    views: Sequence[memoryview]
    sources: deque[str]
    digest: int | None = None
    is_coded: bool = False
    source: str = ""
    problems: list[str] = field(default_factory=list)


def piece_item(
    digest: int, room: memoryview, sources: Iterable[str], *, is_coded: bool = False
) -> DownloadItem:
    return DownloadItem(PIECE, digest, len(room), [room], deque(sources), digest, is_coded)


def get_pieces(number: int, wanted: Version, batch: Sequence[DownloadItem]) -> t.GetPieces:
    """Request pieces by their digests, whatever group protected them."""
    digests = b"".join(item.key.to_bytes(8, "little") for item in batch)
    return t.GetPieces(number, wanted.generation, wanted.step, 0, 0, digests=digests)


Ask = Callable[[str, int, Sequence[DownloadItem]], bool]
"""Requests items of one kind: node, request number, items. False if the node is unknown."""


@dataclass(frozen=True, slots=True)
class _Event:
    """The result of one item of one request; index -1 concerns a whole node."""

    number: int
    index: int
    reason: str = ""
    digest: int | None = None
    node: str = ""


class _Batch:
    """The `ResponseSink` of one request for some items; `left` are those without an answer."""

    def __init__(
        self, node: str, items: Sequence[DownloadItem], events: "queue.SimpleQueue[_Event]"
    ) -> None:
        self.node = node
        self.items = items
        self.left = set(range(len(items)))
        self.number = 0
        self._events = events

    def room(self, index: int, num_bytes: int) -> Sequence[memoryview] | None:
        fits = 0 <= index < len(self.items) and self.items[index].num_bytes == num_bytes
        return self.items[index].views if fits else None

    def arrived(self, index: int, header: bytes, digest: int | None) -> None:
        self._events.put(_Event(self.number, index, digest=digest))

    def refused(self, index: int, reason: str) -> None:
        self._events.put(_Event(self.number, index, reason or "the request was refused"))


class Downloader:
    """Downloads one set of items; a source may deliver nothing for `timeout_s`."""

    def __init__(
        self, requests: PendingRequests, ask: Ask, *, timeout_s: float, now_s: Callable[[], float]
    ) -> None:
        self._requests = requests
        self._ask = ask
        self._timeout_s = timeout_s
        self._now_s = now_s
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._waiting: dict[str, deque[DownloadItem]] = defaultdict(deque)
        self._open: dict[int, _Batch] = {}
        self._owed: dict[str, int] = defaultdict(int)
        self._received_s: dict[str, float] = {}
        self._bad: dict[str, str] = {}
        self._failed: list[DownloadItem] = []
        self._is_cancelled = False
        self.num_bytes = 0

    def cancel(self) -> None:
        self._is_cancelled = True
        self._events.put(_Event(0, -1))

    def lost(self, node: str, reason: str) -> None:
        """Record that a node is unreachable; callable in any thread."""
        self._events.put(_Event(0, -1, reason, node=node))

    def steps(self, items: Sequence[DownloadItem]) -> Steps[list[DownloadItem]]:
        """Download all items; return those that no source could deliver, with their problems.

        When this returns, no answer is written to an item's memory any more.
        """
        self._failed = []
        for item in items:
            self._assign(item)
        try:
            while not self._is_cancelled:
                self._ask_all()
                if not self._open and not any(self._waiting.values()):
                    break
                event = yield Wait(self._events, min(_TICK_S, self._timeout_s))
                self._take_event(event)
        finally:
            for number in list(self._open):
                self._requests.close(number)
            self._open.clear()
            self._owed.clear()
            self._waiting.clear()
        return self._failed

    def _assign(self, item: DownloadItem) -> None:
        while item.sources:
            node = item.sources.popleft()
            if node not in self._bad:
                item.source = node
                self._waiting[node].append(item)
                return
            item.problems.append(f"{node}: {self._bad[node]}")
        item.source = ""
        self._failed.append(item)

    def _ask_all(self) -> None:
        for node in list(self._waiting):
            waiting = self._waiting[node]
            while waiting and (not self._owed[node] or self._owed[node] < WINDOW_BYTES):
                batch = [waiting.popleft()]
                while waiting and len(batch) < _MAX_BATCH and batch[0].kind == PIECE:
                    if waiting[0].kind != PIECE:
                        break
                    batch.append(waiting.popleft())
                self._ask_for(node, batch)

    def _ask_for(self, node: str, batch: list[DownloadItem]) -> None:
        sink = _Batch(node, batch, self._events)
        sink.number = self._requests.open(sink)
        if not self._owed[node]:
            self._received_s[node] = self._now_s()
        self._open[sink.number] = sink
        self._owed[node] += sum(item.num_bytes for item in batch)
        if not self._ask(node, sink.number, batch):
            self.lost(node, "its address is unknown")

    def _take_event(self, event: _Event | None) -> None:
        if event is None:
            self._give_up_unresponsive()
            return
        if event.node:
            self._give_up(event.node, event.reason)
        question = self._open.get(event.number)
        if question is None or event.index not in question.left:
            return
        self._received_s[question.node] = self._now_s()
        item = self._resolve(question, event.index)
        reason = event.reason
        if not reason and item.digest is not None and event.digest != item.digest:
            reason = "its bytes do not match the requested digest"
        if reason:
            item.problems.append(f"{question.node}: {reason}")
            self._assign(item)
        else:
            self.num_bytes += item.num_bytes

    def _resolve(self, question: _Batch, index: int) -> DownloadItem:
        question.left.remove(index)
        item = question.items[index]
        self._owed[question.node] -= item.num_bytes
        if not question.left:
            self._requests.close(question.number)
            del self._open[question.number]
        return item

    def _give_up_unresponsive(self) -> None:
        now_s = self._now_s()
        for node in {question.node for question in self._open.values()}:
            if now_s - self._received_s[node] > self._timeout_s:
                self._give_up(node, f"no answer for {self._timeout_s:.0f} s")

    def _give_up(self, node: str, reason: str) -> None:
        """Stop using a source, and move its open items to their next sources."""
        if node in self._bad:
            return
        self._bad[node] = reason
        again: list[DownloadItem] = list(self._waiting.pop(node, ()))
        for number, question in list(self._open.items()):
            if question.node == node:
                self._requests.close(number)
                again += [question.items[index] for index in sorted(question.left)]
                del self._open[number]
        self._owed.pop(node, None)
        for item in again:
            item.problems.append(f"{node}: {reason}")
            self._assign(item)
