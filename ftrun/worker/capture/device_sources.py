"""Copies the sources of one snapshot from their devices into a slot.

Runs in:  worker: `begin` and `precede` in the training thread, `copy` in the copy thread.

Small sources are joined on the device, because a copy per tensor costs more than its bytes. A large
source is cut at multiples of the piece size, so that each digest is computed while its piece is in
the CPU cache. The chunks of several devices alternate.

Staged sources are cloned on their device at the boundary. The training then waits for the clones
and not for the copies to the host. If a device has no room for clones, it is not staged.

A limit of the rate makes the copy thread pause between chunks, because traffic between GPUs and the
network uses the same link. The training thread never pauses in `begin`; in `precede` it waits until
the last read is queued, so a limited copy makes this wait longer.
"""

import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from ftrun import clock
from ftrun.worker.capture.device_copies import (
    BOUNDARY_BYTES,
    BUFFER_BYTES,
    Bytes,
    Device,
    DeviceChunk,
    Part,
    Take,
    device_at,
    in_two_threads,
)
from ftrun.worker.capture.lazy_check import items_at
from ftrun.worker.state.tensors import byte_view

_log = logging.getLogger(__name__)

_SUM_BYTES = 32
_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class DeviceSource:
    """A lazy source on a device."""

    name: str
    tensor: torch.Tensor
    target: Bytes
    """Its bytes in the slot."""
    pieces: Sequence[tuple[int, Bytes]] = ()
    """Index and bytes in the slot of each piece; empty if it shares a piece with others."""


@dataclass(frozen=True, slots=True)
class SumChunk(DeviceChunk):
    """Sums over tensors of one device, four numbers of 8 bytes for each, in place of their bytes.

    Equal tensors have equal sums on every device, because the sums are of integers.
    """

    sampled: Sequence[Sequence[torch.Tensor]] = ()
    """Views of more tensors by `bits_of`, those of one item size together. The sums of each group
    are over some items of every tensor, see `items_at`."""
    where: float = 0.0

    @property
    def num_bytes(self) -> int:
        return _SUM_BYTES * (len(self.tensors) + len(self.sampled))

    def joined(self) -> torch.Tensor:
        samples = (
            torch.cat([items_at(bits, self.where) for bits in group]) for group in self.sampled
        )
        return byte_view(torch.cat([_sums(one) for one in (*self.tensors, *samples)]))


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """[4] int64: the sum of all words, and sums that are weighted by positions."""
    words = byte_view(tensor.contiguous())
    if words.numel() % 4 == 0:
        words = (words if words.storage_offset() % 4 == 0 else words.clone()).view(torch.int32)
    size = words.numel() // _COLUMNS * _COLUMNS
    table, rest = words[:size].view(-1, _COLUMNS), words[size:]
    by_row, by_column = table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)
    values = (by_row, by_column, rest.to(torch.int64))
    return torch.stack([by_row.sum(), *(_weighted(one) for one in values)])


def _weighted(values: torch.Tensor) -> torch.Tensor:
    return (values * torch.arange(1, values.numel() + 1, device=values.device)).sum()


class _Pace:
    """Limits the mean rate of copies by pauses of the calling thread; 0: no limit."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._next_s = 0.0
        self._is_lifted = threading.Event()

    def wait(self, num_bytes: int) -> None:
        """Wait until earlier bytes have had their time; called before these bytes are queued."""
        if self._bytes_per_s:
            self._is_lifted.wait(max(0.0, self._next_s - clock.now_s()))
            self._next_s = max(clock.now_s(), self._next_s) + num_bytes / self._bytes_per_s

    def lift(self) -> None:
        self._is_lifted.set()


class _OfDevice:
    """The lazy sources of one device, in chunks."""

    def __init__(self, device: Device, sources: Sequence[DeviceSource]) -> None:
        self.device = device
        self.packs = list(_packs([one for one in sources if not one.pieces]))
        self.chunks = [chunk for one in sources if one.pieces for chunk in _chunks(one)]
        self.copied: torch.Event | None = None
        """Recorded after the last read of the sources for the present snapshot is queued."""
        self.pace = _Pace(0.0)
        self.is_staged = False
        self._clones: list[DeviceChunk] = []
        self._reusable_bytes = 0

    def stage(self) -> bool:
        chunks = (*self.packs, *self.chunks)
        num_bytes = sum(chunk.num_bytes for chunk in chunks)
        if self.device.has_room(num_bytes, reusable_bytes=self._reusable_bytes):
            with contextlib.suppress(torch.OutOfMemoryError):
                self._clones = [self.device.clone(chunk) for chunk in chunks]
                self._reusable_bytes, self.is_staged = num_bytes, True
                self.copied = self.device.record()
        return self.is_staged

    def unstage(self) -> None:
        self.is_staged, self._clones = False, []

    def to_read(self) -> tuple[list[DeviceChunk], list[DeviceChunk]]:
        if not self.is_staged:
            return self.packs, self.chunks
        return self._clones[: len(self.packs)], self._clones[len(self.packs) :]


NO_DEVICE_MEMORY = (
    "no snapshots: the device lacks memory to copy small or non-contiguous tensors. Free 128 MiB; "
    "snapshots then resume"
)


class DeviceCopies:
    """Copies from devices into one slot, for one set of lazy sources."""

    def __init__(self, sources: Sequence[DeviceSource]) -> None:
        by_device: dict[torch.device, list[DeviceSource]] = {}
        for one in sources:
            by_device.setdefault(one.tensor.device, []).append(one)
        self._of_device = [
            _OfDevice(device, group)
            for key, group in by_device.items()
            if (device := device_at(key)) is not None
        ]
        self.issued = threading.Event()
        """Set when every read of the present snapshot is queued, or will not be made."""
        self._kept: list[Device] = []
        """Devices of the boundary sources of the present snapshot."""
        self._num_waiting = 0
        """Chunks that are not in the slot yet, and whose pieces hold several tensors."""
        self._digest_packs: Callable[[], None] = lambda: None
        self._sums: tuple[_OfDevice, DeviceChunk, Take] | None = None
        """Read with the present snapshot."""

    def __bool__(self) -> bool:
        return bool(self._of_device or self._kept)

    @property
    def devices(self) -> list[Device]:
        return [one.device for one in self._of_device]

    def read_sums(self, key: torch.device, chunk: SumChunk, take: Take) -> bool:
        """Also read the sums of lazy sources, or of parts of them, as of the present boundary.

        Called after `begin`, and before `copy`, in which `take` receives the sums. Returns whether
        they will be read.
        """
        one = next((one for one in self._of_device if one.device.device == key), None)
        if one is None:
            return False
        self._sums = (one, chunk, take)
        if one.is_staged:  # an optimizer may step before `copy`
            try:
                self._sums = (one, one.device.clone(chunk), take)
            except Exception:  # noqa: BLE001 - as in `_queue`
                _log.warning("sums of %s cannot be read", key, exc_info=True)
                self._sums = None
                return False
            one.copied = one.device.record()
        return True

    def lift_limit(self) -> None:
        """End the limit of the present copy, because the training waits for its end."""
        for one in self._of_device:
            one.pace.lift()

    def begin(
        self,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        *,
        is_staged: bool = False,
        gb_s: float = 0.0,
    ) -> None:
        """Queue the boundary copies; the copies of `copy` see the state of this moment.

        The streams of the training wait on the device. This thread waits only if the sources do
        not fit the boundary buffer. `is_staged`: clone the lazy sources on their devices, if there
        is room. `gb_s`: limit of the rate of `copy` for each device; 0: none.
        """
        by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for pair in zip(sources, targets, strict=True):
            by_device.setdefault(pair[0].device, []).append(pair)
        self.issued.clear()
        self._kept, self._sums = [], None
        self._num_waiting = 0
        for device in self.devices:
            device.abandon()
            device.follow()
        for key, pairs in by_device.items():
            device_of_pairs = device_at(key)
            if device_of_pairs is None:
                for source, target in pairs:
                    target.copy_(source)
            else:
                self._keep(device_of_pairs, pairs)
        for one in self._of_device:
            one.unstage()
            one.pace = _Pace(gb_s * 1e9)
        # A device without room has its reads queued by `copy`.
        if is_staged and all(one.stage() for one in self._of_device):
            self.issued.set()

    def _keep(self, device: Device, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        sources = [
            DeviceSource("", source, byte_view(target).numpy())
            for source, target in pairs
            if source.numel()
        ]
        if not sources:
            return
        if device not in self.devices:
            device.abandon()
            device.follow()
        if sum(len(one.target) for one in sources) > BOUNDARY_BYTES:
            for source in sources:
                for chunk in _chunks(source):
                    device.fetch(chunk, functools.partial(_store, chunk, None))
            device.drain()
            return
        chunk = _packed(sources)
        device.keep(chunk, functools.partial(self._store_pack, chunk))
        self._num_waiting += 1
        device.precede(device.record())
        self._kept.append(device)

    def copy(self, table: memoryview, digest_packs: Callable[[], None]) -> None:
        """Copy the lazy sources; returns when all bytes are in the slot.

        `table` receives the digests of the pieces of large sources. `digest_packs` is called once
        all small and boundary sources are in the slot.
        """
        devices = list({id(one): one for one in (*self._kept, *self.devices)}.values())
        self._num_waiting += sum(len(one.packs) for one in self._of_device)
        self._digest_packs = digest_packs
        if not self._num_waiting:
            digest_packs()
        try:
            self._queue(table)
            for device in devices:
                device.drain()
        except BaseException:
            for device in devices:
                device.abandon()
            raise
        finally:
            self._sums = None
            for one in self._of_device:
                one.unstage()

    def _queue(self, table: memoryview) -> None:
        """Queue all reads of the lazy sources, or of their clones."""
        to_read = [(one, *one.to_read()) for one in self._of_device]
        for one, chunk in _in_turn([(one, packs) for one, packs, _ in to_read]):
            one.pace.wait(chunk.num_bytes)
            one.device.fetch(chunk, functools.partial(self._store_pack, chunk))
        for one, chunk in _in_turn([(one, chunks) for one, _, chunks in to_read]):
            one.pace.wait(chunk.num_bytes)
            one.device.fetch(chunk, functools.partial(_store, chunk, table))
        if self._sums is not None:
            of_sums, chunk, take = self._sums
            try:
                of_sums.device.fetch(chunk, take)
            except Exception:  # noqa: BLE001 - without memory for sums, the bytes are still right
                _log.warning("sums of %s cannot be read", of_sums.device.device, exc_info=True)
        for one in self._of_device:
            if not one.is_staged:
                one.copied = one.device.record()
        self.issued.set()

    def _store_pack(self, chunk: DeviceChunk, content: Bytes) -> None:
        _store(chunk, None, content)
        self._num_waiting -= 1
        if not self._num_waiting:
            self._digest_packs()

    def precede(self) -> None:
        """Let the current streams wait for the reads of the lazy sources.

        This thread waits until they are queued: that is, until all but the last chunks are copied.
        """
        self.issued.wait()
        for one in self._of_device:
            if one.copied is not None:
                one.device.precede(one.copied)

    def differing(self) -> set[str]:
        """Names of lazy sources that differ in any byte from the slot; waits for the devices."""
        found: set[str] = set()
        for one in self._of_device:
            one.device.synchronize()
            for chunk in (*one.packs, *one.chunks):
                one.device.fetch(chunk, functools.partial(_compare, chunk, found))
            one.device.drain()
        return found


def _in_turn(
    chunks: Sequence[tuple[_OfDevice, Sequence[DeviceChunk]]],
) -> Iterator[tuple[_OfDevice, DeviceChunk]]:
    pairs = [[(one, chunk) for chunk in its] for one, its in chunks]
    for turn in itertools.zip_longest(*pairs):
        yield from (pair for pair in turn if pair is not None)


def _store(chunk: DeviceChunk, table: memoryview | None, content: Bytes) -> None:
    def store(parts: Sequence[Part]) -> None:
        for part in parts:
            np.copyto(part.target, content[part.begin : part.end])
            if table is not None and part.piece is not None:
                table[part.index] = xxhash.xxh3_64_intdigest(part.piece)

    if table is None:  # its parts are small, so threads would wait for the interpreter lock
        store(chunk.parts)
    else:
        in_two_threads(store, chunk.parts)


def _compare(chunk: DeviceChunk, found: set[str], content: Bytes) -> None:
    for part in chunk.parts:
        if not np.array_equal(part.target, content[part.begin : part.end]):
            found.add(part.name)


def _packs(sources: Sequence[DeviceSource]) -> Iterator[DeviceChunk]:
    group: list[DeviceSource] = []
    num_bytes = 0
    for one in sources:
        if group and num_bytes + len(one.target) > BUFFER_BYTES:
            yield _packed(group)
            group, num_bytes = [], 0
        group.append(one)
        num_bytes += len(one.target)
    if group:
        yield _packed(group)


def _packed(sources: Sequence[DeviceSource]) -> DeviceChunk:
    parts, begin = [], 0
    for one in sources:
        parts.append(Part(one.name, begin, one.target))
        begin += len(one.target)
    return DeviceChunk([one.tensor for one in sources], parts)


def _chunks(source: DeviceSource) -> Iterator[DeviceChunk]:
    """Chunks of one large source; parts end where its pieces end."""
    ends = list(itertools.accumulate(len(piece) for _, piece in source.pieces))
    at = index = 0
    for tensor in slices(source.tensor, BUFFER_BYTES):
        parts, begin = [], at
        while at < begin + tensor.nbytes:
            if index == len(ends):
                end = begin + tensor.nbytes
                parts.append(Part(source.name, at - begin, source.target[at:end]))
            else:
                end = min(ends[index], begin + tensor.nbytes)
                number, piece = source.pieces[index] if end == ends[index] else (-1, None)
                parts.append(Part(source.name, at - begin, source.target[at:end], number, piece))
                index += end == ends[index]
            at = end
        yield DeviceChunk([tensor], parts)


def slices(tensor: torch.Tensor, most_bytes: int) -> Iterator[torch.Tensor]:
    """Cut a tensor into parts whose bytes, one after another, are those of the contiguous tensor.

    A part has at most `most_bytes`, which is a multiple of the item size.
    """
    if tensor.nbytes <= most_bytes:
        yield tensor
        return
    if tensor.is_contiguous():
        yield from torch.split(byte_view(tensor), most_bytes)
        return
    num_rows = max(1, most_bytes // (tensor.nbytes // tensor.shape[0]))
    for row in range(0, tensor.shape[0], num_rows):
        part = tensor[row : row + num_rows]
        yield from (part,) if part.nbytes <= most_bytes else slices(part[0], most_bytes)
