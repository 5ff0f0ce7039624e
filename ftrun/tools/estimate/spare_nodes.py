"""Computes the best number of spare nodes.

Runs in:  the caller (the cli). Pure.
Takes in: how often a node goes to repair, and how long the repair takes.
Gives:    the share of time with too few nodes, and the number of spares with the highest share of
          all node time spent on training.

The number of nodes in repair has a Poisson distribution with the mean (arrivals x repair time).
This holds for any distribution of the repair time (the M/G/infinity queue), so that only its mean
is needed.
"""

import math
from collections.abc import Iterator

_MOST = 100_000


def too_few(mean_in_repair: float, spares: int) -> float:
    """Returns the share of time in which more nodes are in repair than there are spares."""
    *_, enough = _enough(mean_in_repair, spares)
    return 1.0 - enough


def best_spares(nodes: int, mean_in_repair: float) -> int:
    """Returns the number of spares with the highest share of node time spent on training.

    Node time includes the spares.

    The model is the worst case: the run waits while nodes are missing. With `--nnodes MIN:MAX` it
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
