"""The next leader, as seen by an agent that has lost its leader.

Runs in:  every agent. Pure.
Takes in: the newest known plan, agents that do not answer.
Gives:    the next agent in the succession; every agent has the same order.
"""

from ftrun.wire.cluster.generation import GenerationPlan, NodeCard

ASKED_AT_ONCE = 8
"""Number of agents that a restarted agent asks for the leader."""


class LeaderSuccession:
    """The search for the next leader."""

    def __init__(self, me: NodeCard) -> None:
        self._me = me
        self.lost: set[str] = set()
        """Nodes that do not answer, or whose kernels report that no agent is running."""
        self.refused: set[str] = set()
        """Nodes of `lost` whose kernels refused the connection."""

    def found(self) -> None:
        self.lost.clear()
        self.refused.clear()

    def lose(self, card: NodeCard | None, *, refused: bool = False) -> None:
        if card is not None and card.node_id != self._me.node_id:
            self.lost.add(card.node_id)
            if refused:
                self.refused.add(card.node_id)

    def next(self, plan: GenerationPlan | None) -> NodeCard | None:
        order = plan.voters if plan is not None else []
        left = (card for card in order if card.node_id not in self.lost)
        card = next(left, None)
        if card is not None and card.node_id == self._me.node_id:
            return self._me
        return card

    def acquaintances(self, plan: GenerationPlan | None) -> list[NodeCard]:
        """The agents to ask for the leader: the last known leader, then the succession."""
        if plan is None:
            return []
        others = [card for card in plan.voters if card.node_id != self._me.node_id]
        return sorted(others, key=lambda card: card.node_id != plan.lead)[:ASKED_AT_ONCE]


def place_of(node_id: str, plan: GenerationPlan | None) -> int:
    """Position of a node in the succession; after all others if it has none."""
    order = [card.node_id for card in plan.voters] if plan is not None else []
    return order.index(node_id) if node_id in order else len(order)
