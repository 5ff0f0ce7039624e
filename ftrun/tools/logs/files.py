"""Finds the log files of a run: one file per rank, stream and generation.

torch creates the files `ROOT/RUNID_x/attempt_GENERATION/LOCAL_RANK/stdout.log` if --redirects or
--tee is given. Each agent has its own RUNID_x. The journal assigns ranks to local ranks.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftrun.errors import UsageError
from ftrun.records.decode import JournalLine, of_kinds
from ftrun.records.recovery import GenerationStartedRecord
from ftrun.records.run import RunStarted
from ftrun.tools.report.journal import Line, launches_of, without_single_ends

STREAMS = ("stdout.log", "stderr.log")


@dataclass(frozen=True, slots=True)
class LogFile:
    """One stream of one rank in one generation."""

    path: Path
    node: str
    """Empty in a run on one node."""
    rank: int
    launch: int
    """Number of the launch of this run, from 0."""
    generation: int
    started_s: float
    """Wall time of the generation's start."""
    is_placed: bool
    """The journal names the rank; otherwise the local rank is used as the rank."""

    @property
    def era(self) -> tuple[int, int]:
        return (self.launch, self.generation)

    @property
    def prefix(self) -> str:
        """`node3:17`, or `17` in a run on one node."""
        return f"{self.node}:{self.rank}" if self.node else str(self.rank)


def log_files(folder: Path, lines: Sequence[Line]) -> list[LogFile]:
    """All files visible on this machine, ordered by generation and rank."""
    found: list[LogFile] = []
    ends = [one[-1].t_s for one in launches_of(without_single_ends(lines))[:-1]]
    for node, root in _roots(folder, lines):
        is_shared = root not in (folder / node / "workers", folder / "workers")
        folders = _launches(root, lines, is_shared=is_shared)
        for number, attempts in _numbered(folders, ends):
            for generation, attempt in attempts.items():
                found += _of_attempt(attempt, node, number, generation, lines)
    return sorted(found, key=lambda one: (one.era, one.rank, one.path.name))


def started(
    lines: Iterable[Line], *, generation: int, node: str
) -> JournalLine[GenerationStartedRecord] | None:
    starts = (
        line
        for line in of_kinds(lines, GenerationStartedRecord)
        if line.node == node and line.record.generation == generation
    )
    return max(starts, key=lambda line: line.t_s, default=None)


def parse_ranks(text: str) -> frozenset[int]:
    """Parses `3`, `0-7` or `1,5-6`."""
    found: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or len(part) > 20:
            raise UsageError(f"--rank takes ranks such as 3, 0-7 or 1,5-6, not {text[:100]!r}")
        last = int(high) if dash else int(low)
        if last < int(low):
            raise UsageError(f"--rank {text[:100]}: {part.strip()} ends before it begins")
        if last - int(low) > 1_000_000:
            raise UsageError(f"--rank {text[:100]} names more ranks than any run has")
        found.update(range(int(low), last + 1))
    return frozenset(found)


def _roots(folder: Path, lines: Sequence[Line]) -> list[tuple[str, Path]]:
    """Returns each node's folder of files, as in its journal, or the default folder."""
    reported: dict[str, Path] = {}
    for line in of_kinds(lines, RunStarted):
        default = folder / line.node / "workers" if line.node else folder / "workers"
        printed = Path(line.record.logs or default)
        reported[line.node] = printed if printed.is_dir() else default
    if not reported:
        reported[""] = folder / "workers"
    return [(node, root) for node, root in sorted(reported.items()) if root.is_dir()]


def _launches(root: Path, lines: Sequence[Line], *, is_shared: bool) -> list[Path]:
    """Returns the launch folders, oldest first; a shared folder is filtered for this run."""
    folders = [one for one in root.iterdir() if one.is_dir()]
    if is_shared:
        reported = [line.record for line in of_kinds(lines, RunStarted)]
        # torch adds eight characters of tempfile to the name; `a` must not match `a_b`.
        names = "|".join(re.escape(one.rdzv_id or one.run_id) for one in reported)
        folders = [one for one in folders if re.fullmatch(rf"({names})_[a-z0-9_]{{8}}", one.name)]
    return sorted(folders, key=_created_s)


def _numbered(
    folders: Iterable[Path], ends: Sequence[float]
) -> Iterator[tuple[int, dict[int, Path]]]:
    """Yields the launch of each folder, and its generations.

    A restarted agent has another folder in the same launch, with later generations. A launch that
    was killed has no end.
    """
    number, last = 0, -1
    for folder in folders:
        names = {one.name.removeprefix("attempt_"): one for one in folder.glob("attempt_*")}
        attempts = {int(name): one for name, one in names.items() if name.isdigit()}
        if not attempts:
            continue
        is_again = min(attempts) <= last
        number, last = max(number + is_again, bisect_left(ends, _created_s(folder))), max(attempts)
        yield number, attempts


def _of_attempt(
    attempt: Path, node: str, launch: int, generation: int, lines: Sequence[Line]
) -> Iterator[LogFile]:
    start = started(lines, generation=generation, node=node)
    ranks = start.record.ranks if start is not None else ()
    started_s = start.t_s if start is not None else _created_s(attempt)
    for path in (folder / name for folder in attempt.iterdir() for name in STREAMS):
        if path.parent.name.isdigit() and path.is_file():
            local = int(path.parent.name)
            is_placed = local < len(ranks)
            rank = ranks[local] if is_placed else local
            yield LogFile(path, node, rank, launch, generation, started_s, is_placed)


def _created_s(folder: Path) -> float:
    """Estimates the creation time by the oldest entry."""
    try:
        inside = [one.stat().st_mtime for one in folder.iterdir()]
        return min(inside, default=folder.stat().st_mtime)
    except OSError:
        return 0.0
