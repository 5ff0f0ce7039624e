"""Takes single snapshots on request of the script, without a session.

Runs in:  worker, in the thread that saves; one save at a time.
Takes in: named tensors and packed plain values of one step, commits on the command page.
Gives:    a sealed slot; a report of it to the SMP; its commit, or the reason why there is none.
Survives: nothing; a kill at any moment leaves the committed slot whole.

Slots, layouts, digests, seals and commits are those of a session (`slots.py`, `copying.py`,
`boundaries.py`). Parts that serve a loop are not used: the snapshot interval, lazy copies and their
check. The sources cannot change during the copy, because the caller waits for it.

Rule 1: copying and sealing are two calls. The coordinator seals last, with results of all other
        ranks, so that no version is complete before every rank has sealed its shard.
Rule 2: a save begins only after all ranks have finished the last save. If that version is not
        committed by then, it never will be, unless its commit is in transit. It is withdrawn.
Rule 3: every wait ends at a deadline that the caller sets.
"""

import os
import threading
from collections.abc import Sequence

from ftrun import clock
from ftrun.errors import PeerError, SnapshotError
from ftrun.ids import Version, version
from ftrun.snapshot.layout import PLAIN_NAME
from ftrun.wire.crash_points import crash_point
from ftrun.wire.shared_memory.arena import Arena
from ftrun.worker.capture.copying import digest_of
from ftrun.worker.capture.slots import ArenaSlots, SlotProvider
from ftrun.worker.context import WorkerContext
from ftrun.worker.smp_client import WorkerSmpClient
from ftrun.worker.state.state_tree import BoundaryState, PersistentSources, TensorSource

_POLL_S = 0.001
_RETRY_S = 0.05

_saver: "ExplicitSaver | None" = None


def saver_of(context: WorkerContext) -> "ExplicitSaver":
    """The only saver of this process, created on first use and after a fork."""
    global _saver
    if _saver is None or _saver.pid != os.getpid():
        _saver = ExplicitSaver(context)
    return _saver


def is_in_use() -> bool:
    return _saver is not None and _saver.pid == os.getpid()


class ExplicitSaver:
    """Takes snapshots of one rank on request."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.pid = os.getpid()
        self.link = WorkerSmpClient(context)
        self._store = SlotProvider(context)
        self._commit_wait = self._store.commit_wait
        self._copied: tuple[ArenaSlots, int, int] | None = None
        """Slots, slot and step that are copied but not sealed."""
        self._step = -1 if context.restore is None else context.restore.step
        self.room_bytes = 0
        """Bytes that the caller reserves for plain values that are known only after the copy."""
        if context.arena_fd is not None:
            inherited = Arena(context.arena_fd, writable=True)
            self._store.inherit(inherited)
            threading.Thread(target=inherited.populate, name="ftrun-populate", daemon=True).start()

    def begin(self, wanted: int, *, is_new: bool = True) -> int:
        """Return the step of a save: `wanted`, or the next step if that is negative or not newer.

        If `is_new` is false, this save has begun already, and only its step may increase.
        """
        self._step = max(self._step + is_new, wanted)
        return self._step

    def newest(self, *, give_up_s: float) -> Version | None:
        """The version that all ranks would load now.

        Waits for the commit of this rank's last seal, because another node may already see it.
        """
        sealed = self._commit_wait.newest_sealed
        wait = self._commit_wait
        while sealed is not None and not wait.is_over(sealed) and clock.now_s() < give_up_s:
            clock.sleep(_POLL_S)
        return wait.committed

    def copy(
        self, step: int, sources: Sequence[TensorSource], plain: bytes, *, give_up_s: float
    ) -> None:
        """Copy the state into the free slot; `give_up_s`: deadline on the monotonic clock.

        `seal` may replace the packed values by others of at most the same capacity.
        """
        self._copied = None
        self._await_free(give_up_s)
        state = BoundaryState(PersistentSources(tuple(sources)), (), plain)
        slots = self._await_slots(state, give_up_s)
        slot = self._store.begin_copy(slots, step)
        views = slots.views[slot]
        views.write_header()
        views.write_plain(plain)
        try:
            copy = slots.copy_of(slot, state, set())
            copy.copy_boundary()
            copy.copy_lazy(slots.arena.table(slot))
        finally:
            slots.forget_copies()  # they hold references to tensors, also to copies of async_save
        crash_point("worker.capture.copied")
        self._copied = (slots, slot, step)

    def seal(self, plain: bytes | None = None) -> Version:
        assert self._copied is not None
        (slots, slot, step), self._copied = self._copied, None
        if plain is not None:
            _replace_plain(slots, slot, plain)
        self._store.seal(slots, slot, step, self.link)
        return version(self.context.generation, step)

    def await_commit(self, sealed: Version, *, give_up_s: float) -> None:
        """Wait until a version of this rank is committed; else raise SnapshotError."""
        while not self._commit_wait.is_over(sealed):
            if clock.now_s() >= give_up_s:
                raise SnapshotError(
                    f"{sealed} is sealed on this rank and was not committed in time: another rank "
                    "has not sealed it, or other nodes take long to protect it. The previous "
                    "snapshot is retained. If the network is slow, raise Writer(wait_s=...)"
                )
            self.link.send_again()
            clock.sleep(_POLL_S)
        if not self._commit_wait.is_committed(sealed):
            raise SnapshotError(
                f"{sealed} is given up: a rank has none of it. The previous snapshot is retained"
            )

    # --- details -----------------------------------------------------------------------------

    def _await_free(self, give_up_s: float) -> None:
        """Wait until a slot may be overwritten: rule 2."""
        commit_wait = self._commit_wait
        while not commit_wait.is_free:
            last = commit_wait.newest_sealed
            if last is not None and commit_wait.is_ours(last) and not commit_wait.is_over(last):
                if self.link.withdraw(last.step):
                    commit_wait.skipped(last.step)
                else:
                    clock.sleep(_RETRY_S)  # its commit is in transit, or the SMP is restarting
            elif clock.now_s() < give_up_s:
                clock.sleep(_POLL_S)
            if clock.now_s() >= give_up_s:
                raise SnapshotError(
                    f"no snapshot was taken: the previous one, {last}, is not committed yet, "
                    "because other nodes take long to protect it. Save less often, or raise "
                    "Writer(wait_s=...)"
                )

    def _await_slots(self, state: BoundaryState, give_up_s: float) -> ArenaSlots:
        while True:
            try:
                slots = self._store.slots_for(state)
            except PeerError:
                # The agent starts another SMP; until then no memory can be requested.
                if clock.now_s() + _RETRY_S >= give_up_s:
                    raise
                slots = None
            if slots is not None:
                return slots
            if clock.now_s() >= give_up_s:
                raise SnapshotError("no snapshot was taken: the memory for it is still being made")
            clock.sleep(_RETRY_S)


def _replace_plain(slots: ArenaSlots, slot: int, plain: bytes) -> None:
    if len(plain) + 8 > slots.layout.plain_capacity:
        raise SnapshotError(
            f"{len(plain):,} bytes of plain values do not fit into the "
            f"{slots.layout.plain_capacity:,} reserved. Save again: the next one has more room"
        )
    views, table = slots.views[slot], slots.arena.table(slot)
    views.write_plain(plain)
    start = next(one.offset for one in slots.layout.entries if one.name == PLAIN_NAME)
    for index, piece in enumerate(slots.layout.pieces):
        if piece.offset >= start:
            table[index] = digest_of(views.bytes[piece.offset : piece.offset + piece.num_bytes])
