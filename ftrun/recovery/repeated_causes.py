"""Counts how often one cause has ended ranks without progress, and where; judges what follows.

Runs in:  the agent that leads. Pure.
Takes in: the cause of each failure, its place, and whether the run has made progress since.
Gives:    the node to exclude, or the reason to end the run.
Survives: the leader: the counts are part of `FailureHistory`.

Rule 1: a cause that repeats on one node may be a fault of that node. After `SAME_NODE` times the
        node is excluded, if another one can run its ranks: once for a cause and a rank.
Rule 2: if the same rank then fails by the same cause on another node, the cause follows the rank:
        it is in the rank's data, or in its part of the program. The run ends, because no other node
        would help.
Rule 3: a cause that repeats `limit` times, on any ranks and nodes, follows the program.
Rule 4: with progress, the counts restart at 0.
Rule 5: a kill from outside shows nothing about the node. A node is not excluded while its state has
        no protection, because another node could not restore it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ftrun.events import ExitKind, WorkerExit
from ftrun.monitor.device_faults import is_hardware_text
from ftrun.monitor.worker_exits import SIGKILL

SAME_NODE = 2
MAX_EXCLUDED_PER_HOUR = 3
"""Nodes that may be excluded for failures of their ranks: an error of the program must not use up
the spares."""

Place = tuple[str, int]
"""A node and a rank."""

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
        a limited number of nodes, because a program may cause it on all.
        """
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
    """The newest cause, and where it has ended ranks since the last progress."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.cause = ""
        self.count = 0
        self.places: tuple[Place, ...] = ()
        """Since a node was excluded for this cause, or since the cause is counted."""
        self.excluded: tuple[Place, ...] = ()
        """The nodes that were excluded for this cause, and the ranks that had failed there."""

    def succeed(
        self, cause: str, count: int, places: tuple[Place, ...], excluded: tuple[Place, ...]
    ) -> None:
        self.cause, self.count, self.places, self.excluded = cause, count, places, excluded

    def note(
        self, key: str, cause: WorkerExit, placement: Placement, *, advanced: bool
    ) -> Repetition:
        """Counts a failure; `key` is equal for equal causes, `advanced`: since the last failure."""
        if advanced or key != self.cause:
            self.succeed(key, 0, (), ())
        place = (placement.node_of.get(cause.rank, ""), int(cause.rank))
        self.count += 1
        before = next((one for one in self.excluded if one[1] == place[1]), place)
        if before[0] != place[0]:
            if self.count + SAME_NODE < self._limit:
                return Repetition(self.count)
            where = f"rank {place[1]} has failed by it on node {before[0]}, and on {place[0]} too"
            return Repetition(self.count, follows=where)
        self.places = (*self.places[1 - SAME_NODE :], place)
        is_there = len(self.places) == SAME_NODE and all(one[0] == place[0] for one in self.places)
        if not (is_there and place[0] and _may_be_excluded(cause, placement)):
            return Repetition(self.count)
        self.excluded, self.places, self.count = (*self.excluded, place), (), 0
        return Repetition(SAME_NODE, exclude=place[0])


def _may_be_excluded(cause: WorkerExit, placement: Placement) -> bool:
    is_of_node = cause.kind in _OF_A_NODE and cause.code != -SIGKILL
    has_room = placement.can_replace and placement.num_excluded < MAX_EXCLUDED_PER_HOUR
    return is_of_node and has_room and placement.is_protected
