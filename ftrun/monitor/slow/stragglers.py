"""Which rank the others wait for, step after step: slow computation.

Runs in:  the agent that leads. Pure.
Takes in: `RankObservation`s: what each rank has entered, and how far it is.
Gives:    a lateness for each rank, and a `Verdict` where one, or all of a node, is late for long.
Source:   C4's non-communication slow (arXiv 2406.04594); Mycroft's "the rank always finishing
          last".

A rank's lateness is taken once in two steps, at the collective where the ranks of the group stand
farthest apart; where steps are short, windows of several are averaged. It is judged over seven
windows, against what it was in the first windows of the generation and against the noise of then:
uneven work by design stays so. Who was late from the beginning is named only where it costs a
quarter of the step (`ftrun.monitor.slow.lateness`).

Rule 1: one rank that is late makes all others wait; so of those who wait nobody is named.
Rule 2: many small waits that add up (a collective in each layer) are judged as well, against
        the rank's own past, and named as possible only: buckets that are sent beside the work look
        the same.
Rule 3: all ranks of a node are named together only where none of them is named alone.
Rule 4: where somebody was late from the beginning and is so no more, all begin anew: beside that
        rank the others were early, and would now be late against their own past.
Rule 5: what was seen beside a slow link is judged by nobody: once the link is well again, windows
        are counted anew, against the same past.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from ftrun.monitor.slow.arrivals import ArrivalTracker, JoinedCollective
from ftrun.monitor.slow.lateness import SHARE_OF_STEP, WINDOWS, Lateness, LatenessSeries
from ftrun.monitor.verdicts import Confidence, Verdict, VerdictKind, ranks_in_words

FLOOR_S = 0.003
"""Less lateness is of the scheduler's making."""
STEPS_OF_PART = 2
"""A lateness is taken once in so many."""
NEARLY = 0.85
"""Of a time is enough of it: the next collective may be a whole step later."""
SHORTEST_WINDOW_S = 0.2
"""A processor's quota is given out every 0.1 s; in shorter windows it would come and go."""
LOOKS = 6
"""Over so many the time of a step is taken."""


@dataclass(frozen=True, slots=True)
class RankObservation:
    """One rank, as it was read at one moment."""

    rank: int
    node: str
    at_s: float
    """When the look began, on the lead's clock: what was entered until then is among `entered`, or
    was in a look before."""
    step: int
    """Steps made in this generation."""
    entered: Sequence[tuple[str, int, float]]
    """Group, sequence number and time of its newest collectives, on the lead's clock; those of
    the look before may be among them. Messages between two ranks (send, recv) are left out."""
    clock_error_s: float = 0.0
    """Of the clock of its node against the lead's, at most; 0 on the lead's node."""


@dataclass
class _Record:
    node: str = ""
    clock_error_s: float = 0.0
    looks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=LOOKS))
    alone: LatenessSeries = field(default_factory=LatenessSeries)
    added: LatenessSeries = field(default_factory=lambda: LatenessSeries(may_stand=False))
    """All waits of a step added up, and with them all errors of the clocks."""
    of_node: LatenessSeries = field(default_factory=LatenessSeries)
    """With what its node made it wait for."""


@dataclass
class _Part:
    """Some steps."""

    begun_s: float
    alone_s: dict[int, float] = field(default_factory=dict)
    added_s: dict[int, float] = field(default_factory=dict)
    of_node_s: dict[int, float] = field(default_factory=dict)


class StragglerDetector:
    """The ranks of one generation. A new generation begins with a new one of these."""

    def __init__(self) -> None:
        self.step_s = 0.0
        """What a step takes now, as the ranks count; 0: not known yet."""
        self._arrivals = ArrivalTracker()
        self._ranks: dict[int, _Record] = {}
        self._waiting: list[JoinedCollective] = []
        """Those of two steps, not all of them yet."""
        self._parts: list[_Part] = []
        """Of the window that is not full yet."""
        self._has_caught_up = False
        """Who was late from the beginning is so no more."""
        self._is_beside_slow_link = False

    def look(
        self,
        looks: Iterable[RankObservation],
        groups: Mapping[str, tuple[int, ...]],
        *,
        is_link_slow: bool = False,
    ) -> Verdict | None:
        """Take in one look at the ranks of all nodes, and judge. Looks may lack some ranks.

        Args:
            looks: in any order; only of ranks that train (not in an evaluation).
            groups: the ranks of each process group.
            is_link_slow: nobody new is named: ranks beside a slow link leave each collective later
                than others.
        """
        for one in looks:
            record = self._ranks.setdefault(one.rank, _Record())
            record.node, record.clock_error_s = one.node, one.clock_error_s
            record.looks.append((one.at_s, one.step))
            self._arrivals.add(one.rank, one.node, one.entered, groups, seen_s=one.at_s)
        self.step_s = self._step_s()
        for meeting in self._arrivals.take():
            if self.step_s > 0:
                self._meet(meeting)
        if self._is_beside_slow_link and not is_link_slow:  # rule 5
            self._waiting, self._parts = [], []
            for series in self._all_series():
                series.forget_newest()
        self._is_beside_slow_link = is_link_slow
        return self._verdict(may_name=not is_link_slow)

    def lateness(self) -> dict[int, Lateness]:
        """Of each rank that has been seen in enough collectives."""
        known = ((rank, one.alone) for rank, one in sorted(self._ranks.items()))
        return {rank: series.lateness() for rank, series in known if series.is_known}

    # --- measuring ----------------------------------------------------------------------------

    def _step_s(self) -> float:
        found = []
        for record in self._ranks.values():
            (first_s, first), (last_s, last) = record.looks[0], record.looks[-1]
            if last - first >= STEPS_OF_PART:
                found.append((last_s - first_s) / (last - first))
        return median(found) if found else self.step_s

    def _meet(self, meeting: JoinedCollective) -> None:
        begun, part_s = self._waiting, NEARLY * STEPS_OF_PART * self.step_s
        if begun and meeting.released_s - begun[0].released_s >= part_s:
            self._parts.append(self._part())
            self._waiting = []
            if meeting.released_s - self._parts[0].begun_s >= NEARLY * SHORTEST_WINDOW_S:
                self._close_window()
        self._waiting.append(meeting)

    def _part(self) -> _Part:
        part = _Part(self._waiting[0].released_s)
        part.alone_s = _widest(self._waiting, lambda meeting: meeting.late_s)
        part.of_node_s = _widest(self._waiting, lambda meeting: meeting.node_late_s)
        for meeting in self._waiting:
            if not self._arrivals.overlaps(meeting.group):
                for rank, late_s in meeting.late_s.items():
                    part.added_s[rank] = part.added_s.get(rank, 0.0) + late_s / STEPS_OF_PART
        return part

    def _close_window(self) -> None:
        parts, self._parts = self._parts, []
        for rank, record in self._ranks.items():
            seen = [part for part in parts if rank in part.alone_s]
            if seen:
                record.alone.add(fmean(part.alone_s[rank] for part in seen))
                record.of_node.add(fmean(part.of_node_s[rank] for part in seen))
                record.added.add(fmean(part.added_s.get(rank, 0.0) for part in seen))

    # --- judging ------------------------------------------------------------------------------

    def _verdict(self, *, may_name: bool) -> Verdict | None:
        """Who is slow now, if anybody."""
        alone = self._judge(lambda record: record.alone, may_name=may_name)
        added = self._judge(lambda record: record.added, may_name=may_name)
        added = {rank: sure for rank, sure in added.items() if self._stands_out(rank)}
        of_node = self._judge(lambda record: record.of_node, may_name=may_name)
        if self._has_caught_up:  # rule 4
            self._has_caught_up = False
            for series in self._all_series():
                series.begin_anew()
            return None
        together = self._whole_nodes(of_node, set(alone) | set(added))
        for found, how in ((alone, "alone"), (added, "added"), (together, "of_node")):
            # Where most are late there is nobody that they are late against.
            if found and len(found) < len(self._ranks):
                return self._say(found, how)
        return None

    def _all_series(self) -> Iterator[LatenessSeries]:
        for record in self._ranks.values():
            yield from (record.alone, record.added, record.of_node)

    def _judge(
        self, series_of: Callable[[_Record], LatenessSeries], *, may_name: bool
    ) -> dict[int, Confidence]:
        noises_s = [series_of(one).noise_s for one in self._ranks.values()]
        usual_s = median(noises_s) if noises_s else 0.0
        found = {}
        for rank, record in sorted(self._ranks.items()):
            series = series_of(record)
            before = series.named
            sure = series.judge(self.step_s, self._floor_s(rank), usual_s, may_name=may_name)
            if sure is not None:
                found[rank] = sure
            self._has_caught_up |= before is Confidence.POSSIBLE and sure is None
        return found

    def _stands_out(self, rank: int) -> bool:
        """Its waits add up to more than those that the others make.

        Where all do the same each waits for each by chance, and what adds up is never nothing.
        """
        mine_s = self._ranks[rank].added.lateness().now_s
        others_s = [
            one.added.lateness().now_s
            for at, one in self._ranks.items()
            if at != rank and one.added.is_known
        ]
        limit_s = max(SHARE_OF_STEP * self.step_s, self._floor_s(rank))
        return not others_s or mine_s - median(others_s) > limit_s / 2

    def _floor_s(self, rank: int) -> float:
        errors = [one.clock_error_s for at, one in self._ranks.items() if at != rank]
        return FLOOR_S + self._ranks[rank].clock_error_s + max(errors, default=0.0)

    def _whole_nodes(
        self, found: Mapping[int, Confidence], named: set[int]
    ) -> dict[int, Confidence]:
        """The ranks of nodes that are late with all they have, and of which nobody is named."""
        nodes: dict[str, list[int]] = {}
        for rank, record in sorted(self._ranks.items()):
            nodes.setdefault(record.node, []).append(rank)
        late = (ranks for ranks in nodes.values() if set(ranks) <= set(found) - named)
        return {rank: found[rank] for ranks in late for rank in ranks}

    # --- saying -------------------------------------------------------------------------------

    def _say(self, found: Mapping[int, Confidence], how: str) -> Verdict:
        culprits = tuple(found)
        late = {rank: self._series(rank, how).lateness() for rank in culprits}
        nodes = self._nodes_of(culprits)
        who = ranks_in_words(culprits)
        where = f" (all of node {' and of node '.join(nodes)})" if nodes else ""
        is_or_are = "is" if len(culprits) == 1 else "are"
        worst_s = max(one.now_s for one in late.values())
        is_clear = Confidence.LIKELY in found.values() and how != "added"
        against = ["many small waits are added up; where ranks go on beside them, it is less"]
        if how != "added":
            against = ["it has been so since the first steps: the work may be uneven by design"]
        return Verdict(
            kind=VerdictKind.SLOW_COMPUTATION,
            culprits=culprits,
            nodes=nodes,
            victims=tuple(rank for rank in sorted(self._ranks) if rank not in found),
            text=(
                f"{who}{where} {is_or_are} late by {_short(worst_s)} again and again, and the "
                f"others wait; a step takes {_short(self.step_s)}"
            ),
            evidence=tuple(self._evidence(rank, one) for rank, one in late.items()),
            against=() if is_clear else tuple(against),
            sure=Confidence.LIKELY if is_clear else Confidence.POSSIBLE,
            fingerprint=f"slow computation {','.join(map(str, culprits))}",
        )

    def _series(self, rank: int, how: str) -> LatenessSeries:
        record = self._ranks[rank]
        return {"alone": record.alone, "added": record.added, "of_node": record.of_node}[how]

    def _nodes_of(self, culprits: tuple[int, ...]) -> tuple[str, ...]:
        """Nodes whose ranks these are, all of them and no others; one rank stands for itself."""
        nodes = tuple(dict.fromkeys(self._ranks[rank].node for rank in culprits))
        theirs = {rank for rank, one in self._ranks.items() if one.node in nodes}
        return nodes if len(culprits) > 1 and theirs == set(culprits) else ()

    def _evidence(self, rank: int, late: Lateness) -> str:
        before = "" if late.before_s is None else f"; in its first steps {_short(late.before_s)}"
        return (
            f"rank {rank} comes {_short(late.now_s)} after the others (median of {WINDOWS} "
            f"windows of some steps{before}; by chance {_short(late.noise_s)})"
        )


def _widest(
    meetings: Sequence[JoinedCollective], late_of: Callable[[JoinedCollective], Mapping[int, float]]
) -> dict[int, float]:
    """Of each rank, how late it was where its group stood farthest apart."""
    found: dict[int, tuple[float, float]] = {}
    for meeting in meetings:
        late_s = late_of(meeting)
        spread_s = max(late_s.values()) - min(late_s.values())
        for rank, value_s in late_s.items():
            if rank not in found or spread_s > found[rank][0]:
                found[rank] = (spread_s, value_s)
    return {rank: value_s for rank, (_, value_s) in found.items()}


def _short(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
