"""Wakes the server's thread at intervals, to look at what should be moving.

Runs in:  the SMP, in a thread of its own that does nothing but wait.
Takes in: what to look at, and how often.
Gives:    calls in the server's thread.
"""

import threading
from collections.abc import Callable

from ftrun.smp.jobs import Jobs


class Watch:
    """One interval at a time.

    Args:
        jobs: the way into the server's thread.
        look: called there.
    """

    def __init__(self, jobs: Jobs, look: Callable[[], None]) -> None:
        self._jobs = jobs
        self._look = look
        self._end: threading.Event | None = None

    def start(self, interval_s: float) -> None:
        """Look so often from now on."""
        self.stop()
        self._end = threading.Event()
        threading.Thread(
            target=self._run, args=(self._end, interval_s), name="ftrun-watch", daemon=True
        ).start()

    def stop(self) -> None:
        """Look no more; does not wait."""
        if self._end is not None:
            self._end.set()
            self._end = None

    def _run(self, end: threading.Event, interval_s: float) -> None:
        while not end.wait(interval_s):
            self._jobs.post(self._look)
