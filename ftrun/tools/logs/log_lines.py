"""Splits growing files into complete lines that are safe to print.

Runs in:  cli.
Takes in: log files of ranks.
Gives:    lines without control characters except colours; of a progress bar only its last state.

Rule 1: A line is returned if it is complete, or if no process writes to its file any more.
"""

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

MAX_LINE_BYTES = 1 << 16
"""A longer line is returned in parts, because some programs never end a line."""
_CHUNK_BYTES = 1 << 16
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_HIDDEN = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b.?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PLAIN_AGAIN = "\x1b[0m"


class LineSplitter:
    """Splits the bytes of one file into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Returns the lines that are now complete."""
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
        """Returns complete lines since the last poll."""
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
    """Yields each line with its approximate position in the file, from 0 (begin) to 1 (end).

    Args:
        path: the log file.
        last: number of lines at the end of the file when the reading begins; None for all.
    """
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
