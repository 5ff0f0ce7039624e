"""How often a run of so many nodes fails.

Runs in:  whoever asks (the cli). Pure.
Takes in: failures of one node in a thousand days, from somebody who has counted.
Gives:    the mean time between failures of the whole run.
Source:   Llama 3, arXiv 2407.21783: 419 unplanned interruptions of 2,048 nodes in 54 days. The
          others are from papers' summaries; docs/estimate.md says which.
"""

import math

DAY_S = 86_400.0
CROWDED_FROM = 4000
"""Nodes. Above it failures come together, more often than one node's rate tells."""

LLAMA3, RSC1, RSC2, FT_HSDP = 3.79, 6.50, 2.34, 2.3
"""Failures in 1000 node-days."""


def node_rate_per_s(per_1000_node_days: float) -> float:
    return per_1000_node_days / 1000.0 / DAY_S


def mtbf_s(nodes: int, *, per_1000_node_days: float, crowding: float = 0.0) -> float:
    """Of the run; infinite where nothing fails.

    Args:
        nodes: that train.
        per_1000_node_days: of one node.
        crowding: above `CROWDED_FROM` nodes the time is multiplied by (4000/nodes) to this power;
            0: failures are independent.
    """
    rate = nodes * node_rate_per_s(per_1000_node_days)
    if rate == 0.0:
        return math.inf
    return math.pow(min(1.0, CROWDED_FROM / nodes), crowding) / rate
