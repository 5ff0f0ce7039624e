"""Which node reads which pieces of a checkpoint, where several need the same.

Runs in:  the SMP of each node; all come to the same answer without a word. Pure.
Takes in: the digest tables of all ranks that are loaded, and which node loads which ranks.
Gives:    for one node, what it reads from storage, and of which node it gets the rest.

Rule 1: a digest names a piece: where two ranks have the same digest, they have the same bytes, and
        one of them is read.
Rule 2: what one node needs it reads. What several need is cut into as many runs of equal bytes, in
        the order of the first one's file: each reads one run, so all read at once and none twice.
Rule 3: a node reads only the files of its own ranks.
Source: the redundancy-bypassing load of Universal Checkpointing (arXiv 2406.18820).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_NODES = 16
"""So many share what they read: each has to read the digest tables of all others."""

Place = tuple[int, int]
"""A rank, and the index of a piece."""


@dataclass(frozen=True, slots=True)
class LoadShare:
    """What one node does.

    Args:
        own: pieces to read, by rank and index.
        others: pieces that come from another node, and which one that is.
        twins: pieces that are equal to one of those, which they are copied from.
    """

    own: Sequence[Place]
    others: Sequence[tuple[Place, int]]
    twins: Sequence[tuple[Place, Place]]


def ranks_at(node: int, num_nodes: int, world_size: int) -> range:
    """Ranks of an old world that one of these nodes loads, where none runs them."""
    return range(node * world_size // num_nodes, (node + 1) * world_size // num_nodes)


def company_of(node: int, num_nodes: int) -> range:
    """Nodes that share what they read with this one, itself among them."""
    first = node - node % MOST_NODES
    return range(first, min(first + MOST_NODES, num_nodes))


def share_of(
    node: int,
    ranks: Mapping[int, Sequence[int]],
    tables: Mapping[int, Sequence[int]],
    sizes: Mapping[int, Sequence[int]],
) -> LoadShare:
    """What a node reads.

    Args:
        node: which one.
        ranks: those that each node loads, by node; equal on all of them.
        tables: the digests of all pieces of each of these ranks; u64.
        sizes: in bytes, of all pieces of this node's own ranks.
    """
    first: dict[int, Place] = {}
    twins: list[tuple[Place, Place]] = []
    for rank in ranks[node]:
        for index, digest in enumerate(tables[rank]):
            if first.setdefault(digest, (rank, index)) != (rank, index):
                twins.append(((rank, index), first[digest]))
    alike: dict[int, list[Place]] = defaultdict(list)
    for digest, nodes in _needed_by(ranks, tables).items():
        if digest in first:
            alike[nodes].append(first[digest])
    own: list[Place] = []
    others: list[tuple[Place, int]] = []
    for nodes, places in alike.items():
        readers = [one for one in sorted(ranks) if nodes >> one & 1]
        for place, reader in _dealt(places, readers, sizes):
            if reader == node:
                own.append(place)
            else:
                others.append((place, reader))
    return LoadShare(sorted(own), others, twins)


def _needed_by(
    ranks: Mapping[int, Sequence[int]], tables: Mapping[int, Sequence[int]]
) -> dict[int, int]:
    """The nodes that need a digest, as a set of bits; in the same order on all of them."""
    found: dict[int, int] = {}
    for node in sorted(ranks):
        for rank in ranks[node]:
            for digest in tables[rank]:
                found[digest] = found.get(digest, 0) | 1 << node
    return found


def _dealt(
    places: Sequence[Place], readers: Sequence[int], sizes: Mapping[int, Sequence[int]]
) -> list[tuple[Place, int]]:
    """Each piece and who reads it: runs of about equal bytes."""
    lengths = [sizes[rank][index] for rank, index in places]
    total, before, found = max(1, sum(lengths)), 0, []
    for place, length in zip(places, lengths, strict=True):
        # A piece of no bytes may come last of all.
        found.append((place, readers[min(before * len(readers) // total, len(readers) - 1)]))
        before += length
    return found
