"""Memory for restored optimizer state, touched before it is needed.

Runs in:  worker: the thread of early_restore.py, then the training thread in `attach`.
Takes in: the shards of the version to restore, of which it reads how much state there is.
Gives:    tensors whose pages are there already, while a script builds its model and meets others.
Survives: wrong guesses: what is missing is allocated as ever, what is left over goes back to the
          system when `attach` is done.

Optimizer state does not exist before it is restored, and the first touch of a page costs ten times
a warm copy: it was nine tenths of a restore (scripts/bench_reshard.py).

Rule 1: only where the state will be in main memory: with an accelerator here, nothing is done.
Rule 2: only while what is left to touch is no more than half of what limits leave to this process,
        looked at again and again: a script may need more before `attach` than after it.
Rule 3: each tensor's pages are its own, and go back to the system with it.
"""

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Mapping
from functools import reduce
from operator import mul

import torch

from ftrun.free_memory import available_memory
from ftrun.ids import Rank
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.layout import PAGE_BYTES, PLAIN_NAME
from ftrun.snapshot.plain_values import TensorRef
from ftrun.worker.context import WorkerContext
from ftrun.worker.reshard.source import LocalShards
from ftrun.worker.smp_client import WorkerSmpClient
from ftrun.worker.state.tensors import stride_for

LEAST_BYTES = 1 << 20
"""Of a tensor that gets pages of its own."""
_STRIDE_BYTES = 8 << 20
"""Touched in one call to the kernel, which cannot be ended."""
_LOOK_AGAIN_BYTES = 64 << 20
_LARGEST_PART = 0.5
_POPULATE_WRITE = 23
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel0", "/dev/dri/renderD128")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PrefaultedMemory:
    """A stretch of anonymous memory: touched from its beginning, given out from its beginning.

    Args:
        num_bytes: of it.

    Raises:
        OSError: there is no such stretch of addresses.
    """

    def __init__(self, num_bytes: int) -> None:
        self._end = _pages(num_bytes)
        self._at = 0
        self._lock = threading.Lock()
        self._touching = threading.Lock()
        """Held while the kernel works on pages, which must not be given back meanwhile."""
        self._is_over = threading.Event()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _libc.mmap(None, self._end, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if address is None or address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"no {self._end:,} bytes of addresses")
        self._address: int = address

    def touch(self) -> bool:
        """Have the kernel put pages there, until all are there, or it is over, or memory is short.

        Without the interpreter lock; `take` need not wait for it. Whether all are there.
        """
        for at in range(0, self._end, _STRIDE_BYTES):
            if at % _LOOK_AGAIN_BYTES == 0:
                left = self._end - max(at, self._at)
                if left > _LARGEST_PART * available_memory().num_bytes:
                    return False
            with self._touching:
                if self._is_over.is_set():
                    return False
                # What has been given out is its tensor's business.
                begin, end = max(at, self._at), min(at + _STRIDE_BYTES, self._end)
                num_bytes = max(0, end - begin)
                if num_bytes and _libc.madvise(self._address + begin, num_bytes, _POPULATE_WRITE):
                    return False  # an older kernel, or no memory: touched when it is used
        return True

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """[num_bytes] uint8 with pages of its own; None where there are not so many left."""
        size = _pages(num_bytes)
        with self._lock:
            if self._is_over.is_set() or self._at + size > self._end:
                return None
            address = self._address + self._at
            self._at += size
        memory = (ctypes.c_ubyte * num_bytes).from_address(address)
        # At exit the system takes it all; tensors may be used until then.
        weakref.finalize(memory, _libc.munmap, address, size).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        """Give back what nobody has taken; the thread ends soon."""
        self._is_over.set()
        with self._touching, self._lock:
            if self._at < self._end:
                _libc.munmap(self._address + self._at, self._end - self._at)
            self._at = self._end


_ready: PrefaultedMemory | None = None
_is_wanted = False
_guard = threading.Lock()


def expect() -> None:
    """A restore is to come."""
    global _is_wanted
    _is_wanted = True


def make_ready(context: WorkerContext) -> bool:
    """Find out how much memory the version to restore takes, and touch that much.

    Whether all of it is there now.

    Raises:
        FtrunError, OSError: it cannot be found out, or there is none.
    """
    global _ready
    if any(os.path.exists(path) for path in _ACCELERATORS):
        return False
    num_bytes = _needed_bytes(context)
    if num_bytes < LEAST_BYTES:
        return False
    with _guard:
        if not _is_wanted:
            return False  # `attach` was faster
        _ready = ready = PrefaultedMemory(num_bytes)
    return ready.touch()


def ready_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """In memory that is ready, not filled; None where there is not so much, or it is small."""
    num_bytes = reduce(mul, shape, 1) * dtype.itemsize
    ready = _ready
    taken = ready.take(num_bytes) if ready is not None and num_bytes >= LEAST_BYTES else None
    return None if taken is None else taken.view(dtype).view(shape)


def empty(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
    stride: tuple[int, ...] = (),
) -> torch.Tensor:
    """As torch.empty, in memory that is ready where there is some.

    Args:
        shape: of the tensor.
        dtype: of its items.
        device: where it is.
        stride: of a tensor of this many dimensions, whose order in memory this one gets.
    """
    found = ready_tensor(shape, dtype) if torch.device(device).type == "cpu" else None
    made = torch.empty(shape, dtype=dtype, device=device) if found is None else found
    if not stride:
        return made
    # Not `as_strided`, whose result is a view and shares its version counter.
    storage, offset = made.untyped_storage(), made.storage_offset()
    return made.new_empty(0).set_(storage, offset, shape, stride_for(shape, stride))


def over() -> None:
    """All is restored, or nothing will be."""
    global _ready, _is_wanted
    with _guard:
        _is_wanted, ready, _ready = False, _ready, None
    if ready is not None:
        ready.close()


def _needed_bytes(context: WorkerContext) -> int:
    """Of this rank's optimizer state, as far as the shards on this node tell."""
    wanted = context.restore
    assert wanted is not None
    old_size = context.restore_world_size or context.world_size
    if context.is_resized:
        link = WorkerSmpClient(context)
        try:
            fds = link.open_images(wanted, old_size)
        finally:
            link.close()
    else:
        fds = {} if context.arena_fd is None else {context.rank: os.dup(context.arena_fd)}
    images = LocalShards(fds, wanted)
    try:
        found = [_state_bytes(images, rank) for rank in images.headers()]
    finally:
        images.close()
    if not context.is_resized:
        return sum(whole + part for whole, part in found)
    whole = max((whole for whole, _ in found), default=0)
    parts = sum(part for _, part in found) * old_size // max(1, len(found))
    return whole + parts // context.world_size + PAGE_BYTES


def _state_bytes(images: LocalShards, rank: Rank) -> tuple[int, int]:
    """How much optimizer state a shard has: whole tensors, and parts of what others have too."""
    entries = images.headers()[rank].entries
    at = entries[PLAIN_NAME].offset
    length = int.from_bytes(images.read(rank, at, 8), "little")
    names = state_names(plain.decode(images.read(rank, at + 8, length)))
    large = [one for name in names if (one := entries[name]).num_bytes >= LEAST_BYTES]
    whole = sum(_pages(one.num_bytes) for one in large if one.part is None)
    return whole, sum(_pages(one.num_bytes) for one in large if one.part is not None)


def state_names(parts: Mapping[str, bytes]) -> list[str]:
    """Of the tensors of optimizer state, in the order in which a restore asks for them.

    Args:
        parts: the plain values of a shard.
    """
    names: list[str] = []
    if "optimizer_state" not in parts:
        return names  # saved by ftrun.dcp, which fills what is there already

    def note(ref: TensorRef) -> None:
        names.append(ref.name)

    plain.decode(parts["optimizer_state"], deref=note)
    return names


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
