"""The record of a run: every event and command, one JSON line each.

Runs in:  agent.
Takes in: a kind and plain fields.
Gives:    `ftrun-logs/RUN_ID/journal.jsonl`, appended to, never rewritten.
Survives: everything but the disk; an event's line is in the kernel's hands before it is acted on.

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
"""Beside it: what is known of the roads between nodes, where this node has led."""

Watcher = Callable[[str, Mapping[str, object]], None]
"""Gets the kind and the fields of a line; in the thread that writes it, so it must not wait."""


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
        """One line: wall time, monotonic time, who, what, and the fields."""
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
        except ValueError:  # what is no number has no form in JSON: it is written as a word
            text = json.dumps(_as_words(line), default=str)
        if self._copies is not None:
            self._copies.append(text)
        self.append(text)
        for watcher in self._watchers:
            watcher(kind, fields)

    def append(self, line: str) -> None:
        """A line that is whole already."""
        try:
            os.write(self._fd, line.encode() + b"\n")
        except OSError:
            self.dropped += 1

    def watch(self, watcher: Watcher) -> None:
        """Have every line of this journal seen too, once it is written."""
        self._watchers.append(watcher)

    def keep_copies(self) -> None:
        """Keep each line for `take_copies` too, the newest thousand of them."""
        self._copies = deque(maxlen=1000)

    def take_copies(self) -> list[str]:
        """Lines since the last call."""
        copies = self._copies
        return [copies.popleft() for _ in range(len(copies))] if copies is not None else []


def _as_words(value: object) -> object:
    """The same, with NaN and infinity as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _as_words(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_words(one) for one in value]
    return value


def read_journal(folder: Path) -> list[dict[str, object]]:
    """Every whole line, in order; a line torn by a full disk is left out."""
    found: list[dict[str, object]] = []
    with (folder / FILE_NAME).open(encoding="utf-8") as lines:
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found
