"""Converts a checkpoint: `python -m ftrun.tools.checkpoints.convert SOURCE OUT ...`.

Runs in:  a process that the cli starts.
Takes in: a checkpoint, a directory of them, or atoms; layout rules; a directory for the new one.
Gives:    `ConvertReport` as JSON on stdout; a checkpoint for a run of the new layout.
Survives: a kill at any point: the new checkpoint becomes visible only when it is complete.

If the layout does not change, nothing is converted: the files are linked.
"""

import argparse
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec
import xxhash

from ftrun import clock
from ftrun.errors import CheckpointError, FtrunError, UsageError
from ftrun.ids import version
from ftrun.sharding.rank_values import RankValues
from ftrun.sharding.replica_check import padding_notes
from ftrun.sharding.rules import NamePattern, ShardingRules
from ftrun.sharding.world_layout import FLOATS, WorldLayout, lay_out
from ftrun.smp.checkpoint.index import (
    FORMAT,
    CheckpointIndex,
    CheckpointPart,
    ShardFile,
    StoredCheckpoint,
    part_name,
    part_names,
    seal,
    stored_bytes,
)
from ftrun.smp.checkpoint.reader import CheckpointReader
from ftrun.smp.checkpoint.storage.local import LocalStorage, replaced
from ftrun.smp.checkpoint.storage.storage import sweep_started
from ftrun.smp.checkpoint.writer import gather, publish_whole, whole_checkpoints
from ftrun.tools.checkpoints.convert_writer import Assembler, Conversion, WorldWriter
from ftrun.tools.checkpoints.source import (
    OpenedVersion,
    check_replicas,
    directory,
    opened_version,
    rules_file,
    share_of,
    source_folder,
)
from ftrun.wire.messages.checkpoint import ConvertReport

MAX_WORKERS = 4


def main() -> int:
    sys.stdout.buffer.write(msgspec.json.encode(convert(sys.argv[1:])))
    return 0


def convert(words: Sequence[str]) -> ConvertReport:
    arguments = _arguments(words)
    started_s = clock.now_s()
    try:
        found = _convert(arguments)
    except FtrunError as error:
        found = ConvertReport(problem=str(error), exit_code=error.exit_code)
    except OSError as error:
        problem = f"{error.filename or arguments.out}: {error.strerror or error}"
        found = ConvertReport(problem=problem, exit_code=CheckpointError.exit_code)
    return msgspec.structs.replace(found, seconds=clock.now_s() - started_s)


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ftrun.tools.checkpoints.convert", description="another layout"
    )
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--rules")
    parser.add_argument("--to")
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--mesh")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--share", default="1/1")
    parser.add_argument("--dtype", action="append", default=[])
    return parser.parse_args(words)


def _convert(arguments: argparse.Namespace) -> ConvertReport:
    given = None if arguments.rules is None else rules_file(arguments.rules)
    if arguments.workers < 0:
        raise UsageError(f"--workers is at least 1, or 0 for the default, not {arguments.workers}")
    share_of(arguments.share)
    if given is not None:
        target_rules(arguments, given)  # reports mistakes before anything is read
    out = directory(arguments.out, "copy the new checkpoint from a directory to it")
    folder = source_folder(arguments.source)
    if out == folder:
        raise UsageError(f"{out} is the checkpoint itself: name another directory for the new one")
    workers = arguments.workers or min(MAX_WORKERS, os.cpu_count() or 1)
    with opened_version(folder, given) as source:
        return _converted(arguments, source, given, out, workers)


def _converted(
    arguments: argparse.Namespace,
    source: OpenedVersion,
    given: ShardingRules | None,
    out: Path,
    workers: int,
) -> ConvertReport:
    before, files = source.world, source.files
    if arguments.load and isinstance(files, CheckpointReader):
        raise UsageError(
            f"{source.folder} is a checkpoint, and load takes atoms: use ftrun checkpoints convert"
        )
    if before.rules.is_empty:
        raise UsageError(
            f"{source.folder} declares no layout rules: give its own by --rules FILE. A run of any "
            "layout resumes from DTensors directly, without conversion"
        )
    wanted = target_rules(arguments, given or before.rules)
    after = lay_out(wanted, before)
    ranks = _ranks_of(arguments.share, after.mesh.size)
    dtypes = new_dtypes(arguments.dtype, before, source.was)
    if isinstance(files, CheckpointReader):
        if before.rules.layout == wanted.layout and not dtypes:
            if ranks.step > 1:
                raise UsageError("the layout is the same, so that files are linked: no --share")
            path, num_bytes = publish(source.index, out, LinkedFiles(files))
            return _facts(source, path, num_bytes, after, is_linked=True)
        check_replicas(source, {name for rank in ranks for name in after.entries[rank]})
    values = RankValues(source.parts, before, after)
    plain = [values.of(rank) for rank in range(after.mesh.size)]
    job = Conversion(before, after, dtypes, plain, source.when)
    writer = WorldWriter(job, Assembler(files, source.regions), workers=workers)
    notes = values.notes()
    if isinstance(files, CheckpointReader):
        notes += padding_notes(files, before, after)
    if ranks.step == 1:
        path, num_bytes = publish(source.index, out, writer)
        return _facts(source, path, num_bytes, after, notes=notes)
    token = [source.digest, wanted.text, str(wanted.mesh), sorted(dtypes.items())]
    name = xxhash.xxh3_64_hexdigest(msgspec.json.encode(token))
    part = _part_of(source.index, name, after.mesh.size)
    path, num_bytes, missing = publish_share(part, ranks, out, writer)
    found = _facts(source, path, num_bytes, after, notes=notes)
    return msgspec.structs.replace(found, missing_shares=tuple(missing))


def _ranks_of(share: str, num_ranks: int) -> range:
    number, count = share_of(share)
    ranks = range(number - 1, num_ranks, count)
    if not ranks:
        raise UsageError(f"--share {share}: there are {num_ranks} ranks to write")
    return ranks


def _part_of(index: CheckpointIndex, token: str, world_size: int) -> CheckpointPart:
    """Without files, of the version of a checkpoint."""
    return CheckpointPart(
        FORMAT, index.run_id, token, index.generation, index.step, world_size, [], life=index.life
    )


def _facts(
    source: OpenedVersion,
    path: Path,
    num_bytes: int,
    after: WorldLayout,
    *,
    is_linked: bool = False,
    notes: Sequence[str] = (),
) -> ConvertReport:
    return ConvertReport(
        source=str(source.folder),
        path=str(path),
        step=source.index.step,
        mesh_before=str(source.world.mesh),
        mesh_after=str(after.mesh),
        world_size=after.mesh.size,
        num_tensors=len(source.world.wholes),
        num_bytes=num_bytes,
        is_linked=is_linked,
        notes=tuple(notes),
    )


def target_rules(arguments: argparse.Namespace, rules: ShardingRules) -> ShardingRules:
    given = [n for n in ("to", "ranks", "mesh") if getattr(arguments, n) is not None]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} both define the new layout: give one")
    if arguments.to is not None:
        return rules_file(arguments.to)
    if arguments.mesh is not None:
        return rules.on(rules.mesh.with_sizes(_sizes(arguments.mesh, rules)))
    if arguments.ranks is not None:
        mesh = rules.mesh.resized(arguments.ranks)
        if mesh is None:
            raise UsageError(
                f"--ranks {arguments.ranks} does not fit the mesh of {rules.source} "
                f"({rules.mesh}): it changes only the first axis of batches, if the others have "
                "size 1. Give the new sizes, such as --mesh tp=4,dp=2"
            )
        return rules.on(mesh)
    if not arguments.dtype and not arguments.load:
        raise UsageError("give the new layout: --to FILE, --ranks M or --mesh tp=4,dp=1")
    return rules


def _sizes(text: str, rules: ShardingRules) -> dict[str, int]:
    found = {}
    for part in text.split(","):
        axis, equals, size = part.strip().partition("=")
        if not equals or not size.isdecimal() or int(size) < 1:
            raise UsageError(f"--mesh has axes with sizes, such as tp=4,dp=1, not {text!r}")
        if axis not in rules.mesh.names:
            raise UsageError(f"--mesh {text}: {axis} is no axis of {rules.source} ({rules.mesh})")
        found[axis] = int(size)
    return found


def new_dtypes(
    orders: Sequence[str], world: WorldLayout, was: Mapping[str, str]
) -> Mapping[str, str]:
    """Returns the new dtypes of floating tensors by name.

    An order is `bf16`, which does not apply to the state of optimizers, or `PATTERN=bf16`. A
    tensor without an order has its dtype in the checkpoint, `was`, if it is given.
    """
    found = dict(was)
    for order in orders:
        pattern, equals, name = order.rpartition("=")
        dtype = name.upper()
        if dtype not in FLOATS:
            known = ", ".join(FLOATS).lower()
            raise UsageError(f"--dtype {order}: it is one of {known}, or PATTERN= and one of them")
        floats = [one for one in world.wholes.values() if one.dtype in FLOATS]
        if equals:
            of_all = NamePattern(pattern)
            floats = [one for one in floats if of_all.match(one.name) is not None]
        else:
            floats = [one for one in floats if one.owner is None]
        if not floats:
            raise UsageError(f"--dtype {order} names no floating tensor of the checkpoint")
        found |= {one.name: dtype for one in floats}
    return {name: dtype for name, dtype in found.items() if world.wholes[name].dtype != dtype}


class LinkedFiles:
    """Links the files of a checkpoint."""

    def __init__(self, source: CheckpointReader) -> None:
        self._source = source

    def write(self, folder: Path) -> list[ShardFile]:
        for name in {name for shard in self._source.index.shards for name in shard.names}:
            _link(self._source.folder / name, folder / name)
        return self._source.index.shards


def _link(old: Path, new: Path) -> None:
    try:
        os.link(old, new)
    except OSError:  # another file system, or one without links
        with old.open("rb") as file, replaced(new) as write:
            while data := file.read(1 << 22):
                write(data)


def publish(
    index: CheckpointIndex, out: Path, writer: WorldWriter | LinkedFiles
) -> tuple[Path, int]:
    """Returns path and bytes of the new checkpoint, which is durable and the latest one.

    `index` is that of the old one.
    """
    wanted = version(index.generation, index.step)
    storage = LocalStorage(out, threading.Event())
    with storage.exclusive():
        found = storage.checkpoints()
        part = _part_of(index, "", 0)
        name = storage.pending_name(part, is_alone=True)
        sweep_started(storage, found, index.run_id, wanted, name, is_alone=True)
        storage.make(name)
        try:
            files = sorted(writer.write(out / name), key=lambda one: one.rank)
            whole = msgspec.structs.replace(part, world_size=len(files), shards=files)
            final, made = publish_whole(storage, name, whole, found, nullcontext())
        except BaseException:
            storage.discard(name)
            raise
        storage.point_latest(final)
    return out / final, stored_bytes(made)


def publish_share(
    part: CheckpointPart, ranks: range, out: Path, writer: WorldWriter
) -> tuple[Path, int, list[int]]:
    """Writes the files of every N-th rank, and the checkpoint if the other shares exist.

    Args:
        part: without files. Its token is equal for all shares, and for no other conversion.
        ranks: of the share; their step is the number N of shares.

    Returns the path, the bytes of the share, and the missing shares. The path is the folder of the
    shares if some are missing.
    """
    storage = LocalStorage(out, threading.Event())
    name = storage.pending_name(part, is_alone=False)
    with storage.lock():
        storage.make(name)
    files = writer.write(out / name, ranks)
    storage.put(f"{name}/{part_name(ranks)}", seal(msgspec.structs.replace(part, shards=files)))
    storage.sync(name)
    num_bytes = sum(one.num_bytes + 8 * one.num_pieces for one in files)
    with storage.lock():
        found = storage.checkpoints()
        done = _joined_already(storage, found, msgspec.structs.replace(part, shards=files), writer)
        if done is not None:
            _remove_repeated(storage, name, part)
            _complete(storage, done.name, is_newest=done is found[0])
            return out / done.name, num_bytes, []
        sizes = storage.sizes(name)
        if part_name(ranks) not in sizes:
            raise CheckpointError(f"{out / name} was removed: write all shares again")
        shards, _, _ = gather(storage, name, sizes, part)
        if missing := {at % ranks.step + 1 for at in range(part.world_size) if at not in shards}:
            return out / name, num_bytes, sorted(missing)
        all_files = [shards[rank] for rank in range(part.world_size)]
        whole = msgspec.structs.replace(part, shards=all_files)
        final, _ = publish_whole(storage, name, whole, found, nullcontext())
        _complete(storage, final, is_newest=True)
    return out / final, num_bytes, []


def _joined_already(
    storage: LocalStorage,
    found: Sequence[StoredCheckpoint],
    share: CheckpointPart,
    writer: WorldWriter,
) -> StoredCheckpoint | None:
    """The checkpoint of this conversion: with the files of the share, and all its layouts."""
    contents = {one.content for one in share.shards}
    for one in whole_checkpoints(storage, found, share, contents):
        if one.index and [shard.layout_id for shard in one.index.shards] == writer.layout_ids:
            return one
    return None


def _remove_repeated(storage: LocalStorage, name: str, like: CheckpointPart) -> None:
    """Removes shares that were written again after the join, unless another one is in progress."""
    sizes = storage.sizes(name)
    shards, _, _ = gather(storage, name, sizes, like)
    known = {file for shard in shards.values() for file in shard.names}
    if sizes and sizes.keys() <= known.union(part_names(sizes)):
        storage.remove(name)


def _complete(storage: LocalStorage, name: str, *, is_newest: bool) -> None:
    """The steps after publishing; a share that is repeated repeats them."""
    storage.clean_up(name)
    if is_newest:
        storage.point_latest(name)


if __name__ == "__main__":
    sys.exit(main())
