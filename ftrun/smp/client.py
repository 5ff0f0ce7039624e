"""The connection of one client to the SMP server."""

import logging
from collections import deque
from enum import Enum

from ftrun.errors import PeerError
from ftrun.wire.messages.envelope import AnyMessage
from ftrun.wire.transport.channel import Channel, ReceivedMessage

SEND_DEADLINE_S = 2.0
"""A client that does not receive its reply within this time loses its connection, because the
server handles no other client while it sends."""

_log = logging.getLogger(__name__)


class ClientRole(Enum):
    """Role of the process at the other end."""

    UNKNOWN = "unknown"
    WORKER = "worker"
    AGENT = "agent"
    CLI = "cli"


class ClientConnection:
    """A channel, the role and rank of its client, and its unhandled messages."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.role = ClientRole.UNKNOWN
        self.rank = -1
        self.is_gone = False
        self.backlog: deque[ReceivedMessage] = deque()

    def send(self, body: AnyMessage, *, fds: tuple[int, ...] = (), question: int = 0) -> None:
        """Send a message; if that fails, set `is_gone` and raise no error."""
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
    """A client and its request. Each reply has the number of the request."""

    def __init__(self, client: ClientConnection, asked: ReceivedMessage) -> None:
        self._client = client
        self._question = asked.envelope.question

    def send(self, body: AnyMessage, *, fds: tuple[int, ...] = ()) -> None:
        self._client.send(body, fds=fds, question=self._question)
