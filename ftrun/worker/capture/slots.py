"""Provides the arena for snapshots, and seals its slots.

Runs in:  worker: the training thread, and a thread of its own during an allocation.
Gives:    `ArenaSlots` that fit the state, or None during an allocation: those of the inherited
          arena if it fits, else of a new one.

An arena costs 0.5 s per GiB (2026-11), most of it the first touch of its pages. Its memory is
prepared at attach, in parallel to the first step. The boundary that needs an arena waits for it, so
that the first step is protected, but at most `commit_timeout_s`. The allocation of a very large
arena takes longer, and no snapshot is taken until it is ready. The last boundary of a run waits
longer, because a short run would have no snapshot at all.

Rule: memory that was refused is requested again after a pause that doubles. It is requested at once
      if the state has another shape, if enough memory has become free, or at the last boundary.
      Until a request succeeds, the old arena stays, with its committed version.
"""

import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import replace

import torch
import xxhash

from ftrun import clock
from ftrun.config.profile import MEMORY_LIMIT
from ftrun.errors import FtrunError, LayoutUnknown, MemoryTooSmall, PeerError
from ftrun.linux import available_memory
from ftrun.snapshot.layout import Layout, LayoutEntry, make_layout, parse_header
from ftrun.snapshot.replica_shares import Group, ReplicaCheck, written
from ftrun.wire.crash_points import crash_point
from ftrun.wire.shared_memory.arena import (
    NUM_SLOTS,
    Arena,
    SlotHeader,
    SlotState,
    arena_bytes,
    map_all,
    table_digest,
)
from ftrun.wire.shared_memory.mapped_memory import MappedMemory
from ftrun.wire.shared_memory.pages import HeartbeatField
from ftrun.worker.capture.copying import SlotCopy, SlotViews
from ftrun.worker.capture.device_copies import slow_reason
from ftrun.worker.commit_wait import CommitWait
from ftrun.worker.context import WorkerContext
from ftrun.worker.smp_client import WorkerSmpClient
from ftrun.worker.state.state_tree import BoundaryState, PersistentSources, StateTree
from ftrun.worker.state.tensors import copyable

Shape = tuple[tuple[LayoutEntry, ...], tuple[LayoutEntry, ...], int, Group]
"""Entries of persistent and of fresh sources, the size of pieces, and the members that share."""

_LAST_WAIT_S, _LOOK_S = 60.0, 0.05
"""Longest wait for an arena at the last boundary."""

_RETRY_S = 10.0
"""Seconds from a refusal to the next request; doubles with each refusal."""

_LONGEST_RETRY_S = 600.0
_MANY_ARENAS = 4
_SPARE_PIECES = 64
_PREPARED_BYTES = 32 << 20
"""A smaller image is allocated when it is needed, in milliseconds."""
_RECHECK_S = 1.0
"""Seconds from a refusal until free memory is checked at each boundary."""


_log = logging.getLogger(__name__)


class ArenaSlots:
    """An arena with its layout, and for each slot the views and the prepared copies."""

    def __init__(self, arena: Arena, layout: Layout, layout_id: int, shape: Shape) -> None:
        self.arena = arena
        self.layout = layout
        self.layout_id = layout_id
        self._shape = shape
        self.views = [SlotViews(layout, arena.image(slot)) for slot in range(NUM_SLOTS)]
        self._copies: list[tuple[PersistentSources, SlotCopy] | None] = [None] * NUM_SLOTS

    def fit(self, shape: Shape, plain_bytes: int) -> bool:
        return shape == self._shape and plain_bytes <= self.layout.plain_capacity

    def copy_of(self, slot: int, state: BoundaryState, boundary_names: set[str]) -> SlotCopy:
        """The copies into a slot, prepared again if the sources are other objects."""
        cached = self._copies[slot]
        if cached is None or cached[0] is not state.persistent:
            made = self.views[slot].prepare(state.persistent.sources, state.fresh, boundary_names)
            cached = self._copies[slot] = (state.persistent, made)
        copy = cached[1]
        num_persistent = len(copy.boundary_targets) - len(state.fresh)
        copy.boundary_sources[num_persistent:] = [copyable(one.tensor) for one in state.fresh]
        copy.provide(state.provided, self.views[slot], boundary_names)
        return copy

    def forget_copies(self) -> None:
        self._copies = [None] * NUM_SLOTS


class _Refusal:
    """Decides when memory that was refused is requested again."""

    def __init__(self, error: MemoryTooSmall | OSError, shape: Shape, plain_bytes: int) -> None:
        self.error = error
        self._shape = shape
        self._plain_bytes = plain_bytes
        self._pause_s = _RETRY_S
        self._refused_s = clock.now_s()

    def again(self, error: MemoryTooSmall | OSError) -> None:
        self.error = error
        self._pause_s = min(2 * self._pause_s, _LONGEST_RETRY_S)
        self._refused_s = clock.now_s()

    def is_of(self, shape: Shape, plain_bytes: int) -> bool:
        """Whether a request of the same shape and at most as many plain bytes was refused."""
        return shape == self._shape and plain_bytes >= self._plain_bytes

    def is_over(self) -> bool:
        since_s = clock.now_s() - self._refused_s
        if since_s >= self._pause_s:
            return True
        error = self.error
        if since_s < _RECHECK_S or isinstance(error, OSError) or error.limit == MEMORY_LIMIT:
            return False
        is_free = available_memory().num_bytes >= error.needed_bytes
        return is_free and error.available_bytes < error.needed_bytes


class SlotProvider:
    """Provides slots that fit the present state."""

    def __init__(self, context: WorkerContext) -> None:
        self.current: ArenaSlots | None = None
        self._context = context
        self._inherited: Arena | None = None
        self._wanted: tuple[Shape, int] = (((), (), 0, ()), 0)
        self._refusal: _Refusal | None = None
        self._maker: threading.Thread | None = None
        self._made: ArenaSlots | Exception | None = None
        self._is_size_known = False
        self._num_arenas = 0
        self._preparing: threading.Thread | None = None
        self._prepared: tuple[int, MappedMemory] | None = None
        """Memory for the first arena: its inode, and a mapping of every page."""
        self.commit_wait = CommitWait(context.commands, context.generation, context.restore)

    def inherit(self, arena: Arena) -> None:
        self._inherited = arena

    def release(self) -> None:
        """Leave all memory: this rank captures through a pool. No copy is in progress."""
        if self._preparing is not None:
            self._preparing.join()
        if self._prepared is not None:
            self._prepared[1].close()
        self.current = self._inherited = self._prepared = self._refusal = None
        self._context.close_arena()

    def prepare(self, expected: Layout) -> None:
        """Allocate memory for the first arena in a thread, in the size of the expected layout."""
        image_bytes = expected.image_bytes + expected.plain_capacity
        num_pieces = len(expected.pieces) + _SPARE_PIECES
        if image_bytes < _PREPARED_BYTES:
            return

        def work() -> None:
            link = WorkerSmpClient(self._context)
            try:
                fd = link.prepare_arena(image_bytes=image_bytes, num_pieces=num_pieces)
                try:
                    mapped = map_all(fd)
                    # Else a DataLoader worker would keep memory that proves too small.
                    mapped.advise(mmap.MADV_DONTFORK)
                    self._prepared = os.fstat(fd).st_ino, mapped
                finally:
                    os.close(fd)
            except (FtrunError, OSError) as error:
                _log.debug("no memory is prepared: %s", error)
            finally:
                link.close()

        preparing = threading.Thread(target=work, name="ftrun-memory", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started
            preparing.start()
            self._preparing = preparing

    def slots_for(self, state: BoundaryState, *, is_last: bool = False) -> ArenaSlots | None:
        """Slots that fit this state; None while their arena is being allocated.

        Raises MemoryTooSmall, PeerError or OSError if it cannot be allocated.
        """
        if is_last and self._maker is not None:
            self._await(self._maker, _LAST_WAIT_S)
        self._take_made()
        shape, plain_bytes = _size_of(state)
        if self.current is not None and self.current.fit(shape, plain_bytes):
            return self.current
        if self._maker is not None:
            return None  # the allocation may be for another shape; checked when it is complete
        self._raise_if_refused(shape, plain_bytes, is_last=is_last)
        reused = self._reuse(shape, plain_bytes)
        if reused is not None:
            return self._use(reused)
        maker = self._begin_making(shape, plain_bytes, frozen_bytes(state))
        wait_s = _LAST_WAIT_S if is_last else self._context.settings.commit_timeout_s
        self._await(maker, wait_s)
        return self.current if self._take_made() else None

    def _await(self, thread: threading.Thread, timeout_s: float) -> None:
        """Wait for a thread to end, while the generation runs."""
        give_up_s = clock.now_s() + timeout_s
        while thread.is_alive() and not self._context.is_revoked:
            if (left_s := give_up_s - clock.now_s()) <= 0.0:
                return
            thread.join(min(left_s, _LOOK_S))

    def begin_copy(self, slots: ArenaSlots, step: int) -> int:
        slot = self.commit_wait.slot_to_fill(slots.arena.find)
        slots.arena.begin_copy(slot, self._header(slots, SlotState.COPYING, step, 0))
        crash_point("worker.capture.marked")
        return slot

    def seal(
        self,
        slots: ArenaSlots,
        slot: int,
        step: int,
        link: WorkerSmpClient,
        check: ReplicaCheck | None = None,
    ) -> None:
        """Seal a copied slot, and report it on the heartbeat page and to the SMP.

        After the end of the generation none is sealed: its step may contain values of an aborted
        collective.
        """
        if self._context.is_revoked:
            return
        digest = table_digest(slots.arena.table(slot))
        slots.arena.write_header(slot, self._header(slots, SlotState.SEALED, step, digest))
        crash_point("worker.capture.sealed")
        self.commit_wait.sealed(step)
        page = self._context.page
        page.set(HeartbeatField.SEALED_GENERATION, self._context.generation)
        page.set(HeartbeatField.SEALED_STEP, step)
        page.set(HeartbeatField.SEALED_NS, clock.now_ns())
        page.add(HeartbeatField.SEALED_COUNT, 1)
        if (reason := slow_reason()) and not page.slow_capture:
            page.slow_capture = reason
        link.report_sealed(step=step, layout_id=slots.layout_id, check=check)
        crash_point("worker.capture.smp_notified")

    def _header(self, slots: ArenaSlots, state: SlotState, step: int, digest: int) -> SlotHeader:
        now_ns = clock.now_ns() if state is SlotState.SEALED else 0
        generation = self._context.generation
        return SlotHeader(state, generation, step, slots.layout.image_bytes, digest, now_ns)

    def check_size(
        self, tree: StateTree, collect: Callable[[], BoundaryState], link: WorkerSmpClient
    ) -> None:
        """Reserve more memory if the state is larger than estimated at attach; report a refusal.

        The size is known after the first optimizer step, possibly long before the first snapshot.
        """
        if self._is_size_known or self.current is not None:
            return
        optimizers = tree.attached.optimizers.values()
        self._is_size_known = not optimizers or any(one.state for one in optimizers)
        if not self._is_size_known:
            return
        state = collect()
        needed = expected_layout(tree, state).image_bytes
        if needed <= link.reserved_bytes:
            return
        try:
            link.reserve(needed, frozen_bytes=frozen_bytes(state), is_between_steps=True)
        except MemoryTooSmall as error:
            self._context.unprotected.add("memory", str(error))
            if self._context.settings.required:
                raise
        except PeerError:
            pass  # the later request for the arena reports it

    def forget_copies(self) -> None:
        if self.current is not None:
            self.current.forget_copies()

    def _raise_if_refused(self, shape: Shape, plain_bytes: int, *, is_last: bool) -> None:
        refusal = self._refusal
        if refusal is None:
            return
        if not refusal.is_of(shape, plain_bytes):
            self._refusal = None
        elif not is_last and not refusal.is_over():
            raise refusal.error

    def _begin_making(self, shape: Shape, plain_bytes: int, frozen_bytes: int) -> threading.Thread:
        layout, layout_id = self._layout(shape, plain_bytes)
        self._wanted = (shape, plain_bytes)

        def work() -> None:
            try:
                arena = self._make_arena(layout, layout_id, frozen_bytes)
                self._made = ArenaSlots(arena, layout, layout_id, shape)
            except Exception as error:  # noqa: BLE001 - raised again in the training thread
                self._made = error

        maker = threading.Thread(target=work, name="ftrun-memory", daemon=True)
        maker.start()  # if no thread can be started, the next boundary tries again
        self._maker = maker
        return maker

    def _take_made(self) -> bool:
        """Take over a completed allocation; return whether there was one. Raises its error."""
        if self._maker is None or self._maker.is_alive():
            return False
        self._maker.join()
        made, self._made, self._maker = self._made, None, None
        if isinstance(made, MemoryTooSmall | OSError):
            if self._refusal is None:
                self._refusal = _Refusal(made, *self._wanted)
            else:
                self._refusal.again(made)
        if isinstance(made, Exception):
            raise made
        if made is None:
            return False
        self._refusal = None
        self._count_arenas(made)
        self._use(made)
        return True

    def _count_arenas(self, made: ArenaSlots) -> None:
        self._num_arenas += 1
        if self._num_arenas != _MANY_ARENAS or self.current is None:
            return
        before = {entry.name for entry in self.current.layout.entries}
        names = [
            entry.name
            for entry in made.layout.entries
            if entry.name not in before and not entry.name.startswith("ftrun.")
        ]
        _log.warning(
            "the state has changed its shape %d times (now: %s), and each time costs a new arena "
            "of %.0f MB; keep tensors that are added as the run proceeds as numbers, or in one "
            "tensor of a fixed size",
            self._num_arenas - 1,
            ", ".join(names[:3]) or "plain values that grow",
            made.arena.shape.total_bytes / 1e6,
        )

    def _use(self, slots: ArenaSlots) -> ArenaSlots:
        self.current = slots
        self._context.page.set(HeartbeatField.IMAGE_BYTES, slots.layout.image_bytes)
        return slots

    def _layout(
        self, shape: Shape, plain_bytes: int, plain_capacity: int = 0
    ) -> tuple[Layout, int]:
        layout = make_layout(
            [*shape[0], *shape[1]],
            plain_bytes=plain_bytes,
            metadata={"format": "pt", "ftrun.rank": str(self._context.rank), **written(shape[3])},
            plain_capacity=plain_capacity,
            piece_bytes=shape[2],
        )
        return layout, xxhash.xxh3_64_intdigest(layout.header)

    def _reuse(self, shape: Shape, plain_bytes: int) -> ArenaSlots | None:
        """Return the inherited arena if the state fits its layout; it is tried only once."""
        arena, self._inherited = self._inherited, None
        capacity = 0 if arena is None else _plain_capacity(arena)
        if arena is None or plain_bytes > capacity:
            return None
        layout, layout_id = self._layout(shape, plain_bytes, capacity)
        has = arena.shape
        wanted = (layout_id, layout.image_bytes, len(layout.pieces), NUM_SLOTS)
        if (has.layout_id, has.image_bytes, has.num_pieces, has.num_slots) != wanted:
            return None
        return ArenaSlots(arena, layout, layout_id, shape)

    def _make_arena(self, layout: Layout, layout_id: int, frozen_bytes: int) -> Arena:
        inode, prepared = self._take_prepared(layout)
        try:
            fd = self._request(layout, layout_id, frozen_bytes)
        except MemoryTooSmall:
            if prepared is None:
                raise
            prepared.close()  # the SMP has freed it, so the memory is free now
            inode, prepared = 0, None
            fd = self._request(layout, layout_id, frozen_bytes)
        try:
            if prepared is not None and os.fstat(fd).st_ino == inode:
                prepared.advise(mmap.MADV_DOFORK)
            else:
                prepared = map_all(fd)
            arena = Arena(fd, writable=True, mapped=prepared)
        finally:
            os.close(fd)
        crash_point("worker.capture.arena_mapped")
        return arena

    def _take_prepared(self, layout: Layout) -> tuple[int, MappedMemory | None]:
        """The prepared memory, if it is large enough; else it is released."""
        if self._preparing is not None:
            self._preparing.join()
        inode, mapped = self._prepared or (0, None)
        self._prepared = None
        total_bytes = arena_bytes(layout.image_bytes, len(layout.pieces))
        if mapped is not None and len(mapped) < total_bytes:
            mapped.close()
            return 0, None
        return inode, mapped

    def _request(self, layout: Layout, layout_id: int, frozen_bytes: int) -> int:
        # A connection of its own, so that a boundary can send other requests during this one.
        link = WorkerSmpClient(self._context)
        try:
            return link.request_arena(
                image_bytes=layout.image_bytes,
                num_pieces=len(layout.pieces),
                layout_id=layout_id,
                frozen_bytes=frozen_bytes,
            )
        finally:
            link.close()


def _plain_capacity(arena: Arena) -> int:
    """Bytes for plain values in an arena with a sealed slot; 0 without a sealed slot."""
    for slot in range(arena.shape.num_slots):
        if arena.header(slot).state is SlotState.SEALED:
            try:
                return parse_header(arena.image(slot))[0].plain_capacity
            except LayoutUnknown:
                continue
    return 0


def _size_of(state: BoundaryState) -> tuple[Shape, int]:
    fresh = (*(one.entry for one in state.fresh), *(one.entry for one in state.provided))
    persistent = state.persistent
    shape = (persistent.entries, fresh, persistent.piece_bytes, persistent.members)
    return shape, len(state.plain) + 8


def expected_layout(tree: StateTree, state: BoundaryState) -> Layout:
    """The layout of an image; an estimate if an optimizer has no state yet."""
    shape, plain_bytes = _size_of(state)
    entries = {entry.name: entry for entry in state.persistent.entries}
    to_come = []
    for name, optimizer in tree.attached.optimizers.items():
        if optimizer.state:
            continue
        learned = (p for group in optimizer.param_groups for p in group["params"])
        for number, parameter in enumerate(learned):
            # A parameter of a lazy module has no size before its first forward, so it has none.
            if (entry := entries.get(state.persistent.names[id(parameter)])) is not None:
                copies = range(_state_copies(optimizer))
                to_come += [replace(entry, name=f"{name}.{number}.{copy}") for copy in copies]
    return make_layout(
        [*shape[0], *shape[1], *to_come], plain_bytes=plain_bytes, piece_bytes=shape[2]
    )


def frozen_bytes(state: BoundaryState) -> int:
    persistent = state.persistent
    sizes = {entry.name: entry.num_bytes for entry in persistent.entries}
    owned = set(map(id, persistent.parameters))
    return sum(sizes.get(name, 0) for name, one in persistent.learned if id(one) not in owned)


def _state_copies(optimizer: torch.optim.Optimizer) -> int:
    """Estimate how many tensors of a parameter's size an optimizer keeps for each parameter.

    The estimate uses the names of its options, so it also covers third-party variants.
    """
    defaults = getattr(optimizer, "defaults", {})  # some wrappers never set it
    if "betas" in defaults:  # Adam and variants
        return 3 if defaults.get("amsgrad") else 2
    if defaults.keys() & {"etas", "rho"}:  # Rprop, Adadelta
        return 2
    if "centered" in defaults:  # RMSprop
        return 1 + bool(defaults["momentum"]) + bool(defaults["centered"])
    if "beta2_decay" in defaults:  # Adafactor: rows and columns only
        return 0
    return 1 if defaults.get("momentum", 1) else 0
