"""Divides the nodes of a generation into groups that protect each other.

Everything that protects a node's state is within its group. A lost node is therefore rebuilt from
its group alone, and a group survives the loss of any m of its nodes. In small groups a rebuild is
cheap (k blocks are read for each lost one), and few nodes depend on each other. Beyond four data
nodes, more of them save little memory, because parity takes m/k.

If the operator does not choose, a group therefore has at most 8 nodes (4 m if m is above 2). There
are as few groups as that allows, which gives groups of 4 to 8 nodes. A stripe has one parity block
in runs below 8 nodes, two from 8 on.

Rule 1: groups differ by at most one node, and no group is too small to be protected if there are
        enough nodes. Otherwise there are fewer groups, each with more data nodes than requested.
Rule 2: the nodes of a fault domain are spread over the groups as evenly as possible.
Rule 3: neighbours in a ring are of different fault domains, where that is possible.
Rule 4: a node that stays keeps its group and its position, so protected state stays readable.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import xxhash

from ftrun.erasure.codec import MAX_DATA, MAX_PARITY
from ftrun.erasure.stripes import RingStripes, Stripes
from ftrun.errors import InternalError

GROUP_NODES = 8
TWO_PARITY_FROM = 8


@dataclass(frozen=True, slots=True)
class ProtectionGroup:
    """Nodes that protect each other, and how many of them may be lost.

    In a ring, each node has a copy of the state of the node before it; its parity is 1.
    """

    nodes: tuple[str, ...]
    parity: int
    is_ring: bool = False

    @property
    def data(self) -> int:
        """k: data blocks of a stripe. Below 1, parity cannot protect the group."""
        return 1 if self.is_ring else len(self.nodes) - self.parity

    @property
    def is_protected(self) -> bool:
        return 1 <= self.parity < len(self.nodes)

    def stripes(self, block_bytes: int) -> Stripes:
        count = len(self.nodes)
        if self.is_ring:
            return RingStripes(count, block_bytes)
        return Stripes(count, self.parity, block_bytes)

    @property
    def id(self) -> int:
        """u64 digest of these nodes in this order with this parity; fragments carry it."""
        words = [f"{self.parity}{' ring' if self.is_ring else ''}", *self.nodes]
        return xxhash.xxh3_64_intdigest("".join(f"{len(word)}:{word}" for word in words).encode())


def default_parity(num_nodes: int) -> int:
    return 1 if num_nodes < TWO_PARITY_FROM else 2


def make_groups(
    nodes: Sequence[str],
    *,
    data: int | None,
    parity: int,
    domains: Mapping[str, str] | None = None,
    is_ring: bool = False,
) -> list[ProtectionGroup]:
    """Divides all nodes into new groups.

    Args:
        nodes: in order of their ranks, each once.
        data: k, data blocks of a stripe if the groups have equal sizes; None: chosen here.
        parity: m; 0: no parity.
        domains: fault domain by node; a node without an entry is a domain of its own.
        is_ring: each group is a ring; with parity 1, and `data` None.
    """
    if len(set(nodes)) != len(nodes):
        raise InternalError(f"a node is named twice among {', '.join(nodes)}")
    if not (0 <= parity <= MAX_PARITY and (data is None or 1 <= data <= MAX_DATA)):
        raise InternalError(
            f"{data} data and {parity} parity blocks; limits: 1 to {MAX_DATA}, 0 to {MAX_PARITY}"
        )
    if not nodes:
        return []
    count = _num_groups(len(nodes), data, parity)
    members: dict[str, list[str]] = {}
    for node in nodes:
        members.setdefault((domains or {}).get(node, node), []).append(node)
    ordered = [node for domain in members.values() for node in domain]
    places = {node: position for position, node in enumerate(nodes)}
    # Round robin: the nodes of a domain follow each other, so two groups differ by at most one of
    # its nodes.
    members_of = [sorted(ordered[first::count], key=places.__getitem__) for first in range(count)]
    if is_ring:
        members_of = [_apart(one, domains or {}) for one in members_of]
    return [ProtectionGroup(tuple(one), parity, is_ring) for one in members_of]


def next_groups(
    previous: Sequence[ProtectionGroup],
    nodes: Sequence[str],
    *,
    replaced: Mapping[str, str],
    data: int | None,
    parity: int,
    domains: Mapping[str, str] | None = None,
    is_ring: bool = False,
) -> list[ProtectionGroup]:
    """Groups of a new generation: the previous ones if replacements make them fit, else new ones.

    Args:
        previous: of the generation before; empty at the start of a run.
        nodes: all nodes of the new generation, in order of their ranks.
        replaced: replacement by lost node; lost nodes without a replacement are not in it. A
            node that stays keeps its position, even if other ranks now run on it.
    """
    of_previous = {node for group in previous for node in group.nodes}
    mine = {old: new for old, new in replaced.items() if old in of_previous - {*nodes}}
    after = {mine.get(node, node) for node in of_previous}
    code = (parity, is_ring)
    is_kept = len(after) == len(of_previous)
    is_kept = is_kept and all((group.parity, group.is_ring) == code for group in previous)
    if previous and is_kept and after == {*nodes}:
        return [
            replace(group, nodes=tuple(mine.get(node, node) for node in group.nodes))
            for group in previous
        ]
    return make_groups(nodes, data=data, parity=parity, domains=domains, is_ring=is_ring)


def _apart(nodes: list[str], domains: Mapping[str, str]) -> list[str]:
    """Reorders a ring in which neighbours share a domain: each domain takes every second place."""
    of = {node: domains.get(node, node) for node in nodes}
    if all(of[node] != of[nodes[at - 1]] for at, node in enumerate(nodes)):
        return nodes
    sizes = Counter(of.values())
    ordered = sorted(nodes, key=lambda node: (-sizes[of[node]], of[node]))
    half = (len(nodes) + 1) // 2
    even, odd = ordered[:half], ordered[half:]
    return [node for at in range(half) for node in (*even[at : at + 1], *odd[at : at + 1])]


def _num_groups(num_nodes: int, data: int | None, parity: int) -> int:
    wanted = data + parity if data is not None else max(GROUP_NODES, 4 * parity)
    # A code has at most MAX_DATA data blocks, and the largest group is rounded up.
    wanted = min(wanted, MAX_DATA + parity)
    return max(1, min(-(-num_nodes // wanted), num_nodes // (parity + 1)))
