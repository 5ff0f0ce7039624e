"""Reads a snapshot from the capture pools of the ranks here, while they write it.

Runs in:  the SMP, in its disk lane's thread.
Takes in: duplicates of the pools' descriptors; a generation whose workers capture into them.
Gives:    `PooledSlot`s, which are written like slots that are still being filled.
Survives: workers killed in the middle, and discarded captures, as `live_capture`.

A byte is read once, in the order of the file, and its place in the ring is free from then on.
Workers wait for free places, so the storage limits the rate of the capture.

Rule 1: the bytes count as the snapshot only if the digest of each piece as written equals the
        table, which follows the image, and the table's digest that of the worker's seal.
Rule 2: a version in a pool is never committed, because it is not in memory. It exists once a
        checkpoint has the parts of all ranks. Until then the previous checkpoint is the newest.
Rule 3: a rank that waits for room gives up if READER_NS is not renewed. It is renewed while the job
        awaits the other ranks, and set ahead while a file is made durable. Therefore the job limits
        its own waits: it ends if one rank has no snapshot of the step, or does not begin it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import xxhash

from ftrun import clock
from ftrun.errors import CheckpointSuperseded, LayoutUnknown
from ftrun.ids import Rank, version
from ftrun.smp.checkpoint.live_capture import CaptureFilter, LiveCapture, LiveSlot, Started
from ftrun.snapshot.layout import Layout, parse_header
from ftrun.wire.crash_points import crash_point
from ftrun.wire.shared_memory.arena import SlotHeader, SlotState, table_digest
from ftrun.wire.shared_memory.pool import CapturePool, PooledHeader, PoolField

Pools = Mapping[Rank, CapturePool]
_LENGTH_BYTES = 8
_TOGETHER_S = 120.0
"""Ranks begin a capture within this time of each other."""

_DURABLE_S = 480.0
"""Time in addition for the end of a file: some file systems write all of it then."""


@contextmanager
def reading(fds: Mapping[Rank, int]) -> Iterator[Pools]:
    """Map the pools, and show the workers that a job reads captures of them."""
    pools = {rank: CapturePool(fd) for rank, fd in sorted(fds.items())}
    try:
        show_life(pools.values())
        for pool in pools.values():
            pool.set(PoolField.READER, 1)
        yield pools
    finally:
        for pool in pools.values():
            pool.set(PoolField.READER, 0)
            pool.close()


def show_life(pools: Iterable[CapturePool], ahead_s: float = 0.0) -> None:
    """Show the workers that the job makes progress, also those whose turn comes later."""
    now_ns = clock.now_ns() + int(ahead_s * 1e9)
    for pool in pools:
        pool.set(PoolField.READER_NS, now_ns)


class PooledWait:
    """Waits for a capture that all of these ranks begin."""

    def __init__(self, pools: Pools, follow: CaptureFilter) -> None:
        self._pools = pools
        self._follow = follow
        self._begun_s = math.inf
        """When the first of them had begun."""

    def poll(self) -> Started | None:
        """The capture; None before all have begun it. Raises CheckpointSuperseded (rule 3)."""
        follow, pools = self._follow, self._pools
        show_life(pools.values())
        if follow.is_over():
            return None
        found: dict[Rank, PooledHeader] = {}
        for rank, pool in pools.items():
            header = pool.header()
            is_ours = header is not None and header.generation == follow.generation
            if header is not None and is_ours and header.step >= follow.from_step:
                found[rank] = header
        is_abandoned = follow.is_committed(version(follow.generation, follow.from_step)) is False
        if is_abandoned or not all(map(_is_on, found.values())):
            raise CheckpointSuperseded(
                f"a rank has no snapshot from step {follow.from_step} on, which was requested"
            )
        versions = {header.version for header in found.values()}
        if len(found) == len(pools) and len(versions) == 1:
            return versions.pop(), [partial(PooledSlot, pools, rank, found[rank]) for rank in found]
        now_s = clock.now_s()
        self._begun_s = min(self._begun_s, now_s) if found else math.inf
        if now_s - self._begun_s > _TOGETHER_S:
            raise CheckpointSuperseded(
                f"{len(found)} of {len(pools)} ranks have begun a snapshot from step "
                f"{follow.from_step} on, and the others not within {_TOGETHER_S:.0f} s"
            )
        return None


class PooledSlot(LiveSlot):
    """One rank's image on its way through a pool."""

    def __init__(
        self, pools: Pools, rank: Rank, header: PooledHeader, capturing: LiveCapture
    ) -> None:
        shape = header.shape
        like = SlotHeader(
            SlotState.COPYING, header.generation, header.step, shape.image_bytes, 0, 0
        )
        super().__init__(capturing, -1, 0, like, shape)
        self._pools = pools
        self._pool = pools[rank]
        self._written = header
        self._head = memoryview(b"")
        self._at = 0
        """Number of bytes of the image, and of the table behind it, that were read."""
        self._pool.set(PoolField.DRAINED, header.base)

    @property
    def since_last_s(self) -> float:
        return math.inf  # no later capture overwrites what a pool holds

    def has_later(self) -> bool:
        return False

    def is_unchanged(self) -> bool:
        return self._is_compared or self._is_same()

    def begin(self) -> None:
        """Read the image's header; raises SlotOverwritten."""
        length = memoryview(bytearray(_LENGTH_BYTES))
        self._drain(length)
        num_bytes = _LENGTH_BYTES + int.from_bytes(length, "little")
        if num_bytes > self.shape.image_bytes:
            raise self._capturing.lost("the length of its header is damaged")
        head = memoryview(bytearray(num_bytes))
        head[:_LENGTH_BYTES] = length
        self._drain(head[_LENGTH_BYTES:])
        self._head = head
        if xxhash.xxh3_64_intdigest(head) != self.shape.layout_id:
            raise self._capturing.lost("its header is damaged")

    def layout(self) -> tuple[Layout, int]:
        try:
            return parse_header(self._head, image_bytes=self.shape.image_bytes)
        except LayoutUnknown as error:
            raise self._capturing.lost(str(error)) from error

    def await_piece(self, index: int) -> None:
        """`read_into` waits."""

    def read_into(self, target: memoryview, at: int) -> None:
        if at < len(self._head):
            target[:] = self._head[at : at + len(target)]
            return
        assert at == self._at, (at, self._at)
        self._drain(target)

    def end(self, header_bytes: int, header_digest: str) -> None:
        """Read the table and compare; raises SlotOverwritten if any digest differs."""
        raw = bytearray(8 * self.shape.num_pieces)
        self._drain(memoryview(raw))
        self._table = bytes(raw)
        since_s = clock.now_s()
        while self._is_same() and self._written.state is not SlotState.SEALED:
            self._nap(since_s)
        sealed = self._written
        is_whole = table_digest(self.table()) == sealed.table_digest
        if sealed.state is not SlotState.SEALED or not is_whole:
            raise self._capturing.lost("its digest table is damaged, or it was abandoned")
        if list(self.table()) != self._digests:
            raise self._capturing.lost("the written bytes do not match the captured digests")
        self.header = SlotHeader(
            SlotState.SEALED,
            *(sealed.generation, sealed.step, self.shape.image_bytes),
            *(sealed.table_digest, sealed.sealed_ns),
        )
        self._is_compared = True
        show_life(self._pools.values(), _DURABLE_S)

    def _drain(self, target: memoryview) -> None:
        since_s, done = clock.now_s(), 0
        while done < len(target):
            position = self._written.base + self._at
            num_bytes = self._pool.read(target[done:], position)
            if not self._is_same():  # Rule 3 of the pool
                raise self._capturing.lost("its capture was abandoned")
            if not num_bytes:
                self._nap(since_s)
                continue
            self._at += num_bytes
            self._pool.set(PoolField.DRAINED, position + num_bytes)
            show_life(self._pools.values())
            crash_point("smp.checkpoint.pool_drained")
            since_s, done = clock.now_s(), done + num_bytes

    def _nap(self, since_s: float) -> None:
        if self._capturing.is_abandoned:
            raise self._capturing.lost("a rank has no snapshot of this step")
        self._capturing.nap(since_s)

    def _is_same(self) -> bool:
        found = self._pool.header()
        if found is None or not _is_on(found):
            return False
        is_same = (found.version, found.base) == (self._written.version, self._written.base)
        self._written = found if is_same else self._written
        return is_same


def _is_on(header: PooledHeader) -> bool:
    return header.state in (SlotState.COPYING, SlotState.SEALED)
