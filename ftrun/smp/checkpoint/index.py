"""The index and the parts of a checkpoint, their files, and the names of folders.

Runs in:  the SMP, in its disk lane's thread; the process of ftrun.tools.checkpoints.catalog.
Takes in: a checkpoint's folder; the parts of a checkpoint that several nodes write.
Gives:    a `CheckpointIndex`, a `CheckpointPart` or a `StoredCheckpoint`, or a `CheckpointError`.

The files of an index and of a part carry their own digest: the text and its xxh3.

If several nodes hold equal bytes, one file has them for all (format 2). The image of a rank is then
in several files: its `extents` say where. A file of such parts is named after the parts, so that
two attempts to write a version never give different bytes the same name.

    step-00000042-g3                            a checkpoint in a directory
    .tmp-step-00000042-g3-1f2e3d4c-5b6a7988     the same, begun by several nodes
    step-00000042-g3-1f2e3d4c-5b6a7988          a checkpoint at a URL, begun or finished
                     run      run, token and world size

Parts of another run, of another world size or of other nodes go to another folder. They are
therefore never in the way of this run's parts, and never merged with them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import msgspec
import xxhash

from ftrun import clock
from ftrun.errors import CheckpointError
from ftrun.ids import Version, version
from ftrun.snapshot.write_shares import BorrowedBytes, FileExtent, located

FORMAT = 1
SHARED_FORMAT = 2
"""Of an index or a part with images that are in several files."""

LATEST_NAME = "latest"
STALE_S = 86_400.0
"""An incomplete checkpoint of another run is abandoned after this number of seconds."""

_NAME = re.compile(r"step-(\d{8,})-g(-?\d+)-([0-9a-f]{8})-([0-9a-f]{8})")

Sizes = Mapping[str, int | None]
"""Of the files in a folder, by name; None if the storage does not report a size."""

_T = TypeVar("_T", bound="SealedContent")


class ShardFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank's files in a checkpoint, as recorded in the index.

    `file` is the whole image if there are no `extents`; else the file with its header. `num_bytes`
    is the size of the image.
    """

    rank: int
    file: str
    digests: str
    num_bytes: int
    num_pieces: int
    layout_id: str  # hexadecimal like the digests: not every JSON reader keeps 64-bit numbers
    table_digest: str
    header_digest: str
    extents: list[FileExtent] = []
    borrowed: list[BorrowedBytes] = []
    """Only in a part: what other parts have."""

    @property
    def places(self) -> list[FileExtent]:
        return self.extents or [FileExtent(0, self.num_bytes, self.file, 0)]

    @property
    def data_names(self) -> list[str]:
        return list(dict.fromkeys([self.file, *(one.file for one in self.extents)]))

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.data_names, self.digests)

    @property
    def content(self) -> tuple[int, int, str, str]:
        """Two are equal exactly if the rank and all its bytes are equal."""
        return self.rank, self.num_bytes, self.layout_id, self.table_digest


class SealedContent(msgspec.Struct, frozen=True):
    """What a file with its own digest contains."""

    format: int


class CheckpointIndex(SealedContent, frozen=True):
    """The index of a checkpoint. `serial` grows with each index written to its directory."""

    serial: int
    run_id: str
    generation: int
    step: int
    world_size: int
    shards: list[ShardFile]
    life: str = ""
    """Of the run that wrote it; see `GenerationPlan.life`."""
    written_s: float = 0.0
    """Wall time; 0 if only the index file's own time is known."""


class CheckpointPart(SealedContent, frozen=True):
    """What one node has written; generation -1: loaded from another checkpoint."""

    run_id: str
    token: str
    generation: int
    step: int
    world_size: int
    shards: list[ShardFile]
    life: str = ""
    written_s: float = 0.0

    @property
    def key(self) -> tuple[str, str, int, int, int]:
        return self.run_id, self.token, self.generation, self.step, self.world_size


class DigestedFile(msgspec.Struct, frozen=True):
    """The content of index.json or of a part file: the text and its xxh3."""

    digest: str
    index: msgspec.Raw


def seal(content: SealedContent) -> bytes:
    text = msgspec.json.format(msgspec.json.encode(content), indent=1)
    return msgspec.json.encode(DigestedFile(xxhash.xxh3_64_hexdigest(text), msgspec.Raw(text)))


@lru_cache(maxsize=16)
def parse_index(data: bytes, *, what: str) -> CheckpointIndex:
    """Equal bytes are parsed once: a large world's index takes long, and each node reads all."""
    return unsealed(data, CheckpointIndex, what=f"{what}: its index")


def parse_part(data: bytes, *, what: str) -> CheckpointPart:
    return unsealed(data, CheckpointPart, what=f"{what}: the part")


def unsealed(data: bytes, kind: type[_T], *, what: str) -> _T:
    """Raises CheckpointError if the digest or the format is another one."""
    try:
        sealed = msgspec.json.decode(data, type=DigestedFile)
        if xxhash.xxh3_64_hexdigest(bytes(sealed.index)) != sealed.digest:
            raise CheckpointError(f"{what} is damaged: its digest does not match")
        content = msgspec.json.decode(sealed.index, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{what} is not valid: {error}") from error
    if content.format not in (FORMAT, SHARED_FORMAT):
        raise CheckpointError(
            f"{what} has format {content.format}; {FORMAT} and {SHARED_FORMAT} are supported"
        )
    return content


def format_of(shards: Iterable[ShardFile]) -> int:
    return SHARED_FORMAT if any(one.extents or one.borrowed for one in shards) else FORMAT


def file_sizes(shards: Iterable[ShardFile]) -> dict[str, int]:
    """Bytes of each data file of a checkpoint; of some shards: at least this number."""
    found: dict[str, int] = {}
    for place in (place for shard in shards for place in shard.places):
        found[place.file] = max(found.get(place.file, 0), place.at + place.num_bytes)
    return found


def stored_bytes(index: CheckpointIndex) -> int:
    """Bytes of all files of a checkpoint, without its index."""
    tables = sum(8 * shard.num_pieces for shard in index.shards)
    return sum(file_sizes(index.shards).values()) + tables


def with_places(shards: Mapping[int, ShardFile]) -> list[ShardFile]:
    """Replace what shards have borrowed by its place in the files of the other ranks.

    `shards` are those of all ranks, by rank. Raises CheckpointError if a file does not have it, or
    if the places are not those of each byte of an image once.
    """
    found = [_with_places(shard, shards) for _, shard in sorted(shards.items())]
    for shard in found:
        end = 0
        for one in shard.places:
            if one.first != end:
                break
            end += one.num_bytes
        if end != shard.num_bytes:
            raise CheckpointError(
                f"rank {shard.rank} has {shard.num_bytes:,} bytes, and its files do not have those "
                f"from {end:,} on exactly once. Request a later version"
            )
    return found


def _with_places(shard: ShardFile, shards: Mapping[int, ShardFile]) -> ShardFile:
    if not shard.borrowed:
        return shard
    found = list(shard.extents)
    for one in shard.borrowed:
        lender = shards.get(one.rank)
        if lender is None or lender.table_digest != one.table_digest:
            raise CheckpointError(
                f"rank {shard.rank} relies on other bytes of rank {one.rank} than were written. "
                "Request a later version"
            )
        try:
            lent = list(located(lender.places, one.at, one.num_bytes))
        except ValueError as error:
            raise CheckpointError(
                f"rank {shard.rank} relies on bytes that rank {one.rank} has not written: {error}. "
                "Request a later version"
            ) from error
        moved = one.first - one.at
        found += [msgspec.structs.replace(part, first=part.first + moved) for part in lent]
    return msgspec.structs.replace(
        shard, extents=sorted(found, key=lambda part: part.first), borrowed=[]
    )


# --- folders ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A folder of a checkpoint.

    Args:
        run_tag: of the run that began it; empty if the name does not contain it.
        index: None if it is incomplete or damaged.
        problem: the reason why its index cannot be used; empty if it has none yet.
        may_pass: the index could not be read just now, which may pass.
        written_s: wall time at which the index was written; 0 if unknown.
    """

    name: str
    version: Version
    run_tag: str = ""
    index: CheckpointIndex | None = None
    problem: str = ""
    may_pass: bool = False
    written_s: float = 0.0

    @property
    def is_incomplete(self) -> bool:
        return self.index is None and not self.problem

    @property
    def age_s(self) -> float:
        """Seconds since the index was written; 0 if unknown."""
        return clock.wall_s() - self.written_s if self.written_s else 0.0

    @property
    def order(self) -> tuple[int, Version]:
        return (self.index.serial if self.index is not None else 0, self.version)


def tagged_name(key: CheckpointPart, generation: int) -> str:
    tag = tag_of(f"{key.run_id}/{key.token}/{key.world_size}")
    return f"step-{key.step:08d}-g{generation}-{tag_of(key.run_id)}-{tag}"


def parse_tagged(name: str) -> tuple[Version, str] | None:
    """Return version and run tag of a name; None if it is another name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    step, generation, run_tag, _ = match.groups()
    return version(int(generation), int(step)), run_tag


def part_name(ranks: Sequence[int]) -> str:
    return f"part-{ranks[0]:05d}.json"


def part_names(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith("part-"))


def offer_name(ranks: Sequence[int]) -> str:
    return f"offer-{ranks[0]:05d}"


def offer_names(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith("offer-"))


def parse_stored(
    data: bytes | None, name: str, path: str, tagged: tuple[Version, str] | None
) -> StoredCheckpoint:
    """Return the checkpoint with this index; it is incomplete if there is none."""
    at, run_tag = tagged if tagged is not None else (version(0, 0), "")
    if data is None:
        return StoredCheckpoint(name, at, run_tag)
    try:
        index = parse_index(data, what=path)
    except CheckpointError as error:
        return StoredCheckpoint(name, at, run_tag, problem=str(error))
    if tagged is None:
        at = version(index.generation, index.step)
    return StoredCheckpoint(name, at, run_tag, index, written_s=index.written_s)


def is_whole(shard: ShardFile, sizes: Sizes) -> bool:
    """True if all its files exist, with their sizes if the storage reports these."""
    if sizes.get(shard.digests, -1) not in (8 * shard.num_pieces, None):
        return False
    return all(
        is_size(shard, sizes.get(name, -1), wanted) for name, wanted in file_sizes([shard]).items()
    )


def is_size(shard: ShardFile, size: int | None, wanted: int) -> bool:
    """True if a data file may have this size; `wanted`: its size by this shard.

    A file with parts of images ends with bytes of another one.
    """
    return size is None or size == wanted or (bool(shard.extents) and size > wanted)


def is_stale(changed_s: float | None) -> bool:
    return changed_s is not None and clock.wall_s() - changed_s > STALE_S


def tag_of(text: str) -> str:
    return xxhash.xxh32_hexdigest(text.encode())
