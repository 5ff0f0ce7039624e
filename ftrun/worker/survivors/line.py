"""The line to the agent of a rank that may stay when another rank fails.

Runs in:  worker: a daemon thread that blocks on the line; the training thread.
Takes in: `Revoke` and `LaunchRequest` from the agent.
Gives:    `is_revoked`, and aborted process groups; `Parked`.
Survives: nothing: if the agent closes the line, this process ends.

Rule 1: `is_revoked` is set before the groups are aborted. A snapshot whose seal precedes it holds
        no value of an aborted collective; after it, none is sealed.
Rule 2: a revocation outside of a guarded loop is declined at once, because no code of ftrun could
        park the process there.
"""

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable

import msgspec

from ftrun import clock
from ftrun.wire.messages.worker import REQUEST_IN_MEMORY, LaunchRequest, Parked, Revoke
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage
from ftrun.worker.process.startup import MAX_ORDER_BYTES, MAX_ORDER_FDS, read_request

_KILL_WAIT_S = 60.0
"""Longest wait of a process that cannot stay until its agent kills it."""

_SLICE_S = 0.1
_OUTSIDE = "it was outside of a loop with session.guard()"

_log = logging.getLogger(__name__)

_revocation = msgspec.json.Decoder(Revoke)


class AgentLine:
    """A rank's end of its line.

    Args:
        fd: a SOCK_SEQPACKET socket, which this object owns.
        abort: ends all collectives of this process with an error; called from a thread.
    """

    def __init__(self, fd: int, page: SharedPage, abort: Callable[[], None]) -> None:
        self.renewals = 0
        """Generations that this process has joined after its first one."""
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._page = page
        self._abort = abort
        self._revoked = threading.Event()
        self._may_stay = False
        self._lock = threading.Lock()
        self._launches: queue.SimpleQueue[tuple[LaunchRequest, list[int]]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="ftrun-line", daemon=True).start()

    @property
    def is_revoked(self) -> bool:
        return self._revoked.is_set()

    def await_revoke(self, timeout_s: float) -> bool:
        """Wait for a revocation; return whether there is one.

        The time in which this process is suspended does not count: a revocation may be unread then.
        """
        for _ in range(max(1, round(timeout_s / _SLICE_S))):
            if self._revoked.wait(_SLICE_S):
                return True
        return self._revoked.wait(_SLICE_S)

    def set_may_stay(self, may_stay: bool) -> None:
        """Enter or leave the part of the script in which this process can be parked."""
        with self._lock:
            self._may_stay = may_stay
            self._page.set(HeartbeatField.MAY_STAY, int(may_stay))
            is_late = self.is_revoked and not may_stay
        if is_late:
            self.decline(_OUTSIDE)

    def park(self, first_step: int, last_step: int) -> tuple[LaunchRequest, list[int]]:
        """Report that this process is parked; return its next launch request and descriptors.

        There is no limit of the wait, because the agent kills a process that it does not need.
        """
        with self._lock:
            self._may_stay = False
            self._page.set(HeartbeatField.MAY_STAY, 0)
        self._report(Parked(self._generation, first_step, last_step, self.renewals))
        request, fds = self._launches.get()
        self._revoked.clear()
        self.renewals += 1
        return request, fds

    def decline(self, problem: str) -> None:
        """Report that this process cannot stay."""
        _log.warning("this rank cannot stay after the failure of another one: %s", problem)
        self._report(Parked(self._generation, renewals=self.renewals, problem=problem))

    def refuse(self, problem: str) -> None:
        """Report that this process cannot stay, and wait until the agent kills it."""
        self.decline(problem)
        clock.sleep(_KILL_WAIT_S)
        os._exit(1)

    # --- the thread ------------------------------------------------------------------------

    @property
    def _generation(self) -> int:
        return self._page.get(HeartbeatField.GENERATION)

    def _report(self, parked: Parked) -> None:
        try:
            self._socket.send(msgspec.json.encode(parked))
        except OSError:
            os._exit(1)  # the agent has ended

    def _listen(self) -> None:
        while True:
            data, fds = b"", list[int]()
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, MAX_ORDER_BYTES, MAX_ORDER_FDS)
            except OSError as error:
                _log.warning("the line to the agent: %s", error)
            if not data:
                os._exit(1)
            try:
                self._take(data, fds)
            except Exception:  # noqa: BLE001 - the agent kills a rank that does not park
                _log.warning("a bug in ftrun: a message on the line is lost", exc_info=True)
                if data == REQUEST_IN_MEMORY:
                    os._exit(1)  # `park` would wait for it without limit

    def _take(self, data: bytes, fds: list[int]) -> None:
        if data == REQUEST_IN_MEMORY:
            self._launches.put((read_request(fds.pop(0)), fds))
            return
        generation = _revocation.decode(data).generation
        with self._lock:
            if generation != self._generation or self.is_revoked:
                return
            if may_stay := self._may_stay:
                self._revoked.set()
        if may_stay:
            self._abort()  # Rule 1
        else:
            self._report(Parked(generation, renewals=self.renewals, problem=_OUTSIDE))
