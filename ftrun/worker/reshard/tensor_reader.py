"""Tensors of this rank, filled from the shards of another number of ranks.

Runs in:  worker, training thread, inside `attach`; no collective.
Takes in: the index of the old world, its shards, the tensors to fill.
Gives:    the tensors, filled in place: plain ones whole, DTensors their local part.

torch's own load planner of distributed checkpoints says which part of which saved chunk goes
where; here is only the storage it plans for, which is memory. What is read are the runs of items
that this rank needs, from one holder of each chunk, or from the next one where a digest does not
match.

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
"""Of one read: whatever is read from another node has to be held meanwhile."""

_log = logging.getLogger(__name__)


def fill(
    wanted: Mapping[str, torch.Tensor], saved: Mapping[str, WholeTensor], images: CheckedShards
) -> int:
    """Copy saved tensors into those wanted; how many bytes of shards were asked for.

    Args:
        wanted: by name, plain tensors or DTensors of the shape and dtype of the saved ones.
        saved: by the same names; their chunks cover them.
        images: where the chunks lie.

    Raises:
        SnapshotCorrupt: a piece is not what was captured, and nobody else holds what it held;
            some tensors may be filled.
    """
    reader = ReshardStorageReader(saved, images)
    # The names are ours and flat already; they may hold dots.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(wanted), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()
    return reader.num_bytes


@dataclass(frozen=True, slots=True)
class _Read:
    """One planned item: who has it, which run of its items, and what of that.

    Args:
        holders: the one to read from, and those who hold the same.
        at: where it goes in what is planned for the item.
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
        """The same bytes, by holder."""
        item_bytes = ITEM_BYTES[self.dtype]
        first, num_bytes = self.span.first * item_bytes, self.span.count * item_bytes
        return [ByteRange(h.rank, h.entry.offset + first, num_bytes) for h in self.holders]


class ReshardStorageReader(StorageReader):
    """Shards in memory, as torch's planner sees a checkpoint."""

    def __init__(self, saved: Mapping[str, WholeTensor], images: CheckedShards) -> None:
        self._saved = saved
        self._images = images
        self.num_bytes = 0

    def reset(self, checkpoint_id: Any = None) -> None:
        """There is only one version to read."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return Metadata({name: _described(tensor) for name, tensor in self._saved.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Nothing: it is set up already."""

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
        """What is read, from the first holder whose bytes are what was captured."""
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
        """An item, cut so that no read is long."""
        saved = self._saved[item.storage_index.fqn]
        chunk = self._chunk(item.storage_index)
        # What each rank has for itself is nobody else's, however equal it looks.
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
    """[items] over bytes that are only to be read."""
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
