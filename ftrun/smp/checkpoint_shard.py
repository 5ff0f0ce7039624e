"""One rank's sealed slot, and its files in a checkpoint.

Runs in:  the SMP, in its disk lane's thread.
Takes in: duplicates of the arenas' descriptors.
Gives:    `Shard`s; files whose digests are those of the bytes written, or SnapshotCorrupt.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import xxhash

from ftrun.errors import LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Rank, Version
from ftrun.smp.checkpoint_files import replaced, replaced_large
from ftrun.smp.checkpoint_index import ShardFile
from ftrun.smp.disk_file import Pace
from ftrun.snapshot.layout import PAGE_BYTES, Layout, parse_header
from ftrun.snapshot.versions import newest_common
from ftrun.wire.arena import (
    Arena,
    ArenaShape,
    SlotHeader,
    SlotState,
    read_shape,
    read_slot_headers,
    table_digest,
)

_READ_BYTES = 1 << 22

ArenaFds = Mapping[Rank, Sequence[int]]


class Sink(Protocol):
    """A file that is filled in place: on a disk, or on its way to a store."""

    def room(self) -> memoryview:
        """Memory for the bytes that come next, at least one."""

    def take(self, num_bytes: int) -> None:
        """So many bytes of `room` belong to the file now."""


class Shard:
    """One sealed slot, read through its descriptor: without a mapping, without the GIL."""

    def __init__(self, fd: int, slot: int, header: SlotHeader, shape: ArenaShape) -> None:
        self.shape = shape
        self.header = header
        self.what = f"rank {shape.rank}, {header.version}"
        self._fd = fd
        self._slot = slot
        self._table_at = PAGE_BYTES + slot * shape.slot_bytes + PAGE_BYTES
        self._image_at = self._table_at + shape.table_bytes
        self._copy: memoryview | None = None
        self._table: bytes | None = None

    @property
    def is_copied(self) -> bool:
        return self._copy is not None

    def is_unchanged(self) -> bool:
        return read_slot_headers(self._fd)[self._slot] == self.header

    @property
    def content(self) -> tuple[int, int, str, str]:
        """As that of its `ShardFile` will be."""
        return (
            self.shape.rank,
            self.shape.image_bytes,
            f"{self.shape.layout_id:016x}",
            f"{self.header.table_digest:016x}",
        )

    def copy_now(self) -> None:
        """Copy the image, so that what happens to the slot afterwards does not matter."""
        size = self.shape.image_bytes
        self._table = os.pread(self._fd, 8 * self.shape.num_pieces, self._table_at)
        copy = memoryview(bytearray(size))
        at = 0
        while at < size:
            at += os.preadv(self._fd, [copy[at : at + _READ_BYTES]], self._image_at + at)
        self._copy = copy

    def table(self) -> memoryview:
        """The digest of each piece: u64."""
        if self._table is None:
            self._table = os.pread(self._fd, 8 * self.shape.num_pieces, self._table_at)
        return memoryview(self._table).cast("Q")

    def layout(self) -> tuple[Layout, int]:
        """What the image's own header says of it, and how long that header is.

        Raises:
            SnapshotCorrupt: the header is not readable.
        """
        arena = Arena(self._fd, writable=False)
        image = arena.image(self._slot) if self._copy is None else self._copy
        try:
            return parse_header(image)
        except LayoutUnknown as error:
            raise SnapshotCorrupt(
                what=f"{self.what}, header: {error}", piece=0, pieces=self.shape.num_pieces
            ) from error
        finally:
            del image
            arena.close()

    def read_into(self, target: memoryview, at: int) -> None:
        """Fill the target with the bytes of the image from there on."""
        if self._copy is not None:
            target[:] = self._copy[at : at + len(target)]
            return
        done = 0
        while done < len(target):
            done += os.preadv(self._fd, [target[done:]], self._image_at + at + done)


def copy_where_it_fits(shards: Sequence[Shard], free_bytes: int) -> bool:
    """Copy all of them, or none; False: a slot was overwritten meanwhile."""
    if sum(shard.shape.image_bytes for shard in shards) <= free_bytes:
        for shard in shards:
            shard.copy_now()
    return all(shard.is_unchanged() for shard in shards)


def newest_version(fds: ArenaFds, world_size: int) -> Version | None:
    """The newest version that every rank of the world has sealed in one of its arenas."""
    held = {
        rank: [
            header.version
            for fd in some
            if read_shape(fd).world_size == world_size
            for header in read_slot_headers(fd)
            if header.state is SlotState.SEALED
        ]
        for rank, some in fds.items()
    }
    return newest_common(held, [Rank(rank) for rank in range(world_size)])


def find_shards(fds: ArenaFds, version: Version, world_size: int) -> list[Shard]:
    """The slots that hold this version of a world of this size, by rank."""
    found = {
        rank: Shard(fd, slot, header, read_shape(fd))
        for rank, some in sorted(fds.items())
        for fd in some
        if read_shape(fd).world_size == world_size
        for slot, header in enumerate(read_slot_headers(fd))
        if header.state is SlotState.SEALED and header.version == version
    }
    return list(found.values())


def write_shard(folder: Path, shard: Shard, pace: Pace) -> ShardFile:
    """Both files of a rank, durable; equal ones of an earlier try are replaced.

    Args:
        folder: where to.
        shard: sealed.
        pace: asked before each write.

    Raises:
        SnapshotCorrupt: what was read does not match its digests: corrupt, or overwritten.
        CheckpointError: it was told to stop.
    """
    data_name, table_name = file_names(shard)
    with replaced_large(folder / data_name, pace) as file:
        described = write_image(file, shard)
    with replaced(folder / table_name) as write:
        write(shard.table())
    return described


def file_names(shard: Shard) -> tuple[str, str]:
    """Of its image, and of its digest table."""
    name = f"rank-{shard.shape.rank:05d}"
    return f"{name}.safetensors", f"{name}.digests"


def write_image(file: Sink, shard: Shard) -> ShardFile:
    """Fill a file with a rank's image; what the index will say of it.

    Raises:
        SnapshotCorrupt: what was read does not match its digests: corrupt, or overwritten.
    """
    table = shard.table()
    if table_digest(table) != shard.header.table_digest:
        raise SnapshotCorrupt(what=f"{shard.what}, digest table", piece=0, pieces=len(table))
    layout, start = shard.layout()
    header_digest = _write_range(file, shard, 0, start)
    for index, piece in enumerate(layout.pieces):
        digest = _write_range(file, shard, start + piece.offset, piece.num_bytes)
        if index >= len(table) or digest.intdigest() != table[index]:
            raise SnapshotCorrupt(what=shard.what, piece=index, pieces=len(table))
    data_name, table_name = file_names(shard)
    return ShardFile(
        rank=shard.shape.rank,
        file=data_name,
        digests=table_name,
        num_bytes=shard.shape.image_bytes,
        num_pieces=shard.shape.num_pieces,
        layout_id=f"{shard.shape.layout_id:016x}",
        table_digest=f"{shard.header.table_digest:016x}",
        header_digest=header_digest.hexdigest(),
    )


def _write_range(file: Sink, shard: Shard, at: int, size: int) -> xxhash.xxh3_64:
    """Add these bytes of the image; the digest is of what was put into the file."""
    digest, end = xxhash.xxh3_64(), at + size
    while at < end:
        room = file.room()[: end - at]
        shard.read_into(room, at)
        digest.update(room)
        file.take(len(room))
        at += len(room)
    return digest
