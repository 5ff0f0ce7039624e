"""Runs with random failures, simulated event by event, to compare formulas with.

The simulation uses no formula of `ftrun.tools.estimate`. It has a clock, random numbers, the saved
work and the lost work.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

SURE = 3.29
"""Standard errors: 99.9 % of the means of a normal distribution are this near."""


@dataclass(frozen=True)
class Costs:
    """The cost of one kind of failure.

    Args:
        share: of all failures.
        dead_s: until the next step.
        lag_s: a save that is younger than this at the failure is not usable.
        needs_disk: memory is not usable.
    """

    share: float
    dead_s: float
    lag_s: float = 0.0
    needs_disk: bool = False


@dataclass(frozen=True)
class Run:
    """A training that saves its state after a fixed amount of work."""

    interval_s: float
    save_s: float
    mtbf_s: float
    kinds: Sequence[Costs]
    disk_every_s: float = math.inf

    def goodput(self, dice: random.Random, lives: int) -> float:
        """Remaining work divided by total time, after this number of failures."""
        shares = [kind.share for kind in self.kinds]

        def on_disk(work_s: float) -> float:
            if math.isinf(self.disk_every_s):
                return 0.0
            return work_s - work_s % self.disk_every_s

        now_s = work_s = 0.0
        for _ in range(lives):
            left_s = dice.expovariate(1 / self.mtbf_s)
            now_s += left_s
            kind = dice.choices(self.kinds, shares)[0]
            saved_s, done_s, age_s = work_s, work_s, left_s
            while age_s > 0:
                done_s += min(age_s, self.interval_s)
                age_s -= self.interval_s + self.save_s
                if age_s >= kind.lag_s and age_s >= 0:
                    saved_s = done_s
            work_s = on_disk(done_s) if kind.needs_disk else saved_s
            while (left_s := dice.expovariate(1 / self.mtbf_s)) < kind.dead_s:
                now_s += left_s
                kind = dice.choices(self.kinds, shares)[0]
                work_s = on_disk(work_s) if kind.needs_disk else work_s
            now_s += kind.dead_s
        return work_s / now_s


def interval_of(
    sample: Callable[[random.Random], float], *, runs: int, seed: int
) -> tuple[float, float]:
    """Mean of a figure over runs with different random numbers, and its error bound."""
    found = [sample(random.Random(f"{seed}-{number}")) for number in range(runs)]
    return fmean(found), SURE * stdev(found) / math.sqrt(runs)


@dataclass(frozen=True)
class Fleet:
    """Nodes in groups and in domains, which are lost alone and together.

    Args:
        groups: the nodes of each.
        domain_of: each node.
        parity: number of nodes of a group that may be lost at the same time.
        node_per_s: losses of one node.
        domains_per_s: losses of any domain.
        window_s: time for which a lost node is missing.
    """

    groups: Sequence[Sequence[str]]
    domain_of: Mapping[str, str]
    parity: int
    node_per_s: float
    domains_per_s: float
    window_s: float

    def losses(self, dice: random.Random, over_s: float) -> int:
        """How often a group loses more nodes than its parity tolerates, in this time."""
        home = {node: number for number, group in enumerate(self.groups) for node in group}
        nodes, domains = sorted(home), sorted(set(self.domain_of.values()))
        back_s = dict.fromkeys(nodes, 0.0)
        rate = self.node_per_s * len(nodes) + self.domains_per_s
        now_s, found = 0.0, 0
        while (now_s := now_s + dice.expovariate(rate)) < over_s:
            if dice.random() < self.domains_per_s / rate:
                domain = dice.choice(domains)
                lost = [node for node in nodes if self.domain_of[node] == domain]
            else:
                lost = [dice.choice(nodes)]
            for node in lost:
                back_s[node] = now_s + self.window_s
            hit = {home[node] for node in lost}
            gone = [sum(back_s[one] > now_s for one in self.groups[number]) for number in hit]
            found += max(gone) > self.parity
        return found


def time_without_enough(
    dice: random.Random,
    *,
    lost_per_s: float,
    repair_s: Callable[[random.Random], float],
    spares: int,
    over_s: float,
) -> float:
    """The fraction of time in which more nodes are in repair than there are spares."""
    now_s, turns = 0.0, []
    while (now_s := now_s + dice.expovariate(lost_per_s)) < over_s:
        turns += [(now_s, 1), (now_s + repair_s(dice), -1)]
    in_repair, before_s, short_s = 0, 0.0, 0.0
    for at_s, change in sorted(turns):
        if at_s > over_s:
            break
        short_s += (at_s - before_s) * (in_repair > spares)
        in_repair, before_s = in_repair + change, at_s
    return (short_s + (over_s - before_s) * (in_repair > spares)) / over_s
