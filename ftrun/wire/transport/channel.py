"""One end of a unix socket that carries messages and descriptors.

Runs in:  every process that communicates: worker, agent, SMP, cli.
Takes in: a connected unix stream socket.
Gives:    `send`, `ask` and `receive`, each with a deadline in seconds.

Not thread-safe: a channel belongs to one thread, because two callers on one stream would take each
other's replies. Questions are numbered, and a reply has the number of its question. If a reply
arrives after its caller has timed out, the next question does not take it. A descriptor never
arrives after the first byte of its frame, so that frames only need to count descriptors.
"""

import array
import os
import socket
import struct
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from ftrun import clock
from ftrun.errors import PeerLost, PeerTimeout, ProtocolError
from ftrun.wire.messages.envelope import AnyMessage, Envelope, Hello
from ftrun.wire.run_environment import short_socket_path as short_socket_path
from ftrun.wire.transport.framing import FrameReader, encode

_MAX_FDS = 253  # the kernel's SCM_MAX_FD
_RECEIVE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message and its descriptors, which the receiver must close."""

    envelope: Envelope
    fds: tuple[int, ...] = ()

    @property
    def body(self) -> AnyMessage:
        return self.envelope.body

    def close(self) -> None:
        _close_all(self.fds)


class Channel:
    """Messages over one connected socket."""

    def __init__(self, sock: socket.socket, *, run_id: str, peer: str) -> None:
        self._sock = sock
        self._reader = FrameReader()
        self._fds: deque[int] = deque()
        self._ready: deque[ReceivedMessage] = deque()
        self._num_questions = 0
        self.run_id = run_id
        self.peer = peer
        self.generation = 0
        self.incarnation = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def peer_pid(self) -> int:
        """Pid of the process that listens, or that connected to this one."""
        return credentials(self._sock)[0]

    def send(
        self,
        body: AnyMessage,
        *,
        fds: tuple[int, ...] = (),
        deadline_s: float = 5.0,
        question: int = 0,
    ) -> None:
        """Send one message. The receiver gets duplicates of the descriptors.

        The caller closes its own. `question` is the number of the question that this answers.
        Raises PeerLost or PeerTimeout.
        """
        envelope = Envelope(
            self.run_id, self.generation, self.incarnation, body, len(fds), question
        )
        data = memoryview(encode(envelope))
        self._sock.settimeout(deadline_s)
        try:
            if fds:
                rights = array.array("i", fds)
                sent = self._sock.sendmsg(
                    [data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], socket.MSG_NOSIGNAL
                )
            else:
                sent = self._sock.send(data, socket.MSG_NOSIGNAL)
            if sent < len(data):
                self._sock.sendall(data[sent:], socket.MSG_NOSIGNAL)
        except TimeoutError as error:
            raise PeerTimeout(peer=self.peer, waited_s=deadline_s) from error
        except OSError as error:
            raise PeerLost(peer=self.peer) from error

    def receive(self, *, deadline_s: float) -> ReceivedMessage:
        """Wait for the next message; raises PeerLost, PeerTimeout, ProtocolError."""
        give_up_s = clock.now_s() + deadline_s
        while not self._ready:
            left_s = give_up_s - clock.now_s()
            if left_s <= 0:
                raise PeerTimeout(peer=self.peer, waited_s=deadline_s)
            self._sock.settimeout(left_s)
            self._pull()
        return self._ready.popleft()

    def receive_ready(self) -> list[ReceivedMessage]:
        """Return all messages that have arrived; never waits. Raises PeerLost, ProtocolError."""
        # MSG_DONTWAIT would not do: if a timeout is set, as by an earlier send, Python polls first.
        self._sock.setblocking(False)
        try:
            while True:
                self._pull()
        except BlockingIOError:
            pass
        except PeerLost:
            if not self._ready:
                raise
        found = list(self._ready)
        self._ready.clear()
        return found

    def ask(
        self, body: AnyMessage, *, fds: tuple[int, ...] = (), deadline_s: float = 10.0
    ) -> ReceivedMessage:
        """Send a question, and wait for its reply; earlier messages stay for `receive`."""
        number = self.send_request(body, fds=fds, deadline_s=deadline_s)
        unsolicited: list[ReceivedMessage] = []
        give_up_s = clock.now_s() + deadline_s
        try:
            while True:
                left_s = give_up_s - clock.now_s()
                if left_s <= 0:
                    raise PeerTimeout(peer=self.peer, waited_s=deadline_s)
                received = self.receive(deadline_s=left_s)
                if received.envelope.question == number:
                    return received
                if received.envelope.question:
                    received.close()
                else:
                    unsolicited.append(received)
        finally:
            self._ready.extendleft(reversed(unsolicited))

    def send_request(
        self, body: AnyMessage, *, fds: tuple[int, ...] = (), deadline_s: float = 10.0
    ) -> int:
        """Send a question; return the number that its reply will have. Raises as `send`."""
        self._num_questions += 1
        self.send(body, fds=fds, deadline_s=deadline_s, question=self._num_questions)
        return self._num_questions

    def close(self) -> None:
        for received in self._ready:
            received.close()
        _close_all(tuple(self._fds))
        self._fds.clear()
        self._ready.clear()
        self._sock.close()

    def _pull(self) -> None:
        space = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
        try:
            data, ancillary, _, _ = self._sock.recvmsg(
                _RECEIVE_BYTES, space, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            raise
        except TimeoutError:
            return
        except OSError as error:
            raise PeerLost(peer=self.peer) from error
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                got = array.array("i")
                got.frombytes(payload[: len(payload) - len(payload) % got.itemsize])
                self._fds.extend(got)
        if not data:
            raise PeerLost(peer=self.peer)
        for envelope in self._reader.feed(data):
            if envelope.run_id != self.run_id:
                raise ProtocolError(
                    f"{self.peer} sent a message of run {envelope.run_id!r}, not {self.run_id!r}"
                )
            if envelope.num_fds > len(self._fds):
                raise ProtocolError(f"{self.peer} announced descriptors that are missing")
            fds = tuple(self._fds.popleft() for _ in range(envelope.num_fds))
            self._ready.append(ReceivedMessage(envelope, fds))


def connect(path: Path, *, run_id: str, peer: str, hello: Hello, deadline_s: float) -> Channel:
    """Raises PeerLost if no process listens at `path`, PeerTimeout if it does not accept."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.settimeout(deadline_s)
    try:
        with short_socket_path(path) as short:
            sock.connect(short)
    except OSError as error:
        sock.close()
        if isinstance(error, TimeoutError):
            raise PeerTimeout(peer=peer, waited_s=deadline_s) from error
        raise PeerLost(peer=peer) from error
    channel = Channel(sock, run_id=run_id, peer=peer)
    channel.send(hello, deadline_s=deadline_s)
    return channel


def listen(path: Path) -> socket.socket:
    """Return a listening socket to which only this user may connect; a stale one is replaced.

    The socket gets its final name after it listens. A process that finds the path can therefore
    connect.
    """
    unready = path.with_name(f".{path.name}.{os.getpid()}")
    unready.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        with short_socket_path(unready) as short:
            sock.bind(short)
    finally:
        os.umask(before)
    sock.listen(128)
    unready.replace(path)
    return sock


def accept(server: socket.socket, *, run_id: str) -> Channel | None:
    """Accept the next connection; None if the process at the other end has another user."""
    sock, _ = server.accept()
    if credentials(sock)[1] != os.getuid():
        sock.close()
        return None
    return Channel(sock, run_id=run_id, peer="a client")


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Pid and user of the peer, as the kernel reports them."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", found)
    return int(pid), int(uid)


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
