"""Who leads next, as one agent sees it that has lost its lead.

Runs in:  every agent. Pure.
Takes in: the newest plan that it knows, who does not answer.
Gives:    the next agent in order; every agent knows the same order.
"""

from ftrun.wire.cluster.generation import GenerationPlan, NodeCard

ASKED_AT_ONCE = 8
"""An agent that was started again asks so many others who leads."""


class LeaderSuccession:
    """The search for the next lead."""

    def __init__(self, me: NodeCard) -> None:
        self._me = me
        self.lost: set[str] = set()
        """Nodes that do not answer, or whose kernels say that no agent is there."""
        self.refused: set[str] = set()
        """The latter."""

    def found(self) -> None:
        """There is a lead again."""
        self.lost.clear()
        self.refused.clear()

    def lose(self, card: NodeCard | None, *, refused: bool = False) -> None:
        if card is not None and card.node_id != self._me.node_id:
            self.lost.add(card.node_id)
            if refused:
                self.refused.add(card.node_id)

    def next(self, plan: GenerationPlan | None) -> NodeCard | None:
        """The next in order, which may be this agent; none where nobody is left."""
        order = plan.voters if plan is not None else []
        left = (card for card in order if card.node_id not in self.lost)
        card = next(left, None)
        if card is not None and card.node_id == self._me.node_id:
            return self._me
        return card

    def acquaintances(self, plan: GenerationPlan | None) -> list[NodeCard]:
        """Whom to ask who leads: the last lead that is known, and the first in order."""
        if plan is None:
            return []
        others = [card for card in plan.voters if card.node_id != self._me.node_id]
        return sorted(others, key=lambda card: card.node_id != plan.lead)[:ASKED_AT_ONCE]


def place_of(node_id: str, plan: GenerationPlan | None) -> int:
    """A node's place in the order; after all others where it has none."""
    order = [card.node_id for card in plan.voters] if plan is not None else []
    return order.index(node_id) if node_id in order else len(order)
