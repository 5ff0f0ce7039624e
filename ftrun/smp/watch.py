"""Has the server's thread look, at an interval, at what should be moving.

Runs in:  the SMP, in the server's thread.
Takes in: what to look at, and how often.
Gives:    calls in the server's thread.
"""

from collections.abc import Callable

from ftrun.smp.jobs import JobLanes


class IntervalTimer:
    """One interval at a time.

    Args:
        jobs: the way into the server's thread.
        look: called there.
    """

    def __init__(self, jobs: JobLanes, look: Callable[[], None]) -> None:
        self._jobs = jobs
        self._look = look
        self._end: Callable[[], None] | None = None

    def start(self, interval_s: float) -> None:
        """Look so often from now on."""
        self.stop()
        self._end = self._jobs.repeat(interval_s, self._look)

    def stop(self) -> None:
        """Look no more; does not wait."""
        if self._end is not None:
            self._end()
            self._end = None
