"""Whether a checkpoint on disk is what was written: every byte of it.

Runs in:  the process of ftrun.tools.checkpoints.catalog; a few threads, as hashing needs no
          interpreter lock.
Takes in: a checkpoint's folder.
Gives:    what is wrong with it, in words: the file, the piece, the tensors that lie there.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import xxhash

from ftrun.errors import CheckpointError, LayoutUnknown
from ftrun.smp.checkpoint.index import CheckpointIndex, ShardFile, read_index
from ftrun.snapshot.layout import PLAIN_NAME, Layout, Piece, parse_header

_MOST = 3
"""Damaged pieces of a file that are named; the rest is counted."""
_THREADS = 4
_HEADER_LENGTH_BYTES = 8
_LONGEST_HEADER = 1 << 30


class Readable(Protocol):
    """One file of a checkpoint, wherever it is."""

    @property
    def size(self) -> int:
        """In bytes."""

    def read(self, at: int, num_bytes: int) -> bytes:
        """So many bytes from there on, fewer where it ends."""


Opened = Callable[[str], AbstractContextManager[Readable]]


@dataclass
class _File:
    path: Path
    fd: int = -1

    def __enter__(self) -> "_File":
        self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def read(self, at: int, num_bytes: int) -> bytes:
        return os.pread(self.fd, num_bytes, at)


def verify_folder(folder: Path) -> tuple[CheckpointIndex | None, list[str]]:
    """Read all of it; its index, and what is wrong.

    Args:
        folder: of one checkpoint.
    """
    try:
        index = read_index(folder)
    except CheckpointError as error:
        return None, [str(error)]
    problems = missing_ranks(index)
    check = partial(verify_shard, lambda name: _File(folder / name))
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        for found in pool.map(check, index.shards):
            problems += found
    return index, problems


def missing_ranks(index: CheckpointIndex) -> list[str]:
    """Those that no file is of, in words."""
    there = {shard.rank for shard in index.shards}
    missing = [rank for rank in range(index.world_size) if rank not in there]
    return [f"its index has no rank {rank}" for rank in missing]


def verify_shard(opened: Opened, shard: ShardFile) -> list[str]:
    """What is wrong with the files of one rank.

    Args:
        opened: opens a file of the checkpoint.
        shard: as the index has it.
    """
    try:
        return list(_problems_of(opened, shard))
    except OSError as error:
        return [f"{shard.file} is not readable: {error.strerror or error}"]
    except CheckpointError as error:
        return [f"{shard.file} is not readable: {error}"]


def _problems_of(opened: Opened, shard: ShardFile) -> Iterator[str]:
    with opened(shard.digests) as file:
        table = file.read(0, file.size)
    if f"{xxhash.xxh3_64_intdigest(table):016x}" != shard.table_digest:
        yield f"{shard.digests}: {len(table)} bytes that are not the digests that were written"
        return
    digests = memoryview(table).cast("Q")
    with opened(shard.file) as file:
        size = file.size
        if size != shard.num_bytes:
            yield f"{shard.file} has {size:,} bytes of {shard.num_bytes:,}"
            return
        header = _read_header(file, size)
        if xxhash.xxh3_64_hexdigest(header) != shard.header_digest:
            yield f"{shard.file}: its header is not the one that was written"
            return
        try:
            layout, start = parse_header(memoryview(header), image_bytes=size)
        except LayoutUnknown as error:
            yield f"{shard.file}: {error}"
            return
        yield from _damaged(file, shard, layout, start, digests)


def _read_header(file: Readable, size: int) -> bytes:
    length = int.from_bytes(file.read(0, _HEADER_LENGTH_BYTES), "little")
    return file.read(0, _HEADER_LENGTH_BYTES + min(length, size, _LONGEST_HEADER))


def _damaged(
    file: Readable, shard: ShardFile, layout: Layout, start: int, digests: Sequence[int]
) -> Iterator[str]:
    count = 0
    for index, piece in enumerate(layout.pieces):
        data = file.read(start + piece.offset, piece.num_bytes)
        if index < len(digests) and xxhash.xxh3_64_intdigest(data) == digests[index]:
            continue
        count += 1
        if count <= _MOST:
            yield (
                f"{shard.file}: piece {index} of {len(layout.pieces)} is damaged "
                f"({piece.num_bytes:,} bytes at {start + piece.offset:,}: {_names(layout, piece)})"
            )
    if count > _MOST:
        yield f"{shard.file}: {count - _MOST} more pieces are damaged"


def _names(layout: Layout, piece: Piece) -> str:
    """The tensors that lie there."""
    end = piece.offset + piece.num_bytes
    names = [
        "plain values" if entry.name == PLAIN_NAME else entry.name
        for entry in layout.entries
        if entry.offset < end and entry.offset + entry.num_bytes > piece.offset
    ]
    rest = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + rest
