"""Copies of a snapshot from a device, by the code of the worker, and their cost to other work.

The rate is that of a rank here, which has a second thread if there are four cores, and that of one
thread. The sums are those by which ranks with equal tensors are compared.
"""

import mmap
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from bench_notes import Notes
from check_gpu_device import wait

from ftrun.worker.capture import device_copies
from ftrun.worker.capture.device_sources import DeviceCopies, DeviceSource, SumChunk

Start = Callable[[], Future[None]]

NUM_TENSORS = 32
PIECES_KIB = (4096, 256, 16384)
"""The one in use on devices first."""

BLOCK_S = 0.15
"""Work that is timed as a whole, several times during one copy."""

ROUNDS = 3
PART_S = 8.0
"""A slow device has fewer rounds."""


class Ring:
    """Copies all tensors of a state into shared memory, as the copy thread does."""

    def __init__(self, device: str, num_bytes: int) -> None:
        size = num_bytes // NUM_TENSORS // mmap.PAGESIZE * mmap.PAGESIZE
        self.num_bytes = size * NUM_TENSORS
        self._tensors = [torch.rand(size // 4, device=device) for _ in range(NUM_TENSORS)]
        target = np.frombuffer(mmap.mmap(-1, self.num_bytes), dtype=np.uint8)
        self._targets = np.split(target, NUM_TENSORS)
        self._device = self._tensors[0].device
        self._thread = ThreadPoolExecutor(1)

    def copies(self, piece_kib: int) -> Start:
        """A function that starts a copy of all bytes in the copy thread."""
        copies, num_pieces = self._made(piece_kib << 10)
        table = memoryview(bytearray(8 * num_pieces)).cast("Q")

        def start() -> Future[None]:
            copies.begin((), ())
            return self._thread.submit(copies.copy, table, lambda: None)

        return start

    def differing(self) -> list[str]:
        """Tensors that are not equal to the last copy."""
        copies, _ = self._made(PIECES_KIB[0] << 10)
        return sorted(copies.differing())

    def is_pinned(self) -> bool:
        device = device_copies.device_at(self._device)
        return device is not None and all(one.memory.is_pinned() for one in device._buffers)

    def sums(self) -> dict[str, float | bool]:
        """Seconds for a GB, whether two are equal, and whether they show one flipped bit."""
        chunk = SumChunk(self._tensors, ())

        def read() -> torch.Tensor:
            return chunk.joined().cpu()

        first = read()
        times_s = [seconds_of(read) for _ in range(ROUNDS)]
        is_repeatable = torch.equal(read(), first)
        words = self._tensors[NUM_TENSORS // 2].view(torch.int32)
        words[len(words) // 3] ^= 1 << 12
        is_found = not torch.equal(read(), first)
        words[len(words) // 3] ^= 1 << 12
        gb_s = statistics.median(times_s) / (self.num_bytes / 1e9)
        return {"sums_s_per_gb": gb_s, "repeatable": is_repeatable, "flipped_bit_found": is_found}

    def _made(self, piece_bytes: int) -> tuple[DeviceCopies, int]:
        sources, count = [], 0
        for number, (tensor, target) in enumerate(zip(self._tensors, self._targets, strict=True)):
            ats = range(0, len(target), piece_bytes)
            pieces = [(count + i, target[at : at + piece_bytes]) for i, at in enumerate(ats)]
            sources.append(DeviceSource(f"tensor {number}", tensor, target, pieces))
            count += len(pieces)
        return DeviceCopies(sources), count


def beside(start: Start, block: Callable[[], None]) -> list[float]:
    """Seconds of each block of work while one copy runs."""
    copied, found = start(), list[float]()
    while not copied.done():
        found.append(seconds_of(block))
    copied.result()
    return found[:-1] or found  # the copy ended during the last one


@contextmanager
def one_thread() -> Iterator[None]:
    """No second thread copies inside the block."""
    before, device_copies.CORES_FOR_TWO_THREADS = device_copies.CORES_FOR_TWO_THREADS, 1 << 20
    device_copies._second_thread.cache_clear()
    try:
        yield
    finally:
        device_copies.CORES_FOR_TWO_THREADS = before
        device_copies._second_thread.cache_clear()


def seconds_of(block: Callable[[], object]) -> float:
    started_s = time.monotonic()
    block()
    return time.monotonic() - started_s


def rounds() -> Iterator[int]:
    started_s = time.monotonic()
    for number in range(ROUNDS):
        if number and time.monotonic() - started_s > PART_S:
            return
        yield number


def measure(device: str, gb: float, notes: Notes) -> None:
    """Write each figure as soon as it is known."""
    ring = Ring(device, int(gb * 1e9))
    start = ring.copies(PIECES_KIB[0])
    first_s, *times_s = (seconds_of(lambda: start().result()) for _ in range(1 + ROUNDS))
    rate = ring.num_bytes / 1e9 / statistics.median(times_s)
    facts = {"first_s": first_s, "is_pinned": ring.is_pinned(), "wrong": ring.differing()}
    facts["has_two_threads"] = device_copies._second_thread() is not None
    notes.write("ring", found={"bytes": ring.num_bytes, "gb_per_s": rate, **facts})
    with one_thread():
        times_s = [seconds_of(lambda: start().result()) for _ in range(ROUNDS)]
    rate = ring.num_bytes / 1e9 / statistics.median(times_s)
    notes.write("ring", found={"one_thread_gb_per_s": rate, **ring.sums()})
    for name, block in (("matmul", matmuls(device)), ("small", small_kernels(device))):
        for piece_kib in PIECES_KIB if name == "small" else PIECES_KIB[:1]:
            start = ring.copies(piece_kib)
            alone_s, beside_s = list[float](), list[float]()
            for _ in rounds():
                alone_s += [seconds_of(block) for _ in range(3)]
                beside_s += beside(start, block)
            slower = statistics.median(beside_s) / statistics.median(alone_s) - 1
            both = {"alone_s": alone_s, "beside_s": beside_s, "slower": slower}
            notes.write("ring", found={f"{name}_{piece_kib}_kib": both})


def matmuls(device: str) -> Callable[[], None]:
    side = 8192 if device == "cuda" else 64
    factor = torch.randn(side, side, device=device).to(torch.bfloat16)

    def block(count: int) -> None:
        for _ in range(count):
            factor @ factor
        wait(device)

    block(3)
    each_s = seconds_of(lambda: block(10)) / 10
    count = max(1, int((BLOCK_S if device == "cuda" else 0.01) / each_s))
    return lambda: block(count)


def small_kernels(device: str) -> Callable[[], None]:
    count = 20_000 if device == "cuda" else 50
    value = torch.zeros(1, device=device)

    def block() -> None:
        for _ in range(count):
            value.add_(1.0)
        wait(device)

    block()
    return block
