"""Wait graph of the ranks, and the deadlines of a step.

Edges lead from a rank that waits to the ranks that it waits for. Deadlines are learned from the
run's own step times.

Source: C4's rule (arXiv 2406.04594): a rank that has not entered while others wait is the culprit.
        With several process groups, the culprit is at the end of all wait chains. NVIDIA's
        resiliency extension multiplies the step time by 5, Unicron by 3.

Rule 1: Only sequence numbers are compared, never clocks.
Rule 2: A rank that waits itself, in any group, is a victim.
Rule 3: A rank in a collective waits for the members that have not entered it.
Rule 4: It also waits for the members in which an older collective is open. If another member has
        completed that one, this member's device is stuck: its host has called the collective.
Rule 5: A rank whose oldest open message names a peer waits for that peer, if the peer has no open
        counterpart; of counted messages, if the peer has called fewer. A stopped peer completes
        nothing, whatever it has called.
Rule 6: If all members are in one collective and starts are recorded, a member that has not started
        while others have is stuck too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ftrun.config.profile import HangConfig
from ftrun.monitor.order.messages import ANY
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

    def number(self, unresponsive_s: float) -> int:
        """Number of deadlines, from `suspect_after_s` on, that are over."""
        limits_s = (self.suspect_after_s, self.act_s, self.kill_s, self.leave_s)
        return sum(unresponsive_s >= one for one in limits_s)


_VARIES = ("gather", "scatter", "broadcast", "all_to_all", "reduce")
"""Operations whose sizes differ between ranks; `all_reduce` is not one of them."""
_NEEDS_ALL = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "all_to_all",
              "alltoall", "barrier")  # fmt: skip
"""Operations that no member can complete without the data of every other member."""


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


StuckCollective = tuple[ProcessGroupView, list[int]]


@dataclass(frozen=True, slots=True)
class Behind:
    """One rank whose oldest open collective is over, or at least runs, in another member."""

    group: ProcessGroupView
    """As this rank sees it."""
    completed_by: set[int] = field(default_factory=set)
    started_by: set[int] = field(default_factory=set)

    @property
    def is_proof(self) -> bool:
        """The other members could not complete it before this rank's device had run it.

        The first rank of a broadcast may be done before the last one begins.
        """
        call = self.group.call(self.group.waits_seq)
        op = call.op.lower() if call is not None and self.completed_by else ""
        return any(word in op for word in _NEEDS_ALL)


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """Waits of all ranks in one observation."""

    views: Mapping[int, RankView]
    edges: dict[int, set[int]] = field(default_factory=dict)
    """For each waiting rank: the ranks that it waits for."""
    unknown: set[int] = field(default_factory=set)
    """Ranks that others wait for and that have no view."""
    stuck: list[StuckCollective] = field(default_factory=list)
    """Collectives that all ranks have entered, with the ranks that have not left."""
    behind: dict[int, Behind] = field(default_factory=dict)
    """Ranks in which a collective is open that another member has completed."""
    undelivered: dict[int, int] = field(default_factory=dict)
    """For each rank in a message that its peer has called too: the peer."""

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
        proven = self.proven
        waited_for = {one for rank in self.edges.keys() - proven for one in self.edges[rank]}
        free = {rank for rank in waited_for if not self.edges.get(rank)} | proven
        not_receiving = free - (self.waiting - self.stuck_devices)
        return not_receiving or free or self.stuck_devices - self.edges.keys()

    @property
    def stuck_devices(self) -> set[int]:
        return {rank for rank, one in self.behind.items() if one.group.is_on_device}

    @property
    def proven(self) -> set[int]:
        """Ranks of `stuck_devices` for which a long kernel is no explanation.

        What else they wait for does not matter: the open collective needs no other rank any more.
        """
        return {rank for rank in self.stuck_devices if self.behind[rank].is_proof}

    def unread(self, group: ProcessGroupView) -> set[int]:
        """Members whose recorders do not show whether they have entered its open collective."""
        return {
            one
            for one in members_of(group, self.views)
            if one in self.views
            and not self.views[one].is_recorder_complete
            and _in_group(self.views[one], group.name) is None
        }

    def circle(self) -> list[int]:
        """Ranks that wait for each other, in order; valid only if `ends` is empty."""
        path = [min(self.edges)]
        while (rank := min(self.edges[path[-1]])) not in path:
            path.append(rank)
        return path[path.index(rank) :]


def waits_of(views: Mapping[int, RankView]) -> WaitGraph:
    graph = WaitGraph(views)
    stuck: dict[tuple[str, int], StuckCollective] = {}
    for rank, view in sorted(views.items()):
        for group in view.waiting:
            # What a device waits for does not depend on what the host computes.
            if not view.is_held_up and not group.is_on_device:
                continue
            _note_behind(graph, rank, group)
            found = _unanswered_peers(rank, group, views) | _awaited(group, views)
            graph.unknown.update(found - set(views))
            if found:
                graph.edges.setdefault(rank, set()).update(found)
            elif group.messages and group.messages[0].is_counted:
                graph.undelivered[rank] = group.messages[0].peer
            elif group.waits_seq:
                key = (group.name, group.waits_seq)
                stuck.setdefault(key, (group, []))[1].append(rank)
    for group, ranks in stuck.values():
        if not _note_not_started(graph, group, ranks):
            graph.stuck.append((group, ranks))
    return graph


def _awaited(group: ProcessGroupView, views: Mapping[int, RankView]) -> set[int]:
    """Members that have not entered the collective, or are in an older one: rules 3 and 4."""
    members = members_of(group, views) if group.waits_seq else ()
    return {one for one in members if _is_awaited(views.get(one), group)}


def _is_awaited(view: RankView | None, group: ProcessGroupView) -> bool:
    if view is None:
        return True
    own = _in_group(view, group.name)
    if own is None:
        return view.is_recorder_complete
    return own.entered < group.waits_seq or 0 < own.waits_seq < group.waits_seq


def _note_behind(graph: WaitGraph, rank: int, group: ProcessGroupView) -> None:
    members = members_of(group, graph.views) if group.waits_seq else ()
    completed_by = {
        one
        for one in members
        if one in graph.views
        and (own := _in_group(graph.views[one], group.name)) is not None
        and own.completed >= group.waits_seq
    }
    if completed_by:
        graph.behind[rank] = Behind(group, completed_by)


def _note_not_started(graph: WaitGraph, group: ProcessGroupView, ranks: Iterable[int]) -> bool:
    """Whether some ranks of a collective have not started it while others have: rule 6."""
    found: dict[bool | None, dict[int, ProcessGroupView]] = {}
    for rank in ranks:
        own = next(one for one in graph.views[rank].groups if one.name == group.name)
        found.setdefault(own.has_started, {})[rank] = own
    if set(found) != {True, False}:
        return False
    for rank in found[True]:
        graph.edges.setdefault(rank, set()).update(found[False])
    for rank, own in found[False].items():
        graph.behind.setdefault(rank, Behind(own)).started_by.update(found[True])
    return True


def members_of(group: ProcessGroupView, views: Mapping[int, RankView]) -> set[int]:
    """Ranks of the group; if not known, the ranks that have been observed in it."""
    if group.ranks:
        return set(group.ranks)
    return {rank for rank, view in views.items() if _in_group(view, group.name) is not None}


def mismatch(views: Mapping[int, RankView]) -> CollectiveMismatch | None:
    """The first one of the first group, by name."""
    groups: dict[str, ProcessGroupView] = {}
    calls: dict[tuple[str, int], dict[int, CollectiveCall]] = {}
    for rank, view in views.items():
        for group in view.groups:
            groups.setdefault(group.name, group)
            for call in group.calls:
                calls.setdefault((group.name, call.seq), {})[rank] = call
    for (name, seq), by_rank in sorted(calls.items()):
        if len({_signature(call) for call in by_rank.values()}) > 1:
            return CollectiveMismatch(groups[name], seq, by_rank)
    return None


def _unanswered_peers(
    rank: int, group: ProcessGroupView, views: Mapping[int, RankView]
) -> set[int]:
    """The peer of the oldest open message, if it has no open counterpart: rule 5."""
    if not group.messages:
        return set()
    first = group.messages[0]
    if first.peer == ANY:
        others = members_of(group, views) - {rank}
        return others if _in_transit(rank, group, first.tag, views) < 0 else set()
    view = views.get(first.peer)
    if view is None:
        return {first.peer}
    if first.is_counted:
        is_answered = view.process not in ("T", "t") and _is_answered(rank, group, view, views)
        return set() if is_answered else {first.peer}
    own = _in_group(view, group.name)
    wanted = ("recv" if first.op == "send" else "send", rank)
    answers = own is not None and any((one.op, one.peer) == wanted for one in own.messages)
    return set() if answers or not view.is_recorder_complete else {first.peer}


def _is_answered(
    rank: int, group: ProcessGroupView, peer: RankView, views: Mapping[int, RankView]
) -> bool:
    """Whether the peer has called the counterpart of the counted message that the rank waits in."""
    first = group.messages[0]
    if first.op == "send" and _count(peer, group, "recv", ANY, first.tag):
        return _in_transit(peer.rank, group, first.tag, views) <= 0
    return _count(peer, group, "recv" if first.op == "send" else "send", rank, first.tag) >= (
        first.seq
    )


def _in_transit(rank: int, group: ProcessGroupView, tag: int, views: Mapping[int, RankView]) -> int:
    """Messages that were sent to a rank, less its calls of recv."""
    others = members_of(group, views) - {rank}
    sent = sum(_count(views[one], group, "send", rank, tag) for one in others if one in views)
    return sent - sum(_count(views[rank], group, "recv", one, tag) for one in (*others, ANY))


def _count(view: RankView, group: ProcessGroupView, op: str, peer: int, tag: int) -> int:
    wanted = (group.name, op, peer, tag)
    found = view.message_counts
    return next((one.count for one in found if (one.group, one.op, one.peer, one.tag) == wanted), 0)


def _in_group(view: RankView, name: str) -> ProcessGroupView | None:
    return next((one for one in view.groups if one.name == name), None)


def _signature(call: CollectiveCall) -> str:
    is_varying = call.op != "all_reduce" and any(word in call.op for word in _VARIES)
    return call.op if is_varying or not call.sizes else f"{call.op} {call.sizes}"
