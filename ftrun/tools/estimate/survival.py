"""Whether snapshots in memory outlive the losses of nodes.

Runs in:  whoever asks (the cli). Pure.
Takes in: groups of k + m nodes, how often a node is lost, what is lost together with it, and how
          long it takes until the loss of one is made good.
Gives:    how often more than m nodes of some group are gone at the same time, and the probability
          that this never happens.

A node that is lost counts as gone for the window: until it was noticed, another node has taken its
place, has fetched the state, and a version is protected again. Nodes and domains are lost
independently, so at any moment each node is gone with a probability p, each domain with another.
The state is lost where one more loss makes it more of a group than the code bears:

    a node      finds m others of its group gone, by themselves or with their domain
    a domain    takes c of a group at once, and finds m + 1 - c others gone by themselves
    a domain    finds another one gone, and both together have more than m of some group

A domain whose loss alone is the loss of the state is not counted as gone for the others as well.
Three domains within a window are not counted. What several nodes hold alike (replicas) survives
more than this says.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from ftrun.erasure.groups import ProtectionGroup, make_groups


@dataclass(frozen=True, slots=True)
class NodeLossModel:
    """How nodes are lost.

    Args:
        node_per_s: losses of one node by itself.
        domains_per_s: losses of a whole domain, of all domains of the run together.
        window_s: from a loss until the state is protected again.
    """

    node_per_s: float
    domains_per_s: float
    window_s: float


@dataclass(frozen=True, slots=True)
class GroupPlacement:
    """Groups, and what the loss of a domain takes of them.

    Args:
        groups: how many there are of (m, nodes of it in each domain whose loss the state
            survives, the same for each domain whose loss it does not survive).
        domains: of each kind of domain, how many there are of it, and what its loss takes: how
            many groups of (nodes, m, nodes of it that are in the domain).
        pairs: of domains whose loss the state survives, and not of both together.
    """

    groups: Mapping[tuple[int, tuple[int, ...], tuple[int, ...]], int]
    domains: Sequence[tuple[int, Mapping[tuple[int, int, int], int]]]
    pairs: int

    @property
    def num_domains(self) -> int:
        return sum(count for count, _ in self.domains)

    @property
    def worst(self) -> int:
        """The most nodes of one group that the loss of one domain takes."""
        return max(taken for _, hit in self.domains for _, _, taken in hit)


def spread(nodes: int, *, data: int, parity: int, domain_nodes: int) -> GroupPlacement:
    """As ftrun places groups, told the domains: as few nodes of one in a group as can be."""
    names = [str(number) for number in range(nodes)]
    domains = _domains(nodes, domain_nodes)
    return _seen(make_groups(names, data=data, parity=parity, domains=domains), domains)


def side_by_side(nodes: int, *, data: int, parity: int, domain_nodes: int) -> GroupPlacement:
    """Neighbours in one group: what is nearest on the network, and fails together."""
    sizes = [len(group.nodes) for group in make_groups(
        [str(number) for number in range(nodes)], data=data, parity=parity)]  # fmt: skip
    groups, first = [], 0
    for size in sizes:
        groups.append(ProtectionGroup(tuple(str(first + one) for one in range(size)), parity))
        first += size
    return _seen(groups, _domains(nodes, domain_nodes))


def loss_per_s(placement: GroupPlacement, losses: NodeLossModel) -> float:
    """How often the state in memory is lost: some group has lost more than it bears."""
    domain_per_s = losses.domains_per_s / placement.num_domains
    gone = _within(losses.node_per_s, losses.window_s)
    domain_gone = _within(domain_per_s, losses.window_s)
    by_node = math.fsum(
        count * _met(parity, borne, fatal, gone, domain_gone)
        for (parity, borne, fatal), count in placement.groups.items()
    )
    by_domain = math.fsum(count * _hit(hit, gone) for count, hit in placement.domains)
    by_domain += 2 * placement.pairs * domain_gone
    return losses.node_per_s * by_node + domain_per_s * min(by_domain, placement.num_domains)


def lost_within(per_s: float, *, over_s: float) -> float:
    """The probability that it happens in that time, once or more often; survival is the rest."""
    return _within(per_s, over_s)


def at_least(least: int, *, of: int, p: float) -> float:
    """The probability that of so many things, each with probability p, so many or more are so.

    Summed from the small end: 1 minus the others would lose what is below 1e-16.
    """
    if least <= 0:
        return 1.0
    terms = (math.comb(of, n) * p**n * (1.0 - p) ** (of - n) for n in range(least, of + 1))
    return min(1.0, math.fsum(terms))


def _within(per_s: float, over_s: float) -> float:
    return -math.expm1(-per_s * over_s)


def _met(
    parity: int, borne: Sequence[int], fatal: Sequence[int], gone: float, domain_gone: float
) -> float:
    """How many nodes of a group would find m others gone, were they lost now (the expectation).

    Args:
        parity: m.
        borne: nodes of the group in each of its domains whose loss the state survives.
        fatal: the same in the others. They count as gone by themselves only: the loss of such a
            domain was the loss of the state.
        gone: of a node by itself, the probability.
        domain_gone: of a domain.
    """
    found = 0.0
    parts = Counter([*((taken, True) for taken in borne), *((taken, False) for taken in fatal)])
    for mine, count in parts.items():
        numbers = _gone(mine[0] - 1, gone)
        for (other, may_be_gone), others in (parts - Counter([mine])).items():
            apart = _gone(other, gone)
            if may_be_gone:
                apart = [(1.0 - domain_gone) * one for one in apart]
                apart[-1] += domain_gone
            for _ in range(others):
                numbers = _added(numbers, apart)
        found += count * mine[0] * math.fsum(numbers[parity:])
    return found


def _gone(nodes: int, p: float) -> list[float]:
    """The probabilities that 0, 1 ... all of these nodes are gone."""
    return [math.comb(nodes, n) * p**n * (1.0 - p) ** (nodes - n) for n in range(nodes + 1)]


def _added(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """The probabilities of the sum of two independent numbers."""
    found = [0.0] * (len(one) + len(other) - 1)
    for i, p in enumerate(one):
        for j, q in enumerate(other):
            found[i + j] += p * q
    return found


def _hit(hit: Mapping[tuple[int, int, int], int], p: float) -> float:
    """The probability that the loss of one domain is more than one of its groups bears."""
    kept = 1.0
    for (nodes, parity, taken), count in hit.items():
        kept *= (1.0 - at_least(parity + 1 - taken, of=nodes - taken, p=p)) ** count
    return 1.0 - kept


def _domains(nodes: int, domain_nodes: int) -> dict[str, str]:
    return {str(number): f"domain {number // domain_nodes}" for number in range(nodes)}


def _seen(groups: Sequence[ProtectionGroup], domains: Mapping[str, str]) -> GroupPlacement:
    taken: dict[str, Counter[tuple[int, int, int]]] = {}
    parts = [Counter(domains[node] for node in group.nodes) for group in groups]
    for group, counts in zip(groups, parts, strict=True):
        for domain, count in counts.items():
            taken.setdefault(domain, Counter())[len(group.nodes), group.parity, count] += 1
    is_fatal = {
        domain: any(count > parity for _, parity, count in hit) for domain, hit in taken.items()
    }
    kinds: Counter[tuple[int, tuple[int, ...], tuple[int, ...]]] = Counter()
    pairs: set[tuple[str, str]] = set()
    for group, counts in zip(groups, parts, strict=True):
        borne = sorted((domain, n) for domain, n in counts.items() if not is_fatal[domain])
        fatal = sorted(n for domain, n in counts.items() if is_fatal[domain])
        kinds[group.parity, tuple(sorted(n for _, n in borne)), tuple(fatal)] += 1
        pairs.update(
            (one, other) for (one, a), (other, b) in combinations(borne, 2) if a + b > group.parity
        )
    hits = Counter(tuple(sorted(hit.items())) for hit in taken.values())
    return GroupPlacement(kinds, [(count, dict(hit)) for hit, count in hits.items()], len(pairs))
