"""Memory that is touched ahead: its owner, its lifetime, and its presence."""

import ctypes
import errno
import gc
import itertools
import mmap
import threading
from collections.abc import Iterator

import pytest
import torch

from ftrun.linux import AvailableMemory
from ftrun.snapshot.layout import PAGE_BYTES
from ftrun.worker.restore import early_restore
from ftrun.worker.restore.early_restore import LEAST_BYTES, PrefaultedMemory

MIB = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> Iterator[PrefaultedMemory]:
    made = PrefaultedMemory(16 * MIB)
    monkeypatch.setattr(early_restore, "_ready", made)
    yield made
    made.close()


def resident_bytes(address: int, num_bytes: int) -> int:
    """Resident bytes of these addresses; 0 where nothing is mapped.

    Not from /proc/self/smaps: the kernel merges adjacent mappings, and then reports their sum.
    """
    pages = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    if _libc.mincore(address, num_bytes, pages):
        assert ctypes.get_errno() == errno.ENOMEM
        return 0
    return mmap.PAGESIZE * sum(one & 1 for one in pages)


def test_what_is_touched_is_there_before_it_is_used(ready: PrefaultedMemory) -> None:
    tensor = ready.take(PAGE_BYTES)
    assert tensor is not None
    assert resident_bytes(tensor.data_ptr(), 16 * MIB) == 0
    ready.touch()
    assert resident_bytes(tensor.data_ptr() + PAGE_BYTES, 16 * MIB - PAGE_BYTES) == (
        16 * MIB - PAGE_BYTES
    )


def test_tensors_have_pages_of_their_own(ready: PrefaultedMemory) -> None:
    made = [early_restore.empty((3, LEAST_BYTES // 4), torch.float32, "cpu") for _ in range(5)]
    for at, one in enumerate(made):
        one.fill_(at)
    assert [one.unique().tolist() for one in made] == [[0], [1], [2], [3], [4]]
    starts = sorted(one.data_ptr() for one in made)
    assert all(b - a == 3 * LEAST_BYTES for a, b in itertools.pairwise(starts))


def test_what_does_not_fit_or_is_small_is_allocated_as_usual(ready: PrefaultedMemory) -> None:
    large = early_restore.empty((32 * MIB,), torch.uint8, "cpu")
    small = early_restore.empty((7,), torch.bfloat16, "cpu")
    assert large.shape == (32 * MIB,)
    assert (small.shape, small.dtype) == ((7,), torch.bfloat16)
    assert ready.take(16 * MIB) is not None, "something was taken for them"
    assert ready.take(1) is None


def test_a_tensor_outlives_the_rest_and_its_pages_go_with_it(ready: PrefaultedMemory) -> None:
    tensor = early_restore.empty((4 * MIB,), torch.uint8, "cpu")
    address = tensor.data_ptr()
    rest = address + 8 * MIB
    ready.touch()
    assert resident_bytes(rest, 8 * MIB) == 8 * MIB
    early_restore.release()
    assert resident_bytes(rest, 8 * MIB) == 0
    tensor.fill_(7)
    view = tensor[-1:]
    del tensor
    gc.collect()
    assert view.item() == 7
    assert resident_bytes(address, 4 * MIB) == 4 * MIB
    del view
    gc.collect()
    assert resident_bytes(address, 4 * MIB) == 0


def test_touching_ends_when_it_is_over(ready: PrefaultedMemory) -> None:
    threads = [threading.Thread(target=ready.touch) for _ in range(2)]
    for one in threads:
        one.start()
    taken = [ready.take(MIB) for _ in range(4)]
    ready.close()
    for one in threads:
        one.join(30)
        assert not one.is_alive()
    for one in taken:
        assert one is not None
        assert not one.any()


def test_a_pool_that_comes_too_late_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_restore, "_needed_bytes", lambda context: 4 * MIB)
    early_restore.expect()
    early_restore.release()
    early_restore.make_ready(None)  # type: ignore[arg-type]
    assert early_restore._ready is None
    early_restore.expect()
    early_restore.make_ready(None)  # type: ignore[arg-type]
    assert early_restore._ready is not None
    early_restore.release()
    assert early_restore._ready is None


def test_all_that_is_left_to_touch_counts_and_not_only_what_is_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = AvailableMemory(200 * MIB, "a cgroup")
    monkeypatch.setattr(early_restore, "available_memory", lambda: short)
    large = PrefaultedMemory(128 * MIB)
    tensor = large.take(PAGE_BYTES)
    large.touch()
    assert tensor is not None
    assert resident_bytes(tensor.data_ptr(), 128 * MIB) == 0
    large.close()


def test_nothing_is_touched_that_would_leave_too_little(
    ready: PrefaultedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = AvailableMemory(MIB, "a cgroup")
    monkeypatch.setattr(early_restore, "available_memory", lambda: scarce)
    tensor = ready.take(PAGE_BYTES)
    ready.touch()
    assert tensor is not None
    assert resident_bytes(tensor.data_ptr(), 16 * MIB) == 0
