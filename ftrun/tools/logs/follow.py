"""Follows the log files of ranks from one generation to the next.

After a restart it finds the files of the new generation and prints the last lines of the old one.

Rule 1: a line is printed if it is complete, or if no process writes to its file any more. It has no
        control characters except colours; of a progress bar only the last state remains.
"""

import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftrun import clock
from ftrun.records.decode import of_kinds
from ftrun.records.recovery import GenerationStartedRecord
from ftrun.records.run import RunStarted
from ftrun.tools.logs.files import LogFile, log_files
from ftrun.tools.report.command import changed_s, is_alive, raw_lines
from ftrun.tools.report.journal import Line, parse

MAX_LINE_BYTES = 1 << 16
"""A longer line is returned in parts, because some programs never end a line."""
_CHUNK_BYTES = 1 << 16
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_HIDDEN = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b.?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PLAIN_AGAIN = "\x1b[0m"

POLL_S = 0.1
LIST_EVERY_S = 0.5
FOLLOWED_LINES = 10
UNPLACED_LISTS = 20
"""Number of listings for which a new file waits for the journal to name its rank."""


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Selects log files."""

    ranks: frozenset[int] | None = None
    node: str | None = None
    generation: int | None = None
    lines: int | None = None

    def takes(self, file: LogFile) -> bool:
        return (
            (self.ranks is None or file.rank in self.ranks)
            and (self.node is None or file.node == self.node)
            and (self.generation is None or file.generation == self.generation)
        )


def follow(folder: Path, choice: LogFilter) -> None:
    """Prints the last lines of the newest generation, then all new lines until the run ends."""
    follower = LogTailer(folder, choice)
    listed_s = clock.now_s()
    while True:
        follower.print_grown()
        if clock.now_s() - listed_s >= LIST_EVERY_S:
            listed_s = clock.now_s()
            # Before the last listing, so that no file is missed.
            is_over = not is_run_alive(follower.lines)
            follower.list_files()
            if is_over:
                follower.finish(follower.readers)
                return
        clock.sleep(POLL_S)


class LogTailer:
    """Reads a set of growing files."""

    def __init__(self, folder: Path, choice: LogFilter) -> None:
        self.readers: dict[Path, tuple[LogFile, LogReader]] = {}
        self._folder = folder
        self._choice = choice
        self._width = 0
        self._seen: set[Path] = set()
        self._unplaced = 0
        self.lines = read_lines(folder)
        files = [one for one in log_files(folder, self.lines) if choice.takes(one)]
        newest = max((file.era for file in files), default=None)
        last = FOLLOWED_LINES if choice.lines is None else choice.lines
        for file in files:
            self._seen.add(file.path)
            if file.era == newest:
                self._open(file, tail_offset(file.path, last))

    def list_files(self) -> None:
        """Opens the files of new generations, and closes those of old ones."""
        if all(file.path in self._seen for file in log_files(self._folder, self.lines)):
            return
        self.lines = read_lines(self._folder)
        files = log_files(self._folder, self.lines)
        new = [file for file in files if file.path not in self._seen]
        if not all(file.is_placed for file in new) and self._unplaced < UNPLACED_LISTS:
            self._unplaced += 1
            return
        self._unplaced = 0
        self._seen.update(file.path for file in new)
        new = [file for file in new if self._choice.takes(file)]
        if new:
            self._switch_to(new)

    def print_grown(self) -> None:
        """Prints all lines since the last poll; the file with the oldest change first."""
        pairs = sorted(self.readers.values(), key=lambda pair: changed_s(pair[0].path))
        for file, reader in pairs:
            self._print(file, reader.grown())
        sys.stdout.flush()

    def finish(self, readers: "Mapping[Path, tuple[LogFile, LogReader]]") -> None:
        for file, reader in readers.values():
            self._print(file, reader.ended())
        sys.stdout.flush()

    def _switch_to(self, new: Sequence[LogFile]) -> None:
        newest = max(file.era for file in new)
        old = {path: pair for path, pair in self.readers.items() if pair[0].era < newest}
        self.finish(old)
        for path in old:
            del self.readers[path]
        if old:
            report_generation(newest[1], self.lines)
        for file in new:
            self._open(file, 0)

    def _open(self, file: LogFile, offset: int) -> None:
        self._width = max(self._width, len(file.prefix))
        self.readers[file.path] = (file, LogReader(file.path, offset=offset))

    def _print(self, file: LogFile, texts: Iterable[str]) -> None:
        for text in texts:
            sys.stdout.write(f"{file.prefix.ljust(self._width)} | {text}\n")


def read_lines(folder: Path) -> list[Line]:
    return parse(raw_lines(folder))[0]


def is_run_alive(lines: Sequence[Line]) -> bool:
    runs = of_kinds(lines, RunStarted)
    return bool(runs) and is_alive(runs[0].record.run_id)


def report_generation(generation: int, lines: Sequence[Line]) -> None:
    starts = [line.record for line in of_kinds(lines, GenerationStartedRecord)]
    found = [one for one in starts if one.generation == generation]
    reason = f": {found[-1].reason}" if found and generation > 0 else ""
    write_notice(f"generation {generation}{reason}")


def write_notice(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"--- {text}\n")
    sys.stderr.flush()


# --- lines of a file --------------------------------------------------------------------------


class LineSplitter:
    """Splits the bytes of one file into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        *lines, rest = (self._rest + data).split(b"\n")
        while len(rest) > MAX_LINE_BYTES:
            # An unfinished progress bar has overwritten this text, so it is dropped.
            before, back, newest = rest.rpartition(b"\r")
            if back and before:
                rest = newest
                continue
            lines.append(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        self._rest = rest
        return [shown(line) for line in lines]

    def rest(self) -> list[str]:
        rest, self._rest = self._rest, b""
        return [shown(rest)] if rest.strip() else []


class LogReader:
    """Reads one growing file."""

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self.path = path
        self._offset = offset
        self._splitter = LineSplitter()

    def grown(self) -> list[str]:
        found: list[str] = []
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset:  # the file was truncated: read it from its beginning
                    self._offset = 0
                file.seek(self._offset)
                while data := file.read(_CHUNK_BYTES):
                    self._offset += len(data)
                    found += self._splitter.feed(data)
        except OSError:
            return found
        return found

    def ended(self) -> list[str]:
        return [*self.grown(), *self._splitter.rest()]


def lines_of(path: Path, *, last: int | None) -> Iterator[tuple[float, str]]:
    """Yields each line with its approximate position in the file, from 0 (begin) to 1 (end)."""
    return itertools.islice(_lines_of(path, last), last)


def _lines_of(path: Path, last: int | None) -> Iterator[tuple[float, str]]:
    try:
        size = max(1, path.stat().st_size)
        start = 0 if last is None else tail_offset(path, last)
        splitter = LineSplitter()
        with path.open("rb") as file:
            file.seek(start)
            at = start
            while data := file.read(_CHUNK_BYTES):
                whole = splitter.feed(data)
                for number, line in enumerate(whole):
                    yield min(1.0, (at + len(data) * (number + 1) / len(whole)) / size), line
                at += len(data)
        for line in splitter.rest():
            yield 1.0, line
    except OSError:
        return


def tail_offset(path: Path, last: int) -> int:
    """Returns the byte offset at which the last `last` lines begin."""
    with path.open("rb") as file:
        at = file.seek(0, os.SEEK_END)
        if last <= 0:
            return at
        missing, is_end = last, True
        while at > 0:
            begin = max(0, at - _CHUNK_BYTES)
            file.seek(begin)
            data = file.read(at - begin)
            end = len(data) - 1 if is_end and data.endswith(b"\n") else len(data)
            is_end = False
            while (found := data.rfind(b"\n", 0, end)) >= 0:
                missing -= 1
                if missing == 0:
                    return begin + found + 1
                end = found
            at = begin
        return 0


def shown(raw: bytes) -> str:
    """Returns a line as a terminal shows it, without control sequences except colours."""
    text = raw.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
    if not _HIDDEN.search(text):
        return text
    parts: list[str] = []
    at = 0
    for colour in _COLOUR.finditer(text):
        parts += [_HIDDEN.sub("", text[at : colour.start()]), colour.group()]
        at = colour.end()
    parts.append(_HIDDEN.sub("", text[at:]))
    plain = "".join(parts)
    return plain + _PLAIN_AGAIN if at else plain
