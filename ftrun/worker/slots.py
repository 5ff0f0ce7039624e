"""The arena as the capture uses it: which layout it has, and where a new one comes from.

Runs in:  worker: the training thread, and a thread of its own while large memory is made.
Takes in: the state of a boundary, an arena inherited from the last worker.
Gives:    `Slots` that fit the state, or none yet.

Making an arena costs 0.5 s per GiB (2026-11), most of it the first touch of its pages. The
boundary that needs one waits for it, so that the first step is protected, but no longer than
`commit_wait_s`: a very large one is made beside the training, and until then nothing is taken.
The last boundary of a run waits longer: a short run would have no snapshot at all.
"""

import os
import threading

import xxhash

from ftrun.snapshot.layout import Layout, When, make_layout
from ftrun.wire.arena import NUM_SLOTS, Arena
from ftrun.wire.crash_points import crash_point
from ftrun.wire.pages import Beat
from ftrun.worker.context import WorkerContext
from ftrun.worker.copying import SlotCopy, SlotViews
from ftrun.worker.memory_link import MemoryLink
from ftrun.worker.state_tree import Lasting, State, StateTree

Shape = tuple[tuple[object, ...], ...]

_LAST_WAIT_S = 60.0
"""For an arena at the last boundary; as long as the SMP's answer is waited for."""


class Slots:
    """An arena as the capture uses it: its layout, and per slot the views and the copies."""

    def __init__(self, arena: Arena, layout: Layout, layout_id: int) -> None:
        self.arena = arena
        self.layout = layout
        self.layout_id = layout_id
        self.views = [SlotViews(layout, arena.image(slot)) for slot in range(NUM_SLOTS)]
        self._copies: list[tuple[Lasting, SlotCopy] | None] = [None] * NUM_SLOTS

    def copy_of(self, slot: int, state: State, hasty: set[str]) -> SlotCopy:
        """The copies into a slot; made anew when the sources are no longer the same objects."""
        cached = self._copies[slot]
        if cached is None or cached[0] is not state.lasting:
            made = self.views[slot].prepare(state.lasting.sources, state.fresh, hasty)
            cached = self._copies[slot] = (state.lasting, made)
        copy = cached[1]
        num_lasting = len(copy.boundary_targets) - len(state.fresh)
        copy.boundary_sources[num_lasting:] = [source.tensor for source in state.fresh]
        return copy

    def forget_copies(self) -> None:
        self._copies = [None] * NUM_SLOTS


class SlotStore:
    """Has slots for the state there is."""

    def __init__(self, context: WorkerContext) -> None:
        self.current: Slots | None = None
        self._context = context
        self._inherited: Arena | None = None
        self._shape: Shape | None = None
        self._maker: threading.Thread | None = None
        self._made: Slots | Exception | None = None

    def inherit(self, arena: Arena) -> None:
        """Use this arena as long as the layout stays what it was."""
        self._inherited = arena

    def slots_for(self, state: State, *, is_last: bool = False) -> Slots | None:
        """Where this state goes; None while memory for it is being made.

        Args:
            state: of a boundary.
            is_last: this rank is about to stop, and has time.

        Raises:
            MemoryTooSmall, PeerError: there is none to be had.
        """
        if is_last and self._maker is not None:
            self._maker.join(_LAST_WAIT_S)
        self._take_made()
        slots = self.current
        shape: Shape = (state.lasting.entries, tuple(source.entry for source in state.fresh))
        fits = slots is not None and len(state.plain) + 8 <= slots.layout.plain_capacity
        if slots is not None and fits and shape == self._shape:
            return slots
        if self._maker is not None:
            return None  # made for another shape; looked at again when it is there
        layout = make_layout(
            [*state.lasting.entries, *(source.entry for source in state.fresh)],
            plain_bytes=len(state.plain) + 8,
            metadata={"format": "pt", "ftrun.rank": str(self._context.rank)},
        )
        layout_id = xxhash.xxh3_64_intdigest(layout.header)
        self._shape = shape
        inherited = self._reuse(layout, layout_id)
        if inherited is not None:
            return self._use(Slots(inherited, layout, layout_id))
        maker = self._begin_making(layout, layout_id)
        maker.join(_LAST_WAIT_S if is_last else self._context.settings.commit_wait_s)
        return self.current if self._take_made() else None

    def forget_copies(self) -> None:
        if self.current is not None:
            self.current.forget_copies()

    def _begin_making(self, layout: Layout, layout_id: int) -> threading.Thread:
        def work() -> None:
            try:
                self._made = Slots(self._make_arena(layout, layout_id), layout, layout_id)
            except Exception as error:  # noqa: BLE001 - raised again in the training thread
                self._made = error

        self._maker = threading.Thread(target=work, name="ftrun-memory", daemon=True)
        self._maker.start()
        return self._maker

    def _take_made(self) -> bool:
        """Use what has been made since the last look; whether there was something."""
        if self._maker is None or self._maker.is_alive():
            return False
        self._maker.join()
        made, self._made, self._maker = self._made, None, None
        if isinstance(made, Exception):
            self._shape = None
            raise made
        if made is None:
            return False
        self._use(made)
        return True

    def _use(self, slots: Slots) -> Slots:
        self.current = slots
        self._context.page.set(Beat.IMAGE_BYTES, slots.layout.image_bytes)
        return slots

    def _reuse(self, layout: Layout, layout_id: int) -> Arena | None:
        arena, self._inherited = self._inherited, None
        if arena is None or arena.shape.layout_id != layout_id:
            return None
        fits = arena.shape.image_bytes == layout.image_bytes
        return arena if fits and arena.shape.num_pieces == len(layout.pieces) else None

    def _make_arena(self, layout: Layout, layout_id: int) -> Arena:
        # A line of its own: a boundary must not wait for this answer to say something else.
        link = MemoryLink(self._context)
        try:
            fd = link.request_arena(
                image_bytes=layout.image_bytes, num_pieces=len(layout.pieces), layout_id=layout_id
            )
        finally:
            link.close()
        try:
            arena = Arena(fd, writable=True)
        finally:
            os.close(fd)
        arena.populate()
        crash_point("worker.capture.arena_mapped")
        return arena


def needed_bytes(tree: StateTree) -> int:
    """An estimate of one image before the optimizers have made their state."""
    lasting = tree.lasting()
    known = sum(entry.num_bytes for entry in lasting.entries)
    lazy = sum(source.entry.num_bytes for source in lasting.sources if source.when is When.LAZY)
    has_state = any(optimizer.state for optimizer in tree.attached.optimizers.values())
    copies = 0 if has_state else _state_copies(tree)
    return known + copies * lazy + (1 << 20)


def _state_copies(tree: StateTree) -> int:
    """How many tensors of a parameter's size an optimizer keeps for it, at most."""
    most = 0
    for optimizer in tree.attached.optimizers.values():
        defaults = optimizer.defaults
        if "betas" in defaults:
            most = max(most, 3 if defaults.get("amsgrad") else 2)
        else:
            most = max(most, 1 if defaults.get("momentum", 1) else 0)
    return most
