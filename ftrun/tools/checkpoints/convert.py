"""Converts a checkpoint: `python -m ftrun.tools.checkpoints.convert SOURCE OUT ...`.

Runs in:  a process that the cli starts.
Takes in: a checkpoint, or a directory of them; layout rules; a directory for the new one.
Gives:    `ConvertReport` as JSON on stdout; a checkpoint for a run of the new layout.
Survives: a kill at any point: the new checkpoint becomes visible only when it is complete.

If the layout does not change, nothing is converted: the files are linked.
"""

import argparse
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from ftrun import clock
from ftrun.errors import CheckpointError, FtrunError, RulesMismatch, UsageError
from ftrun.ids import version
from ftrun.sharding.rank_values import RankValues
from ftrun.sharding.replica_check import differing
from ftrun.sharding.rule_parser import read_rules
from ftrun.sharding.rules import NamePattern, ShardingRules
from ftrun.sharding.world_layout import FLOATS, WorldLayout, lay_out, read_world, stored_entries
from ftrun.smp.checkpoint.index import (
    FORMAT,
    LATEST_NAME,
    CheckpointPart,
    ShardFile,
    format_of,
    seal,
    stored_bytes,
)
from ftrun.smp.checkpoint.reader import CheckpointReader
from ftrun.smp.checkpoint.storage.local import LocalStorage, replaced
from ftrun.smp.checkpoint.storage.storage import next_serial, sweep_started
from ftrun.tools.checkpoints.convert_writer import Conversion, WorldWriter
from ftrun.urls import is_url, located, without_password
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
    parser.add_argument("--rules", type=Path, required=True)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--mesh", default="")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--dtype", action="append", default=[])
    return parser.parse_args(words)


def _convert(arguments: argparse.Namespace) -> ConvertReport:
    rules = _read(arguments.rules)
    wanted = target_rules(arguments, rules)
    if arguments.workers < 0:
        raise UsageError(f"--workers is at least 1, or 0 for the default, not {arguments.workers}")
    out = _directory(arguments.out, "copy the new checkpoint from a directory to it")
    folder = _folder_of(_directory(arguments.source, "copy the checkpoint into a directory first"))
    if out == folder:
        raise UsageError(f"{out} is the checkpoint itself: name another directory for the new one")
    workers = arguments.workers or min(MAX_WORKERS, os.cpu_count() or 1)
    with closing(CheckpointReader(folder)) as source:
        stored = stored_entries(source.headers, source.parts, source=rules.source)
        before = read_world(rules, stored)
        after = lay_out(wanted, before)
        dtypes = new_dtypes(arguments.dtype, before)
        if rules.layout == wanted.layout and not dtypes:
            path, num_bytes = publish(source, out, LinkedFiles(source))
            return _facts(source, path, num_bytes, before, after, is_linked=True)
        if problems := differing(source, before):
            raise RulesMismatch(source=rules.source, problems=problems)
        values = RankValues(source.parts, before, after)
        plain = [values.of(rank) for rank in range(after.mesh.size)]
        job = Conversion(source, before, after, dtypes, plain)
        path, num_bytes = publish(source, out, WorldWriter(job, workers=workers))
        return _facts(source, path, num_bytes, before, after, notes=values.notes())


def _facts(
    source: CheckpointReader,
    path: Path,
    num_bytes: int,
    before: WorldLayout,
    after: WorldLayout,
    *,
    is_linked: bool = False,
    notes: Sequence[str] = (),
) -> ConvertReport:
    return ConvertReport(
        source=str(source.folder),
        path=str(path),
        step=source.index.step,
        mesh_before=str(before.mesh),
        mesh_after=str(after.mesh),
        world_size=after.mesh.size,
        num_tensors=len(before.wholes),
        num_bytes=num_bytes,
        is_linked=is_linked,
        notes=tuple(notes),
    )


def _read(path: Path) -> ShardingRules:
    try:
        return read_rules(path.read_text(), source=str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a text file: {error}") from error


def target_rules(arguments: argparse.Namespace, rules: ShardingRules) -> ShardingRules:
    given = [n for n in ("to", "ranks", "mesh") if getattr(arguments, n) not in (None, "")]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} both define the new layout: give one")
    if arguments.to is not None:
        return _read(arguments.to)
    if arguments.mesh:
        return rules.on(rules.mesh.with_sizes(_sizes(arguments.mesh, rules)))
    if arguments.ranks is not None:
        mesh = rules.mesh.resized(arguments.ranks)
        if mesh is None:
            raise UsageError(
                f"--ranks {arguments.ranks} does not fit the mesh of {rules.source} "
                f"({rules.mesh}): it changes only the single axis of batches. Give the new sizes, "
                "such as --mesh tp=4,dp=2"
            )
        return rules.on(mesh)
    if not arguments.dtype:
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


def new_dtypes(orders: Sequence[str], world: WorldLayout) -> Mapping[str, str]:
    """Returns the new dtypes of floating tensors by name.

    An order is `bf16`, which does not apply to the state of optimizers, or `PATTERN=bf16`.
    """
    found: dict[str, str] = {}
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


def _directory(text: str, advice: str) -> Path:
    where = located(text, cwd=str(Path.cwd()))
    if is_url(where):
        raise UsageError(
            f"{without_password(where)} is a URL, and a conversion reads and writes directories: "
            f"{advice}"
        )
    return Path(where).absolute()


def _folder_of(path: Path) -> Path:
    if (path / INDEX_NAME).exists():
        return path
    latest = path / LATEST_NAME
    if latest.is_symlink():
        return path / latest.readlink()
    raise CheckpointError(f"{path} is neither a checkpoint nor a directory that has a latest one")


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
    source: CheckpointReader, out: Path, writer: WorldWriter | LinkedFiles
) -> tuple[Path, int]:
    """Returns path and bytes of the new checkpoint, which is durable and the latest one."""
    index = source.index
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
                format=format_of(files),
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
    return out / final, stored_bytes(made)


if __name__ == "__main__":
    sys.exit(main())
