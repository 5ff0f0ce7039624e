"""Checks that ranks which should hold equal values do so.

Plain values are compared as trees, with a `TensorContent` in place of each tensor.

Comparing the digest tables of tensors reads no data and proves that equal entries at equal
positions match. A small entry is hashed together with its neighbours. If a neighbour is part of a
sharded tensor, the digest differs from rank to rank. The bytes of the small entry are then
compared. Padding that rules describe is ignored; a note names tensors that lose it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Protocol

import xxhash

from ftrun.errors import RanksDiffer
from ftrun.ids import Rank
from ftrun.sharding.partition import StoredRegion
from ftrun.sharding.source_index import (
    MOST_BYTES,
    BoxCopy,
    ByteRange,
    Chunk,
    Holder,
    WholeTensor,
    gathered,
)
from ftrun.sharding.world_layout import PlacedEntry, WorldLayout
from ftrun.snapshot import boxes
from ftrun.snapshot.boxes import Box, item_at, overlap, strides_of
from ftrun.snapshot.layout import ITEM_BYTES
from ftrun.snapshot.plain_values import join
from ftrun.snapshot.shard_header import ShardHeader

_LONGEST = 80
_MOST_NAMES = 5


@dataclass(frozen=True, slots=True)
class TensorContent:
    """A tensor as a description and a digest, so that it can be compared without its bytes."""

    described: str
    digest: int

    def __str__(self) -> str:
        return f"{self.described} with digest {self.digest:016x}"


@dataclass(frozen=True, slots=True)
class StateDifference:
    """The first path at which two trees differ."""

    path: str
    one: str
    other: str


def difference(one: object, other: object, path: str) -> StateDifference | None:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return _of_mappings(one, other, path)
    if _is_sequence(one) and _is_sequence(other):
        return _of_sequences(one, other, path)  # type: ignore[arg-type]
    if type(one) is type(other) and (one == other or (one != one and other != other)):
        return None  # two NaN count as equal
    return StateDifference(path, _shown(one), _shown(other))


def _of_mappings(
    one: Mapping[object, object], other: Mapping[object, object], path: str
) -> StateDifference | None:
    for key, value in one.items():
        here = join(path, key)
        if key not in other:
            return StateDifference(here, _shown(value), "missing")
        if (found := difference(value, other[key], here)) is not None:
            return found
    extra = next((key for key in other if key not in one), None)
    if extra is not None or len(one) != len(other):
        return StateDifference(join(path, extra), "missing", _shown(other.get(extra)))
    return None


def _of_sequences(
    one: Sequence[object], other: Sequence[object], path: str
) -> StateDifference | None:
    if len(one) != len(other) or type(one) is not type(other):
        kinds = (f"a {type(s).__name__} of {len(s)}" for s in (one, other))
        return StateDifference(path, *kinds)
    for at, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        if (found := difference(mine, theirs, f"{path}[{at}]")) is not None:
            return found
    return None


def _is_sequence(value: object) -> bool:
    return isinstance(value, list | tuple)


def _shown(value: object) -> str:
    text = str(value) if isinstance(value, TensorContent) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


class CheckedReads(Protocol):
    """The shards of a version; bytes are compared with their digests when they are read."""

    @property
    def headers(self) -> Mapping[Rank, ShardHeader]: ...

    def expect(self, ranges: Sequence[ByteRange]) -> None: ...

    def read(self, rank: Rank, offset: int, num_bytes: int) -> memoryview: ...


def check_replicas(
    saved: Mapping[str, WholeTensor], boxes: Mapping[str, Box], shards: CheckedReads
) -> None:
    """Compare the holders of all chunks that a rank is about to read, in `boxes` by name.

    Raises RanksDiffer if two ranks hold different content. One comparison for each chunk is enough,
    because a tensor that differs by mistake (sharded by hand, or on a rank that trained separately)
    differs on all holders.
    """
    pairs: list[tuple[str, Holder, Holder]] = []
    for name, box in boxes.items():
        for chunk in saved[name].chunks if saved[name].is_shared else ():
            if overlap(chunk.box, box) is not None:
                other = unequal_holder(chunk, shards.headers)
                if other is not None:
                    pairs.append((name, chunk.holders[0], other))
    for name, one, other in pairs:
        if not one.entry.is_small:
            raise _difference(name, one, other)
    _compare(pairs, shards)


def unequal_holder(chunk: Chunk, headers: Mapping[Rank, ShardHeader]) -> Holder | None:
    """The first holder whose digests differ from those of the preferred one.

    It proves that the content differs, unless the entries are small.
    """
    first, *others = chunk.holders
    if not others:
        return None
    known = headers[first.rank].fingerprint(first.entry)
    return next((one for one in others if headers[one.rank].fingerprint(one.entry) != known), None)


def have_equal_content(one: WholeTensor, other: WholeTensor, shards: CheckedReads) -> bool:
    """Compare two tensors of equal dtype and shape, which are saved under different names.

    Reads them only if their digests do not prove that they are equal.
    """
    prints = [
        [
            (c.box, shards.headers[c.holders[0].rank].fingerprint(c.holders[0].entry))
            for c in t.chunks
        ]
        for t in (one, other)
    ]
    if prints[0] == prints[1]:
        return True
    item_bytes = ITEM_BYTES[one.dtype]

    def read(copy: BoxCopy) -> memoryview:
        there = copy.bytes_in(copy.holders[0])
        return shards.read(there.rank, there.offset, there.num_bytes)

    def part(tensor: WholeTensor, box: Box) -> bytes:
        copies = tensor.copies_into(StoredRegion(tensor.name, box, 0, strides_of(box.shape)))
        return gathered(copies, box.num_items, item_bytes, read).tobytes()

    in_whole = boxes.whole(one.shape)
    parts = boxes.cut_to(in_whole, strides_of(one.shape), MOST_BYTES // item_bytes)
    return all(part(one, box) == part(other, box) for box in parts)


def _compare(pairs: Sequence[tuple[str, Holder, Holder]], shards: CheckedReads) -> None:
    ranges = {_range(holder) for _, *two in pairs for holder in two}
    in_order = sorted(ranges, key=lambda one: (one.rank, one.offset))
    shards.expect(in_order)
    digests = {
        one: xxhash.xxh3_64_intdigest(shards.read(one.rank, one.offset, one.num_bytes))
        for one in in_order
    }
    for name, one, other in pairs:
        if digests[_range(one)] != digests[_range(other)]:
            raise _difference(name, one, other)


def _range(holder: Holder) -> ByteRange:
    return ByteRange(holder.rank, holder.entry.offset, holder.entry.num_bytes)


def _difference(name: str, one: Holder, other: Holder) -> RanksDiffer:
    values = (str(one.entry), "of other content")
    return RanksDiffer(key=name, ranks=(one.rank, other.rank), values=values)


class Shards(Protocol):
    """The shards of a version."""

    @property
    def headers(self) -> Sequence[ShardHeader]:
        """Headers of all ranks, in order of rank."""
        ...

    def read(self, rank: int, name: str, first_byte: int, num_bytes: int) -> memoryview: ...


def differing(shards: Shards, world: WorldLayout) -> list[str]:
    """A line for each tensor of which a rank's part differs from the part that should be equal."""
    found = []
    for name, whole in world.wholes.items():
        alike: dict[int, list[int]] = {}
        for rank, entries in enumerate(world.entries):
            if name in entries:
                alike.setdefault(id(entries[name]), []).append(rank)
        pairs = chain.from_iterable(((first, o) for o in rest) for first, *rest in alike.values())
        other = next((pair for pair in pairs if not _is_same(shards, world, name, *pair)), None)
        if other is not None:
            found.append(
                f"{name} is {whole.dtype}{list(whole.shape)} by {world.sharing[name].rule}, and "
                f"ranks {other[0]} and {other[1]}, which should be equal, differ: use own or "
                "average, or name the axis along which it is split"
            )
    return found


def _is_same(shards: Shards, world: WorldLayout, name: str, one: int, other: int) -> bool:
    ranks = (one, other)
    names = {rank: world.own_name(rank, name) for rank in ranks}
    headers = {rank: shards.headers[rank] for rank in ranks}
    entry = headers[one].entries[names[one]]
    prints = [headers[rank].fingerprint(headers[rank].entries[names[rank]]) for rank in ranks]
    if prints[0] == prints[1]:
        return True
    if entry.is_small:
        data = [shards.read(rank, names[rank], 0, entry.num_bytes) for rank in ranks]
        if data[0] == data[1]:
            return True
    placed = world.entries[one][name]
    if sum(patch.box.num_items for patch in placed.patches) == placed.num_items:
        return False
    runs = _runs(placed)
    return all(
        shards.read(one, names[one], *run) == shards.read(other, names[other], *run) for run in runs
    )


def _runs(placed: PlacedEntry) -> Iterator[tuple[int, int]]:
    """First byte and number of bytes of each run of an entry that is not padding."""
    item_bytes = ITEM_BYTES[placed.dtype]
    for patch in placed.patches:
        for first, count in _item_runs(patch):
            yield first * item_bytes, count * item_bytes


def _item_runs(patch: StoredRegion) -> Iterator[tuple[int, int]]:
    """Contiguous runs of items of a region, because the stride of the last dimension is 1."""
    *outer, count = patch.box.shape
    steps = patch.strides[:-1]
    for at in product(*map(range, outer)):
        yield patch.first + item_at(at, steps), count


def padding_notes(shards: Shards, before: WorldLayout, after: WorldLayout) -> list[str]:
    """A line about padding that is not zero and that the new world does not have."""
    found = [
        name
        for name in before.wholes
        if before.padded_shape(name) != after.padded_shape(name)
        and _is_padding_used(shards, before, name)
    ]
    if not found:
        return []
    more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
    names = ", ".join(found[:_MOST_NAMES])
    return [f"dropped, because the padded size changes: padding of {names}{more} that is not zero"]


def _is_padding_used(shards: Shards, world: WorldLayout, name: str) -> bool:
    item_bytes = ITEM_BYTES[world.wholes[name].dtype]
    held = [(rank, entries[name]) for rank, entries in enumerate(world.entries) if name in entries]
    placed = {id(one): (rank, one) for rank, one in reversed(held)}
    runs = (
        (rank, world.own_name(rank, name), first * item_bytes, count * item_bytes)
        for rank, one in placed.values()
        for region in one.padding
        for first, count in _item_runs(region)
    )
    return any(bytes(shards.read(*run)).strip(b"\0") for run in runs)
