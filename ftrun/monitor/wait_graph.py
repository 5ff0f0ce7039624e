"""Wait graph of the ranks, and the deadlines of a step.

Edges lead from a rank in a collective to the ranks that have not entered it. Deadlines are learned
from the run's own step times.

Source: C4's rule (arXiv 2406.04594): a rank that has not entered while others wait is the culprit.
        With several process groups, the culprit is at the end of all wait chains. NVIDIA's
        resiliency extension multiplies the step time by 5, Unicron by 3.

Rule 1: Only sequence numbers are compared, never clocks.
Rule 2: A rank that waits itself, in any group, is a victim.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ftrun.config.profile import HangConfig
from ftrun.monitor.verdicts import CollectiveCall, ProcessGroupView, RankView

_CHECKED = 0.5
_NAME_AT = 0.85


@dataclass(frozen=True, slots=True)
class HangDeadlines:
    """Deadlines for a rank without progress, in seconds since its last step boundary."""

    sample_s: float
    """Stacks are sampled from here on, so that a diagnosis is ready in time."""
    suspect_after_s: float
    """A hang is suspected, and its culprit named."""
    act_s: float
    """A hang with positive evidence is acted on."""
    kill_s: float
    """Any hang is acted on, except as in `leave_s`."""
    leave_s: float
    """A hang is acted on even if its culprit runs a phase that may take long."""

    @staticmethod
    def of(p99_s: float, settings: HangConfig) -> "HangDeadlines":
        limit_s = max(settings.suspect_after_s, settings.suspect_p99_factor * p99_s)
        kill_s = max(settings.kill_after_s, settings.kill_p99_factor * p99_s, limit_s)
        leave_s = max(settings.phase_timeout_s, kill_s)
        return HangDeadlines(_CHECKED * limit_s, _NAME_AT * limit_s, limit_s, kill_s, leave_s)


_VARIES = ("gather", "scatter", "broadcast", "all_to_all", "reduce")
"""Operations whose sizes differ between ranks; `all_reduce` is not one of them."""


@dataclass(frozen=True, slots=True)
class CollectiveMismatch:
    """Different collectives that ranks have called under one sequence number."""

    group: ProcessGroupView
    seq: int
    calls: dict[int, CollectiveCall]

    @property
    def sides(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for rank, call in sorted(self.calls.items()):
            found.setdefault(_signature(call), []).append(rank)
        return dict(sorted(found.items(), key=lambda side: len(side[1])))


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """Waits of all ranks in one observation."""

    views: Mapping[int, RankView]
    edges: dict[int, set[int]]
    """For each waiting rank: the ranks that have not entered its collective."""
    unknown: set[int]
    """Ranks that others wait for and that have no view."""
    stuck: list[tuple[ProcessGroupView, list[int]]]
    """Collectives that all ranks have entered, with the ranks that have not left."""

    @property
    def waiting(self) -> set[int]:
        """Ranks in a collective, and ranks whose stack shows that they wait for a message."""
        return {
            rank
            for rank, view in self.views.items()
            if view.is_held_up or (view.activity == "collective" and not view.is_finished)
        }

    def ends(self) -> set[int]:
        """Ends of the wait chains: ranks that others wait for and that wait for no rank.

        Empty if all wait for each other in a cycle.
        """
        waited_for = set().union(*self.edges.values()) if self.edges else set()
        free = {rank for rank in waited_for if not self.edges.get(rank)}
        not_receiving = free - self.waiting
        return not_receiving or free

    def circle(self) -> list[int]:
        """Ranks that wait for each other, in order; valid only if `ends` is empty."""
        path = [min(self.edges)]
        while (rank := min(self.edges[path[-1]])) not in path:
            path.append(rank)
        return path[path.index(rank) :]


def waits_of(views: Mapping[int, RankView]) -> WaitGraph:
    edges: dict[int, set[int]] = {}
    unknown: set[int] = set()
    stuck: dict[tuple[str, int], tuple[ProcessGroupView, list[int]]] = {}
    for rank, view in sorted(views.items()):
        for group in view.waiting if view.is_held_up else ():
            absent = {one for one in members_of(group, views) if _is_absent(one, group, views)}
            unknown |= absent - set(views)
            if absent:
                edges.setdefault(rank, set()).update(absent)
            else:
                key = (group.name, group.waits_seq)
                stuck.setdefault(key, (group, []))[1].append(rank)
    return WaitGraph(views, edges, unknown, list(stuck.values()))


def members_of(group: ProcessGroupView, views: Mapping[int, RankView]) -> set[int]:
    """Ranks of the group; if not known, the ranks that have been observed in it."""
    if group.ranks:
        return set(group.ranks)
    return {rank for rank, view in views.items() if _in_group(view, group.name) is not None}


def mismatches(views: Mapping[int, RankView]) -> list[CollectiveMismatch]:
    groups: dict[str, ProcessGroupView] = {}
    calls: dict[tuple[str, int], dict[int, CollectiveCall]] = {}
    for rank, view in views.items():
        for group in view.groups:
            groups.setdefault(group.name, group)
            for call in group.calls:
                calls.setdefault((group.name, call.seq), {})[rank] = call
    found: dict[str, CollectiveMismatch] = {}
    for (name, seq), by_rank in sorted(calls.items()):
        if name not in found and len({_signature(call) for call in by_rank.values()}) > 1:
            found[name] = CollectiveMismatch(groups[name], seq, by_rank)
    return list(found.values())


def _is_absent(rank: int, group: ProcessGroupView, views: Mapping[int, RankView]) -> bool:
    view = views.get(rank)
    if view is None:
        return True
    own = _in_group(view, group.name)
    return own is None or own.entered < group.waits_seq


def _in_group(view: RankView, name: str) -> ProcessGroupView | None:
    return next((one for one in view.groups if one.name == name), None)


def _signature(call: CollectiveCall) -> str:
    is_varying = call.op != "all_reduce" and any(word in call.op for word in _VARIES)
    return call.op if is_varying or not call.sizes else f"{call.op} {call.sizes}"
