"""Rails of simulated nodes, and path probes, which take time, fail, are late, or never answer."""

from typing import TYPE_CHECKING

from ftrun.membership.events import MessageReceived
from ftrun.recovery.commands import ProbePath
from ftrun.wire.cluster.generation import PathMeasurement, Rail
from ftrun.wire.cluster.messages import ProbePathResult

if TYPE_CHECKING:
    from random import Random

    from simulation.node import Agent, Node


class PathProbes:
    """The rails and probes of a world in which every node has several rails."""

    def __init__(self, random: "Random", *, num_rails: int, failure_rate: float) -> None:
        self._random = random
        self._num_rails = num_rails
        self._failure_rate = failure_rate
        """Probability that a probe fails, is late or is never answered."""
        self.asked = 0

    def rails_of(self, node: "Node") -> list[Rail]:
        number = int(node.node_id[1:]) + 1
        return [
            Rail(f"eth{rail}", f"10.{rail}.0.{number}", 24, 29400)
            for rail in range(self._num_rails)
        ]

    def take(self, agent: "Agent", command: ProbePath) -> None:
        """A node probes a path; the node and the leader may die in the meantime."""
        self.asked += 1
        order, delay_s, problem = command.order, 0.01 + 0.03 * self._random.random(), ""
        if self._random.random() < self._failure_rate:
            what = self._random.randrange(3)
            if what == 0:
                return
            delay_s, problem = (0.4, "no answer") if what == 1 else (5 * self._random.random(), "")
        rate = 0.0 if problem else 1e8 * (0.1 + self._random.random())
        found = PathMeasurement(
            agent.node.node_id,
            order.destination,
            order.rail,
            0.0 if problem else 1e-4,
            rate,
            problem,
        )
        agent.node.later(
            delay_s, agent.call, self._answer, agent, command.asks, found, order.survey
        )

    def _answer(self, agent: "Agent", asks: str, found: PathMeasurement, survey: int) -> None:
        answer = ProbePathResult(survey, found)
        if asks == agent.node.node_id:
            agent.happens(MessageReceived(asks, answer))
        else:
            agent.node.network.send(agent, asks, answer)
