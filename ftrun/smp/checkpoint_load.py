"""A checkpoint, back into arenas.

Runs in:  the SMP, in its disk lane's thread.
Takes in: a directory that `checkpoint` has written to.
Gives:    a `Loaded` with one fresh arena per rank, or a `CheckpointError` in words.

`latest` is tried first, then every other whole checkpoint, the one written last first; what is
set aside on the way is noted, and nothing whose digests do not match is ever offered. The loaded
version has generation -1: older than anything that generation 0 of the new run will take.

A node loads its own ranks only. Of another world size each loads a part of the ranks there were, as
arenas of the old world, and gives the others what their workers read. What several nodes need, one
of them reads (`ftrun.smp.shared_load`).
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ftrun.errors import CheckpointError, LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Rank, Version, version
from ftrun.smp.checkpoint_files import LATEST_NAME
from ftrun.smp.checkpoint_index import read_index, read_indexes
from ftrun.smp.checkpoint_source import FolderSource, Source
from ftrun.smp.shared_load import LOADED_GENERATION, Check, Company, SharedLoad, load_share


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """What is to be loaded.

    Args:
        world_size: of this run.
        ranks: the node's own.
        check: raises MemoryTooSmall where so many bytes do not fit.
        only: name of the one checkpoint that may be used; empty: any.
        life: of the run that must have written it; empty: any. See `Plan.life`.
        company: the nodes that load it together; None: this one alone.
    """

    world_size: int
    ranks: Sequence[Rank]
    check: Check
    only: str = ""
    life: str = ""
    company: Company | None = None

    @property
    def together(self) -> Company:
        """The nodes that load it; one alone takes all ranks of another world size."""
        return self.company or Company([list(self.ranks)], 0)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Arenas filled from a checkpoint; the descriptors are the caller's to close.

    Args:
        rest: what other nodes have read of it and is to be had of them; None: all is here.
    """

    version: Version
    path: Path | str
    fds: list[int]
    notes: list[str]
    world_size: int
    rest: SharedLoad | None = None


def load_checkpoint(directory: Path, order: LoadOrder) -> Loaded | None:
    """Fill arenas from the newest usable checkpoint; None where there is none at all.

    Args:
        directory: need not exist.
        order: what is to be loaded.

    Raises:
        CheckpointError: there are checkpoints, and none of them can be used.
        MemoryTooSmall: the arenas do not fit.
    """
    notes: list[str] = []
    candidates = _candidates(directory, notes)
    if order.only:
        candidates = [directory / order.only]
    if order.life:
        notes.clear()
    sources = [FolderSource(folder) for folder in candidates]
    return load_first(sources, notes, order, where=str(directory))


def load_first(
    sources: Sequence[Source], notes: list[str], order: LoadOrder, *, where: str
) -> Loaded | None:
    """Fill arenas from the first that can be used; None where there is none at all.

    Args:
        sources: in the order in which they are tried.
        notes: what was set aside already; more is added.
        order: what is to be loaded.
        where: they are, for the message.

    Raises:
        CheckpointError: there are checkpoints, and none of them can be used.
        MemoryTooSmall: the arenas do not fit.
    """
    for source in sources:
        if order.life and _life_of(source) != order.life:
            continue
        try:
            index = source.index()
            fds, rest = load_share(source, index, order.world_size, order.together, order.check)
        except (CheckpointError, SnapshotCorrupt, LayoutUnknown) as error:
            notes.append(str(error))
            continue
        except OSError as error:
            what = error.filename or source.path
            notes.append(f"{what} is not readable: {error.strerror or error}")
            continue
        at = version(LOADED_GENERATION, index.step)
        return Loaded(at, source.path, fds, notes, index.world_size, rest)
    if not notes:
        return None
    raise CheckpointError(
        f"no checkpoint in {where} can be used: {'; '.join(notes)}. Name another "
        "--checkpoint-dir, or start from the beginning with --resume never"
    )


def _candidates(directory: Path, notes: list[str]) -> list[Path]:
    if not directory.is_dir():
        return []
    found = [folder for folder, _ in read_indexes(directory)]
    link = directory / LATEST_NAME
    if link.is_symlink():
        latest = directory / os.readlink(link)
        if latest in found:
            found.remove(latest)
        found.insert(0, latest)
    # A crash between the two renames of a write leaves a whole checkpoint and no link.
    # A folder without a readable index is not listed by read_indexes, so it is named here.
    for folder in sorted(directory.glob("step-*")):
        if folder not in found:
            with suppress(OSError):
                _note_unreadable(folder, notes)
    return found


def _life_of(source: Source) -> str | None:
    """None: it cannot be read, so it is nobody's."""
    try:
        return source.index().life
    except (CheckpointError, OSError):
        return None


def _note_unreadable(folder: Path, notes: list[str]) -> None:
    try:
        read_index(folder)
    except CheckpointError as error:
        notes.append(str(error))
