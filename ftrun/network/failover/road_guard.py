"""Runs the path monitor so that a bug in it cannot end the run.

Runs in:  the agent that leads. Pure.
Takes in: the inputs of `PathMonitor`, and the exceptions it raises.
Gives:    the results of `PathMonitor`; after a bug those of a leader with `--network-plan off`.
Survives: any exception: it is reported once, and this leader monitors no path any more.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ftrun.config.cluster import MembershipSettings
from ftrun.network.failover.path_monitor import NodesHere, PathMonitor
from ftrun.recovery.commands import Command, JournalEntry
from ftrun.recovery.health import HealthMonitor
from ftrun.recovery.slow_watch import SlowSuspicions
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard
from ftrun.wire.cluster.messages import ProbeLinkResult, ProbePathResult, RoadWord
from ftrun.wire.cluster.rails import NetworkPlan

T = TypeVar("T")


class GuardedPathMonitor:
    """The path monitor of one leader; the leader calls `PathMonitor` only through this class."""

    def __init__(self, me: str, settings: MembershipSettings, peers: NodesHere) -> None:
        self._roads = PathMonitor(me, settings, peers)
        self._notes: list[JournalEntry] = []
        self._is_off = False

    def _do(self, work: Callable[[], T], otherwise: T) -> T:
        if self._is_off:
            return otherwise
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - a bug costs the plan, never the run
            self._is_off = True
            text = f"a bug of ftrun: no plan of roads: {type(error).__name__}: {error}"
            self._notes.append(JournalEntry("RoadsBug", text, say=True))
            return otherwise

    @property
    def plan(self) -> NetworkPlan | None:
        return self._roads.plan

    @property
    def wish(self) -> str:
        return "" if self._is_off else self._roads.wish

    def hold_up(
        self, cards: Sequence[NodeCard], previous: GenerationPlan | None, *, now_s: float
    ) -> list[Command] | None:
        return self._do(lambda: self._roads.hold_up(cards, previous, now_s=now_s), None)

    def decide(
        self,
        members: Sequence[NodeCard],
        spares: Sequence[NodeCard],
        previous: GenerationPlan | None,
    ) -> NetworkPlan | None:
        return self._do(lambda: self._roads.decide(members, spares, previous), None)

    def begin(self) -> None:
        self._do(self._roads.begin, None)

    def told(
        self, sender: str, body: RoadWord, watching: HealthMonitor, *, now_s: float
    ) -> list[Command]:
        if isinstance(
            body, ProbeLinkResult
        ):  # of the health monitor, with or without a network plan
            watching.slow.probed(body, now_s=now_s)
            return []
        if isinstance(body, ProbePathResult) and body.survey < 0:
            return [*watching.pairs.tried(sender, body, now_s=now_s)]
        return self._do(lambda: self._roads.told(sender, body, now_s=now_s), [])

    def lost(self, node_id: str) -> None:
        self._do(lambda: self._roads.lost(node_id), None)

    def look(self, plan: GenerationPlan, slow: SlowSuspicions, *, now_s: float) -> list[Command]:
        return self._do(lambda: self._roads.look(plan, slow, now_s=now_s), [])

    def take_urgent(self) -> str:
        return self._do(self._roads.take_urgent, "")

    def take_notes(self) -> list[JournalEntry]:
        notes, self._notes = self._notes, []
        return [*self._roads.take_notes(), *notes]

    def know(self, cards: Sequence[NodeCard]) -> None:
        self._do(lambda: self._roads.know(cards), None)

    def status(self, plan: GenerationPlan | None, *, now_s: float) -> dict[str, Any] | None:
        return self._do(lambda: self._roads.status(plan, now_s=now_s), None)
