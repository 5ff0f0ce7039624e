"""Allocates and maps shared memory in huge pages, where the kernel gives them.

Runs in:  SMP (allocates), worker (maps), agent.
Takes in: a memfd.
Gives:    allocated memory, and mappings that one page table entry covers for each huge page.
Survives: a kernel without huge pages for shared memory, and fragmented memory: the pages are small.

A restart maps the arenas of its ranks, and unmaps those of the ranks that have ended. 128 MB in
small pages took 35 ms of a processor to map and 11 ms to unmap, in huge pages 0.3 ms and 0.1 ms.
Allocated and mapped once, 512 MB took 280 ms and 35 to 230 ms (2026-11).

Source: MADV_COLLAPSE, Linux 6.1, madvise(2). It does not depend on `shmem_enabled`, which is
        `never` by default. A range without any page is refused, so each part gets one page first.
"""

import ctypes
import mmap
import os

from ftrun import clock

HUGE_BYTES = 1 << 21
"""On x86-64, and on 64-bit Arm with pages of 4 KiB. Where huge pages are larger, they are refused,
or are made of several of these parts."""

MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED = 16
_SLOWEST_S_PER_BYTE = 1 / (64 << 20)
"""Twenty times slower than on a machine with free huge pages: the kernel then moves other memory to
make huge pages, and small ones cost less."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class MappedMemory:
    """The first bytes of a memfd, mapped so that huge pages need one page table entry each.

    The caller keeps ownership of the descriptor. Raises OSError if there are no addresses.
    """

    def __init__(self, fd: int, num_bytes: int, *, writable: bool = True) -> None:
        # This anonymous mapping is replaced by the memory, from a multiple of HUGE_BYTES on. It
        # owns the addresses: Python unmaps them when the last view of it has ended.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._whole = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._whole))
        first = -begin % HUGE_BYTES
        self._address = begin + first
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        fixed = mmap.MAP_SHARED | _MAP_FIXED
        if _libc.mmap(self._address, num_bytes, access, fixed, fd, 0) != self._address:
            raise OSError(ctypes.get_errno(), f"{num_bytes:,} bytes of memory cannot be mapped")
        view = memoryview(self._whole)[first : first + num_bytes]
        self.memory = view if writable else view.toreadonly()

    def __len__(self) -> int:
        return len(self.memory)

    def advise(self, advice: int, at: int = 0, num_bytes: int | None = None) -> bool:
        """Call madvise for a part, without the interpreter lock; return whether it succeeded."""
        size = len(self.memory) - at if num_bytes is None else num_bytes
        return not _libc.madvise(self._address + at, size, advice)

    def close(self) -> None:
        """Views that still exist keep the mapping alive."""
        try:
            self.memory.release()
            self._whole.close()
        except BufferError:
            pass


class HugePageAllocator:
    """Allocates a memfd part by part, in huge pages until the kernel has none or is slow."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._fd = fd
        self._mapped = MappedMemory(fd, num_bytes)
        self._is_on = True

    def allocate(self, at: int, num_bytes: int) -> None:
        """Allocate the bytes from `at` on, a multiple of `HUGE_BYTES`. Raises OSError."""
        whole = num_bytes // HUGE_BYTES * HUGE_BYTES
        if self._is_on and whole:
            for part in range(at, at + whole, HUGE_BYTES):
                os.posix_fallocate(self._fd, part, 1)
            began_s = clock.now_s()
            # The second call is for pages that another thread of the kernel used for a moment.
            made = (self._mapped.advise(_MADV_COLLAPSE, at, whole) for _ in range(2))
            self._is_on = any(made)
            self._is_on &= clock.now_s() - began_s < whole * _SLOWEST_S_PER_BYTE
        os.posix_fallocate(self._fd, at, num_bytes)

    def close(self) -> None:
        self._mapped.close()
