"""Measures how late each rank enters the collectives that it shares with other ranks.

Source:   C4's wait chain (arXiv 2406.04594): the late rank is the one that all others wait for and
          that waits for no rank.

Rule 1: A rank that another collective released late is not late for that reason. Its delay is
        measured from the moment when the first of the ranks released with it continued. A victim in
        one group is therefore no culprit in the next, and a slow collective makes no rank late:
        `late_s`. A collective whose ranks are all on one node does not excuse that node:
        `node_late_s`.
Rule 2: A collective is returned only after all ranks have been sampled after it. It is omitted if
        entries are missing in which a rank may have waited, because a missing value is better than
        a wrong one.
Rule 3: The time that a rank has waited for messages (send, recv) is not its own delay.
Rule 4: Entries alone do not show whether ranks wait in a collective or continue while it runs
        (DDP's buckets). If a rank has continued before the others arrived, that proves the second:
        `overlaps`.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Key = tuple[str, int]
"""Group and sequence number."""

MAX_OPEN = 16384
"""Maximum number of collectives that not all ranks have entered; the oldest are dropped."""
REMEMBERED = 1024
"""Retained entries of each rank."""
LOOKBACK = 32
"""Number of earlier entries among which is the collective that a rank had to wait for."""
OVERLAPS_FOR_SURE = 3
NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class JoinedCollective:
    """One collective that all its ranks have entered."""

    group: str
    seq: int
    released_s: float
    """When the last rank entered."""
    late_s: Mapping[int, float]
    """By rank: seconds later than the median of the others, by its own delay; may be negative."""
    node_late_s: Mapping[int, float]
    """The same, by the delay of its node."""


@dataclass
class _Rank:
    seen_s: float = NEVER
    seqs: dict[str, int] = field(default_factory=dict)
    """Newest sequence number of each group."""
    entries: list[tuple[float, Key]] = field(default_factory=list)
    """Sorted by time."""
    waited_s: dict[Key, float] = field(default_factory=dict)
    """Total time in waits for messages at each entry, if it is not 0."""


@dataclass(frozen=True, slots=True)
class _Whole:
    key: Key
    times: dict[int, float]
    released_s: float


class ArrivalTracker:
    """Collectives of one generation, as they become complete."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._open: dict[Key, dict[int, float]] = {}
        self._whole: dict[Key, _Whole] = {}
        self._done: dict[Key, _Whole] = {}
        self._last: dict[str, deque[_Whole]] = {}
        """The newest collectives of each group, the newest last."""
        self._overlaps: dict[str, int] = {}
        self._nodes: dict[int, str] = {}

    def overlaps(self, group: str) -> bool:
        return self._overlaps.get(group, 0) >= OVERLAPS_FOR_SURE

    def add(
        self,
        rank: int,
        node: str,
        entered: Iterable[tuple[str, int, float]],
        groups: Mapping[str, tuple[int, ...]],
        *,
        seen_s: float,
        waited_s: Sequence[float] = (),
    ) -> None:
        """Add the collectives that a rank has entered. Repeated entries do no harm.

        Args:
            entered: its newest entries (group, number, time), in any order, with times on the
                leader's clock.
            groups: ranks of each group. Collectives of a group that is missing here are not judged,
                nor are collectives of other groups whose ranks may have waited in it.
            seen_s: all entries of the rank up to this time are in `entered`, or were in an earlier
                call.
            waited_s: for each of `entered`, the total time in waits for messages until then.
        """
        self._nodes[rank] = node
        mine = self._ranks.setdefault(rank, _Rank())
        mine.seen_s = max(mine.seen_s, seen_s)
        entered = tuple(entered)
        mine.waited_s |= {
            (group, seq): total_s
            for (group, seq, _), total_s in zip(entered, waited_s, strict=bool(waited_s))
        }
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
            kept = {key for _, key in mine.entries}
            mine.waited_s = {key: one for key, one in mine.waited_s.items() if key in kept}

    def take(self) -> list[JoinedCollective]:
        """Return collectives that can be judged now, the earliest first; each is returned once."""
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
        before = self._last.setdefault(group, deque(maxlen=LOOKBACK))
        if before and before[-1].released_s > first_s:
            self._overlaps[group] = self._overlaps.get(group, 0) + 1
        earlier = (one for one in before if one.released_s <= first_s)
        common = max(earlier, key=lambda one: one.released_s, default=None)
        before.append(whole)
        try:
            late_s = self._late_s(whole, common, of_node=False)
            node_late_s = self._late_s(whole, common, of_node=True)
        except LookupError:
            return None
        return JoinedCollective(group, seq, whole.released_s, late_s, node_late_s)

    def _late_s(self, whole: _Whole, common: _Whole | None, *, of_node: bool) -> dict[int, float]:
        """Raises: LookupError: a collective in which a rank may have waited is unknown."""
        waited = {rank: self._waited(rank, whole, common, of_node=of_node) for rank in whole.times}
        let_go = {one.key: one for one in waited.values() if one is not None}
        if let_go and None in waited.values():
            raise LookupError(whole.key)
        started_s = {key: self._went_on_s(one) for key, one in let_go.items()}
        own_s = {
            rank: at_s
            if (one := waited[rank]) is None
            else at_s - started_s[one.key] - self._in_messages_s(rank, one.key, whole.key)
            for rank, at_s in whole.times.items()
        }
        return against_the_others(own_s)

    def _in_messages_s(self, rank: int, since: Key, until: Key) -> float:
        totals_s = self._ranks[rank].waited_s
        return totals_s[until] - totals_s[since] if {since, until} <= totals_s.keys() else 0.0

    def _waited(
        self, rank: int, whole: _Whole, common: _Whole | None, *, of_node: bool
    ) -> _Whole | None:
        """Last collective that this rank may have waited for; None: not known.

        Args:
            common: the last collective of the same group that all ranks have waited for.
            of_node: only collectives with ranks of other nodes count.

        Raises:
            LookupError: the rank has entered a collective that is not known completely.
        """
        mine, found = self._ranks[rank], common
        if len(mine.seqs) == 1:
            return found
        at_s, unknown_s = whole.times[rank], NEVER
        place = bisect_left(mine.entries, (at_s, whole.key))
        for before_s, key in mine.entries[max(0, place - LOOKBACK) : place]:
            if key[0] == whole.key[0] or key in self._whole:
                continue  # of the same group, or it ended later
            done = self._done.get(key)
            if done is None:
                unknown_s = before_s
            elif not of_node or len({self._nodes[one] for one in done.times}) > 1:
                is_later = found is None or done.released_s > found.released_s
                found = done if done.released_s <= at_s and is_later else found
        if unknown_s > (NEVER if found is None else found.times[rank]):
            raise LookupError(whole.key)
        return found

    def _went_on_s(self, done: _Whole) -> float:
        found = []
        for rank, at_s in done.times.items():
            entries = self._ranks[rank].entries
            place = bisect_right(entries, (at_s, done.key))
            found += [after_s for after_s, _ in entries[place : place + 1]]
        return min((one for one in found if one >= done.released_s), default=done.released_s)


def against_the_others(values: Mapping[int, float]) -> dict[int, float]:
    ordered = sorted(values.values())
    return {
        rank: value - _median_without(ordered, bisect_left(ordered, value))
        for rank, value in values.items()
    }


def _median_without(ordered: Sequence[float], place: int) -> float:
    low, high = (len(ordered) - 2) // 2, (len(ordered) - 1) // 2
    return (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2


def _forget(kept: dict[Key, Any]) -> None:
    while len(kept) > MAX_OPEN:
        del kept[next(iter(kept))]
