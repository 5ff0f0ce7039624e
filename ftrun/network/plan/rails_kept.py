"""Which rails are left where no rate is known: a new lead knows only what it has tried itself.

Runs in:  the agent that leads. Pure.
Takes in: the plan of the generation before, the rails, and which of them are dead.
Gives:    the same plan without its dead rails.

Rule 1: no rail is chosen or left for its rate, and none for want of one.
Rule 2: where no rail of the plan is left, another one is used that all nodes are on.
Rule 3: where there is none, the plan stays: the libraries would do no better.
"""

from collections.abc import Mapping, Sequence

import msgspec

from ftrun.network.detect.rails import RunRails
from ftrun.wire.cluster.rails import NetworkPlan


def keep_rails(
    before: NetworkPlan, nodes: Sequence[str], rails: RunRails, dead: Mapping[str, str]
) -> NetworkPlan:
    """The plan for the next generation of these nodes.

    Args:
        before: the plan that there is.
        nodes: members, in the order of their ranks.
        rails: of the run.
        dead: rails of it that have a dead road, each with the reason.
    """
    whole = [name for name, on in rails.items() if name not in dead and on.keys() >= {*nodes}]
    kept = [name for name in before.rails if name in whole] or whole[:1] or before.rails
    if kept == before.rails:
        return msgspec.structs.replace(before, order=list(nodes))
    left = [name for name in before.rails if name not in kept]
    why = {name: dead.get(name, "not all nodes have an interface on it") for name in left}
    snapshots, pace = before.snapshot_rail, before.snapshot_bytes_per_s
    if snapshots in (*dead, *kept):
        snapshots, pace = kept[-1], 0  # of a rail that is shared anew no rate is known
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
    """What a plan has chosen: the rates in its words are others after each survey."""
    return plan.order, plan.rails, sorted(plan.dropped), plan.snapshot_rail, plan.leaves
