"""Finds the dumps in a folder, and reads them without running code of theirs.

Source:   torch's FlightRecorder, format 2.x: pickles that it writes itself, and JSON as its server
          answers it. A name ends in the rank: `nccl_trace_rank_12`, `rank_3.json`.

Rule 1: a pickle may name any code, so the unpickler refuses every name.
Rule 2: a damaged dump is a finding, because a rank that ends while it writes leaves a part. A dump
        of an unknown format is an error, because its entries may mean something else.
"""

import json
import pickle  # noqa: TID251 - the format of torch's dumps; see rule 1
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from ftrun.errors import UsageError
from ftrun.monitor.flight_recorder import Trace, trace_of

MAX_DUMP_BYTES = 64 << 20
_NAME = re.compile(r"(?P<prefix>[^.].*?)??(?P<rank>\d{1,7})(\.json|\.pickle|\.pkl)?")
_KNOWN = re.compile(r"2\.\d+")
_HOW = (
    "Torch writes one for each rank when a collective times out; ftrun explain --help says which "
    "variables to set"
)


@dataclass(frozen=True, slots=True)
class RankDump:
    """The dump of one rank."""

    path: Path
    trace: Trace
    changed_ns: int
    """When the file was last changed, on the wall clock."""


@dataclass(frozen=True, slots=True)
class DumpFolder:
    """All dumps of one run."""

    prefix: str
    dumps: dict[int, RankDump] = field(default_factory=dict)
    """By rank."""
    damaged: dict[int, str] = field(default_factory=dict)
    """Why the dump of a rank cannot be read."""
    node_of: dict[int, str] = field(default_factory=dict)
    """Name of the subfolder in which the dump of a rank is."""


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain values only."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not plain data")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to an object outside of it")


def read_folder(folder: Path, prefix: str | None) -> DumpFolder:
    """Read the dumps of a folder and of its subfolders.

    Raises:
        UsageError: there are none, they are of several runs, or their format is not known.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder. Name the folder that has one dump of each rank")
    found: dict[str, DumpFolder] = {}
    for path, name, rank in _named(folder):
        if prefix is None or name == prefix:
            one = found.setdefault(name, DumpFolder(name))
            _add(one, path, rank, "" if path.parent == folder else path.parent.name)
    with_dumps = {name: one for name, one in found.items() if one.dumps}
    if len(with_dumps) == 1:
        return next(iter(with_dumps.values()))
    if with_dumps:
        counts = ", ".join(f"{name} ({len(one.dumps)})" for name, one in with_dumps.items())
        raise UsageError(
            f"{folder} has dumps with {len(with_dumps)} prefixes: {counts}. Choose one with "
            "--prefix, because only dumps of one run can be compared"
        )
    raise UsageError(_none(folder, prefix, found))


def read_dump(path: Path) -> Trace:
    """Read one dump.

    Raises:
        ValueError: it is too large, damaged, or no dump of plain values.
        UsageError: its format is not known.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    if size > MAX_DUMP_BYTES:
        raise ValueError(f"it has {size:,} bytes, and at most {MAX_DUMP_BYTES:,} are read")
    found = _plain(path.read_bytes())
    known = found if isinstance(found, dict) else {}
    if not {"entries", "pg_config"} & known.keys() or not isinstance(known.get("version"), str):
        raise ValueError("it is no dump of a flight recorder: it has no version, or no entries")
    if not _KNOWN.fullmatch(known["version"]):
        raise UsageError(
            f"{path} has format {known['version'][:20]!r}. Known are formats 2.x, of torch 2.8 to "
            "2.15; a newer ftrun may know it"
        )
    trace = trace_of(found)
    if trace is None:
        raise ValueError("its entries have another form than those of torch")
    return trace


def _plain(data: bytes) -> object:
    """The value of a pickle or of JSON."""
    try:
        if data[:1] == pickle.PROTO:
            return _PlainUnpickler(BytesIO(data)).load()
        return json.loads(data)
    except MemoryError:
        raise
    except Exception as error:  # a torn pickle raises errors of any type
        raise ValueError(f"it is damaged, or no dump of plain values: {error}") from error


def _named(folder: Path) -> Iterator[tuple[Path, str, int]]:
    """Files whose names end in a rank: path, prefix and rank."""
    for path in sorted((*folder.glob("*"), *folder.glob("*/*"))):
        found = _NAME.fullmatch(path.name)
        if found is not None and path.is_file():
            yield path, found["prefix"] or "", int(found["rank"])


def _add(one: DumpFolder, path: Path, rank: int, node: str) -> None:
    try:
        dump = RankDump(path, read_dump(path), path.stat().st_mtime_ns)
    except (OSError, ValueError) as error:
        one.damaged[rank] = f"{path}: {error}"
        return
    if rank in one.dumps:
        raise UsageError(
            f"there are two dumps of rank {rank}: {one.dumps[rank].path} and {path}. Name a folder "
            "with the dumps of one moment"
        )
    one.dumps[rank] = dump
    if node:
        one.node_of[rank] = node


def _none(folder: Path, prefix: str | None, found: dict[str, DumpFolder]) -> str:
    """Why a folder has no dumps, and how to get some."""
    damaged = [reason for one in found.values() for reason in one.damaged.values()]
    if damaged:
        return f"none of {len(damaged)} files in {folder} is a dump; the first: {damaged[0]}"
    named = f"{prefix}3" if prefix else "nccl_trace_rank_3"
    return f"{folder} has no dumps: no name of a file ends in a rank, such as {named}. {_HOW}"
