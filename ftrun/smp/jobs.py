"""Runs work that takes longer than a message may wait.

Runs in:  the SMP: `submit` and `finish` in the server's thread, the work in one thread per lane.
Takes in: functions that compute, and may return a function that handles the result.
Gives:    the returned functions, run in the server's thread when the descriptor becomes readable.

A lane runs its jobs in order: "memory-0" and so on allocate arenas, "disk" reads and writes
checkpoints. The threads are daemons, so an SMP that ends does not wait for a disk.

A generator that waits for events yields `Wait` objects. A thread drives it here, and virtual time
in tests.

Work that is not urgent runs at low priority, see `ftrun.linux.at_low_priority`.
"""

import logging
import os
import queue
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from ftrun import clock

Finish = Callable[[], None]
Work = Callable[[], Finish | None]

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    work: Work
    failed: Finish | None


class JobLanes:
    """Threads for work, and the queue of results for the server's loop."""

    def __init__(self) -> None:
        self._lanes: dict[str, queue.SimpleQueue[_Job]] = {}
        self._done: queue.SimpleQueue[Finish] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._wake_fd

    def submit(self, lane: str, work: Work, *, failed: Finish | None = None) -> None:
        """Run `work` in the lane's thread, then what it returns, if anything, in the server's.

        `work` must handle every error that it expects. After an unexpected error, or if no thread
        can be started, `failed` runs in the server's thread instead.
        """
        if lane not in self._lanes:
            jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
            try:
                threading.Thread(
                    target=self._run, args=(jobs,), name=f"ftrun-{lane}", daemon=True
                ).start()
            except RuntimeError as error:  # the limit of threads is reached
                _log.warning("a job of the SMP is not run: %s", error)
                if failed is not None:
                    self.post(failed)
                return
            self._lanes[lane] = jobs
        self._lanes[lane].put(_Job(work, failed))

    def post(self, finish: Finish) -> None:
        """Run `finish` in the server's thread; callable from any thread."""
        self._done.put(finish)
        os.eventfd_write(self._wake_fd, 1)

    def repeat(self, interval_s: float, poll: Finish) -> Callable[[], None]:
        """Run `poll` in the server's thread at this interval; return a function that ends it."""
        end = threading.Event()
        threading.Thread(
            target=self._repeat, args=(end, interval_s, poll), name="ftrun-watch", daemon=True
        ).start()
        return end.set

    def _repeat(self, end: threading.Event, interval_s: float, poll: Finish) -> None:
        while not end.wait(interval_s):
            self.post(poll)

    def finish(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return
        while not self._done.empty():
            done = self._done.get()
            try:
                done()
            except Exception:  # noqa: BLE001
                # A bug here must not end the server's thread, because the snapshots would be lost
                # with it.
                _log.exception("internal error while the result of a job was handled")

    def _run(self, lane: queue.SimpleQueue[_Job]) -> None:
        while True:
            job = lane.get()
            try:
                finish = job.work()
            except Exception:  # noqa: BLE001
                # One of the process loops: a bug in a job must not end the SMP and lose the
                # snapshots.
                _log.exception("internal error in a job of the SMP")
                finish = job.failed
            if finish is not None:
                self.post(finish)


class IntervalTimer:
    """Calls `poll` in the server's thread, at one interval at a time."""

    def __init__(self, jobs: JobLanes, poll: Callable[[], None]) -> None:
        self._jobs = jobs
        self._poll = poll
        self._end: Callable[[], None] | None = None

    def start(self, interval_s: float) -> None:
        self.stop()
        self._end = self._jobs.repeat(interval_s, self._poll)

    def stop(self) -> None:
        if self._end is not None:
            self._end()
            self._end = None


@dataclass(frozen=True, slots=True)
class Wait:
    """The value that a generator yields: a queue of events, and the seconds until None is sent."""

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
