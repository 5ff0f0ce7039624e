"""The outside witness: a register with compare-and-swap, a lease that expires, links that fail.

The rules are the real ones (recovery/witness_rules.py). An agent uses them as in a real run: it
reads, computes its answer, and writes it if the register is unchanged since the read.
"""

from random import Random
from typing import TYPE_CHECKING

from ftrun.membership.events import WitnessAnswered, WitnessRegister
from ftrun.membership.witness import WitnessDecision, rule
from ftrun.recovery.commands import QueryWitness
from ftrun.wire.cluster.generation import NodeCard

if TYPE_CHECKING:
    from simulation.node import Agent
    from simulation.run import Simulation

LEASE_S = 3.0
ANSWER_S = 1.5
"""An agent's request times out after this time."""


class WitnessModel:
    """One witness, which each node reaches or does not reach."""

    def __init__(self, simulation: "Simulation", random: Random) -> None:
        self.world = simulation.world
        self.is_up = True
        self.cut: set[str] = set()
        """Nodes that do not reach it."""
        self.swaps_anyway = False
        """It writes without the comparison; proves that the comparison is needed."""
        self.granted = 0
        self.refused = 0
        self._random = random
        self._register: WitnessRegister | None = None
        self._leader: NodeCard | None = None
        self._ends_s = -1.0
        self._revision = 0
        self._lives = 0

    def forget(self) -> None:
        self._register, self._leader = None, None
        self._revision += 1

    def ask(self, agent: "Agent", asked: QueryWitness) -> None:
        """A request is sent; its answer arrives, or the report that there is none."""
        self.world.after(self._delay_s(), self._read, agent, asked)

    def _delay_s(self) -> float:
        return 0.001 + 0.1 * self._random.random() ** 2

    def _reaches(self, agent: "Agent") -> bool:
        return self.is_up and agent.node.node_id not in self.cut

    def _no_answer(self, agent: "Agent", asked: QueryWitness) -> None:
        said = WitnessAnswered(asked, is_reached=False, reason="the witness is out of reach")
        self.world.after(ANSWER_S, agent.happens, said)

    def _current_leader(self) -> NodeCard | None:
        if self._leader is not None and self.world.now_s >= self._ends_s:
            self._leader = None
            self._revision += 1
        return self._leader

    def _read(self, agent: "Agent", asked: QueryWitness) -> None:
        if not self._reaches(agent):
            self._no_answer(agent, asked)
            return
        self._lives += 1
        leader = self._current_leader()
        ruling = rule(asked, agent.card, self._register, leader, new_life=7000 + self._lives)
        seen = WitnessAnswered(asked, True, ruling.granted, self._register, leader)
        self.world.after(self._delay_s() * 2, self._write, agent, ruling, self._revision, seen)

    def _write(
        self, agent: "Agent", ruling: WitnessDecision, read: int, seen: WitnessAnswered
    ) -> None:
        if not self._reaches(agent):
            self._no_answer(agent, seen.asked)
            return
        self._current_leader()
        if not ruling.granted:
            self.refused += 1
            self.world.after(self._delay_s(), self._report, agent, seen)
            return
        if read != self._revision and not self.swaps_anyway:
            self.world.after(self._delay_s(), self._read, agent, seen.asked)
            return
        self.granted += 1
        if (ruling.register, ruling.leader) != (self._register, self._leader):
            self._revision += 1
        self._register, self._leader = ruling.register, ruling.leader
        if ruling.leader is not None and ruling.leader.identity == agent.card.identity:
            self._ends_s = self.world.now_s + LEASE_S
        said = WitnessAnswered(seen.asked, True, True, self._register, self._leader)
        # The answer may be lost in transit, although the request was executed.
        self.world.after(self._delay_s(), self._report, agent, said)

    def _report(self, agent: "Agent", said: WitnessAnswered) -> None:
        if not self._reaches(agent):
            reason = "the witness is out of reach"
            said = WitnessAnswered(said.asked, is_reached=False, reason=reason)
        agent.happens(said)
