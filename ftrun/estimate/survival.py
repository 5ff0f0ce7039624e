"""Whether snapshots in memory outlive the losses of nodes.

Runs in:  whoever asks (the cli). Pure.
Takes in: groups of k + m nodes, how often a node is lost, what is lost together with it, and how
          long it takes until the loss of one is made good.
Gives:    how often more than m nodes of some group are gone at the same time, and the probability
          that this never happens.

A node that is lost counts as gone for the window: until it was noticed, another node has taken its
place, has fetched the state, and a version is protected again. Each loss finds each other node of
its group gone with a probability p, independently; the state is lost where it finds m of them so.
The loss of a domain takes all of a group's nodes in it at once.

What several nodes hold alike (replicas) survives more than this says; it is not counted.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftrun.erasure.groups import Group, make_groups


@dataclass(frozen=True, slots=True)
class Losses:
    """How nodes are lost.

    Args:
        node_per_s: losses of one node by itself.
        domains_per_s: losses of a whole domain, of all domains of the run together.
        window_s: from a loss until the state is protected again.
    """

    node_per_s: float
    domains_per_s: float
    window_s: float

    @property
    def gone(self) -> float:
        """p: the probability that a node is gone when somebody looks."""
        return -math.expm1(-self.node_per_s * self.window_s)


@dataclass(frozen=True, slots=True)
class Placement:
    """Groups, as seen by each domain.

    Args:
        groups: how many there are of (nodes, parity).
        domains: of each kind of domain, how many there are of it, and what its loss takes: how
            many groups of (nodes, parity, nodes of it that are in the domain).
    """

    groups: Mapping[tuple[int, int], int]
    domains: Sequence[tuple[int, Mapping[tuple[int, int, int], int]]]

    @property
    def worst(self) -> int:
        """The most nodes of one group that the loss of one domain takes."""
        return max(taken for _, hit in self.domains for _, _, taken in hit)


def spread(nodes: int, *, data: int, parity: int, domain_nodes: int) -> Placement:
    """As ftrun places groups, told the domains: as few nodes of one in a group as can be."""
    names = [str(number) for number in range(nodes)]
    domains = _domains(nodes, domain_nodes)
    return _seen(make_groups(names, data=data, parity=parity, domains=domains), domains)


def side_by_side(nodes: int, *, data: int, parity: int, domain_nodes: int) -> Placement:
    """Neighbours in one group: what is nearest on the network, and fails together."""
    sizes = [len(group.nodes) for group in make_groups(
        [str(number) for number in range(nodes)], data=data, parity=parity)]  # fmt: skip
    groups, first = [], 0
    for size in sizes:
        groups.append(Group(tuple(str(first + one) for one in range(size)), parity))
        first += size
    return _seen(groups, _domains(nodes, domain_nodes))


def loss_per_s(placement: Placement, losses: Losses) -> float:
    """How often the state in memory is lost: some group has lost more than it bears."""
    p = losses.gone
    alone = sum(
        count * nodes * losses.node_per_s * at_least(parity, of=nodes - 1, p=p)
        for (nodes, parity), count in placement.groups.items()
    )
    num_domains = sum(count for count, _ in placement.domains)
    together = sum(count * _hit(hit, p) for count, hit in placement.domains) / num_domains
    return alone + losses.domains_per_s * together


def lost_within(per_s: float, *, over_s: float) -> float:
    """The probability that it happens in that time, once or more often; survival is the rest."""
    return -math.expm1(-per_s * over_s)


def at_least(least: int, *, of: int, p: float) -> float:
    """The probability that of so many things, each with probability p, so many or more are so.

    Summed from the small end: 1 minus the others would lose what is below 1e-16.
    """
    if least <= 0:
        return 1.0
    terms = (math.comb(of, n) * p**n * (1.0 - p) ** (of - n) for n in range(least, of + 1))
    return min(1.0, math.fsum(terms))


def _hit(hit: Mapping[tuple[int, int, int], int], p: float) -> float:
    """The probability that the loss of one domain is more than one of its groups bears."""
    kept = 1.0
    for (nodes, parity, taken), count in hit.items():
        kept *= (1.0 - at_least(parity + 1 - taken, of=nodes - taken, p=p)) ** count
    return 1.0 - kept


def _domains(nodes: int, domain_nodes: int) -> dict[str, str]:
    return {str(number): f"domain {number // domain_nodes}" for number in range(nodes)}


def _seen(groups: Sequence[Group], domains: Mapping[str, str]) -> Placement:
    taken: dict[str, Counter[tuple[int, int, int]]] = {}
    for group in groups:
        size = (len(group.nodes), group.parity)
        for domain, count in Counter(domains[node] for node in group.nodes).items():
            taken.setdefault(domain, Counter())[*size, count] += 1
    kinds: Counter[tuple[tuple[tuple[int, int, int], int], ...]] = Counter(
        tuple(sorted(hit.items())) for hit in taken.values()
    )
    return Placement(
        Counter((len(group.nodes), group.parity) for group in groups),
        [(count, dict(hit)) for hit, count in kinds.items()],
    )
