"""How many nodes to have standing by.

Runs in:  whoever asks (the cli). Pure.
Takes in: how often a node goes to repair, and how long that takes.
Gives:    how much of the time too few nodes are there, and the number of spares for which most of
          what was paid for trains.

Nodes in repair are Poisson distributed with the mean (arrivals x time in repair), whatever the
distribution of that time is (the M/G/infinity queue), so its mean is all that must be known.
"""

import math
from collections.abc import Iterator

_MOST = 100_000


def too_few(mean_in_repair: float, spares: int) -> float:
    """The part of the time in which more nodes are in repair than there are spares."""
    *_, enough = _enough(mean_in_repair, spares)
    return 1.0 - enough


def best_spares(nodes: int, mean_in_repair: float) -> int:
    """So many that the part of all nodes' time, spares included, that is training is highest.

    A run that waits while too few nodes are there is the worst case: with `--nnodes MIN:MAX` it
    goes on with fewer, and needs fewer spares.
    """
    # Beyond that no spare is ever used.
    most = min(_MOST, math.ceil(mean_in_repair + 12.0 * math.sqrt(mean_in_repair) + 12.0))
    used = [
        nodes / (nodes + spares) * enough
        for spares, enough in enumerate(_enough(mean_in_repair, most))
    ]
    return max(range(len(used)), key=used.__getitem__)


def _enough(mean: float, most: int) -> Iterator[float]:
    """The probabilities that no more than 0, 1, 2 ... `most` nodes are in repair."""
    total = 0.0
    for count in range(most + 1):
        # By logarithms: exp(-mean) is no float for the largest runs.
        total += math.exp(count * math.log(mean) - mean - math.lgamma(count + 1)) if mean else 0.0
        yield min(total, 1.0) if mean else 1.0
