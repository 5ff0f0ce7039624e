"""Memory for copies of slots, retained between checkpoints if these are frequent.

Runs in:  the SMP, in its disk lane's thread. One checkpoint is written at a time.
Takes in: the number of bytes of each copy; the amount of free memory.
Gives:    memory for all copies, or none.

Allocating memory costs more than copying into it: each page is cleared first, and a virtual machine
may have to request it from its host. Allocation was four fifths of the cost of a checkpoint to the
training that ran at the same time (scripts/bench_persist.py).

Rule 1: a lent buffer is not lent again before `begin`, because a file is written from it, and a
        followed capture requests buffers more than once.
Rule 2: buffers are returned to the system if they were not used for `KEEP_S`, or if free memory is
        scarce.
"""

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress

from ftrun import clock

KEEP_S = 60.0
"""If checkpoints are rarer than this, each one allocates memory: under 1 % of a processor."""

_PLENTY = 4
"""Free memory must be this multiple of the retained memory, because larger arenas may be needed."""


class CopyBuffers:
    """The copies of one node's ranks.

    Args:
        free_bytes: returns the number of bytes that may be used; called when they are needed.
    """

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        self._free_bytes = free_bytes
        self._kept: list[mmap.mmap] = []
        self._lent: list[mmap.mmap] = []
        self._used_s = 0.0

    @property
    def num_bytes(self) -> int:
        return sum(len(block) for block in (*self._kept, *self._lent))

    def begin(self) -> None:
        """Begin an attempt to write a checkpoint, and take back the buffers of the previous one."""
        self._kept += self._lent
        self._lent = []
        self.tidy()

    def lend(self, sizes: Sequence[int]) -> list[memoryview] | None:
        """Return buffers of these sizes with arbitrary content; None if they do not fit.

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
            left = []  # these have the sizes of another world
            if needed > self._free_bytes():
                self._kept = []
                return None
        self._used_s = clock.now_s()
        try:
            lent = [
                block if block is not None else fresh_memory(size)
                for size, block in zip(sizes, found, strict=True)
            ]
        except OSError:  # the kernel allows less than the reported free memory
            self._kept = []
            return None
        self._kept = left
        self._lent += lent
        return [memoryview(block) for block in lent]

    def tidy(self) -> None:
        """Return memory to the system that need not be retained (rule 2)."""
        is_old = clock.now_s() - self._used_s >= KEEP_S
        if self._kept and (is_old or self._free_bytes() < _PLENTY * self.num_bytes):
            self._kept = []

    def drop(self) -> None:
        self._kept, self._lent = [], []


def fresh_memory(size: int) -> mmap.mmap:
    """Allocate page-aligned memory, in huge pages if the kernel has them."""
    # A private mapping: a shared one gets no huge pages, whose first touch costs half as much.
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block
