"""The stub's side of the reserve, from which agents are forked without an import of torch.

Runs in:  stub. Standard library only.
Takes in: an order for an agent.
Gives:    the pid of an agent that is a child of the stub; or None if no reserve is usable.
"""

import os
import signal
import socket
from contextlib import suppress

from ftrun.wire.messages.agent_start import MAX_FDS, encode_order

ANSWER_S = 5.0
"""Seconds; a fork takes 20 ms, so that a slower reserve is stopped or starved."""


class ReserveLink:
    """Link to at most one reserve, which an agent that was started as a program leaves behind."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._pidfd = -1

    def offer(self) -> socket.socket:
        """Returns the socket that the next program inherits; the caller closes its own copy."""
        self.end()
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return there

    def fork_agent(self, folder: str, variables: dict[str, str], fds: list[int]) -> int | None:
        """Returns the pid of a new agent, or None if the agent must be started as a program.

        Args:
            folder: the run folder.
            variables: the variables that differ from those of the program.
            fds: the agent's end of the stub's socket, then the descriptors of the run's memory.
        """
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with here, suppress(OSError, ValueError):
            with there:
                if self._socket is None or not self._is_ready() or len(fds) >= MAX_FDS:
                    return None
                order = encode_order(folder, variables)
                socket.send_fds(self._socket, [order], [there.fileno(), *fds])
            here.settimeout(ANSWER_S)
            pid = int(here.recv(32))
            here.send(b"\0")
            return pid
        self.end()
        return None

    def end(self) -> None:
        """Closes the socket and kills the reserve."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = -1

    def _is_ready(self) -> bool:
        """Reads the pid that a ready reserve sends; False if none came or the reserve has ended."""
        assert self._socket is not None
        self._socket.setblocking(False)
        try:
            while said := self._socket.recv(32):
                self._pidfd = os.pidfd_open(int(said))
        except BlockingIOError:
            return self._pidfd >= 0
        return False
