"""Computes how often a run with a given number of nodes fails.

Runs in:  the caller (the cli). Pure.
Takes in: published failures per 1000 node-days.
Gives:    the mean time between failures of the whole run.
Source:   Llama 3, arXiv 2407.21783: 419 unplanned interruptions of 2,048 nodes in 54 days. The
          others are from summaries of papers; docs/estimate.md names them.
"""

import math

DAY_S = 86_400.0
CROWDED_FROM = 4000
"""Number of nodes above which failures coincide and exceed the rate of single nodes."""

LLAMA3, RSC1, RSC2, FT_HSDP = 3.79, 6.50, 2.34, 2.3
"""Failures per 1000 node-days."""


def node_rate_per_s(per_1000_node_days: float) -> float:
    return per_1000_node_days / 1000.0 / DAY_S


def mtbf_s(nodes: int, *, per_1000_node_days: float, crowding: float = 0.0) -> float:
    """Returns the mean time between failures of the run; infinite if nothing fails.

    Args:
        nodes: nodes that train.
        per_1000_node_days: failure rate of one node.
        crowding: above `CROWDED_FROM` nodes the time is multiplied by (4000/nodes) to this power;
            0: failures are independent.
    """
    rate = nodes * node_rate_per_s(per_1000_node_days)
    if rate == 0.0:
        return math.inf
    return math.pow(min(1.0, CROWDED_FROM / nodes), crowding) / rate
