"""Work that takes longer than a message may wait.

Runs in:  the SMP: `submit` and `finish` in the server's thread, the work in one thread per lane.
Takes in: functions that compute and return what is to be done with the result.
Gives:    the results, to be run in the server's thread when the descriptor becomes readable.

A lane does one thing after the other: "memory-0" and so on make arenas, "disk" reads and writes
checkpoints. The threads are daemons: an SMP that is told to end does not wait for a disk.
"""

import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

Finish = Callable[[], None]
Work = Callable[[], Finish]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    work: Work
    failed: Finish


class JobLanes:
    """Lanes of work and the way back into the server's loop."""

    def __init__(self) -> None:
        self._lanes: dict[str, queue.SimpleQueue[_Job]] = {}
        self._done: queue.SimpleQueue[Finish] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._wake_fd

    def submit(self, lane: str, work: Work, *, failed: Finish) -> None:
        """Run `work` in its lane's thread, then what it returns in the server's.

        Args:
            lane: one thread each.
            work: must handle what it expects to go wrong.
            failed: run in the server's thread instead, after what was not expected.
        """
        if lane not in self._lanes:
            self._lanes[lane] = queue.SimpleQueue()
            threading.Thread(
                target=self._run, args=(self._lanes[lane],), name=f"ftrun-{lane}", daemon=True
            ).start()
        self._lanes[lane].put(_Job(work, failed))

    def post(self, finish: Finish) -> None:
        """Run this in the server's thread; from whichever thread."""
        self._done.put(finish)
        os.eventfd_write(self._wake_fd, 1)

    def repeat(self, interval_s: float, look: Finish) -> Callable[[], None]:
        """Run `look` in the server's thread at this interval.

        Returns:
            Ends that; it does not wait.
        """
        end = threading.Event()
        threading.Thread(
            target=self._repeat, args=(end, interval_s, look), name="ftrun-watch", daemon=True
        ).start()
        return end.set

    def _repeat(self, end: threading.Event, interval_s: float, look: Finish) -> None:
        while not end.wait(interval_s):
            self.post(look)

    def finish(self) -> None:
        """Run what has been computed since the last call."""
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return
        while not self._done.empty():
            done = self._done.get()
            try:
                done()
            except Exception:  # noqa: BLE001
                # In the server's thread a bug must not cost the memory either.
                _log.exception("what a job has found ended in a bug of ftrun")

    def _run(self, lane: queue.SimpleQueue[_Job]) -> None:
        while True:
            job = lane.get()
            try:
                finish = job.work()
            except Exception:  # noqa: BLE001
                # One of the process loops: a bug in a job must not cost the memory.
                _log.exception("a job of the SMP ended in a bug of ftrun")
                finish = job.failed
            self.post(finish)
