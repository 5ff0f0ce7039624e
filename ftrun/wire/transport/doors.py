"""Limits the number of connections in a handshake, and the time of each.

Runs in:  agent, SMP; entered in the accepting thread, left in the thread of the handshake.
Takes in: addresses of connected processes that are not authenticated yet.
Gives:    the time limit for each one's first message; or None: no slot is free.
Survives: hosts that connect and prove nothing. For longer than `CROWDED_S` they fill at most half
          of the slots, and one address at most a quarter of all.
"""

import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ftrun.wire.transport.handshake import HANDSHAKE_S

HELLO_S = 0.5
"""Limit for the first message if half of the slots are taken. With fewer, the limit is that of the
whole handshake, because a live peer on a busy machine may need longer than this."""

CROWDED_S = 1.0
"""Limit for the whole handshake if half of the slots are taken. A first message needs no secret, so
it must not hold a slot for longer."""


class Doors:
    """Handshake slots of one listening process. Thread-safe."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._inside: Counter[str] = Counter()
        self._lock = threading.Lock()

    def enter(self, sock: socket.socket) -> "Door | None":
        """Take a slot for an accepted connection; None if its address gets none."""
        try:
            address = str(sock.getpeername()[0])
        except OSError:
            return None
        with self._lock:
            count = self._inside.total()
            if count >= self._slots or self._inside[address] >= max(1, self._slots // 4):
                return None
            self._inside[address] += 1
        if 2 * count < self._slots:
            return Door(HANDSHAKE_S, HANDSHAKE_S, partial(self._leave, address))
        return Door(HELLO_S, CROWDED_S, partial(self._leave, address))

    def _leave(self, address: str) -> None:
        with self._lock:
            self._inside[address] -= 1
            if not self._inside[address]:
                del self._inside[address]


@dataclass(frozen=True, slots=True)
class Door:
    """One taken slot. `hello_s` limits the first message, and the first after the handshake."""

    hello_s: float
    handshake_s: float
    leave: Callable[[], None]
