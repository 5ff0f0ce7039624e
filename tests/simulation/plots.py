"""Sequences of faults that random faults rarely produce, each against one rule of the protocol.

forgotten   a node is cut off and replaced; when it returns, it meets only agents of its replacement
            that have lost their memory: those have no vote
outvoted    all members of a generation are cut off from a majority of spares; the spares restart
            from a checkpoint, and the ranks of the members could continue; the members may meet
            spares that have lost their memory
unexpected  the endpoint's node loses its memory, and returns while the run continues
unfinished  a node is cut off while the others protect the version they start from; when they
            continue without it, one of them loses its memory: at most m nodes have lost any
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ftrun.wire.cluster.generation import GenerationPlan

if TYPE_CHECKING:
    from simulation.faults import Faults
    from simulation.node import Node

PLOTS = {"forgotten": 0.04, "outvoted": 0.02, "unexpected": 0.02, "unfinished": 0.02}
"""Probability of each sequence."""
LASTS_S = 30.0
"""A run with a plot runs for this time before its faults end."""
_BEGINS_S = 5.0
_POLL_S = 0.05


class Plots:
    """The sequence of one run, if it has one."""

    def __init__(self, faults: "Faults") -> None:
        self._faults = faults
        self._simulation = faults.simulation
        self._world = faults.world
        self._random = faults.random
        self._plots: dict[str, Callable[[GenerationPlan], None]] = {
            "forgotten": self._forgotten,
            "outvoted": self._outvoted,
            "unexpected": self._unexpected,
            "unfinished": self._unfinished,
        }

    def begin(self, name: str) -> None:
        self._world.after(_BEGINS_S + 3 * self._random.random(), self._start, name)

    def _start(self, name: str) -> None:
        newest = self._simulation.invariants.newest
        if self._faults.are_over:
            return
        if newest is None or len(self._voters(newest)) < 2:
            self._world.after(_POLL_S, self._start, name)
        else:
            self._faults.note(f"plot {name}", None)
            self._plots[name](newest)

    # --- plots --------------------------------------------------------------------------------

    def _forgotten(self, plan: GenerationPlan) -> None:
        voters = self._voters(plan)
        leader = self._simulation.network.nodes[plan.leader]
        stale = leader if self._random.random() < 0.5 else self._random.choice(voters)
        rest = [node for node in self._nodes() if node is not stale]
        self._faults.cut("cut off", stale, [stale], rest, for_s=LASTS_S)
        self._await_next(plan, [stale], self._random.random() * 2)

    def _await_next(self, plan: GenerationPlan, stale: list["Node"], later_s: float) -> None:
        """The others have continued without these nodes: some of the others lose their memory."""
        newest = self._simulation.invariants.newest
        if self._faults.are_over:
            return
        if newest is None or newest.generation == plan.generation:
            self._world.after(_POLL_S, self._await_next, plan, stale, later_s)
        else:
            self._world.after(later_s, self._meet_again, plan, stale)

    def _meet_again(self, plan: GenerationPlan, stale: list["Node"]) -> None:
        if self._faults.are_over:
            return
        voters = self._voters(plan)
        others = [node for node in voters if node not in stale]
        self._random.shuffle(others)
        if self._random.random() < 0.5:
            # With one stale node they would be a majority if they were the same incarnations.
            others = others[: len(voters) // 2]
        met = [*stale, *others]
        rest = [node for node in self._nodes() if node not in met]
        self._faults.revert_all()
        for node in met:
            self._faults.cut(f"only with ({stale[0].node_id})", node, [node], rest, for_s=LASTS_S)
        for node in others:
            self._faults.wipe(node)

    def _outvoted(self, plan: GenerationPlan) -> None:
        members = [self._simulation.network.nodes[one.node_id] for one in plan.members]
        rest = [node for node in self._nodes() if node not in members]
        self._faults.cut("members cut off", members[0], members, rest, for_s=LASTS_S)
        if self._random.random() < 0.5:
            self._await_next(plan, members, self._random.random() * 2)

    def _unexpected(self, plan: GenerationPlan) -> None:
        endpoint = self._nodes()[0]
        self._faults.wipe(endpoint)

    def _unfinished(self, plan: GenerationPlan) -> None:
        members = [self._simulation.network.nodes[one.node_id] for one in plan.members]
        if len(members) < 2:
            return  # the others are not fit
        self._faults.kill_rank(self._random.choice(members))
        self._on_plan_after(plan, self._random.uniform(0.3, 0.9), self._cut_off, members)

    def _cut_off(self, plan: GenerationPlan, members: list["Node"]) -> None:
        away, lost = self._random.sample(members, 2)
        rest = [node for node in self._nodes() if node is not away]
        self._faults.cut("cut off", away, [away], rest, for_s=9.0)
        self._on_plan_after(plan, self._random.uniform(0.2, 1.0), self._lose, lost)

    def _lose(self, plan: GenerationPlan, lost: "Node") -> None:
        self._faults.power_cycle(lost)

    def _on_plan_after(
        self, plan: GenerationPlan, later_s: float, what: Callable[..., None], *args: object
    ) -> None:
        """Runs the action this delay after some agent has accepted a newer plan."""
        newest = max(
            self._simulation.invariants.accepted.values(), key=lambda one: one.configuration_id
        )
        if self._faults.are_over:
            return
        if newest.generation == plan.generation:
            self._world.after(_POLL_S, self._on_plan_after, plan, later_s, what, *args)
        else:
            self._world.after(later_s, what, newest, *args)

    # --- details ------------------------------------------------------------------------------

    def _nodes(self) -> list["Node"]:
        return self._simulation.nodes

    def _voters(self, plan: GenerationPlan) -> list["Node"]:
        return [self._simulation.network.nodes[card.node_id] for card in plan.voters]
