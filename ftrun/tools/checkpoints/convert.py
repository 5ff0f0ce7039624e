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
from pathlib import Path

import msgspec
import xxhash

from ftrun import clock
from ftrun.errors import CheckpointError, FtrunError, RulesMismatch, UsageError
from ftrun.ids import version
from ftrun.sharding.rank_values import RankValues
from ftrun.sharding.replica_check import differing
from ftrun.sharding.rules import NamePattern, ShardingRules
from ftrun.sharding.world_layout import FLOATS, WorldLayout, lay_out
from ftrun.smp.checkpoint.index import (
    FORMAT,
    CheckpointIndex,
    CheckpointPart,
    ShardFile,
    part_name,
    seal,
)
from ftrun.smp.checkpoint.reader import CheckpointReader
from ftrun.smp.checkpoint.storage.local import LocalStorage, replaced
from ftrun.smp.checkpoint.storage.storage import next_serial, sweep_started
from ftrun.smp.checkpoint.writer import gather
from ftrun.tools.checkpoints.convert_writer import Assembler, Conversion, WorldWriter
from ftrun.tools.checkpoints.source import (
    OpenedVersion,
    directory,
    opened_version,
    rules_file,
    share_of,
    source_folder,
)
from ftrun.wire.messages.checkpoint import INDEX_NAME, ConvertReport

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
    after, share = lay_out(wanted, before), share_of(arguments.share)
    dtypes = new_dtypes(arguments.dtype, before, source.was)
    if isinstance(files, CheckpointReader):
        if before.rules.layout == wanted.layout and not dtypes:
            if share[1] > 1:
                raise UsageError("the layout is the same, so that files are linked: no --share")
            path, num_bytes = publish(source.index, out, LinkedFiles(files))
            return _facts(source, path, num_bytes, after, is_linked=True)
        if problems := differing(files, before):
            raise RulesMismatch(source=before.rules.source, problems=problems)
    values = RankValues(source.parts, before, after)
    plain = [values.of(rank) for rank in range(after.mesh.size)]
    job = Conversion(before, after, dtypes, plain, source.when)
    writer = WorldWriter(job, Assembler(files, source.regions), workers=workers)
    if share[1] == 1:
        path, num_bytes = publish(source.index, out, writer)
        return _facts(source, path, num_bytes, after, notes=values.notes())
    token = [source.digest, wanted.text, str(wanted.mesh), sorted(dtypes.items())]
    part = CheckpointPart(
        FORMAT,
        source.index.run_id,
        xxhash.xxh3_64_hexdigest(msgspec.json.encode(token)),
        source.index.generation,
        source.index.step,
        after.mesh.size,
        [],
    )
    path, num_bytes, missing = publish_share(part, share, out, writer)
    found = _facts(source, path, num_bytes, after, notes=values.notes())
    return msgspec.structs.replace(found, missing_shares=tuple(missing))


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
                f"({rules.mesh}): it changes only the first axis of batches, if the others have size 1. "
                "Give the new sizes, "
                "such as --mesh tp=4,dp=2"
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
        for shard in self._source.index.shards:
            for name in shard.names:
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
        part = CheckpointPart(FORMAT, index.run_id, "", index.generation, index.step, 0, [])
        name = storage.pending_name(part, is_alone=True)
        sweep_started(storage, found, index.run_id, wanted, name, is_alone=True)
        storage.make(name)
        try:
            files = writer.write(out / name)
            made = msgspec.structs.replace(
                index,
                serial=next_serial(found, besides=name),
                world_size=len(files),
                shards=sorted(files, key=lambda one: one.rank),
                written_s=0.0,
            )
            storage.put(f"{name}/{INDEX_NAME}", seal(made))
            storage.sync(name)
        except BaseException:
            storage.discard(name)
            raise
        final = storage.publish(name, wanted)
        storage.sync()
        storage.point_latest(final)
    return out / final, sum(one.num_bytes + 8 * one.num_pieces for one in files)


def publish_share(
    part: CheckpointPart, share: tuple[int, int], out: Path, writer: WorldWriter
) -> tuple[Path, int, list[int]]:
    """Writes the files of every N-th rank, and the checkpoint if the other shares exist.

    Args:
        part: without files. Its token is equal for all shares, and for no other conversion.
        share: number I of the worker, from 1, and number N of workers.

    Returns the path, the bytes of the share, and the missing shares. The path is the folder of the
    shares if some are missing.
    """
    number, count = share
    ranks = range(number - 1, part.world_size, count)
    if not ranks:
        raise UsageError(f"--share {number}/{count}: there are {part.world_size} ranks to write")
    wanted = version(part.generation, part.step)
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
        sizes = storage.sizes(name)
        if part_name(ranks) not in sizes:  # another worker has just joined all shares
            return out / storage.latest_name(), num_bytes, []
        shards, _, _ = gather(storage, name, sizes, part)
        if missing := {rank % count + 1 for rank in range(part.world_size) if rank not in shards}:
            return out / name, num_bytes, sorted(missing)
        serial = next_serial(found, besides=name)
        in_order = [shards[rank] for rank in range(part.world_size)]
        index = CheckpointIndex(
            FORMAT, serial, part.run_id, part.generation, part.step, part.world_size, in_order
        )
        storage.put(f"{name}/{INDEX_NAME}", seal(index))
        storage.clean_up(name)
        storage.sync(name)
        final = storage.publish(name, wanted)
        storage.sync()
        storage.point_latest(final)
    return out / final, num_bytes, []


if __name__ == "__main__":
    sys.exit(main())
