"""The agent's side of a fault's healer: starts it, hears that the fault is there, sees its end.

Runs in:  agent, main thread.
Takes in: steps to do and to undo, see healer.py.
Gives:    a `RunningFault`; a `FaultAction` that makes one; or a refusal in the words of what could
          not be done.
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
    """A fault that lasts, and the process that takes it back."""

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
        """Start it.

        Args:
            do: steps that bring the fault about.
            undo: steps that take it back.
            for_s: so long; 0: until `end`, or until all targets have ended.
            since_s: when the fault began; 0: when all of `do` is done.
            targets: the processes it is done to.
            waits: until it is done; not where this process is stopped or killed by it.

        Raises:
            FaultRefused: a step has failed; nothing of it is left.
        """
        order = {"do": do, "undo": undo, "for_s": for_s, "since_s": since_s, "targets": targets}
        started = subprocess.Popen(
            python_command("ftrun.agent.faults.reverter_process", json.dumps(order)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            # It must not take part in what it brings about, as under libfaketime.
            env={name: text for name, text in os.environ.items() if name != "LD_PRELOAD"},
        )
        started.returncode = 0  # Child reads the status
        self.child = ChildProcess(started.pid, "healer")
        assert started.stdin is not None
        assert started.stdout is not None
        # Kept open: where it takes away what can be opened, closing them would give some back.
        self._pipes = (started.stdin, started.stdout)
        # Only now, since a fault may take from us what making a Child needs.
        started.stdin.write(b"go\n")
        started.stdin.flush()
        answer = _line(started.stdout.fileno()) if waits else b"done"
        if answer != b"done":
            self.end()
            words = answer.decode(errors="replace").removeprefix("failed ")
            raise FaultRefused(
                words or "what was to bring the fault about has ended without a word"
            )

    def is_over(self) -> bool:
        if not self.child.reap():
            return False
        for pipe in self._pipes:
            pipe.close()
        return True

    def end(self) -> None:
        """Take it back now."""
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
    """A fault that can be made.

    Args:
        how: in words, for the journal.
        do: makes it; a Healing where it lasts.
        is_last: it ends or stops this agent, so that nothing can be written down after it.
        is_answered_first: whoever has asked could not be told afterwards.
    """

    how: str
    do: Callable[[], RunningFault | None]
    is_last: bool = False
    is_answered_first: bool = False
