"""A connection that moves to another rail costs no step.

For a second, data in transit in both directions is lost without notice. Then both ends have another
connection, and neither received the end of the first one. This happens when a rail is cut
(ftrun/agent/cluster/dialing.py). The protocol must tolerate it at any moment. A run without other
faults must not be affected.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from simulation.network import End, Network
from simulation.run import Simulation
from simulation.scenario import MODES, draw
from simulation.world import World

SEEDS = [range(60), pytest.param(range(60, 150), marks=pytest.mark.full)]
OFTEN_MOVED = (153, 239, 413, 833)
"""Connections to new nodes use another rail more often than every `last_call_timeout_s`."""

CUT_S = (0.3, 1.1)
"""From the cut until the other rail is in use."""

PAUSE_S = (0.2, 1.5)
LAST_LINES = 40


class RailedNetwork(Network):
    """Sometimes one connection is replaced over another rail."""

    def __init__(self, world: World, *, unruly: float) -> None:
        super().__init__(world, unruly=unruly)
        self.num_moved = 0
        self._cut: set[End] = set()
        self._chance = world.stream("rails")
        self._later(PAUSE_S, self._strike)

    def _later(self, span_s: tuple[float, float], what: Callable[..., None], *args: Any) -> None:
        self.world.after(self._chance.uniform(*span_s), what, *args)

    def _strike(self) -> None:
        ends = [
            end
            for _, node in sorted(self.nodes.items())
            if node.agent is not None and node.agent.is_alive
            for _, end in sorted(node.agent.ends.items())
        ]
        if ends:
            end = self._chance.choice(ends)
            self._cut |= {end, end.peer}
            self._later(CUT_S, self._move, end)
        self._later(PAUSE_S, self._strike)

    def _move(self, end: End) -> None:
        """Both ends are alive and receive from each other over the other rail."""
        self._cut -= {end, end.peer}
        here, there = end.agent, end.peer.agent
        names = here.node.node_id, there.node.node_id
        is_whole = here.ends.get(names[1]) is end and there.ends.get(names[0]) is end.peer
        if not is_whole or here.is_frozen or there.is_frozen:
            return
        if not self.connects(*names):
            return
        end.is_open = end.peer.is_open = False
        ours, theirs = End(here), End(there)
        ours.peer, theirs.peer = theirs, ours
        self.num_moved += 1
        self.world.trace(names[0], f"*** another rail to {names[1]}")
        self._opened(theirs)
        self.world.after(self.delay_s(*names), self._take_over, ours)

    def _take_over(self, end: End) -> None:
        if not end.agent.is_alive:
            self._reset(end.peer)
        else:
            self._opened(end)

    def _send(self, end: End, data: bytes) -> None:
        if end not in self._cut:
            super()._send(end, data)

    def _deliver(self, end: End, data: bytes) -> None:
        if end not in self._cut:
            super()._deliver(end, data)


def run_of(seed: int, mode: str, *, is_quiet: bool) -> tuple[Simulation, RailedNetwork]:
    """A run without a violation. `is_quiet`: the only faults are cut rails."""
    scenario = draw(seed, mode)
    if is_quiet:
        quiet: dict[str, Any] = {"num_faults": 0, "num_left_off": 0, "late_nodes": 0, "plot": ""}
        scenario = replace(scenario, **quiet, unruly=0.0)
    simulation = Simulation(seed, mode, scenario=scenario, network=RailedNetwork)
    simulation.faults.are_over = is_quiet
    network = simulation.network
    assert isinstance(network, RailedNetwork)
    try:
        simulation.run()
    except Exception as error:  # noqa: BLE001 - the seed of any error must be reported
        lines = "\n".join(list(simulation.world.log)[-LAST_LINES:])
        pytest.fail(f"seed {seed}, {mode}: {error!r}\n{lines}")
    return simulation, network


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_rails_cut_at_any_moment_cause_no_violation(seeds: range) -> None:
    moved = 0
    for seed in seeds:
        for mode in MODES:
            _, network = run_of(seed, mode, is_quiet=False)
            moved += network.num_moved
    assert moved > 10 * len(seeds)


@pytest.mark.parametrize("seed", OFTEN_MOVED)
def test_a_joining_node_is_accepted_for_any_number_of_rail_changes(seed: int) -> None:
    for mode in MODES:
        run_of(seed, mode, is_quiet=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_a_run_in_which_only_rails_are_cut_has_one_generation(seeds: range) -> None:
    moved = 0
    for seed in seeds[: len(seeds) // 2]:
        simulation, network = run_of(seed, "liveness", is_quiet=True)
        plans = simulation.invariants.chosen
        assert len(plans) == 1, (seed, [plan.reason for plan in plans.values()])
        assert simulation.invariants.steps
        moved += network.num_moved
    assert moved > 10 * (len(seeds) // 2)
