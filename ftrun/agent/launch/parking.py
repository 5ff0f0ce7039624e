"""Asks the ranks of this node that may stay to park, and awaits their answers.

Runs in the main thread. A rank that is inside a guarded loop gets `Revoke` on its line, aborts its
process groups, and answers with `Parked`. From then on it neither communicates nor seals, and waits
for a launch request as a standby does. It ends itself if its line is closed.

Rule 1: a rank that does not answer in time, has a problem, or ends, does not stay.
Rule 2: no rank stays if one of this node has made no step in this generation: nothing has shown
        that its processes work.
Rule 3: NCCL must not end a rank when another one fails, because it may do so before the rank parks.
"""

import logging
import select
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import msgspec

from ftrun import clock
from ftrun.agent.launch.warm_start import WorkerHandle
from ftrun.wire.cluster.membership import ParkedRank
from ftrun.wire.messages.worker import Parked, Revoke
from ftrun.wire.shared_memory.pages import HeartbeatField

NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_HARMLESS = ("0", "2")
"""Values with which torch's watchdog ends no rank; 0: it does nothing, 2: it aborts groups."""

_MAX_ANSWER_BYTES = 1 << 16
_log = logging.getLogger(__name__)


class RankParking:
    """The ranks of one generation on this node that have parked or are asked to."""

    def __init__(self, generation: int, *, limit_s: float) -> None:
        self.generation = generation
        self.problem = ""
        """Why no rank of this node may stay."""
        self.notes: list[str] = []
        """Why ranks that were asked did not park."""
        self.asked: list[WorkerHandle] = []
        self._limit_s = limit_s
        self._until_s = 0.0

    def ask(self, handles: Sequence[WorkerHandle], *, failed: Collection[int]) -> None:
        """Revoke this generation in the ranks that may stay; parked ones need no request."""
        late = [one.slot for one in handles if not one.slot.page.get(HeartbeatField.FIRST_STEP_NS)]
        if late:
            self.problem = f"rank {late[0].rank} has made no step in generation {self.generation}"
            return
        self._until_s = clock.now_s() + self._limit_s
        revoke = msgspec.json.encode(Revoke(self.generation))
        for handle in handles:
            if handle.slot.rank in failed:
                handle.parked = None
            elif handle.parked is None and handle.slot.page.get(HeartbeatField.MAY_STAY):
                self._ask(handle, revoke)

    def _ask(self, handle: WorkerHandle, revoke: bytes) -> None:
        line = handle.slot.line
        if line is not None and not handle.child.reap():
            with suppress(OSError):  # it has just ended
                line.send(revoke)
                self.asked.append(handle)

    def wait(self) -> None:
        """Receive the answers, at most until the limit; the others stay unparked."""
        waiting = {handle.slot.line: handle for handle in self.asked}
        while waiting:
            poller = select.poll()
            for line, handle in waiting.items():
                assert line is not None
                poller.register(line, select.POLLIN)
                if handle.child.status is None:
                    poller.register(handle.child.pidfd, select.POLLIN)
            poller.poll(max(0.0, self._until_s - clock.now_s()) * 1000)
            is_late = clock.now_s() >= self._until_s
            for line, handle in list(waiting.items()):
                if self._has_answered(handle) or is_late:
                    del waiting[line]
                    if handle.parked is None and handle.child.status is None and is_late:
                        self._note(handle, f"it has not parked within {self._limit_s:.1f} s")

    def _has_answered(self, handle: WorkerHandle) -> bool:
        line = handle.slot.line
        assert line is not None
        while True:
            try:
                data = line.recv(_MAX_ANSWER_BYTES)
                answer = msgspec.json.decode(data, type=Parked) if data else None
            except BlockingIOError:
                return handle.child.reap()
            except ConnectionError:
                return True  # it ends
            except (OSError, msgspec.MsgspecError) as error:
                self._note(handle, str(error))
                return True
            if answer is None:
                return True  # it ends
            if answer.generation != self.generation:
                continue
            if answer.problem:
                self._note(handle, answer.problem)
            else:
                handle.parked = answer
            return True

    def _note(self, handle: WorkerHandle, reason: str) -> None:
        self.notes.append(f"rank {handle.slot.rank} cannot stay: {reason}")
        _log.info("%s", self.notes[-1])


def parked_ranks(handles: Sequence[WorkerHandle]) -> tuple[ParkedRank, ...]:
    return tuple(
        ParkedRank(
            handle.slot.rank,
            handle.parked.first_step,
            handle.parked.renewals,
            handle.parked.last_step,
        )
        for handle in handles
        if handle.parked is not None and not handle.child.reap()
    )


def survivor_variables(user: Mapping[str, str], *, survivors: str) -> dict[str, str]:
    """Variables of ranks that `user` has not set; see Rule 3. torch's launcher would set 1."""
    return {NCCL_ERRORS: "0"} if survivors == "on" and NCCL_ERRORS not in user else {}


def report_nccl_errors(user: Mapping[str, str]) -> None:
    """For a node with devices for NCCL, at the start of a run with `--survivors on`."""
    value = user.get(NCCL_ERRORS)
    if value is None:
        _log.info(
            "--survivors on sets %s=0, so that NCCL ends no rank that may stay. ftrun "
            "detects hangs. This was not run on a GPU",
            NCCL_ERRORS,
        )
    elif value not in _HARMLESS:
        _log.warning(
            "%s=%s lets NCCL end ranks that could stay when another one fails. Unset it, or set 0",
            NCCL_ERRORS,
            value,
        )
