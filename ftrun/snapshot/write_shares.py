"""Divides the bytes of a version among the files of its ranks, so that each byte is written once.

Runs in:  the SMP of each node; the readers of a checkpoint. Pure.
Takes in: what each rank offers: the sections of its shard, with key, digest and position.
Gives:    the bytes of each image that files of other ranks hold; where the bytes of an image lie.

Rule 1: if key and digest of two sections are equal, so are their bytes. Nothing else counts.
Rule 2: the division depends only on the offers, so all nodes with the same offers make the same
        one. A node without all offers writes its images whole, and so more than others rely on.
Rule 3: a section is cut only at the borders of its pieces, so that a digest covers bytes of one
        file.
Source: replicas are written once (REFT, arXiv 2310.12670), in equal numbers of bytes by each writer
        (FastPersist, arXiv 2406.13768).
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from ftrun.snapshot.layout import PLAIN_NAME, Layout
from ftrun.snapshot.manifest import content_digests, sections_of

LEAST_BYTES = 1 << 16
"""Smaller sections are written by each rank: a file without gaps is worth more than their bytes."""

MOST_RANKS = 512
"""Ranks that write together: a node reads the offers of all of them."""

MOST_WRITERS = 64
"""Ranks that write the sections of one group: the index has the files of each for every rank."""

_LOAD_BYTES = 1 << 24
"""Loads that differ by less count as equal when the writers are chosen."""


class FileExtent(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of an image, from offset `first` on, and their file and offset there."""

    first: int
    num_bytes: int
    file: str
    at: int


class BorrowedBytes(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of an image, from offset `first` on, that are also at `at` in the image of `rank`.

    `table_digest` is that of the other rank's shard, as in its `ShardFile`.
    """

    first: int
    num_bytes: int
    rank: int
    at: int
    table_digest: str


class OfferedSection(msgspec.Struct, frozen=True, array_like=True):
    """A section of a shard: `first` is its offset in the image, `cut_bytes` the size of a piece."""

    key: int
    digest: int
    first: int
    num_bytes: int
    cut_bytes: int


class RankOffer(msgspec.Struct, frozen=True, array_like=True):
    """What one rank can write."""

    rank: int
    image_bytes: int
    table_digest: str
    sections: list[OfferedSection]


@dataclass(frozen=True, slots=True)
class _Copies:
    """One section that several ranks hold, and its offset in the image of each."""

    firsts: tuple[int, ...]
    num_bytes: int
    cut_bytes: int


def offer_of(
    rank: int, layout: Layout, start: int, table: memoryview, table_digest: str
) -> RankOffer:
    """`start`: offset of the data in the image; `table`: u64 digests of the pieces."""
    places = sections_of(layout)
    digests = memoryview(content_digests(places, table)).cast("Q")
    plain = layout.entries[-1]
    assert plain.name == PLAIN_NAME
    sections = [
        OfferedSection(
            one.section.key,
            digest,
            start + one.offset,
            one.section.num_bytes,
            layout.piece_bytes if one.section.count > 1 else one.section.num_bytes,
        )
        for one, digest in zip(places, digests, strict=True)
        if one.section.num_bytes >= LEAST_BYTES and one.offset != plain.offset
    ]
    return RankOffer(rank, start + layout.data_bytes, table_digest, sections)


def hold_equal(offers: Sequence[RankOffer]) -> bool:
    """Whether any rank would leave bytes to the file of another one."""
    return bool(_groups(offers))


def borrowed_bytes(
    offers: Sequence[RankOffer], ranks: Collection[int]
) -> dict[int, list[BorrowedBytes]]:
    """What each of `ranks` leaves to files of other ranks, in the order of its image.

    `offers` are of all ranks that write together, one of each.
    """
    found: dict[int, list[BorrowedBytes]] = {rank: [] for rank in ranks}
    tables = {offer.rank: offer.table_digest for offer in offers}
    groups = _groups(offers)
    loads = {offer.rank: offer.image_bytes for offer in offers}
    for holders, sections in groups:
        for rank in holders:
            loads[rank] -= sum(one.num_bytes for one in sections)
    for holders, sections in groups:
        writers = _writers([loads[rank] for rank in holders])
        for copies, at, num_bytes, turn in _cut(sections, [loads[holders[i]] for i in writers]):
            writer = holders[writers[turn]]
            loads[writer] += num_bytes
            lent_at = copies.firsts[writers[turn]] + at
            for rank, first in zip(holders, copies.firsts, strict=True):
                if rank != writer and rank in found:
                    one = BorrowedBytes(first + at, num_bytes, writer, lent_at, tables[writer])
                    found[rank].append(one)
    return {rank: _joined(some) for rank, some in found.items()}


def own_ranges(image_bytes: int, borrowed: Sequence[BorrowedBytes]) -> list[tuple[int, int]]:
    """The (first, number) of all other bytes of an image, in order."""
    found: list[tuple[int, int]] = []
    at = 0
    for one in borrowed:
        if one.first > at:
            found.append((at, one.first - at))
        at = one.first + one.num_bytes
    return [*found, (at, image_bytes - at)] if at < image_bytes else found


def located(extents: Sequence[FileExtent], first: int, num_bytes: int) -> Iterator[FileExtent]:
    """The extents of these bytes of an image, in order; raises ValueError if some are in no file.

    `extents` are those of the image, in order.
    """
    index = bisect_right(extents, first, key=lambda one: one.first) - 1
    end = first + num_bytes
    while first < end:
        one = extents[index] if 0 <= index < len(extents) else None
        size = one.first + one.num_bytes - first if one is not None else 0
        if one is None or first < one.first or size <= 0:
            raise ValueError(f"bytes {first:,} to {end:,} of an image are in no file")
        size = min(size, end - first)
        yield FileExtent(first, size, one.file, one.at + first - one.first)
        first += size
        index += 1


def _groups(offers: Sequence[RankOffer]) -> list[tuple[tuple[int, ...], list[_Copies]]]:
    """The sections that several ranks hold, by these ranks; those with the fewest ranks first."""
    holders: dict[tuple[int, int], list[tuple[int, OfferedSection]]] = defaultdict(list)
    for offer in sorted(offers, key=lambda one: one.rank):
        for section in offer.sections:
            holders[section.key, section.digest].append((offer.rank, section))
    found: dict[tuple[int, ...], list[_Copies]] = defaultdict(list)
    for some in holders.values():
        ranks = tuple(rank for rank, _ in some)
        if len(set(ranks)) == len(ranks) > 1:
            first = some[0][1]
            firsts = tuple(section.first for _, section in some)
            found[ranks].append(_Copies(firsts, first.num_bytes, first.cut_bytes))
    return sorted(found.items(), key=lambda one: (len(one[0]), one[0]))


def _writers(loads: Sequence[int]) -> list[int]:
    """Indices of the ranks that write, in order: those with the least, spread over all nodes."""

    def order(index: int) -> tuple[int, str]:
        return loads[index] // _LOAD_BYTES, f"{index:032b}"[::-1]

    return sorted(sorted(range(len(loads)), key=order)[:MOST_WRITERS])


def _cut(
    sections: Sequence[_Copies], loads: Sequence[int]
) -> Iterator[tuple[_Copies, int, int, int]]:
    """Each part of each section: its offset there, its bytes, and the index of its writer.

    Each writer gets neighbouring bytes, so that all have about equal loads.
    """
    left = _quotas(loads, sum(one.num_bytes for one in sections))
    turn = 0
    for one in sections:
        at = 0
        while at < one.num_bytes:
            size = one.num_bytes - at
            if turn + 1 < len(left):
                size = min(size, round(left[turn] / one.cut_bytes) * one.cut_bytes)
                if size <= 0:
                    left[turn + 1] += left[turn]
                    turn += 1
                    continue
            yield one, at, size, turn
            left[turn] -= size
            at += size


def _quotas(loads: Sequence[int], total: int) -> list[int]:
    """How much of a total each adds to its load, so that the largest sum is small."""
    lowest = sorted(loads)
    count, have = len(lowest), sum(lowest)
    while total + have < count * lowest[count - 1]:  # the largest load is above the level
        count -= 1
        have -= lowest[count]
    level, rest = divmod(total + have, count)
    found = [max(0, level - load) for load in loads]
    found[-1] += rest
    return found


def _joined(parts: Sequence[BorrowedBytes]) -> list[BorrowedBytes]:
    """In order; neighbours in both images become one."""
    found: list[BorrowedBytes] = []
    for one in sorted(parts, key=lambda part: part.first):
        last = found[-1] if found else None
        if last is not None and _end_of(last) == (one.rank, one.first, one.at):
            found[-1] = msgspec.structs.replace(last, num_bytes=last.num_bytes + one.num_bytes)
        else:
            found.append(one)
    return found


def _end_of(one: BorrowedBytes) -> tuple[int, int, int]:
    return one.rank, one.first + one.num_bytes, one.at + one.num_bytes
