"""The lines of a journal in the order of time, each once, with texts that are safe to print.

A journal may contain any text: names of scripts and nodes, exceptions, words of a rank.
Rule 1: no line is decoded before its texts have been through `clean`.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ftrun.cli.screen.text import clean
from ftrun.events import Record
from ftrun.records.decode import JournalLine, decode, of_kinds
from ftrun.records.membership import BallotStarted
from ftrun.records.recovery import EndRun, GenerationStartedRecord, Recovered
from ftrun.records.run import ProgressRecord, RunEndedRecord, RunStarted

MAX_PROGRESS_LINES = 50_000
_MAX_WALL_S = 32_503_680_000.0  # the year 3000
_JUMP_S = 7 * 86_400.0
"""A wall clock is set by less than this."""
_NEEDS_CLEANING = re.compile(rb'[^\x20-\x7e]|\\[bfru]|"[^"]{2000,}')

_OF_RANKS = (GenerationStartedRecord, ProgressRecord)
"""A node that runs ranks writes these."""

Line = JournalLine[Record]


def parse(raw: Iterable[bytes]) -> tuple[list[Line], int]:
    """Returns the lines in the order of time, and the number of lines that cannot be read."""
    seen: set[int] = set()
    by_node: dict[str, list[Line]] = {}
    progress = ProgressSampler()
    unreadable = 0
    for line in map(bytes.strip, raw):
        if not line or (key := hash(line)) in seen:
            continue
        seen.add(key)
        found = decode(_cleaned(line) if _NEEDS_CLEANING.search(line) else line)
        if found is None or not 0 <= found.t_s < _MAX_WALL_S:
            unreadable += 1
        elif isinstance(found.record, ProgressRecord):
            progress.add(JournalLine(found.t_s, found.node, found.monotonic_s, found.record))
        else:
            by_node.setdefault(found.node, []).append(found)
    for node, kept in progress.kept().items():
        by_node.setdefault(node, []).extend(kept)
    lines = [line for entries in by_node.values() for line in _steady(entries)]
    return sorted(lines, key=lambda one: one.t_s), unreadable


def _cleaned(line: bytes) -> bytes:
    try:
        return msgspec.json.encode(_with_clean_texts(msgspec.json.decode(line)))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return b""


def _with_clean_texts(value: object) -> object:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_with_clean_texts(one) for one in value]
    if isinstance(value, dict):
        return {clean(key): _with_clean_texts(one) for key, one in value.items()}
    return value


def _steady(lines: list[Line]) -> Iterable[Line]:
    """Lines of one node whose time does not jump when its wall clock is set.

    The monotonic clock restarts on another machine and after a reboot.
    """
    lines.sort(key=lambda line: line.t_s)
    last_at_s, last_s = -math.inf, math.inf
    offset_s = 0.0
    for line in lines:
        jump_s = abs((line.t_s - last_at_s) - (line.monotonic_s - last_s))
        if line.monotonic_s < last_s - 1.0 or jump_s > _JUMP_S:
            offset_s = line.t_s - line.monotonic_s
        last_at_s, last_s = line.t_s, line.monotonic_s
        yield JournalLine(last_s + offset_s, line.node, last_s, line.record)


class ProgressSampler:
    """Thins out the progress lines, so that a journal of weeks fits into memory.

    They come every few seconds and count upwards, so those in between can be left out; the last
    one before a count restarts is always kept. Of their ranks only the numbers are of use.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[JournalLine[ProgressRecord]]] = {}
        self._newest: dict[str, JournalLine[ProgressRecord]] = {}
        self._every_s = 0.0
        self._count = 0

    def add(self, line: JournalLine[ProgressRecord]) -> None:
        last = self._newest.get(line.node)
        if last is not None:
            before, rows = last.record.ranks, line.record.ranks
            if [row[0] for row in before] == [row[0] for row in rows]:  # saves memory
                record = msgspec.structs.replace(line.record, ranks=before)
                line = JournalLine(line.t_s, line.node, line.monotonic_s, record)
            if line.record.steps_here < last.record.steps_here:
                self._keep(last)
        self._newest[line.node] = line
        kept = self._kept.get(line.node)
        if not kept or line.t_s - kept[-1].t_s >= self._every_s:
            self._keep(line)

    def kept(self) -> dict[str, list[JournalLine[ProgressRecord]]]:
        for line in self._newest.values():
            self._keep(line)
        return self._kept

    def _keep(self, line: JournalLine[ProgressRecord]) -> None:
        kept = self._kept.setdefault(line.node, [])
        if kept and kept[-1] is line:
            return
        kept.append(line)
        self._count += 1
        if self._count > MAX_PROGRESS_LINES:
            self._every_s = max(2 * self._every_s, 20.0)
            self._downsample()

    def _downsample(self) -> None:
        for lines in self._kept.values():
            thin = lines[:1]
            for line, following in itertools.pairwise([*lines[1:], lines[-1]]):
                restarts = following.record.steps_here < line.record.steps_here
                if restarts or following is line or line.t_s - thin[-1].t_s >= self._every_s:
                    thin.append(line)
            lines[:] = thin
        self._count = sum(len(lines) for lines in self._kept.values())


def first_step_at(line: Line) -> float | None:
    """When the last rank of a node had completed its first step, by a `Recovered` line."""
    record = line.record
    if not isinstance(record, Recovered) or (started := line.at(record.noticed_s)) is None:
        return None
    return started + sum(record.phases_s.values()) if record.phases_s else None


def without_single_ends(lines: Iterable[Line]) -> list[Line]:
    """The lines without the ends of nodes whose run continues.

    A node that drains says so. After the end of a rejected node, another node still runs ranks.
    """
    kept: list[Line] = []
    following: dict[str, Record] = {}
    for line in reversed(list(_without_drained(lines))):
        node, record = line.node, line.record
        is_end = isinstance(record, EndRun | RunEndedRecord)
        others = (one for other, one in following.items() if other != node)
        if is_end and any(isinstance(one, _OF_RANKS) for one in others):
            continue
        if is_end or isinstance(record, (RunStarted, *_OF_RANKS)):
            following[node] = record
        kept.append(line)
    return kept[::-1]


def _without_drained(lines: Iterable[Line]) -> Iterator[Line]:
    drained: set[str] = set()
    for line in lines:
        record = line.record
        if isinstance(record, RunStarted):
            drained.discard(line.node)
        elif isinstance(record, EndRun) and record.run_continues and record.exit_code:
            drained.add(line.node)
        if line.node not in drained or not isinstance(record, EndRun | RunEndedRecord):
            yield line


def newest_run(lines: Sequence[Line]) -> tuple[list[list[Line]], int]:
    """The launches of the newest run, and the number of launches before them.

    A run id may be used again. A launch that resumed a state, or found the run finished, belongs to
    the run before it.
    """
    launches = launches_of(lines)
    first = len(launches) - 1
    while first > 0 and _continues(launches[first]):
        first -= 1
    return launches[first:], first


def launches_of(lines: Sequence[Line]) -> list[list[Line]]:
    """All launches. One whose end was not written is not separated from the next one."""
    launches: list[list[Line]] = [[]]
    has_ended = False
    for line in lines:
        record = line.record
        begins = isinstance(record, BallotStarted) and record.generation == 0
        if has_ended and (begins or isinstance(record, RunStarted)):
            launches.append([])
            has_ended = False
        has_ended = has_ended or isinstance(record, RunEndedRecord | EndRun)
        launches[-1].append(line)
    return launches


def _continues(launch: Sequence[Line]) -> bool:
    starts = of_kinds(launch, GenerationStartedRecord)
    if not starts:
        return any(line.record.run_continues for line in of_kinds(launch, EndRun))
    return starts[0].record.restored is not None
