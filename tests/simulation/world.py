"""Virtual time, streams of random numbers, and the trace of one run.

Time jumps to the next event. Each part draws from its own stream: an additional draw in one part
changes nothing in another part.
"""

import heapq
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import xxhash

LAST_EVENTS = 400
MAX_EVENTS = 100_000


class Violation(Exception):
    """An invariant is violated."""


class World:
    """One run's time and random numbers."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_s = 0.0
        self.num_events = 0
        self.log: deque[str] = deque(maxlen=LAST_EVENTS)
        self.on_trace: Callable[[str], None] | None = None
        self.is_over = False
        self.max_events = MAX_EVENTS
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._digest = xxhash.xxh3_64()

    def stream(self, name: str) -> Random:
        return Random(f"{self.seed}/{name}")

    def after(self, delay_s: float, what: Callable[..., None], *args: Any) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._order, what, args))

    def run_until(self, end_s: float) -> None:
        queue = self._queue
        while queue and queue[0][0] <= end_s and not self.is_over:
            self.now_s, _, what, args = heapq.heappop(queue)
            self.num_events += 1
            if self.num_events > self.max_events:
                raise Violation(
                    f"more than {self.max_events} events: something goes round in a circle"
                )
            what(*args)
        if not self.is_over:
            self.now_s = end_s

    def trace(self, source: str, what: str) -> None:
        """Adds a line to the trace; two runs of a seed have the same lines."""
        line = f"{self.now_s:9.4f} {source:4} {what}"
        self._digest.update(line.encode())
        self.log.append(line)
        if self.on_trace is not None:
            self.on_trace(line)

    def trace_digest(self) -> int:
        return self._digest.intdigest()
