"""The agent's side of the stub, which retains memory and state for the next agent.

Runs in:  agent, main thread.
Takes in: the arenas' descriptors and the run's state, each time they change.
Gives:    the same to the next agent, if the SMP has died together with this one.
Survives: agent and SMP at once; the stub is the third holder of the memory.

The stub has no msgspec and decodes nothing. The state is the first of the descriptors, in its own
memfd, because the plan of thousands of nodes is large.
"""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress

from ftrun.agent.snapshots.kept_state import PersistedAgentState, decode_state
from ftrun.wire.messages.agent_start import AGENT_LOST_S, RETAINED_FDS, STUB_SOCKET, decode_numbers


class StubClient:
    """One end of the socket between stub and agent; has no effect without a stub."""

    def __init__(self) -> None:
        number = os.environ.pop(STUB_SOCKET, "")
        self._socket = socket.socket(fileno=int(number)) if number else None
        if self._socket is not None:
            self._socket.set_inheritable(False)
        self._sent: tuple[tuple[int, ...], PersistedAgentState | None] = ((), None)

    def keep(self, fds: Sequence[int], state: PersistedAgentState) -> None:
        """Make the stub hold duplicates of exactly these descriptors, and this state."""
        now = (tuple(fds), state)
        if self._socket is None or (now[0] == self._sent[0] and state is self._sent[1]):
            return
        with suppress(OSError):  # if the stub is gone, this agent ends too
            fd = os.memfd_create("ftrun-kept-state")
            with open(fd, "wb") as file:
                file.write(state.encode())
                file.flush()
                socket.send_fds(self._socket, [b"\0"], [fd, *fds])
            self._sent = now


def last_agent_ended_s() -> float | None:
    """Monotonic time at which the last agent ended; None: this is the first agent of its stub."""
    return float(os.environ.pop(AGENT_LOST_S, "0")) or None


def kept() -> tuple[list[int], PersistedAgentState]:
    """What the stub has retained from the last agent: descriptors, now owned here, and state."""
    numbers = decode_numbers(os.environ.pop(RETAINED_FDS, ""))
    if not numbers:
        return [], PersistedAgentState()
    first, *fds = numbers
    for fd in fds:
        os.set_inheritable(fd, False)
    with open(first, "rb") as file:  # the writer has left the file position at the end
        file.seek(0)
        return fds, decode_state(file.read())
