"""Faults and their times, drawn from the seed. Some occur at the worst moments."""

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from ftrun.recovery import commands as do
from simulation.plots import Plots

if TYPE_CHECKING:
    from simulation.node import Node
    from simulation.run import Simulation

_FIRST_S = 3.0
_ANYWHERE = (do.Quiesce, do.InstallGeneration, do.StartRanks, do.CommitSnapshot, do.KillWorkers)


class Faults:
    """The schedule of one run."""

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.random = simulation.world.stream("faults")
        self.are_over = False
        self.has_random = True
        """Whether faults occur that no test injects."""
        self.counts: dict[str, int] = {}
        self.resets: Random | None = None
        """Decides which cuts are firewalls that refuse connections; None: no cut is a firewall."""
        self._resets = simulation.world.stream("resets")
        self._resets_s = self._resets.choice((0.0, 0.0, 0.0, 0.1, 0.4))
        """Seconds between resets of connections between SMPs; 0: none."""
        self._triggers = self.random.choice((0.0, 0.0, 0.01, 0.03))
        self._kinds: list[tuple[int, Callable[[Node], None]]] = [
            (6, self.kill_agent),
            (5, self.kill_rank),
            (3, self.kill_smp),
            (4, self.power_cycle),
            (2, self.power_off),
            (2, self.wipe),
            (3, self.freeze_agent),
            (2, self.freeze_node),
            (3, self.cut_off),
            (2, self.cut_pair),
            (2, self.cut_one_way),
            (1, self.split),
            (1, self.slow_down),
            (2, self.flip),
            (1, self.kill_agent_and_smp),
            (2, self.two_at_once),
            (3, self.stale_rejoin),
            (2, self.forget),
            (3, self.ask_to_leave),
        ]
        if simulation.scenario.mode == "safety":
            self._kinds.append((1, self.ask_stop))

    def add_kind(self, weight: int, kind: "Callable[[Node], None]") -> None:
        self._kinds.append((weight, kind))

    def begin(self) -> None:
        scenario = self.simulation.scenario
        span_s = scenario.faults_end_s - _FIRST_S
        for _ in range(scenario.num_faults):
            self.world.after(_FIRST_S + span_s * self.random.random(), self.strike)
        if scenario.plot:
            Plots(self).begin(scenario.plot)
        self.world.after(scenario.faults_end_s, self.end)
        if self._resets_s and self.has_random:
            self.world.after(_FIRST_S, self._reset_links)

    def _reset_links(self) -> None:
        """Resets a connection between two SMPs from time to time. No other process notices."""
        if self.are_over:
            return
        random = self._resets
        smps = [node.smp for node in self._nodes() if node.smp is not None and node.is_running]
        links = [link for smp in smps if smp.is_alive for link in smp.peers.links]
        if links:
            link = random.choice(links)
            link.peers.smp.run(link.reset)
            self.counts["reset a link"] = self.counts.get("reset a link", 0) + 1
        self.world.after(self._resets_s * random.uniform(0.2, 1.8), self._reset_links)

    def strike(self) -> None:
        """Injects one fault at a random node."""
        if not self.are_over:
            nodes = self._nodes()
            # The leader and the node of the endpoint fail more often than others.
            picks = [*nodes, *(node for node in nodes if node.is_endpoint or _leads(node))]
            self.hit(self.random.choice(picks))

    def hit(self, node: "Node") -> None:
        weights = [weight for weight, _ in self._kinds]
        self.random.choices([kind for _, kind in self._kinds], weights)[0](node)

    def on_command(self, node: "Node", command: do.NodeCommand) -> None:
        """May inject a fault at the moment when a node executes a command."""
        if (
            not self._triggers
            or not self.has_random
            or self.are_over
            or not isinstance(command, _ANYWHERE)
        ):
            return
        if self.random.random() < self._triggers:
            struck = node if self.random.random() < 0.5 else self.random.choice(self._nodes())
            delay_s = self.random.choice((0.0, 0.01, 0.2))
            self.world.after(delay_s, self._hit_later, struck)

    def _hit_later(self, node: "Node") -> None:
        if not self.are_over:
            self.hit(node)

    def end(self) -> None:
        """No faults occur from now on, and everything that can be repaired is repaired."""
        self.are_over = True
        self.note("faults end", None)
        network = self.simulation.network
        network.cuts.clear()
        network.refused.clear()
        network.slow.clear()
        left_off = self.random.sample(
            [node.node_id for node in self._nodes()],
            min(self.simulation.scenario.num_left_off, len(self._nodes()) - 1),
        )
        for node in self._nodes():
            if node.is_on and node.is_frozen:
                node.thaw()
            if node.agent is not None and node.agent.is_frozen:
                node.agent.thaw()
            if node.node_id in left_off:
                if node.is_on and node.exit is None:
                    self.note("stays off", node)
                    node.power_off()
            elif not node.is_on:
                node.boot(self.random.random() * 2)

    # --- kinds --------------------------------------------------------------------------------

    def kill_agent(self, node: "Node") -> None:
        if node.agent is not None:
            self.note("kill agent", node)
            node.kill_agent(restart_s=0.3 + 3 * self.random.random())

    def kill_agent_and_smp(self, node: "Node") -> None:
        if node.agent is not None:
            self.note("kill agent and SMP", node)
            node.kill_agent(restart_s=0.3 + 3 * self.random.random())
            node.kill_smp()

    def kill_rank(self, node: "Node") -> None:
        ranks = node.ranks
        if ranks is not None and ranks.are_alive:
            self.note("kill a rank", node)
            ranks.group.fail(ranks)

    def kill_smp(self, node: "Node") -> None:
        self.note("kill SMP", node)
        node.kill_smp()

    def power_cycle(self, node: "Node") -> None:
        if node.is_on:
            self.note("power off and on", node)
            node.power_off()
            self.world.after(0.2 + 6 * self.random.random(), self._boot, node)

    def power_off(self, node: "Node") -> None:
        if node.is_on:
            self.note("power off", node)
            node.power_off()

    def wipe(self, node: "Node") -> None:
        if node.is_on and node.exit is None:
            self.note("kill stub, agent and SMP", node)
            node.wipe()
            node.boot(1 + 4 * self.random.random())

    def freeze_agent(self, node: "Node") -> None:
        agent = node.agent
        if agent is not None and not agent.is_frozen:
            self.note("freeze agent", node)
            agent.freeze()
            self.world.after(self._a_while_s(), self._thaw_agent, agent)

    def freeze_node(self, node: "Node") -> None:
        if node.is_running:
            self.note("freeze node", node)
            node.freeze()
            self.world.after(self._a_while_s(), self._thaw_node, node)

    def cut_off(self, node: "Node") -> None:
        self.cut("cut off", node, [node], [one for one in self._nodes() if one is not node])

    def cut_pair(self, node: "Node") -> None:
        other = self.random.choice(self._nodes())
        if other is not node:
            self._cut(f"cut from ({other.node_id})", node, both(node, other))

    def cut_one_way(self, node: "Node") -> None:
        others = [other for other in self._nodes() if other is not node]
        is_out = self.random.random() < 0.5
        if others and self.random.random() < 0.5:
            others = [self.random.choice(others)]
        pairs = [(node.node_id, other.node_id) for other in others]
        pairs = pairs if is_out else [(b, a) for a, b in pairs]
        self._cut(f"cut one way {'out' if is_out else 'in'} ({len(pairs)})", node, pairs)

    def split(self, node: "Node") -> None:
        side = [other for other in self._nodes() if other is node or self.random.random() < 0.5]
        rest = [other for other in self._nodes() if other not in side]
        self.cut(f"split off ({' '.join(one.node_id for one in side)})", node, side, rest)

    def slow_down(self, node: "Node") -> None:
        self.note("slow links", node)
        for other in self._nodes():
            for pair in both(node, other):
                self.simulation.network.slow[pair] = 0.6

    def flip(self, node: "Node") -> None:
        """Flips bits in the memory of a node."""
        memory = node.memory
        things = [*memory.slots, *memory.parts]
        if not things:
            return
        thing = self.random.choice(things)
        self.note(f"flip bits ({thing.version})", node)
        self.simulation.invariants.memory_lost(node)
        thing.corrupt(self.random)

    def two_at_once(self, node: "Node") -> None:
        self.hit(node)
        self.hit(self.random.choice(self._nodes()))

    def stale_rejoin(self, node: "Node") -> None:
        """A node is unreachable while the run continues. It returns before the next ballot."""
        self.cut_off(node)
        delay_s = 3.5 + 3 * self.random.random()
        self.world.after(delay_s, self.revert_all)
        self.world.after(delay_s + 1.5 * self.random.random(), self._kill_any_rank)

    def forget(self, node: "Node") -> None:
        """The leader is cut off and replaced. When it returns, it meets only restarted agents."""
        nodes = self._nodes()
        leader = next((one for one in nodes if _leads(one)), None)
        others = [one for one in nodes if one is not leader]
        if leader is None or not others:
            return
        self.cut_off(leader)
        forgetful = self.random.choice(others)
        self.world.after(4 + 2 * self.random.random(), self._meet_again, leader, forgetful)

    def _meet_again(self, leader: "Node", forgetful: "Node") -> None:
        if self.are_over:
            return
        self.revert_all()
        rest = [one for one in self._nodes() if one not in (leader, forgetful)]
        self.cut(f"only with ({leader.node_id})", forgetful, [leader, forgetful], rest)
        self.wipe(forgetful)

    def ask_stop(self, node: "Node") -> None:
        if self.world.now_s > self.simulation.scenario.faults_end_s / 2:
            self.note("SIGTERM", node)
            self.simulation.stops[node.node_id] = self.simulation.stops.get(node.node_id, 0) + 1
            node.send(is_urgent=True)

    def ask_to_leave(self, node: "Node") -> None:
        """Sends SIGTERM to one node: the run continues, or stops if too few nodes are left."""
        agent = node.agent
        if agent is None or agent.leaves_since_s is not None:
            return
        others = [one.agent for one in self._nodes() if one is not node and one.agent is not None]
        left = sum(other.leaves_since_s is None for other in others)
        if (
            left >= self.simulation.scenario.settings.cluster_size.min_nodes
            or self.random.random() < 0.2
        ):
            self.note("drain", node)
            agent.leaves_since_s = self.world.now_s
            node.send(is_urgent=True)

    def has_left(self, node: "Node") -> None:
        """A machine replaces it after a while, with empty memory."""
        self.note("has left", node)
        node.boot(0.5 + 6 * self.random.random())

    # --- details ------------------------------------------------------------------------------

    def cut(
        self,
        what: str,
        node: "Node",
        side: list["Node"],
        rest: list["Node"],
        *,
        for_s: float | None = None,
    ) -> None:
        """Drops all packets between the two sides."""
        pairs = [pair for one in side for other in rest for pair in both(one, other)]
        self._cut(what, node, pairs, for_s=for_s)

    def _cut(
        self, what: str, node: "Node", pairs: list[tuple[str, str]], *, for_s: float | None = None
    ) -> None:
        self.note(what, node)
        cuts = self.simulation.network.cuts
        new = [pair for pair in pairs if pair not in cuts]
        cuts.update(new)
        if self.resets is not None and self.resets.random() < 0.5:
            self.note("a firewall refuses", node)
            self.simulation.network.refuse(new)
        self.world.after(self._a_while_s() if for_s is None else for_s, self._heal, new)

    def _heal(self, pairs: list[tuple[str, str]]) -> None:
        if not self.are_over:
            self.note(f"heal ({len(pairs)} links)", None)
            self.simulation.network.cuts.difference_update(pairs)
            self.simulation.network.refused.difference_update(pairs)

    def revert_all(self) -> None:
        self._heal(sorted(self.simulation.network.cuts))

    def _kill_any_rank(self) -> None:
        ranks = [node for node in self._nodes() if node.ranks is not None]
        if ranks and not self.are_over:
            self.kill_rank(self.random.choice(ranks))

    def _thaw_agent(self, agent: "object") -> None:
        if not self.are_over:
            self.note("thaw agent", None)
            agent.thaw()  # type: ignore[attr-defined]

    def _thaw_node(self, node: "Node") -> None:
        if not self.are_over:
            self.note("thaw node", node)
            node.thaw()

    def _boot(self, node: "Node") -> None:
        if not self.are_over and not node.is_on:
            self.note("power on", node)
            node.boot(0.3 + 2 * self.random.random())

    def _a_while_s(self) -> float:
        return self.random.choice((0.7, 2.2, 3.5, 6.0, 12.0)) * (0.8 + 0.4 * self.random.random())

    def _nodes(self) -> list["Node"]:
        return self.simulation.nodes

    def note(self, what: str, node: "Node | None") -> None:
        key = what.split(" (")[0]
        self.counts[key] = self.counts.get(key, 0) + 1
        self.simulation.invariants.stable_since_s = self.world.now_s
        self.world.trace(node.node_id if node is not None else "-", f"*** {what}")


def both(one: "Node", other: "Node") -> list[tuple[str, str]]:
    if one is other:
        return []
    return [(one.node_id, other.node_id), (other.node_id, one.node_id)]


def _leads(node: "Node") -> bool:
    return node.agent is not None and node.agent.member.leader is not None
