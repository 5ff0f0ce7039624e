"""Copies boxes from the shards of a version into tensors.

Runs in:  worker, training thread; no collective.
Gives:    the tensors, filled in place: plain ones whole, DTensors their local part.

All reads are announced in one order, that of the shards. Each run of items is read from one holder
of its chunk. If a digest does not match, it is read from the next holder.

A restore copies to a device through the page-locked buffers of the device. No copy of a snapshot
uses them then: a session restores before it captures, or waits for the capture first.
"""

import logging
import warnings
from collections.abc import Iterable, Mapping
from functools import partial

import torch

from ftrun.errors import SnapshotCorrupt
from ftrun.sharding.partition import StoredRegion
from ftrun.sharding.source_index import MOST_BYTES, BoxCopy, ByteRange, WholeTensor
from ftrun.snapshot.layout import SMALL_BYTES
from ftrun.worker.capture.device_copies import Bytes, Device, device_at
from ftrun.worker.reshard.source import CheckedShards
from ftrun.worker.state.tensors import DTYPES, box_of, copyable, local_tensor

_log = logging.getLogger(__name__)


def fill(
    wanted: Mapping[str, torch.Tensor], saved: Mapping[str, WholeTensor], shards: CheckedShards
) -> int:
    """Copy saved tensors into the wanted ones of the same names and shapes; return bytes read.

    Raises:
        SnapshotCorrupt: a piece differs from the captured one, and no other rank holds a copy; some
            tensors may be filled already.
    """
    copies: list[tuple[BoxCopy, torch.Tensor]] = []
    for name, tensor in wanted.items():
        local, box = local_tensor(tensor, name), box_of(tensor)
        if box is not None and not box.is_empty:
            region = StoredRegion(name, box, 0, local.stride())
            copies += [(copy, local) for copy in saved[name].copies_into(region)]
    return copy_boxes(copies, shards, is_restore=True)


def ranges_of(copies: Iterable[BoxCopy]) -> list[ByteRange]:
    """The reads of `copy_boxes`, in its order; the targets do not matter."""
    parts = (part for copy in copies for part in copy.cut_to(MOST_BYTES))
    return sorted((part.bytes_in(part.holders[0]) for part in parts), key=_in_order)


def copy_boxes(
    copies: Iterable[tuple[BoxCopy, torch.Tensor]],
    shards: CheckedShards,
    *,
    is_announced: bool = False,
    is_restore: bool = False,
) -> int:
    """Copy boxes, each into its target; return the number of shard bytes read. Raises as `fill`.

    Items of a target count from its first one, in its memory.

    Args:
        copies: and their targets.
        shards: their sources.
        is_announced: the caller has announced these reads, and further ones.
        is_restore: a session restores, so the buffers of devices are not in use.
    """
    parts = [(part, target) for copy, target in copies for part in copy.cut_to(MOST_BYTES)]
    reads = [(part.bytes_in(part.holders[0]), part, target) for part, target in parts]
    reads.sort(key=lambda read: _in_order(read[0]))
    if not is_announced:
        shards.expect([first for first, _, _ in reads])
    num_bytes, devices = 0, dict[torch.device, Device]()
    try:
        for _, part, target in reads:
            raw = _bytes(part, shards)
            items = copyable(readable(raw, DTYPES[part.dtype]))
            source = items.as_strided(part.shape, part.strides)
            first = target.storage_offset() + part.to_first
            into = copyable(target).as_strided(part.shape, part.to_strides, first)
            device = _device_of(target, source.dtype) if is_restore else None
            if device is None:
                into.copy_(source)
            else:
                if device.device not in devices:
                    devices[device.device] = device
                    device.follow()
                device.put(into, partial(_write, source))
            num_bytes += len(raw)
    finally:  # after an error too: the memory of a target may be freed
        for device in devices.values():
            device.precede(device.record())
    return num_bytes


def _device_of(target: torch.Tensor, dtype: torch.dtype) -> Device | None:
    """The device whose buffers the copies use; None: small, cast, or to main memory."""
    is_plain = target.nbytes >= SMALL_BYTES and copyable(target).dtype == dtype
    return device_at(target.device) if is_plain and not target.is_cpu else None


def _write(source: torch.Tensor, _begin: int, _end: int, buffer: Bytes) -> None:
    """Write all items of a tensor into a buffer; no read is larger than a buffer."""
    torch.from_numpy(buffer).view(source.dtype).view(source.shape).copy_(source)


def _in_order(one: ByteRange) -> tuple[int, int]:
    return one.rank, one.offset


def _bytes(copy: BoxCopy, shards: CheckedShards) -> memoryview:
    first: SnapshotCorrupt | None = None
    for holder in copy.holders:
        one = copy.bytes_in(holder)
        try:
            return shards.read(one.rank, one.offset, one.num_bytes)
        except SnapshotCorrupt as error:
            _log.warning("%s; another rank's copy is looked for", error)
            first = first or error
    assert first is not None
    raise first


def readable(raw: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """[items] over read-only bytes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(raw, dtype=dtype)
