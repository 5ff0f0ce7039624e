"""Starts and ends the reverter process of a fault.

Runs in the main thread. reverter_process.py has the steps to do and to undo.
"""

import json
import os
import select
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ftrun.agent.faults.reverter_process import Process
from ftrun.agent.launch.process import ChildProcess, python_command
from ftrun.errors import FaultRefused

_READY_S = 20.0
_END_S = 10.0

Step = Sequence[object]


class RunningFault:
    """A fault in progress, and the reverter process that ends it."""

    def __init__(
        self,
        do: Sequence[Step],
        undo: Sequence[Step],
        *,
        for_s: float = 0.0,
        since_s: float = 0.0,
        targets: Sequence[Process] = (),
        waits: bool = True,
    ) -> None:
        """Start the fault; FaultRefused if a step fails, after an undo.

        Args:
            do: steps that inject the fault.
            undo: steps that revert it.
            for_s: duration in seconds; 0: until `end`, or until all targets have ended.
            since_s: monotonic time at which the fault began; 0: when all of `do` is done.
            targets: processes that the fault affects.
            waits: wait until `do` is done; false if the fault stops or kills this process.
        """
        order = {"do": do, "undo": undo, "for_s": for_s, "since_s": since_s, "targets": targets}
        started = subprocess.Popen(
            python_command("ftrun.agent.faults.reverter_process", json.dumps(order)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            # The reverter must not be affected by its own fault, for example by libfaketime.
            env={name: text for name, text in os.environ.items() if name != "LD_PRELOAD"},
        )
        started.returncode = 0  # `ChildProcess` reads the exit status
        self.child = ChildProcess(started.pid, "reverter")
        assert started.stdin is not None
        assert started.stdout is not None
        # The pipes stay open, because closing them would free descriptors during an fd-limit fault.
        self._pipes = (started.stdin, started.stdout)
        # Start the steps only now, because a fault may take resources that `ChildProcess` needs.
        started.stdin.write(b"go\n")
        started.stdin.flush()
        answer = _line(started.stdout.fileno()) if waits else b"done"
        if answer != b"done":
            self.end()
            words = answer.decode(errors="replace").removeprefix("failed ")
            raise FaultRefused(
                words or "the reverter process exited without reporting that the fault was injected"
            )

    def is_over(self) -> bool:
        if not self.child.reap():
            return False
        for pipe in self._pipes:
            pipe.close()
        return True

    def end(self) -> None:
        """Revert the fault now; takes up to 20 s."""
        self.child.signal(15)
        if not self.child.wait(_END_S):
            self.child.signal(9)
            self.child.wait(_END_S)
        self.is_over()


def _line(fd: int) -> bytes:
    found = b""
    while not found.endswith(b"\n"):
        if not select.select([fd], [], [], _READY_S)[0]:
            break
        more = os.read(fd, 4096)
        if not more:
            break
        found += more
    return found.strip()


@dataclass(frozen=True, slots=True)
class FaultAction:
    """A prepared fault.

    Args:
        how: description for the journal.
        do: injects the fault; returns a `RunningFault` if the fault has a duration.
        is_last: the fault ends or stops this agent, so the journal is written before it.
        is_answered_first: the fault cuts off the requester, so the answer is sent before it.
    """

    how: str
    do: Callable[[], RunningFault | None]
    is_last: bool = False
    is_answered_first: bool = False
