"""The faults of a soak: what breaks, on which node, and how it is repaired.

Takes in: a run, a source of random numbers. Gives: one injected fault, and its description.

A process is killed at any moment, also while the run recovers from a killed process. A node, a link
or a launcher fails only when the run reports that it survives the loss of any node.
"""

import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from bench_common import BenchError
from soak_run import SoakRun

OF_PROCESSES = ("rank", "smp", "zygote", "agent")
OF_NODES = ("stub", "node", "leader", "link")
KINDS = (*OF_PROCESSES, *OF_NODES)
BACK_S = 3.0
"""A machine or a launcher starts again within this time."""
FLAP_S = 1.8
"""Below the time after which a node without its leader suspends its ranks."""
CUT_S = 12.0
PAIR_CUT_S = 6.0
"""Below the time after which one end is excluded for an hour, and could not be a spare."""
PART_KILLS_MAX = 4
"""Of each part of one launcher: it restarts an agent, and an agent an SMP and a zygote, five
times in ten minutes, which no setting raises."""


@dataclass
class Kills:
    """Injects one fault after the other."""

    run: SoakRun
    chance: random.Random

    def __post_init__(self) -> None:
        self._parts_killed: Counter[tuple[str, int]] = Counter()
        """By part and node, since its launcher was started."""

    def kill(self, kind: str) -> str:
        """Inject a fault of this kind; its description. Raises: BenchError: it has no target."""
        acts: dict[str, Callable[[], str]] = {
            "stub": self._stub,
            "node": self._node,
            "leader": self._leader,
            "link": self._link,
        }
        return acts[kind]() if kind in acts else self._part(kind)

    # --- processes ------------------------------------------------------------------------------

    def _part(self, part: str) -> str:
        nodes = self.run.whole_nodes()
        if part != "rank":
            nodes = [n for n in nodes if self._parts_killed[part, n] < PART_KILLS_MAX] or nodes
        node = self._signal(part, nodes)
        self._parts_killed[part, node] += 1
        return f"node{node}"

    def _signal(self, part: str, nodes: list[int]) -> int:
        """SIGKILL this part of a node that has one now; the node."""
        found: list[int] = []

        def is_killed() -> bool:
            self.chance.shuffle(nodes)
            for node in nodes:
                with contextlib.suppress(BenchError, ProcessLookupError):
                    os.kill(self.run.pid_of(node, part), signal.SIGKILL)
                    found.append(node)
                    return True
            return False

        self.run.await_so(f"a {part} to kill", is_killed)
        return found[0]

    # --- nodes ----------------------------------------------------------------------------------

    def _stub(self) -> str:
        node = self.chance.choice(self.run.whole_nodes())
        self._comes_back(node)
        self.run.processes[node].kill()
        return f"node{node}"

    def _node(self) -> str:
        leader = self.run.leader()
        return self._take_away([node for node in self.run.whole_nodes() if node != leader])

    def _leader(self) -> str:
        leader = self.run.leader()
        return self._take_away([leader] if leader is not None else self.run.whole_nodes())

    def _take_away(self, nodes: list[int]) -> str:
        node = self.chance.choice(nodes)
        how = self.chance.choice(["kill", "reset"])
        self._comes_back(node)
        self.run.fault(how, node)
        return f"node{node} {'power-off' if how == 'kill' else 'reset'}"

    def _comes_back(self, node: int) -> None:
        for part in OF_PROCESSES:
            self._parts_killed[part, node] = 0
        self.run.comes_back(node, self.chance.uniform(0.0, BACK_S))

    # --- links ----------------------------------------------------------------------------------

    def _link(self) -> str:
        node, peer = self.chance.sample(self.run.whole_nodes(), 2)
        how = self.chance.choice(["flap", "cut", "pair"])
        if how == "pair":
            seconds = self.chance.uniform(0.2, PAIR_CUT_S)
            self.run.cluster.cut(node, peer=peer)
            self.run.do_later(node, seconds, lambda: self.run.cluster.heal(node, peer=peer))
            return f"node{node}-node{peer} for {seconds:.1f} s"
        longest_s = FLAP_S if how == "flap" else CUT_S
        seconds = self.chance.uniform(0.2, longest_s)
        self.run.cluster.cut(node)
        self.run.do_later(node, seconds, lambda: self.run.cluster.heal(node))
        return f"node{node} for {seconds:.1f} s"
