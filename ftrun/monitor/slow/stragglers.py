"""Finds the rank that the others wait for in nearly every step: slow computation.

Source:   C4's non-communication slow (arXiv 2406.04594); Mycroft's "the rank always finishing
          last".

The lateness of a rank is taken once in two steps, at the collective with the largest spread of
entry times in the group. If steps are short, values of several are averaged to a window. Seven
windows are judged against the first windows of the generation and their noise. Work that is uneven
by design is therefore not reported. A rank that was late from the start is named only if that costs
a quarter of the step (`ftrun.monitor.slow.lateness`).

Rule 1: One late rank makes all others wait, so a waiting rank is never named.
Rule 2: Many small waits that add up (a collective in each layer) are judged too, against the rank's
        own past. They are named as possible only, because buckets that are sent during the
        computation look the same.
Rule 3: All ranks of a node are named together only if none of them is named alone.
Rule 4: If a rank was late from the start and no longer is, all series restart. Compared with that
        rank the others were early, and they would now be late against their own past.
Rule 5: Windows next to a slow link are not judged. After the link has recovered, new windows are
        collected and judged against the same past.
Rule 6: In a run with messages, the work of each rank in a step is judged too, without its waits,
        against its own past. A rank that is late in collectives is judged by these alone: others
        may wait for it inside of C++ code, which looks like their work.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from ftrun.monitor.slow.arrivals import ArrivalTracker, JoinedCollective
from ftrun.monitor.slow.lateness import SHARE_OF_STEP, WINDOWS, Lateness, LatenessSeries
from ftrun.monitor.slow.own_work import OwnWork
from ftrun.monitor.verdicts import Confidence, Verdict, VerdictKind, ranks_text

FLOOR_S = 0.003
"""Smaller lateness is caused by the scheduler."""
STEPS_OF_PART = 2
"""Number of steps per lateness value."""
NEARLY = 0.85
"""This share of a duration suffices, because the next collective may be a whole step later."""
SHORTEST_WINDOW_S = 0.2
"""The kernel refills a CPU quota every 0.1 s. Shorter windows would show or miss it at random."""
MAX_SAMPLES = 6
"""Number of samples over which the step time is computed."""


ALONE = "alone"
ADDED = "added"
"""Sum of all waits of a step, which also adds up all clock errors."""
OF_NODE = "of node"
"""Includes waits that its own node caused."""
OWN = "own"
"""The rank's work in a step, without waits, compared with the others; in runs with messages."""


@dataclass(frozen=True, slots=True)
class RankObservation:
    """One rank, as sampled at one moment."""

    rank: int
    node: str
    at_s: float
    """When the sample began, on the leader's clock. All collectives entered until then are in
    `entered`, or in an earlier sample."""
    step: int
    """Steps completed in this generation."""
    entered: Sequence[tuple[str, int, float]]
    """Group, sequence number and time of its newest collectives, on the leader's clock. Entries of
    the previous sample may be included. Messages between two ranks (send, recv) are omitted."""
    clock_error_s: float = 0.0
    """Maximum error of its node's clock relative to the leader's; 0 on the leader's node."""
    waited_s: Sequence[float] = ()
    """As in `RankSample`, and `boundary` too; its time is on the clock of the rank's node."""
    boundary: tuple[float, float] | None = None


@dataclass
class _Record:
    node: str = ""
    clock_error_s: float = 0.0
    samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    series: dict[str, LatenessSeries] = field(
        default_factory=lambda: {
            ALONE: LatenessSeries(),
            ADDED: LatenessSeries(may_stand=False),
            OF_NODE: LatenessSeries(),
            OWN: LatenessSeries(may_stand=False),
        }
    )


@dataclass
class _Part:
    """Lateness values of `STEPS_OF_PART` steps."""

    started_s: float
    late_s: dict[str, dict[int, float]]
    """By kind of lateness and rank."""


class StragglerDetector:
    """The ranks of one generation. A new generation needs a new detector."""

    def __init__(self) -> None:
        self.step_s = 0.0
        """Current duration of a step, by the ranks' step counts; 0: not known yet."""
        self.num_windows = 0
        """Number of windows measured so far: a verdict is judged again in each."""
        self._arrivals = ArrivalTracker()
        self._own = OwnWork()
        self._ranks: dict[int, _Record] = {}
        self._waiting: list[JoinedCollective] = []
        """Collectives of the current, incomplete part."""
        self._parts: list[_Part] = []
        """Parts of the current, incomplete window."""
        self._has_caught_up = False
        """A rank that was late from the start no longer is."""
        self._is_beside_slow_link = False

    def poll(
        self,
        samples: Iterable[RankObservation],
        groups: Mapping[str, tuple[int, ...]],
        *,
        is_link_slow: bool = False,
        may_name: bool = True,
    ) -> Verdict | None:
        """Add one sample of the ranks of all nodes, and judge. Some ranks may be missing.

        Args:
            samples: in any order; only of ranks that train (not in an evaluation).
            groups: ranks of each process group.
            is_link_slow: no further rank is named, because ranks next to a slow link leave each
                collective later than others.
            may_name: if false, a link may be slow, and no further rank is named yet.
        """
        for one in samples:
            record = self._ranks.setdefault(one.rank, _Record())
            record.node, record.clock_error_s = one.node, one.clock_error_s
            record.samples.append((one.at_s, one.step))
            self._arrivals.add(
                one.rank, one.node, one.entered, groups, seen_s=one.at_s, waited_s=one.waited_s
            )
            if one.boundary is not None:
                self._own.add(one.rank, one.step, *one.boundary)
        self.step_s = self._step_s()
        for meeting in self._arrivals.take():
            if self.step_s > 0:
                self._meet(meeting)
        if window := self._own.take():
            self.num_windows += 1
            for rank, more_s in window.items():
                self._ranks[rank].series[OWN].add(more_s)
        if self._is_beside_slow_link and not is_link_slow:  # Rule 5
            self._waiting, self._parts = [], []
            for series in self._all_series():
                series.forget_newest()
        self._is_beside_slow_link = is_link_slow
        return self._verdict(may_name=may_name and not is_link_slow)

    def lateness(self) -> dict[int, Lateness]:
        known = ((rank, one.series[ALONE]) for rank, one in sorted(self._ranks.items()))
        return {rank: series.lateness() for rank, series in known if series.is_known}

    # --- measuring ----------------------------------------------------------------------------

    def _step_s(self) -> float:
        found = []
        for record in self._ranks.values():
            (first_s, first), (last_s, last) = record.samples[0], record.samples[-1]
            if last - first >= STEPS_OF_PART:
                found.append((last_s - first_s) / (last - first))
        return median(found) if found else self.step_s

    def _meet(self, meeting: JoinedCollective) -> None:
        started, part_s = self._waiting, NEARLY * STEPS_OF_PART * self.step_s
        if started and meeting.released_s - started[0].released_s >= part_s:
            self._parts.append(self._part())
            self._waiting = []
            if meeting.released_s - self._parts[0].started_s >= NEARLY * SHORTEST_WINDOW_S:
                self._close_window()
        self._waiting.append(meeting)

    def _part(self) -> _Part:
        added_s: dict[int, float] = {}
        for meeting in self._waiting:
            if not self._arrivals.overlaps(meeting.group):
                for rank, late_s in meeting.late_s.items():
                    added_s[rank] = added_s.get(rank, 0.0) + late_s / STEPS_OF_PART
        alone_s = _widest(meeting.late_s for meeting in self._waiting)
        of_node_s = _widest(meeting.node_late_s for meeting in self._waiting)
        found = {ALONE: alone_s, ADDED: added_s, OF_NODE: of_node_s}
        return _Part(self._waiting[0].released_s, found)

    def _close_window(self) -> None:
        parts, self._parts = self._parts, []
        self.num_windows += 1
        for rank, record in self._ranks.items():
            seen = [part.late_s for part in parts if rank in part.late_s[ALONE]]
            if seen:
                for how in (ALONE, ADDED, OF_NODE):
                    value_s = fmean(late_s[how].get(rank, 0.0) for late_s in seen)
                    record.series[how].add(value_s)

    # --- judging ------------------------------------------------------------------------------

    def _verdict(self, *, may_name: bool) -> Verdict | None:
        alone = self._judge(ALONE, may_name=may_name)
        added = self._judge(ADDED, may_name=may_name)
        added = {rank: confidence for rank, confidence in added.items() if self._is_outlier(rank)}
        of_node = self._judge(OF_NODE, may_name=may_name)
        if self._has_caught_up:  # Rule 4
            self._has_caught_up = False
            for series in self._all_series():
                series.restart()
            return None
        if alone or added or of_node:  # Rule 6
            self._forget_work()
        own = self._judge(OWN, may_name=may_name)
        together = self._whole_nodes(of_node, set(alone) | set(added))
        judged = [(alone, ALONE), (added, ADDED), (together, OF_NODE), (own, OWN)]
        if set(alone) < set(own):  # a slow stage, and its replicas are not equally slow
            judged.reverse()
        for found, how in judged:
            # If all ranks are late, there is no rank to compare them with.
            if found and len(found) < len(self._ranks):
                return self._report(found, how)
        return None

    def _all_series(self) -> Iterator[LatenessSeries]:
        for record in self._ranks.values():
            yield from record.series.values()

    def _judge(self, how: str, *, may_name: bool) -> dict[int, Confidence]:
        noises_s = [one.series[how].noise_s for one in self._ranks.values()]
        usual_s = median(noises_s) if noises_s else 0.0
        found = {}
        for rank, record in sorted(self._ranks.items()):
            series = record.series[how]
            before = series.named
            confidence = series.judge(self.step_s, self._floor_s(rank), usual_s, may_name=may_name)
            if confidence is not None:
                found[rank] = confidence
            self._has_caught_up |= before is Confidence.POSSIBLE and confidence is None
        return found

    def _forget_work(self) -> None:
        """Others wait for a late rank, also in the windows before it has caught up."""
        for record in self._ranks.values():
            if record.series[OWN].named is None:
                record.series[OWN].forget_newest()

    def _limit_s(self, rank: int) -> float:
        return max(SHARE_OF_STEP * self.step_s, self._floor_s(rank))

    def _is_outlier(self, rank: int) -> bool:
        """Whether its waits add up to more than those of the other ranks.

        If all ranks do the same work, each waits for each by chance, and the sum is never zero.
        """
        all_added = {at: one.series[ADDED] for at, one in self._ranks.items()}
        mine_s = all_added.pop(rank).lateness().now_s
        others_s = [one.lateness().now_s for one in all_added.values() if one.is_known]
        return not others_s or mine_s - median(others_s) > self._limit_s(rank) / 2

    def _floor_s(self, rank: int) -> float:
        errors = [one.clock_error_s for at, one in self._ranks.items() if at != rank]
        return FLOOR_S + self._ranks[rank].clock_error_s + max(errors, default=0.0)

    def _whole_nodes(
        self, found: Mapping[int, Confidence], named: set[int]
    ) -> dict[int, Confidence]:
        nodes: dict[str, list[int]] = {}
        for rank, record in sorted(self._ranks.items()):
            nodes.setdefault(record.node, []).append(rank)
        late = (ranks for ranks in nodes.values() if set(ranks) <= set(found) - named)
        return {rank: found[rank] for ranks in late for rank in ranks}

    # --- reporting ----------------------------------------------------------------------------

    def _report(self, found: Mapping[int, Confidence], how: str) -> Verdict:
        culprits = tuple(found)
        late = {rank: self._ranks[rank].series[how].lateness() for rank in culprits}
        nodes = self._nodes_of(culprits)
        subject = ranks_text(culprits)
        where = f" (all of node {' and of node '.join(nodes)})" if nodes else ""
        is_or_are, pronoun = ("is", "it") if len(culprits) == 1 else ("are", "them")
        worst_s = max(one.more_s if how == OWN else one.now_s for one in late.values())
        does = f"others wait {_short(worst_s)} for {pronoun} in each step"
        if how == OWN:
            does = f"{_short(worst_s)} more work in each step than at first, relative to others"
        is_clear = Confidence.LIKELY in found.values() and how != ADDED
        doubt = "many small waits are added up; if ranks compute during them, the sum is too high"
        if how != ADDED:
            doubt = "late since the first steps: the work may be uneven by design"
        return Verdict(
            kind=VerdictKind.SLOW_COMPUTATION,
            culprits=culprits,
            nodes=nodes,
            victims=tuple(rank for rank in sorted(self._ranks) if rank not in found),
            text=f"{subject}{where} {is_or_are} slow: {does} (a step takes {_short(self.step_s)})",
            evidence=tuple(self._evidence(rank, one, how) for rank, one in late.items()),
            counter_evidence=() if is_clear else (doubt,),
            confidence=Confidence.LIKELY if is_clear else Confidence.POSSIBLE,
            fingerprint=f"slow computation {','.join(map(str, culprits))}",
        )

    def _nodes_of(self, culprits: tuple[int, ...]) -> tuple[str, ...]:
        nodes = tuple(dict.fromkeys(self._ranks[rank].node for rank in culprits))
        theirs = {rank for rank, one in self._ranks.items() if one.node in nodes}
        return nodes if len(culprits) > 1 and theirs == set(culprits) else ()

    def _evidence(self, rank: int, late: Lateness, how: str) -> str:
        before = "" if late.before_s is None else f"; in its first steps {_short(late.before_s)}"
        does = f"is {_short(late.now_s)} later than the others"
        if how == OWN:
            does = f"works {_short(late.now_s)} longer in a step than the others, without its waits"
        return (
            f"rank {rank} {does} (median of {WINDOWS} windows{before}; noise "
            f"{_short(late.noise_s)})"
        )


def _widest(meetings: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """The lateness of each rank in the collective with the largest spread."""
    found: dict[int, tuple[float, float]] = {}
    for late_s in meetings:
        spread_s = max(late_s.values()) - min(late_s.values())
        for rank, value_s in late_s.items():
            if rank not in found or spread_s > found[rank][0]:
                found[rank] = (spread_s, value_s)
    return {rank: value_s for rank, (_, value_s) in found.items()}


def _short(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
