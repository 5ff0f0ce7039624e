"""Makes atoms: `python -m ftrun.tools.checkpoints.atoms OPERATION SOURCE OUT ...`.

Runs in:  a process that the cli starts; several, on one host or on several, with `--share I/N`.
Takes in: an operation; a checkpoint, or the store that the operation before has made.
Gives:    `ExportReport` as JSON on stdout; a store (`tensor_store`), complete or missing. With
          shares it is complete when the last of them is written.
Survives: a kill at any point; a share that was killed is written again.

`export` is extract, union and strip in one pass, without the files in between.
"""

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import msgspec
import xxhash

from ftrun import clock
from ftrun.cli.screen.atomic_output import check_free, staged_output
from ftrun.cli.screen.text import listed, shares_to_write
from ftrun.errors import CheckpointError, FtrunError, UsageError
from ftrun.sharding import atoms
from ftrun.sharding.partition import StoredRegion
from ftrun.sharding.replica_check import padding_notes
from ftrun.sharding.rules import SharingKind
from ftrun.sharding.source_index import RegionIndex
from ftrun.sharding.world_layout import WorldLayout
from ftrun.smp.checkpoint.index import FORMAT
from ftrun.smp.checkpoint.reader import CheckpointReader
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.boxes import strides_of, whole
from ftrun.snapshot.layout import CopyTiming
from ftrun.tools.checkpoints.convert_writer import Assembler
from ftrun.tools.checkpoints.source import (
    OpenedVersion,
    check_replicas,
    directory,
    opened_version,
    rules_file,
    share_of,
    source_folder,
)
from ftrun.tools.checkpoints.tensor_store import (
    VALUES_NAME,
    FileJob,
    FilePlan,
    SavedEntry,
    Stage,
    StoreIndex,
    TensorStore,
    index_of,
    join_shares,
    joined,
    plan_of,
    shares_folder,
    with_files,
    write_files,
    write_index,
)
from ftrun.tools.export.safetensors import UNKNOWN
from ftrun.wire.messages.checkpoint import ATOMS_NAME, ExportReport

MAX_WORKERS = 4
MADE: dict[str, Stage] = {
    "export": "atoms", "extract": "fragments", "union": "padded", "strip": "atoms",
}  # fmt: skip
"""What each operation makes."""
TAKEN: dict[str, Stage] = {"union": "fragments", "strip": "padded"}
"""What an operation takes, if that is no checkpoint."""
_SHOWN = 5


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    sys.stdout.buffer.write(msgspec.json.encode(make(sys.argv[1:])))
    return 0


def _end(number: int, _: object) -> NoReturn:
    """Exits by an exception, so that incomplete files are removed."""
    sys.exit(128 + number)


def make(words: Sequence[str]) -> ExportReport:
    arguments = _arguments(words)
    started_s = clock.now_s()
    found = ExportReport(arguments.source, -1, MADE[arguments.operation], arguments.out)
    try:
        found = _make(arguments)
    except FtrunError as error:
        found = msgspec.structs.replace(found, problem=str(error), exit_code=error.exit_code)
    except OSError as error:
        problem = f"{error.filename or arguments.out}: {error.strerror or error}"
        exit_code = CheckpointError.exit_code
        found = msgspec.structs.replace(found, problem=problem, exit_code=exit_code)
    return msgspec.structs.replace(found, seconds=clock.now_s() - started_s)


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ftrun.tools.checkpoints.atoms", description="atoms")
    parser.add_argument("operation", choices=sorted(MADE))
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--rules")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--share", default="1/1")
    parser.add_argument("--force", action="store_true")
    return parser.parse_args(words)


def _make(arguments: argparse.Namespace) -> ExportReport:
    share = share_of(arguments.share)
    if arguments.workers < 0:
        raise UsageError(f"--workers is at least 1, or 0 for the default, not {arguments.workers}")
    if arguments.force and share[1] > 1:
        raise UsageError("--force replaces a folder, and shares add to it: remove the folder first")
    rules = None if arguments.rules is None else rules_file(arguments.rules)
    out = directory(arguments.out, "copy the new folder from a directory to it")
    if share[1] == 1 or not (out / ATOMS_NAME).exists():
        check_free(out, is_folder=True, may_replace=arguments.force, ours=_names_in(out))
    with opened_version(source_folder(arguments.source), rules) as source:
        plan = _planned(arguments.operation, source)
        mine = _of_share(plan, share)
        check_replicas(source, {job.plan.entry for job in mine.jobs})
        workers = arguments.workers or min(MAX_WORKERS, os.cpu_count() or 1)
        missing = _write(mine, out, share, workers)
    files = mine.index.files
    notes = mine.index.notes
    if missing:
        left = f"{out} is complete when {shares_to_write(missing)}, of {share[1]}"
        notes = (*notes, left)
    return ExportReport(
        str(source.folder),
        source.index.step,
        plan.index.stage,
        str(out),
        tuple(f"{one.path}.safetensors" for one in files),
        num_tensors=len(files),
        num_bytes=sum(one.num_bytes for one in files),
        notes=notes,
    )


# --- plans --------------------------------------------------------------------------------------


@dataclass
class StorePlan:
    """The files of one operation, and what they are made from; `index` has no files yet."""

    index: StoreIndex
    jobs: Sequence[FileJob]
    assembler: Assembler
    values: bytes


def _planned(operation: str, source: OpenedVersion) -> StorePlan:
    files = source.files
    wanted = TAKEN.get(operation)
    found = files.index.stage if isinstance(files, TensorStore) else None
    if wanted != found:
        names = {"fragments": "extract makes", "padded": "union makes"}
        takes = "a checkpoint" if wanted is None else f"the folder that {names[wanted]}"
        raise UsageError(f"{operation} takes {takes}, and {source.folder} is {found or 'one'}")
    if isinstance(files, TensorStore):
        return _of_store(operation, files)
    return _of_checkpoint(operation, source)


def _of_checkpoint(operation: str, source: OpenedVersion) -> StorePlan:
    world = source.world
    one = atoms.one_rank(world)
    values = atoms.values_of_one_rank(source.parts, world, one)
    states = plain.decode(values["optimizer_state"])
    packed = plain.encode(values)
    assert isinstance(source.files, CheckpointReader)
    notes = [*_notes(world), *padding_notes(source.files, world, one)]
    index = StoreIndex(
        FORMAT,
        MADE[operation],
        source.index.run_id,
        source.index.generation,
        source.index.step,
        str(world.mesh),
        one.rules.text,
        xxhash.xxh3_64_hexdigest(packed),
        _entries(one, source),
        (),
        notes=tuple(notes),
    )
    if operation == "export":
        plans = _atoms(one, states)
        first = _first_holders(world)
        jobs = [FileJob(p, _of_source(p, first), one.wholes[p.entry].dtype) for p in plans]
        index = _with_dtypes(index, plans)
        return StorePlan(index, jobs, Assembler(source.files, source.regions), packed)
    found = atoms.extract(world)
    paths = atoms.paths_of([file for _, file in found], states)
    raw, jobs = RegionIndex(), []
    for (rank, file), path in zip(found, paths, strict=True):
        box = whole(file.shape)
        all_of_it = [] if box.is_empty else [StoredRegion(path, box, 0, strides_of(file.shape))]
        entry = source.entry(rank, world.own_name(rank, file.entry))
        raw.add(rank, entry, all_of_it)
        jobs.append(FileJob(plan_of(path, file), all_of_it, file.dtype))
    unions = atoms.union(world)
    plans = list(map(plan_of, atoms.paths_of(unions, states), unions))
    index = msgspec.structs.replace(index, unions=tuple(plans))
    return StorePlan(index, jobs, Assembler(source.files, raw), packed)


def _of_store(operation: str, store: TensorStore) -> StorePlan:
    old = {one.name: one.dtype for one in store.index.entries}
    plans: Sequence[FilePlan] = store.index.unions
    if operation == "strip":
        plans = _atoms(store.world, plain.decode(store.values["optimizer_state"]))
    jobs = [FileJob(one, one.tensor_file().regions, old[one.entry]) for one in plans]
    index = msgspec.structs.replace(store.index, stage=MADE[operation], files=(), unions=())
    assembler = Assembler(store, store.regions())
    return StorePlan(_with_dtypes(index, plans), jobs, assembler, store.packed)


def _atoms(one: WorldLayout, states: Mapping[str, object]) -> list[FilePlan]:
    files = [
        replace(file, dtype=atoms.ATOM_DTYPES.get(file.dtype, file.dtype))
        for file in atoms.strip_padding(one)
    ]
    return list(map(plan_of, atoms.paths_of(files, states), files))


def _entries(one: WorldLayout, source: OpenedVersion) -> tuple[SavedEntry, ...]:
    found = []
    for name, tensor in one.wholes.items():
        if tensor.dtype in UNKNOWN:
            raise CheckpointError(f"{name} cannot be written: safetensors files have no complex128")
        of = None if tensor.owner is None else tensor.owner.parameter
        is_lazy = source.when[name] is CopyTiming.LAZY
        shape = one.entries[0][name].shape
        found.append(SavedEntry(name, tensor.dtype, tensor.dtype, shape, of, is_lazy))
    return tuple(found)


def _with_dtypes(index: StoreIndex, plans: Sequence[FilePlan]) -> StoreIndex:
    """The index with the dtypes of the files that are made."""
    new = {one.entry: one.dtype for one in plans}
    entries = tuple(msgspec.structs.replace(e, dtype=new[e.name]) for e in index.entries)
    return msgspec.structs.replace(index, entries=entries)


def _first_holders(world: WorldLayout) -> dict[str, int]:
    """The first rank that has a tensor, of tensors that are each rank's own."""
    found: dict[str, int] = {}
    for rank, entries in enumerate(world.entries):
        for name in entries:
            if world.sharing[name].rule.kind is SharingKind.OWN:
                found.setdefault(name, rank)
    return found


def _of_source(plan: FilePlan, first: Mapping[str, int]) -> list[StoredRegion]:
    regions = plan.tensor_file().regions
    if plan.entry not in first:
        return list(regions)
    return [replace(one, tensor=f"{plan.entry}@{first[plan.entry]}") for one in regions]


def _notes(world: WorldLayout) -> Sequence[str]:
    if world.mesh.size == 1:
        return ()
    notes = ["random states are those of rank 0; the ranks that load the atoms derive theirs"]
    if own := list(_first_holders(world)):
        notes.append(f"each rank has its own {listed(own, _SHOWN)}: those of the first rank")
    kinds = {name: one.rule.kind for name, one in world.sharing.items()}
    if diverged := [name for name, kind in kinds.items() if kind is SharingKind.AVERAGE]:
        notes.append(f"copies have diverged of {listed(diverged, _SHOWN)}: their mean")
    return notes


# --- files --------------------------------------------------------------------------------------


def _of_share(plan: StorePlan, share: tuple[int, int]) -> StorePlan:
    number, count = share
    mine = [one for one in plan.jobs if atoms.share_of(one.plan.entry, count) == number - 1]
    return StorePlan(plan.index, mine, plan.assembler, plan.values)


def _write(plan: StorePlan, out: Path, share: tuple[int, int], workers: int) -> list[int]:
    """Returns the shares that are missing; the files are in `plan.index` afterwards."""
    if share[1] > 1:
        return _write_share(plan, out, share, workers)
    with staged_output(out) as folder:
        folder.mkdir()
        _write_files(plan, folder, workers)
        write_index(folder, plan.index, plan.values)
    return []


def _write_share(plan: StorePlan, out: Path, share: tuple[int, int], workers: int) -> list[int]:
    if not out.exists():
        try:
            folder = shares_folder(out, plan.index)
            folder.mkdir(exist_ok=True)
            _write_files(plan, folder, workers)
            if missing := join_shares(out, share, plan.index, plan.values):
                return missing
        except FileNotFoundError:  # another worker has just joined the shares
            if not out.exists():
                raise
    mine = {job.plan.path for job in plan.jobs}
    files = joined(out, plan.index).files
    plan.index = with_files(plan.index, [one for one in files if one.path in mine])
    return []


def _write_files(plan: StorePlan, folder: Path, workers: int) -> None:
    files = write_files(folder, plan.jobs, plan.assembler, workers=workers)
    plan.index = with_files(plan.index, files)


def _names_in(out: Path) -> set[str]:
    """The names in a store that `--force` may replace."""
    if not (out / ATOMS_NAME).exists():
        return set()
    try:
        folders = {Path(one.path).parts[0] for one in index_of(out).files}
    except CheckpointError:  # it is damaged
        folders = {
            one.name
            for one in out.iterdir()
            if one.is_dir() and all(".safetensors" in path.name for path in one.iterdir())
        }
    left = (one.name for one in out.glob("share-*-of-*.json"))
    return {ATOMS_NAME, VALUES_NAME, *folders, *left}


if __name__ == "__main__":
    sys.exit(main())
