"""Slots of the arena as the targets of snapshots.

Runs in:  worker: the training thread; the copy thread seals.
Takes in: the state of a boundary; commits on the command page.
Gives:    a `SlotTarget`, or none while no slot is free or memory is being allocated.
"""

from collections.abc import Callable, Collection, Sequence

from ftrun import clock
from ftrun.errors import MemoryTooSmall
from ftrun.snapshot.replica_shares import ReplicaCheck
from ftrun.worker.capture.copying import SlotCopy
from ftrun.worker.capture.slots import ArenaSlots, SlotProvider
from ftrun.worker.context import WorkerContext
from ftrun.worker.replicas.shares import ReplicaShares
from ftrun.worker.smp_client import WorkerSmpClient
from ftrun.worker.state.state_tree import BoundaryState

_POLL_S = 0.0005
_LAST_COMMIT_WAIT_S = 5.0


class SlotTarget:
    """A slot, and the copies into it."""

    solved = ("memory", "value", "device memory")
    """Reasons of UNPROTECTED that end with the seal."""

    def __init__(
        self,
        store: SlotProvider,
        slots: ArenaSlots,
        slot: int,
        step: int,
        copy: SlotCopy,
        plain: bytes,
        link: WorkerSmpClient,
    ) -> None:
        self.copy = copy
        self.table = slots.arena.table(slot)
        self._store = store
        self._slots = slots
        self._slot = slot
        self._step = step
        self._plain = plain
        self._link = link

    def begin(self) -> None:
        """Write the image's header and the plain values."""
        views = self._slots.views[self._slot]
        views.write_header()
        views.write_plain(self._plain)

    def verify(self) -> bool:
        """Whether a verified snapshot is copied in the training thread."""
        return True

    def changed(self) -> Sequence[str]:
        """Lazy sources that digests have found changed; of a slot, see `Capture._observe`."""
        return ()

    def check(self, shares: ReplicaShares) -> Callable[[], ReplicaCheck | None]:
        return shares.check(self.copy.on_devices)

    def seal(self, check: ReplicaCheck | None) -> None:
        self._store.seal(self._slots, self._slot, self._step, self._link, check)

    def discard(self) -> None:
        """The slot stays COPYING, and counts for nothing."""


class SlotTargets:
    """The slots of one rank."""

    def __init__(
        self,
        context: WorkerContext,
        store: SlotProvider,
        shares: ReplicaShares,
        link: WorkerSmpClient,
    ) -> None:
        self._context = context
        self._store = store
        self._shares = shares
        self._link = link
        self._is_patient = True

    def target(
        self, step: int, whole: BoundaryState, at_boundary: Collection[str], *, is_last: bool
    ) -> SlotTarget | None:
        """Begin a copy; None while the arena is being allocated. Raises as `slots_for`."""
        state, slots = self._slots_for(whole, at_boundary, is_last=is_last)
        if slots is None:
            return None
        slot = self._store.begin_copy(slots, step)
        copy = slots.copy_of(slot, state, set(at_boundary))
        return SlotTarget(self._store, slots, slot, step, copy, state.plain, self._link)

    def _slots_for(
        self, whole: BoundaryState, at_boundary: Collection[str], *, is_last: bool
    ) -> tuple[BoundaryState, ArenaSlots | None]:
        """The state to store, with slots for it, as `SlotProvider.slots_for`."""
        state = self._shares.cut(whole, at_boundary)
        try:
            return state, self._store.slots_for(state, is_last=is_last)
        except (MemoryTooSmall, OSError):
            # The slots of whole tensors are still there.
            if not self._shares.keep_whole():
                raise
        state = self._shares.cut(whole, at_boundary)
        return state, self._store.slots_for(state, is_last=is_last)

    def may_overwrite(self, *, is_last: bool) -> bool:
        """Wait until the last seal is committed, else withdraw it; return whether a slot is free.

        If this rank is about to stop (`is_last`), it waits 5 s in place of `commit_timeout_s`.
        """
        wait_s = _LAST_COMMIT_WAIT_S if is_last else self._context.settings.commit_timeout_s
        # A slower rank seals later, and this rank would wait for it in the next collective anyway.
        # After one wait without a commit, boundaries do not wait until a slot is free again.
        give_up_s = clock.now_s() + (wait_s if is_last or self._is_patient else 0.0)
        commit_wait = self._store.commit_wait
        while not commit_wait.is_free:
            is_late = clock.now_s() >= give_up_s
            if self._context.is_revoked or (commit_wait.is_under_way and (not is_last or is_late)):
                return False
            if is_late:
                self._is_patient = False
                if (last := commit_wait.newest_sealed) is not None:
                    commit_wait.skipped(last.step)
                    self._link.withdraw(last.step)
                return commit_wait.is_free
            clock.sleep(_POLL_S)
        self._is_patient = True
        return True
