"""Small recordings of real runs: collectives of the ranks, kernel counters, and the fault.

`traces/NAME.json.gz` holds one run of a few ranks on a virtual cluster or on one machine, training
a small model; a fault begins at second 0:

- fault: `duty:RANK:PERIOD` (stopped for half of each period), `slow:NODE:RATE`, `delay:NODE:MS`;
- groups: the ranks of each process group;
- ranks: looks `[rank, second, step, [group, sequence number, 0.1 ms since the entry before, ...]]`;
- links: looks of nodes `[node, second, {address: [bytes, busy s, round trip s, sent again,
  unacknowledged bytes, stalled s]}]`.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftrun.monitor.slow.delay_matrix import LinkSample, NodeTraffic
from ftrun.monitor.slow.stragglers import RankObservation

FOLDER = Path(__file__).with_name("traces")
NAMES = sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz"))


@dataclass(frozen=True)
class Recording:
    """One recording."""

    fault: str
    groups: dict[str, tuple[int, ...]]
    hosts: dict[str, str]
    rank_samples: list[RankObservation]
    link_samples: list[tuple[float, NodeTraffic]]

    def seconds_of_ranks(
        self, every_s: float = 0.5
    ) -> Iterator[tuple[float, list[RankObservation]]]:
        """The observations of all ranks, grouped by this number of seconds."""
        waiting: list[RankObservation] = []
        due_s = self.rank_samples[0].at_s + every_s
        for poll in self.rank_samples:
            if poll.at_s >= due_s:
                yield due_s, waiting
                waiting = []
                due_s += every_s
            waiting.append(poll)
        yield due_s, waiting

    def seconds_of_links(self) -> Iterator[tuple[float, list[NodeTraffic]]]:
        """The observations of all nodes, second by second."""
        waiting: dict[str, NodeTraffic] = {}
        for second, poll in self.link_samples:
            if poll.node in waiting:
                yield second, list(waiting.values())
                waiting = {}
            waiting[poll.node] = poll


def recording(name: str) -> Recording:
    reported = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    last_s: dict[int, float] = {}
    observations = [
        _rank_sample(one, reported["ranks_per_node"], last_s) for one in reported["ranks"]
    ]
    links = []
    for node, second, addresses in reported["links"]:
        samples = [LinkSample(host, *figures[:5]) for host, figures in addresses.items()]
        links.append((second, NodeTraffic(f"node{node}", 1.0, samples)))
    groups = {name: tuple(ranks) for name, ranks in reported["groups"].items()}
    hosts = {f"10.77.0.{index + 1}": f"node{index}" for index in range(8)}
    return Recording(reported["fault"], groups, hosts, observations, links)


def _rank_sample(
    reported: list[Any], ranks_per_node: int, last_s: dict[int, float]
) -> RankObservation:
    rank, second, step, entries = reported
    entered = []
    for at in range(0, len(entries), 3):
        group, seq, since = entries[at : at + 3]
        last_s[rank] = last_s.get(rank, 0.0) + since / 1e4
        entered.append((group, seq, last_s[rank]))
    return RankObservation(rank, f"node{rank // ranks_per_node}", second, step, entered)
