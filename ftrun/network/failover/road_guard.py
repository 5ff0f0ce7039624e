"""The lead's knowledge of roads, kept where a bug in it cannot end the run.

Runs in:  the agent that leads. Pure.
Takes in: what `Roads` takes in, and what it raises.
Gives:    what `Roads` gives; after a bug what a lead gets with `--network-plan off`.
Survives: any exception: it is noted once, and no road is looked at by this lead any more.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ftrun.network.failover.path_monitor import NodesHere, Roads
from ftrun.recovery.commands import Command, Note
from ftrun.recovery.health import Watching
from ftrun.recovery.settings import NetworkSettings
from ftrun.recovery.slow_watch import SlowWatch
from ftrun.wire.cluster.generation import NodeCard, Plan
from ftrun.wire.cluster.messages import ProbeFound, RoadTried, RoadWord
from ftrun.wire.cluster.rails import RoadsPlan

T = TypeVar("T")


class GuardedRoads:
    """One lead's; all that it asks of `Roads` goes through here."""

    def __init__(self, me: str, settings: NetworkSettings, peers: NodesHere) -> None:
        self._roads = Roads(me, settings, peers)
        self._notes: list[Note] = []
        self._is_off = False

    def _do(self, work: Callable[[], T], otherwise: T) -> T:
        if self._is_off:
            return otherwise
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - a bug costs the plan, never the run
            self._is_off = True
            text = f"a bug of ftrun: no plan of roads: {type(error).__name__}: {error}"
            self._notes.append(Note("RoadsBug", text, say=True))
            return otherwise

    @property
    def plan(self) -> RoadsPlan | None:
        return self._roads.plan

    @property
    def wish(self) -> str:
        return "" if self._is_off else self._roads.wish

    def hold_up(
        self, cards: Sequence[NodeCard], previous: Plan | None, *, now_s: float
    ) -> list[Command] | None:
        return self._do(lambda: self._roads.hold_up(cards, previous, now_s=now_s), None)

    def decide(
        self, members: Sequence[NodeCard], spares: Sequence[NodeCard], previous: Plan | None
    ) -> RoadsPlan | None:
        return self._do(lambda: self._roads.decide(members, spares, previous), None)

    def begin(self) -> None:
        self._do(self._roads.begin, None)

    def told(
        self, sender: str, body: RoadWord, watching: Watching, *, now_s: float
    ) -> list[Command]:
        if isinstance(body, ProbeFound):  # the monitor's, with or without a plan of roads
            watching.slow.probed(body, now_s=now_s)
            return []
        if isinstance(body, RoadTried) and body.survey < 0:
            return [*watching.pairs.tried(sender, body, now_s=now_s)]
        return self._do(lambda: self._roads.told(sender, body, now_s=now_s), [])

    def lost(self, node_id: str) -> None:
        self._do(lambda: self._roads.lost(node_id), None)

    def look(self, plan: Plan, slow: SlowWatch, *, now_s: float) -> list[Command]:
        return self._do(lambda: self._roads.look(plan, slow, now_s=now_s), [])

    def take_urgent(self) -> str:
        return self._do(self._roads.take_urgent, "")

    def take_notes(self) -> list[Note]:
        notes, self._notes = self._notes, []
        return [*self._roads.take_notes(), *notes]

    def know(self, cards: Sequence[NodeCard]) -> None:
        self._do(lambda: self._roads.know(cards), None)

    def status(self, plan: Plan | None, *, now_s: float) -> dict[str, Any] | None:
        return self._do(lambda: self._roads.status(plan, now_s=now_s), None)
