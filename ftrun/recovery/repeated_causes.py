"""Counts how often each cause has ended ranks without progress, and where; judges what follows.

Runs in:  the agent that leads. Pure.
Takes in: the cause of each failure and its place; the progress of the run.
Gives:    the node to exclude, or the reason to end the run.
Survives: the leader: the counts are part of `FailureHistory`.

Rule 1: a cause that repeats on one node may be a fault of that node. After `SAME_NODE` times the
        node is excluded, if another one can run its ranks: once for a cause and a rank.
Rule 2: if the same rank then fails by the same cause on another node, the cause follows the rank:
        it is in the rank's data, or in its part of the program. The run ends, because no other node
        would help.
Rule 3: a cause that repeats `limit` times, on any ranks and nodes, follows the program.
Rule 4: with progress, all counts restart at 0. Failures by other causes do not change a count, so
        causes that alternate reach the limits too. Of more than `MAX_CAUSES`, those that occurred
        longest ago are dropped, and any that did not occur for `KEPT_S`: a script that shows no
        progress may run for months.
Rule 5: a kill from outside shows nothing about the node. A node is not excluded while its state has
        no protection, because another node could not restore it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from ftrun.events import ExitKind, WorkerExit
from ftrun.monitor.device_faults import is_hardware_text
from ftrun.monitor.worker_exits import SIGKILL
from ftrun.wire.cluster.generation import CauseCount

SAME_NODE = 2
MAX_CAUSES = 16
KEPT_S = 86_400.0
MAX_EXCLUDED_PER_HOUR = 3
"""Nodes that may be excluded for failures of their ranks: an error of the program must not use up
the spares."""

_OF_A_NODE = (ExitKind.EXCEPTION, ExitKind.EXIT_CODE, ExitKind.SIGNAL, ExitKind.OUT_OF_MEMORY)
"""Kinds of exits of which the node may be the cause. Others name a node or a link by themselves."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the ranks of a generation run, and whether the run can do without a node."""

    node_of: Mapping[int, str] = field(default_factory=dict)
    can_replace: bool = False
    is_protected: bool = False
    """Other nodes can restore the state of any node, or there is no state."""
    num_excluded: int = 0
    """Nodes that were excluded within the last hour."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """Hardware faults that nodes have reported, in words, by node id."""

    def fault_behind(self, cause: WorkerExit) -> tuple[str, str]:
        """The node with a hardware fault that explains this failure, and the fault; else empty.

        A peer may notice the failure before the ranks of the node itself. An error text counts for
        a limited number of nodes, because a program may cause it on all. The end of an agent shows
        nothing about a device.
        """
        if cause.kind is ExitKind.NODE_LOST:
            return "", ""
        node_id = next((one for one in sorted(self.faults) if one in self.node_of.values()), "")
        if node_id:
            return node_id, self.faults[node_id]
        node_id = self.node_of.get(cause.rank, "")
        has_room = self.num_excluded < MAX_EXCLUDED_PER_HOUR
        is_fault = bool(node_id) and has_room and is_hardware_text(cause.text)
        return (node_id, cause.text) if is_fault else ("", "")


@dataclass(frozen=True, slots=True)
class Repetition:
    """What the repetition of a cause means."""

    count: int
    exclude: str = ""
    """The node to exclude; empty: none."""
    follows: str = ""
    """Why no other node would help, in words; empty: that is not known."""


class RepeatedCauses:
    """The causes that have ended ranks since the last progress, and where."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: dict[str, CauseCount] = {}
        """By cause, that of the last failure last."""
        self._last_s: dict[str, float] = {}
        """By cause, when it occurred last."""

    def counts(self, *, now_s: float) -> list[CauseCount]:
        return [
            replace(one, age_s=now_s - self._last_s[cause]) for cause, one in self._counts.items()
        ]

    @property
    def newest(self) -> str:
        """The cause of the last failure, if there was no progress since; else empty."""
        return next(reversed(self._counts), "")

    def succeed(self, counts: Iterable[CauseCount], *, now_s: float) -> None:
        self._counts = {one.cause: one for one in counts}
        self._last_s = {one.cause: now_s - one.age_s for one in self._counts.values()}

    def forget(self) -> None:
        self._counts = {}

    def note_uncounted(self, key: str, *, now_s: float) -> None:
        """Makes the cause the newest one without counting this failure."""
        self._keep(self._known(key, now_s))

    def note(
        self, key: str, cause: WorkerExit, placement: Placement, *, now_s: float
    ) -> Repetition:
        """Counts a failure; `key` is equal for equal causes."""
        known = self._known(key, now_s)
        rank, node_id = int(cause.rank), placement.node_of.get(cause.rank, "")
        count, place = known.count + 1, (node_id, rank)
        before = next((one for one, of_rank in known.excluded if of_rank == rank), node_id)
        if before != node_id:
            self._keep(CauseCount(key, count, known.places, known.excluded))
            if count + SAME_NODE < self._limit:
                return Repetition(count)
            where = f"rank {rank} has failed by it on node {before}, and on {node_id} too"
            return Repetition(count, follows=where)
        places = [*known.places[1 - SAME_NODE :], place]
        is_there = len(places) == SAME_NODE and all(one == node_id for one, _ in places)
        if is_there and node_id and _may_be_excluded(cause, placement):
            self._keep(CauseCount(key, excluded=[*known.excluded, place]))
            return Repetition(SAME_NODE, exclude=node_id)
        self._keep(CauseCount(key, count, places, known.excluded))
        return Repetition(count)

    def _known(self, key: str, now_s: float) -> CauseCount:
        """The count of this cause, which occurs now."""
        for cause in [one for one in self._counts if now_s - self._last_s[one] > KEPT_S]:
            del self._counts[cause]
        self._last_s[key] = now_s
        return self._counts.get(key, CauseCount(key))

    def _keep(self, new: CauseCount) -> None:
        self._counts.pop(new.cause, None)
        self._counts[new.cause] = new
        for cause in [*self._counts][:-MAX_CAUSES]:
            del self._counts[cause]


def _may_be_excluded(cause: WorkerExit, placement: Placement) -> bool:
    is_of_node = cause.kind in _OF_A_NODE and cause.code != -SIGKILL
    has_room = placement.can_replace and placement.num_excluded < MAX_EXCLUDED_PER_HOUR
    return is_of_node and has_room and placement.is_protected
