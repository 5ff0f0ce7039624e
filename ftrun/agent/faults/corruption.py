"""Corrupts stored data: snapshots, mirrors and parity for other nodes, checkpoints on disk.

Runs in the main thread, for `ftrun inject-fault` only. Digests stay unchanged, except for parity
rows in `make_stale`.

Rule 1: an arena is changed only when its rank is dead.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from ftrun.errors import FaultRefused, LayoutUnknown
from ftrun.ids import Rank, Version
from ftrun.snapshot.layout import parse_header
from ftrun.wire.shared_memory.arena import Arena, SlotState, read_slot_headers
from ftrun.wire.shared_memory.parity_region import ParityRegion, ParityRegionState

_WHOLE = (ParityRegionState.COMPLETE, ParityRegionState.COMMITTED)


def newest_common(arenas: Mapping[Rank, Sequence[int]], ranks: Sequence[int]) -> Version:
    held = [set(_sealed(arenas.get(Rank(rank), ()))) for rank in ranks]
    common = set.intersection(*held) if held else set()
    if not common:
        raise FaultRefused(
            "there is no snapshot yet that all ranks of this node have sealed: does the script "
            "call ftrun.attach, and has it made some steps?"
        )
    return max(common)


def flip_from(arenas: Mapping[Rank, Sequence[int]], rank: int, oldest: Version) -> None:
    for fd in arenas.get(Rank(rank), ()):
        with closing(Arena(fd, writable=True)) as arena:
            for slot in range(arena.shape.num_slots):
                header = arena.header(slot)
                if header.state is SlotState.SEALED and header.version >= oldest:
                    _flip(arena, slot)


def _sealed(fds: Sequence[int]) -> list[Version]:
    headers = [header for fd in fds for header in read_slot_headers(fd)]
    return [header.version for header in headers if header.state is SlotState.SEALED]


def _flip(arena: Arena, slot: int) -> None:
    """Flip a bit in the middle of the largest piece; padding between pieces has no digest."""
    image = arena.image(slot)
    layout, start = parse_header(image)
    piece = max(layout.pieces, key=lambda found: found.num_bytes)
    image[start + piece.offset + piece.num_bytes // 2] ^= 0x10
    image.release()


def check_kept(parity_regions: Sequence[int], *, at_least: int) -> None:
    """Check that this node stores data of at least `at_least` versions for other nodes."""
    found = 0
    for fd in parity_regions:
        with closing(_open(fd)) as region:
            found += region.state in _WHOLE and bool(_contents(region))
    if found < at_least:
        raise FaultRefused(
            f"this node stores {found} protected versions of other nodes; this fault needs "
            f"{at_least}. A node stores them after some steps of a script that calls ftrun.attach, "
            "on several nodes"
        )


def truncate(parity_regions: Sequence[int]) -> None:
    """Overwrite the second half of each stored mirror and parity row with zeros."""
    for fd in parity_regions:
        with closing(_open(fd)) as region:
            for view in _contents(region):
                half = len(view) // 2
                view[half:] = bytes(len(view) - half)
                view.release()


def make_stale(parity_regions: Sequence[int]) -> None:
    """Overwrite the newest version with the bytes and row digests of the version before it."""
    opened = [_open(fd) for fd in parity_regions]
    try:
        whole = [v for v in opened if v.state in _WHOLE and v.record is not None]
        whole.sort(key=lambda region: region.record.version if region.record else (-1, -1))
        if len(whole) < 2:
            raise FaultRefused(
                f"this node stores {len(whole)} protected versions of other nodes at the moment; "
                "this fault needs 2. Retry in a few seconds"
            )
        old, new = whole[-2:]
        assert old.record is not None
        assert new.record is not None
        for index in range(min(old.record.num_rows, new.record.num_rows)):
            if old.record.block_bytes == new.record.block_bytes:
                new.row(index)[:] = old.row(index)
                new.store_row(index, old.row_digest(index))
        for position in set(old.mirrored_positions()) & set(new.mirrored_positions()):
            before, now = old.mirror(position), new.mirror(position)
            if before is not None and now is not None and len(before) == len(now):
                now[:] = before
    finally:
        for region in opened:
            region.close()


def _open(fd: int) -> ParityRegion:
    copy = os.dup(fd)
    try:
        return ParityRegion(copy)
    except LayoutUnknown:
        os.close(copy)
        raise FaultRefused(
            "the parity regions of this node are being written. Retry in a few seconds"
        ) from None


def _contents(region: ParityRegion) -> list[memoryview]:
    if region.state not in _WHOLE or region.record is None:
        return []
    rows = [i for i in range(region.record.num_rows) if region.row_digest(i)]
    mirrors = (region.mirror(position) for position in region.mirrored_positions())
    return [*(region.row(index) for index in rows), *(view for view in mirrors if view is not None)]


def newest_file(directory: Path) -> Path:
    files = [path for path in sorted((directory / "latest").glob("rank-*")) if _has_images(path)]
    if not files:
        raise FaultRefused(f"there is no checkpoint in {directory} yet")
    return max(files, key=lambda path: path.stat().st_size)


def _has_images(path: Path) -> bool:
    return path.suffix in (".safetensors", ".pieces")


def flip_in_file(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))
