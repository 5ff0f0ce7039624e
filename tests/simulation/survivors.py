"""Worlds with `restart.survivors: on`; in separate worlds, so that other seeds stay the same.

A node's ranks park together, or all end: the processes of one node fail together here. A parked
process may be too late, may have a problem, may end before it is needed, and can go back only to
some of its steps.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from made_settings import changed

from ftrun.wire.cluster.membership import ParkedRank

if TYPE_CHECKING:
    from simulation.node import Node
    from simulation.run import Simulation
    from simulation.training import Ranks

MAX_RENEWALS = 3
_MORE_KILLS = 12
"""Weight of the death of a rank among the faults of these worlds."""


@dataclass(slots=True)
class RankProcesses:
    """The processes of one node's ranks, which may run several generations."""

    number: int
    renewals: int = 0
    first_step: int = 0
    """The oldest step that they can go back to."""
    is_parked: bool = False


def have_survivors(simulation: "Simulation") -> None:
    scenario = simulation.scenario
    settings = changed(scenario.settings, survivors="on", max_renewals=MAX_RENEWALS)
    simulation.scenario = replace(scenario, settings=settings, num_faults=scenario.num_faults + 3)
    faults = simulation.faults
    faults.add_kind(_MORE_KILLS, faults.kill_rank)
    simulation.parking = Parking(simulation)


class Parking:
    """How processes of ranks park."""

    def __init__(self, simulation: "Simulation") -> None:
        self.num_stays = 0
        """Nodes whose ranks have stayed, counted in each generation."""
        self.num_parked = 0
        self._random = Random(f"{simulation.world.seed}/survivors/{simulation.scenario.mode}")
        self._numbers = 0

    def new_processes(self) -> RankProcesses:
        self._numbers += 1
        return RankProcesses(self._numbers)

    def park_s(self, ranks: "Ranks") -> float | None:
        """Seconds until the ranks have parked; None: they cannot, or are too late."""
        is_guarded = self._random.random() < 0.85
        can_park = is_guarded and ranks.has_stepped and not ranks.node.is_stuck
        return 0.01 + 0.2 * self._random.random() if can_park else None

    def park(self, ranks: "Ranks") -> None:
        processes = ranks.processes
        processes.is_parked = True
        self.num_parked += 1
        kept = self._random.choice((1, 4, 40))
        processes.first_step = max(processes.first_step, ranks.step - kept)

    @staticmethod
    def problem(ranks: "Ranks | None") -> str:
        return "" if ranks is None or ranks.has_stepped else "no step was made"

    def answer(self, ranks: "Ranks | None") -> dict[str, object]:
        """The part of `Quiesced` about the parked ranks."""
        if ranks is None or not ranks.are_alive:
            return {}
        processes = ranks.processes
        parked = tuple(
            ParkedRank(rank, processes.first_step, processes.renewals) for rank in ranks.locals
        )
        return {"parked": parked, "parked_in": ranks.plan.generation}

    def stays(self, node: "Node", before: "Ranks") -> RankProcesses:
        """The parked processes of this node run the next generation."""
        self.num_stays += 1
        node.simulation.faults.counts["ranks stay"] = self.num_stays
        return replace(before.processes, renewals=before.processes.renewals + 1, is_parked=False)
