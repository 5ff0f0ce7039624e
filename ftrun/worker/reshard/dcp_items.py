"""Converts DCP's items to shards, and loads them from shards.

Runs in:  worker, in the thread that saves or loads; no collective.
Takes in: a save plan and its planner; a version, a load plan and its planner.
Gives:    sources and bytes of one rank's shard; tensors and objects that the planner fills in.

Each item is stored in the shard of the one rank to which DCP's plan assigns it. Tensors are
entries. Serialized objects are plain values, because their length changes during a run and must not
change the layout each time. A load therefore reads shards of other ranks too, but only the pieces
that contain items of its own plan.
"""

import io
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from ftrun.errors import LayoutUnknown, ShapeChanged, ValueNotStorable
from ftrun.ids import Rank, Version
from ftrun.sharding.source_index import OURS, Chunk, Holder, WholeTensor
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.boxes import TensorPart
from ftrun.snapshot.layout import PLAIN_NAME, CopyTiming
from ftrun.worker.capture.explicit_save import ExplicitSaver
from ftrun.worker.reshard.dcp_metadata import Places, box_of, pack, place_of, unpack
from ftrun.worker.reshard.remote_images import JoinedShards, RemoteShards
from ftrun.worker.reshard.source import CheckedShards, LocalShards, ShardSource
from ftrun.worker.reshard.tensor_reader import MOST_BYTES, ReshardStorageReader
from ftrun.worker.state.state_tree import TensorSource
from ftrun.worker.state.tensors import DTYPE_NAMES, local_tensor

METADATA, OBJECTS = "dcp", "dcp_objects"
"""Parts of the plain values: the description, of rank 0 only, and serialized objects by name."""

COORDINATOR = Rank(0)


class ItemsToSave:
    """One rank's items of a save plan.

    Args:
        plan: the result of the global planning.
        planner: resolves its items.
        rank: this one.

    Raises:
        ValueNotStorable: an item has no bytes that can be copied.
    """

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
        """The plain values of the shard.

        Args:
            described: from `packed_metadata` if this rank stores it; else empty.
        """
        return plain.encode({OBJECTS: plain.encode(self.objects), METADATA: described})


def packed_metadata(metadata: Metadata, places: Places) -> bytes:
    """DCP's description of the snapshot, with the location of each item.

    Raises:
        ValueNotStorable: a value that a planner has added is not plain.
    """
    return plain.encode(pack(metadata, places), root="metadata")


class SavedItems:
    """One version, to load items from. Closed by `close`.

    Args:
        saver: of this rank.
        wanted: the version.

    Raises:
        SnapshotError, PeerError: it is not available.
    """

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
        """Fill in every item.

        Raises:
            SnapshotCorrupt: bytes differ from the saved ones; `rank` is the owner of the shard.
            SnapshotError, PeerError: a shard is not available.
        """
        find = self.metadata.storage_data
        places = [place_of(find, item.storage_index) for item in load_plan.items]
        images = self._images({rank for rank, _ in places})
        try:
            objects: dict[Rank, dict[str, bytes]] = {}
            tensors = []
            for item, (rank, name) in zip(load_plan.items, places, strict=True):
                if item.type is not LoadItemType.BYTE_IO:
                    tensors.append(item)
                    continue
                if rank not in objects:
                    objects[rank] = plain.decode(_plain_of(images, rank)[OBJECTS])
                planner.load_bytes(item, io.BytesIO(objects[rank][name]))
            names = {item.storage_index.fqn for item in tensors}
            saved = {name: self._whole(name, images) for name in names}
            ReshardStorageReader(saved, images).read_data(LoadPlan(tensors), planner).wait()
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
                f"{self.version} was taken by ftrun.attach and not by dcp.save: go on from it with "
                "ftrun.attach, or start anew with another --run-id"
            )
        return unpack(plain.decode(parts[METADATA]))

    def _images(self, ranks: Iterable[Rank]) -> CheckedShards:
        wanted = sorted(ranks)
        here = {rank: os.dup(self._fds[rank]) for rank in wanted if rank in self._fds}
        source: ShardSource = LocalShards(here, self.version)
        elsewhere = [rank for rank in wanted if rank not in here]
        if elsewhere:
            source = JoinedShards(source, RemoteShards(self._link, self.version, elsewhere))
        try:
            return CheckedShards(source, str(self.version))
        except BaseException:
            source.close()
            raise

    def _whole(self, name: str, images: CheckedShards) -> WholeTensor:
        about = self.metadata.state_dict_metadata[name]
        if not isinstance(about, TensorStorageMetadata):
            raise ShapeChanged(key=name, saved="an object", present="a tensor")
        chunks = []
        for chunk in about.chunks:
            index = MetadataIndex(name, chunk.offsets)
            rank, entry = place_of(self.metadata.storage_data, index)
            head = images.heads.get(rank)
            holders = () if head is None else (Holder(rank, head.entries[entry]),)
            chunks.append(Chunk(box_of(chunk), holders))
        dtype = DTYPE_NAMES[about.properties.dtype]
        return WholeTensor(
            name, dtype, tuple(about.size), tuple(chunks), is_shared=True, unplaced=()
        )


def _plain_of(images: CheckedShards, rank: Rank) -> dict[str, bytes]:
    at = images.heads[rank].entries[PLAIN_NAME].offset
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
