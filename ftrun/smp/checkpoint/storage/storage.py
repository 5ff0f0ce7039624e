"""The folders in which several nodes put a checkpoint together, and when one is in the way.

Runs in:  the SMP, in its disk lane's thread.
Takes in: the directory of checkpoints; of which run, version and nodes a part is.
Gives:    the folder's path, equal on all nodes; the removal of those that nobody will finish.

    DIR/.tmp-step-00000042-g3-1f2e3d4c-5b6a7988/
                              run      run, token and world size

Parts of another run, of another world size or of other nodes go to another folder, so they are
never in the way and never put together with ours.

Rule 1: a folder of another run may be that of nodes at work: only what has been left alone for
        `STALE_S` is removed.
Rule 2: of our own run, a finished version removes the folders of those before it, and a version
        begun removes all before it but the newest, which still shows who did not come.
Rule 3: whoever loads a checkpoint begins anew, and so do all nodes: every folder of the run is of
        a life that is over, and its versions may come again with other bytes.
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
    """One of them, as its name tells."""

    path: Path
    version: Version
    run_tag: str


def folder_of(directory: Path, key: CheckpointPart) -> Path:
    """Where parts that can be put together with this one are."""
    tag = _tag(f"{key.run_id}/{key.token}/{key.world_size}")
    step = f"step-{key.step:08d}-g{key.generation}"
    return directory / f".tmp-{step}-{_tag(key.run_id)}-{tag}"


def part_folders(directory: Path, run_id: str) -> list[PendingCheckpoint]:
    """Those of this run, the newest version first."""
    found = [one for one in _all(directory) if one.run_tag == _tag(run_id)]
    return sorted(found, key=lambda one: one.version, reverse=True)


def sweep_alone(directory: Path, run_id: str) -> None:
    """Remove what a killed writer has left; the folder's lock says that none is at work."""
    others = {one.path for one in _all(directory) if one.run_tag != _tag(run_id)}
    for path in directory.glob(".tmp-*"):
        if path not in others or is_stale(path):
            _remove_any(path)


def sweep_before(directory: Path, run_id: str, begun: Version) -> None:
    """Several nodes begin this version: remove what can be nobody's, see the rules.

    `.lock` is held, so what would become `latest` is a killed node's. Where locks do nothing it
    may be another's: that one fails, and finds the checkpoint finished when it is asked again.
    """
    older = [one.path for one in part_folders(directory, run_id) if one.version < begun]
    for path in older[1:]:
        remove(path)
    for path in directory.glob(".tmp-*"):
        is_over = path.name.startswith(GONE) or path.name.endswith(f"-{LATEST_NAME}")
        if is_over or is_stale(path):
            _remove_any(path)


def sweep_finished(directory: Path, run_id: str, finished: Version) -> None:
    """This version is a checkpoint: nobody needs the parts of those before."""
    for one in part_folders(directory, run_id):
        if one.version <= finished:
            remove(one.path)


def sweep_run(directory: Path, run_id: str) -> None:
    """The run begins anew on all nodes: no part of it will be finished."""
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
