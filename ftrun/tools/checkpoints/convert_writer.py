"""Writes the shards of a new world, entry by entry.

A few threads assemble the entries; one thread writes them.

Rule 1: A file is written from its first byte to its last, so that its bytes do not depend on the
        number or the speed of the threads.
Rule 2: The number of entries in memory is at most the number of threads plus one. Ranks that have
        the same entry get the same bytes, which are assembled once.

Numbers are converted from one dtype to another as bits, rounded to the nearest, ties to even, as
torch does. Any dtype except F64 is converted through F32, which can represent every value of the
smaller ones.

Source: parallel within a file as across files is the nested parallel reconfiguration of Universal
Checkpointing (arXiv 2406.18820), without files in between.
"""

from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from ftrun.sharding.partition import StoredRegion
from ftrun.sharding.source_index import Bits, BoxCopy, RegionIndex, gathered
from ftrun.sharding.world_layout import PlacedEntry, WorldLayout
from ftrun.smp.checkpoint.index import ShardFile
from ftrun.smp.checkpoint.storage.direct_file import DirectFile, no_pace
from ftrun.smp.checkpoint.storage.local import replaced, replaced_large
from ftrun.snapshot.layout import (
    ITEM_BYTES,
    PLAIN_NAME,
    CopyTiming,
    Layout,
    LayoutEntry,
    make_layout,
)

MAX_FILES = 4
"""Files that are written at the same time; each takes two buffers."""
_NUMPY: dict[str, type[np.floating]] = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
_AT_ONCE = 1 << 20
"""Items that are converted together, which bounds the temporary memory."""


class CheckedFiles(Protocol):
    """The files of a version, whose bytes are compared with their digests."""

    def read(self, rank: int, name: str, first_byte: int, num_bytes: int) -> memoryview:
        """Returns bytes of an entry of a rank; CheckpointError: they are damaged."""
        ...


class Assembler:
    """Assembles parts of whole tensors from the files of a version, in any thread."""

    def __init__(self, files: CheckedFiles, index: RegionIndex) -> None:
        self._files = files
        self._index = index

    def assembled(
        self, regions: Sequence[StoredRegion], num_items: int, old: str, new: str
    ) -> Bits:
        """Returns [num_items] from dtype `old` as dtype `new`; items outside the regions are 0.

        Of copies that have diverged, the mean is returned. Raises CheckpointError if a file is
        damaged.
        """
        read = [
            gathered(copies, num_items, ITEM_BYTES[old], self._read)
            for copies in self._index.copies(regions)
        ]
        made = read[0] if len(read) == 1 else mean(read, old)
        return made if old == new else converted(made, old, new)

    def _read(self, copy: BoxCopy) -> memoryview:
        (holder,) = copy.holders
        item_bytes = ITEM_BYTES[copy.dtype]
        first, num_bytes = copy.first * item_bytes, copy.span * item_bytes
        return self._files.read(holder.rank, holder.entry.name, first, num_bytes)


@dataclass(frozen=True)
class Conversion:
    """The old and the new world.

    Args:
        dtypes: new dtypes by tensor name.
        plain: the plain values of each new rank.
        when: of each tensor, by name.
    """

    before: WorldLayout
    after: WorldLayout
    dtypes: Mapping[str, str]
    plain: Sequence[bytes]
    when: Mapping[str, CopyTiming]

    @cached_property
    def placed(self) -> list[dict[str, PlacedEntry]]:
        return [
            {self.after.own_name(rank, name): one for name, one in entries.items()}
            for rank, entries in enumerate(self.after.entries)
        ]

    @cached_property
    def layouts(self) -> list[Layout]:
        old = {name: one.dtype for name, one in self.before.wholes.items()}
        dtypes = {**old, **self.dtypes}
        return [
            make_layout(
                [
                    LayoutEntry(name, dtypes[one.name], one.shape, self.when[one.name])
                    for name, one in placed.items()
                ],
                plain_bytes=len(self.plain[rank]) + 8,
                metadata={"format": "pt", "ftrun.rank": str(rank)},
            )
            for rank, placed in enumerate(self.placed)
        ]


class WorldWriter:
    """Writes the files of all ranks with `workers` threads."""

    def __init__(self, conversion: Conversion, assembler: Assembler, *, workers: int) -> None:
        self._job = conversion
        self._assembler = assembler
        self._workers = workers

    @property
    def layout_ids(self) -> list[str]:
        """`ShardFile.layout_id` of each new rank."""
        return [xxhash.xxh3_64_hexdigest(one.header) for one in self._job.layouts]

    def write(self, folder: Path, ranks_here: Container[int] = range(1 << 30)) -> list[ShardFile]:
        """Writes the files of some ranks, durable; CheckpointError: the source is damaged."""
        found: list[ShardFile] = []
        with ThreadPoolExecutor(self._workers, thread_name_prefix="convert") as pool:
            for ranks in self._batches(ranks_here):
                found += self._write_ranks(folder, ranks, pool)
        return found

    def _batches(self, ranks_here: Container[int]) -> Iterator[list[int]]:
        """Yields ranks whose files have the same layout, a few at a time."""
        alike: dict[tuple[LayoutEntry, ...], list[int]] = {}
        for rank, layout in enumerate(self._job.layouts):
            if rank in ranks_here:
                alike.setdefault(layout.entries, []).append(rank)
        for ranks in alike.values():
            yield from (ranks[at : at + MAX_FILES] for at in range(0, len(ranks), MAX_FILES))

    def _write_ranks(
        self, folder: Path, ranks: Sequence[int], pool: ThreadPoolExecutor
    ) -> list[ShardFile]:
        with ExitStack() as ends:
            writers = {}
            for rank in ranks:
                path = folder / f"rank-{rank:05d}.safetensors"
                file = ends.enter_context(replaced_large(path, no_pace))
                writers[rank] = _ShardWriter(rank, file, self._job.layouts[rank])
            for some, data in self._in_order(ranks, pool):
                for rank in some:
                    writers[rank].add(data)
        return [writers[rank].finish(folder) for rank in ranks]

    def _in_order(
        self, ranks: Sequence[int], pool: ThreadPoolExecutor
    ) -> Iterator[tuple[list[int], memoryview]]:
        """Yields the bytes of each entry in the order of the files, and the ranks that have it."""
        waiting: deque[tuple[list[int], Future[memoryview]]] = deque()
        try:
            for entry in self._job.layouts[ranks[0]].entries:
                for some in self._alike(entry, ranks):
                    work = partial(self._bytes_of, entry, some[0])
                    waiting.append((some, pool.submit(work)))
                    if len(waiting) > self._workers:
                        first, done = waiting.popleft()
                        yield first, done.result()
            while waiting:
                first, done = waiting.popleft()
                yield first, done.result()
        finally:
            for _, left in waiting:
                left.cancel()

    def _alike(self, entry: LayoutEntry, ranks: Sequence[int]) -> list[list[int]]:
        if entry.name == PLAIN_NAME:
            return [[rank] for rank in ranks]
        found: dict[int, list[int]] = {}
        for rank in ranks:
            placed = self._job.placed[rank].get(entry.name)
            found.setdefault(id(placed), []).append(rank)
        return list(found.values())

    def _bytes_of(self, entry: LayoutEntry, rank: int) -> memoryview:
        if entry.name == PLAIN_NAME:
            text = self._job.plain[rank]
            data = len(text).to_bytes(8, "little") + text
            return memoryview(data.ljust(entry.num_bytes, b"\0"))
        placed = self._job.placed[rank].get(entry.name)
        if placed is None:  # the filler of a gap
            return memoryview(bytes(entry.num_bytes))
        old = self._job.before.wholes[placed.name].dtype
        made = self._assembler.assembled(placed.patches, placed.num_items, old, entry.dtype)
        return made.view(np.uint8).data


class _ShardWriter:
    """Writes one file in order; digests are of the bytes that were written."""

    def __init__(self, rank: int, file: DirectFile, layout: Layout) -> None:
        self._rank = rank
        self._file = file
        self._layout = layout
        self._digest = xxhash.xxh3_64()
        self._left = 0
        """Remaining bytes of the current piece."""
        self._sizes = deque(piece.num_bytes for piece in layout.pieces)
        self._digests: list[int] = []
        file.write(layout.header)

    def add(self, data: memoryview) -> None:
        self._file.write(data)
        while data:
            if not self._left:
                self._add_empty_pieces()
                self._left = self._sizes.popleft()
                self._digest = xxhash.xxh3_64()
            part = data[: self._left]
            self._digest.update(part)
            self._left -= len(part)
            data = data[len(part) :]
            if not self._left:
                self._digests.append(self._digest.intdigest())

    def finish(self, folder: Path) -> ShardFile:
        """Writes the digests, durable; the file itself already is."""
        self._add_empty_pieces()
        assert not self._left
        assert len(self._digests) == len(self._layout.pieces)
        table = np.array(self._digests, np.uint64).tobytes()
        name = f"rank-{self._rank:05d}"
        with replaced(folder / f"{name}.digests") as write:
            write(table)
        header_digest = xxhash.xxh3_64_hexdigest(self._layout.header)
        return ShardFile(
            rank=self._rank,
            file=f"{name}.safetensors",
            digests=f"{name}.digests",
            num_bytes=self._layout.image_bytes,
            num_pieces=len(self._digests),
            layout_id=header_digest,
            table_digest=xxhash.xxh3_64_hexdigest(table),
            header_digest=header_digest,
        )

    def _add_empty_pieces(self) -> None:
        while self._sizes and not self._sizes[0]:
            self._sizes.popleft()
            self._digests.append(xxhash.xxh3_64_intdigest(b""))


def bits_type(item_bytes: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype(f"u{item_bytes}")


def converted(bits: Bits, old: str, new: str) -> Bits:
    """Converts [items] between two dtypes of `world_layout.FLOATS`."""
    made: Bits = np.empty(bits.shape, bits_type(8 if new == "F64" else 4 if new == "F32" else 2))
    for at in range(0, len(bits), _AT_ONCE):
        part = bits[at : at + _AT_ONCE]
        made[at : at + _AT_ONCE] = _to_bits(_numbers(part, old), new)
    return made


def mean(copies: Sequence[Bits], dtype: str) -> Bits:
    """Returns the mean of copies, each [items]: added in F64 in the order given, rounded once."""
    made = np.empty_like(copies[0])
    for at in range(0, len(made), _AT_ONCE):
        total = _numbers(copies[0][at : at + _AT_ONCE], dtype).astype(np.float64)
        for copy in copies[1:]:
            total += _numbers(copy[at : at + _AT_ONCE], dtype)
        made[at : at + _AT_ONCE] = _to_bits(total / len(copies), dtype)
    return made


def _numbers(bits: Bits, dtype: str) -> npt.NDArray[np.floating]:
    """Returns F64 unchanged, and all other dtypes as F32."""
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    found = bits.view(_NUMPY[dtype])
    return found if dtype == "F64" else found.astype(np.float32)


def _to_bits(numbers: npt.NDArray[np.floating], dtype: str) -> Bits:
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow becomes infinite
        if dtype == "F64":
            return numbers.astype(np.float64).view(np.uint64)
        narrow = numbers.astype(np.float32)
        if dtype != "BF16":
            made = narrow.astype(_NUMPY[dtype])
            return made.view(bits_type(made.itemsize))
    raw = narrow.view(np.uint32)
    rounded = (raw + np.uint32(0x7FFF) + ((raw >> 16) & 1)) >> 16
    upper = raw >> 16
    # A NaN keeps its bits; without a mantissa bit among the upper ones it would become infinite.
    upper |= ((upper & 0x7F) == 0).astype(np.uint32) << 6
    return np.where(np.isnan(narrow), upper, rounded).astype(np.uint16)
