"""Lists, verifies or prunes checkpoints: `python -m ftrun.tools.checkpoints.catalog VERB WHERE`.

Runs in:  a process that the cli starts; a few threads, because hashing releases the interpreter
          lock.
Takes in: list, verify, prune, find or try; a directory of checkpoints, or a URL; for find also one
          checkpoint.
Gives:    `CatalogReport` as JSON on stdout; the exit code is 0 also if checkpoints are damaged.
Survives: runs that write there at the same time: incomplete checkpoints are not touched.
"""

import argparse
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import msgspec
import xxhash

from ftrun import clock
from ftrun.cli.screen.text import listed
from ftrun.errors import CheckpointError, LayoutUnknown
from ftrun.smp.checkpoint.index import (
    LATEST_NAME,
    CheckpointIndex,
    ShardFile,
    StoredCheckpoint,
    file_sizes,
    is_size,
    is_whole,
    stored_bytes,
)
from ftrun.smp.checkpoint.reader import CheckpointFiles, ShardImage, parts_of
from ftrun.smp.checkpoint.storage.fsspec import FsspecStorage
from ftrun.smp.checkpoint.storage.storage import Retention, Storage, open_storage, prune, to_prune
from ftrun.snapshot.layout import PLAIN_NAME, Layout, Piece, parse_header
from ftrun.urls import is_url, located, without_password
from ftrun.wire.checkpoint_owner import OWNER_NAME, decode_owner
from ftrun.wire.messages.checkpoint import (
    INDEX_NAME,
    CatalogReport,
    CheckpointInfo,
    CheckpointLocation,
    ShardFileLocation,
)

_MAX_NAMED = 3
"""Damaged pieces of a file that are named; the others are counted."""
_THREADS = 4
_HEADER_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 1 << 30


def main() -> int:
    arguments = _arguments()
    started_s = clock.now_s()
    where = located(arguments.directory, cwd=str(Path.cwd()))
    try:
        found = _do(arguments, where)
    except (CheckpointError, OSError) as error:
        problem = str(error)
        if isinstance(error, OSError):
            problem = f"{error.filename}: {error.strerror}"
        found = CatalogReport(without_password(where), [], problem=problem)
    found = msgspec.structs.replace(found, seconds=clock.now_s() - started_s)
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return 0


def _do(arguments: argparse.Namespace, where: str) -> CatalogReport:
    if not is_url(where) and not Path(where).is_dir():
        raise CheckpointError(f"{where} is not a directory")
    if arguments.verb == "try":
        return _try(where)
    if arguments.verb == "find":
        return _find(where)
    with open_storage(where, threading.Event()) as storage:
        if arguments.verb == "list":
            return _list(storage, arguments.names)
        if arguments.verb == "verify":
            return _verify(storage, arguments.names)
        retention = Retention(arguments.keep, arguments.keep_s, keep_bytes=arguments.keep_bytes)
        return _prune(storage, retention, is_real=not arguments.dry_run)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ftrun.tools.checkpoints.catalog", description="checkpoints on disk"
    )
    parser.add_argument("verb", choices=["list", "verify", "prune", "find", "try"])
    parser.add_argument("directory")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--keep", type=int, default=1)
    parser.add_argument("--keep-s", type=float, default=0.0)
    parser.add_argument("--keep-bytes", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args()


def _try(url: str) -> CatalogReport:
    """Writes a small object, reads it and removes it."""
    name = f".try-{os.urandom(4).hex()}"
    with FsspecStorage(url, threading.Event()) as store:
        store.make()
        store.put(name, b"ftrun\n")
        try:
            if store.read(name) != b"ftrun\n":
                raise CheckpointError(f"{store.shown} returns other bytes than were written")
        finally:
            store.remove_file(name)
        return CatalogReport(store.shown, [], owner=decode_owner(store.read(OWNER_NAME)))


def _find(where: str) -> CatalogReport:
    """Returns the files of one checkpoint: the named one, or the latest of a directory."""
    if is_url(where):
        raise CheckpointError(
            f"{without_password(where)} is a URL, and an export reads a directory: copy the "
            "checkpoint into one first"
        )
    folder = Path(where).resolve()
    with open_storage(str(folder), threading.Event()) as storage:
        if not (folder / INDEX_NAME).exists():
            whole = [one.name for one in storage.checkpoints() if one.index is not None]
            if not whole:
                raise CheckpointError(f"there is no whole checkpoint in {where}")
            folder /= storage.latest_name() or whole[0]
    with open_storage(str(folder.parent), threading.Event()) as storage:
        index = CheckpointFiles(storage, storage.describe(folder.name)).index()
    if missing := _missing_ranks(index):
        raise CheckpointError(f"{folder}: its index has no rank {missing[0]}")
    shards = [
        ShardFileLocation(
            rank=shard.rank,
            path=str(folder / shard.file),
            digests_path=str(folder / shard.digests),
            num_bytes=shard.num_bytes,
            table_digest=shard.table_digest,
            header_digest=shard.header_digest,
            extents=[
                msgspec.structs.replace(one, file=str(folder / one.file)) for one in shard.extents
            ],
        )
        for shard in index.shards
    ]
    found = CheckpointLocation(str(folder), index.run_id, index.step, index.world_size, shards)
    return CatalogReport(where, [], found=found)


def _list(storage: Storage, names: Sequence[str]) -> CatalogReport:
    latest, started = storage.latest_name(), storage.checkpoints()
    found = [
        _facts(storage, one, latest, _missing_files(storage, one))
        for one in _chosen(storage, started, latest, names)
    ]
    unfinished = sum(one.is_incomplete for one in started)
    return CatalogReport(storage.shown, found, unfinished=unfinished)


def _verify(storage: Storage, names: Sequence[str]) -> CatalogReport:
    latest, found, checked = storage.latest_name(), [], 0
    for one in _chosen(storage, storage.checkpoints(), latest, names):
        found.append(_facts(storage, one, latest, find_damage(storage, one)))
        checked += found[-1].num_bytes
    return CatalogReport(storage.shown, found, checked_bytes=checked)


def _prune(storage: Storage, retention: Retention, *, is_real: bool) -> CatalogReport:
    with storage.lock() if is_real else nullcontext():
        found, latest = storage.checkpoints(), storage.latest_name()
        whole = [one.name for one in found if one.index is not None]
        newest = latest if latest in whole or not whole else whole[0]
        # A resume needs one without missing files, whatever else is kept.
        loadable = next((one.name for one in found if not _missing_files(storage, one)), newest)
        old = [one for one in to_prune(found, retention, newest=newest) if one != loadable]
        doomed, being_read = prune(storage, old, storage.remove if is_real else lambda _: None)
    report = _list(storage, ())
    return msgspec.structs.replace(report, removed=tuple(doomed), being_read=tuple(being_read))


# --- one checkpoint ---------------------------------------------------------------------------


def _chosen(
    storage: Storage, started: Sequence[StoredCheckpoint], latest: str, names: Sequence[str]
) -> list[StoredCheckpoint]:
    """Returns the named ones, or all with an index: readable ones first, the newest first."""
    found = [one for one in started if not one.is_incomplete]
    known = {one.name for one in started}
    others = [name for name in storage.folders() if name.startswith("step-") and name not in known]
    found += [storage.describe(name) for name in others]  # copies that the user made
    found.sort(key=lambda one: one.index is None)
    if not names:
        return found
    by_name = {one.name: one for one in found}
    if latest in by_name:
        by_name[LATEST_NAME] = by_name[latest]
    unknown = [name for name in names if name not in by_name]
    if unknown:
        shown = ", ".join([one.name for one in found][:10]) or "none"
        raise CheckpointError(
            f"there is no checkpoint {unknown[0]} in {storage.shown}; existing ones: {shown}"
        )
    return list({by_name[name].name: by_name[name] for name in names}.values())


def _missing_files(storage: Storage, one: StoredCheckpoint) -> list[str]:
    if one.index is None:
        return [one.problem]
    sizes = storage.sizes(one.name)
    cut = [shard for shard in one.index.shards if not is_whole(shard, sizes)]
    problems = [f"{_files_of(shard)} is missing or incomplete" for shard in cut]
    return problems + [f"its index has no rank {rank}" for rank in _missing_ranks(one.index)]


def _files_of(shard: ShardFile) -> str:
    if not shard.extents:
        return f"{shard.file} or {shard.digests}"
    return f"a file of rank {shard.rank} ({listed(shard.names, _MAX_NAMED)})"


def _missing_ranks(index: CheckpointIndex) -> list[int]:
    present = {shard.rank for shard in index.shards}
    return [rank for rank in range(index.world_size) if rank not in present]


def _facts(
    storage: Storage, one: StoredCheckpoint, latest: str, problems: Sequence[str]
) -> CheckpointInfo:
    path, is_latest = storage.path_of(one.name), one.name == latest
    facts = CheckpointInfo(one.name, path, is_latest, problems=tuple(problems))
    index = one.index
    if index is None:
        return facts
    return msgspec.structs.replace(
        facts,
        run_id=index.run_id,
        generation=index.generation,
        step=index.step,
        world_size=index.world_size,
        num_bytes=stored_bytes(index),
        written_s=one.written_s,
    )


# --- every byte -------------------------------------------------------------------------------


def find_damage(storage: Storage, one: StoredCheckpoint) -> list[str]:
    if one.index is None:
        return [one.problem]
    problems = [f"its index has no rank {rank}" for rank in _missing_ranks(one.index)]
    verify = ShardVerifier(CheckpointFiles(storage, one))
    num_threads = min(_THREADS, os.cpu_count() or 1) if storage.is_local else 1
    with storage.reading(one.name), ThreadPoolExecutor(num_threads) as pool:
        for found in pool.map(verify.problems, one.index.shards):
            problems += found
    return problems


class ShardVerifier:
    """Reads every byte of a checkpoint; bytes that several ranks have in one file only once."""

    def __init__(self, source: CheckpointFiles) -> None:
        self._source = source
        self._digests: dict[tuple[str, int, int], int] = {}
        """Of pieces that may be of several ranks, by file, offset and size."""

    def problems(self, shard: ShardFile) -> list[str]:
        try:
            return list(self._problems_of(shard))
        except (OSError, CheckpointError) as error:
            reason = getattr(error, "strerror", None) or error
            name = os.path.basename(getattr(error, "filename", None) or shard.file)
            return [f"{name} is not readable: {reason}"]

    def _problems_of(self, shard: ShardFile) -> Iterator[str]:
        source = self._source
        with source.opened(shard.digests) as file:
            table = file.read(0, file.size)
        if f"{xxhash.xxh3_64_intdigest(table):016x}" != shard.table_digest:
            yield (
                f"{shard.digests}: its {len(table)} bytes differ from the digests that were written"
            )
            return
        digests = memoryview(table).cast("Q")
        for name, wanted in file_sizes([shard]).items():
            with source.opened(name) as file:
                if not is_size(shard, file.size, wanted):
                    yield f"{name} has {file.size:,} bytes of {wanted:,}"
                    return
        with source.image(shard) as image:
            size = shard.num_bytes
            length = int.from_bytes(image.read(0, _HEADER_LENGTH_BYTES), "little")
            header = image.read(0, min(_HEADER_LENGTH_BYTES + min(length, _MAX_HEADER_BYTES), size))
            if xxhash.xxh3_64_hexdigest(header) != shard.header_digest:
                yield f"{shard.file}: its header differs from the one that was written"
                return
            try:
                layout, start = parse_header(memoryview(header), image_bytes=size)
            except LayoutUnknown as error:
                yield f"{shard.file}: {error}"
                return
            yield from self._damaged(image, shard, layout, start, digests)

    def _damaged(
        self,
        image: ShardImage,
        shard: ShardFile,
        layout: Layout,
        start: int,
        digests: Sequence[int],
    ) -> Iterator[str]:
        count = 0
        for index, piece in enumerate(layout.pieces):
            at = start + piece.offset
            if index < len(digests) and self._digest(image, shard, at, piece) == digests[index]:
                continue
            count += 1
            if count <= _MAX_NAMED:
                files = dict.fromkeys(one.file for one in parts_of(shard, at, piece.num_bytes))
                yield (
                    f"{listed(list(files) or [shard.file], _MAX_NAMED)}: piece {index} of "
                    f"{len(layout.pieces)} is damaged "
                    f"({piece.num_bytes:,} bytes at {at:,}: {_names(layout, piece)})"
                )
        if count > _MAX_NAMED:
            yield f"{shard.file}: {count - _MAX_NAMED} more pieces are damaged"

    def _digest(self, image: ShardImage, shard: ShardFile, at: int, piece: Piece) -> int:
        parts = parts_of(shard, at, piece.num_bytes) if shard.extents else []
        key = (parts[0].file, parts[0].at, piece.num_bytes) if len(parts) == 1 else None
        if key is not None and key in self._digests:
            return self._digests[key]
        found = xxhash.xxh3_64_intdigest(image.read(at, piece.num_bytes))
        if key is not None:
            self._digests[key] = found
        return found


def _names(layout: Layout, piece: Piece) -> str:
    end = piece.offset + piece.num_bytes
    names = [
        "plain values" if entry.name == PLAIN_NAME else entry.name
        for entry in layout.entries
        if entry.offset < end and entry.offset + entry.num_bytes > piece.offset
    ]
    return listed(names, _MAX_NAMED)


if __name__ == "__main__":
    sys.exit(main())
