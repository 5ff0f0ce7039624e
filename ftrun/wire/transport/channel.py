"""One end of a unix socket that carries messages and descriptors.

Runs in: every process that talks: worker, agent, SMP, cli.
Takes in: a connected unix stream socket.
Gives:    `send`, `ask` and `receive`, each with a deadline in seconds.

Not thread-safe: a channel belongs to one thread, because two askers on one stream take each
other's answers. Questions are numbered, and an answer has the number of its question: one that
comes when its asker has given up is not taken for that to the next. A descriptor never arrives
after the first byte of its frame, so the frames need only count them.
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
from ftrun.wire.transport.framing import FrameReader, encode

_MAX_FDS = 253  # the kernel's SCM_MAX_FD
_RECEIVE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message and the descriptors that came with it, now the receiver's to close."""

    envelope: Envelope
    fds: tuple[int, ...] = ()

    @property
    def body(self) -> AnyMessage:
        return self.envelope.body

    def close(self) -> None:
        """Nobody keeps its descriptors."""
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

    def send(
        self,
        body: AnyMessage,
        *,
        fds: tuple[int, ...] = (),
        deadline_s: float = 5.0,
        question: int = 0,
    ) -> None:
        """Send one message, with descriptors the receiver gets duplicates of.

        Args:
            body: the message.
            fds: descriptors, which stay the caller's to close.
            deadline_s: the other end has to take it within so long.
            question: the number of what this answers, see `Envelope.question`.

        Raises:
            PeerLost: the other end is closed.
            PeerTimeout: the other end has not taken it within `deadline_s`.
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
        """The next message.

        Raises:
            PeerLost, PeerTimeout, ProtocolError.
        """
        give_up_s = clock.now_s() + deadline_s
        while not self._ready:
            left_s = give_up_s - clock.now_s()
            if left_s <= 0:
                raise PeerTimeout(peer=self.peer, waited_s=deadline_s)
            self._sock.settimeout(left_s)
            self._pull()
        return self._ready.popleft()

    def receive_ready(self) -> list[ReceivedMessage]:
        """Every message that is here already; never waits.

        Raises:
            PeerLost, ProtocolError.
        """
        # Not MSG_DONTWAIT: with a timeout set, as by an earlier send, Python polls first.
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
        """Send, and wait for the answer; what comes unasked before it stays for `receive`.

        Raises:
            PeerLost, PeerTimeout, ProtocolError.
        """
        number = self.pose(body, fds=fds, deadline_s=deadline_s)
        unasked: list[ReceivedMessage] = []
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
                    unasked.append(received)
        finally:
            self._ready.extendleft(reversed(unasked))

    def pose(self, body: AnyMessage, *, fds: tuple[int, ...] = (), deadline_s: float = 10.0) -> int:
        """Send a question; its number, which the answer has. Raises as `send`."""
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
                    f"{self.peer} speaks for run {envelope.run_id!r}, not {self.run_id!r}"
                )
            if envelope.num_fds > len(self._fds):
                raise ProtocolError(f"{self.peer} announced descriptors that did not come")
            fds = tuple(self._fds.popleft() for _ in range(envelope.num_fds))
            self._ready.append(ReceivedMessage(envelope, fds))


def connect(path: Path, *, run_id: str, peer: str, hello: Hello, deadline_s: float) -> Channel:
    """A channel to the process that listens at `path`.

    Raises:
        PeerLost: nobody listens there.
        PeerTimeout: somebody does, and does not accept.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.settimeout(deadline_s)
    try:
        with short_socket_path(path) as short:
            sock.connect(short)
    except TimeoutError as error:
        sock.close()
        raise PeerTimeout(peer=peer, waited_s=deadline_s) from error
    except OSError as error:
        sock.close()
        raise PeerLost(peer=peer) from error
    channel = Channel(sock, run_id=run_id, peer=peer)
    channel.send(hello, deadline_s=deadline_s)
    return channel


def listen(path: Path) -> socket.socket:
    """A listening socket that only this user may connect to; a stale one is replaced.

    It gets its name when it listens already: whoever finds the path can connect.
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
    """The next connection, or None when the caller on the other side is another user."""
    sock, _ = server.accept()
    if peer_uid(sock) != os.getuid():
        sock.close()
        return None
    return Channel(sock, run_id=run_id, peer="a client")


def peer_uid(sock: socket.socket) -> int:
    """User id of the process at the other end, as the kernel knows it."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", credentials)
    return int(uid)


class short_socket_path:  # noqa: N801 - a context manager used like a function
    """A name under 108 bytes for a socket, whatever the length of its folder's path.

    It is valid in this process while the block runs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def __enter__(self) -> str:
        self._fd = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._fd}/{self._path.name}"

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
