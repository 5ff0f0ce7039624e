"""Follows the log files of ranks from one generation to the next.

Runs in:  cli.
Takes in: the files of a run, polled.
Gives:    their new lines, in the order in which the files grow.
Survives: restarts. It finds the files of a new generation and prints the last lines of the old one.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftrun import clock
from ftrun.tools.logs.files import LogFile, log_files
from ftrun.tools.logs.log_lines import LogReader, tail_offset
from ftrun.tools.report.journal import JournalLine, parse
from ftrun.tools.report.report_logs import is_alive, raw_lines

LOOK_S = 0.1
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
            is_over = not follower.is_alive  # before the last listing, so that no file is missed
            follower.list_files()
            if is_over:
                follower.finish(follower.readers)
                return
        clock.sleep(LOOK_S)


class LogTailer:
    """Reads a set of growing files."""

    def __init__(self, folder: Path, choice: LogFilter) -> None:
        self.readers: dict[Path, tuple[LogFile, LogReader]] = {}
        self._folder = folder
        self._choice = choice
        self._width = 0
        self._seen: set[Path] = set()
        self._unplaced = 0
        self._lines = read_lines(folder)
        files = [one for one in log_files(folder, self._lines) if choice.takes(one)]
        newest = max((file.era for file in files), default=None)
        last = FOLLOWED_LINES if choice.lines is None else choice.lines
        for file in files:
            self._seen.add(file.path)
            if file.era == newest:
                self._open(file, tail_offset(file.path, last))

    @property
    def is_alive(self) -> bool:
        return is_run_alive(self._lines)

    def list_files(self) -> None:
        """Opens the files of new generations, and closes those of old ones."""
        if all(file.path in self._seen for file in log_files(self._folder, self._lines)):
            return
        self._lines = read_lines(self._folder)
        files = log_files(self._folder, self._lines)
        new = [file for file in files if file.path not in self._seen]
        if not all(file.is_placed for file in new) and self._unplaced < UNPLACED_LISTS:
            self._unplaced += 1
            return
        self._unplaced = 0
        self._seen.update(file.path for file in new)
        new = [file for file in new if self._choice.takes(file)]
        if new:
            self._turn_to(new)

    def print_grown(self) -> None:
        """Prints all lines since the last poll; the file with the oldest change first."""
        pairs = sorted(self.readers.values(), key=lambda pair: _changed_s(pair[0].path))
        for file, reader in pairs:
            self._print(file, reader.grown())
        sys.stdout.flush()

    def finish(self, readers: Mapping[Path, tuple[LogFile, LogReader]]) -> None:
        for file, reader in readers.values():
            self._print(file, reader.ended())
        sys.stdout.flush()

    def _turn_to(self, new: Sequence[LogFile]) -> None:
        newest = max(file.era for file in new)
        old = {path: pair for path, pair in self.readers.items() if pair[0].era < newest}
        self.finish(old)
        for path in old:
            del self.readers[path]
        if old:
            say_generation(newest[1], self._lines)
        for file in new:
            self._open(file, 0)

    def _open(self, file: LogFile, offset: int) -> None:
        self._width = max(self._width, len(file.prefix))
        self.readers[file.path] = (file, LogReader(file.path, offset=offset))

    def _print(self, file: LogFile, texts: Iterable[str]) -> None:
        for text in texts:
            sys.stdout.write(f"{file.prefix.ljust(self._width)} | {text}\n")


def read_lines(folder: Path) -> list[JournalLine]:
    return parse(raw_lines(folder))[0]


def is_run_alive(lines: Sequence[JournalLine]) -> bool:
    """Returns whether the run's launcher is alive on this machine."""
    run_id = next((line.text("run_id") for line in lines if line.kind == "run"), "")
    return bool(run_id) and is_alive(run_id)


def say_generation(generation: int, lines: Sequence[JournalLine]) -> None:
    starts = [line for line in lines if line.kind == "StartGeneration"]
    found = [line for line in starts if line.whole("generation") == generation]
    why = f": {found[-1].text('why')}" if found and generation > 0 else ""
    say(f"generation {generation}{why}")


def say(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"--- {text}\n")
    sys.stderr.flush()


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
