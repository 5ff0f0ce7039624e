"""Takes part in one all-reduce of known integers over a ring of nodes. Imports no torch.

Runs in:  a process of its own, `python -m ftrun.agent.cluster.collective PART`, at low priority,
          while the ranks import and build the model.
Takes in: a `RingPart` as JSON; two connected sockets as file descriptors; `PieceKeys` on stdin.
Gives:    a `CollectiveResult` as JSON on stdout. ftrun.monitor.slow.collective_check judges it.
Survives: a neighbour that ends or does not answer: the check ends, and the result says so.

    piece:  code, is_late, PIECE_BYTES of integers

In each round every node receives 2 (n - 1) pieces: partial sums in the first half, and whole sums
in the second. A round in the other direction has the positions in the other order.

Rule 1: a wrong piece is noted and replaced by the right one, so the next node judges only this one.
Rule 2: each node looks at its time at the start of a round, and passes on the flags that it has
        received. After n - 1 pieces all nodes have the same flag, so all end after the same round.
Rule 3: with a secret, the code of a piece is a MAC by the keys of the handshake, and a piece with a
        wrong one ends the check: it is no evidence against a node. Without a secret it is a digest.
"""

import os
import socket
import struct
import sys
import threading
from contextlib import suppress
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path
from queue import SimpleQueue

import msgspec
import xxhash

from ftrun import clock
from ftrun.monitor.slow.collective_check import (
    LANES,
    MOST_BYTES_PER_S,
    PIECE_BYTES,
    CollectiveResult,
    HopResult,
    NodeIdentity,
    WrongSum,
    factor,
    lane_value,
    sum_factor,
)

LIMIT_S = 10.0
"""After this, the nodes end the check together; what was reduced until then counts."""
HARD_LIMIT_S = 15.0
"""After this, this node ends the check without the others."""
_NICER = 10
_CODE_BYTES = 16
_HEAD = struct.Struct(f"!{_CODE_BYTES}sB")
_PLACE = struct.Struct("!QQB")
"""Round, step and flag of a piece, which its MAC covers."""


class RingPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one process needs to take part."""

    check: str
    nodes: tuple[NodeIdentity, ...]
    position: int
    num_bytes: int
    fds: tuple[int, int]
    """Of the sockets to the next and to the previous node."""
    cpu: int = -1
    """The only CPU that the process uses; -1: any."""
    has_fault: bool = False
    """A test: one sum in each direction becomes wrong."""


class PieceKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of the connections to the next and to the previous node; empty without a secret."""

    send: tuple[bytes, bytes] = (b"", b"")
    receive: tuple[bytes, bytes] = (b"", b"")


class _Hop:
    """What is received in one direction."""

    def __init__(self, sender: NodeIdentity) -> None:
        self.sender = sender
        self.num_bytes = 0
        self.rates: list[float] = []
        self.wrong: WrongSum | None = None

    def result(self) -> HopResult:
        rates = sorted(self.rates)
        median = min(MOST_BYTES_PER_S, rates[len(rates) // 2]) if rates else 0.0
        return HopResult(self.sender, self.num_bytes, round(median), self.wrong)


class RingProcess:
    """One node's part in all rounds."""

    def __init__(self, part: RingPart, keys: PieceKeys) -> None:
        self._part, self._keys = part, keys
        count, at = len(part.nodes), part.position
        self._block = int.from_bytes(b"".join(map(_lane_bytes, range(LANES))), "little")
        self._sockets = [socket.socket(fileno=fd) for fd in part.fds]
        self._hops = [_Hop(part.nodes[at - 1]), _Hop(part.nodes[(at + 1) % count])]
        self._outgoing: SimpleQueue[tuple[socket.socket, bytes] | None] = SimpleQueue()
        self._started_s = clock.now_s()
        self._buffer = memoryview(bytearray(PIECE_BYTES))

    def run(self) -> CollectiveResult:
        part, problem = self._part, ""
        sender = threading.Thread(target=self._send, daemon=True)
        sender.start()
        waited_s = _waited_s()
        rounds = max(2, part.num_bytes // (len(part.nodes) * PIECE_BYTES))
        try:
            for number in range(rounds):
                if self._all_reduce(number):
                    break
            self._outgoing.put(None)
            sender.join(max(0.0, self._left_s()))  # another node still reads the last piece
        except OSError as error:
            problem = str(error)
        took_s = clock.now_s() - self._started_s
        return CollectiveResult(
            check=part.check,
            count=len(part.nodes),
            hops=tuple(hop.result() for hop in self._hops),
            took_s=round(took_s, 3),
            wait_share=_share(waited_s, _waited_s(), took_s),
            problem=problem,
        )

    def _all_reduce(self, number: int) -> bool:
        """One round; returns whether the time of any node is over."""
        part, count = self._part, len(self._part.nodes)
        is_back = number % 2
        at = count - 1 - part.position if is_back else part.position
        out = self._sockets[is_back]
        is_late = clock.now_s() - self._started_s > LIMIT_S
        data = self._bytes(self._block * factor(at, number, at))
        for step in range(2 * (count - 1)):
            place = (number, step)
            code = _code(data, self._keys.send[is_back], place, is_late=is_late)
            self._outgoing.put((out, _HEAD.pack(code, is_late) + data))
            chunk, terms = (at - step - 1) % count, min(step + 1, count)
            is_as_sent, has_late = self._receive(is_back, place)
            is_late = is_late or has_late
            right = self._bytes(self._block * sum_factor(count, number, chunk, terms))
            if self._buffer != right and self._hops[is_back].wrong is None:
                self._hops[is_back].wrong = self._found(
                    number, chunk, terms, right, is_as_sent=is_as_sent
                )
            data = right
            if terms < count:
                total = int.from_bytes(right, "little") + self._block * factor(at, number, chunk)
                total += part.has_fault and number < 2 and step == 0
                data = self._bytes(total)
        return is_late

    def _found(
        self, number: int, chunk: int, terms: int, right: bytes, *, is_as_sent: bool
    ) -> WrongSum:
        received = bytes(self._buffer)
        lane = next((at for at in range(LANES) if _lane(received, at) != _lane(right, at)), 0)
        values = (_lane(received, lane), _lane(right, lane))
        return WrongSum(number, chunk, terms, lane, *values, is_as_sent)

    @staticmethod
    def _bytes(value: int) -> bytes:
        return value.to_bytes(PIECE_BYTES, "little")

    def _receive(self, is_back: int, place: tuple[int, int]) -> tuple[bool, bool]:
        """Whether the piece is as its sender sent it, and the flag of the sender."""
        source, hop = self._sockets[1 - is_back], self._hops[is_back]
        key = self._keys.receive[1 - is_back]
        head = bytearray(_HEAD.size)
        self._read(source, memoryview(head), hop)
        started_s = clock.now_s()
        self._read(source, self._buffer, hop)
        hop.rates.append(PIECE_BYTES / max(clock.now_s() - started_s, 1e-6))
        hop.num_bytes += PIECE_BYTES
        code, is_late = _HEAD.unpack(head)
        is_as_sent = compare_digest(code, _code(self._buffer, key, place, is_late=is_late))
        if key and not is_as_sent:
            raise ConnectionAbortedError(f"a piece from {hop.sender[0]} has changed on the way")
        return is_as_sent, bool(is_late)

    def _read(self, source: socket.socket, into: memoryview, hop: _Hop) -> None:
        while into:
            source.settimeout(max(0.001, self._left_s()))
            try:
                count = source.recv_into(into)
            except TimeoutError:
                raise TimeoutError(f"{hop.sender[0]} was not done in time") from None
            except ConnectionError:
                count = 0
            if not count:
                raise ConnectionResetError(f"{hop.sender[0]} has ended the check")
            into = into[count:]

    def _left_s(self) -> float:
        return self._started_s + HARD_LIMIT_S - clock.now_s()

    def _send(self) -> None:
        with suppress(OSError):  # the other end has ended: the read notices it
            while (one := self._outgoing.get()) is not None:
                out, data = one
                out.settimeout(max(0.001, self._left_s()))
                out.sendall(data)


def _lane_bytes(lane: int) -> bytes:
    return lane_value(lane).to_bytes(8, "little")


def _lane(data: bytes, lane: int) -> int:
    return int.from_bytes(data[8 * lane : 8 * lane + 8], "little")


def _code(
    data: bytes | memoryview, key: bytes, place: tuple[int, int], *, is_late: bool | int
) -> bytes:
    if not key:
        return xxhash.xxh3_128_digest(data)
    code = blake2b(_PLACE.pack(*place, is_late), key=key, digest_size=_CODE_BYTES)
    code.update(data)
    return code.digest()


def _share(before_s: float | None, after_s: float | None, took_s: float) -> float | None:
    if before_s is None or after_s is None:
        return None
    return round(min(1.0, (after_s - before_s) / max(took_s, 1e-9)), 3)


def _waited_s() -> float | None:
    """Seconds in which this thread was ready and waited for a CPU; None: not known."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def main() -> None:
    part = msgspec.json.decode(sys.argv[1], type=RingPart)
    keys = msgspec.json.decode(sys.stdin.buffer.read(), type=PieceKeys)
    with suppress(OSError):
        os.nice(_NICER)
        if part.cpu >= 0:
            os.sched_setaffinity(0, {part.cpu})
    sys.stdout.write(msgspec.json.encode(RingProcess(part, keys).run()).decode())


if __name__ == "__main__":
    main()
