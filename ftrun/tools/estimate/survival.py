"""Computes the probability that snapshots in memory survive lost nodes, and the number of spares.

A lost node counts as lost for the window. The window includes detection, replacement by another
node, the fetch of the state, and the protection of a new version. Nodes and domains are lost
independently: at any moment each node is lost with one probability, each domain with another. The
state is lost if one more loss exceeds what the code of a group tolerates:

    a node      when m others of its group are lost, alone or with their domain
    a domain    that has c nodes of a group, when m + 1 - c others are lost alone
    a domain    when another domain is lost, and both together have more than m nodes of a group

If the loss of a domain alone loses the state, this domain does not count as lost for other groups.
Three lost domains within a window are not considered. State that several nodes hold (replicas)
survives more losses than this model shows.

The number of nodes in repair has a Poisson distribution with the mean (arrivals x repair time).
This holds for any distribution of the repair time (the M/G/infinity queue), so that only its mean
is needed.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from ftrun.erasure.groups import ProtectionGroup, make_groups

_MOST = 100_000


@dataclass(frozen=True, slots=True)
class NodeLossModel:
    """Rates of losses of one node alone, and of all whole domains together.

    `window_s` is the time from a loss until the state is protected again.
    """

    node_per_s: float
    domains_per_s: float
    window_s: float


@dataclass(frozen=True, slots=True)
class GroupPlacement:
    """Groups, and how many nodes of them the loss of a domain takes.

    Args:
        groups: number of groups by (m, nodes per domain whose loss the state survives, nodes per
            domain whose loss it does not survive).
        domains: for each kind of domain, the number of such domains, and what their loss takes:
            number of groups by (nodes, m, nodes in the domain).
        pairs: number of pairs of domains whose single losses the state survives, but not both.
    """

    groups: Mapping[tuple[int, tuple[int, ...], tuple[int, ...]], int]
    domains: Sequence[tuple[int, Mapping[tuple[int, int, int], int]]]
    pairs: int

    @property
    def num_domains(self) -> int:
        return sum(count for count, _ in self.domains)

    @property
    def worst(self) -> int:
        """Maximum number of nodes of one group that the loss of one domain takes."""
        return max(taken for _, hit in self.domains for _, _, taken in hit)


def spread(
    nodes: int, *, data: int | None, parity: int, domain_nodes: int, is_ring: bool = False
) -> GroupPlacement:
    """Places groups as ftrun does with known domains: few nodes of a domain in a group."""
    names = [str(number) for number in range(nodes)]
    domains = _domains(nodes, domain_nodes)
    groups = make_groups(names, data=data, parity=parity, domains=domains, is_ring=is_ring)
    return _seen(_independent(groups), domains)


def side_by_side(
    nodes: int, *, data: int | None, parity: int, domain_nodes: int, is_ring: bool = False
) -> GroupPlacement:
    """Places neighbours in one group: nodes that are close in the network and fail together."""
    sizes = [len(group.nodes) for group in make_groups(
        [str(number) for number in range(nodes)], data=data, parity=parity)]  # fmt: skip
    groups, first = [], 0
    for size in sizes:
        names = tuple(str(first + one) for one in range(size))
        groups.append(ProtectionGroup(names, parity, is_ring))
        first += size
    return _seen(_independent(groups), _domains(nodes, domain_nodes))


def _independent(groups: Sequence[ProtectionGroup]) -> list[ProtectionGroup]:
    """Replaces a ring by its pairs of neighbours: the state is lost if both of any pair are.

    A node is then in two groups, and a loss of three neighbours counts twice.
    """
    found: list[ProtectionGroup] = []
    for group in groups:
        pairs = list(zip(group.nodes, (*group.nodes[1:], group.nodes[0]), strict=True))
        is_ring = group.is_ring and group.is_protected
        pairs = pairs[:1] if len(group.nodes) == 2 else pairs
        found += [ProtectionGroup(pair, 1) for pair in pairs] if is_ring else [group]
    return found


def loss_per_s(placement: GroupPlacement, losses: NodeLossModel) -> float:
    """Returns how often per second the state in memory is lost."""
    domain_per_s = losses.domains_per_s / placement.num_domains
    gone = lost_within(losses.node_per_s, over_s=losses.window_s)
    domain_gone = lost_within(domain_per_s, over_s=losses.window_s)
    by_node = math.fsum(
        count * _met(parity, borne, fatal, gone, domain_gone)
        for (parity, borne, fatal), count in placement.groups.items()
    )
    by_domain = math.fsum(count * _hit(hit, gone) for count, hit in placement.domains)
    by_domain += 2 * placement.pairs * domain_gone
    return losses.node_per_s * by_node + domain_per_s * min(by_domain, placement.num_domains)


def lost_within(per_s: float, *, over_s: float) -> float:
    return -math.expm1(-per_s * over_s)


def at_least(least: int, *, of: int, p: float) -> float:
    """Returns the probability that at least `least` of `of` independent events occur.

    The sum begins at the small end, because 1 minus the rest would lose values below 1e-16.
    """
    if least <= 0:
        return 1.0
    return min(1.0, math.fsum(_gone(of, p)[least:]))


def _met(
    parity: int, borne: Sequence[int], fatal: Sequence[int], gone: float, domain_gone: float
) -> float:
    """Returns the expected number of nodes of a group for which at least m others are lost.

    If one of these nodes is lost too, the state is lost.

    Args:
        parity: m.
        borne: nodes of the group in each domain whose loss the state survives.
        fatal: the same for the other domains. Their nodes can only be lost alone, because the loss
            of such a domain already lost the state.
        gone: probability that a node is lost alone.
        domain_gone: probability that a domain is lost.
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
    return [math.comb(nodes, n) * p**n * (1.0 - p) ** (nodes - n) for n in range(nodes + 1)]


def _added(one: Sequence[float], other: Sequence[float]) -> list[float]:
    found = [0.0] * (len(one) + len(other) - 1)
    for i, p in enumerate(one):
        for j, q in enumerate(other):
            found[i + j] += p * q
    return found


def _hit(hit: Mapping[tuple[int, int, int], int], p: float) -> float:
    """Returns the probability that the loss of one domain exceeds the parity of a group."""
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


def too_few(mean_in_repair: float, spares: int) -> float:
    """Returns the share of time in which more nodes are in repair than there are spares."""
    *_, enough = _enough(mean_in_repair, spares)
    return 1.0 - enough


def best_spares(nodes: int, mean_in_repair: float) -> int:
    """Returns the number of spares with the highest share of all node time spent on training.

    This is the worst case: the run waits while nodes are missing. With `--nnodes MIN:MAX` it
    continues with fewer nodes and needs fewer spares.
    """
    # No run uses more spares than this.
    most = min(_MOST, math.ceil(mean_in_repair + 12.0 * math.sqrt(mean_in_repair) + 12.0))
    used = [
        nodes / (nodes + spares) * enough
        for spares, enough in enumerate(_enough(mean_in_repair, most))
    ]
    return max(range(len(used)), key=used.__getitem__)


def _enough(mean: float, most: int) -> Iterator[float]:
    """Yields the probabilities that at most 0, 1, 2 ... `most` nodes are in repair."""
    total = 0.0
    for count in range(most + 1):
        # Use logarithms, because exp(-mean) underflows for the largest runs.
        total += math.exp(count * math.log(mean) - mean - math.lgamma(count + 1)) if mean else 0.0
        yield min(total, 1.0) if mean else 1.0
