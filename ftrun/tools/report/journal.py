"""The journal as values: parsed, cleaned and in the order of time; what is torn is left out.

Runs in:  cli. Pure.
Takes in: the lines of one journal, or of several that overlap, as bytes.
Gives:    `JournalLine`s whose fields can be asked for without knowing whether they are there.

Whatever has been written to a journal may stand in it: names of scripts and nodes, exceptions,
words of a rank. Rule 1: no text leaves a `JournalLine` before it has been through `clean`.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ftrun.cli.screen.text import MAX_TEXT, clean, number, whole
from ftrun.tools.report.report_pulses import Entry, ProgressSampler

MAX_LINE_BYTES = 2_000_000
_MAX_WALL_S = 32_503_680_000.0  # the year 3000
_FAR_S = 7 * 86_400.0
"""Two times of one line do not lie further apart; nor is a wall clock set by more."""


@dataclass(frozen=True, slots=True)
class JournalLine:
    """One line of a journal."""

    t_s: float
    """When: as wall time, but with the steps of that node's monotonic clock."""
    node: str
    kind: str
    mono_s: float
    fields: Mapping[str, Any]

    def number(self, name: str) -> float | None:
        return number(self.fields.get(name))

    def whole(self, name: str) -> int | None:
        return whole(self.fields.get(name))

    def text(self, name: str, limit: int = MAX_TEXT) -> str:
        value = self.fields.get(name)
        return clean(value, limit) if isinstance(value, str) else ""

    def part(self, name: str) -> Mapping[str, Any]:
        value = self.fields.get(name)
        return value if isinstance(value, dict) else {}

    def parts(self, name: str) -> list[Mapping[str, Any]]:
        value = self.fields.get(name)
        return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []

    def at_mono(self, name: str) -> float | None:
        """A field that is a time of the same monotonic clock, as `t_s` counts."""
        value = self.number(name)
        is_near = value is not None and abs(value - self.mono_s) < _FAR_S
        return self.t_s + value - self.mono_s if value is not None and is_near else None


def parse(raw: Iterable[bytes]) -> tuple[list[JournalLine], int]:
    """The lines in the order of time, each once, and how many could not be read."""
    seen: set[int] = set()
    by_node: dict[str, list[Entry]] = {}
    pulses = ProgressSampler()
    unreadable = 0
    for line in raw:
        if not line.strip() or (key := hash(line.rstrip())) in seen:
            continue
        seen.add(key)
        fields = _fields(line)
        at_s, mono_s = (number((fields or {}).get(name)) for name in ("at", "mono_s"))
        if fields is None or at_s is None or not 0 <= at_s < _MAX_WALL_S:
            unreadable += 1
            continue
        node = fields.get("node")
        name = clean(node, 100) if isinstance(node, str) else ""
        entry = (at_s, mono_s, fields)
        if fields["kind"] == "Pulse":
            pulses.add(name, entry)
        else:
            by_node.setdefault(name, []).append(entry)
    for name, kept in pulses.kept().items():
        by_node.setdefault(name, []).extend(kept)
    found = [line for node, entries in by_node.items() for line in _steady(node, entries)]
    return sorted(found, key=lambda one: one.t_s), unreadable


def _fields(line: bytes) -> dict[str, Any] | None:
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        found = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        return None
    return found


def _steady(node: str, entries: list[Entry]) -> Iterable[JournalLine]:
    """Lines of one node whose time does not jump when its wall clock is set.

    A monotonic time before the last one is another machine's, or that of one started anew.
    """
    entries.sort(key=lambda entry: entry[0])
    last_at_s, last_s = -math.inf, math.inf
    offset_s = 0.0
    for at_s, mono_s, fields in entries:
        if mono_s is None:
            yield JournalLine(at_s, node, fields["kind"], at_s, fields)
            continue
        jump_s = abs((at_s - last_at_s) - (mono_s - last_s))
        if mono_s < last_s - 1.0 or jump_s > _FAR_S:
            offset_s = at_s - mono_s
        last_at_s, last_s = at_s, mono_s
        yield JournalLine(mono_s + offset_s, node, fields["kind"], mono_s, fields)


def first_step_at(line: JournalLine) -> float | None:
    """When the last rank of a node had completed its first step, by its `Recovered` line."""
    begun, phases = line.at_mono("noticed_s"), line.part("phases_s")
    parts = [number(took) for name, took in phases.items() if name != "total"]
    if begun is None or not parts:
        return None
    return begun + sum(part for part in parts if part is not None)


_ENDS = ("end", "EndRun")


def newest_run(lines: list[JournalLine]) -> tuple[list[list[JournalLine]], int]:
    """The launches that make up the newest run, and how many before them are left out.

    A run id may be used again. A launch that went on from a state belongs to the run before it;
    one that began from nothing is a run of its own.
    """
    launches: list[list[JournalLine]] = [[]]
    has_ended = False
    for line in lines:
        begins = line.kind == "run" or (line.kind == "Ballot" and line.whole("generation") == 0)
        if has_ended and begins:
            launches.append([])
            has_ended = False
        has_ended = has_ended or line.kind in _ENDS
        launches[-1].append(line)
    first = len(launches) - 1
    while first > 0 and _went_on(launches[first]):
        first -= 1
    return launches[first:], first


def _went_on(launch: list[JournalLine]) -> bool:
    starts = (line for line in launch if line.kind == "StartGeneration")
    first = next(starts, None)
    return first is not None and bool(first.text("restored"))
