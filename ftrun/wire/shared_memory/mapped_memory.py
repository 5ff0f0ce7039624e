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

import contextlib
import ctypes
import mmap
import os
import weakref

from ftrun import clock

HUGE_BYTES = 1 << 21
"""On x86-64, and on 64-bit Arm with pages of 4 KiB. Where huge pages are larger, they are refused,
or are made of several of these parts."""

MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_SHARED_FIXED = mmap.MAP_SHARED | 16
_PROT_NONE = 0
_SLOWEST_BYTES_S = 512 << 20
"""A third of the rate on a machine with free huge pages. Below it the kernel moves other memory to
make huge pages, and small ones cost less. A rank waits for its arena at 0.1 GiB/s for all of the
node, and up to four arenas are allocated at a time."""
_DELAY_S = 0.25
"""Delays of the processor, in addition, for all of an allocation."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_aligned(num_bytes: int, access: int = _PROT_NONE) -> int:
    """Map private memory of whole pages, and return its address, a multiple of HUGE_BYTES.

    Without access it counts neither as data (RLIMIT_DATA) nor as committed memory. Raises OSError.
    """
    size = num_bytes + HUGE_BYTES
    address = _libc.mmap(None, size, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise _error(f"{size:,} bytes of addresses (ulimit -v)")
    before = -address % HUGE_BYTES
    if before:
        unmap(address, before)
    begin: int = address + before
    unmap(begin + num_bytes, HUGE_BYTES - before)
    return begin


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{os.strerror(number)}: {what}")


def unmap(address: int, num_bytes: int) -> None:
    _libc.munmap(address, num_bytes)


def advise(address: int, num_bytes: int, advice: int) -> bool:
    """Call madvise without the interpreter lock; return whether it succeeded."""
    return not _libc.madvise(address, num_bytes, advice)


class MappedMemory:
    """The first bytes of a memfd, mapped so that huge pages need one page table entry each.

    The caller keeps ownership of the descriptor. Raises OSError if there are no addresses.
    """

    def __init__(self, fd: int, num_bytes: int, *, writable: bool = True) -> None:
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._address = map_aligned(size)
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        if _libc.mmap(self._address, num_bytes, access, _SHARED_FIXED, fd, 0) != self._address:
            error = _error(f"{num_bytes:,} bytes of memory cannot be mapped")
            unmap(self._address, size)
            raise error
        mapped = (ctypes.c_ubyte * num_bytes).from_address(self._address)
        # It is unmapped when the last view of it has ended; at exit the kernel does it.
        weakref.finalize(mapped, unmap, self._address, size).atexit = False
        view = memoryview(mapped).cast("B")
        self.memory = view if writable else view.toreadonly()

    def __len__(self) -> int:
        return len(self.memory)

    def advise(self, advice: int, at: int = 0, num_bytes: int | None = None) -> bool:
        """Advise a part, as `advise`."""
        size = len(self.memory) - at if num_bytes is None else num_bytes
        return advise(self._address + at, size, advice)

    def close(self) -> None:
        """Views that still exist keep the mapping alive."""
        with contextlib.suppress(BufferError):
            self.memory.release()


class HugePageAllocator:
    """Allocates a memfd part by part, in huge pages until the kernel has none or is slow."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._fd = fd
        self._mapped: MappedMemory | None = None
        self._spare_s = _DELAY_S
        with contextlib.suppress(OSError):  # no addresses: the pages are small
            self._mapped = MappedMemory(fd, num_bytes)

    def allocate(self, at: int, num_bytes: int) -> None:
        """Allocate the bytes from `at` on, a multiple of `HUGE_BYTES`. Raises OSError."""
        whole = num_bytes // HUGE_BYTES * HUGE_BYTES
        if self._mapped is not None and whole and not self._collapse(self._mapped, at, whole):
            self.close()
        os.posix_fallocate(self._fd, at, num_bytes)

    def _collapse(self, mapped: MappedMemory, at: int, num_bytes: int) -> bool:
        """Allocate huge pages; return whether there are more to expect."""
        for part in range(at, at + num_bytes, HUGE_BYTES):
            os.posix_fallocate(self._fd, part, 1)
        began_s = clock.now_s()
        # The second call is for pages that another thread of the kernel used for a moment.
        is_made = any(mapped.advise(_MADV_COLLAPSE, at, num_bytes) for _ in range(2))
        self._spare_s += num_bytes / _SLOWEST_BYTES_S - (clock.now_s() - began_s)
        return is_made and self._spare_s > 0

    def close(self) -> None:
        if self._mapped is not None:
            self._mapped.close()
        self._mapped = None
