"""Writes a snapshot to a file while it is still being captured.

Runs in:  the SMP, in its disk lane's thread.
Takes in: duplicates of the arenas' descriptors; a generation whose workers capture into them.
Gives:    `LiveSlot`s, which are written like sealed slots; `SlotOverwritten` if the capture is not
          completed.
Survives: workers killed in the middle, and discarded captures. What was written of them is removed,
          and no reader has seen it.
Source:   DataStates-LLM (arXiv 2406.10707): a part is written to the file when it has arrived.

A worker clears the digest table when it begins to copy, and fills in the digest of each piece after
it has copied that piece. A non-zero table entry is therefore a hint that the piece is present, and
no more:

Rule 1: written bytes count as the snapshot only after a check on the sealed slot. The digest of
        every piece as written must equal the sealed table, and the header must be unchanged. The
        time at which a byte was read does not matter.
Rule 2: nothing of a capture is published before it is committed. Each node writes its part after
        its SMP has committed the version, and a checkpoint needs all parts.
Rule 3: no slot is protected from being overwritten. After all ranks of the node have sealed, the
        rest is copied if memory allows. If a slot is overwritten, Rule 1 or the slot header detects
        it.
Rule 4: several nodes write the first capture from a step that no rank had reached when it was
        chosen. Ranks take the same snapshots, so this is the same version on all nodes. If it is
        not, no checkpoint has all parts.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import xxhash

from ftrun import clock
from ftrun.errors import SnapshotCorrupt
from ftrun.ids import Generation, Rank, Version
from ftrun.smp.checkpoint.slot_reader import (
    ArenaFds,
    CopyBeforeOverwrite,
    SealedSlot,
    SlotOverwritten,
)
from ftrun.smp.checkpoint.storage.direct_file import CopyBuffers, Pace
from ftrun.snapshot.layout import Layout
from ftrun.wire.shared_memory.arena import (
    ArenaShape,
    SlotHeader,
    SlotState,
    read_shape,
    read_slot_headers,
    table_digest,
)

TIMEOUT_S, HURRIED_S = 30.0, 1.0
"""A capture without progress for this number of seconds belongs to a dead worker.

The shorter limit applies when the run ends.
"""

COMMIT_TIMEOUT_S = 600.0
"""A sealed version that is neither committed nor abandoned for this time is given up."""

_NAP_S, _WAIT_NAP_S = 0.001, 0.005


@dataclass(frozen=True, slots=True)
class CaptureFilter:
    """Which captures to follow.

    Args:
        is_over: returns whether that generation has ended, or its use of these pools.
        hurries: returns whether the run ends, so that a capture without progress is not
            awaited.
        wait_s: seconds that a capture may take to begin.
        is_committed: returns whether a version was committed; None: it may still be.
        from_step: the first capture from this step on is followed.
        has_begun: set when that capture has begun, or is not awaited any more.
        pools: descriptors of the capture pools of all local ranks. With any, only a capture into
            them is followed.
    """

    generation: Generation
    is_over: Callable[[], bool]
    hurries: Callable[[], bool]
    wait_s: float
    is_committed: Callable[[Version], bool | None]
    from_step: int
    has_begun: threading.Event = field(default_factory=threading.Event)
    pools: Mapping[Rank, int] = field(default_factory=dict)


Started = tuple[Version, Sequence[Callable[["LiveCapture"], "LiveSlot"]]]
"""The version that is being captured, and for each rank the function that opens its slot."""


class LiveCapture:
    """One version that is being captured into the slots of all ranks; `stop` ends all waits."""

    def __init__(
        self,
        started: Started,
        follow: CaptureFilter,
        *,
        gap_s: float,
        room: CopyBuffers,
        stop: threading.Event,
    ) -> None:
        self.version = started[0]
        self.shards = [opened(self) for opened in started[1]]
        self.written_ns = 0
        """When the first bytes were written to the file; 0 if none have been."""
        self._follow = follow
        self._gap_s = gap_s
        self._room = room
        self._stop = stop
        self.are_sealed = False
        """All ranks here have sealed. Before that nothing is overwritten, so nothing is copied."""

    @property
    def is_abandoned(self) -> bool:
        """Whether the version will not be committed, because a rank has no snapshot of it."""
        return self._follow.is_committed(self.version) is False

    @property
    def ahead_s(self) -> float:
        """Seconds from the first byte written to the last rank's seal; 0 if the seal was first."""
        sealed_ns = max((one.header.sealed_ns for one in self.shards), default=0)
        return max(0, sealed_ns - self.written_ns) / 1e9 if self.written_ns else 0.0

    def paced(self, pace: Pace) -> Pace:
        """Return the same pace, which also records when the first bytes are written to a file."""

        def noted(num_bytes: int) -> None:
            pace(num_bytes)
            self.written_ns = self.written_ns or clock.now_ns()

        return noted

    def lost(self, reason: str) -> SlotOverwritten:
        return SlotOverwritten(self.version, reason)

    def nap(self, since_s: float, timeout_s: float | None = None) -> None:
        """Wait briefly; raises SlotOverwritten after no progress for too long, or at the end."""
        if self._stop.wait(_NAP_S) or self._follow.is_over():
            raise self.lost("its generation has ended, or its use of capture pools")
        limit_s = HURRIED_S if self._follow.hurries() else timeout_s or TIMEOUT_S
        if clock.now_s() - since_s > limit_s:
            raise self.lost(f"no capture progress for {limit_s:.0f} s")

    def await_seal(self) -> None:
        """Wait until all ranks here have sealed; raises SlotOverwritten if one does not."""
        for one in self.shards:
            one.await_seal()

    def await_commit(self) -> None:
        """Wait until the version is committed; raises SlotOverwritten if it will not be."""
        since_s = clock.now_s()
        while not (is_committed := self._follow.is_committed(self.version)):
            if is_committed is False:
                raise self.lost("it was not committed")
            self.nap(since_s, COMMIT_TIMEOUT_S)

    def has_sealed(self) -> None:
        """Copy the rest if all ranks here have sealed and time is short; raises SlotOverwritten.

        From then on the version may be committed, and its slots overwritten after the next commit.
        """
        if self.are_sealed or not all(one.poll() for one in self.shards):
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
        """Number of pieces that are present."""
        self._digests: list[int] = []
        self._is_compared = False
        self._since_s = clock.now_s()

    @property
    def is_committed(self) -> bool:
        return self._capturing.are_sealed

    @property
    def is_sound(self) -> bool:
        return self._is_compared

    def poll(self) -> bool:
        """Return whether it is sealed; raises SlotOverwritten if it holds another version now."""
        if self.header.state is not SlotState.SEALED:
            found = read_slot_headers(self._fd)[self._slot]
            is_it = found.state in (SlotState.COPYING, SlotState.SEALED)
            if not is_it or found.version != self.header.version:
                raise self._capturing.lost("its capture was abandoned")
            self.header = found
        return self.header.state is SlotState.SEALED

    def is_unchanged(self) -> bool:
        """True also before the seal, because the slot is not overwritten until then."""
        return self.header.state is not SlotState.SEALED or super().is_unchanged()

    def begin(self) -> None:
        self.await_piece(0)

    def layout(self) -> tuple[Layout, int]:
        try:
            return super().layout()
        except SnapshotCorrupt as error:
            raise self._capturing.lost(str(error)) from error

    def await_piece(self, index: int) -> None:
        """Wait until a piece is present; raises SlotOverwritten if it will not be."""
        while not self.is_copied:
            if self.poll():
                self._capturing.has_sealed()
                return
            if index < self._known or index < self._count():
                return
            self._capturing.nap(self._since_s)

    def found(self, index: int, digest: int) -> None:
        self._digests.append(digest)

    def await_seal(self) -> None:
        while not self.poll():
            self._count()
            self._capturing.nap(self._since_s)

    def end(self, header_bytes: int, header_digest: str) -> None:
        """Wait for the seal, and compare; raises SlotOverwritten if any digest differs."""
        self.await_seal()
        self._capturing.has_sealed()
        table = self.table()
        header = memoryview(bytearray(header_bytes))
        self.read_into(header, 0)
        if (
            table_digest(table) != self.header.table_digest
            or list(table) != self._digests
            or xxhash.xxh3_64_hexdigest(header) != header_digest
        ):
            raise self._capturing.lost("the written bytes do not match the sealed digests")
        self._is_compared = True

    def _count(self) -> int:
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
    pooled: Callable[[], Started | None] | None = None,
) -> LiveCapture | None:
    """Return the version that all ranks of `fds` are capturing; None if none begins in time.

    `fds` may grow in the meantime. If ranks have pools, `pooled` returns the capture into them; it
    may raise CheckpointSuperseded.
    """
    give_up_s = clock.now_s() + follow.wait_s
    while True:
        found = pooled() if pooled is not None else _started(fds, world_size, follow)
        if found is not None:
            follow.has_begun.set()
            return LiveCapture(found, follow, gap_s=gap_s, room=room, stop=stop)
        is_over = follow.is_over() or follow.hurries() or clock.now_s() > give_up_s
        if is_over or stop.wait(_WAIT_NAP_S):
            follow.has_begun.set()
            return None


def _started(fds: ArenaFds, world_size: int, follow: CaptureFilter) -> Started | None:
    slots: dict[Version, dict[int, Callable[[LiveCapture], LiveSlot]]] = {}
    for rank, some in sorted(fds.items()):
        for fd in some:
            shape = read_shape(fd)
            if shape.world_size != world_size:
                continue
            for slot, header in enumerate(read_slot_headers(fd)):
                is_on = header.state in (SlotState.COPYING, SlotState.SEALED)
                is_ours = header.generation == follow.generation
                if is_on and is_ours and header.step >= follow.from_step:
                    opened = partial(_open, fd, slot, header, shape)
                    slots.setdefault(header.version, {})[rank] = opened
    for version in sorted(slots):
        found = slots[version]
        if len(found) == len(fds):
            return version, [found[rank] for rank in sorted(found)]
    return None


def _open(
    fd: int, slot: int, header: SlotHeader, shape: ArenaShape, capturing: LiveCapture
) -> LiveSlot:
    return LiveSlot(capturing, fd, slot, header, shape)
