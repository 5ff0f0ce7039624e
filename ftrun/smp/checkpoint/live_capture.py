"""A snapshot that is still being captured, written to a file as far as it is there.

Runs in:  the SMP, in its disk lane's thread.
Takes in: duplicates of the arenas' descriptors; a generation whose workers capture into them.
Gives:    `LiveSlot`s, which are written like those that are sealed; `SlotOverwritten` where nothing
          comes of the capture.
Survives: workers killed in the middle, captures that are discarded: what was written of them is
          thrown away, and no reader has ever seen it.
Source:   DataStates-LLM (arXiv 2406.10707): a part goes to the file when it has arrived.

A worker clears the digest table when it begins to copy, and fills in the digest of each piece when
that is copied. So an entry of the table says that a piece is there. That is a hint and no more:

Rule 1: what was written is taken for the snapshot only if, once the slot is sealed, the digest of
        every piece as it was written is the one in the sealed table, and the header is the same.
        It does not matter when a byte was read.
Rule 2: nothing of a capture is published before all ranks have sealed it.
Rule 3: a slot is never kept from being overwritten. Once all ranks have sealed, what is left is
        copied where memory allows; where it is overwritten, Rule 1 or its header finds out.
"""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from ftrun import clock
from ftrun.errors import SnapshotCorrupt
from ftrun.ids import Generation, Version
from ftrun.smp.checkpoint.late_copy import CopyBeforeOverwrite
from ftrun.smp.checkpoint.slot_reader import ArenaFds, SealedSlot, SlotOverwritten, newest_version
from ftrun.smp.checkpoint.storage.copy_room import CopyBuffers
from ftrun.smp.checkpoint.storage.direct_file import Pace
from ftrun.snapshot.layout import Layout
from ftrun.wire.shared_memory.arena import (
    ArenaShape,
    SlotHeader,
    SlotState,
    read_shape,
    read_slot_headers,
    table_digest,
)

PATIENCE_S, HURRIED_S = 30.0, 1.0
"""A capture that has not gone on for so long is a dead worker's."""

_NAP_S, _WAIT_NAP_S = 0.001, 0.005


@dataclass(frozen=True, slots=True)
class CaptureFilter:
    """Which captures to follow.

    Args:
        generation: whose workers capture now.
        is_over: they do not any more.
        hurries: the run ends, and nothing is waited for that does not go on.
        wait_s: so long one may take to begin.
    """

    generation: Generation
    is_over: Callable[[], bool]
    hurries: Callable[[], bool]
    wait_s: float


_Slot = tuple[int, int, SlotHeader, ArenaShape]
"""Descriptor of the arena, number of the slot, its header, the arena's shape."""


class LiveCapture:
    """One version on its way into the slots of all ranks.

    Args:
        slots: of all ranks, by rank.
        follow: see there.
        gap_s: see `CopyBeforeOverwrite`.
        room: memory for a copy of what is left.
        stop: ends all waiting.
    """

    def __init__(
        self,
        slots: Sequence[_Slot],
        follow: CaptureFilter,
        *,
        gap_s: float,
        room: CopyBuffers,
        stop: threading.Event,
    ) -> None:
        self.version: Version = slots[0][2].version
        self.shards = [LiveSlot(self, *one) for one in slots]
        self.written_ns = 0
        """When the first bytes went to the file; 0: none have yet."""
        self._follow = follow
        self._gap_s = gap_s
        self._room = room
        self._stop = stop
        self.are_sealed = False
        """All ranks have; before that nothing is overwritten, and so nothing copied."""

    @property
    def ahead_s(self) -> float:
        """So long before the last rank's seal the first bytes went to a file."""
        sealed_ns = max((one.header.sealed_ns for one in self.shards), default=0)
        return max(0, sealed_ns - self.written_ns) / 1e9 if self.written_ns else 0.0

    def paced(self, pace: Pace) -> Pace:
        """The same pace, which notes when bytes first go to a file."""

        def noted(num_bytes: int) -> None:
            pace(num_bytes)
            self.written_ns = self.written_ns or clock.now_ns()

        return noted

    def lost(self, why: str) -> SlotOverwritten:
        """What to raise."""
        return SlotOverwritten(self.version, why)

    def nap(self, since_s: float) -> None:
        """Let a worker go on.

        Raises:
            Overwritten: it does not, for too long, or nobody waits for it any more.
        """
        if self._stop.wait(_NAP_S) or self._follow.is_over():
            raise self.lost("its generation is over")
        limit_s = HURRIED_S if self._follow.hurries() else PATIENCE_S
        if clock.now_s() - since_s > limit_s:
            raise self.lost(f"nothing was captured for {limit_s:.0f} s")

    def has_sealed(self) -> None:
        """A rank has. When all have, which commits it, what is not written yet may be copied.

        Raises:
            Overwritten: another rank has taken its seal back.
        """
        if self.are_sealed or not all(one.look() for one in self.shards):
            return
        self.are_sealed = True
        left = [one for one in self.shards if not one.is_sound]
        late = CopyBeforeOverwrite(self.version, left, self._room, gap_s=self._gap_s)
        if late.is_tight:
            late.copy()
        if not all(one.is_unchanged() for one in self.shards):
            raise self.lost("")


class LiveSlot(SealedSlot):
    """One rank's slot while it is being filled."""

    def __init__(
        self, capturing: LiveCapture, fd: int, slot: int, header: SlotHeader, shape: ArenaShape
    ) -> None:
        super().__init__(fd, slot, header, shape)
        self._capturing = capturing
        self._known = 0
        """So many pieces are there."""
        self._digests: list[int] = []
        self._is_compared = False
        self._since_s = clock.now_s()

    @property
    def is_committed(self) -> bool:
        return self._capturing.are_sealed

    @property
    def is_sound(self) -> bool:
        return self._is_compared

    def look(self) -> bool:
        """Whether it is sealed.

        Raises:
            Overwritten: it holds something else now.
        """
        if self.header.state is not SlotState.SEALED:
            found = read_slot_headers(self._fd)[self._slot]
            is_it = found.state in (SlotState.COPYING, SlotState.SEALED)
            if not is_it or found.version != self.header.version:
                raise self._capturing.lost("its capture was given up")
            self.header = found
        return self.header.state is SlotState.SEALED

    def is_unchanged(self) -> bool:
        """Nor is it overwritten before."""
        return self.header.state is not SlotState.SEALED or super().is_unchanged()

    def begin(self) -> None:
        self.await_piece(0)

    def layout(self) -> tuple[Layout, int]:
        try:
            return super().layout()
        except SnapshotCorrupt as error:
            raise self._capturing.lost(str(error)) from error

    def await_piece(self, index: int) -> None:
        """Wait until a piece is there.

        Raises:
            Overwritten: it will not be.
        """
        while not self.is_copied:
            if self.look():
                self._capturing.has_sealed()
                return
            if index < self._known or index < self._count():
                return
            self._capturing.nap(self._since_s)

    def found(self, index: int, digest: int) -> None:
        self._digests.append(digest)

    def end(self, header_bytes: int, header_digest: str) -> None:
        """All of it is written: wait for the seal, and compare.

        Raises:
            Overwritten: a piece was read before it was there, or its slot holds another one.
        """
        while not self.look():
            self._count()
            self._capturing.nap(self._since_s)
        self._capturing.has_sealed()
        table = self.table()
        header = memoryview(bytearray(header_bytes))
        self.read_into(header, 0)
        if (
            table_digest(table) != self.header.table_digest
            or list(table) != self._digests
            or xxhash.xxh3_64_hexdigest(header) != header_digest
        ):
            raise self._capturing.lost("what was written of it is not what was sealed")
        self._is_compared = True

    def _count(self) -> int:
        """Look how many pieces are there."""
        at = self._known
        raw = os.pread(self._fd, 8 * (self.shape.num_pieces - at), self._table_at + 8 * at)
        for digest in memoryview(raw).cast("Q"):
            if not digest:
                break
            self._known += 1
        if self._known > at:
            self._since_s = clock.now_s()
        return self._known


def await_capture(
    fds: ArenaFds,
    world_size: int,
    follow: CaptureFilter,
    *,
    gap_s: float,
    room: CopyBuffers,
    stop: threading.Event,
) -> LiveCapture | None:
    """The version that is being captured by all ranks, once it is; None: there is none in time."""
    give_up_s = clock.now_s() + follow.wait_s
    while True:
        newest = newest_version(fds, world_size)
        found = _begun(fds, world_size, follow.generation, newest)
        if found is not None:
            return LiveCapture(found, follow, gap_s=gap_s, room=room, stop=stop)
        is_over = follow.is_over() or follow.hurries() or clock.now_s() > give_up_s
        if is_over or stop.wait(_WAIT_NAP_S):
            return None


def _begun(
    fds: ArenaFds, world_size: int, generation: Generation, newest: Version | None
) -> Sequence[_Slot] | None:
    """The slots of a version that all ranks have begun, and not all have sealed."""
    slots: dict[Version, dict[int, _Slot]] = {}
    for rank, some in sorted(fds.items()):
        for fd in some:
            shape = read_shape(fd)
            if shape.world_size != world_size:
                continue
            for slot, header in enumerate(read_slot_headers(fd)):
                is_on = header.state in (SlotState.COPYING, SlotState.SEALED)
                if is_on and header.generation == generation:
                    slots.setdefault(header.version, {})[rank] = (fd, slot, header, shape)
    for version in sorted(slots, reverse=True):
        found = slots[version]
        is_newer = newest is None or version > newest
        if is_newer and len(found) == world_size:
            return [found[rank] for rank in sorted(found)]
    return None
