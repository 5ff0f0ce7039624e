"""Shared memory in huge pages, and what happens where there are none."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftrun import clock
from ftrun.smp.memory.arena_requests import NUM_LANES
from ftrun.wire.shared_memory import mapped_memory
from ftrun.wire.shared_memory.arena import ArenaShape, create_memfd, map_all
from ftrun.wire.shared_memory.mapped_memory import (
    HUGE_BYTES,
    MADV_POPULATE_WRITE,
    HugePageAllocator,
    MappedMemory,
)
from ftrun.worker import smp_client

NUM_BYTES = 5 * HUGE_BYTES + 3 * 4096


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("test")
    os.ftruncate(made, NUM_BYTES)
    yield made
    os.close(made)


def address(mapped: MappedMemory) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped.memory))


def huge_bytes(at: int) -> int:
    """Bytes of the mapping at this address that one page table entry for each huge page maps."""
    of_mapping = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            begin, _, end = first.partition("-")
            of_mapping = int(begin, 16) <= at < int(end, 16)
        elif of_mapping and first == "ShmemPmdMapped:":
            return int(rest.split()[0]) * 1024
    return 0


def test_mappings_share_the_bytes_and_start_at_a_huge_page(fd: int) -> None:
    one, other = MappedMemory(fd, NUM_BYTES), MappedMemory(fd, 4096, writable=False)
    one.memory[:3] = b"abc"
    assert bytes(other.memory[:3]) == b"abc"
    assert len(one) == NUM_BYTES
    assert address(one) % HUGE_BYTES == 0
    with pytest.raises(TypeError, match="read-only"):
        other.memory[0] = 1


def test_a_view_keeps_a_closed_mapping(fd: int) -> None:
    mapped = MappedMemory(fd, NUM_BYTES)
    view = mapped.memory[HUGE_BYTES : HUGE_BYTES + 4]
    mapped.close()
    view[:] = b"abcd"
    assert os.pread(fd, 4, HUGE_BYTES) == b"abcd"


def test_a_closed_mapping_returns_its_addresses(fd: int) -> None:
    mapped = MappedMemory(fd, NUM_BYTES)
    at = f"{address(mapped):x}-"
    assert at in Path("/proc/self/maps").read_text()
    mapped.close()
    assert at not in Path("/proc/self/maps").read_text()


def test_a_descriptor_that_cannot_be_mapped_is_an_error() -> None:
    with pytest.raises(OSError, match=f"{NUM_BYTES:,} bytes of memory cannot be mapped"):
        MappedMemory(-1, NUM_BYTES)


def test_an_arena_is_allocated_in_huge_pages_that_contain_zeros(fd: int) -> None:
    probe = MappedMemory(fd, HUGE_BYTES)
    os.posix_fallocate(fd, 0, 1)
    if not probe.advise(25):  # MADV_COLLAPSE
        pytest.skip("needs huge pages for shared memory")
    done: list[int] = []
    arena = create_memfd(ArenaShape(0, 1, 2 * HUGE_BYTES, 8, 1), done.append)
    try:
        size = os.fstat(arena).st_size
        assert os.fstat(arena).st_blocks * 512 == done[-1] == size
        mapped = map_all(arena)
        assert huge_bytes(address(mapped)) == size // HUGE_BYTES * HUGE_BYTES
        assert not any(mapped.memory[8192:])
        mapped.close()
    finally:
        os.close(arena)


def test_memory_without_huge_pages_is_allocated_in_small_ones(tmp_path: Path) -> None:
    file = os.open(tmp_path / "on-disk", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, NUM_BYTES)
    allocator = HugePageAllocator(file, NUM_BYTES)
    allocator.allocate(0, 4 * HUGE_BYTES)
    allocator.allocate(4 * HUGE_BYTES, NUM_BYTES - 4 * HUGE_BYTES)
    allocator.close()
    assert os.fstat(file).st_blocks * 512 >= NUM_BYTES
    mapped = MappedMemory(file, NUM_BYTES)
    assert mapped.advise(MADV_POPULATE_WRITE)
    os.close(file)


LIMITED = """
import os, resource, sys
from ftrun.wire.shared_memory.arena import Arena, ArenaShape, create_memfd
from ftrun.wire.shared_memory.mapped_memory import HugePageAllocator, MappedMemory

kind, NUM_BYTES = getattr(resource, sys.argv[1]), 256 << 20
limit = 192 << 20
if kind == resource.RLIMIT_AS:
    limit += 4096 * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(kind, (limit, limit))
fd = create_memfd(ArenaShape(0, 1, NUM_BYTES // 2, 8, 1))
assert os.fstat(fd).st_blocks * 512 == os.fstat(fd).st_size > NUM_BYTES
if kind == resource.RLIMIT_DATA:
    Arena(fd, writable=True).memory[-1] = 7
try:
    MappedMemory(fd, os.fstat(fd).st_size)
    print("mapped")
except OSError as error:
    print(os.strerror(error.errno))
"""


@pytest.mark.parametrize(
    ("limit", "result"), [("RLIMIT_DATA", "mapped"), ("RLIMIT_AS", "Cannot allocate memory")]
)
def test_an_arena_is_no_data_and_needs_no_addresses_to_be_allocated(
    limit: str, result: str
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, limit],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.stdout == f"{result}\n", run.stderr


def test_huge_pages_end_when_they_take_too_long(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mapped_memory._SLOWEST_BYTES_S > NUM_LANES * smp_client._SLOWEST_BYTES_S, "a deadline"
    calls, now_s, part_s = [], 0.0, [0.002, 0.2, 0.2, 0.002]

    def advise(mapped: MappedMemory, advice: int, at: int, num_bytes: int) -> bool:
        nonlocal now_s
        calls.append(at)
        now_s += part_s[len(calls) - 1]
        return True

    monkeypatch.setattr(MappedMemory, "advise", advise)
    monkeypatch.setattr(clock, "now_s", lambda: now_s)
    allocator = HugePageAllocator(fd, NUM_BYTES)
    for at in range(0, 4 * HUGE_BYTES, HUGE_BYTES):
        allocator.allocate(at, HUGE_BYTES)
    allocator.close()
    assert calls == [0, HUGE_BYTES, 2 * HUGE_BYTES], "one delay is allowed"
    assert os.fstat(fd).st_blocks * 512 == 4 * HUGE_BYTES
