"""Writes every event and command of a run as one JSON line each.

Runs in:  agent.
Takes in: a kind and plain fields.
Gives:    `ftrun-logs/RUN_ID/journal.jsonl`, which is appended to and never rewritten.
Survives: everything but the loss of the disk: the kernel has an event's line before the agent acts
          on the event.

A full disk must not end a run: a line that cannot be written is counted and dropped.
"""

import json
import math
import os
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from ftrun import clock

FILE_NAME = "journal.jsonl"
NETWORK_NAME = "network.json"
"""File in the same folder: state of the paths between nodes, on a node that has led the run."""

Watcher = Callable[[str, Mapping[str, object]], None]
"""Gets the kind and the fields of a line. It runs in the writing thread, so it must not block."""


class Journal:
    """Appends to the journal of one run."""

    def __init__(self, folder: Path, *, who: str, node: str = "") -> None:
        self._who = who
        self._node = node
        self._copies: deque[str] | None = None
        self._watchers: list[Watcher] = []
        self.dropped = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(folder / FILE_NAME, flags, 0o644)
        except OSError:
            self._fd = -1

    def write(self, kind: str, **fields: object) -> None:
        """Appends one line: wall time, monotonic time, process, kind and the fields."""
        line = {
            "at": round(clock.wall_s(), 6),
            "mono_s": round(clock.now_s(), 6),
            "who": self._who,
            **({"node": self._node} if self._node else {}),
            "kind": kind,
            **fields,
        }
        try:
            text = json.dumps(line, default=str, allow_nan=False)
        except ValueError:  # NaN and infinity have no form in JSON
            text = json.dumps(_as_words(line), default=str)
        if self._copies is not None:
            self._copies.append(text)
        self.append(text)
        for watcher in self._watchers:
            watcher(kind, fields)

    def append(self, line: str) -> None:
        """Appends a line that is encoded already."""
        try:
            os.write(self._fd, line.encode() + b"\n")
        except OSError:
            self.dropped += 1

    def watch(self, watcher: Watcher) -> None:
        """Calls the watcher with every further line of `write`, after the line is written."""
        self._watchers.append(watcher)

    def keep_copies(self) -> None:
        """Keeps the newest 1,000 lines for `take_copies`."""
        self._copies = deque(maxlen=1000)

    def take_copies(self) -> list[str]:
        """Returns the copied lines since the last call."""
        copies = self._copies
        return [copies.popleft() for _ in range(len(copies))] if copies is not None else []


def _as_words(value: object) -> object:
    """Replaces NaN and infinity by text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _as_words(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_words(one) for one in value]
    return value


def read_journal(folder: Path) -> list[dict[str, object]]:
    """Returns every complete line in order, and skips lines that a full disk has truncated."""
    found: list[dict[str, object]] = []
    with (folder / FILE_NAME).open(encoding="utf-8") as lines:
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found
