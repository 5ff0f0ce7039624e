"""Faults in addition to crashes and cuts; in separate worlds, so that other seeds stay the same.

clocks        the monotonic clock of each node runs at 0.9 to 1.1 of the rate
leftovers     ranks outlive their agent, behind a wrapper; the stub or the next agent ends them
stuck         ranks cannot be killed for a while, as in an uninterruptible system call
threads       a single thread of an agent dies: the ranks are suspended, the agent ends, the stub
              starts another agent
refusals      a firewall resets the connections between two nodes, and refuses new ones
agents        all agents of the members are stopped, and their ranks are not
intervals     the ranks of a node receive a new interval late: they pass a step of which others take
              a snapshot, and do not report it
checkpoints   a checkpoint cannot be loaded on some nodes
"""

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from simulation.faults import both

if TYPE_CHECKING:
    from simulation.node import Node
    from simulation.run import Simulation

FIRST_S = 4.0
SLOWEST, FASTEST = 0.9, 1.1
STUB_KILLS_S = 0.03
"""The stub ends the processes that an agent has left within this time."""


def has_mishaps(simulation: "Simulation") -> None:
    Mishaps(simulation).begin()


class Mishaps:
    """The mishaps of one world."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._world = simulation.world
        self._faults = simulation.faults
        self._random = Random(f"{simulation.world.seed}/mishaps/{simulation.scenario.mode}")
        self._kinds: list[Callable[[Node], None]] = [
            self._agents_stop,
            self._interval_is_late,
            self._leftovers,
            self._refusals,
            self._stuck,
            self._thread_dies,
        ]

    def begin(self) -> None:
        random, scenario = self._random, self._simulation.scenario
        if random.random() < 0.7:
            for node in self._simulation.nodes:
                node.clock_rate = random.uniform(SLOWEST, FASTEST)
        self._simulation.bad_loads = random.choice((0.0, 0.2, 0.5))
        span_s = scenario.faults_end_s - FIRST_S
        for _ in range(random.choice((0, 1, 1, 2, 3))):
            self._world.after(FIRST_S + span_s * random.random(), self._strike)
        self._world.after(scenario.faults_end_s, self._end)

    def _strike(self) -> None:
        if not self._faults.are_over:
            node = self._random.choice(self._simulation.nodes)
            self._random.choice(self._kinds)(node)

    def _end(self) -> None:
        self._simulation.network.refusing.clear()
        for node in self._simulation.nodes:
            node.stuck_until_s = min(node.stuck_until_s, self._world.now_s)

    # --- kinds ----------------------------------------------------------------------------------

    def _agents_stop(self, node: "Node") -> None:
        newest = self._simulation.invariants.newest
        if newest is None:
            return
        self._faults.note("agents of all members stop", None)
        for member in newest.members:
            agent = self._simulation.network.nodes[member.node_id].agent
            if agent is not None and not agent.is_frozen:
                agent.freeze()
                # Agents that are still stopped when the faults end resume then.
                self._world.after(self._random.choice((2.5, 6.0, 12.0)), self._thaw, agent)

    def _interval_is_late(self, node: "Node") -> None:
        if node.ranks is not None:
            self._faults.note("receives an interval late", node)
            node.ranks.passes = self._random.choice((1, 2))

    def _thaw(self, agent: object) -> None:
        if not self._faults.are_over:
            agent.thaw()  # type: ignore[attr-defined]

    def _leftovers(self, node: "Node") -> None:
        if node.agent is not None and node.ranks is not None:
            self._faults.note("kill agent, and its ranks live on", node)
            node.keeps_ranks_s = STUB_KILLS_S * self._random.random()
            node.kill_agent(restart_s=0.3 + 3 * self._random.random())

    def _stuck(self, node: "Node") -> None:
        if node.ranks is not None:
            self._faults.note("ranks cannot be killed", node)
            node.stuck_until_s = self._world.now_s + self._random.choice((1.0, 4.0, 10.0))

    def _thread_dies(self, node: "Node") -> None:
        agent = node.agent
        if agent is None:
            return
        self._faults.note("a thread of the agent dies", node)
        agent.is_frozen = True
        if node.ranks is not None:
            node.ranks.are_suspended = True
        node.later(0.02 + 0.2 * self._random.random(), self._ends, node, agent)

    def _ends(self, node: "Node", agent: object) -> None:
        if node.agent is agent:
            node.kill_agent(restart_s=0.3 + self._random.random())

    def _refusals(self, node: "Node") -> None:
        others = [other for other in self._simulation.nodes if other is not node]
        if not others:
            return
        chosen = others if self._random.random() < 0.5 else [self._random.choice(others)]
        pairs = [pair for other in chosen for pair in both(node, other)]
        self._faults.note(f"refuses ({len(chosen)})", node)
        network = self._simulation.network
        network.refusing.update(pairs)
        for one, other in pairs:
            agent = network.nodes[one].agent
            if agent is not None:
                network.reset(agent, other)
        self._world.after(self._random.choice((0.7, 3.5, 8.0)), self._accept, pairs)

    def _accept(self, pairs: list[tuple[str, str]]) -> None:
        self._simulation.network.refusing.difference_update(pairs)
