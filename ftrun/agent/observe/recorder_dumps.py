"""Dumps of the flight recorders for torch's own analyzer, their reader, and the variables.

Runs in the thread of the rank observer. `torchfrtrace FOLDER -p rank_` compares the files
`rank_<R>` in the folder of a generation.

Rule 1: a pickle may name any code. It is read here only, by an unpickler that refuses every name.
        What a rank sends as a pickle is written as it is, and the agent does not read it.
Rule 2: the analyzer fails on a dump without groups (torch's own of gloo), so they are taken from
        the rank's page.
Rule 3: variables that the user has set stay. TORCH_FR_BUFFER_SIZE overrides
        TORCH_NCCL_TRACE_BUFFER_SIZE, so it is set only if the user has set neither. The latter is
        never set, because torch warns about it in every rank (seen with 2.13), and only the dump
        pipe of 2.8 to 2.11 needs it.
"""

import json
import os
import pickle  # noqa: TID251 - the format of torch's dumps; see rule 1
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftrun.agent.launch.warm_start import WorkerHandle
from ftrun.agent.observe.proc import process_facts
from ftrun.agent.observe.recorder import RECORDER_S, RecorderReader, may_query_device
from ftrun.monitor.flight_recorder import Trace, trace_of
from ftrun.monitor.page_values import decode_groups
from ftrun.wire.shared_memory.pages import HeartbeatField

MAX_DUMP_BYTES = 64 << 20
PREFIX = "rank_"

RECORDED_CALLS = 128
"""Number of collectives in gloo's recorder; reading torch's default of 2,000 takes 15 ms."""

RECORDED_ON_DEVICE = 2000
"""Number of collectives in NCCL's recorder, which is not read while ranks make steps. Torch 2.8 to
2.10 record nothing without a size."""

DUMPS = "fr"
"""Folder of dumps below the logs of a node, with a folder for each generation."""

KEPT_DUMPS = 20
"""Number of ended generations whose dumps stay, the last ones: a dump is made in an incident."""

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
PIPE_STEM = "recorder_"
_DEVICES = ("dev/nvidia[0-9]*", "dev/kfd")


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain values only."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"the dump names {module}.{name}, which is not plain data")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("the dump refers to an object outside of it")


def read_dump(path: Path) -> Trace:
    """Read a dump.

    Raises:
        ValueError: it is too large, or no dump of plain values.
        OSError: it cannot be read.
    """
    if path.stat().st_size > MAX_DUMP_BYTES:
        raise ValueError(f"{path} is larger than {MAX_DUMP_BYTES >> 20} MiB")
    try:
        with path.open("rb") as file:
            found = _PlainUnpickler(file).load()
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a torn pickle raises errors of any type
        raise ValueError(f"{path} is no dump of plain values: {error}") from error
    trace = trace_of(found)
    if trace is None:
        raise ValueError(f"{path} is no dump of a flight recorder")
    return trace


def write_dumps(folder: Path, ranks: Iterable[tuple[WorkerHandle, RecorderReader]]) -> int:
    """Write a dump of each rank that gives one; return their number."""
    count = 0
    for handle, reader in ranks:
        page, rank = handle.slot.page, handle.slot.rank
        facts = process_facts(handle.pid) if handle.child.is_alive else None
        if facts is None or facts.state in ("T", "t"):
            continue  # a stopped process does not answer
        if not page.get(HeartbeatField.HAS_SERVER):
            own = Path(handle.slot.request.rank_socket).parent / PIPE_STEM
            if may_query_device(page, RECORDER_S):  # captures wait until it has been made
                ask_by_pipe(os.environ.get(PIPE) or str(own), rank)
            continue
        data = reader.dump(page)
        with suppress(OSError, ValueError):
            if data is not None:
                _write(folder, rank, as_pickle(data, page.groups))
                count += 1
    return count


def as_pickle(dump: bytes, groups: str) -> bytes:
    """A dump as torch's analyzer reads it; a pickle stays as it is. ValueError: it is none.

    `groups`: as on the page.
    """
    if dump[:1] == pickle.PROTO:
        return dump
    found = json.loads(dump)
    if not isinstance(found, dict):
        raise ValueError("it is no dump of a flight recorder")  # noqa: TRY004 - as other wrong text
    found.setdefault("entries", [])
    config = found.get("pg_config")
    known = {name: one for name, one in config.items() if name} if isinstance(config, dict) else {}
    found["pg_config"] = known or {
        # A rank without an entry of a group does not know its description, and the analyzer
        # compares them.
        name: {"name": name, "desc": name, "ranks": str(list(ranks))}
        for name, ranks in decode_groups(groups).items()
    }
    return pickle.dumps(found, protocol=2)  # torch's own protocol


def ask_by_pipe(prefix: str, rank: int) -> bool:
    """Have torch dump into its own file within a second; whether there is a reader."""
    with suppress(OSError):
        pipe = os.open(f"{prefix}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        try:
            return os.write(pipe, b"1") == 1
        finally:
            os.close(pipe)
    return False


def _write(folder: Path, rank: int, data: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{PREFIX}{rank}"
    part.write_bytes(data)
    part.rename(folder / f"{PREFIX}{rank}")


def remove_old_dumps(dumps: Path, generation: int) -> None:
    """Remove the folders of ended generations without a dump, and dumps beyond `KEPT_DUMPS`."""
    numbers = sorted(int(one.name) for one in dumps.glob("*") if one.name.isdecimal())
    found = []
    for folder in [dumps / str(number) for number in numbers if number < generation]:
        try:
            folder.rmdir()
        except OSError:  # it has dumps
            found.append(folder)
    for folder in found[:-KEPT_DUMPS]:
        with suppress(OSError):
            for path in [*folder.glob(f"{PREFIX}*"), *folder.glob(f".{PREFIX}*")]:
                path.unlink()
            folder.rmdir()


def has_nccl_devices(root: Path = Path("/")) -> bool:
    """Whether this machine has devices for NCCL or RCCL; opens no device."""
    return any(True for pattern in _DEVICES for _ in root.glob(pattern))


def recorder_variables(
    user: Mapping[str, str], *, dumps: Path, pipes: Path, has_devices: bool
) -> dict[str, str]:
    """Variables that `user` has not set. `pipes` is on a local file system.

    Torch ends a rank that cannot make its pipe.
    """
    found: dict[str, str] = {}
    if not any(name in user for name in _SIZES):
        found[_SIZES[0]] = str(RECORDED_ON_DEVICE if has_devices else RECORDED_CALLS)
    if not has_devices:
        return found
    with suppress(OSError):  # if the disk is full, torch uses its default folder
        dumps.mkdir(parents=True, exist_ok=True)
        if not any(name in user for name in _FILES):
            found |= dict.fromkeys(_FILES, str(dumps / "rank_"))
    if PIPE not in user:
        found[PIPE] = str(pipes / PIPE_STEM)
    return found
