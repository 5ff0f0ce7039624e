"""Work that waits for events, as generators: a thread drives them here, virtual time in tests.

Runs in:  the SMP, in one thread for each piece of work.
Takes in: a generator that yields what it waits for.
Gives:    the next event, or None if none has come in time.
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
    """What a generator yields.

    Args:
        events: where the next event comes from.
        timeout_s: seconds until None is sent instead; None: there is no limit.
    """

    events: "queue.SimpleQueue[Any]"
    timeout_s: float | None = None


Steps = Generator[Wait, Any, Result]


def drive(steps: Steps[Result]) -> Result:
    """Run it to its end in this thread."""
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
    """Starts work, and has the time that its waits are measured with."""

    def now_s(self) -> float:
        return clock.now_s()

    def start(self, name: str, steps: Steps[None]) -> None:
        """Drive it in a thread of this name."""
        threading.Thread(target=drive, args=(steps,), name=name, daemon=True).start()
