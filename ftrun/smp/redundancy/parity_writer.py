"""Stores what the group sends for one version: blocks into parity, mirrors into their buffers.

Runs in:  the SMP, in the threads of the incoming links; the server thread starts and stops it.
Takes in: blocks and mirrors, after their digests were checked.
Gives:    parity rows in the parity region; if m > 1, the rows of other nodes, to be forwarded; an
          event when all data that belongs on this node is stored.

If m = 1, every data node sends its block to the parity node of the stripe, which adds it to the row
in place. If m > 1, a data node sends its block to the first parity node only. That node computes
all m rows and forwards the others. A node then sends S (1 + (m - 1) / k) bytes instead of m S.

Rule 1: a parity region is written under a lock and only while this object is active. An abandoned
        writer therefore never touches later contents.
Rule 2: other nodes send only the gathered stripes below the window of their gatherer. The window
        moves as rows are forwarded. Memory outside the parity region therefore stays below one
        window of rows, and no receiving thread waits for a sending thread.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import xxhash

from ftrun.erasure.codec import Codec
from ftrun.erasure.fragments import (
    Fragment,
    FragmentHeader,
    StripeId,
    block_digest,
    check,
    pack,
    unpack,
)
from ftrun.errors import FragmentRefused
from ftrun.ids import Generation
from ftrun.smp.redundancy.group import group_of, num_stripes_of, stripes_of
from ftrun.wire.crash_points import crash_point
from ftrun.wire.shared_memory.parity_region import ParityRecord, ParityRegion

WINDOW_STRIPES = 8
_NUM_LOCKS = 16


@dataclass(frozen=True, slots=True)
class OutgoingRow:
    """A parity row that belongs to another node."""

    position: int
    header: bytes
    row: bytearray


class ParityWriter:
    """Fills one parity region, which was begun with its record.

    Args:
        forward: forward a row; call `release` when it was sent or is dropped.
        window: other nodes may now send the stripes gathered here below this number.
        full: all expected data is stored.
    """

    def __init__(
        self,
        region: ParityRegion,
        codec: Codec,
        *,
        run: int,
        forward: Callable[[OutgoingRow, Callable[[], None]], None],
        window: Callable[[int], None],
        full: Callable[[], None],
    ) -> None:
        record = region.record
        assert record is not None
        self._region = region
        self._record: ParityRecord = record
        self._codec = codec
        self._run, self._group = run, group_of(record).id
        self._forward, self._report_window, self._full = forward, window, full
        self._is_active = True
        self._locks = [threading.Lock() for _ in range(_NUM_LOCKS)]
        self._count_lock = threading.Lock()
        self.stripes = stripes_of(record)
        self._seen: dict[int, int] = {}
        self._staged: dict[int, list[bytearray]] = {}
        self._spare: list[bytearray] = []
        self._num_stripes = num_stripes_of(record)
        rows = (self.stripes.parity_stripe(record.position, at) for at in range(record.num_rows))
        self.missing = len(record.mirrors) + sum(1 for stripe in rows if self._expected(stripe))
        self._sent_on: set[int] = set()
        self._first_open = 0
        self._window = -1
        self.num_bytes = 0

    def start(self) -> None:
        """Open the window; report `full` at once if nothing is expected."""
        self._move_window()
        if self.missing == 0:
            self._full()

    def stop(self) -> None:
        """Stop writing; when this returns, no thread writes to the parity region any more."""
        self._is_active = False
        for lock in self._locks:  # Rule 1: a thread that saw it active is still inside its lock
            with lock:
                pass

    # --- threads of links ------------------------------------------------------------------

    def take_block(self, sender: int, name: str, header: bytes, payload: memoryview) -> None:
        """Add a block of the sender at this position, or raise FragmentRefused."""
        reported = unpack(header, what=f"a block from {name}")
        stripe, index = reported.of.stripe, self._index_from(reported, sender, name)
        fragment = Fragment(name, index, header, payload)
        check(fragment, self._stripe_id(stripe), generation=self._made_in)
        with self._locks[stripe % _NUM_LOCKS]:
            if not self._is_active:
                return
            self.num_bytes += len(payload)
            if index >= self._codec.k:
                self._keep(stripe, payload, reported.block.digest)
                is_done = True
            else:
                is_done = self._add(stripe, index, payload)
        if is_done:
            self._count(1)

    def mirror_space(self, position: int) -> int:
        """Bytes reserved for a node's small state; 0 if this node does not store it."""
        return dict(self._record.mirrors).get(position, 0)

    def take_mirror(self, sender: int, payload: bytearray, digest: int) -> None:
        """Store a node's small state. It must fit into its reserved bytes."""
        with self._locks[0]:
            if not self._is_active:
                return
            self._region.mirror_space(sender)[: len(payload)] = payload
            self._region.store_mirror(sender, len(payload), digest)
            self.num_bytes += len(payload)
        crash_point("smp.protect.mirror_stored")
        self._count(1)

    def _index_from(self, reported: FragmentHeader, sender: int, name: str) -> int:
        """The index in its stripe that this sender's block must have; raises FragmentRefused."""
        stripe, own = reported.of.stripe, self._record.position
        what = f"a block from {name} for stripe {stripe}"
        if not 0 <= stripe < self._num_stripes:
            raise FragmentRefused(what=what, reason=f"there are {self._num_stripes} stripes")
        parity = self.stripes.parity_nodes(stripe)
        if reported.index >= self._codec.k and sender == parity[0] and own in parity[1:]:
            return self.stripes.index(stripe, own)
        if sender in self.stripes.data_nodes(stripe) and own == parity[0]:
            return self.stripes.index(stripe, sender)
        raise FragmentRefused(what=what, reason="it does not belong here")

    def _keep(self, stripe: int, row: memoryview, digest: int) -> None:
        at = self.stripes.parity_block(self._record.position, stripe)
        assert at is not None
        self._region.row(at)[:] = row
        self._region.store_row(at, digest)  # after the row: a digest of 0 means that none arrived

    def _add(self, stripe: int, index: int, payload: memoryview) -> bool:
        """Add a block to the rows of its stripe; return True if it was the last block."""
        seen = self._seen.get(stripe, 0)
        if seen >> index & 1:
            raise FragmentRefused(
                what=f"a block for stripe {stripe}", reason="it was received already"
            )
        at = self.stripes.parity_block(self._record.position, stripe)
        assert at is not None
        row = self._region.row(at)
        if not seen and self._codec.m > 1:
            self._staged[stripe] = [self._spare_row() for _ in range(1, self._codec.m)]
        others = self._staged.get(stripe, ())
        for j, target in enumerate((row, *others)):
            self._codec.update(index, payload, j, target, first=not seen)
        crash_point("smp.protect.block_added")
        seen |= 1 << index
        self._seen[stripe] = seen
        if seen != self._expected(stripe):
            return False
        self._region.store_row(at, xxhash.xxh3_64_intdigest(row))
        if self._codec.m > 1:
            self._send_on(stripe, self._staged.pop(stripe))
        return True

    def _send_on(self, stripe: int, rows: list[bytearray]) -> None:
        """Forward the rows of the other parity nodes; the window moves when all are released."""
        left = [len(rows)]

        def release(row: bytearray) -> None:
            with self._count_lock:
                self._spare.append(row)
                left[0] -= 1
                is_last = not left[0]
            if is_last:
                self._sent_on.add(stripe // self.stripes.n)
                self._move_window()

        for j, row in enumerate(rows, start=1):
            block = block_digest(row)
            header = FragmentHeader(
                self._stripe_id(stripe), self._made_in, self._codec.k + j, block
            )
            position = self.stripes.parity_nodes(stripe)[j]
            out = OutgoingRow(position, pack(header), row)
            self._forward(out, partial(release, row))

    def _move_window(self) -> None:
        """Recompute the window and report it if it has changed."""
        with self._count_lock:
            if self._codec.m == 1:
                # Rows are computed in place, so no forwarding limits the window.
                below = self._num_stripes
            else:
                done = self._first_open
                while done in self._sent_on:
                    self._sent_on.remove(done)
                    done += 1
                self._first_open = done
                below = done + WINDOW_STRIPES
            if below == self._window:
                return
            self._window = below
        if self._is_active:
            self._report_window(below)

    def _spare_row(self) -> bytearray:
        with self._count_lock:
            return self._spare.pop() if self._spare else bytearray(self._record.block_bytes)

    def _count(self, number: int) -> None:
        with self._count_lock:
            self.missing -= number
            is_full = self.missing == 0
        if is_full:
            self._full()

    def _expected(self, stripe: int) -> int:
        senders = self.stripes.senders(stripe, self._record.coded_bytes)
        return sum(1 << self.stripes.index(stripe, node) for node in senders)

    def _stripe_id(self, stripe: int) -> StripeId:
        return StripeId(self._run, self._record.version, self._group, stripe)

    @property
    def _made_in(self) -> Generation:
        return Generation(self._record.protected_in)
