"""Reads one rank's sealed slot, and writes its files of a checkpoint.

Runs in:  the SMP, in its disk lane's thread.
Takes in: duplicates of the arenas' descriptors; memory for copies.
Gives:    `SealedSlot`s; files whose digests are those of the bytes written, or SnapshotCorrupt;
          copies of the bytes not yet written, as late as is safe, or `SlotOverwritten`.

A slot is overwritten by the second capture after its own, which starts only after the first one is
committed. Nothing is therefore copied until a later version is sealed. If a checkpoint is written
in less time than the snapshot interval, nothing is copied at all. The copy was most of a
checkpoint's cost to the training (scripts/bench_persist.py).
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import xxhash

from ftrun import clock
from ftrun.errors import CheckpointSuperseded, LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Rank, Version
from ftrun.smp.checkpoint.index import ShardFile
from ftrun.smp.checkpoint.storage.direct_file import CopyBuffers, Pace
from ftrun.smp.checkpoint.storage.storage import FileSink, Storage
from ftrun.snapshot.commit_tracker import newest_common
from ftrun.snapshot.layout import PAGE_BYTES, Layout, parse_header
from ftrun.wire.crash_points import crash_point
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
OFTEN_S = 1.0
"""If snapshots are more frequent than this, the next one cannot be detected in time."""
_GAPS = 4
_POLL_S = 0.01

ArenaFds = Mapping[Rank, list[int]]


class SlotOverwritten(CheckpointSuperseded):
    """A slot was overwritten while it was read, or its capture was not completed."""

    def __init__(self, version: Version, reason: str = "") -> None:
        what = f"was not written: {reason}" if reason else "was overwritten while it was read"
        super().__init__(
            f"the snapshot of {version} {what}. Request a later version; if this repeats, take "
            "snapshots less often (--snapshot-every)"
        )


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
        """A copy of the image, once made. Only its header and the bytes not yet read are valid."""
        self._table: bytes | None = None
        self._read_to = 0
        self.shared_lock: threading.Lock | None = None
        """Of all slots that several threads read, each other parts; None: one reads in order."""
        self.before_read: Callable[[], None] | None = None
        """Called before each read of the slot itself."""

    @property
    def is_copied(self) -> bool:
        return self.copy is not None

    @property
    def is_committed(self) -> bool:
        return True

    @property
    def is_sound(self) -> bool:
        """Whether no later snapshot has overwritten the bytes read; a difference is then damage."""
        return self.is_copied or self.is_unchanged()

    def is_unchanged(self) -> bool:
        return read_slot_headers(self._fd)[self._slot] == self.header

    def begin(self) -> None:
        """Raises SnapshotCorrupt if the digest table differs from what was sealed."""
        if table_digest(self.table()) != self.header.table_digest:
            pieces = self.shape.num_pieces
            raise SnapshotCorrupt(what=f"{self.what}, digest table", piece=0, pieces=pieces)

    def await_piece(self, index: int) -> None:
        """Wait until a piece is present."""

    def found(self, index: int, digest: int) -> None:
        """Check the digest of a written piece; raises SnapshotCorrupt if it has changed."""
        table = self.table()
        if index >= len(table) or digest != table[index]:
            raise SnapshotCorrupt(what=self.what, piece=index, pieces=len(table))

    def end(self, header_bytes: int, header_digest: str) -> None:
        """Check the whole image after it is written, given the length and digest of its header."""

    @property
    def content(self) -> tuple[int, int, str, str]:
        """Equal to `ShardFile.content` of its files."""
        return (
            self.shape.rank,
            self.shape.image_bytes,
            f"{self.shape.layout_id:016x}",
            f"{self.header.table_digest:016x}",
        )

    def has_later(self) -> bool:
        """True if a later version of the rank is sealed; this slot may then be overwritten soon."""
        return any(
            header.state is SlotState.SEALED and header.version > self.header.version
            for header in read_slot_headers(self._fd)
        )

    @property
    def since_last_s(self) -> float:
        """Seconds between the rank's previous sealed version and this one; 0 if there is none."""
        found = [
            self.header.sealed_ns - header.sealed_ns
            for header in read_slot_headers(self._fd)
            if header.state is SlotState.SEALED and header.version < self.header.version
        ]
        return min(found, default=0) / 1e9

    def copy_to(self, copy: memoryview) -> None:
        """Copy what is not read yet into `copy`, of a whole image; it may then be overwritten."""
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
        """Return the layout and the length of the image's header; raises SnapshotCorrupt."""
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
        with self.shared_lock or nullcontext():
            if self.copy is None and self.before_read is not None:
                self.before_read()
            if self.copy is not None:
                target[:] = self.copy[at : at + len(target)]
                return
            done = 0
            while done < len(target):
                done += os.preadv(self._fd, [target[done:]], self._image_at + at + done)
            if self.shared_lock is None:
                self._read_to = max(self._read_to, at + done)


class CopyBeforeOverwrite:
    """Monitors slots while they are written. `gap_s` may pass without a read of a slot."""

    def __init__(
        self, version: Version, shards: Sequence[SealedSlot], room: CopyBuffers, *, gap_s: float
    ) -> None:
        self._version = version
        self._shards = shards
        self._room = room
        self._gap_s = gap_s
        self._poll_s = 0.0
        for shard in shards:
            shard.before_read = self.poll

    @property
    def is_tight(self) -> bool:
        """True if the slots may be overwritten between two polls."""
        least_s = max(OFTEN_S, _GAPS * self._gap_s)
        return any(shard.since_last_s < least_s for shard in self._shards)

    def poll(self) -> None:
        """Copy the rest if a later version is sealed; called before each read. Raises as `copy`."""
        now_s = clock.now_s()
        if now_s >= self._poll_s:
            self._poll_s = now_s + _POLL_S
            if any(shard.has_later() for shard in self._shards):
                self.copy()

    def copy(self) -> None:
        """Copy all committed shards now, if they fit; raises SlotOverwritten if one has changed."""
        for shard in self._shards:
            shard.before_read = None
        ready = [shard for shard in self._shards if shard.is_committed]
        blocks = self._room.lend([shard.shape.image_bytes for shard in ready])
        if blocks is not None:
            for shard, block in zip(ready, blocks, strict=True):
                shard.copy_to(block)
        if not all(shard.is_unchanged() for shard in self._shards):
            raise SlotOverwritten(self._version)


def newest_version(fds: ArenaFds, world_size: int) -> Version | None:
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
    found = {
        rank: SealedSlot(fd, slot, header, read_shape(fd))
        for rank, some in sorted(fds.items())
        for fd in some
        if read_shape(fd).world_size == world_size
        for slot, header in enumerate(read_slot_headers(fd))
        if header.state is SlotState.SEALED and header.version == version
    }
    return list(found.values())


def write_shard(storage: Storage, folder: str, shard: SealedSlot, pace: Pace) -> ShardFile:
    """Write both files durably; raises SnapshotCorrupt (other digests), CheckpointError."""
    data_name, _ = file_names(shard)
    with storage.stream(f"{folder}/{data_name}", shard.shape.image_bytes, pace) as file:
        described = write_image(file, shard)
    put_table(storage, folder, shard)
    return described


def put_table(storage: Storage, folder: str, shard: SealedSlot) -> None:
    """Write the digest table durably, after the bytes of the image."""
    crash_point("smp.checkpoint.shard_written")
    storage.put(f"{folder}/{file_names(shard)[1]}", shard.table())
    crash_point("smp.checkpoint.part_shard_written")


def file_names(shard: SealedSlot) -> tuple[str, str]:
    name = f"rank-{shard.shape.rank:05d}"
    return f"{name}.safetensors", f"{name}.digests"


def write_image(file: FileSink, shard: SealedSlot) -> ShardFile:
    """Fill a file with a rank's image; return its entry for the index. Raises as `write_shard`."""
    shard.begin()
    layout, start = shard.layout()
    header_digest = append(file, shard, 0, start, is_whole=True).hexdigest()
    for index, piece in enumerate(layout.pieces):
        shard.await_piece(index)
        digest = append(file, shard, start + piece.offset, piece.num_bytes, is_whole=True)
        shard.found(index, digest.intdigest())
    shard.end(start, header_digest)
    return shard_file(shard, header_digest)


def shard_file(shard: SealedSlot, header_digest: str) -> ShardFile:
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


def append(
    file: FileSink, shard: SealedSlot, at: int, size: int, *, is_whole: bool = False
) -> xxhash.xxh3_64:
    """Append these bytes of the image; return the digest of the bytes put into the file.

    `is_whole`: the file has the whole image, so its offsets are those of the image.
    """
    digest, end = xxhash.xxh3_64(), at + size
    while at < end:
        room = file.room(shard.copy if is_whole else None)[: end - at]
        if not file.is_in_place:
            shard.read_into(room, at)
        digest.update(room)
        file.take(len(room))
        at += len(room)
    return digest
