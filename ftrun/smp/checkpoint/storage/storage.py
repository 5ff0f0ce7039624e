"""The folders in which several nodes assemble a checkpoint, and their removal.

Runs in:  the SMP, in its disk lane's thread.
Takes in: the directory of checkpoints; the run, version and nodes of a part.
Gives:    the folder's path, equal on all nodes; the removal of folders that will not be finished.

    DIR/.tmp-step-00000042-g3-1f2e3d4c-5b6a7988/
                              run      run, token and world size

Parts of another run, of another world size or of other nodes go to another folder. They are
therefore never in the way of this run's parts, and never merged with them.

Rule 1: a folder of another run may be in use. It is removed only if it was not changed for
        `STALE_S`.
Rule 2: of this run, a finished version removes the folders of earlier versions. A begun version
        removes all earlier ones but the newest, which still shows the ranks that never arrived.
Rule 3: when a checkpoint is loaded, all nodes start again. Every folder of the run then belongs to
        a life that is over, and its versions may occur again with other bytes.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ftrun.ids import Version, version
from ftrun.smp.checkpoint.index import CheckpointPart
from ftrun.smp.checkpoint.storage.local import GONE, LATEST_NAME, is_stale, remove

_NAME = re.compile(r"\.tmp-step-(\d{8,})-g(-?\d+)-([0-9a-f]{8})-([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """A folder of parts, as its name describes it."""

    path: Path
    version: Version
    run_tag: str


def folder_of(directory: Path, key: CheckpointPart) -> Path:
    """Return the folder of all parts that can be merged with this one."""
    tag = _tag(f"{key.run_id}/{key.token}/{key.world_size}")
    step = f"step-{key.step:08d}-g{key.generation}"
    return directory / f".tmp-{step}-{_tag(key.run_id)}-{tag}"


def part_folders(directory: Path, run_id: str) -> list[PendingCheckpoint]:
    found = [one for one in _all(directory) if one.run_tag == _tag(run_id)]
    return sorted(found, key=lambda one: one.version, reverse=True)


def sweep_alone(directory: Path, run_id: str) -> None:
    """Remove what killed writers have left; the folder's lock proves that none is active."""
    others = {one.path for one in _all(directory) if one.run_tag != _tag(run_id)}
    for path in directory.glob(".tmp-*"):
        if path not in others or is_stale(path):
            _remove_any(path)


def sweep_before(directory: Path, run_id: str, begun: Version) -> None:
    """Remove abandoned folders when several nodes begin this version, see the rules.

    `.lock` is held, so a temporary `latest` link belongs to a killed node. If locks have no effect,
    it may belong to an active node. That node fails, and finds the checkpoint finished at the next
    request.
    """
    older = [one.path for one in part_folders(directory, run_id) if one.version < begun]
    for path in older[1:]:
        remove(path)
    for path in directory.glob(".tmp-*"):
        is_over = path.name.startswith(GONE) or path.name.endswith(f"-{LATEST_NAME}")
        if is_over or is_stale(path):
            _remove_any(path)


def sweep_finished(directory: Path, run_id: str, finished: Version) -> None:
    for one in part_folders(directory, run_id):
        if one.version <= finished:
            remove(one.path)


def sweep_run(directory: Path, run_id: str) -> None:
    for one in part_folders(directory, run_id):
        remove(one.path)


def _all(directory: Path) -> Iterator[PendingCheckpoint]:
    for path in directory.glob(".tmp-step-*"):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            step, generation, run_tag, _ = match.groups()
            yield PendingCheckpoint(path, version(int(generation), int(step)), run_tag)


def _tag(text: str) -> str:
    return xxhash.xxh32_hexdigest(text.encode())


def _remove_any(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove(path)
    else:
        path.unlink(missing_ok=True)
