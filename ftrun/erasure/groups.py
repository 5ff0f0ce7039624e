"""Which nodes protect one another.

Runs in:  the agent that leads. Pure; the same answer for the same nodes, whoever computes it.
Takes in: the nodes of a generation in order of their ranks, and the domains that fail as one: a
          rack, a power supply, a switch.
Gives:    `ProtectionGroup`s: every node in one, in a fixed place.

All that protects a node's state lies within its group, so a lost node is repaired from its group
alone, and a group bears the loss of any m of its nodes. Small groups keep repair cheap (k blocks
are read for each lost one) and few nodes depend on one another; beyond four data nodes, more of
them save little memory, for parity takes m/k. Hence, where the operator does not choose:
at most 8 nodes in a group (4 m where m is above 2), and as few groups as that allows, which
makes groups of 4 to 8; one parity block in a stripe below 8 nodes, two from 8 on.

Rule 1: groups differ by one node at most, and none is too small to be protected while there are
        nodes enough: rather fewer groups, each with more data nodes than was asked for.
Rule 2: the nodes of a domain are spread over the groups as evenly as can be.
Rule 3: a node that stays keeps its group and its place, so what is protected stays readable.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import xxhash

from ftrun.erasure.codec import MAX_DATA, MAX_PARITY
from ftrun.errors import InternalError

GROUP_NODES = 8
TWO_PARITY_FROM = 8


@dataclass(frozen=True, slots=True)
class ProtectionGroup:
    """Nodes that protect one another, and how many of them may be lost."""

    nodes: tuple[str, ...]
    parity: int

    @property
    def data(self) -> int:
        """k: data blocks of a stripe. Below one, there is no protection by parity."""
        return len(self.nodes) - self.parity

    @property
    def is_protected(self) -> bool:
        """Parity protects this group; else its state is lost with a node."""
        return self.parity >= 1 and self.data >= 1

    @property
    def id(self) -> int:
        """A digest of these nodes in this order with this parity, u64: what fragments carry."""
        words = [str(self.parity), *self.nodes]
        return xxhash.xxh3_64_intdigest("".join(f"{len(word)}:{word}" for word in words).encode())

    def survives_domains(self, domains: Mapping[str, str]) -> bool:
        """The loss of any one domain takes no more nodes than the group bears."""
        return self.is_protected and self._worst_domain(domains)[1] <= self.parity

    def note(self, domains: Mapping[str, str]) -> str:
        """What this group does not bear, in words; empty where it bears what it should."""
        if not self.is_protected:
            return (
                f"{_named(self.nodes)}: no protection by parity, because {len(self.nodes)} "
                f"node(s) cannot hold data and {self.parity} parity blocks"
            )
        domain, count = self._worst_domain(domains)
        if count <= self.parity:
            return ""
        return (
            f"{_named(self.nodes)}: the loss of {domain} takes {count} of {len(self.nodes)} nodes, "
            f"and any {self.parity} may go"
        )

    def _worst_domain(self, domains: Mapping[str, str]) -> tuple[str, int]:
        return Counter(domains.get(node, node) for node in self.nodes).most_common(1)[0]


def default_parity(num_nodes: int) -> int:
    """m, where the operator does not say: how many nodes of a group may be lost."""
    return 1 if num_nodes < TWO_PARITY_FROM else 2


def make_groups(
    nodes: Sequence[str],
    *,
    data: int | None,
    parity: int,
    domains: Mapping[str, str] | None = None,
) -> list[ProtectionGroup]:
    """Groups of all nodes.

    Args:
        nodes: in order of their ranks, each once.
        data: k, data blocks of a stripe where the groups come out even; None chooses.
        parity: m, how many nodes of a group may be lost; 0 for no parity.
        domains: domain of a node; a node that is not there is a domain of its own.

    Raises:
        InternalError: a node is there twice, or k or m is out of range.
    """
    if len(set(nodes)) != len(nodes):
        raise InternalError(f"a node is named twice among {_named(nodes)}")
    if not (0 <= parity <= MAX_PARITY and (data is None or 1 <= data <= MAX_DATA)):
        raise InternalError(
            f"{data} data and {parity} parity blocks; 1 to {MAX_DATA} and 0 to {MAX_PARITY} can be"
        )
    if not nodes:
        return []
    count = _num_groups(len(nodes), data, parity)
    ordered = _by_domain(nodes, domains or {})
    places = {node: place for place, node in enumerate(nodes)}
    # Dealt out like cards: the nodes of a domain follow one another, so no group gets two more
    # of them than another group.
    return [
        ProtectionGroup(tuple(sorted(ordered[first::count], key=places.__getitem__)), parity)
        for first in range(count)
    ]


def replace_in_groups(
    previous: Sequence[ProtectionGroup], replaced: Mapping[str, str]
) -> list[ProtectionGroup]:
    """The same groups, with each replacement in the place of the node that was lost.

    Raises:
        InternalError: a lost node is in no group, or a replacement is in one already.
    """
    before = [node for group in previous for node in group.nodes]
    after = [replaced.get(node, node) for node in before]
    if replaced.keys() - {*before} or len({*after}) != len(after):
        raise InternalError(f"{dict(replaced)} does not replace nodes of {_named(before)}")
    return [
        replace(group, nodes=tuple(replaced.get(node, node) for node in group.nodes))
        for group in previous
    ]


def next_groups(
    previous: Sequence[ProtectionGroup],
    nodes: Sequence[str],
    *,
    replaced: Mapping[str, str],
    data: int | None,
    parity: int,
    domains: Mapping[str, str] | None = None,
) -> list[ProtectionGroup]:
    """Groups of a new generation: the previous ones if replacements make them fit, else new ones.

    Args:
        previous: of the generation before; none at the start of a run.
        nodes: all nodes of the new generation, in order of their ranks.
        replaced: replacement by lost node; what is lost without one is not in it. A node that
            stays, though its ranks may be another's now, keeps its place all the same.
        data: as for `make_groups`.
        parity: likewise.
        domains: likewise.
    """
    of_previous = {node for group in previous for node in group.nodes}
    mine = {old: new for old, new in replaced.items() if old in of_previous - {*nodes}}
    after = {mine.get(node, node) for node in of_previous}
    is_kept = len(after) == len(of_previous) and all(group.parity == parity for group in previous)
    if previous and is_kept and after == {*nodes}:
        return replace_in_groups(previous, mine)
    return make_groups(nodes, data=data, parity=parity, domains=domains)


def notes(groups: Sequence[ProtectionGroup], domains: Mapping[str, str] | None = None) -> list[str]:
    """What the operator should know of these groups, a sentence for each that bears too little."""
    return [note for group in groups if (note := group.note(domains or {}))]


def _num_groups(num_nodes: int, data: int | None, parity: int) -> int:
    wanted = data + parity if data is not None else max(GROUP_NODES, 4 * parity)
    # A code has at most so many data blocks, and the largest group is rounded up.
    wanted = min(wanted, MAX_DATA + parity)
    return max(1, min(-(-num_nodes // wanted), num_nodes // (parity + 1)))


def _by_domain(nodes: Sequence[str], domains: Mapping[str, str]) -> list[str]:
    """All nodes, domain after domain, in the order in which the domains are first met."""
    members: dict[str, list[str]] = {}
    for node in nodes:
        members.setdefault(domains.get(node, node), []).append(node)
    return [node for domain in members.values() for node in domain]


def _named(nodes: Sequence[str]) -> str:
    return ", ".join(nodes)
