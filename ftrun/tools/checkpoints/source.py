"""Opens what a conversion reads: a checkpoint, by rules or by the parts it states, or a store.

The rules of a checkpoint are those that are given, or those that its snapshot carries. A store is
read as a checkpoint of one rank.
"""

import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import xxhash

from ftrun.config.layout_file import layout_text
from ftrun.errors import CheckpointError, RulesMismatch, UsageError
from ftrun.sharding.part_layout import world_of_parts
from ftrun.sharding.replica_check import differing
from ftrun.sharding.rule_parser import read_carried, read_rules
from ftrun.sharding.rules import ShardingRules
from ftrun.sharding.source_index import RegionIndex
from ftrun.sharding.world_layout import WorldLayout, read_world, stored_entries
from ftrun.smp.checkpoint.index import FORMAT, CheckpointIndex
from ftrun.smp.checkpoint.reader import CheckpointReader
from ftrun.smp.checkpoint.storage.local import LocalStorage
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.layout import CopyTiming, LayoutEntry
from ftrun.tools.checkpoints.tensor_store import TensorStore, has_shares
from ftrun.urls import is_url, located, without_password
from ftrun.wire.messages.checkpoint import ATOMS_NAME, INDEX_NAME

_SHARE = re.compile(r"([1-9]\d*)/([1-9]\d*)")


@dataclass(frozen=True)
class OpenedVersion:
    """A version and the world that took it.

    Args:
        files: reads its bytes.
        index: of a checkpoint; of a store, what its checkpoint would have, without shards.
        parts: plain values of each rank.
        when: when a tensor is copied, by name.
        was: dtypes of the tensors in the checkpoint, by name, where those of a store differ.
    """

    files: CheckpointReader | TensorStore
    index: CheckpointIndex
    world: WorldLayout
    regions: RegionIndex
    parts: Sequence[dict[str, bytes]]
    when: Mapping[str, CopyTiming]
    was: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.files.folder

    @property
    def digest(self) -> str:
        """Of the content."""
        if isinstance(self.files, TensorStore):
            return xxhash.xxh3_64_hexdigest(msgspec.json.encode(self.files.index))
        contents = [one.content for one in self.index.shards]
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode(contents))

    def entry(self, rank: int, name: str) -> LayoutEntry:
        assert isinstance(self.files, CheckpointReader)
        return self.files.entry(rank, name)


@contextmanager
def opened_version(folder: Path, rules: ShardingRules | None) -> Iterator[OpenedVersion]:
    """Yields the version in a folder.

    Args:
        rules: of the ranks that took it; None: those that it carries. A store needs none.
    """
    if (folder / ATOMS_NAME).exists():
        yield of_store(TensorStore(folder))
        return
    with closing(CheckpointReader(folder)) as files:
        yield _of_checkpoint(files, rules)


def of_store(store: TensorStore) -> OpenedVersion:
    index = store.index
    return OpenedVersion(
        store,
        CheckpointIndex(FORMAT, 0, index.run_id, index.generation, index.step, 1, []),
        store.world,
        store.regions(),
        [store.values],
        store.when,
        {one.name: one.was for one in index.entries},
    )


def _of_checkpoint(files: CheckpointReader, rules: ShardingRules | None) -> OpenedVersion:
    if rules is None and "layout" in files.parts[0]:
        carried = read_carried(plain.decode(files.parts[0]["layout"]))
        rules = None if carried.is_empty else carried
    if rules is None:
        world = world_of_parts(files.headers, files.parts, source=str(files.folder))
    else:
        stored = stored_entries(files.headers, files.parts, source=rules.source)
        world = read_world(rules, stored)
    when = {
        name: files.entry(rank, world.own_name(rank, name)).when
        for rank, entries in enumerate(world.entries)
        for name in entries
    }
    return OpenedVersion(files, files.index, world, world.index(files.entry), files.parts, when)


def check_replicas(source: OpenedVersion, names: Collection[str]) -> None:
    """Raises RulesMismatch if ranks that should have equal tensors, of these names, do not."""
    files, world = source.files, source.world
    if not isinstance(files, CheckpointReader):
        return
    some = {name: one for name, one in world.wholes.items() if name in names}
    if problems := differing(files, replace(world, wholes=some)):
        if world.rules.is_empty:
            problems.insert(0, "it declares no layout rules: give them by --rules FILE, if ranks "
                            "hold parts of plain tensors")  # fmt: skip
        raise RulesMismatch(source=world.rules.source, problems=problems)


def rules_file(given: str) -> ShardingRules:
    """The rules of a file, or of a packaged layout with its values."""
    try:
        return read_rules(layout_text(given), source=given)
    except OSError as error:
        raise UsageError(f"{given}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{given} is not a text file: {error}") from error


def directory(text: str, advice: str) -> Path:
    where = located(text, cwd=str(Path.cwd()))
    if is_url(where):
        raise UsageError(
            f"{without_password(where)} is a URL, and a conversion reads and writes directories: "
            f"{advice}"
        )
    return Path(where).absolute()


def share_of(text: str) -> tuple[int, int]:
    """Number of a worker, from 1, and the number of workers."""
    found = _SHARE.fullmatch(text)
    if found is None or int(found[1]) > int(found[2]):
        raise UsageError(f"--share is I/N, such as 2/4 for the second of four, not {text!r}")
    return int(found[1]), int(found[2])


def source_folder(text: str) -> Path:
    """The folder of a checkpoint, of a directory's latest one, or of a store.

    Without a link to the latest one, as on file systems that have no links, the newest is taken.
    """
    path = directory(text, "copy the checkpoint into a directory first")
    if (path / INDEX_NAME).exists() or (path / ATOMS_NAME).exists():
        return path
    storage = LocalStorage(path, threading.Event())
    names = [one.name for one in storage.checkpoints() if one.index is not None]
    if name := storage.latest_name() or next(iter(names), ""):
        return path / name
    if has_shares(path):
        raise CheckpointError(f"{path} lacks shares of a store: write the others first")
    raise CheckpointError(f"{path} is neither a checkpoint nor a directory that has a latest one")
