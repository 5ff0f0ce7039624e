"""The network plan: which rails and node order a generation uses, and why.

A plan changes nothing by itself: with `--network-plan report` it is only shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ftrun.network.detect.findings import NetworkFindings, judge
from ftrun.network.detect.leaf_switches import LeafSwitches, leaves_from_probes
from ftrun.network.detect.rails import VARIABLES, rails_named
from ftrun.network.plan.node_order import NetworkModel, NodeOrder, order_nodes
from ftrun.network.plan.rail_choice import choose_flows, choose_rails, choose_snapshot_way
from ftrun.wire.cluster.generation import NetworkPlan, PathMeasurement, Rail

NAMED_NODES = 16
"""Up to this number, nodes are named in a sentence; above it, they are counted."""


@dataclass(frozen=True, slots=True)
class PlanningInputs:
    """The inputs of a plan."""

    nodes: Sequence[str]
    """Members, in the order they would have without a plan: that of the generation before, if there
    is one."""
    rails: Mapping[str, Sequence[Rail]]
    """Rails of each of them; the first is the one that agents use."""
    found: Sequence[PathMeasurement] = ()
    """Measurements of the last survey, with later ones of paths that were probed again."""
    leaves: LeafSwitches = field(default_factory=LeafSwitches)
    """From labels, a file or Slurm; if not known, they are derived from the probes."""
    user_env: Mapping[str, str] = field(default_factory=dict)
    """The user's variables; only those that a plan sets are used."""
    suspects: Mapping[str, str] = field(default_factory=dict)
    """Rails that the monitor found slow in the run, by the run's name, each with the reason."""
    keep_order: str = ""
    """Why nodes must keep their order, such as `the user has numbered the nodes`; empty: they need
    not."""
    previous: NetworkPlan | None = None
    """The plan before: leaves found by its probes are kept if new probes find none."""


def plan_network(
    situation: PlanningInputs, surveyed: tuple[NetworkFindings, LeafSwitches] | None = None
) -> NetworkPlan:
    """The network plan for one generation; `surveyed` is the result of `survey_of`, if known."""
    nodes = situation.nodes
    findings, leaves = surveyed or survey_of(situation)
    if len(nodes) < 2:
        return NetworkPlan(order=list(nodes), words=["One node: there are no paths to plan."])
    choice = choose_rails(nodes, findings, situation.suspects)
    env = situation.user_env
    busy = {rail for name in env for rail in rails_named(name, env[name], findings.rails)}
    snapshot_rail, limit, text = choose_snapshot_way(choice, findings, nodes, busy)
    flows, of_flows = choose_flows(choice.rails, nodes, findings.rails, leaves.of)
    if env.keys() & flows.keys():
        flows, of_flows = {}, []
    network = NetworkModel(leaves.of, leaves.above, path_rates=_bad_paths(findings, choice.rails))
    ordering = order_nodes(nodes, network)
    order = list(nodes if situation.keep_order else ordering.order)
    return NetworkPlan(
        order=order,
        rails=list(choice.rails),
        dropped=dict(choice.dropped),
        flows=flows,
        snapshot_rail=snapshot_rail,
        snapshot_bytes_per_s=limit,
        leaves={node: leaves.of[node] for node in nodes if node in leaves.of},
        leaves_from=leaves.source,
        words=[
            *choice.words,
            *of_flows,
            *_user_words(env, findings, choice.dropped),
            leaves.words,
            _order_words(ordering, leaves, situation.keep_order),
            *_group_words(nodes, leaves),
            text,
        ],
    )


def survey_of(situation: PlanningInputs) -> tuple[NetworkFindings, LeafSwitches]:
    """The findings of the probes, and the leaves: the given ones, else those of the probes."""
    leaves = situation.leaves
    if not leaves.is_known:
        leaves = leaves_from_probes(situation.nodes, situation.found)
    before = situation.previous
    if not leaves.is_known and before is not None and before.leaves_from == "probes":
        nodes = situation.nodes
        of = {node: before.leaves[node] for node in nodes if node in before.leaves}
        text = f"Leaf switches of {len(of)} of {len(nodes)} nodes are from earlier probes."
        leaves = LeafSwitches(of, "probes" if of else "", words=text)
    return judge(situation.rails, situation.found, leaves.of), leaves


def _bad_paths(findings: NetworkFindings, rails: Sequence[str]) -> dict[tuple[str, str], float]:
    bad: dict[tuple[str, str], float] = {}
    for one in findings.found:
        if one.rail in rails and len(one.nodes) == 2 and not one.is_late:
            source, destination = one.nodes
            bad[source, destination] = min(one.pace, bad.get((source, destination), 1.0))
    for path in findings.dead:
        if path.rail in rails:
            bad[path.source, path.destination] = 0.0
    return bad


def _order_words(ordering: NodeOrder, leaves: LeafSwitches, keep: str) -> str:
    gain = (
        f"the busiest link of a ring carries {ordering.cost.ring:.2f} times the bytes of an "
        f"all-reduce, and {ordering.naive.ring:.2f} times in the given order"
    )
    if keep:
        text = f"Nodes stay in their order, because {keep}"
        return f"{text}; another order would be better: {gain}." if ordering.moves else f"{text}."
    if not ordering.moves:
        return "Nodes stay in their order: no other order that was tried reduces the load."
    moved = f"{ordering.moves} of {len(ordering.order)} nodes change positions: {gain}."
    if len(ordering.order) > NAMED_NODES or not leaves.is_known:
        return moved
    of_leaf: dict[str, list[str]] = {}
    for node in ordering.order:
        of_leaf.setdefault(leaves.of.get(node, "unknown"), []).append(node)
    reported = "; ".join(f"{leaf}: {', '.join(of)}" for leaf, of in of_leaf.items())
    return f"{moved} By leaf switch: {reported}."


def _group_words(nodes: Sequence[str], leaves: LeafSwitches) -> list[str]:
    switches = {leaves.of[node] for node in nodes if node in leaves.of}
    if len(switches) < 2:
        return []
    return [
        f"Erasure groups are spread over the {len(switches)} leaf switches, unless labels declare "
        "fault domains."
    ]


def _user_words(
    env: Mapping[str, str], findings: NetworkFindings, dropped: Mapping[str, str]
) -> list[str]:
    words = []
    for name in VARIABLES:
        if name not in env:
            continue
        out = [rail for rail in rails_named(name, env[name], findings.rails) if rail in dropped]
        text = f"{name}={env[name]} is set by the user and stays"
        if out:
            text += f", although the plan drops {' and '.join(sorted(out))}"
        words.append(f"{text}.")
    return words
