"""Where an agent's decisions are made: its membership, and the lead's supervisor within it.

Runs in:  agent. In a run on one node in the main thread; in one over several in the thread that
          speaks with the other nodes, which never waits for anything a node does.
Takes in: happenings, from the hands (the main thread) and from the network.
Gives:    orders for the hands, in a queue; what goes to the network to whoever carries it there.

Rule 1: the member is touched by one thread only. The hands hand over events, and take orders.
"""

from collections.abc import Callable
from queue import Empty, SimpleQueue

from ftrun import clock
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
from ftrun.recovery.settings import MembershipSettings
from ftrun.recovery.supervisor import Policy, SupervisorState
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard

NetworkCommand = Connect | Send | Disconnect


class ControlLoop:
    """Decides for one node; and, while it leads, for the run."""

    def __init__(
        self,
        me: NodeCard,
        settings: MembershipSettings,
        policy: Policy,
        *,
        kept: GenerationPlan | None,
        took_effect: bool,
    ) -> None:
        self.settings = settings
        self.orders: SimpleQueue[NodeCommand] = SimpleQueue()
        self.oversight = GenerationMonitor(policy, settings, me.node_id, pairs=PairCheck())
        """The newest one; it counts only while this agent leads."""
        self.check_again: Callable[[int], None] = _nobody
        """Begins a check of this node, up to this number; never waits."""
        self.ask_witness: Callable[[QueryWitness], None] = _no_witness
        """Takes a question for the outside witness; never waits."""
        self.try_road: Callable[[ProbePath], None] = _no_roads
        """Tries a road from this node; never waits."""
        self._policy = policy
        self._me = me.node_id
        self.member = Member(
            me,
            settings,
            self._new_oversight,
            now_s=clock.now_s(),
            kept=kept,
            took_effect=took_effect,
        )

    # --- the hands' side ----------------------------------------------------------------------

    def tell(self, event: Happening) -> None:
        """Something has happened on this node."""
        self.think(event)

    def passing(self) -> None:
        """Let the brain see the time; needed only where it has no thread of its own."""
        self.think(Passing())

    def next_order(self) -> NodeCommand | None:
        try:
            return self.orders.get_nowait()
        except Empty:
            return None

    @property
    def plan(self) -> GenerationPlan | None:
        """The newest generation that has taken effect, as far as this node knows."""
        return self.member.follower.plan

    @property
    def leads(self) -> bool:
        return self.member.lead is not None

    def card_of(self, node_id: str) -> NodeCard | None:
        """The newest card of a node, as far as this agent has one. For the brain's own thread."""
        member = self.member
        peer = member.lead.known.get(node_id) if member.lead is not None else None
        if peer is not None:
            return peer.card
        card = member.lead_card
        if card is not None and card.node_id == node_id:
            return card
        plan = member.follower.newest_plan
        return plan.card(node_id) if plan is not None else None

    @property
    def is_hurried(self) -> bool:
        """Something is due sooner than the next tick of a quiet run."""
        return self.oversight.supervisor.state is SupervisorState.LAST_SNAPSHOT

    def close(self) -> None:
        """The run is over on this node."""

    # --- deciding -----------------------------------------------------------------------------

    def think(self, event: Happening) -> list[NetworkCommand]:
        """Decide; give the hands their orders. What is for the network is the caller's.

        For the brain's own thread.
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
        self.oversight = GenerationMonitor(self._policy, self.settings, self._me, pairs=PairCheck())
        return self.oversight


def _nobody(_: int) -> None:
    """A run on one node asks for no checks."""


def _no_roads(_: ProbePath) -> None:
    """A run on one node has none."""


def _no_witness(_: QueryWitness) -> None:
    """Most runs have none."""


Wake = Callable[[], None]
"""Have the hands look at their orders now."""
