"""Calls into a library that may never return.

Runs in:  the SMP, called in its disk lane's thread; a separate thread makes the calls.
Takes in: functions; a time limit for each call; an event that cancels all calls.
Gives:    their results in order, or a `CheckpointError`.
Survives: a store that hangs. The caller gets an error, and the thread stays in its call. It is a
          daemon thread, so the SMP can end.

The libraries behind fsspec raise exceptions of any type. Only this module catches all of them.
"""

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from ftrun import clock
from ftrun.errors import CheckpointError

ANSWER_S = 120.0
"""Limit of a single call, such as one block, in seconds: 16 MiB in this time are 0.14 MB/s."""

_NAP_S = 0.1
_T = TypeVar("_T")
_Job = Callable[[], None]


class CallResult(Generic[_T]):
    """The result of a call; `take` may be called once.

    `take` drops the error. The frames of the error refer to the store and its connection, and this
    object would keep both alive.
    """

    def __init__(self) -> None:
        self._is_there = threading.Event()
        self._value: list[_T] = []
        self._error: Exception | None = None

    def make(self, call: Callable[[], _T]) -> None:
        try:
            self._value.append(call())
        except Exception as error:  # noqa: BLE001 - raised again by `take`
            self._error = error
        self._is_there.set()

    def wait(self, limit_s: float) -> bool:
        return self._is_there.wait(limit_s)

    def take(self) -> _T:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None
        return self._value.pop()


class CallThread:
    """One thread that makes calls, one after another.

    Args:
        where: name of the store in error messages.
        stop: cancels all calls.
        answer_s: limit of one call, in seconds.
        secret: is removed from error messages.
    """

    def __init__(
        self, where: str, stop: threading.Event, *, answer_s: float = ANSWER_S, secret: str = ""
    ) -> None:
        self._where = where
        self._stop = stop
        self._answer_s = answer_s
        self._secret = secret
        self._lost = ""
        """The reason why the thread is unusable; empty if it is usable."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._jobs,), name="ftrun-url", daemon=True).start()

    def __call__(self, call: Callable[[], _T]) -> _T:
        """Make a call and return its result; raises as `wait`."""
        return self.wait(self.start(call))

    def start(self, call: Callable[[], _T]) -> CallResult[_T]:
        if self._lost:
            raise CheckpointError(self._lost)
        answer: CallResult[_T] = CallResult()
        self._jobs.put(partial(answer.make, call))
        return answer

    def wait(self, answer: CallResult[_T]) -> _T:
        """Raises CheckpointError if the call failed, exceeded the limit, or was cancelled."""
        give_up_s = clock.now_s() + self._answer_s
        while not answer.wait(_NAP_S):
            if self._stop.is_set():
                self._lose("the checkpoint is cancelled: the run is being stopped")
            if clock.now_s() > give_up_s:
                self._lose(f"{self._where} has not answered for {self._answer_s:.0f} s")
        try:
            return answer.take()
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{self._where}: {self._words(error)}") from error

    def close(self) -> None:
        self._lost = self._lost or f"{self._where} is closed"
        self._jobs.put(None)

    def _lose(self, reason: str) -> None:
        self._lost = reason
        raise CheckpointError(reason)

    def _words(self, error: Exception) -> str:
        strerror = getattr(error, "strerror", None)
        text = f"{strerror or error}".strip() or type(error).__name__
        return text.replace(self._secret, "***") if self._secret else text


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job
