"""Simulated nodes on leaf switches, and the results of probes between them."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ftrun.network.detect.probe_schedule import NetworkPath, ProbeSchedule, schedule
from ftrun.wire.cluster.generation import PathMeasurement, Rail

RATE = 1.18e9
"""Bytes per second of an interface: 10 Gbit/s without headers."""
PROBE_BYTES = 4 << 20
TIMEOUT_S = 0.1
"""A probe over a dead path times out after this time."""


@dataclass
class SimulatedPaths:
    """A network whose faults are known.

    Args:
        leaves: leaf switch by node, in the order of ranks.
        rails: names of rails.
        uplink: rate of a leaf's uplink, in units of an interface's rate; all flows of a round share
            it.
        noise: maximum relative error of the measured rates, up or down.
    """

    leaves: Mapping[str, str]
    rails: Sequence[str] = ("eth0", "eth1")
    uplink: float = 1e9
    noise: float = 0.0
    seed: int = 0
    sides: dict[tuple[str, str, str], float] = field(default_factory=dict)
    """Share of its rate that a side (node, `out` or `in`, rail) has; 0: it is dead."""
    paths: dict[NetworkPath, float] = field(default_factory=dict)
    """The same for single paths."""

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def again(self) -> "SimulatedPaths":
        """The same network, with its noise from the beginning."""
        return replace(self)

    @property
    def nodes(self) -> list[str]:
        return list(self.leaves)

    def cards(self) -> dict[str, list[Rail]]:
        return {
            node: [
                Rail(rail, f"10.{place}.{number >> 8}.{number & 255}", 16, 7000, 10_000, "full")
                for place, rail in enumerate(self.rails)
            ]
            for number, node in enumerate(self.leaves, 1)
        }

    def slow_node(
        self, node: str, rail: str, share: float, ways: Iterable[str] = ("out", "in")
    ) -> None:
        for way in ways:
            self.sides[node, way, rail] = share

    def survey(self, plan: ProbeSchedule | None = None) -> list[PathMeasurement]:
        plan = plan or schedule(self.nodes, dict.fromkeys(self.rails, self.nodes), most_rounds=120)
        return [found for one in plan.rounds for found in self.round(one)]

    def round(self, paths: Sequence[NetworkPath]) -> list[PathMeasurement]:
        """The results of one round."""
        crossing: dict[tuple[str, str], int] = {}
        for path in paths:
            for link in self._uplinks(path):
                crossing[link] = crossing.get(link, 0) + 1
        return [self._probe(path, crossing) for path in paths]

    def _uplinks(self, path: NetworkPath) -> list[tuple[str, str]]:
        one, other = self.leaves[path.source], self.leaves[path.destination]
        return [] if one == other else [(one, "out"), (other, "in")]

    def _probe(self, path: NetworkPath, crossing: Mapping[tuple[str, str], int]) -> PathMeasurement:
        share = min(
            self.sides.get((path.source, "out", path.rail), 1.0),
            self.sides.get((path.destination, "in", path.rail), 1.0),
            self.paths.get(path, 1.0),
            *(self.uplink / crossing[link] for link in self._uplinks(path)),
        )
        if share <= 0:
            return PathMeasurement(
                path.source, path.destination, path.rail, problem="no answer in 0.1 s"
            )
        rtt_s = 0.0001 * (1 + 2 * self._draw.random())
        return PathMeasurement(
            path.source, path.destination, path.rail, rtt_s, RATE * share * self._noise()
        )

    def _noise(self) -> float:
        return 1 + self.noise * (2 * self._draw.random() - 1)


def leaf_map(*sizes: int, shuffled: int | None = None) -> dict[str, str]:
    """Nodes n0, n1 ... on leaves of these sizes, in the order of leaves or shuffled."""
    leaves = [f"sw{leaf}" for leaf, size in enumerate(sizes) for _ in range(size)]
    if shuffled is not None:
        random.Random(shuffled).shuffle(leaves)
    return {f"n{number}": leaf for number, leaf in enumerate(leaves)}


def same_leaves(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Both have the same groups of nodes, whatever the names of the leaves."""
    if one.keys() != other.keys():
        return False
    pairs = {(one[node], other[node]) for node in one}
    return len(pairs) == len({*one.values()}) == len({*other.values()})
