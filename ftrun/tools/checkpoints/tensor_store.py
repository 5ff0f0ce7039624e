"""A folder with a file for each tensor, or for each part of one: atoms and what they are made from.

    atoms/atoms.json                          index, sealed with its digest; written last
    atoms/values.msgpack                      plain values of a world of one rank
    atoms/model.up.weight/fp32.safetensors    a parameter
    atoms/model.up.weight/exp_avg.safetensors a value of its optimizer state

Each file is a safetensors file with one tensor. The index has digests of its data, for each
`PIECE_BYTES`; whatever is read is compared with them.

Rule 1: the index names all files, so a folder without an index is no store.
Rule 2: several workers, on one host or on several, write shares of the tensors to one folder
        next to the final one, whose name has the digest of what they write. Each leaves the index
        of its share. The worker that finds all of them writes the index, which is the same
        whichever worker that is and however many there are, and renames the folder.

Source: Universal Checkpointing (arXiv 2406.18820, sections 4 and 5): one file for each parameter
and state; parallel over tensors, balanced by size.
"""

import glob
import math
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import xxhash

from ftrun.cli.screen.atomic_output import sync_path
from ftrun.errors import CheckpointError, SnapshotCorrupt
from ftrun.sharding.atoms import TensorFile
from ftrun.sharding.partition import StoredRegion
from ftrun.sharding.rule_parser import read_rules
from ftrun.sharding.source_index import RegionIndex
from ftrun.sharding.world_layout import StoredEntry, WorldLayout, read_world
from ftrun.smp.checkpoint.index import SealedContent, seal, unsealed
from ftrun.smp.checkpoint.storage.local import replaced
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.boxes import Box
from ftrun.snapshot.layout import ITEM_BYTES, CopyTiming, LayoutEntry
from ftrun.tools.checkpoints.convert_writer import Assembler
from ftrun.tools.export.safetensors import TensorDescription, header_of
from ftrun.wire.messages.checkpoint import ATOMS_NAME

VALUES_NAME = "values.msgpack"
PIECE_BYTES = 1 << 20

Stage = Literal["fragments", "padded", "atoms"]


class FilePlan(msgspec.Struct, frozen=True):
    """A file before it is written; `regions` as in `TensorFile`."""

    path: str  # in the folder, without .safetensors
    entry: str
    dtype: str
    shape: tuple[int, ...]
    regions: tuple[tuple[str, tuple[int, ...], tuple[int, ...], int, tuple[int, ...], int], ...]
    """Of each: tensor, offsets and shape of the box, first item, strides, number of the copy."""
    part: str = ""
    member: str = ""

    def tensor_file(self) -> TensorFile:
        regions = tuple(
            StoredRegion(tensor, Box(offsets, shape), first, strides, copy)
            for tensor, offsets, shape, first, strides, copy in self.regions
        )
        return TensorFile(self.entry, self.dtype, self.shape, regions, self.part, self.member)


class SavedFile(FilePlan, frozen=True):
    """A file in the folder."""

    num_bytes: int = 0
    digests: str = ""  # 16 hexadecimal digits for each piece of the data


class SavedEntry(msgspec.Struct, frozen=True):
    """An entry of the world of one rank; `was` is its dtype in the checkpoint."""

    name: str
    dtype: str
    was: str
    shape: tuple[int, ...]
    of: str | None
    is_lazy: bool  # CopyTiming of the entry


class StoreIndex(SealedContent, frozen=True):
    """The index of a store, or of a worker's share of it."""

    stage: Stage
    run_id: str
    generation: int
    step: int
    mesh: str  # of the checkpoint, in words
    rules: str  # of the world of one rank
    values_digest: str
    entries: tuple[SavedEntry, ...]
    files: tuple[SavedFile, ...]
    unions: tuple[FilePlan, ...] = ()  # of fragments: the files that union makes
    notes: tuple[str, ...] = ()


def plan_of(path: str, file: TensorFile) -> FilePlan:
    regions = tuple(
        (one.tensor, one.box.offsets, one.box.shape, one.first, one.strides, one.copy)
        for one in file.regions
    )
    return FilePlan(path, file.entry, file.dtype, file.shape, regions, file.part, file.member)


class TensorStore:
    """An existing store; raises CheckpointError if it cannot be used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = index_of(folder)
        self.packed = _content(folder / VALUES_NAME)
        if xxhash.xxh3_64_hexdigest(self.packed) != self.index.values_digest:
            raise CheckpointError(f"{folder / VALUES_NAME} is damaged: its digest does not match")
        self.values: dict[str, bytes] = plain.decode(self.packed)
        self._own = threading.local()

    @cached_property
    def world(self) -> WorldLayout:
        rules = read_rules(self.index.rules, source=f"{self.folder / ATOMS_NAME}")
        stored = [StoredEntry(e.name, e.dtype, e.shape, e.of) for e in self.index.entries]
        return read_world(rules, [stored])

    @property
    def when(self) -> dict[str, CopyTiming]:
        return {
            one.name: CopyTiming.LAZY if one.is_lazy else CopyTiming.BOUNDARY
            for one in self.index.entries
        }

    def regions(self) -> RegionIndex:
        found = RegionIndex()
        for at, one in enumerate(self.index.files):
            entry = LayoutEntry(one.path, one.dtype, one.shape, CopyTiming.LAZY)
            found.add(at, entry, one.tensor_file().regions)
        return found

    def read(self, rank: int, name: str, first_byte: int, num_bytes: int) -> memoryview:
        """Returns bytes of a file's data; `rank` is its position in the index."""
        file = self.index.files[rank]
        size = math.prod(file.shape) * ITEM_BYTES[file.dtype]
        first = first_byte // PIECE_BYTES * PIECE_BYTES
        end = min(size, -(-(first_byte + num_bytes) // PIECE_BYTES) * PIECE_BYTES)
        key = (rank, first, end)
        last: tuple[object, memoryview] | None = getattr(self._own, "last", None)
        if last is None or last[0] != key:
            data = self._read(file, file.num_bytes - size + first, end - first)
            self._check(file, first // PIECE_BYTES, data)
            last = self._own.last = (key, data)
        return last[1][first_byte - first : first_byte - first + num_bytes]

    def close(self) -> None:
        """Do nothing, because files are open only while they are read."""

    def _read(self, file: SavedFile, at: int, num_bytes: int) -> memoryview:
        path = self.folder / f"{file.path}.safetensors"
        try:
            with path.open("rb", buffering=0) as opened:
                opened.seek(at)
                data = memoryview(bytearray(num_bytes))
                got = 0
                while got < num_bytes and (count := opened.readinto(data[got:])):
                    got += count
        except OSError as error:
            raise CheckpointError(f"{path} is not readable: {error.strerror}") from error
        if got < num_bytes:
            raise CheckpointError(f"{path} ends too early: {num_bytes - got} bytes are missing")
        return data

    def _check(self, file: SavedFile, first: int, data: memoryview) -> None:
        for at in range(0, len(data), PIECE_BYTES):
            piece = first + at // PIECE_BYTES
            digest = xxhash.xxh3_64_hexdigest(data[at : at + PIECE_BYTES])
            if file.digests[16 * piece : 16 * (piece + 1)] != digest:
                what = str(self.folder / f"{file.path}.safetensors")
                error = SnapshotCorrupt(what=what, piece=piece, pieces=len(file.digests) // 16)
                raise CheckpointError(str(error))


def index_of(folder: Path) -> StoreIndex:
    """Raises CheckpointError if it is missing or damaged."""
    return unsealed(_content(folder / ATOMS_NAME), StoreIndex, what=str(folder))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} is not readable: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class FileJob:
    """A file to write.

    Args:
        wanted: the regions of the source that fill it.
        old: dtype in the source.
    """

    plan: FilePlan
    wanted: Sequence[StoredRegion]
    old: str

    @property
    def num_bytes(self) -> int:
        return self.plan.tensor_file().num_bytes


def write_files(
    folder: Path, jobs: Sequence[FileJob], assembler: Assembler, *, workers: int
) -> list[SavedFile]:
    """Writes files, durable, in the order of `jobs`; CheckpointError: the source is damaged.

    The largest first, so that no thread is busy with one after the others have ended.
    """
    folders = {(folder / job.plan.path).parent for job in jobs}
    for path in folders:
        path.mkdir(exist_ok=True)
    order = sorted(range(len(jobs)), key=lambda at: -jobs[at].num_bytes)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="atoms")
    try:
        waiting = {at: pool.submit(_write, folder, jobs[at], assembler) for at in order}
        found = [waiting[at].result() for at in range(len(jobs))]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    for path in folders:
        sync_path(path)
    return found


def _write(folder: Path, job: FileJob, assembler: Assembler) -> SavedFile:
    plan, file = job.plan, job.plan.tensor_file()
    num_items = file.num_bytes // ITEM_BYTES[plan.dtype]
    bits = assembler.assembled(job.wanted, num_items, job.old, plan.dtype)
    data = bits.view(np.uint8).data
    header = header_of([TensorDescription(plan.member or plan.entry, plan.dtype, plan.shape)])
    with replaced(folder / f"{plan.path}.safetensors") as write:
        write(header)
        write(data)
    pieces = (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))
    digests = "".join(map(xxhash.xxh3_64_hexdigest, pieces))
    fields = msgspec.structs.asdict(plan)
    return SavedFile(**fields, num_bytes=len(header) + len(data), digests=digests)


def with_files(index: StoreIndex, files: Iterable[SavedFile]) -> StoreIndex:
    in_order = sorted(files, key=lambda one: one.path)
    return msgspec.structs.replace(index, files=tuple(in_order))


def write_index(folder: Path, index: StoreIndex, values: bytes) -> None:
    """Makes the folder a store; the files are durable already."""
    _put(folder / VALUES_NAME, values)
    _put(folder / ATOMS_NAME, seal(index))
    sync_path(folder)


def shares_folder(out: Path, index: StoreIndex) -> Path:
    """The folder to which workers write their shares of one operation; it becomes `out`.

    Shares of another checkpoint, or by other rules, go to another folder.
    """
    key = xxhash.xxh3_64_hexdigest(seal(_without_files(index)))
    return out.with_name(f"{_shares_prefix(out)}{key}")


def has_shares(out: Path) -> bool:
    """Whether there are shares of a store that is not complete."""
    return any(out.parent.glob(f"{glob.escape(_shares_prefix(out))}*"))


def _shares_prefix(out: Path) -> str:
    return f".{out.name}.shares-"


def join_shares(out: Path, share: tuple[int, int], index: StoreIndex, values: bytes) -> list[int]:
    """Adds a worker's share, and renames the folder to `out` if all shares are there.

    Args:
        share: number of the worker, from 1, and number of workers.

    Returns the numbers of the missing shares. FileNotFoundError: another worker has joined them.
    """
    folder, (number, count) = shares_folder(out, index), share
    _put(folder / _share_name(number, count), seal(index))
    sync_path(folder)
    missing = [n for n in range(1, count + 1) if not (folder / _share_name(n, count)).exists()]
    if missing and folder.exists():
        return missing
    found = [_share(folder, n, count) for n in range(1, count + 1)]
    write_index(folder, with_files(index, (file for one in found for file in one.files)), values)
    folder.rename(out)
    sync_path(out.parent)
    return []


def joined(out: Path, index: StoreIndex) -> StoreIndex:
    """The index of the store that shares of this operation have become; removes what they left.

    Raises CheckpointError if it is another one.
    """
    found = index_of(out)
    if _without_files(found) != _without_files(index):
        raise CheckpointError(
            f"{out} exists already, and is of another checkpoint or of other rules. Name another "
            "path, or remove it"
        )
    names = ("share-*-of-*.json", ".share-*", f".{ATOMS_NAME}.*", f".{VALUES_NAME}.*")
    left = [path for name in names for path in out.glob(name)]
    for folder in {(out / one.path).parent for one in found.files}:
        left += folder.glob(".*.safetensors.*")  # of workers that were killed
    for path in left:
        path.unlink(missing_ok=True)
    return found


def _share(folder: Path, number: int, count: int) -> StoreIndex:
    path = folder / _share_name(number, count)
    return unsealed(path.read_bytes(), StoreIndex, what=f"{path}")


def _share_name(number: int, count: int) -> str:
    return f"share-{number}-of-{count}.json"


def _without_files(index: StoreIndex) -> StoreIndex:
    return msgspec.structs.replace(index, files=())


def _put(path: Path, data: bytes) -> None:
    with replaced(path) as write:
        write(data)
