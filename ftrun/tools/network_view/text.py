"""What a network's facts say, in words.

Runs in: cli. Pure.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from ftrun.cli.screen.text import count, duration, joined, percent
from ftrun.network.detect.findings import rate_words
from ftrun.network.detect.probe_schedule import NetworkPath
from ftrun.tools.network_view.facts import NetworkFacts, NodeRailSummary, PathState, RailSummary
from ftrun.tools.network_view.network_part import NetworkReport, NetworkStatus

RAIL_HEAD = ("rail", "is for", "network", "interfaces", "roads", "dead", "slow", "usual",
             "between", "slowest", "round trip")  # fmt: skip
NODE_HEAD = ("node", "leaf", "rail", "sends", "receives", "dead", "slow", "remark")
ROAD_HEAD = ("road", "rail", "rate", "of roads alike", "round trip", "what is wrong")
_FROM = {
    "labels": "by the nodes' labels",
    "file": "by the topology file",
    "slurm": "by Slurm's topology",
    "probes": "found from the probes",
}
_MOST_PARTS = 16
NONE = "-"


def rate(bytes_per_s: float) -> str:
    """`1,175 MB/s`; a dash where it is not known."""
    return rate_words(bytes_per_s) if bytes_per_s > 0 else NONE


def megabytes(bytes_per_s: float) -> str:
    """The same without its unit, for tables where it stands at the head."""
    return rate_words(bytes_per_s).removesuffix(" MB/s")


def round_trip(seconds: float) -> str:
    """`82 us`, `1.24 ms`, `2.05 s`; a dash where it is not known."""
    if seconds <= 0:
        return NONE
    if seconds < 0.0009995:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def verdict(told: NetworkReport, facts: NetworkFacts) -> str:
    """One sentence: is it well, and what of the plan."""
    part = told.part
    if part.mode == "off":
        return "not surveyed: --network-plan off"
    if not part.roads:
        return "no road has been probed"
    dead, slow = facts.count(PathState.DEAD), facts.count(PathState.SLOW)
    if not dead and not slow:
        worst = min(one.slowest_per_s for one in facts.rail_facts if one.roads)
        well = f"every road is well, the slowest with {rate(worst)}"
    else:
        found = [f"{dead:,} dead"] * bool(dead) + [f"{slow:,} slow"] * bool(slow)
        well = f"of {count(len(facts.by_road), 'road')} {joined(found)}"
    return f"{well}; {effect(part)}"


def effect(part: NetworkStatus) -> str:
    if part.plan is None:
        return "nothing is planned yet"
    if part.in_effect:
        return "the plan is in effect"
    if part.mode == "on":
        return "the plan takes effect with the next generation"
    return "the plan is not in effect (--network-plan report)"


def survey_words(told: NetworkReport, facts: NetworkFacts) -> str:
    """What was probed, when, and how much of all there is."""
    part = told.part
    nodes, rails = count(len(facts.nodes), "node"), count(len(facts.rails), "rail")
    if part.at_s_ago is None:
        return f"{nodes}, {rails}; no survey is over yet"
    ago = f", {duration(part.at_s_ago)} ago" if told.is_live else ""
    covered = "every road" if part.coverage >= 1.0 else f"{percent(part.coverage)} of all roads"
    return f"{nodes}, {rails}; {covered} probed in {duration(part.probed_s)}{ago}"


def notes(told: NetworkReport, facts: NetworkFacts) -> list[str]:
    """What the figures do not say."""
    found = []
    if not told.is_live:
        found.append(f"the run is over, or not on this machine; this is what {told.source} keeps")
    if len(told.part.roads) < told.part.num_roads:
        found.append(
            f"of {told.part.num_roads:,} probed roads the worst {len(told.part.roads):,} are told; "
            "medians and counts are theirs alone"
        )
    if told.part.coverage < 1.0:
        found.append("roads that were not probed are taken to be as those that were")
    return found


def findings(part: NetworkStatus) -> list[str]:
    return [one.sentence or f"{one.kind}: {one.culprit}" for one in part.findings]


def rail_row(one: RailSummary, part: NetworkStatus) -> tuple[str, ...]:
    return (
        one.name,
        use_of(one.name, part),
        one.network or NONE,
        _interfaces(one),
        f"{one.roads:,}",
        f"{one.dead:,}" if one.dead else NONE,
        f"{one.slow:,}" if one.slow else NONE,
        rate(one.usual_per_s),
        rate(one.between_per_s),
        rate(one.slowest_per_s),
        round_trip(one.median_rtt_s),
    )


def use_of(rail: str, part: NetworkStatus) -> str:
    """`training`, `training, snapshots`, `dropped`."""
    plan = part.chosen
    uses = ["training"] * (rail in plan.rails) + ["snapshots"] * (rail == plan.snapshot_rail)
    return ", ".join(uses) or ("dropped" if rail in plan.dropped else NONE)


def _interfaces(one: RailSummary) -> str:
    speeds = [f"{speed:,}" for speed in one.speeds_mbit]
    words = [f"{' to '.join(dict.fromkeys([speeds[0], speeds[-1]]))} Mbit/s"] if speeds else []
    half = ["some half duplex"] * ("half" in one.duplexes)
    return ", ".join([*words, *half]) or NONE


def road_name(road: NetworkPath) -> str:
    return f"{road.source} to {road.destination}"


def road_row(road: NetworkPath, facts: NetworkFacts) -> tuple[str, ...]:
    found, usual = facts.by_road[road], facts.usual_of(road)
    return (
        road_name(road),
        road.rail,
        rate(found.bytes_per_s),
        percent(found.bytes_per_s / usual) if found.bytes_per_s > 0 and usual > 0 else NONE,
        round_trip(found.rtt_s),
        wrong(road, facts),
    )


def wrong(road: NetworkPath, facts: NetworkFacts) -> str:
    state = facts.state_of(road)
    word = state.name.lower() if state >= PathState.SLOW else ""
    return ": ".join(one for one in (word, facts.by_road[road].problem) if one) or NONE


def node_row(one: NodeRailSummary, facts: NetworkFacts) -> tuple[str, ...]:
    return (
        one.node,
        facts.leaf_of.get(one.node, "") or NONE,
        one.rail,
        rate(one.sends_per_s),
        rate(one.receives_per_s),
        f"{one.dead:,}" if one.dead else NONE,
        f"{one.slow:,}" if one.slow else NONE,
        remark(one),
    )


def remark(one: NodeRailSummary) -> str:
    """What a node's rail does wrong as a whole."""
    if one.sends is one.receives:
        return one.state.name.lower() if one.state >= PathState.SLOW else ""
    words = [
        f"{what} {state.name.lower()}"
        for what, state in (("sending", one.sends), ("receiving", one.receives))
        if state >= PathState.SLOW
    ]
    return ", ".join(words)


def caption(facts: NetworkFacts, *, is_few: bool) -> str:
    """Below the picture, for those who see it first."""
    where = ", on their leaf switches" if facts.leaves else ""
    rates = (
        ". A node's figure for a rail is the lower of what it sends and receives, each the median "
        "of its roads inside of its leaf"
    )
    return f"Nodes in the order that was chosen for their ranks{where}{rates if is_few else ''}."


def nodes_title(nodes: Sequence[NodeRailSummary]) -> str:
    """Of a table of them, the worst first."""
    is_bad = bool(nodes) and nodes[0].state >= PathState.SLOW
    return "rails of nodes that are bad as a whole" if is_bad else "the slowest rails of nodes"


SINGLE_ROADS = "bad roads between nodes that are well otherwise"


def plan_rows(told: NetworkReport, facts: NetworkFacts) -> list[tuple[str, str]]:
    """What was chosen, and why: a title and words each."""
    part, plan = told.part, told.part.chosen
    found = [("plan", effect(part))]
    if plan.order:
        found.append(("order", order_words(facts)))
    if facts.leaves:
        known = f" ({_FROM.get(plan.leaves_from, plan.leaves_from)})" * bool(plan.leaves_from)
        leaves = [f"{leaf or 'not known'}: {folded(on)}" for leaf, on in facts.leaves.items()]
        found.append(("leaves", f"{_cut(leaves, '; ', 'leaf switch')}{known}"))
    rails = joined(plan.rails) or "all that there are"
    left_out = f", not over {joined(list(plan.dropped))}" if plan.dropped else ""
    found.append(("training", f"over {rails}{left_out}"))
    over = f"over {plan.snapshot_rail}" if plan.snapshot_rail else "as agents speak"
    pace = f", at most {rate(plan.snapshot_bytes_per_s)} a node" * bool(plan.snapshot_bytes_per_s)
    found.append(("snapshots", f"{over}{pace}"))
    return [*found, *(("why" if not number else "", one) for number, one in enumerate(plan.words))]


def order_words(facts: NetworkFacts) -> str:
    """Nodes in the order of their ranks; a bar where the ring goes to another leaf."""
    on_leaves = groupby(facts.ring, lambda node: facts.leaf_of.get(node, ""))
    return _cut([folded(list(nodes)) for _, nodes in on_leaves], " | ", "stretch")


def _cut(parts: Sequence[str], between: str, thing: str) -> str:
    """All of a few; of many the first."""
    more = f"{between}{count(len(parts) - _MOST_PARTS, thing)} more"
    return between.join(parts[:_MOST_PARTS]) + more * (len(parts) > _MOST_PARTS)


def folded(names: Sequence[str]) -> str:
    """`node0, node2`, `node0-node31`, `node0-node56 by 8, other`: what counts up is one."""
    return ", ".join(_runs(names))


def _runs(names: Sequence[str]) -> Iterator[str]:
    begin = 0
    while begin < len(names):
        end, step = _run(names, begin)
        ends = names[begin:end]
        # Four with gaps between them read as well one by one.
        if len(ends) > (2 if step == 1 else 4):
            yield f"{ends[0]}-{ends[-1]}" + (f" by {step}" if step > 1 else "")
            begin = end
        else:
            yield ends[0]
            begin += 1


def _run(names: Sequence[str], begin: int) -> tuple[int, int]:
    """Where a stretch of names that count up by the same ends, and by how much."""
    end, step = begin + 1, 0
    while end < len(names):
        by = _difference(names[end - 1], names[end])
        if by < 1 or (step and by != step):
            break
        end, step = end + 1, by
    return end, step


def _difference(before: str, after: str) -> int:
    """0: they do not count up."""
    one, other = (re.fullmatch(r"(.*?)(\d{1,15})", name) for name in (before, after))
    if one is None or other is None or one[1] != other[1]:
        return 0
    is_as_wide = len(one[2]) == len(other[2]) or not other[2].startswith("0")
    return max(int(other[2]) - int(one[2]), 0) if is_as_wide else 0
