"""Dumps of the flight recorders for torch's own analyzer, and the variables.

Runs in the thread of the rank observer. `torchfrtrace FOLDER -p rank_ --allow-incomplete-ranks`
compares the files `rank_<R>` in the folder of a generation; a stopped rank has none.

Rule 1: a pickle may name any code. What a rank sends as a pickle is written as it is, and the agent
        does not read it; `ftrun.tools.explain.dumps` does.
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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from ftrun import clock
from ftrun.agent.launch.warm_start import WorkerHandle
from ftrun.agent.observe.evidence import BoundedReads
from ftrun.agent.observe.proc import process_facts
from ftrun.agent.observe.recorder import RECORDER_S, RecorderReader, may_query_device
from ftrun.monitor.page_values import decode_groups
from ftrun.wire.shared_memory.pages import HeartbeatField

PREFIX = "rank_"

RECORDED_CALLS = 128
"""Number of collectives in gloo's recorder; reading torch's default of 2,000 takes 15 ms."""

RECORDED_ON_DEVICE = 2000
"""Number of collectives in NCCL's recorder, which is not read while ranks make steps. Torch 2.8 to
2.10 record nothing without a size."""

DUMPS_S = 10.0
"""Deadline for the dumps of all ranks here. Their files may be on a dead file system too."""

_CLEAN_S = 1.0

DUMPS = "fr"
"""Folder of dumps below the logs of a node, with a folder for each generation."""

KEPT_DUMPS = 20
"""Number of ended generations whose dumps stay, the last ones: a dump is made in an incident."""

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
PIPE_STEM = "recorder_"
_DEVICES = ("dev/nvidia[0-9]*", "dev/kfd")


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
                _write(folder, rank, as_pickle(data, page.groups), read_s=clock.wall_s())
                count += 1
    return count


class RankAnswer(NamedTuple):
    """What the recorder of a rank has said when another rank failed."""

    rank: int
    data: bytes
    """JSON; empty: it has said nothing."""
    groups: str
    """As on the page."""
    read_s: float
    """When, on the wall clock: the time of the file, by which a dump belongs to an incident."""


class DumpWriter:
    """Writes the dumps of this node: once in a hang, and when a rank has failed."""

    def __init__(self, folder: Path, reads: BoundedReads) -> None:
        """`folder` gets a folder for each generation, in `reads`: its file system may be dead."""
        self._folder = folder
        self._reads = reads
        self.is_written = False
        """Dumps of the hang or stop of now."""
        self._cleaned_for = -1
        """Generation at whose start old dumps were removed."""
        self._kept: SimpleQueue[tuple[int, list[RankAnswer]]] = SimpleQueue()

    def keep(self, generation: int, answers: list[RankAnswer]) -> None:
        """In the main thread: keep what `write_kept` writes, while the failure is handled."""
        if not self.is_written:  # dumps of a hang also have the ranks that are killed now
            self._kept.put((generation, answers))

    def write_kept(self) -> None:
        with suppress(Empty):
            while True:
                generation, answers = self._kept.get_nowait()
                folder = self._folder / str(generation)
                self._reads.result(partial(write_answers, folder, answers), DUMPS_S)

    def write(self, ranks: Sequence[tuple[WorkerHandle, RecorderReader]]) -> None:
        """Write all dumps; later calls do nothing until `reset`."""
        if not self.is_written:
            self.is_written = True
            folder = self._folder / str(ranks[0][0].slot.request.generation)
            self._reads.result(partial(write_dumps, folder, ranks), DUMPS_S)

    def reset(self) -> None:
        """All ranks make steps again."""
        self.is_written = False

    def clean(self, generation: int) -> None:
        """Remove old dumps, once in a generation."""
        if self._cleaned_for != generation:
            self._cleaned_for = generation
            self._reads.result(partial(remove_old_dumps, self._folder, generation), _CLEAN_S)


def write_answers(folder: Path, answers: Iterable[RankAnswer]) -> None:
    for one in answers:
        with suppress(OSError, ValueError):
            _write(folder, one.rank, as_pickle(one.data, one.groups), read_s=one.read_s)


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


def _write(folder: Path, rank: int, data: bytes, *, read_s: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{PREFIX}{rank}"
    part.write_bytes(data)
    os.utime(part, (read_s, read_s))
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
