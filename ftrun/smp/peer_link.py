"""Sends frames to one other node: a queue, a thread, and a connection that the thread makes.

Runs in:  the SMP: one thread for each link; the other functions in any thread that sends.
Takes in: frames, and streams that make frames when the socket has room.
Gives:    bytes on a socket; reports of a lost link and of a restored one.

Rule 1: only the link's own thread waits for the network. A sender queues a frame and returns.
Rule 2: messages precede bulk data, so credits and replies never wait behind bulk data. Bulk data
        of a protect link yield to collectives on the same interface (redundancy/other_traffic.py).
Rule 3: nothing is read from this socket. If it becomes readable, the peer has closed it.
Rule 4: a fetch link whose connection is lost redials over every rail before its node is reported
        lost. The node is lost if it refuses the new connection or accepts none within the patience.
        Open requests are repeated over a new connection (restore/rpc.py).
Rule 5: a protect link reports each lost connection, because the data in flight is lost.
Rule 6: a session admits links of its own generation. It admits protect links only of its own group.
        A link of an older generation is rejected. Any other link waits.
"""

import contextlib
import errno
import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ftrun import clock
from ftrun.errors import HandshakeRefused, PeerError, PeerLost, UsageError
from ftrun.linux import lower_thread_priority
from ftrun.smp.redundancy.other_traffic import OtherTraffic
from ftrun.wire.cluster.generation import Rail
from ftrun.wire.cluster.transfer import AnyTransfer, LinkHello
from ftrun.wire.messages.smp import NodeAddress
from ftrun.wire.transport.address_race import PeerAddress, reach, source_to
from ftrun.wire.transport.bulk_socket import BulkSocket, Bytes
from ftrun.wire.transport.handshake import PeerIdentity, dial_handshake
from ftrun.wire.transport.secret import Secret
from ftrun.wire.transport.tcp import USER_TIMEOUT_S, pace, tune

PROTECT, FETCH = "protect", "fetch"
"""Purposes of a link."""

FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_BRIEF_S = 0.1
"""A peer of another generation ends a connection within this time. A reset in the network comes
later, and no growing pause follows it."""


class LinkRules:
    """The state of one link. Pure: time is an argument. `dials_again_first` is rule 4."""

    def __init__(self, *, dials_again_first: bool, timeout_s: float) -> None:
        self.dials_again_first = dials_again_first
        self.is_lost = False
        """The node was reported lost, and no connection was made since then."""
        self._timeout_s = timeout_s
        self._times = 0
        self._connected_s = 0.0
        self._rest_s = self._pause_s = FIRST_PAUSE_S
        self._report_s = 0.0
        self._reported = ""

    def begin_dialing(self, now_s: float) -> None:
        self._report_s = now_s + self._timeout_s
        self._pause_s = FIRST_PAUSE_S
        self._reported = ""

    def dial_failed(
        self, reason: str, *, is_refused: bool, is_turned_away: bool, now_s: float
    ) -> str:
        """Return the reason if the node is to be reported lost now, else an empty string.

        Args:
            is_refused: no process listens at the address.
            is_turned_away: a process listens at the address that will never be the expected one.
        """
        is_gone = is_refused and self._times > 0 and self.dials_again_first
        is_final = is_gone or is_turned_away or now_s > self._report_s
        if not is_final or reason == self._reported:
            return ""
        self._reported, self.is_lost = reason, True
        return reason

    def pause_s(self) -> float:
        """Seconds until the next attempt to connect; each call doubles them, up to 1 s."""
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return pause_s

    def connected(self, now_s: float) -> bool:
        """Return whether an earlier connection was lost or the node was reported lost."""
        self._times += 1
        was_lost, self.is_lost = self.is_lost, False
        self._connected_s = now_s
        return self._times > 1 or was_lost

    def disconnected(self, reason: str) -> str:
        """Return the reason if the node is to be reported lost now, else an empty string."""
        if self.dials_again_first:
            return ""
        self.is_lost = True
        return reason

    def rest_s(self, now_s: float) -> float:
        is_brief = now_s - self._connected_s < _BRIEF_S
        self._rest_s = min(2 * self._rest_s, _LONGEST_PAUSE_S) if is_brief else FIRST_PAUSE_S
        return self._rest_s


def admits(hello: LinkHello, *, generation: int, session: int) -> bool | None:
    """Whether a link belongs to the running session; None if it may be of a later one (rule 6)."""
    if hello.generation < generation:
        return False
    if hello.generation > generation:
        return None
    return True if hello.purpose == FETCH or hello.session == session else None


_NEXT_WAY_S = 0.5
UNRESPONSIVE_S = 4.0
"""If no acknowledgement arrives for longer than this, the connection carries nothing. Keepalive
probes are sent every second."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OutgoingFrame:
    """A message, the bytes behind it, and a function to call when they are sent or dropped."""

    body: AnyTransfer
    raw: Sequence[Bytes] = ()
    raw_digest: int | None = None
    release: Callable[[], None] | None = None


class BulkStream(Protocol):
    """Bulk data for one link, made piece by piece. `take` runs in the link's thread only."""

    @property
    def is_over(self) -> bool: ...

    def take(self) -> OutgoingFrame | None:
        """The next frame; None if there is none until the link is woken."""
        ...


@dataclass(frozen=True, slots=True)
class LinkEndpoints:
    """The two ends of a link and its settings.

    Args:
        timeout_s: time that a peer may accept no bytes, or pause in the middle of a frame.
        pace_bytes_s: limit of bulk data in bytes per second; 0: no limit.
        other_traffic: to which bulk data yield; None: to none.
    """

    own: PeerIdentity
    position: NodeAddress
    hello: LinkHello
    secret: Secret | None
    timeout_s: float
    pace_bytes_s: float = 0.0
    own_rails: Sequence[Rail] = ()
    other_traffic: OtherTraffic | None = None

    @property
    def addresses(self) -> list[PeerAddress]:
        hosts = [rail.host for rail in self.position.rails] or [self.position.host]
        port = self.position.smp_port
        return [PeerAddress(host, port, source_to(host, self.own_rails)) for host in hosts]


class PeerLink:
    """The sending end of a link; its own thread connects and reconnects it.

    In that thread it calls `lost` with the reason when the node is reported lost, and `linked` when
    a connection is made after a loss.
    """

    def __init__(
        self, ends: LinkEndpoints, *, lost: Callable[[str], None], linked: Callable[[], None]
    ) -> None:
        self._ends = ends
        self._lost = lost
        self._linked = linked
        self._lock = threading.Lock()
        self._messages: deque[OutgoingFrame] = deque()
        self._streams: deque[BulkStream] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closed = self._is_behind = False
        self._socket: BulkSocket | None = None
        self._rules = LinkRules(
            dials_again_first=ends.hello.purpose == FETCH, timeout_s=ends.timeout_s
        )
        self._paces_itself = False
        self._yield_s = 0.0
        """How long bulk data wait now for other traffic."""
        self.num_bytes = 0
        self._thread = threading.Thread(
            target=self._run, name=f"ftrun-to-{ends.position.node_id}"[:15], daemon=True
        )

    @property
    def position(self) -> NodeAddress:
        return self._ends.position

    @property
    def dials_again_first(self) -> bool:
        """A lost connection is reported only after a new one cannot be made."""
        return self._rules.dials_again_first

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    @property
    def carries_nothing(self) -> bool:
        """The node was reported lost, or its kernel acknowledges nothing for `UNRESPONSIVE_S`."""
        made = self._socket
        return self._rules.is_lost if made is None else made.unresponsive_s > UNRESPONSIVE_S

    def start(self) -> None:
        """Raises OSError if no thread can be started."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self._end()
            raise OSError(errno.EAGAIN, str(error)) from error

    def send(self, frame: OutgoingFrame) -> None:
        """Queue a frame; on a closed link, release it."""
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._messages.append(frame)
        if is_closed:
            _release(frame)  # outside the lock: the callback may send over this link
        else:
            self.wake()

    def add(self, stream: BulkStream) -> None:
        with self._lock:
            self._streams.append(stream)
        self.wake()

    def wake(self) -> None:
        with self._lock:  # the number of a closed descriptor may be reused
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Close the link without waiting; its thread ends later."""
        with self._lock:
            self._is_closed = True
            if self._socket is not None:
                self._socket.interrupt()
        self.wake()

    # --- the link's thread -----------------------------------------------------------------

    def _run(self) -> None:
        if self._ends.hello.purpose == PROTECT:
            lower_thread_priority()
        try:
            while self._connect():
                if self._rules.connected(clock.now_s()):
                    self._linked()
                try:
                    self._send_all()
                except PeerError as error:
                    self._disconnect(str(error))
                self._pause(self._rules.rest_s(clock.now_s()))
        except Exception:  # noqa: BLE001
            # One of the process loops: a bug in a stream must be reported as a lost link.
            _log.exception("internal error in the link to %s", self.position.node_id)
            self._lost("internal error in ftrun; see the SMP's log")
        finally:
            self._end()

    def _connect(self) -> bool:
        self._rules.begin_dialing(clock.now_s())
        while not self._is_closed:
            self._is_behind = False
            try:
                self._take_socket(self._dial())
                return not self._is_closed
            except (PeerError, UsageError) as error:
                reason = self._rules.dial_failed(
                    str(error),
                    is_refused=isinstance(error, PeerLost) and error.how == "refused",
                    is_turned_away=isinstance(error, HandshakeRefused) and not self._is_behind,
                    now_s=clock.now_s(),
                )
                if reason:
                    self._lost(reason)
            self._pause(self._rules.pause_s())
        return False

    def _dial(self) -> BulkSocket:
        ends = self._ends
        made, address = reach(
            ends.addresses, self._greet, deadline_s=ends.timeout_s, next_s=_NEXT_WAY_S
        )
        _log.debug("linked to %s at %s", made.peer, address.host)
        return made

    def _greet(self, sock: socket.socket, _: PeerAddress) -> BulkSocket:
        ends = self._ends
        session = dial_handshake(sock, ends.own, ends.secret, admit=self._check_peer)
        # If the peer has another rail, a long wait for this one is of no use.
        timeout_s = (
            min(ends.timeout_s, USER_TIMEOUT_S) if len(ends.addresses) > 1 else ends.timeout_s
        )
        tune(sock, bulk=True, user_timeout_s=timeout_s)
        self._paces_itself = not pace(sock, ends.pace_bytes_s)
        made = BulkSocket(sock, session, timeout_s=ends.timeout_s)
        made.send(ends.hello.generation, ends.hello)
        return made

    def _check_peer(self, peer: PeerIdentity) -> str:
        position = self._ends.position
        if (peer.node_id, peer.incarnation) == (position.node_id, position.incarnation):
            return ""
        # The SMP of a restarted agent names the old one until it receives this generation.
        self._is_behind = peer.node_id == position.node_id
        return f"expected node {position.node_id}, incarnation {position.incarnation}"

    def _take_socket(self, made: BulkSocket) -> None:
        with self._lock:
            self._socket = made
            if self._is_closed:
                made.interrupt()
        if self._ends.other_traffic is not None:
            self._ends.other_traffic.add(made)

    def _send_all(self) -> None:
        """Send until the link is closed; raises PeerError if the connection is lost."""
        made = self._socket
        assert made is not None
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        poll.register(made.fileno(), select.POLLIN)
        while not self._is_closed:
            frame = self._next()
            if frame is None:
                for fd, _ in poll.poll(1000 * self._yield_s or None):
                    if fd != self._wake_fd:
                        raise PeerLost(peer=made.peer, how="closed")
                self._drain_wake()
                continue
            try:
                made.send(
                    self._ends.hello.generation, frame.body, frame.raw, raw_digest=frame.raw_digest
                )
                self.num_bytes = made.num_bytes
            finally:
                _release(frame)
            if frame.raw and self._ends.pace_bytes_s > 0 and self._paces_itself:
                self._pause(sum(map(len, frame.raw)) / self._ends.pace_bytes_s)

    def _next(self) -> OutgoingFrame | None:
        with self._lock:
            if self._messages:
                return self._messages.popleft()
            streams = list(self._streams)
        traffic, made = self._ends.other_traffic, self._socket
        self._yield_s = 0.0
        if streams and traffic is not None and made is not None:
            self._yield_s = traffic.pause_s(made)
        if self._yield_s:
            return None
        for stream in streams:
            frame = stream.take()
            with self._lock:
                # The streams take turns, so that none starves.
                if stream in self._streams:
                    self._streams.remove(stream)
                    if not stream.is_over:
                        self._streams.append(stream)
            if frame is not None:
                return frame
        return None

    def _disconnect(self, cause: str) -> None:
        with self._lock:
            made, self._socket = self._socket, None
        if made is not None:
            self._close_socket(made)
        self._forget()
        reason = "" if self._is_closed else self._rules.disconnected(cause)
        if reason:
            self._lost(reason)

    def _end(self) -> None:
        with self._lock:
            self._is_closed = True
            made, self._socket = self._socket, None
            os.close(self._wake_fd)
            self._wake_fd = -1
        if made is not None:
            self._close_socket(made)
        self._forget()

    def _close_socket(self, made: BulkSocket) -> None:
        if self._ends.other_traffic is not None:
            self._ends.other_traffic.remove(made)
        made.close()

    def _forget(self) -> None:
        with self._lock:
            frames, self._messages = list(self._messages), deque()
            self._streams.clear()
        for frame in frames:
            _release(frame)

    def _pause(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        give_up_s = clock.now_s() + seconds
        while not self._is_closed and (left_s := give_up_s - clock.now_s()) > 0:
            if poll.poll(1000 * left_s):
                self._drain_wake()

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)


def _release(frame: OutgoingFrame) -> None:
    if frame.release is not None:
        frame.release()
