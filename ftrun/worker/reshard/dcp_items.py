"""Converts DCP's items to shards and its description to plain values, and loads both.

Runs in:  worker, in the thread that saves or loads; no collective.

Each item is stored in the shard of the one rank to which DCP's plan assigns it. Tensors are
entries. Serialized objects are plain values, because their length changes during a run and must not
change the layout each time. A load therefore reads shards of other ranks too, but only the pieces
that contain items of its own plan.

A snapshot contains no pickles of its own, so this module converts the description field by field.
The data that a planner adds (`planner_data`) must be plain. That of torch's own planners is: a path
of keys for each name.

Source: torch.distributed.checkpoint.metadata (read in 2.13).
"""

import io
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from ftrun.errors import LayoutUnknown, ShapeChanged, ValueNotStorable
from ftrun.ids import Rank, Version
from ftrun.sharding.partition import StoredRegion
from ftrun.sharding.source_index import (
    MOST_BYTES,
    OURS,
    BoxCopy,
    Holder,
    chunk_of,
    copies_into,
)
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.boxes import Box, Shape, TensorPart, strides_of, whole
from ftrun.snapshot.layout import PLAIN_NAME, CopyTiming
from ftrun.worker.capture.explicit_save import ExplicitSaver
from ftrun.worker.reshard.source import CheckedShards, open_shards
from ftrun.worker.reshard.tensor_reader import copy_boxes, ranges_of
from ftrun.worker.state.state_tree import TensorSource
from ftrun.worker.state.tensors import DTYPE_NAMES, DTYPES, local_tensor

METADATA, OBJECTS = "dcp", "dcp_objects"
"""Parts of the plain values: the description, of rank 0 only, and serialized objects by name."""

Place = tuple[int, str]
"""Rank whose shard holds an item, and the name of its entry; for bytes the item's own name."""

Places = Mapping[MetadataIndex, Place]

_ITEM_BYTES = 160
_NAME_TIMES = 4

COORDINATOR = Rank(0)


class ItemsToSave:
    """One rank's items of a save plan."""

    def __init__(self, plan: SavePlan, planner: SavePlanner, rank: Rank) -> None:
        self.sources: list[TensorSource] = []
        self.objects: dict[str, bytes] = {}
        self.results: list[WriteResult] = []
        chunks = Counter(item.index.fqn for item in plan.items)
        for item in plan.items:
            name = item.index.fqn
            if name.startswith(OURS):
                raise ValueNotStorable(key=name, kind=f"name that begins with {OURS}, as ours do")
            data: Any = planner.resolve_data(item)
            if item.type is WriteItemType.BYTE_IO:
                self.objects[name] = data.getvalue()
                size = len(self.objects[name])
            else:
                if chunks[name] > 1:
                    name = f"{name}@{','.join(map(str, item.index.offset or ()))}"
                source = TensorSource(name, local_tensor(data, name), CopyTiming.LAZY, _part(item))
                _check(source, item)
                self.sources.append(source)
                size = source.entry.num_bytes
            self.results.append(WriteResult(item.index, size, (int(rank), name)))

    def packed(self, described: bytes) -> bytes:
        """The plain values of the shard; `described`: from `packed_metadata`, on rank 0 only."""
        return plain.encode({OBJECTS: plain.encode(self.objects), METADATA: described})


def packed_metadata(metadata: Metadata, places: Places) -> bytes:
    return plain.encode(pack(metadata, places), root="metadata")


class SavedItems:
    """One version, to load items from. Closed by `close`."""

    def __init__(self, saver: ExplicitSaver, wanted: Version) -> None:
        context = saver.context
        self.version = wanted
        self._link = saver.link
        is_restored = wanted == context.restore
        self._world_size = context.restore_world_size if is_restored else context.world_size
        self._fds = self._link.open_images(wanted, self._world_size)
        if not context.is_resized and context.rank not in self._fds:
            # The shard is being fetched from other nodes, with those of all ranks of this node.
            os.close(self._link.await_restored(wanted))
            self.close()
            self._fds = self._link.open_images(wanted, self._world_size)
        try:
            self.metadata = self._metadata()
        except BaseException:
            self.close()
            raise

    def load(self, load_plan: LoadPlan, planner: LoadPlanner) -> None:
        """Fill in every item. Raises SnapshotCorrupt with the rank that owns the damaged shard."""
        find = self.metadata.storage_data
        places = [place_of(find, item.storage_index) for item in load_plan.items]
        images = self._images({rank for rank, _ in places})
        try:
            objects: dict[Rank, dict[str, bytes]] = {}
            tensors: list[tuple[ReadItem, Holder]] = []
            for item, (rank, name) in zip(load_plan.items, places, strict=True):
                if item.type is LoadItemType.BYTE_IO:
                    if rank not in objects:
                        objects[rank] = plain.decode(_plain_of(images, rank)[OBJECTS])
                    planner.load_bytes(item, io.BytesIO(objects[rank][name]))
                    continue
                fqn = item.storage_index.fqn
                if not isinstance(self.metadata.state_dict_metadata[fqn], TensorStorageMetadata):
                    raise ShapeChanged(key=fqn, saved="an object", present="a tensor")
                tensors.append((item, Holder(rank, images.headers[rank].entries[name])))
            load_tensors(tensors, planner, images)
        finally:
            images.close()

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    # --- details -----------------------------------------------------------------------------

    def _metadata(self) -> Metadata:
        images = self._images([COORDINATOR])
        try:
            parts = _plain_of(images, COORDINATOR)
        finally:
            images.close()
        if not parts.get(METADATA):
            raise LayoutUnknown(
                f"{self.version} was taken by ftrun.attach and not by dcp.save: resume it with "
                "ftrun.attach, or begin a new run with another --run-id"
            )
        return unpack(plain.decode(parts[METADATA]))

    def _images(self, ranks: Iterable[Rank]) -> CheckedShards:
        wanted = sorted(ranks)
        here = {rank: os.dup(self._fds[rank]) for rank in wanted if rank in self._fds}
        source = open_shards(here, wanted, self.version, self._link)
        try:
            return CheckedShards(source, str(self.version))
        except BaseException:
            source.close()
            raise


def load_tensors(
    items: Sequence[tuple[ReadItem, Holder]], planner: LoadPlanner, images: CheckedShards
) -> None:
    """Fill in tensors, in the order of the shards.

    A planner may stage tensors, also in one buffer. Each is therefore committed before the next one
    is resolved, as in torch's own reader.
    """
    ordered = sorted(items, key=lambda one: (one[1].rank, one[1].entry.offset))
    copies = [_copies(*one, strides_of(tuple(one[0].lengths))) for one in ordered]
    images.expect([read for some in copies for read in ranges_of(some)])
    for item, holder in ordered:
        target = planner.resolve_tensor(item).detach()
        found = _copies(item, holder, target.stride())
        copy_boxes([(copy, target) for copy in found], images, is_announced=True)
        planner.commit_tensor(item, target)


def _copies(item: ReadItem, holder: Holder, strides: Shape) -> list[BoxCopy]:
    if 0 in item.lengths:
        return []
    # DCP counts the items of a chunk from its own first one.
    starts, shape = tuple(item.storage_offsets), tuple(item.lengths)
    wanted = StoredRegion(item.storage_index.fqn, Box(starts, shape), 0, strides)
    return copies_into(wanted, [chunk_of(whole(holder.entry.shape), [holder])])


def _plain_of(images: CheckedShards, rank: Rank) -> dict[str, bytes]:
    """The plain values of a shard, read in parts, because serialized objects may be large."""
    at = images.headers[rank].entries[PLAIN_NAME].offset
    end = at + 8 + int.from_bytes(images.read(rank, at, 8), "little")
    raw = bytearray()
    for start in range(at + 8, end, MOST_BYTES):
        raw += images.read(rank, start, min(MOST_BYTES, end - start))
    found: dict[str, bytes] = plain.decode(memoryview(raw))
    return found


def _part(item: WriteItem) -> TensorPart | None:
    about = item.tensor_data
    assert about is not None
    size, offsets = tuple(about.size), tuple(about.chunk.offsets)
    is_whole = tuple(about.chunk.sizes) == size and not any(offsets)
    return None if is_whole else TensorPart(size, offsets)


def _check(source: TensorSource, item: WriteItem) -> None:
    about = item.tensor_data
    assert about is not None
    planned = (about.properties.dtype, tuple(about.chunk.sizes))
    if planned != (source.tensor.dtype, tuple(source.tensor.shape)):
        dtype, shape = planned
        raise ShapeChanged(
            key=item.index.fqn,
            saved=f"{dtype}{list(shape)} in the plan",
            present=f"{source.tensor.dtype}{list(source.tensor.shape)}",
        )


# --- the description ---


def pack(metadata: Metadata, places: Places) -> dict[str, Any]:
    meta = metadata.storage_meta
    label = None if meta is None else meta.checkpoint_id
    return {
        "items": {
            name: _pack_item(name, about, places)
            for name, about in metadata.state_dict_metadata.items()
        },
        "planner_data": metadata.planner_data,
        "checkpoint_id": None if label is None else str(label),
        "save_id": None if meta is None else meta.save_id,
        "modules": [] if meta is None else list(meta.modules),
        "version": getattr(metadata, "version", None),
    }


def unpack(packed: dict[str, Any]) -> Metadata:
    items: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, Place] = {}
    try:
        for name, item in packed["items"].items():
            if "size" in item:
                items[name] = _tensor(item)
                for offsets, _, rank, entry in item["chunks"]:
                    places[MetadataIndex(name, offsets)] = (rank, entry)
            else:
                items[name] = BytesStorageMetadata()
                places[MetadataIndex(name)] = tuple(item["at"])
        found = Metadata(
            items,
            packed["planner_data"],
            places,
            StorageMeta(
                checkpoint_id=packed["checkpoint_id"],
                save_id=packed["save_id"],
                modules=packed["modules"],
            ),
        )
        if packed["version"] is not None:
            found.version = packed["version"]
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise LayoutUnknown(
            f"the description of the checkpoint is not readable: {error!r}"
        ) from error
    return found


def room_for(names: Mapping[str, int]) -> int:
    """Estimated size of the description in bytes; `names`: of all items, with their chunks."""
    return sum(_NAME_TIMES * len(name) + _ITEM_BYTES * count for name, count in names.items())


def place_of(places: Places, index: MetadataIndex) -> tuple[Rank, str]:
    found = places.get(index)
    if found is None:
        raise LayoutUnknown(f"{index.fqn} at {list(index.offset or ())} is in no shard")
    return Rank(found[0]), found[1]


def _pack_item(name: str, about: object, places: Places) -> dict[str, Any]:
    if isinstance(about, BytesStorageMetadata):
        return {"at": list(places[MetadataIndex(name)])}
    if not isinstance(about, TensorStorageMetadata) or about.properties.dtype not in DTYPE_NAMES:
        raise ValueNotStorable(key=name, kind=f"{type(about).__name__} ({about})")
    properties = about.properties
    return {
        "dtype": DTYPE_NAMES[properties.dtype],
        "requires_grad": properties.requires_grad,
        "pin_memory": properties.pin_memory,
        "size": tuple(about.size),
        "chunks": [
            (tuple(chunk.offsets), tuple(chunk.sizes), *places[MetadataIndex(name, chunk.offsets)])
            for chunk in about.chunks
        ],
    }


def _tensor(item: dict[str, Any]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(
            dtype=DTYPES[item["dtype"]],
            requires_grad=item["requires_grad"],
            pin_memory=item["pin_memory"],
        ),
        size=torch.Size(item["size"]),
        chunks=[
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes, _, _ in item["chunks"]
        ],
    )
