"""Loads a checkpoint into arenas.

Runs in:  the SMP, in its disk lane's thread.
Takes in: a directory of checkpoints, or a URL.
Gives:    a `LoadedCheckpoint` with one new arena per rank, or a `CheckpointError`.

`latest` is tried first, then every other whole checkpoint, the last written first. Rejected
checkpoints are recorded with their reasons. Data with a digest mismatch is never used. The loaded
version has generation -1, so it is older than every version that the new run captures.

A node loads only its own ranks. If the world size differs, each node loads some of the previous
ranks, as arenas of the previous world. It serves them to the workers of other nodes. Bytes that
several nodes need are read by one of them (`ftrun.smp.checkpoint.shared_load`).
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ftrun import clock
from ftrun.errors import (
    CheckpointError,
    LayoutUnknown,
    NoneOfThisRun,
    NoUsableCheckpoint,
    SnapshotCorrupt,
)
from ftrun.ids import Rank, Version, version
from ftrun.smp.checkpoint.index import LATEST_NAME, StoredCheckpoint
from ftrun.smp.checkpoint.reader import CheckpointFiles
from ftrun.smp.checkpoint.shared_load import (
    LOADED_GENERATION,
    Check,
    LoadGroup,
    SharedLoad,
    load_share,
)
from ftrun.smp.checkpoint.storage.storage import Storage, open_storage

RETRY_S = 0.2
"""Seconds before a failed read is repeated."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadJob:
    """What to load.

    Args:
        world_size: world size of this run.
        ranks: local ranks.
        check: raises MemoryTooSmall if this number of bytes does not fit.
        only: name of the only checkpoint that may be used; empty: any checkpoint.
        life: life of the run that must have written it, see `GenerationPlan.life`; empty: any.
        group: the nodes that load it together; None: this node loads it alone.
        excluded: names of checkpoints that no node of the run may load, and the reasons.
    """

    world_size: int
    ranks: Sequence[Rank]
    check: Check
    only: str = ""
    life: str = ""
    group: LoadGroup | None = None
    excluded: Mapping[str, str] = field(default_factory=dict)

    @property
    def together(self) -> LoadGroup:
        """The nodes that load it. A single node loads all ranks of a checkpoint."""
        return self.group or LoadGroup([list(self.ranks)], 0)


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """Arenas filled from a checkpoint; the caller closes the descriptors.

    Args:
        rejected: checkpoints that this node cannot use: reasons by name.
        rest: pieces that other nodes read and must still send; None: no piece is missing.
    """

    version: Version
    path: str
    fds: list[int]
    rejected: dict[str, str]
    world_size: int
    rest: SharedLoad | None = None


def load_checkpoint(where: str, job: LoadJob, stop: threading.Event) -> LoadedCheckpoint | None:
    """Fill arenas from the newest usable checkpoint; None if there is no checkpoint at all.

    `where` need not exist. `only` may be `latest`.

    Raises:
        NoUsableCheckpoint: there are checkpoints, but none can be used.
        NoneOfThisRun: no readable checkpoint is of the requested life.
        MemoryTooSmall: the arenas do not fit.
        CheckpointError: the store cannot be reached.
        OSError: the directory could not be read in two attempts.
    """
    with open_storage(where, stop) as storage:
        found = _listed(storage, job.only)
        rejected = {one.name: one.problem for one in found if one.problem}
        sources = [CheckpointFiles(storage, one) for one in found if one.index is not None]
        return _load_first(sources, rejected, job, where=storage.shown)


def _listed(storage: Storage, only: str) -> list[StoredCheckpoint]:
    """List the checkpoints to try, `latest` first; repeat a failed read once."""
    try:
        found = _list(storage, only)
    except OSError as error:
        _report_again(storage.shown, error)
        return _list(storage, only)
    stalled = [one for one in found if one.may_pass]
    if stalled:
        _report_again(storage.shown, stalled[0].problem)
        found = _list(storage, only)
    return found


def _list(storage: Storage, only: str) -> list[StoredCheckpoint]:
    latest = storage.latest_name()
    if only:
        name = latest if only == LATEST_NAME and latest else only
        return [storage.describe(name)]
    found = [one for one in storage.checkpoints() if not one.is_incomplete]
    if storage.is_local and latest and latest not in [one.name for one in found]:
        found.append(storage.describe(latest))
    # A crash between the two renames of a write leaves a whole checkpoint and no link.
    return sorted(found, key=lambda one: one.name != latest)


def _load_first(
    sources: Sequence[CheckpointFiles], rejected: dict[str, str], job: LoadJob, *, where: str
) -> LoadedCheckpoint | None:
    left = {name: job.excluded[name] for name in rejected if name in job.excluded}
    for name in left:
        del rejected[name]
    has_own = not job.life
    for source in sources:
        name = source.stored.name
        try:
            if job.life and source.index().life != job.life:
                continue
            has_own = True
            if name in job.excluded:
                left[name] = job.excluded[name]
                continue
            return _load(source, rejected, job)
        except (CheckpointError, SnapshotCorrupt, LayoutUnknown) as error:
            rejected[name] = str(error)
        except OSError as error:
            what = error.filename or source.path
            rejected[name] = f"{what} is not readable: {error.strerror or error}"
    if not rejected and not left:
        return None
    if not left and not has_own:
        raise NoneOfThisRun(f"no readable checkpoint in {where} is of this run", rejected)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in {**left, **rejected}.items())
    raise NoUsableCheckpoint(
        f"no checkpoint in {where} can be used: {reasons}. Use another --checkpoint-dir, or start "
        "from the beginning with --resume never",
        rejected,
    )


def _load(source: CheckpointFiles, rejected: dict[str, str], job: LoadJob) -> LoadedCheckpoint:
    try:
        return _attempt(source, rejected, job)
    except (OSError, CheckpointError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError) or isinstance(cause, FileNotFoundError):
            raise
        _report_again(source.path, error)
    return _attempt(source, rejected, job)


def _attempt(source: CheckpointFiles, rejected: dict[str, str], job: LoadJob) -> LoadedCheckpoint:
    index = source.index()
    with ExitStack() as ends:
        ends.enter_context(source.storage.reading(source.stored.name))
        fds, rest = load_share(source, index, job.world_size, job.together, job.check)
        if rest is not None:
            rest.ends = ends.pop_all()
    at = version(LOADED_GENERATION, index.step)
    return LoadedCheckpoint(at, source.path, fds, rejected, index.world_size, rest)


def _report_again(what: str, error: Exception | str) -> None:
    _log.warning("cannot read %s, trying again: %s", what, str(error))
    clock.sleep(RETRY_S)
