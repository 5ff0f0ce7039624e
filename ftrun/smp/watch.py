"""Calls a function in the SMP's server thread at an interval."""

from collections.abc import Callable

from ftrun.smp.jobs import JobLanes


class IntervalTimer:
    """A timer with one interval at a time.

    Args:
        jobs: passes the calls to the server's thread.
        look: called in the server's thread.
    """

    def __init__(self, jobs: JobLanes, look: Callable[[], None]) -> None:
        self._jobs = jobs
        self._look = look
        self._end: Callable[[], None] | None = None

    def start(self, interval_s: float) -> None:
        self.stop()
        self._end = self._jobs.repeat(interval_s, self._look)

    def stop(self) -> None:
        """End the calls without waiting."""
        if self._end is not None:
            self._end()
            self._end = None
