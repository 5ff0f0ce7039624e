"""Loads a checkpoint into arenas.

Runs in:  the SMP, in its disk lane's thread.
Takes in: a directory of checkpoints.
Gives:    a `LoadedCheckpoint` with one new arena per rank, or a `CheckpointError`.

`latest` is tried first, then every other whole checkpoint, the last written first. Rejected ones
are recorded with their reasons, and nothing with a digest mismatch is ever offered. The loaded
version has generation -1, which is older than anything that generation 0 of the new run captures.

A node loads only its own ranks. If the world size differs, each node loads some of the previous
ranks, as arenas of the previous world. It serves them to the workers of other nodes. Bytes that
several nodes need are read by one of them (`ftrun.smp.checkpoint.shared_load`).
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ftrun import clock
from ftrun.errors import (
    CheckpointError,
    LayoutUnknown,
    NoneOfThisRun,
    NoUsableCheckpoint,
    SnapshotCorrupt,
)
from ftrun.ids import Rank, Version, version
from ftrun.smp.checkpoint.index import read_index, read_indexes
from ftrun.smp.checkpoint.reader import CheckpointFiles, FolderSource
from ftrun.smp.checkpoint.shared_load import (
    LOADED_GENERATION,
    Check,
    LoadGroup,
    SharedLoad,
    load_share,
)
from ftrun.smp.checkpoint.storage.local import LATEST_NAME

RETRY_S = 0.2
"""Seconds before a failed read is repeated."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadJob:
    """What to load.

    Args:
        world_size: of this run.
        ranks: the node's own.
        check: raises MemoryTooSmall if this number of bytes does not fit.
        only: name of the one checkpoint that may be used; empty: any.
        life: the life that must have written it; empty: any. See `GenerationPlan.life`.
        company: the nodes that load it together; None: this one alone.
        set_aside: names of checkpoints that no node of the run may load, and the reasons.
    """

    world_size: int
    ranks: Sequence[Rank]
    check: Check
    only: str = ""
    life: str = ""
    company: LoadGroup | None = None
    set_aside: Mapping[str, str] = field(default_factory=dict)

    @property
    def together(self) -> LoadGroup:
        """The nodes that load it. A single node takes all ranks of another world size."""
        return self.company or LoadGroup([list(self.ranks)], 0)


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """Arenas filled from a checkpoint; the caller closes the descriptors.

    Args:
        rejected: reasons, by name, for the checkpoints that this node cannot use.
        rest: what other nodes have read of it and must still send; None: all of it is here.
    """

    version: Version
    path: Path | str
    fds: list[int]
    rejected: dict[str, str]
    world_size: int
    rest: SharedLoad | None = None


def load_checkpoint(directory: Path, order: LoadJob) -> LoadedCheckpoint | None:
    """Fill arenas from the newest usable checkpoint; None if there is no checkpoint at all.

    Args:
        directory: need not exist.
        order: what to load.

    Raises:
        NoUsableCheckpoint, NoneOfThisRun: as `load_first`.
        MemoryTooSmall: the arenas do not fit.
        OSError: the directory cannot be read, not even at the second attempt.
    """
    try:
        return _load_from(directory, order)
    except OSError as error:
        _say_again(directory, error)
    return _load_from(directory, order)


def _load_from(directory: Path, order: LoadJob) -> LoadedCheckpoint | None:
    rejected: dict[str, str] = {}
    candidates = _candidates(directory, rejected)
    if order.only:
        candidates = [directory / order.only]
    sources = [FolderSource(folder) for folder in candidates]
    return load_first(sources, rejected, order, where=str(directory))


def load_first(
    sources: Sequence[CheckpointFiles], rejected: dict[str, str], order: LoadJob, *, where: str
) -> LoadedCheckpoint | None:
    """Fill arenas from the first usable checkpoint; None if there is no checkpoint at all.

    Args:
        sources: in the order in which they are tried.
        rejected: reasons, by name, for unusable checkpoints; more are added.
        order: what to load.
        where: their location, for the message.

    Raises:
        NoUsableCheckpoint: there are checkpoints, and none of them can be used.
        NoneOfThisRun: none is of the requested life, except perhaps an unreadable one.
        MemoryTooSmall: the arenas do not fit.
    """
    left = {name: order.set_aside[name] for name in rejected if name in order.set_aside}
    for name in left:
        del rejected[name]
    has_own = not order.life
    for source in sources:
        name = Path(source.path).name
        try:
            if order.life and _twice(source, source.index).life != order.life:
                continue
            has_own = True
            if name in order.set_aside:
                left[name] = order.set_aside[name]
                continue
            return _load(source, rejected, order)
        except (CheckpointError, SnapshotCorrupt, LayoutUnknown) as error:
            rejected[name] = str(error)
        except OSError as error:
            what = error.filename or source.path
            rejected[name] = f"{what} is not readable: {error.strerror or error}"
    if not rejected and not left:
        return None
    if not left and not has_own:
        raise NoneOfThisRun(
            f"no checkpoint of this run is in {where}, unless it is one that cannot be read",
            rejected,
        )
    reasons = "; ".join(f"{name}: {reason}" for name, reason in {**left, **rejected}.items())
    raise NoUsableCheckpoint(
        f"no checkpoint in {where} can be used: {reasons}. Name another --checkpoint-dir, or start "
        "from the beginning with --resume never",
        rejected,
    )


def _load(source: CheckpointFiles, rejected: dict[str, str], order: LoadJob) -> LoadedCheckpoint:
    def attempt() -> LoadedCheckpoint:
        index = source.index()
        fds, rest = load_share(source, index, order.world_size, order.together, order.check)
        at = version(LOADED_GENERATION, index.step)
        return LoadedCheckpoint(at, source.path, fds, rejected, index.world_size, rest)

    return _twice(source, attempt)


def _twice(source: CheckpointFiles, attempt: Callable[[], _T]) -> _T:
    """Repeat a failed read once, because storage may stall."""
    try:
        return attempt()
    except (OSError, CheckpointError) as error:
        if not _may_pass(error):
            raise
        _say_again(source.path, error)
    return attempt()


def _candidates(directory: Path, rejected: dict[str, str]) -> list[Path]:
    """List the checkpoints to try; raise OSError if the directory exists and cannot be read."""
    try:
        found = [folder for folder, _ in read_indexes(directory)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    stalled = [error for error in _unreadable(directory, found).values() if _may_pass(error)]
    if stalled:
        _say_again(directory, stalled[0])
        found = [folder for folder, _ in read_indexes(directory)]
    link = directory / LATEST_NAME
    if link.is_symlink():
        latest = directory / os.readlink(link)
        if latest in found:
            found.remove(latest)
        found.insert(0, latest)
    # A crash between the two renames of a write leaves a whole checkpoint and no link.
    # A folder without a readable index is not listed by read_indexes, so it is named here.
    rejected.update((name, str(error)) for name, error in _unreadable(directory, found).items())
    return found


def _unreadable(directory: Path, found: Sequence[Path]) -> dict[str, CheckpointError]:
    bad: dict[str, CheckpointError] = {}
    for folder in sorted(directory.iterdir()):
        if folder not in found and folder.name.startswith("step-"):
            try:
                read_index(folder)
            except CheckpointError as error:
                bad[folder.name] = error.with_traceback(None)
    return bad


def _may_pass(error: Exception) -> bool:
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)


def _say_again(what: Path | str, error: Exception) -> None:
    _log.warning("%s cannot be read, and is tried once more: %s", what, str(error))
    clock.sleep(RETRY_S)
