"""Writes every event and command of a run as one JSON line each.

The file `ftrun-logs/RUN_ID/journal.jsonl` is appended to and never rewritten. It survives
everything but the loss of the disk: the kernel has an event's line before the agent acts on the
event. A full disk must not end a run: a line that cannot be written is counted and dropped.
"""

import json
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from ftrun import clock
from ftrun.events import Record

FILE_NAME = "journal.jsonl"
NETWORK_NAME = "network.json"  # in this folder: the paths between nodes, on a node that has led
Watcher = Callable[[Record], None]  # of a line; runs in the writing thread, and must not block


class Journal:
    """Appends to the journal of one run."""

    def __init__(self, folder: Path, *, node: str = "") -> None:
        self._node = {"node": node} if node else {}
        self._copies: deque[str] | None = None
        self._watchers: list[Watcher] = []
        self.dropped = 0
        self._is_torn = False  # the last line has no end
        try:
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(folder / FILE_NAME, flags, 0o644)
        except OSError:
            self._fd = -1

    def write(self, record: Record) -> None:
        """Appends one line: wall time, monotonic time, node, kind and the fields."""
        times = {"time": round(clock.wall_s(), 6), "monotonic_s": round(clock.now_s(), 6)}
        try:
            text = msgspec.json.encode(record, enc_hook=str).decode()
        except UnicodeEncodeError:  # a file name that is not UTF-8 has no form in JSON
            plain = json.dumps(msgspec.to_builtins(record, enc_hook=str), ensure_ascii=False)
            text = plain.encode("utf-8", "replace").decode()
        line = f"{msgspec.json.encode({**times, **self._node}).decode()[:-1]},{text[1:]}"
        if self._copies is not None:
            self._copies.append(line)
        self.append(line)
        for watcher in self._watchers:
            watcher(record)

    def append(self, line: str) -> None:
        """Appends a line that is encoded already."""
        data = (b"\n" if self._is_torn else b"") + line.encode() + b"\n"
        try:
            written = os.write(self._fd, data)
        except OSError:
            self.dropped += 1
            return
        self._is_torn = written < len(data)  # the last write before a disk is full
        self.dropped += self._is_torn

    def watch(self, watcher: Watcher) -> None:
        """Calls the watcher with every further line of `write`, after the line is written."""
        self._watchers.append(watcher)

    def keep_copies(self) -> None:
        """Keeps the newest 1,000 lines for `take_copies`."""
        self._copies = deque(maxlen=1000)

    def take_copies(self) -> list[str]:
        copies = self._copies
        return [copies.popleft() for _ in range(len(copies))] if copies is not None else []
