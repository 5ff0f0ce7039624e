"""One rank's sealed slot, and its files in a checkpoint.

Runs in:  the SMP, in its disk lane's thread.
Takes in: duplicates of the arenas' descriptors.
Gives:    `SealedSlot`s; files whose digests are those of the bytes written, or SnapshotCorrupt.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import xxhash

from ftrun.errors import CheckpointError, LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Rank, Version
from ftrun.smp.checkpoint.index import ShardFile
from ftrun.smp.checkpoint.storage.copy_room import CopyBuffers
from ftrun.smp.checkpoint.storage.direct_file import Pace
from ftrun.smp.checkpoint.storage.local import replaced, replaced_large
from ftrun.snapshot.commit_tracker import newest_common
from ftrun.snapshot.layout import PAGE_BYTES, Layout, parse_header
from ftrun.wire.shared_memory.arena import (
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


class SlotOverwritten(CheckpointError):
    """A slot was overwritten while it was read, or its capture has come to nothing."""

    def __init__(self, version: Version, why: str = "") -> None:
        super().__init__(
            f"a slot with {version} was overwritten while it was read{why and f' ({why})'}. Ask "
            "for a later version; if this comes again and again, snapshot less often "
            "(--snapshot-every)"
        )


class FileSink(Protocol):
    """A file that is filled in place: on a disk, or on its way to a store."""

    is_in_place: bool
    """The newest `room` has the file's bytes already."""

    def room(self, source: memoryview | None = None) -> memoryview:
        """Memory for the bytes that come next, at least one.

        Args:
            source: all bytes of the file, where they lie in memory until it is closed.
        """

    def take(self, num_bytes: int) -> None:
        """So many bytes of `room` belong to the file now."""


class SealedSlot:
    """One sealed slot, read through its descriptor: without a mapping, without the GIL."""

    def __init__(self, fd: int, slot: int, header: SlotHeader, shape: ArenaShape) -> None:
        self.shape = shape
        self.header = header
        self.what = f"rank {shape.rank}, {header.version}"
        self._fd = fd
        self._slot = slot
        self._table_at = PAGE_BYTES + slot * shape.slot_bytes + PAGE_BYTES
        self._image_at = self._table_at + shape.table_bytes
        self.copy: memoryview | None = None
        """Of its whole image, once there is one; only what is not read yet is true."""
        self._table: bytes | None = None
        self._read_to = 0
        self.before_read: Callable[[], None] | None = None
        """Called before each read of the slot itself."""

    @property
    def is_copied(self) -> bool:
        return self.copy is not None

    @property
    def is_committed(self) -> bool:
        """All ranks have sealed this version."""
        return True

    @property
    def is_sound(self) -> bool:
        """What is read of it is what was sealed, or is damaged."""
        return self.is_copied or self.is_unchanged()

    def is_unchanged(self) -> bool:
        return read_slot_headers(self._fd)[self._slot] == self.header

    def begin(self) -> None:
        """It is about to be written.

        Raises:
            SnapshotCorrupt: its digest table is not what was sealed.
        """
        if table_digest(self.table()) != self.header.table_digest:
            pieces = self.shape.num_pieces
            raise SnapshotCorrupt(what=f"{self.what}, digest table", piece=0, pieces=pieces)

    def await_piece(self, index: int) -> None:
        """Wait until a piece is there, where it is not yet."""

    def found(self, index: int, digest: int) -> None:
        """A piece was written whose digest is this.

        Raises:
            SnapshotCorrupt: that is not what was captured.
        """
        table = self.table()
        if index >= len(table) or digest != table[index]:
            raise SnapshotCorrupt(what=self.what, piece=index, pieces=len(table))

    def end(self, header_bytes: int, header_digest: str) -> None:
        """All is written, beginning with a header of so many bytes and this digest."""

    @property
    def content(self) -> tuple[int, int, str, str]:
        """As that of its `ShardFile` will be."""
        return (
            self.shape.rank,
            self.shape.image_bytes,
            f"{self.shape.layout_id:016x}",
            f"{self.header.table_digest:016x}",
        )

    def has_later(self) -> bool:
        """A later version of the rank is sealed, so that this one may be overwritten soon."""
        return any(
            header.state is SlotState.SEALED and header.version > self.header.version
            for header in read_slot_headers(self._fd)
        )

    @property
    def since_last_s(self) -> float:
        """Between the version that the rank sealed before and this one; 0 where there is none."""
        found = [
            self.header.sealed_ns - header.sealed_ns
            for header in read_slot_headers(self._fd)
            if header.state is SlotState.SEALED and header.version < self.header.version
        ]
        return min(found, default=0) / 1e9

    def copy_to(self, copy: memoryview) -> None:
        """Copy what is not read yet, so that what happens to the slot does not matter any more.

        Args:
            copy: memory for the whole image.
        """
        size = self.shape.image_bytes
        self._table = os.pread(self._fd, 8 * self.shape.num_pieces, self._table_at)
        self._fill(copy, 0, 8)
        self._fill(copy, 8, min(size, 8 + int.from_bytes(copy[:8], "little")))
        self._fill(copy, self._read_to, size)
        self.copy = copy

    def _fill(self, copy: memoryview, at: int, end: int) -> None:
        while at < end:
            part = copy[at : min(at + _READ_BYTES, end)]
            at += os.preadv(self._fd, [part], self._image_at + at)

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
        image = arena.image(self._slot) if self.copy is None else self.copy
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
        if self.copy is None and self.before_read is not None:
            self.before_read()
        if self.copy is not None:
            target[:] = self.copy[at : at + len(target)]
            return
        done = 0
        while done < len(target):
            done += os.preadv(self._fd, [target[done:]], self._image_at + at + done)
        self._read_to = max(self._read_to, at + done)


def copy_where_it_fits(shards: Sequence[SealedSlot], room: CopyBuffers) -> bool:
    """Copy all that are there, or none; False: a slot was overwritten meanwhile."""
    ready = [shard for shard in shards if shard.is_committed]
    blocks = room.lend([shard.shape.image_bytes for shard in ready])
    if blocks is not None:
        for shard, block in zip(ready, blocks, strict=True):
            shard.copy_to(block)
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


def find_shards(fds: ArenaFds, version: Version, world_size: int) -> list[SealedSlot]:
    """The slots that hold this version of a world of this size, by rank."""
    found = {
        rank: SealedSlot(fd, slot, header, read_shape(fd))
        for rank, some in sorted(fds.items())
        for fd in some
        if read_shape(fd).world_size == world_size
        for slot, header in enumerate(read_slot_headers(fd))
        if header.state is SlotState.SEALED and header.version == version
    }
    return list(found.values())


def write_shard(folder: Path, shard: SealedSlot, pace: Pace) -> ShardFile:
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


def file_names(shard: SealedSlot) -> tuple[str, str]:
    """Of its image, and of its digest table."""
    name = f"rank-{shard.shape.rank:05d}"
    return f"{name}.safetensors", f"{name}.digests"


def write_image(file: FileSink, shard: SealedSlot) -> ShardFile:
    """Fill a file with a rank's image; what the index will say of it.

    Raises:
        SnapshotCorrupt: what was read does not match its digests: corrupt, or overwritten.
    """
    shard.begin()
    layout, start = shard.layout()
    header_digest = _write_range(file, shard, 0, start).hexdigest()
    for index, piece in enumerate(layout.pieces):
        shard.await_piece(index)
        digest = _write_range(file, shard, start + piece.offset, piece.num_bytes)
        shard.found(index, digest.intdigest())
    shard.end(start, header_digest)
    data_name, table_name = file_names(shard)
    return ShardFile(
        rank=shard.shape.rank,
        file=data_name,
        digests=table_name,
        num_bytes=shard.shape.image_bytes,
        num_pieces=shard.shape.num_pieces,
        layout_id=f"{shard.shape.layout_id:016x}",
        table_digest=f"{shard.header.table_digest:016x}",
        header_digest=header_digest,
    )


def _write_range(file: FileSink, shard: SealedSlot, at: int, size: int) -> xxhash.xxh3_64:
    """Add these bytes of the image; the digest is of what was put into the file."""
    digest, end = xxhash.xxh3_64(), at + size
    while at < end:
        room = file.room(shard.copy)[: end - at]
        if not file.is_in_place:
            shard.read_into(room, at)
        digest.update(room)
        file.take(len(room))
        at += len(room)
    return digest
