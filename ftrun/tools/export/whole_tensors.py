"""Whole tensors, put together from the shards of all ranks, a part at a time.

Runs in:  the process of ftrun.tools.export.__main__; any of its threads. Loads no torch.
Takes in: tensors with their chunks, the shards they lie in.
Gives:    the bytes of each tensor in their order, every one of them compared with its digest.

A part is some megabytes, whatever the size of the tensor: rows of the whole tensor are gathered
from all chunks that hold some of them. So memory does not depend on how large a tensor is, nor on
how it was cut.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ftrun.errors import CheckpointError, SnapshotCorrupt
from ftrun.sharding.partition import StoredRegion
from ftrun.sharding.source_index import BoxCopy, Holder, WholeTensor, gathered
from ftrun.snapshot.boxes import Box, cut_to, strides_of, whole
from ftrun.snapshot.layout import ITEM_BYTES
from ftrun.worker.disk_images import DiskImages
from ftrun.worker.reshard.source import CheckedShards

PART_BYTES = 8 << 20
"""Gathered and written in one go: pieces at its ends are read twice, so not too small."""

Tell = Callable[[str], object]
"""Takes what the operator should know, in words."""


class WholeTensorReader:
    """Reads tensors of one checkpoint; one for each thread, as it keeps what it has read last.

    Args:
        images: the shards.
        tell: told of a damaged file where another rank's copy of the same is read instead.
        part_bytes: of one part, at most.
    """

    def __init__(self, images: DiskImages, tell: Tell, part_bytes: int = PART_BYTES) -> None:
        self._files = images
        self._images = CheckedShards(images, "the checkpoint")
        self._tell = tell
        self._part_bytes = part_bytes

    def parts(self, tensor: WholeTensor) -> Iterator[memoryview]:
        """The bytes of a tensor, in order; none where it has no items.

        Raises:
            CheckpointError: a piece is not what was written, and no other rank has the same; it
                names the file and the tensor.
        """
        if 0 in tensor.shape:
            return
        most_items = self._part_bytes // ITEM_BYTES[tensor.dtype]
        for box in cut_to(tensor.shape, whole(tensor.shape), most_items):
            yield self._gathered(tensor, box)

    def everything(self, tensor: WholeTensor) -> bytearray:
        """All bytes of a tensor."""
        found = bytearray()
        for part in self.parts(tensor):
            found += part
        return found

    def held(self, name: str, holder: Holder) -> memoryview:
        """The bytes of one rank's entry.

        Raises:
            CheckpointError: they are not what was written.
        """
        entry = holder.entry
        return self._read(name, holder, entry.offset, entry.num_bytes)

    def _gathered(self, tensor: WholeTensor, box: Box) -> memoryview:
        """The items of a box of the whole tensor, row by row."""
        copies = tensor.copies_into(StoredRegion(tensor.name, box, 0, strides_of(box.shape)))
        read = partial(self._first_good, tensor.name)
        if len(copies) == 1 and copies[0].span == box.num_items:
            return read(copies[0])  # one contiguous run
        made = gathered(copies, box.num_items, ITEM_BYTES[tensor.dtype], read)
        return made.view(np.uint8).data

    def _first_good(self, name: str, copy: BoxCopy) -> memoryview:
        """Bytes of a copy, from the first of its holders whose file is not damaged there."""
        first: CheckpointError | None = None
        for holder in copy.holders:
            one = copy.bytes_in(holder)
            try:
                found = self._read(name, holder, one.offset, one.num_bytes)
            except CheckpointError as error:
                first = first or error
                continue
            if first is not None:
                self._tell(f"{first}; {self._files.path_of(holder.rank)} holds the same, whole")
            return found
        assert first is not None
        raise first

    def _read(self, name: str, holder: Holder, at: int, num_bytes: int) -> memoryview:
        try:
            return self._images.read(holder.rank, at, num_bytes)
        except SnapshotCorrupt as error:
            pieces = len(self._images.heads[holder.rank].digests)
            raise CheckpointError(
                f"{self._files.path_of(holder.rank)} is damaged: piece {error.piece} of {pieces}, "
                f"in which {name} lies, is not what was written"
            ) from error
