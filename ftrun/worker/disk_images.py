"""Reads the shards of a checkpoint on disk.

Runs in:  the process of ftrun.tools.export.__main__; any of its threads. Does not import torch.
Takes in: the file locations of all ranks, with the digests from the checkpoint's index.
Gives:    a `ShardSource`: headers that are checked against the index, and unchecked bytes.

The constructor opens all files, because a run may remove the checkpoint during the export.
"""

import os
import resource
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ftrun.errors import CheckpointError, LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Rank
from ftrun.sharding.source_index import ByteRange
from ftrun.snapshot.shard_header import ShardHeader
from ftrun.wire.messages.checkpoint import ShardFileLocation
from ftrun.wire.shared_memory.arena import SlotHeader, SlotState
from ftrun.worker.reshard.source import make_head

_LENGTH_BYTES = 8
_LONGEST_HEADER = 1 << 30
_SPARE_FDS = 64


class DiskImages:
    """Shards of one checkpoint.

    Args:
        places: file locations of all ranks.

    Raises:
        CheckpointError: a file is missing, or differs from the index.
    """

    def __init__(self, places: Sequence[ShardFileLocation]) -> None:
        self._places = {Rank(place.rank): place for place in places}
        self._fds: dict[Rank, int] = {}
        self._heads: dict[Rank, ShardHeader] = {}
        _allow_files(len(places) + _SPARE_FDS)
        try:
            for rank, place in self._places.items():
                self._fds[rank] = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
                self._heads[rank] = _head(self._fds[rank], place)
        except OSError as error:
            self.close()
            raise CheckpointError(f"{error.filename} is not readable: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def path_of(self, rank: Rank) -> str:
        return self._places[rank].path

    def headers(self) -> Mapping[Rank, ShardHeader]:
        return self._heads

    def expect(self, ranges: Sequence[ByteRange]) -> None:
        """Do nothing, because `read` reads on demand."""

    def read(self, rank: Rank, offset: int, num_bytes: int) -> memoryview:
        path, at = self.path_of(rank), self._heads[rank].start + offset
        try:
            return memoryview(_read(self._fds[rank], at, num_bytes, path))
        except OSError as error:
            raise CheckpointError(f"{path} is not readable: {error.strerror}") from error

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def _head(fd: int, place: ShardFileLocation) -> ShardHeader:
    """Read the header and digest table of a shard, and check both against the index."""
    size = os.fstat(fd).st_size
    if size != place.num_bytes:
        raise CheckpointError(f"{place.path} has {size:,} bytes of {place.num_bytes:,}")
    length = int.from_bytes(_read(fd, 0, _LENGTH_BYTES, place.path), "little")
    num_bytes = _LENGTH_BYTES + min(length, size - _LENGTH_BYTES, _LONGEST_HEADER)
    header = _read(fd, 0, num_bytes, place.path)
    table = Path(place.digests_path).read_bytes()
    sealed = SlotHeader(SlotState.SEALED, 0, 0, size, int(place.table_digest, 16), 0)
    try:
        return make_head(
            memoryview(header),
            memoryview(table[: len(table) // 8 * 8]).cast("Q"),
            layout_id=int(place.header_digest, 16),
            sealed=sealed,
            what=place.path,
            rank=Rank(place.rank),
        )
    except SnapshotCorrupt as error:
        path, what = place.path, "its header is"
        if error.what.endswith("digest table"):
            path, what = place.digests_path, "these are"
        raise CheckpointError(f"{path} is damaged: {what} not what was written") from error
    except LayoutUnknown as error:
        raise CheckpointError(f"{place.path}: {error}") from error


def _read(fd: int, at: int, num_bytes: int, path: str) -> bytes:
    parts = []
    while num_bytes:
        part = os.pread(fd, num_bytes, at)
        if not part:
            raise CheckpointError(f"{path} ends after {at:,} bytes")
        parts.append(part)
        at += len(part)
        num_bytes -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _allow_files(count: int) -> None:
    """Raise the soft limit of open files to `count`, or to the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
