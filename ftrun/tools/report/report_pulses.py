"""The pulses of a long run, thinned out.

Runs in: cli. Pure.
"""

import itertools
from typing import Any

from ftrun.cli.screen.text import number, numbers

MAX_PULSES = 50_000

Entry = tuple[float, float | None, dict[str, Any]]
"""Wall time, monotonic time, fields."""


class ProgressSampler:
    """Of each node's pulses so many that a journal of weeks fits into memory.

    They come every few seconds and count upwards, so those in between can be left out; the last
    one before a count begins anew is always kept. Of a pulse's ranks only their numbers are kept.
    """

    def __init__(self) -> None:
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._kept: dict[str, list[Entry]] = {}
        self._newest: dict[str, Entry] = {}
        self._every_s = 0.0
        self._count = 0

    def add(self, node: str, entry: Entry) -> None:
        entry[2]["ranks"] = self._ranks_of(node, entry[2].get("ranks"))
        last = self._newest.get(node)
        if last is not None and _steps_here(entry) < _steps_here(last):
            self._keep(node, last)
        self._newest[node] = entry
        kept = self._kept.get(node)
        if not kept or entry[0] - kept[-1][0] >= self._every_s:
            self._keep(node, entry)

    def _ranks_of(self, node: str, rows: object) -> tuple[int, ...]:
        listed = [row for row in rows if isinstance(row, list) and row] if (
            isinstance(rows, list)) else []  # fmt: skip
        before = self._ranks.get(node, ())
        if (
            before
            and len(listed) == len(before)
            and (listed[0][0] == before[0] and listed[-1][0] == before[-1])
        ):
            return before  # ranks of a node are a range, and hardly ever change
        self._ranks[node] = numbers([row[0] for row in listed])
        return self._ranks[node]

    def kept(self) -> dict[str, list[Entry]]:
        for node, entry in self._newest.items():
            self._keep(node, entry)
        return self._kept

    def _keep(self, node: str, entry: Entry) -> None:
        kept = self._kept.setdefault(node, [])
        if kept and kept[-1] is entry:
            return
        kept.append(entry)
        self._count += 1
        if self._count > MAX_PULSES:
            self._every_s = max(2 * self._every_s, 20.0)
            self._thin_out()

    def _thin_out(self) -> None:
        for entries in self._kept.values():
            thin = entries[:1]
            for entry, following in itertools.pairwise([*entries[1:], entries[-1]]):
                is_last = _steps_here(following) < _steps_here(entry) or following is entry
                if is_last or entry[0] - thin[-1][0] >= self._every_s:
                    thin.append(entry)
            entries[:] = thin
        self._count = sum(len(entries) for entries in self._kept.values())


def _steps_here(entry: Entry) -> float:
    return number(entry[2].get("steps_here")) or 0.0
