"""How many connections may be in a handshake at once, and for how long each.

Runs in:  agent, SMP; entered in the thread that accepts, left in that of the handshake.
Takes in: addresses of processes that have connected and proven nothing yet.
Gives:    the time that each has for its first message; or no room.
Survives: hosts that connect and prove nothing: they fill at most half of the slots for longer than
          `CROWDED_S`, and one address at most a quarter of all.
"""

import socket
import threading
from collections import Counter

from ftrun.wire.transport.handshake import HANDSHAKE_S

HELLO_S = 0.5
"""For the first message where half of the slots are taken. With fewer it is the time of the whole
handshake: on a busy machine a live peer may need longer than this."""

CROWDED_S = 1.0
"""For the whole handshake where half of the slots are taken. A first message needs no secret, so it
must not hold a slot for longer."""


class Doors:
    """The slots of one listening process. Thread-safe."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._inside: Counter[str] = Counter()
        self._lock = threading.Lock()

    def enter(self, sock: socket.socket) -> "Door | None":
        """A slot for a connection that was accepted; None: there is none for its address."""
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
            return Door(self, address, hello_s=HANDSHAKE_S, handshake_s=HANDSHAKE_S)
        return Door(self, address, hello_s=HELLO_S, handshake_s=CROWDED_S)

    def leave(self, address: str) -> None:
        with self._lock:
            self._inside[address] -= 1
            if not self._inside[address]:
                del self._inside[address]


class Door:
    """One slot that is taken.

    Args:
        doors: of which it is one.
        address: of the process that has connected.
        hello_s: within which its first message must come, and the first one after the handshake.
        handshake_s: within which the handshake must end.
    """

    def __init__(self, doors: Doors, address: str, *, hello_s: float, handshake_s: float) -> None:
        self.hello_s = hello_s
        self.handshake_s = handshake_s
        self._doors = doors
        self._address = address

    def leave(self) -> None:
        """The handshake is over."""
        self._doors.leave(self._address)
