"""How long after they could each rank comes to the collectives it has in common with others.

Runs in:  the agent that leads. Pure.
Takes in: when each rank has entered which collective, on one clock.
Gives:    `JoinedCollective`s, in order: one collective that all its ranks have entered, with how
          much later
          than the others each has come, by its own doing.
Source:   C4's wait chain (arXiv 2406.04594): the late rank is the one that all wait for and that
          waits for nobody.

Rule 1: a rank that was let go late by another collective is not late for that: it is measured from
        when the first of those that were let go with it went on. So a victim of one group is no
        culprit in the next, and a collective that is slow itself makes nobody late. `late_s`.
        What ranks of one node have only in common is no excuse of the node: `node_late_s`.
Rule 2: a meeting is given only when all ranks have been looked at after it. Where entries were
        missed that a rank may have waited in, it is left out: better none than a wrong one.
Rule 3: whether ranks wait in a collective or go on beside it (DDP's buckets) cannot be seen from
        entries alone. That somebody has gone on is proof of the second: `overlaps`.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Key = tuple[str, int]
"""Group and sequence number."""

MAX_OPEN = 16384
"""Collectives that some rank has not been seen in; the oldest are given up."""
REMEMBERED = 1024
"""Entries of each rank."""
LOOKED_BACK = 32
"""Entries before one, among which is what it had to wait for."""
OVERLAPS_FOR_SURE = 3
NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class JoinedCollective:
    """One collective that all its ranks have entered."""

    group: str
    seq: int
    released_s: float
    """When the last one came."""
    late_s: Mapping[int, float]
    """By rank: how much later than the median of the others, by its own doing; may be negative."""
    node_late_s: Mapping[int, float]
    """The same, by the doing of its node."""


@dataclass
class _Rank:
    seen_s: float = NEVER
    seqs: dict[str, int] = field(default_factory=dict)
    """The newest of each group."""
    entries: list[tuple[float, Key]] = field(default_factory=list)
    """In order."""


@dataclass(frozen=True, slots=True)
class _Whole:
    key: Key
    times: dict[int, float]
    released_s: float


class _Excuse(Enum):
    ANY = "whatever it waited for"
    OTHER_NODES = "what it waited for with ranks of other nodes"


class ArrivalTracker:
    """Collectives of one generation, as they become whole."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._open: dict[Key, dict[int, float]] = {}
        self._whole: dict[Key, _Whole] = {}
        self._done: dict[Key, _Whole] = {}
        self._last: dict[str, deque[_Whole]] = {}
        """Of each group, the newest last."""
        self._overlaps: dict[str, int] = {}
        self._nodes: dict[int, str] = {}

    def overlaps(self, group: str) -> bool:
        """Ranks have been seen to go on before the others had come."""
        return self._overlaps.get(group, 0) >= OVERLAPS_FOR_SURE

    def add(
        self,
        rank: int,
        node: str,
        entered: Iterable[tuple[str, int, float]],
        groups: Mapping[str, tuple[int, ...]],
        *,
        seen_s: float,
    ) -> None:
        """What a rank has entered: group, number, time. Entries that are known do no harm.

        Args:
            rank: whose.
            node: where it runs.
            entered: its newest entries, in any order, with times on the clock of the lead.
            groups: the ranks of each group. Of one that is not in it nobody is judged, and nobody
                in another group who may have waited in it.
            seen_s: what the rank has entered until then is among `entered`, or was before.
        """
        self._nodes[rank] = node
        mine = self._ranks.setdefault(rank, _Rank())
        mine.seen_s = max(mine.seen_s, seen_s)
        for group, seq, at_s in sorted(entered, key=lambda entry: entry[2]):
            if seq <= mine.seqs.get(group, -1):
                continue
            mine.seqs[group] = seq
            members = groups.get(group)
            if members is not None and (len(members) < 2 or rank not in members):
                continue
            key = (group, seq)
            insort(mine.entries, (at_s, key))
            if members is None:
                continue
            times = self._open.setdefault(key, {})
            times[rank] = at_s
            if len(times) == len(members):
                del self._open[key]
                self._whole[key] = _Whole(key, times, max(times.values()))
        _forget(self._open)
        if len(mine.entries) > 2 * REMEMBERED:
            del mine.entries[:-REMEMBERED]

    def take(self) -> list[JoinedCollective]:
        """Meetings that can be judged now, the earliest first; each is given once."""
        seen_s = min((one.seen_s for one in self._ranks.values()), default=0.0)
        ripe = [one for one in self._whole.values() if one.released_s <= seen_s]
        ripe.sort(key=lambda one: one.released_s)
        found = []
        for one in ripe:
            meeting = self._meeting(one)
            if meeting is not None:
                found.append(meeting)
            self._done[one.key] = one
            del self._whole[one.key]
        _forget(self._done)
        return found

    def _meeting(self, whole: _Whole) -> JoinedCollective | None:
        group, seq = whole.key
        first_s = min(whole.times.values())
        before = self._last.setdefault(group, deque(maxlen=LOOKED_BACK))
        if before and before[-1].released_s > first_s:
            self._overlaps[group] = self._overlaps.get(group, 0) + 1
        common = _latest(one for one in before if one.released_s <= first_s)
        before.append(whole)
        try:
            late_s = self._late_s(whole, common, _Excuse.ANY)
            node_late_s = self._late_s(whole, common, _Excuse.OTHER_NODES)
        except LookupError:
            return None
        return JoinedCollective(group, seq, whole.released_s, late_s, node_late_s)

    def _late_s(self, whole: _Whole, common: _Whole | None, excuse: "_Excuse") -> dict[int, float]:
        """Raises: LookupError: not all that somebody may have waited for is known."""
        waited = {rank: self._waited(rank, whole, common, excuse) for rank in whole.times}
        let_go = {one.key: one for one in waited.values() if one is not None}
        if let_go and None in waited.values():
            raise LookupError(whole.key)
        begun_s = {key: self._went_on_s(one) for key, one in let_go.items()}
        own_s = {
            rank: at_s if (one := waited[rank]) is None else at_s - begun_s[one.key]
            for rank, at_s in whole.times.items()
        }
        return against_the_others(own_s)

    def _waited(
        self, rank: int, whole: _Whole, common: _Whole | None, excuse: "_Excuse"
    ) -> _Whole | None:
        """What this rank can have waited for last, before its entry; None: nothing is known.

        Args:
            rank: whose entry it is.
            whole: what it has entered.
            common: the last collective of the same group that all have waited for.
            excuse: what counts.

        Raises:
            LookupError: it has entered something of which not all is known.
        """
        mine, found = self._ranks[rank], common
        if len(mine.seqs) == 1:
            return found
        at_s, unknown_s = whole.times[rank], NEVER
        place = bisect_left(mine.entries, (at_s, whole.key))
        for before_s, key in mine.entries[max(0, place - LOOKED_BACK) : place]:
            if key[0] == whole.key[0] or key in self._whole:
                continue  # of the same group, or it came to its end later
            done = self._done.get(key)
            if done is None:
                unknown_s = before_s
            elif excuse is _Excuse.ANY or not self._is_of_one_node(done):
                is_later = found is None or done.released_s > found.released_s
                found = done if done.released_s <= at_s and is_later else found
        if unknown_s > (NEVER if found is None else found.times[rank]):
            raise LookupError(whole.key)
        return found

    def _went_on_s(self, done: _Whole) -> float:
        """When the ranks of a collective could go on, as far as can be seen."""
        found = []
        for rank, at_s in done.times.items():
            entries = self._ranks[rank].entries
            place = bisect_right(entries, (at_s, done.key))
            found += [after_s for after_s, _ in entries[place : place + 1]]
        return min((one for one in found if one >= done.released_s), default=done.released_s)

    def _is_of_one_node(self, done: _Whole) -> bool:
        return len({self._nodes[rank] for rank in done.times}) == 1


def _latest(wholes: Iterable[_Whole]) -> _Whole | None:
    return max(wholes, key=lambda one: one.released_s, default=None)


def against_the_others(values: Mapping[int, float]) -> dict[int, float]:
    """Each value less the median of the others."""
    ordered = sorted(values.values())
    found = {}
    for rank, value in values.items():
        place = bisect_left(ordered, value)
        found[rank] = value - _median_without(ordered, place)
    return found


def _median_without(ordered: Sequence[float], place: int) -> float:
    """The median of a sorted list without one of its places."""
    count = len(ordered) - 1

    def at(index: int) -> float:
        return ordered[index if index < place else index + 1]

    return (at((count - 1) // 2) + at(count // 2)) / 2


def _forget(kept: dict[Key, Any]) -> None:
    while len(kept) > MAX_OPEN:
        del kept[next(iter(kept))]
