"""Publishes a value that one thread builds and other threads read.

Runs in:  agent: `poll` and `publish` in the thread that owns the data, `read` in any other thread.
Takes in: a function that builds the value; requests.
Gives:    the value, which must be immutable, with its age.
Survives: a failed build and a busy owner; readers then get the last value.

Rule 1: only the owner's thread reads the data from which the value is built.
Rule 2: a reader waits for a fresh value, but at most `WAIT_S`.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ftrun import clock
from ftrun.errors import PeerError

_log = logging.getLogger(__name__)

WAIT_S = 1.0
"""Longest wait of a reader. A turn of the owner takes less, unless it blocks."""

EVERY_S = 1.0
"""Seconds between two builds without a request."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """A published value and its age."""

    value: T
    age_s: float


class Published(Generic[T]):
    """The newest value of one owner thread. `build` runs in that thread, `wake` in a reader's."""

    def __init__(
        self, build: Callable[[], T], *, wake: Callable[[], None], every_s: float = EVERY_S
    ) -> None:
        self._build = build
        self._wake = wake
        self._every_s = every_s
        self._changed = threading.Condition()
        self._asked = self._answered = 0
        self._found: tuple[T, float] | None = None
        self._problem = ""
        self._due_s = 0.0

    # --- the owner's thread -------------------------------------------------------------------

    def poll(self, now_s: float) -> None:
        """Build the value if it was requested or is old; called once per turn of the owner."""
        if self._asked != self._answered or now_s >= self._due_s:
            self.publish()

    def publish(self) -> None:
        """Build the value now; the owner also calls this before it blocks."""
        asked = self._asked
        try:
            found: T | None = self._build()
            problem = ""
        except Exception as error:  # noqa: BLE001 - a bug costs the status, never the run
            found, problem = None, f"{type(error).__name__}: {error}"
            if problem != self._problem:
                _log.exception("the status cannot be built: a bug of ftrun")
        now_s = clock.now_s()
        with self._changed:
            self._found = self._found if found is None else (found, now_s)
            self._problem, self._answered, self._due_s = problem, asked, now_s + self._every_s
            self._changed.notify_all()

    # --- any thread ---------------------------------------------------------------------------

    def read(self) -> Reading[T]:
        """Return a fresh value, or the last one if the owner is busy.

        PeerError if there is none yet.
        """
        with self._changed:
            self._asked = asked = self._asked + 1
        self._wake()
        with self._changed:
            self._changed.wait_for(lambda: self._answered >= asked, WAIT_S)
        return self.last()

    def last(self) -> Reading[T]:
        """Return the last value without waiting; PeerError if there is none yet."""
        with self._changed:
            if self._found is None:
                reason = self._problem or "the agent has just been started"
                raise PeerError(f"there is no status yet: {reason}")
            value, at_s = self._found
        return Reading(value, max(0.0, clock.now_s() - at_s))
