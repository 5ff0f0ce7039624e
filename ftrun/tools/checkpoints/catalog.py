"""List, verify or prune checkpoints: `python -m ftrun.tools.checkpoints.catalog VERB WHERE`.

Runs in:  a process of its own, started by the cli: whatever reads or removes checkpoints is of
          this folder.
Takes in: list, verify, prune, find or try; a directory of checkpoints, or a URL; for find also one
          of them.
Gives:    `CatalogReport` as JSON on stdout.
Survives: runs that write there meanwhile: what they have not finished is left alone.
"""

import argparse
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ftrun import clock
from ftrun.errors import CheckpointError
from ftrun.smp.checkpoint.index import CheckpointIndex, read_index, read_indexes
from ftrun.smp.checkpoint.storage.local import (
    LATEST_NAME,
    Retention,
    locked_shortly,
    prune,
    to_prune,
)
from ftrun.tools.checkpoints.checkpoint_verify import verify_folder
from ftrun.tools.checkpoints.url_shelf import do_at_url
from ftrun.urls import is_url, located, without_password
from ftrun.wire.messages.checkpoint import (
    INDEX_NAME,
    CatalogReport,
    CheckpointInfo,
    CheckpointLocation,
    ShardFileLocation,
)


def main() -> int:
    """Do what is asked; 0 also where something is wrong with the checkpoints: that is said."""
    arguments = _arguments()
    began_s = clock.now_s()
    where = located(arguments.directory, cwd=str(Path.cwd()))
    directory = without_password(where)
    try:
        found = do_at_url(arguments, where) if is_url(where) else _do(arguments, Path(where))
    except CheckpointError as error:
        found = CatalogReport(directory, [], problem=str(error))
    except OSError as error:
        found = CatalogReport(directory, [], problem=f"{error.filename}: {error.strerror}")
    found = msgspec.structs.replace(found, seconds=clock.now_s() - began_s)
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return 0


def _do(arguments: argparse.Namespace, directory: Path) -> CatalogReport:
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    if arguments.verb == "list":
        return _list(directory, arguments.names)
    if arguments.verb == "find":
        return _find(directory)
    if arguments.verb == "verify":
        return _verify(directory, arguments.names)
    retention = Retention(arguments.keep, arguments.keep_s)
    return _prune(directory, retention, is_real=not arguments.dry_run)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ftrun.tools.checkpoints.catalog", description="checkpoints on disk"
    )
    parser.add_argument("verb", choices=["list", "verify", "prune", "find", "try"])
    parser.add_argument("directory")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--keep", type=int, default=1)
    parser.add_argument("--keep-s", type=float, default=0.0)
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args()


def _list(directory: Path, names: Sequence[str]) -> CatalogReport:
    facts = [_facts(folder) for folder in _chosen(directory, names)]
    unfinished = sum(path.is_dir() for path in directory.glob(".tmp-step-*"))
    return CatalogReport(str(directory), facts, unfinished=unfinished)


def _verify(directory: Path, names: Sequence[str]) -> CatalogReport:
    found, checked = [], 0
    for folder in _chosen(directory, names):
        index, problems = verify_folder(folder)
        found.append(_facts_of(folder, index, problems))
        checked += found[-1].num_bytes
    return CatalogReport(str(directory), found, checked_bytes=checked)


def _prune(directory: Path, retention: Retention, *, is_real: bool) -> CatalogReport:
    newest = _latest(directory)
    whole = [folder for folder, _ in read_indexes(directory)]
    if newest not in whole and whole:
        newest = whole[0]
    if newest is None or not whole:
        return _list(directory, ())
    if not is_real:
        doomed = to_prune(directory, retention, newest=newest)
    else:
        with locked_shortly(directory, threading.Event()):
            doomed = prune(directory, retention, newest=newest)
    listed = _list(directory, ())
    return msgspec.structs.replace(listed, removed=tuple(one.name for one in doomed))


def _find(directory: Path) -> CatalogReport:
    """The files of one checkpoint: the one that is named, or the latest of a directory."""
    folder = directory.resolve()
    if not (folder / INDEX_NAME).exists():
        whole = [folder for folder, _ in read_indexes(directory)]
        if not whole:
            raise CheckpointError(f"there is no whole checkpoint in {directory}")
        folder = _latest(directory) or whole[0]
    index = read_index(folder)
    there = {shard.rank for shard in index.shards}
    if missing := [rank for rank in range(index.world_size) if rank not in there]:
        raise CheckpointError(f"{folder}: its index has no rank {missing[0]}")
    shards = [
        ShardFileLocation(
            rank=shard.rank,
            path=str(folder / shard.file),
            digests_path=str(folder / shard.digests),
            num_bytes=shard.num_bytes,
            table_digest=shard.table_digest,
            header_digest=shard.header_digest,
        )
        for shard in index.shards
    ]
    found = CheckpointLocation(str(folder), index.run_id, index.step, index.world_size, shards)
    return CatalogReport(str(directory), [], found=found)


# --- one checkpoint ---------------------------------------------------------------------------


def _chosen(directory: Path, names: Sequence[str]) -> list[Path]:
    """The named ones, or all: those that can be read first, the one written last first."""
    found = [folder for folder, _ in read_indexes(directory)]
    found += sorted(one for one in directory.glob("step-*") if one.is_dir() and one not in found)
    if not names:
        return found
    by_name = {folder.name: folder for folder in found}
    latest = _latest(directory)
    if latest is not None:
        by_name[LATEST_NAME] = latest
    unknown = [name for name in names if name not in by_name]
    if unknown:
        known = ", ".join([folder.name for folder in found][:10]) or "none"
        raise CheckpointError(
            f"there is no checkpoint {unknown[0]} in {directory}; there are: {known}"
        )
    return list(dict.fromkeys(by_name[name] for name in names))


def _latest(directory: Path) -> Path | None:
    link = directory / LATEST_NAME
    return directory / link.readlink() if link.is_symlink() else None


def _facts(folder: Path) -> CheckpointInfo:
    try:
        index = read_index(folder)
    except CheckpointError as error:
        return _facts_of(folder, None, [str(error)])
    cut = [shard for shard in index.shards if not shard.is_whole(folder)]
    problems = [f"{shard.file} or {shard.digests} is not there, or not whole" for shard in cut]
    return _facts_of(folder, index, problems)


def _facts_of(
    folder: Path, index: CheckpointIndex | None, problems: Sequence[str]
) -> CheckpointInfo:
    is_latest = _latest(folder.parent) == folder
    facts = CheckpointInfo(folder.name, str(folder), is_latest, problems=tuple(problems))
    if index is None:
        return facts
    return msgspec.structs.replace(
        facts,
        run_id=index.run_id,
        generation=index.generation,
        step=index.step,
        world_size=index.world_size,
        num_bytes=sum(shard.num_bytes + 8 * shard.num_pieces for shard in index.shards),
        written_s=(folder / INDEX_NAME).stat().st_mtime,
    )


if __name__ == "__main__":
    sys.exit(main())
