"""Work that waits for events, written as generators: threads drive it here, virtual time in tests.

Runs in:  the SMP, in one thread for each generator.
Takes in: a generator that yields `Wait` objects.
Gives:    the next event, or None if none arrives in time.
"""

import queue
import threading
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from ftrun import clock

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Wait:
    """The value that a generator yields.

    Args:
        events: queue of the next event.
        timeout_s: seconds until None is sent instead; None: no limit.
    """

    events: "queue.SimpleQueue[Any]"
    timeout_s: float | None = None


Steps = Generator[Wait, Any, Result]


def drive(steps: Steps[Result]) -> Result:
    event = None
    while True:
        try:
            wait = steps.send(event)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        try:
            event = wait.events.get(timeout=wait.timeout_s)
        except queue.Empty:
            event = None


class Runner:
    """Starts generators, and provides the time that their waits use."""

    def now_s(self) -> float:
        return clock.now_s()

    def start(self, name: str, steps: Steps[None]) -> None:
        threading.Thread(target=drive, args=(steps,), name=name, daemon=True).start()
