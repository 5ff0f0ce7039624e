"""Fills tensors of this rank from the shards of another number of ranks.

Runs in:  worker, training thread, inside `attach`; no collective.
Takes in: the source index, the shards, the tensors to fill.
Gives:    the tensors, filled in place: plain ones whole, DTensors their local part.

torch's load planner of distributed checkpoints determines which part of which saved chunk is copied
to which part of a tensor. This module is the storage of that planner, in memory. It reads the runs
of items that this rank needs, from one holder of each chunk. If a digest does not match, it reads
from the next holder.

Source: torch.distributed.checkpoint, `StorageReader` and `DefaultLoadPlanner` (read in 2.13).
"""

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ftrun.errors import SnapshotCorrupt
from ftrun.sharding.source_index import Chunk, Holder, WholeTensor
from ftrun.snapshot.boxes import Box, StridedSpan, cut_to, span_of
from ftrun.snapshot.layout import ITEM_BYTES
from ftrun.worker.reshard.source import ByteRange, CheckedShards
from ftrun.worker.state.tensors import DTYPES

MOST_BYTES = 16 << 20
"""Limit of one read, because bytes from another node are held in memory until they are copied."""

_log = logging.getLogger(__name__)


def fill(
    wanted: Mapping[str, torch.Tensor], saved: Mapping[str, WholeTensor], images: CheckedShards
) -> int:
    """Copy saved tensors into the wanted ones; return the number of shard bytes read.

    Args:
        wanted: by name, plain tensors or DTensors of the shape and dtype of the saved ones.
        saved: by the same names; their chunks cover the tensors.
        images: the shards that hold the chunks.

    Raises:
        SnapshotCorrupt: a piece differs from the captured one, and no other rank holds a copy; some
            tensors may be filled already.
    """
    reader = ReshardStorageReader(saved, images)
    # The names are ftrun's own and already flat; they may contain dots.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(wanted), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()
    return reader.num_bytes


@dataclass(frozen=True, slots=True)
class _Read:
    """One read of a planned item: its holders, the run of items, and the position in the target.

    Args:
        holders: the one to read from, and others that hold the same bytes.
        at: the box in the planned target of the item.
    """

    item: ReadItem
    holders: tuple[Holder, ...]
    span: StridedSpan
    at: Box

    @property
    def dtype(self) -> str:
        return self.holders[0].entry.dtype

    @property
    def ranges(self) -> list[ByteRange]:
        item_bytes = ITEM_BYTES[self.dtype]
        first, num_bytes = self.span.first * item_bytes, self.span.count * item_bytes
        return [ByteRange(h.rank, h.entry.offset + first, num_bytes) for h in self.holders]


class ReshardStorageReader(StorageReader):
    """Shards in memory, in the form of a checkpoint for torch's planner."""

    def __init__(self, saved: Mapping[str, WholeTensor], images: CheckedShards) -> None:
        self._saved = saved
        self._images = images
        self.num_bytes = 0

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to do: there is only one version."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return Metadata({name: _described(tensor) for name, tensor in self._saved.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Nothing to do: the constructor sets it up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        reads = [
            read for item in plan.items if 0 not in item.lengths for read in self._reads_of(item)
        ]
        reads.sort(key=lambda read: (read.ranges[0].rank, read.ranges[0].offset))
        self._images.expect([read.ranges[0] for read in reads])
        for read in reads:
            raw = self._bytes(read)
            source = readable(raw, DTYPES[read.dtype])
            source = source.as_strided(read.span.shape, read.span.strides)
            target = planner.resolve_tensor(read.item).detach()
            for dim, (at, size) in enumerate(zip(read.at.offsets, read.at.shape, strict=True)):
                target = target.narrow(dim, at, size)
            target.copy_(source)
            self.num_bytes += len(raw)
        for item in plan.items:
            planner.commit_tensor(item, planner.resolve_tensor(item))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def _bytes(self, read: _Read) -> memoryview:
        first: SnapshotCorrupt | None = None
        for one in read.ranges:
            try:
                return self._images.read(one.rank, one.offset, one.num_bytes)
            except SnapshotCorrupt as error:
                _log.warning("%s; another rank's copy is looked for", error)
                first = first or error
        assert first is not None
        raise first

    def _reads_of(self, item: ReadItem) -> list[_Read]:
        saved = self._saved[item.storage_index.fqn]
        chunk = self._chunk(item.storage_index)
        # Bytes that each rank has for itself have no replica on another rank, even if they are
        # equal.
        same = chunk.holders if saved.is_shared else chunk.holders[:1]
        starts = tuple(item.storage_offsets)
        part = Box(starts, tuple(item.lengths))
        found = []
        for box in cut_to(chunk.box.shape, part, MOST_BYTES // ITEM_BYTES[saved.dtype]):
            offsets = tuple(a - b for a, b in zip(box.offsets, starts, strict=True))
            span = span_of(chunk.box.shape, box.offsets, box.shape)
            found.append(_Read(item, same, span, Box(offsets, box.shape)))
        return found

    def _chunk(self, index: MetadataIndex) -> Chunk:
        chunks = self._saved[index.fqn].chunks
        offsets = tuple(index.offset or ())
        if index.index is not None and chunks[index.index].box.offsets == offsets:
            return chunks[index.index]
        return next(chunk for chunk in chunks if chunk.box.offsets == offsets)


def readable(raw: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """[items] over read-only bytes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(raw, dtype=dtype)


def _described(tensor: WholeTensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
        size=torch.Size(tensor.shape),
        chunks=[
            ChunkStorageMetadata(torch.Size(chunk.box.offsets), torch.Size(chunk.box.shape))
            for chunk in tensor.chunks
        ],
    )
