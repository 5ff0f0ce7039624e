"""Copies tensors of devices into a slot and back, through buffers in page-locked memory.

Runs in:  worker: marks and boundary copies in the training thread, other copies in the copy thread.

A copy between a device and page-locked memory runs while the device works. The copy thread
waits for its event without the interpreter lock. It then copies the bytes from the buffer to the
slot and computes their digest while they are in the CPU cache. A second thread does half of this,
if the rank has cores for both: they reach 1.5 times the rate of one (two cores, 2026-11).

Rule 1: copies run in a stream of their own. It waits for the work queued up to the boundary, not
        for the forward that follows.
Rule 2: a buffer is reused after the event of its last copy, and after its bytes were used.
Rule 3: an event is awaited on a device only after it is recorded, because an event that was never
        recorded does not make a stream wait.
Rule 4: a device is the current one while its streams are used. Otherwise torch's guards return to
        the device before by a call that makes a context there, in each rank of the node.
Rule 5: a tensor that the stream reads is referenced until its bytes have arrived.
"""

import functools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ftrun.worker.state.tensors import byte_view, drop_error, on_device

BUFFER_BYTES = 32 << 20
NUM_BUFFERS = 4
NUM_BUFFERS_OF_OTHERS = 2
"""Buffers of each device after the first one."""
BOUNDARY_BYTES = 64 << 20
"""Bytes of boundary sources for which the training thread does not wait."""

CORES_FOR_TWO_THREADS = 4
"""A rank with at least this many cores copies with two threads."""

_SMALLEST_BITS = 16
_MAX_ERROR_CHARS = 100
_LIMIT_TEXTS = ("out of memory", "os call failed")
"""In errors of torch if page-locked memory is at its limit: cudaErrorMemoryAllocation of
cudaHostAlloc, and cudaErrorOperatingSystem of cudaHostRegister."""
_ADVICE = (
    ". Raise the limit of locked memory (ulimit -l, LimitMEMLOCK, --ulimit memlock=-1) or free "
    "memory of the host, and start the run again"
)
_FAILED = "page-locked memory cannot be allocated"

_log = logging.getLogger(__name__)

Bytes = Any
"""[num_bytes] uint8 of numpy."""
Take = Callable[[Bytes], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a chunk, and their target in the slot."""

    name: str
    begin: int
    target: Bytes
    index: int = -1
    """Of the piece that these bytes complete; -1: none."""
    piece: Bytes | None = None
    """All bytes of that piece in the slot."""

    @property
    def end(self) -> int:
        return self.begin + len(self.target)


@dataclass(frozen=True, slots=True)
class DeviceChunk:
    """Tensors of one device whose bytes are copied at once, one after another."""

    tensors: Sequence[torch.Tensor]
    parts: Sequence[Part]

    @property
    def num_bytes(self) -> int:
        return sum(one.nbytes for one in self.tensors)

    def joined(self) -> torch.Tensor:
        """[num_bytes] uint8 on the device; a view if the only tensor is contiguous."""
        found = [byte_view(one.contiguous()) for one in self.tensors]
        return found[0] if len(found) == 1 else torch.cat(found)


@dataclass(slots=True)
class _Buffer:
    memory: torch.Tensor
    done: torch.Event


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A copy to the host; `source` is referenced until it has arrived."""

    done: torch.Event
    source: torch.Tensor
    content: Bytes
    take: Take
    buffer: _Buffer | None


class Device:
    """The copy stream of one device, and its buffers; one thread at a time uses them."""

    def __init__(self, device: torch.device, *, num_buffers: int = NUM_BUFFERS) -> None:
        self.device = device
        self.side = torch.Stream(device)
        self._num_buffers = num_buffers
        self._buffers: deque[_Buffer] = deque()
        """Free ones, the longest unused first."""
        self._num_made = 0
        self._boundary: _Buffer | None = None
        self._pending: deque[_InFlight] = deque()

    def mark(self) -> torch.Event:
        """An event after all work that is queued in this thread's current stream."""
        with on_device(self.device):
            return torch.accelerator.current_stream(self.device).record_event()

    def follow(self) -> None:
        """Let the copies wait for the work of this thread's current stream."""
        with on_device(self.device):
            self.side.wait_event(self.mark())

    def precede(self, event: torch.Event) -> None:
        """Let this thread's current stream wait for an event of the copies."""
        with on_device(self.device):
            torch.accelerator.current_stream(self.device).wait_event(event)

    def record(self) -> torch.Event:
        with on_device(self.device):
            return self.side.record_event()

    def synchronize(self) -> None:
        with on_device(self.device):
            torch.accelerator.synchronize(self.device)

    def clone(self, chunk: DeviceChunk) -> DeviceChunk:
        """The bytes of a chunk in other memory of this device; the copies wait for it."""
        with on_device(self.device), self.side:
            joined = chunk.joined()
            is_view = len(chunk.tensors) == 1 and chunk.tensors[0].is_contiguous()
            return DeviceChunk([joined.clone() if is_view else joined], chunk.parts)

    def has_room(self, num_bytes: int, *, reusable_bytes: int) -> bool:
        """Whether these bytes fit, and a tenth of the device stays free.

        `reusable_bytes`: earlier allocations that the allocator of torch may still hold.
        """
        memory = getattr(torch.get_device_module(self.device), "mem_get_info", None)
        if memory is None:
            return False
        free_bytes, total_bytes = memory(self.device)
        return bool(free_bytes + reusable_bytes - num_bytes >= total_bytes / 10)

    def prepare(self) -> None:
        while self._num_made < self._num_buffers:
            self._buffers.append(self._made(BUFFER_BYTES))
            self._num_made += 1

    # --- to the host ------------------------------------------------------------------------

    def keep(self, chunk: DeviceChunk, take: Take) -> None:
        """Queue a copy into the boundary buffer, which holds one chunk until `drain`."""
        if self._boundary is None or self._boundary.memory.numel() < chunk.num_bytes:
            self._boundary = self._made(chunk.num_bytes)
        self._queue(chunk, take, self._boundary, freed=None)

    def fetch(self, chunk: DeviceChunk, take: Take) -> None:
        """Queue the copy of a chunk; if no buffer is free, deliver the oldest chunk first.

        `take` receives the bytes in `fetch` or `drain`; they are valid during the call.
        """
        buffer = self._free_buffer(chunk.num_bytes)
        try:
            self._queue(chunk, take, buffer, freed=buffer)
        except BaseException:
            self._give_back(buffer)
            raise

    def drain(self) -> None:
        while self._pending:
            self._deliver()

    def abandon(self) -> None:
        """Wait for the queued copies and drop them; after an error, there may be some."""
        if self._pending:
            self.side.synchronize()
        while self._pending:
            self._give_back(self._pending.popleft().buffer)

    def _queue(
        self, chunk: DeviceChunk, take: Take, buffer: _Buffer, *, freed: _Buffer | None
    ) -> None:
        with on_device(self.device), self.side:
            source = chunk.joined()
            memory = buffer.memory[: chunk.num_bytes]
            memory.copy_(source, non_blocking=True)
            buffer.done.record(self.side)
        self._pending.append(_InFlight(buffer.done, source, memory.numpy(), take, freed))

    def _deliver(self) -> None:
        oldest = self._pending.popleft()
        try:
            oldest.done.synchronize()
            oldest.take(oldest.content)
        finally:
            self._give_back(oldest.buffer)

    def _give_back(self, buffer: _Buffer | None) -> None:
        if buffer is not None:
            self._buffers.append(buffer)

    # --- to the device ----------------------------------------------------------------------

    def put(self, target: torch.Tensor, fill: Callable[[int, int, Bytes], None]) -> None:
        """Fill a tensor of this device, with any strides; its readers must wait for `record` then.

        `fill` writes the bytes from the first to the second offset of the contiguous tensor into a
        buffer; the offsets are multiples of `BUFFER_BYTES`.
        """
        with on_device(self.device), self.side:
            dense = target
            if not target.is_contiguous():
                dense = torch.empty(target.shape, dtype=target.dtype, device=target.device)
            into = byte_view(dense)
            for begin in range(0, into.numel(), BUFFER_BYTES):
                end = min(begin + BUFFER_BYTES, into.numel())
                buffer = self._free_buffer(end - begin)
                try:
                    buffer.done.synchronize()
                    memory = buffer.memory[: end - begin]
                    fill(begin, end, memory.numpy())
                    into[begin:end].copy_(memory, non_blocking=True)
                    buffer.done.record(self.side)
                finally:
                    self._buffers.append(buffer)
            if dense is not target:
                target.copy_(dense)

    # --- buffers ----------------------------------------------------------------------------

    def _free_buffer(self, num_bytes: int) -> _Buffer:
        """The longest unused buffer, at least of this size."""
        while not self._buffers and self._num_made >= self._num_buffers:
            self._deliver()  # Rule 2
        if self._buffers and self._num_made >= self._num_buffers:
            found = self._buffers.popleft()
            if found.memory.numel() >= num_bytes:
                return found
            found.done.synchronize()
            self._num_made -= 1
        made = self._made(num_bytes)
        self._num_made += 1
        return made

    def _made(self, num_bytes: int) -> _Buffer:
        return _Buffer(_host_memory(num_bytes, self.device), torch.Event(self.device))


_devices: dict[torch.device, Device | None] = {}


def device_at(device: torch.device) -> Device | None:
    """The copies of a device; None if it has no streams and events."""
    if device not in _devices:
        _devices[device] = _opened(device)
    return _devices[device]


def synchronize(tensors: Iterable[torch.Tensor]) -> None:
    for device in {one.device for one in tensors if not one.is_cpu}:
        if (found := device_at(device)) is not None:
            found.synchronize()


def _opened(device: torch.device) -> Device | None:
    num_buffers = NUM_BUFFERS_OF_OTHERS if any(_devices.values()) else NUM_BUFFERS
    try:
        made = Device(device, num_buffers=num_buffers)
        made.mark()
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        _log.warning(
            "%s has no streams, so its tensors are copied at the boundary: %s", device, error
        )
        return None
    return made


def in_two_threads(work: Callable[[Sequence[T]], None], items: Sequence[T]) -> None:
    """Do the work on all items, half of them in a second thread; returns when both have ended.

    Items are of about equal cost. The work holds the interpreter lock for a small part of its time.
    """
    second = _second_thread() if len(items) > 1 else None
    if second is None:
        work(items)
        return
    middle = len(items) // 2
    try:
        others = second.submit(work, items[middle:])
    except RuntimeError:  # the interpreter ends, and has ended the second thread
        work(items)
        return
    try:
        work(items[:middle])
    finally:
        others.result()


@functools.cache
def _second_thread() -> ThreadPoolExecutor | None:
    """None if the ranks of this node have fewer than `CORES_FOR_TWO_THREADS` each."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if len(os.sched_getaffinity(0)) < CORES_FOR_TWO_THREADS * num_ranks:
        return None
    return ThreadPoolExecutor(1, "ftrun-copy-2")


_refusals: list[str] = []


def slow_reason() -> str:
    """Why copies of this process go through pageable memory, and what to do; empty if none does."""
    return _refusals[0] if _refusals else ""


def _note_refusal(error: RuntimeError) -> None:
    if _refusals:
        return
    first, _, _ = str(error).partition("\n")
    is_limit = any(text in first.lower() for text in _LIMIT_TEXTS)
    what, advice = ("the system refuses page-locked memory", _ADVICE) if is_limit else (_FAILED, "")
    _refusals.append(
        f"{what} ({first[:_MAX_ERROR_CHARS]}), so copies between devices and snapshots are slower"
        f"{advice}"
    )
    _log.warning("%s", _refusals[0])


def _host_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Page-locked memory, rounded up to a power of two; pageable if there is none."""
    size = 1 << max(_SMALLEST_BITS, (num_bytes - 1).bit_length())
    # The script may have called torch.set_default_device.
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        _note_refusal(error)
        drop_error(device)
        return torch.empty(size, dtype=torch.uint8, device="cpu")
