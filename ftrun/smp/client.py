"""One connection to the SMP, as the server sees it.

Runs in: the SMP.
"""

import logging
from collections import deque
from enum import Enum

from ftrun.errors import PeerError, ProtocolError
from ftrun.wire.messages.envelope import AnyMessage
from ftrun.wire.transport.channel import Channel, ReceivedMessage

SEND_DEADLINE_S = 2.0
"""A client that does not take its answer for this long loses its connection: while the server
waits for it, it serves nobody."""

_log = logging.getLogger(__name__)


class ClientRole(Enum):
    """Who is at the other end."""

    UNKNOWN = "unknown"
    WORKER = "worker"
    AGENT = "agent"
    CLI = "cli"


class ClientConnection:
    """A channel, who is behind it, and what waits to be handled."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.role = ClientRole.UNKNOWN
        self.rank = -1
        self.is_gone = False
        self.backlog: deque[ReceivedMessage] = deque()

    def introduce(self, *, role: str, rank: int) -> None:
        """Take what its Hello says.

        Raises:
            ProtocolError: there is no such role.
        """
        try:
            self.role = ClientRole(role)
        except ValueError as error:
            raise ProtocolError(f"a client says it is a {role!r}") from error
        self.rank = rank
        self.channel.peer = f"the worker of rank {rank}" if role == "worker" else f"the {role}"

    def tell(self, body: AnyMessage, *, fds: tuple[int, ...] = (), question: int = 0) -> None:
        """Send; a client that cannot be reached is gone, which is no error of the server."""
        if self.is_gone:
            return
        try:
            self.channel.send(body, fds=fds, deadline_s=SEND_DEADLINE_S, question=question)
        except PeerError as error:
            _log.debug("%s", error)
            self.is_gone = True

    def close(self) -> None:
        self.is_gone = True
        for received in self.backlog:
            received.close()
        self.backlog.clear()
        self.channel.close()


class Requester:
    """A client and what it has asked: the answer, however late it is, is told to be that."""

    def __init__(self, client: ClientConnection, asked: ReceivedMessage) -> None:
        self._client = client
        self._question = asked.envelope.question

    def tell(self, body: AnyMessage, *, fds: tuple[int, ...] = ()) -> None:
        self._client.tell(body, fds=fds, question=self._question)
