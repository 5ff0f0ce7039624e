"""Keeps the rails of a plan if no rate is known: a new leader has only its own probes.

Runs in:  the agent that leads. Pure.
Takes in: the network plan of the generation before, the rails, and which of them are dead.
Gives:    the same plan without its dead rails.

Rule 1: no rail is chosen or dropped for its rate, nor for a missing rate.
Rule 2: if no rail of the plan is left, another one that all nodes are on is used.
Rule 3: if there is none, the plan stays: the libraries would do no better.
"""

from collections.abc import Mapping, Sequence

import msgspec

from ftrun.network.detect.rails import RunRails
from ftrun.wire.cluster.rails import NetworkPlan


def keep_rails(
    before: NetworkPlan, nodes: Sequence[str], rails: RunRails, dead: Mapping[str, str]
) -> NetworkPlan:
    """The network plan for the next generation of these nodes.

    Args:
        before: the current plan.
        nodes: members, in the order of their ranks.
        rails: of the run.
        dead: its rails with a dead path, each with the reason.
    """
    whole = [name for name, on in rails.items() if name not in dead and on.keys() >= {*nodes}]
    kept = [name for name in before.rails if name in whole] or whole[:1] or before.rails
    if kept == before.rails:
        return msgspec.structs.replace(before, order=list(nodes))
    left = [name for name in before.rails if name not in kept]
    why = {name: dead.get(name, "not all nodes have an interface on it") for name in left}
    snapshots, pace = before.snapshot_rail, before.snapshot_bytes_per_s
    if snapshots in (*dead, *kept):
        snapshots, pace = kept[-1], 0  # the rate of a newly shared rail is unknown
    dropped = {name: text for name, text in before.dropped.items() if name not in kept} | why
    words = [f"Training goes on over {' and '.join(kept)}; no rate was measured since."]
    words += [f"Rail {name} is left out: {text.rstrip('.')}." for name, text in why.items()]
    return msgspec.structs.replace(
        before,
        order=list(nodes),
        rails=kept,
        dropped=dropped,
        snapshot_rail=snapshots,
        snapshot_bytes_per_s=pace,
        words=words,
    )


def choices_of(plan: NetworkPlan) -> tuple[object, ...]:
    """The choices of a plan, without its sentences, whose rates change with each survey."""
    return plan.order, plan.rails, sorted(plan.dropped), plan.snapshot_rail, plan.leaves
