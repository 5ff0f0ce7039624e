"""Measures the network between two agents: a path in one direction, or a link in both.

Runs in:  agent; on each side in a thread for one probe.
Takes in: the other agent's address; for a path also an interface of this node. A probe has a
          separate connection, so that no heartbeat waits for it. The connection is authenticated
          (purpose `"probe"` or `"path"`); for a path it is bound to the interface.
Gives:    a `PathMeasurement` or a `ProbeLinkResult`.
Survives: any fault of the network: each side gives up after a fixed time, and the dialler reports
          the values measured until then.

    a path: dialler                     other side
    PING                          ->
                                  <-    1 byte              some times
    BULK, bytes without end       ->    counts them for a while
                                  <-    bytes and seconds
    closes at once

    a link: prober                      agent
    1 byte                        ->
                                  <-    1 byte              five times
    256 KiB                       ->
                                  <-    1 byte
    1 byte                        ->
                                  <-    256 KiB

Rule 1: the receiver of a path probe measures only the second half of the arriving bytes. The first
        half contains bytes that buffers and shapers pass at once, and the slow start of TCP.
Rule 2: a path probe is cheap: it ends after `BULK_S` or `BULK_BYTES`, whichever comes first. It
        takes longer only if almost nothing arrives.
"""

import select
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec

from ftrun import clock
from ftrun.errors import PeerError, PeerLost
from ftrun.membership.events import Happening, MessageReceived
from ftrun.recovery.commands import ProbePath
from ftrun.wire.cluster.generation import PathMeasurement
from ftrun.wire.cluster.messages import (
    AnyClusterMessage,
    ProbeLinkRequest,
    ProbeLinkResult,
    ProbePathRequest,
    ProbePathResult,
)
from ftrun.wire.transport.handshake import PeerIdentity, dial_handshake
from ftrun.wire.transport.secret import Secret
from ftrun.wire.transport.tcp import dial, tune

# --- a path -----------------------------------------------------------------------------------

PINGS = 4
BULK_S = 0.025
BULK_BYTES = 4 << 20
LONGEST_BULK_S = 0.15
DIAL_S = 0.4
SHORT_DIAL_S = 0.3
TRY_S, SHORT_TRY_S = 0.5, 0.3
"""Limit after the connection is made. A leader waits longer than DIAL_S + TRY_S (`survey.py`)."""
SERVE_S = 2.0
MOST_BYTES_PER_S = 2.5e9
"""Upper bound of a reported rate; above it, a probe measures the processor."""
MAX_AT_ONCE = 8
"""Limit of concurrent probes of a node. A leader requests one at a time."""

_PING, _BULK = b"p", b"b"
_RESULT = struct.Struct("!dd")
_CHUNK = bytes(1 << 17)
_BUFFER_BYTES = 1 << 19
"""Size of the socket buffers; limited, because bytes in a buffer are not on the path."""
_LEAST_ARRIVALS = 3

Post = Callable[[Happening], None]
"""Called with a result for the control loop of this node, in any thread."""

SendTo = Callable[[str, AnyClusterMessage], None]
"""Called with a node id and a result for that node, in any thread."""


def _in_thread(work: Callable[[], None], name: str) -> str:
    """Start a thread; return why that is not possible, for example no more threads."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:
        return str(error) or "no thread"
    return ""


class PathProber:
    """Runs the probes that a leader requests."""

    def __init__(
        self, identity: PeerIdentity, secret: Secret | None, *, post: Post, send: SendTo
    ) -> None:
        self._node_id = identity.node_id
        self._post = post
        self._send = send
        self._identity = msgspec.structs.replace(identity, purpose="path")
        self._secret = secret
        self._threads = threading.BoundedSemaphore(MAX_AT_ONCE)

    def take(self, command: ProbePath) -> None:
        """Start a probe, from any thread, without waiting."""
        if not self._threads.acquire(blocking=False):
            self._untried(command, f"this node already runs {MAX_AT_ONCE} probes")
            return
        if problem := _in_thread(partial(self._work, command), "ftrun-path-probe"):
            self._threads.release()
            self._untried(command, problem)

    def _work(self, command: ProbePath) -> None:
        try:
            found = probe_path(command.order, self._node_id, self._identity, self._secret)
        except Exception as error:  # noqa: BLE001 - the leader waits for an answer
            self._untried(command, f"a bug in ftrun: {type(error).__name__}: {error}")
        else:
            self._answer(command, ProbePathResult(command.order.survey, found))
        finally:
            self._threads.release()

    def _untried(self, command: ProbePath, problem: str) -> None:
        order = command.order
        found = PathMeasurement(self._node_id, order.destination, order.rail, problem=problem)
        self._answer(command, ProbePathResult(order.survey, found, is_untried=True))

    def _answer(self, command: ProbePath, answer: ProbePathResult) -> None:
        if command.asks == self._node_id:
            self._post(MessageReceived(self._node_id, answer))
        else:
            self._send(command.asks, answer)


def probe_path(
    order: ProbePathRequest, node_id: str, own: PeerIdentity, secret: Secret | None
) -> PathMeasurement:
    """Probe a path now. A value that was not measured is 0, with `problem`."""
    found = PathMeasurement(node_id, order.destination, order.rail)
    sock: socket.socket | None = None
    try:
        wait_s = SHORT_DIAL_S if order.is_short else DIAL_S
        sock = dial(order.host, order.port, wait_s, source=(order.name, order.from_host))
        try_s = SHORT_TRY_S if order.is_short else TRY_S
        give_up_s = clock.now_s() + try_s
        dial_handshake(sock, own, secret, deadline_s=try_s)
        tune(sock, bulk=not order.is_short, user_timeout_s=SERVE_S)
        return _measure(sock, found, order, give_up_s)
    except (PeerError, OSError) as error:
        is_refused = isinstance(error, PeerLost) and error.how == "refused"
        is_unreached = sock is None and not is_refused
        return msgspec.structs.replace(found, problem=str(error), is_unreached=is_unreached)
    finally:
        if sock is not None:
            # The reset discards bytes that are still on the path.
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()


def serve_path_probe(sock: socket.socket) -> None:
    """Serve the other side; OSError if the dialler has ended. The caller closes the socket."""
    sock.settimeout(SERVE_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    give_up_s = clock.now_s() + SERVE_S
    while clock.now_s() < give_up_s:
        asked = sock.recv(1)
        if asked == _PING:
            sock.sendall(_PING)
        elif asked == _BULK:
            sock.sendall(_RESULT.pack(*_count(sock)))
        else:
            return


def _measure(
    sock: socket.socket, found: PathMeasurement, order: ProbePathRequest, give_up_s: float
) -> PathMeasurement:
    rtts_s: list[float] = []
    bytes_per_s, problem = 0.0, ""
    try:
        for _ in range(PINGS):
            started_s = clock.now_s()
            sock.settimeout(max(0.001, give_up_s - started_s))
            sock.sendall(_PING)
            _receive(sock, 1, give_up_s)
            rtts_s.append(clock.now_s() - started_s)
        if not order.is_short:
            count, seconds = _send_bulk(sock, give_up_s)
            bytes_per_s = min(MOST_BYTES_PER_S, count / max(seconds, 1e-6))
    except OSError as error:
        problem = f"the probe did not finish: {error}"
    return msgspec.structs.replace(
        found, rtt_s=min(rtts_s, default=0.0), bytes_per_s=bytes_per_s, problem=problem
    )


def _send_bulk(sock: socket.socket, give_up_s: float) -> tuple[float, float]:
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    sock.sendall(_BULK)
    sock.setblocking(False)
    waiting = select.poll()
    waiting.register(sock, select.POLLIN | select.POLLOUT)
    while True:
        ready = waiting.poll(max(0.0, give_up_s - clock.now_s()) * 1000)
        if not ready or clock.now_s() >= give_up_s:
            raise TimeoutError("the receiver accepts no more bytes")
        if ready[0][1] & ~select.POLLOUT:
            break
        with suppress(BlockingIOError):
            sock.send(_CHUNK)
    count, seconds = _RESULT.unpack(_receive(sock, _RESULT.size, give_up_s))
    return count, seconds


def _count(sock: socket.socket) -> tuple[float, float]:
    """Bytes that arrive in the second half of the measurement, and its duration in seconds."""
    buffer = bytearray(1 << 20)
    arrivals: list[tuple[float, int]] = []
    total = 0
    started_s = clock.now_s()
    while True:
        sock.settimeout(max(0.001, started_s + LONGEST_BULK_S - clock.now_s()))
        try:
            count = sock.recv_into(buffer)
        except TimeoutError:
            break
        if not count:
            break
        now_s = clock.now_s()
        arrivals.append((now_s, count))
        total += count
        if total >= BULK_BYTES or now_s - started_s >= LONGEST_BULK_S:
            break
        if now_s - started_s >= BULK_S and len(_second_half(arrivals)) > _LEAST_ARRIVALS:
            break
    late = _second_half(arrivals)
    if len(late) > 1:
        return float(sum(count for _, count in late[1:])), late[-1][0] - late[0][0]
    return float(total), clock.now_s() - started_s


def _second_half(arrivals: list[tuple[float, int]]) -> list[tuple[float, int]]:
    if not arrivals:
        return []
    half_s = (arrivals[0][0] + arrivals[-1][0]) / 2
    return [one for one in arrivals if one[0] >= half_s]


# --- a link -----------------------------------------------------------------------------------

LINK_PINGS = 5
LINK_BYTES = 256 << 10
PROBE_S = 10.0
"""Limit of a link probe: 256 KiB at 0.5 Mbit/s take 4 s."""
LINK_DIAL_S = 3.0
PAUSE_S = 1.0
"""Minimum time between two link probes of one agent."""


class LinkProber:
    """Runs the link probes that the leader requests, one at a time."""

    def __init__(self, identity: PeerIdentity, secret: Secret | None) -> None:
        self._identity = msgspec.structs.replace(identity, purpose="probe")
        self._secret = secret
        self._busy = threading.Lock()
        self._last_s = float("-inf")

    def take(self, order: ProbeLinkRequest, answer: Callable[[ProbeLinkResult], None]) -> bool:
        """Start a probe, from any thread, without waiting.

        False if one is in progress, or was started less than `PAUSE_S` ago.
        """
        if not self._busy.acquire(blocking=False):
            return False
        if clock.now_s() - self._last_s < PAUSE_S:
            self._busy.release()
            return False
        self._last_s = clock.now_s()
        if _in_thread(partial(self._work, order, answer), "ftrun-probe"):
            self._busy.release()
            return False
        return True

    def _work(self, order: ProbeLinkRequest, answer: Callable[[ProbeLinkResult], None]) -> None:
        try:
            answer(probe(order, self._identity, self._secret))
        finally:
            self._busy.release()


def probe(
    order: ProbeLinkRequest, own: PeerIdentity, secret: Secret | None, *, limit_s: float = PROBE_S
) -> ProbeLinkResult:
    """Measure one link, from this node. A value that was not measured is 0, with `problem`."""
    found = ProbeLinkResult(number=order.number, receiver=order.receiver)
    sock: socket.socket | None = None
    try:
        sock = dial(order.host, order.port, LINK_DIAL_S)
        dial_handshake(sock, own, secret)
        tune(sock, bulk=False, user_timeout_s=PROBE_S)
        return _measure_link(sock, found, limit_s)
    except (PeerError, OSError) as error:
        return msgspec.structs.replace(found, problem=str(error))
    finally:
        if sock is not None:
            sock.close()


def serve_probe(sock: socket.socket) -> None:
    """Serve the other side; OSError if the prober has ended. The caller closes the socket."""
    give_up_s = clock.now_s() + PROBE_S
    tune(sock, bulk=False, user_timeout_s=PROBE_S)
    for _ in range(LINK_PINGS):
        _receive(sock, 1, give_up_s)
        _give(sock, 1, give_up_s)
    _receive(sock, LINK_BYTES, give_up_s)
    _give(sock, 1, give_up_s)
    _receive(sock, 1, give_up_s)
    _give(sock, LINK_BYTES, give_up_s)


def _measure_link(sock: socket.socket, found: ProbeLinkResult, limit_s: float) -> ProbeLinkResult:
    give_up_s = clock.now_s() + limit_s
    rounds_s: list[float] = []
    to_bytes_per_s = from_bytes_per_s = 0.0
    problem = ""
    try:
        rounds_s.extend(_exchange(sock, 1, 1, give_up_s) for _ in range(LINK_PINGS))
        sent_s = _exchange(sock, LINK_BYTES, 1, give_up_s)
        to_bytes_per_s = LINK_BYTES / max(sent_s, 1e-6)
        came_s = _exchange(sock, 1, LINK_BYTES, give_up_s)
        from_bytes_per_s = LINK_BYTES / max(came_s, 1e-6)
    except OSError as error:
        problem = f"the probe did not finish: {error}"
    return msgspec.structs.replace(
        found,
        rtt_s=min(rounds_s, default=0.0),
        to_bytes_per_s=to_bytes_per_s,
        from_bytes_per_s=from_bytes_per_s,
        problem=problem,
    )


def _exchange(sock: socket.socket, out_bytes: int, in_bytes: int, give_up_s: float) -> float:
    started_s = clock.now_s()
    _give(sock, out_bytes, give_up_s)
    _receive(sock, in_bytes, give_up_s)
    return clock.now_s() - started_s


def _give(sock: socket.socket, count: int, give_up_s: float) -> None:
    sock.settimeout(max(0.001, give_up_s - clock.now_s()))
    sock.sendall(bytes(count))


def _receive(sock: socket.socket, count: int, give_up_s: float) -> bytes:
    data = b""
    while len(data) < count:
        sock.settimeout(max(0.001, give_up_s - clock.now_s()))
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionResetError("the other side has closed the connection")
        data += more
    return data
