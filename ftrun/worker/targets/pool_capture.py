"""Captures through a pool, if two slots do not fit and checkpoints are written.

Runs in:  worker: the training thread, the copy thread for lazy copies, and a thread for requests.
Takes in: POOLED and requests of checkpoints on the command page; a pool from the SMP.
Gives:    snapshots that are checkpoints only; the reason and the waits on the heartbeat page.
Survives: the SMP. A capture in progress is given up, and a pool is requested from the next SMP.

Rule 1: a capture begins only for a requested checkpoint, because the pool holds no version.
Rule 2: a wait of the training thread ends if the SMP ends, its job ends, another rank has no
        snapshot of the step, the generation ends, or nothing is read for `_STALLED_S`.
Rule 3: memory for two slots is requested again after a pause that doubles. If it fits, all ranks
        leave their pools.
"""

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import xxhash

from ftrun import clock
from ftrun.errors import FtrunError, MemoryTooSmall
from ftrun.snapshot.layout import make_layout
from ftrun.snapshot.replica_shares import ReplicaCheck, written
from ftrun.wire.crash_points import crash_point
from ftrun.wire.shared_memory.arena import ArenaShape, SlotState, table_digest
from ftrun.wire.shared_memory.pages import CommandField, HeartbeatField
from ftrun.wire.shared_memory.pool import CapturePool, PooledHeader, PoolField
from ftrun.worker.context import WorkerContext
from ftrun.worker.replicas.shares import ReplicaShares
from ftrun.worker.smp_client import WorkerSmpClient
from ftrun.worker.state.state_tree import BoundaryState
from ftrun.worker.targets.pool_stream import CaptureGivenUp, PooledCopy, RingWriter

_BEGIN_S = 5.0
"""The job that reads a capture begins within this time."""

_STALLED_S = 120.0
_LOOK_S, _AGAIN_S = 0.5, 0.5
_RETRY_S, _LONGEST_RETRY_S = 10.0, 600.0
_PHASE = "wait until the storage has taken the snapshot"

_OTHERS = "another rank of this node has no memory for two slots"
_REVOKED = "another rank has failed, and this process joins the next generation"
_NO_JOB = "no checkpoint is written from this capture"
_STALLED = f"the storage has taken no bytes for {_STALLED_S:.0f} s"

_log = logging.getLogger(__name__)


class PoolCapture:
    """The pool of one rank; `is_on`: this rank captures through one, or has requested one."""

    def __init__(self, context: WorkerContext) -> None:
        self.is_on = False
        self._context = context
        self._link = WorkerSmpClient(context)
        self._pool: CapturePool | None = None
        self._thread: threading.Thread | None = None
        self._found: CapturePool | Exception | None = None
        self._state_bytes = 0
        self._refused = ""
        self._due_s = self._again_s = 0.0
        self._pause_s = _RETRY_S
        self.is_streaming = False
        """A capture into the pool has begun since the last boundary without one."""
        self._waited_ns = 0

    # --- pools ---------------------------------------------------------------------------------

    @property
    def is_wanted(self) -> bool:
        """Another rank of the node captures through a pool, and this one does not yet."""
        return not self.is_on and self._context.commands.get(CommandField.POOLED) > 0

    def refused(self, error: MemoryTooSmall) -> bool:
        """Capture through a pool from now on; return False if that is not possible."""
        context = self._context
        if self.is_on:
            return True
        if not context.launch.has_storage or context.settings.required:
            return False
        if context.launch.num_nodes > 1 or clock.now_s() < self._due_s:
            return False
        self.begin(max(error.state_bytes, 1), str(error))
        return True

    def begin(self, state_bytes: int, refused: str = _OTHERS) -> None:
        self.is_on, self._state_bytes, self._refused = True, state_bytes, refused
        self._due_s = clock.now_s() + self._pause_s
        self._request()

    def poll(self) -> bool:
        """Called at a boundary without a copy in progress; returns whether a pool can be used."""
        self.is_streaming = False
        if self._thread is not None:
            if self._thread.is_alive():
                return False
            self._take_found()
        if self.is_on and self._pool is None and clock.now_s() >= self._again_s:
            self._request()
        elif self._pool is not None and not self._context.commands.get(CommandField.POOLED):
            self._leave("")
        elif self._pool is not None and self._link.is_lost():
            self._drop()
        elif self._pool is not None and clock.now_s() >= self._due_s:
            self._request_slots()
        return self._pool is not None

    def _request(self) -> None:
        self._again_s = clock.now_s() + _AGAIN_S
        self._start(self._requested)

    def _requested(self) -> None:
        fd = self._link.request_pool(self._state_bytes)
        try:
            self._found = CapturePool(fd, is_writer=True)
        finally:
            os.close(fd)

    def _request_slots(self) -> None:
        """Ask whether two slots fit now; if they do, the SMP ends POOLED."""
        self._pause_s = min(2 * self._pause_s, _LONGEST_RETRY_S)
        self._due_s = clock.now_s() + self._pause_s
        link = WorkerSmpClient(self._context)

        def ask() -> None:
            try:
                link.reserve(self._state_bytes)
            except MemoryTooSmall as error:
                self._refused = str(error)
            finally:
                link.close()

        self._start(ask)

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except (FtrunError, OSError) as error:
                self._found = error

        self._thread = threading.Thread(target=run, name="ftrun-pool", daemon=True)
        self._thread.start()

    def _take_found(self) -> None:
        found, self._found, self._thread = self._found, None, None
        if isinstance(found, CapturePool):
            self._drop()
            self._pool = found
            self._show_reason()
        elif isinstance(found, MemoryTooSmall):
            self._leave(str(found))
        elif isinstance(found, Exception):
            _log.debug("no capture pool: %s", found)
        elif self._pool is not None:
            self._show_reason()  # with the numbers of the last refusal

    def _show_reason(self) -> None:
        assert self._pool is not None
        self._context.unprotected.add(
            "memory",
            f"only checkpoints, through a pool of {self._pool.capacity / 1e6:,.0f} MB: a failure "
            f"costs the steps since the last one. {self._refused}",
        )

    def _leave(self, refused: str) -> None:
        """Return to snapshots in memory; `refused`: there is no memory for a pool either."""
        self._drop()
        self.is_on = False
        if refused:
            self._context.unprotected.add("memory", refused)

    def _drop(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def close(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._link.close()  # else it waits for the answer
        self._drop()

    # --- one capture ---------------------------------------------------------------------------

    def may_overwrite(self, *, is_last: bool) -> bool:
        return True

    def target(
        self, step: int, state: BoundaryState, at_boundary: Collection[str], *, is_last: bool
    ) -> "PoolTarget":
        """Begin a capture of whole tensors."""
        assert self._pool is not None
        persistent, context = state.persistent, self._context
        provided = (one.entry for one in state.provided)
        layout = make_layout(
            [*persistent.entries, *(one.entry for one in state.fresh), *provided],
            plain_bytes=len(state.plain) + 8,
            metadata={"format": "pt", "ftrun.rank": str(context.rank), **written(())},
            piece_bytes=persistent.piece_bytes,
        )
        header = PooledHeader(
            SlotState.COPYING,
            context.generation,
            step,
            self._pool.get(PoolField.WRITTEN),
            ArenaShape(
                *(context.rank, context.world_size, layout.image_bytes, len(layout.pieces)),
                xxhash.xxh3_64_intdigest(layout.header),
            ),
        )
        self.is_streaming, self._waited_ns = True, 0
        context.page.set(HeartbeatField.IMAGE_BYTES, layout.image_bytes)
        show_life = lambda: context.page.show_life(clock.now_ns())  # noqa: E731
        writer = RingWriter(self._pool, _Obstacle(self._pool, context, self._link, step), show_life)
        copy = PooledCopy(layout, state, at_boundary, writer, self.waiting)
        return PoolTarget(self._pool, header, copy, context)

    def await_copy(self, wait: Callable[[float], bool], timeout_s: float | None) -> bool:
        """Wait for the copy thread as `CopyThread.wait`, and show it as a wait for the storage."""
        if wait(0.0):
            return True
        give_up_s = None if timeout_s is None else clock.now_s() + timeout_s
        with self.waiting():
            while True:
                left_s = _LOOK_S if give_up_s is None else give_up_s - clock.now_s()
                if wait(max(0.0, min(_LOOK_S, left_s))):
                    return True
                if give_up_s is not None and clock.now_s() >= give_up_s:
                    return False
                self._context.page.show_life(clock.now_ns())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Show, and measure, that the training thread waits for the storage."""
        page, started_ns = self._context.page, clock.now_ns()
        before, page.phase = page.phase, _PHASE
        try:
            yield
        finally:
            page.phase = before
            self._waited_ns += clock.now_ns() - started_ns
            page.set(HeartbeatField.POOL_WAIT_NS, self._waited_ns)


class _Obstacle:
    """Why a capture is given up, in words; empty if it need not be."""

    def __init__(
        self, pool: CapturePool, context: WorkerContext, link: WorkerSmpClient, step: int
    ) -> None:
        self._pool = pool
        self._context = context
        self._link = link
        self._step = step
        self._begun_s = clock.now_s()
        self._has_reader = False
        self._look_s = 0.0

    def __call__(self) -> str:
        now_s = clock.now_s()
        if now_s < self._look_s:
            return ""
        self._look_s = now_s + _LOOK_S / 10
        if self._context.is_revoked:
            return _REVOKED
        if self._context.commands.get(CommandField.ABANDONED_STEP) >= self._step:
            return "another rank has no snapshot of this step"
        if self._link.is_lost():
            return "the snapshot manager has ended"
        if not self._pool.get(PoolField.READER):
            is_late = self._has_reader or now_s - self._begun_s > _BEGIN_S
            return _NO_JOB if is_late else ""
        self._has_reader = True
        since_s = now_s - self._pool.get(PoolField.READER_NS) / 1e9
        return _STALLED if since_s > _STALLED_S else ""


class PoolTarget:
    """A capture into a pool, in place of a slot."""

    solved = ("value", "device memory")
    """Reasons of UNPROTECTED that end with the seal."""

    def __init__(
        self, pool: CapturePool, header: PooledHeader, copy: PooledCopy, context: WorkerContext
    ) -> None:
        self.copy = copy
        self.table = copy.table
        self._context = context
        self._pool = pool
        self._header = header
        pool.write_header(header)
        crash_point("worker.pool.begun")

    def begin(self) -> None:
        """The image's header and the plain values are written in their turn."""

    def verify(self) -> bool:
        """Prepare a verified capture; False: it is still copied in the copy thread."""
        self.copy.verify()
        return False

    def changed(self) -> Sequence[str]:
        """Lazy sources whose copies differ from the boundary, in a verified capture."""
        return self.copy.changed()

    def check(self, shares: ReplicaShares) -> Callable[[], ReplicaCheck | None]:
        """Of shared replicas: there are none, because whole tensors are stored."""
        return lambda: None

    def seal(self, check: ReplicaCheck | None) -> None:
        """Raises CaptureGivenUp."""
        self.copy.write_table()
        crash_point("worker.pool.written")
        if self._context.is_revoked:  # the step may hold values of an aborted collective
            raise CaptureGivenUp(_REVOKED)
        self._write_header(SlotState.SEALED)
        crash_point("worker.pool.sealed")

    def discard(self) -> None:
        self._write_header(SlotState.VOID)

    def _write_header(self, state: SlotState) -> None:
        header = self._header
        self._pool.write_header(
            PooledHeader(
                *(state, header.generation, header.step, header.base, header.shape),
                table_digest(self.table),
                clock.now_ns(),
            )
        )
