"""Whole tensors, put together from the shards of all ranks, a part at a time.

Runs in:  the process of ftrun.tools.export.__main__; any of its threads. Loads no torch.
Takes in: tensors with their chunks, the shards they lie in.
Gives:    the bytes of each tensor in their order, every one of them compared with its digest.

A part is some megabytes, whatever the size of the tensor: rows of the whole tensor are gathered
from all chunks that hold some of them. So memory does not depend on how large a tensor is, nor on
how it was cut.
"""

from collections.abc import Callable, Iterator

from ftrun.errors import CheckpointError, SnapshotCorrupt
from ftrun.sharding.source_index import Chunk, Holder, WholeTensor
from ftrun.snapshot.boxes import Box, cut_to, overlap, runs, span_of, strides_of, whole
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
        item_bytes = ITEM_BYTES[tensor.dtype]
        found: bytearray | None = None
        for chunk in tensor.chunks:
            common = overlap(chunk.box, box)
            if common is None:
                continue
            starts = _minus(common.offsets, chunk.box.offsets)
            span = span_of(chunk.box.shape, starts, common.shape)
            at, num_bytes = span.first * item_bytes, span.count * item_bytes
            raw = self._first_good(tensor, chunk, at, num_bytes)
            if common == box and span.count == box.num_items:
                return raw  # all of it, in one run
            if found is None:
                found = bytearray(box.num_items * item_bytes)
            strides = strides_of(box.shape)
            first = span_of(box.shape, _minus(common.offsets, box.offsets), common.shape).first
            for source, target, count in runs(common.shape, span.strides, strides):
                begin = (first + target) * item_bytes
                end = begin + count * item_bytes
                found[begin:end] = raw[source * item_bytes : (source + count) * item_bytes]
        assert found is not None, tensor.name
        return memoryview(found)

    def _first_good(self, tensor: WholeTensor, chunk: Chunk, at: int, num_bytes: int) -> memoryview:
        """Bytes of a chunk, from the first of its holders whose file is not damaged there."""
        # What each rank has for itself is nobody else's, however equal it looks.
        holders = chunk.holders if tensor.is_shared else chunk.holders[:1]
        first: CheckpointError | None = None
        for holder in holders:
            try:
                found = self._read(tensor.name, holder, holder.entry.offset + at, num_bytes)
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


def _minus(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(one, other, strict=True))
