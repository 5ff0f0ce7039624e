"""Pieces that other nodes have sent, for all ranks of this node.

Runs in:  the SMP: `fill` in the threads of jobs that read for ranks, `forget` in any thread.
Takes in: the pieces that a rank needs, and a function that fetches some of them.
Gives:    each piece, fetched by one thread, whatever number of ranks needs it.
Source:   TRANSOM (arXiv 2310.10046) fetches a remote file once for a node.

Rule 1: a thread fetches what it has claimed, and releases it, before it waits for the claims of
        other threads. Threads therefore never wait for each other in a circle.
Rule 2: a thread that fails releases its claims too. A waiting thread then claims the pieces.
Rule 3: copies are kept up to a limit, the newest ones. Ranks that are further apart than the limit
        fetch a piece again. `forget` frees all copies.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

from ftrun.linux import available_memory

PieceKey = tuple[int, int]
"""Digest and bytes of a piece."""
Fetch = Callable[[Sequence[PieceKey]], Sequence[PieceKey]]
"""Fills the memory of these pieces; returns those that no node delivers."""

_MEMORY_SHARE = 0.25


def _share_of_memory() -> int:
    return int(_MEMORY_SHARE * available_memory().num_bytes)


class PieceCache:
    """Thread-safe. `limit` returns bytes, and is called at the first copy."""

    def __init__(self, limit: Callable[[], int] = _share_of_memory) -> None:
        self.num_bytes = 0
        self._limit = limit
        self._limit_bytes: int | None = None
        self._pieces: dict[PieceKey, memoryview] = {}
        self._batches: deque[tuple[int, list[PieceKey]]] = deque()
        """Bytes and pieces of each copy, the oldest first."""
        self._claimed: set[PieceKey] = set()
        self._changed = threading.Condition()

    def fill(self, wanted: Mapping[PieceKey, memoryview], fetch: Fetch) -> set[PieceKey]:
        """Fill the memory of each piece; return the pieces that no node delivers."""
        left, missing = list(wanted), set[PieceKey]()
        while left:
            here, claimed = self._claim(left)
            for key, piece in here.items():
                wanted[key][:] = piece
            try:
                failed = set(fetch(claimed)) if claimed else set()
                self._keep({key: wanted[key] for key in claimed if key not in failed})
            finally:
                self._release(claimed)
            missing |= failed
            settled = {*here, *claimed}
            left = [key for key in left if key not in settled]
        return missing

    def forget(self) -> bool:
        """Free all copies, and keep no more; return whether there was one."""
        with self._changed:
            had_copies, self._limit_bytes = bool(self._batches), 0
            self._evict()
        return had_copies

    def _claim(
        self, wanted: Sequence[PieceKey]
    ) -> tuple[dict[PieceKey, memoryview], list[PieceKey]]:
        """The pieces that are here, and those that this thread fetches now; at least one."""
        with self._changed:
            while True:
                here = {key: self._pieces[key] for key in wanted if key in self._pieces}
                mine = [key for key in wanted if key not in here and key not in self._claimed]
                if here or mine:
                    self._claimed.update(mine)
                    return here, mine
                self._changed.wait()

    def _release(self, claimed: Sequence[PieceKey]) -> None:
        with self._changed:
            self._claimed.difference_update(claimed)
            self._changed.notify_all()

    def _keep(self, fetched: Mapping[PieceKey, memoryview]) -> None:
        size = sum(num_bytes for _, num_bytes in fetched)
        with self._changed:
            if self._limit_bytes is None:
                self._limit_bytes = self._limit()
            if not 0 < size <= self._limit_bytes:
                return
        # A mapping of its own, which the kernel gets back as soon as no piece of it is here.
        try:
            memory = memoryview(mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS))
        except OSError:
            return
        at = 0
        copies = {}
        for key, piece in fetched.items():
            copies[key] = memory[at : at + len(piece)]
            copies[key][:] = piece
            at += len(piece)
        with self._changed:
            self._pieces.update(copies)
            self._batches.append((size, list(copies)))
            self.num_bytes += size
            self._evict()

    def _evict(self) -> None:
        while self._batches and self.num_bytes > (self._limit_bytes or 0):
            size, keys = self._batches.popleft()
            self.num_bytes -= size
            for key in keys:
                self._pieces.pop(key, None)
