"""Memory for copies of slots, kept from one checkpoint to the next where they come often.

Runs in:  the SMP, in its disk lane's thread: one checkpoint is written at a time.
Takes in: how many bytes each copy needs; how much memory is free.
Gives:    memory for all of them, or none.

Making memory costs more than copying into it: each page is cleared first, and a virtual machine may
have to ask its host for it. Of what a checkpoint cost the training beside it, four fifths were
that (scripts/bench_persist.py).

Rule 1: what is lent is lent to nobody else before `begin`: a file is written from it, and a capture
        that is followed asks more than once.
Rule 2: what was not used for `KEEP_S`, or would be missed, goes back to the system.
"""

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress

from ftrun import clock

KEEP_S = 60.0
"""Who writes more seldom makes its memory anew: that costs less than a hundredth of a processor."""

_PLENTY = 4
"""So many times what is kept must be free: larger arenas may be needed at any time."""


class CopyBuffers:
    """The copies of one node's ranks.

    Args:
        free_bytes: how much memory may be used, asked when it is needed.
    """

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        self._free_bytes = free_bytes
        self._kept: list[mmap.mmap] = []
        self._lent: list[mmap.mmap] = []
        self._used_s = 0.0

    @property
    def num_bytes(self) -> int:
        """That it has of the system."""
        return sum(len(block) for block in (*self._kept, *self._lent))

    def begin(self) -> None:
        """Another try to write a checkpoint: what was lent for the one before is read no more."""
        self._kept += self._lent
        self._lent = []
        self.tidy()

    def lend(self, sizes: Sequence[int]) -> list[memoryview] | None:
        """Memory of these sizes, with anything in it; None where it does not fit.

        Args:
            sizes: in bytes, one for each copy.
        """
        left = list(self._kept)
        found: list[mmap.mmap | None] = []
        for size in sizes:
            block = next((one for one in left if len(one) == size), None)
            if block is not None:
                left.remove(block)
            found.append(block)
        needed = sum(size for size, block in zip(sizes, found, strict=True) if block is None)
        if needed:
            left = []  # of the sizes of another world
            if needed > self._free_bytes():
                self._kept = []
                return None
        self._used_s = clock.now_s()
        try:
            lent = [
                block if block is not None else fresh_memory(size)
                for size, block in zip(sizes, found, strict=True)
            ]
        except OSError:  # the kernel counts otherwise
            self._kept = []
            return None
        self._kept = left
        self._lent += lent
        return [memoryview(block) for block in lent]

    def tidy(self) -> None:
        """Give back what need not be kept."""
        is_old = clock.now_s() - self._used_s >= KEEP_S
        if self._kept and (is_old or self._free_bytes() < _PLENTY * self.num_bytes):
            self._kept = []

    def drop(self) -> None:
        """Give all back: nothing is being written, and others need memory."""
        self._kept, self._lent = [], []


def fresh_memory(size: int) -> mmap.mmap:
    """Memory that begins at a page, in large ones where the kernel has them."""
    # A private mapping: a shared one has no large pages, whose first touch costs half as much.
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block
