"""The control loop of an agent: its membership, and within it the supervisor of the leader.

Runs in:  agent. In a run on one node in the main thread; on several nodes in the cluster thread,
          which never waits for the work of a node.
Takes in: events, from the main thread and from the network.
Gives:    commands for the executor, in a queue; commands for the network, to its caller.

Rule 1: only one thread uses the member. The main thread hands over events, and takes commands.
"""

from collections.abc import Callable
from queue import Empty, SimpleQueue

from ftrun import clock
from ftrun.config.cluster import MembershipSettings
from ftrun.membership.events import Happening, Passing
from ftrun.membership.member import Member
from ftrun.network.failover.pair_check import PairCheck
from ftrun.recovery.commands import (
    Command,
    Connect,
    Disconnect,
    NodeCommand,
    ProbePath,
    QueryWitness,
    RepeatNodeCheck,
    Send,
)
from ftrun.recovery.generation_monitor import GenerationMonitor
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard

NetworkCommand = Connect | Send | Disconnect


class ControlLoop:
    """Decides for one node; and, while it leads, for the run."""

    def __init__(
        self,
        me: NodeCard,
        settings: MembershipSettings,
        *,
        kept: GenerationPlan | None,
        took_effect: bool,
    ) -> None:
        self.settings = settings
        self.orders: SimpleQueue[NodeCommand] = SimpleQueue()
        self.oversight = GenerationMonitor(settings, me.node_id, pairs=PairCheck())
        """The newest one; it counts only while this agent leads."""
        self.check_again: Callable[[int], None] = _nobody
        """Starts a check of this node with at least this number; never waits."""
        self.ask_witness: Callable[[QueryWitness], None] = _no_witness
        """Takes a query for the outside witness; never waits."""
        self.try_road: Callable[[ProbePath], None] = _no_roads
        """Probes a path from this node; never waits."""
        self._me = me.node_id
        self.member = Member(
            me,
            settings,
            self._new_oversight,
            now_s=clock.now_s(),
            kept=kept,
            took_effect=took_effect,
        )

    # --- for the executor -------------------------------------------------------------------------

    def tell(self, event: Happening) -> None:
        self.think(event)

    def passing(self) -> None:
        """Handle the time; needed only if the control loop has no thread of its own."""
        self.think(Passing())

    def next_order(self) -> NodeCommand | None:
        try:
            return self.orders.get_nowait()
        except Empty:
            return None

    @property
    def plan(self) -> GenerationPlan | None:
        """The newest chosen generation that was reported to this node."""
        return self.member.follower.plan

    @property
    def leads(self) -> bool:
        return self.member.lead is not None

    def card_of(self, node_id: str) -> NodeCard | None:
        """The newest known card of a node; in the control loop's own thread only."""
        member = self.member
        peer = member.lead.known.get(node_id) if member.lead is not None else None
        if peer is not None:
            return peer.card
        card = member.lead_card
        if card is not None and card.node_id == node_id:
            return card
        plan = member.follower.newest_plan
        return plan.card(node_id) if plan is not None else None

    def close(self) -> None:
        """Release the threads of the control loop; here it has none."""

    # --- deciding -----------------------------------------------------------------------------

    def think(self, event: Happening) -> list[NetworkCommand]:
        """Decide, queue the commands for the executor, and return those for the network.

        In the control loop's own thread only.
        """
        network: list[NetworkCommand] = []
        for command in self.member.handle(event, now_s=clock.now_s()):
            self._sort(command, network)
        return network

    def _sort(self, command: Command, network: list[NetworkCommand]) -> None:
        if isinstance(command, Connect | Send | Disconnect):
            network.append(command)
        elif isinstance(command, RepeatNodeCheck):
            self.check_again(command.number)
        elif isinstance(command, ProbePath):
            self.try_road(command)
        elif isinstance(command, QueryWitness):
            self.ask_witness(command)
        else:
            self.orders.put(command)

    def _new_oversight(self) -> GenerationMonitor:
        self.oversight = GenerationMonitor(self.settings, self._me, pairs=PairCheck())
        return self.oversight


def _nobody(_: int) -> None:
    """A run on one node needs no further checks."""


def _no_roads(_: ProbePath) -> None:
    """A run on one node has no paths."""


def _no_witness(_: QueryWitness) -> None:
    """Most runs have no witness."""


Wake = Callable[[], None]
"""Wakes the main thread so that it executes its commands now."""
