"""Assigns the pieces of a checkpoint to nodes, if several nodes need the same pieces.

Rule 1: a digest identifies a piece. If two ranks have the same digest, they have the same bytes,
        and one of the pieces is read.
Rule 2: a node reads what only it needs. What several nodes need is cut into as many runs of equal
        bytes, in the order of the first one's file. Each node reads one run, so all read at once
        and no piece is read twice.
Rule 3: a node reads only the images of its own ranks.
Source: the redundancy-bypassing load of Universal Checkpointing (arXiv 2406.18820).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_NODES = 16
"""Largest number of nodes that share a load; each has to read the digest tables of all others."""

Place = tuple[int, int]
"""A rank, and the index of a piece."""


@dataclass(frozen=True, slots=True)
class LoadShare:
    """The share of one node.

    Args:
        own: pieces to read, by rank and index.
        others: pieces that another node sends, and the number of that node.
        twins: pairs of a piece and an equal piece of this node that it is copied from.
    """

    own: Sequence[Place]
    others: Sequence[tuple[Place, int]]
    twins: Sequence[tuple[Place, Place]]


def ranks_at(node: int, num_nodes: int, world_size: int) -> range:
    """Ranks of a previous world that one of these nodes loads, if no node runs them."""
    return range(node * world_size // num_nodes, (node + 1) * world_size // num_nodes)


def load_group_of(node: int, num_nodes: int) -> range:
    first = node - node % MOST_NODES
    return range(first, min(first + MOST_NODES, num_nodes))


def share_of(
    node: int,
    ranks: Mapping[int, Sequence[int]],
    tables: Mapping[int, Sequence[int]],
    sizes: Mapping[int, Sequence[int]],
) -> LoadShare:
    """The share of one node.

    Args:
        ranks: the ranks that each node loads, by node; equal on all nodes.
        tables: u64 digests of all pieces of each of these ranks.
        sizes: bytes of all pieces of this node's own ranks.
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
        for position, reader in _distributed(places, readers, sizes):
            if reader == node:
                own.append(position)
            else:
                others.append((position, reader))
    return LoadShare(sorted(own), others, twins)


def _needed_by(
    ranks: Mapping[int, Sequence[int]], tables: Mapping[int, Sequence[int]]
) -> dict[int, int]:
    """The nodes that need each digest, as a bit set; the order is equal on all nodes."""
    found: dict[int, int] = {}
    for node in sorted(ranks):
        for rank in ranks[node]:
            for digest in tables[rank]:
                found[digest] = found.get(digest, 0) | 1 << node
    return found


def _distributed(
    places: Sequence[Place], readers: Sequence[int], sizes: Mapping[int, Sequence[int]]
) -> list[tuple[Place, int]]:
    """Each piece and the node that reads it, in runs of about equal bytes."""
    lengths = [sizes[rank][index] for rank, index in places]
    total, before, found = max(1, sum(lengths)), 0, []
    for position, length in zip(places, lengths, strict=True):
        # An empty piece at the end would otherwise get an index past the last reader.
        found.append((position, readers[min(before * len(readers) // total, len(readers) - 1)]))
        before += length
    return found
