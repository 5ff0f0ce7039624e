"""What `ftrun.tools.checkpoints.catalog` does with checkpoints at a URL.

Runs in:  the process of ftrun.tools.checkpoints.catalog.
Takes in: list, verify, prune or try; a URL.
Gives:    `CatalogReport`, or a `CheckpointError` in words.
Survives: runs that write there meanwhile, as with a directory.
"""

import os
import threading
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

import msgspec

from ftrun.errors import CheckpointError
from ftrun.smp.checkpoint.storage.fsspec import FsspecStorage, ObjectReader
from ftrun.smp.checkpoint.storage.local import LATEST_NAME, Retention
from ftrun.smp.checkpoint.storage.url_folders import (
    StoredCheckpoint,
    is_whole,
    read_folders,
    read_latest,
    remove,
    to_prune,
)
from ftrun.smp.checkpoint.url_load import in_order
from ftrun.tools.checkpoints.checkpoint_verify import missing_ranks, verify_shard
from ftrun.urls import below, without_password
from ftrun.wire.checkpoint_owner import OWNER_NAME, decode_owner
from ftrun.wire.messages.checkpoint import CatalogReport, CheckpointInfo


def do_at_url(arguments: Namespace, url: str) -> CatalogReport:
    """What is asked of this URL.

    Raises:
        CheckpointError: why it cannot be done.
    """
    if arguments.verb == "find":
        raise CheckpointError(
            f"{without_password(url)} is a URL, and exports are made of directories: copy the "
            "checkpoint into one first"
        )
    with FsspecStorage(url, threading.Event()) as store:
        if arguments.verb == "try":
            return _try(store)
        if arguments.verb == "prune":
            retention = Retention(arguments.keep, arguments.keep_s)
            return _prune(store, retention, is_real=not arguments.dry_run)
        folders, latest = read_folders(store), read_latest(store)
        chosen = _chosen(store, folders, latest, arguments.names)
        if arguments.verb == "verify":
            return _verify(store, chosen, latest)
        return _list(store, chosen, folders, latest)


def _try(store: FsspecStorage) -> CatalogReport:
    """Write something small there, and remove it."""
    name = f".try-{os.urandom(4).hex()}"
    store.make()
    store.put(name, b"ftrun\n")
    try:
        if store.read(name) != b"ftrun\n":
            raise CheckpointError(f"{store.shown} does not give back what was written")
    finally:
        store.remove_file(name)
    return CatalogReport(store.shown, [], owner=decode_owner(store.read(OWNER_NAME)))


def _list(
    store: FsspecStorage,
    chosen: Sequence[StoredCheckpoint],
    folders: Sequence[StoredCheckpoint],
    latest: str,
) -> CatalogReport:
    found = [_facts(store, one, latest, _missing_files(store, one)) for one in chosen]
    return CatalogReport(store.shown, found, unfinished=sum(one.is_half for one in folders))


def _verify(store: FsspecStorage, chosen: Sequence[StoredCheckpoint], latest: str) -> CatalogReport:
    found, checked = [], 0
    for one in chosen:
        problems = [one.problem] if one.problem else []
        if one.index is not None:
            problems = missing_ranks(one.index)
            for shard in one.index.shards:
                problems += verify_shard(partial(_opened, store, one.name), shard)
        found.append(_facts(store, one, latest, problems))
        checked += found[-1].num_bytes
    return CatalogReport(store.shown, found, checked_bytes=checked)


def _opened(store: FsspecStorage, folder: str, name: str) -> AbstractContextManager[ObjectReader]:
    return store.opened(f"{folder}/{name}")


def _prune(store: FsspecStorage, retention: Retention, *, is_real: bool) -> CatalogReport:
    folders, latest = read_folders(store), read_latest(store)
    whole = in_order(folders, latest)
    doomed = to_prune(folders, retention, newest=whole[0].name) if whole else []
    if is_real:
        doomed = remove(store, doomed)
        folders = [one for one in folders if one.name not in doomed]
    listed = _list(store, _chosen(store, folders, latest, ()), folders, latest)
    return msgspec.structs.replace(listed, removed=tuple(doomed))


# --- one checkpoint ---------------------------------------------------------------------------


def _chosen(
    store: FsspecStorage, folders: Sequence[StoredCheckpoint], latest: str, names: Sequence[str]
) -> list[StoredCheckpoint]:
    """The named ones, or all that are no halves."""
    found = [one for one in folders if not one.is_half]
    if not names:
        return found
    by_name = {one.name: one for one in found}
    if latest in by_name:
        by_name[LATEST_NAME] = by_name[latest]
    unknown = [name for name in names if name not in by_name]
    if unknown:
        known = ", ".join([one.name for one in found][:10]) or "none"
        raise CheckpointError(
            f"there is no checkpoint {unknown[0]} in {store.shown}; there are: {known}"
        )
    return list({by_name[name].name: by_name[name] for name in names}.values())


def _missing_files(store: FsspecStorage, folder: StoredCheckpoint) -> list[str]:
    if folder.index is None:
        return [folder.problem]
    sizes = store.sizes(folder.name)
    cut = [shard for shard in folder.index.shards if not is_whole(shard, sizes)]
    return [f"{shard.file} or {shard.digests} is not there, or not whole" for shard in cut]


def _facts(
    store: FsspecStorage, folder: StoredCheckpoint, latest: str, problems: Sequence[str]
) -> CheckpointInfo:
    facts = CheckpointInfo(
        folder.name,
        below(store.shown, folder.name),
        folder.name == latest,
        problems=tuple(problems),
    )
    index = folder.index
    if index is None:
        return facts
    return msgspec.structs.replace(
        facts,
        run_id=index.run_id,
        generation=index.generation,
        step=index.step,
        world_size=index.world_size,
        num_bytes=sum(shard.num_bytes + 8 * shard.num_pieces for shard in index.shards),
        written_s=index.written_s,
    )
