"""Measures the speed of one link: a few round trips and 256 KiB in each direction.

Runs in:  agent; on each side in a thread that lives for one probe.
Takes in: another agent's address. The probe has its own connection, so that no heartbeat waits
          behind it. It is authenticated as any other (`ftrun.wire.transport.handshake`, purpose
          "probe").
Gives:    a `ProbeLinkResult`.
Survives: any fault of the network: each side gives up after `PROBE_S`, and the prober reports how
          far it came.

    prober                              agent
    1 byte                        ->
                                  <-    1 byte              five times
    256 KiB                       ->
                                  <-    1 byte
    1 byte                        ->
                                  <-    256 KiB
"""

import socket
import threading
from collections.abc import Callable

import msgspec

from ftrun import clock
from ftrun.errors import PeerError
from ftrun.wire.cluster.messages import ProbeLinkRequest, ProbeLinkResult
from ftrun.wire.transport.handshake import PeerIdentity, dial_handshake
from ftrun.wire.transport.secret import Secret
from ftrun.wire.transport.tcp import dial, tune

PINGS = 5
BULK_BYTES = 256 << 10
PROBE_S = 10.0
"""For the whole probe: 256 KiB at half a megabit a second take 4 s."""
DIAL_S = 3.0
PAUSE_S = 1.0
"""Minimum time between two probes of one agent."""

_BYTE = b"\0"


class LinkProber:
    """Runs one probe at a time; the leader requests them."""

    def __init__(self, identity: PeerIdentity, secret: Secret | None) -> None:
        self._identity = msgspec.structs.replace(identity, purpose="probe")
        self._secret = secret
        self._busy = threading.Lock()
        self._last_s = float("-inf")

    def take(self, order: ProbeLinkRequest, answer: Callable[[ProbeLinkResult], None]) -> bool:
        """Start a probe, from any thread, without waiting.

        Args:
            order: the agent to probe.
            answer: takes the result, in a thread of the probe's.

        Returns:
            False if another probe is in progress, or has started less than `PAUSE_S` ago.
        """
        if not self._busy.acquire(blocking=False):
            return False
        if clock.now_s() - self._last_s < PAUSE_S:
            self._busy.release()
            return False
        self._last_s = clock.now_s()
        work = threading.Thread(
            target=self._work, args=(order, answer), name="ftrun-probe", daemon=True
        )
        try:
            work.start()
        except RuntimeError:  # no more threads
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
    """Measure one link, from this node. A value that was not measured is 0, with `problem`.

    Args:
        order: the agent to probe.
        own: the identity of this agent, with the purpose "probe".
        secret: the run's.
        limit_s: for the measurement after the connection is open.
    """
    found = ProbeLinkResult(number=order.number, receiver=order.receiver)
    sock: socket.socket | None = None
    try:
        sock = dial(order.host, order.port, DIAL_S)
        dial_handshake(sock, own, secret)
        tune(sock, bulk=False, user_timeout_s=PROBE_S)
        return _measure(sock, found, limit_s)
    except (PeerError, OSError) as error:
        return msgspec.structs.replace(found, problem=str(error))
    finally:
        if sock is not None:
            sock.close()


def serve_probe(sock: socket.socket) -> None:
    """Serve the other side of a probe; the caller closes the socket.

    Raises:
        OSError: the prober is gone, or too slow.
    """
    give_up_s = clock.now_s() + PROBE_S
    tune(sock, bulk=False, user_timeout_s=PROBE_S)
    for _ in range(PINGS):
        _take(sock, 1, give_up_s)
        _give(sock, 1, give_up_s)
    _take(sock, BULK_BYTES, give_up_s)
    _give(sock, 1, give_up_s)
    _take(sock, 1, give_up_s)
    _give(sock, BULK_BYTES, give_up_s)


def _measure(sock: socket.socket, found: ProbeLinkResult, limit_s: float) -> ProbeLinkResult:
    give_up_s = clock.now_s() + limit_s
    rounds_s: list[float] = []
    to_bytes_per_s = from_bytes_per_s = 0.0
    problem = ""
    try:
        rounds_s.extend(_exchange(sock, 1, 1, give_up_s) for _ in range(PINGS))
        sent_s = _exchange(sock, BULK_BYTES, 1, give_up_s)
        to_bytes_per_s = BULK_BYTES / max(sent_s, 1e-6)
        came_s = _exchange(sock, 1, BULK_BYTES, give_up_s)
        from_bytes_per_s = BULK_BYTES / max(came_s, 1e-6)
    except OSError as error:
        problem = f"it did not come to its end: {error}"
    return msgspec.structs.replace(
        found,
        rtt_s=min(rounds_s, default=0.0),
        to_bytes_per_s=to_bytes_per_s,
        from_bytes_per_s=from_bytes_per_s,
        problem=problem,
    )


def _exchange(sock: socket.socket, out_bytes: int, in_bytes: int, give_up_s: float) -> float:
    begun_s = clock.now_s()
    _give(sock, out_bytes, give_up_s)
    _take(sock, in_bytes, give_up_s)
    return clock.now_s() - begun_s


def _give(sock: socket.socket, count: int, give_up_s: float) -> None:
    sock.settimeout(max(0.001, give_up_s - clock.now_s()))
    sock.sendall(_BYTE * count)


def _take(sock: socket.socket, count: int, give_up_s: float) -> None:
    while count:
        sock.settimeout(max(0.001, give_up_s - clock.now_s()))
        data = sock.recv(min(count, 1 << 16))
        if not data:
            raise ConnectionResetError("the other side has closed the connection")
        count -= len(data)
