"""Text and tables of a network status."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from ftrun.cli.screen import terminal
from ftrun.cli.screen.text import count, duration, joined, percent
from ftrun.network.detect.findings import rate_text
from ftrun.network.detect.probe_schedule import NetworkPath
from ftrun.tools.network_view.facts import (
    NetworkFacts,
    NetworkReport,
    NodeRailSummary,
    PathState,
    RailSummary,
)
from ftrun.wire.messages.status import NetworkStatus

RAIL_HEAD = ("rail", "is for", "network", "interfaces", "paths", "dead", "slow", "usual",
             "between", "slowest", "round trip")  # fmt: skip
NODE_HEAD = ("node", "leaf", "rail", "sends", "receives", "dead", "slow", "remark")
PATH_HEAD = ("path", "rail", "rate", "of similar paths", "round trip", "fault")
_FROM = {
    "labels": "by the nodes' labels",
    "file": "by the topology file",
    "slurm": "by Slurm's topology",
    "probes": "found from the probes",
}
_MOST_PARTS = 16
NONE = "-"


def rate(bytes_per_s: float) -> str:
    """Formats as `1,175 MB/s`; a dash if unknown."""
    return rate_text(bytes_per_s) if bytes_per_s > 0 else NONE


def megabytes(bytes_per_s: float) -> str:
    """Formats without the unit, for tables that name the unit in the heading."""
    return rate_text(bytes_per_s).removesuffix(" MB/s")


def round_trip(seconds: float) -> str:
    """Formats as `82 us`, `1.24 ms`, `2.05 s`; a dash if unknown."""
    if seconds <= 0:
        return NONE
    if seconds < 0.0009995:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def verdict(report: NetworkReport, facts: NetworkFacts) -> str:
    part = report.part
    if part.mode == "off":
        return "not surveyed: --network-plan off"
    if not part.paths:
        return "no path was probed"
    dead, slow = facts.count(PathState.DEAD), facts.count(PathState.SLOW)
    if not dead and not slow:
        worst = min(one.slowest_per_s for one in facts.rail_facts if one.paths)
        well = f"no path is slow or dead; the slowest has {rate(worst)}"
    else:
        found = [f"{dead:,} dead"] * bool(dead) + [f"{slow:,} slow"] * bool(slow)
        well = f"of {count(len(facts.by_path), 'path')}, {joined(found)}"
    return f"{well}; {effect(part)}"


def effect(part: NetworkStatus) -> str:
    if part.plan is None:
        return "no plan yet"
    if part.is_applied:
        return "the plan is applied"
    if part.mode == "on":
        return "the plan will be applied in the next generation"
    return "the plan is not applied (--network-plan report)"


def survey_text(report: NetworkReport, facts: NetworkFacts) -> str:
    part = report.part
    nodes, rails = count(len(facts.nodes), "node"), count(len(facts.rails), "rail")
    if part.age_s is None:
        return f"{nodes}, {rails}; no survey is complete yet"
    ago = f", {duration(part.age_s)} ago" if report.is_live else ""
    covered = "every path" if part.coverage >= 1.0 else f"{percent(part.coverage)} of all paths"
    return f"{nodes}, {rails}; {covered} probed in {duration(part.probed_s)}{ago}"


def notes(report: NetworkReport, facts: NetworkFacts) -> list[str]:
    found = []
    if not report.is_live:
        found.append(
            f"the run has ended, or is not on this machine; the values are from {report.source}"
        )
    if len(report.part.paths) < report.part.num_paths:
        found.append(
            f"of {report.part.num_paths:,} probed paths, only the worst "
            f"{len(report.part.paths):,} are known here; medians and counts cover only these"
        )
    if report.part.coverage < 1.0:
        found.append("paths that were not probed are assumed to be like the probed ones")
    return found


def findings(part: NetworkStatus) -> list[str]:
    return [one.sentence or f"{one.kind}: {one.culprit}" for one in part.findings]


def rail_row(one: RailSummary, part: NetworkStatus) -> tuple[str, ...]:
    return (
        one.name,
        use_of(one.name, part),
        one.network or NONE,
        _interfaces(one),
        f"{one.paths:,}",
        f"{one.dead:,}" if one.dead else NONE,
        f"{one.slow:,}" if one.slow else NONE,
        rate(one.usual_per_s),
        rate(one.between_per_s),
        rate(one.slowest_per_s),
        round_trip(one.median_rtt_s),
    )


def use_of(rail: str, part: NetworkStatus) -> str:
    plan = part.chosen
    uses = ["training"] * (rail in plan.rails) + ["snapshots"] * (rail == plan.snapshot_rail)
    return ", ".join(uses) or ("dropped" if rail in plan.dropped else NONE)


def _interfaces(one: RailSummary) -> str:
    speeds = [f"{speed:,}" for speed in one.speeds_mbit]
    words = [f"{' to '.join(dict.fromkeys([speeds[0], speeds[-1]]))} Mbit/s"] if speeds else []
    half = ["some half duplex"] * ("half" in one.duplexes)
    return ", ".join([*words, *half]) or NONE


def path_name(path: NetworkPath) -> str:
    return f"{path.source} to {path.destination}"


def path_row(path: NetworkPath, facts: NetworkFacts) -> tuple[str, ...]:
    found, usual = facts.by_path[path], facts.usual_of(path)
    return (
        path_name(path),
        path.rail,
        rate(found.bytes_per_s),
        percent(found.bytes_per_s / usual) if found.bytes_per_s > 0 and usual > 0 else NONE,
        round_trip(found.rtt_s),
        wrong(path, facts),
    )


def wrong(path: NetworkPath, facts: NetworkFacts) -> str:
    state = facts.state_of(path)
    word = state.name.lower() if state >= PathState.SLOW else ""
    return ": ".join(one for one in (word, facts.by_path[path].problem) if one) or NONE


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
    if one.sends is one.receives:
        return one.state.name.lower() if one.state >= PathState.SLOW else ""
    words = [
        f"{what} {state.name.lower()}"
        for what, state in (("sending", one.sends), ("receiving", one.receives))
        if state >= PathState.SLOW
    ]
    return ", ".join(words)


def caption(facts: NetworkFacts, *, is_few: bool) -> str:
    where = ", on their leaf switches" if facts.leaves else ""
    rates = (
        ". A node's rate on a rail is the lower one of sending and receiving, each the median of "
        "its paths within its leaf switch"
    )
    return f"Nodes in the order that is chosen for their ranks{where}{rates if is_few else ''}."


def nodes_title(nodes: Sequence[NodeRailSummary]) -> str:
    is_bad = bool(nodes) and nodes[0].state >= PathState.SLOW
    return "bad rails of nodes" if is_bad else "the slowest rails of nodes"


SINGLE_PATHS = "bad paths between nodes without another fault"


def plan_rows(report: NetworkReport, facts: NetworkFacts) -> list[tuple[str, str]]:
    part, plan = report.part, report.part.chosen
    found = [("plan", effect(part))]
    if plan.order:
        found.append(("order", order_text(facts)))
    if facts.leaves:
        known = f" ({_FROM.get(plan.leaf_source, plan.leaf_source)})" * bool(plan.leaf_source)
        leaves = [f"{leaf or 'not known'}: {folded(on)}" for leaf, on in facts.leaves.items()]
        found.append(("leaves", f"{_cut(leaves, '; ', 'leaf switch')}{known}"))
    rails = joined(plan.rails) or "all rails"
    left_out = f", not over {joined(list(plan.dropped))}" if plan.dropped else ""
    found.append(("training", f"over {rails}{left_out}"))
    over = (
        f"over {plan.snapshot_rail}" if plan.snapshot_rail else "over the rail between the agents"
    )
    pace = f", at most {rate(plan.snapshot_bytes_per_s)} a node" * bool(plan.snapshot_bytes_per_s)
    found.append(("snapshots", f"{over}{pace}"))
    return [
        *found,
        *(("reasons" if not number else "", one) for number, one in enumerate(plan.reasons)),
    ]


def order_text(facts: NetworkFacts) -> str:
    """Lists nodes in the order of their ranks; a bar marks each change of the leaf switch."""
    on_leaves = groupby(facts.ring, lambda node: facts.leaf_of.get(node, ""))
    return _cut([folded(list(nodes)) for _, nodes in on_leaves], " | ", "stretch")


def _cut(parts: Sequence[str], between: str, thing: str) -> str:
    more = f"{between}{count(len(parts) - _MOST_PARTS, thing)} more"
    return between.join(parts[:_MOST_PARTS]) + more * (len(parts) > _MOST_PARTS)


def folded(names: Sequence[str]) -> str:
    """Formats as `node0, node2`, `node0-node31`, `node0-node56 by 8, other`."""
    return ", ".join(_runs(names))


def _runs(names: Sequence[str]) -> Iterator[str]:
    begin = 0
    while begin < len(names):
        end, step = _run(names, begin)
        ends = names[begin:end]
        # Up to four names with gaps are as readable without a range.
        if len(ends) > (2 if step == 1 else 4):
            yield f"{ends[0]}-{ends[-1]}" + (f" by {step}" if step > 1 else "")
            begin = end
        else:
            yield ends[0]
            begin += 1


def _run(names: Sequence[str], begin: int) -> tuple[int, int]:
    """Returns end and step of a run of names that increase by the same number."""
    end, step = begin + 1, 0
    while end < len(names):
        by = _difference(names[end - 1], names[end])
        if by < 1 or (step and by != step):
            break
        end, step = end + 1, by
    return end, step


def _difference(before: str, after: str) -> int:
    """Returns the difference of the numbers in two names; 0 if they do not increase."""
    one, other = (re.fullmatch(r"(.*?)(\d{1,15})", name) for name in (before, after))
    if one is None or other is None or one[1] != other[1]:
        return 0
    is_as_wide = len(one[2]) == len(other[2]) or not other[2].startswith("0")
    return max(int(other[2]) - int(one[2]), 0) if is_as_wide else 0


# --- on a terminal ----------------------------------------------------------------------------

FEW = 8
"""Up to this number of nodes, every path is shown."""
MOST_MATRICES = 4
MOST_ROWS = 12
_MARKS = "!: slower than similar paths; dead: no answer; ?: not probed"


def show_network(report: NetworkReport, facts: NetworkFacts) -> None:
    terminal.write_plain(f"run {report.run_id}: {verdict(report, facts)}")
    terminal.write_plain(survey_text(report, facts))
    for finding in findings(report.part):
        terminal.write_plain(f"- {finding}")
    if facts.by_path:
        terminal.write_plain("")
        rows = [rail_row(one, report.part) for one in facts.rail_facts]
        terminal.show_table(RAIL_HEAD, rows)
        (_show_few if len(facts.nodes) <= FEW else _show_many)(facts)
    terminal.write_plain("")
    terminal.show_pairs(plan_rows(report, facts))
    for note in notes(report, facts):
        terminal.write_plain(f"note: {note}")


def matrix_rails(facts: NetworkFacts) -> list[str]:
    bad = {one.name for one in facts.rail_facts if one.dead or one.slow}
    return [
        rail for number, rail in enumerate(facts.rails) if number < MOST_MATRICES or rail in bad
    ]


CELLS = "MB/s and round trip in us, from the node of the row to the node of the column"


def matrix(facts: NetworkFacts, rail: str) -> list[tuple[str, ...]]:
    """Returns one row per node with its name first; the columns are the same nodes."""
    return [
        (f"{number} {source}", *(_cell(facts, source, other, rail) for other in facts.nodes))
        for number, source in enumerate(facts.nodes)
    ]


def worst_nodes(facts: NetworkFacts) -> list[NodeRailSummary]:
    """Returns rails of nodes that are bad as a whole, the worst first; else the slowest."""
    found = sorted(
        facts.node_rails.values(), key=lambda one: (-one.state, -one.dead, one.lower_per_s)
    )
    return [one for one in found if one.state >= PathState.SLOW] or found


def _cell(facts: NetworkFacts, source: str, destination: str, rail: str) -> str:
    if source == destination:
        return ""
    at = NetworkPath(source, destination, rail)
    path = facts.by_path.get(at)
    if path is None:
        return "?"
    if facts.state_of(at) is PathState.DEAD:
        return "dead"
    mark = "!" if facts.state_of(at) is PathState.SLOW else ""
    rate = megabytes(path.bytes_per_s) if path.bytes_per_s > 0 else "?"
    return f"{rate}{mark} {path.rtt_s * 1e6:.0f}" if path.rtt_s > 0 else f"{rate}{mark}"


def _show_few(facts: NetworkFacts) -> None:
    shown = matrix_rails(facts)
    for rail in shown:
        terminal.write_plain(f"\n{rail}: {CELLS}")
        head = ("from \\ to", *(str(number) for number in range(len(facts.nodes))))
        terminal.show_table(head, matrix(facts, rail))
    if any(one.dead or one.slow for one in facts.rail_facts):
        terminal.write_plain(_MARKS)
    _more(len(facts.rails) - len(shown), "rail without a fault", "rails without a fault")


def _show_many(facts: NetworkFacts) -> None:
    nodes, paths = worst_nodes(facts), facts.single()
    terminal.write_plain(f"\n{nodes_title(nodes)}:")
    rows = [node_row(one, facts) for one in nodes[:MOST_ROWS]]
    terminal.show_table(NODE_HEAD, rows)
    if nodes[0].state >= PathState.SLOW:
        _more(len(nodes) - MOST_ROWS, "bad rail of a node", "bad rails of nodes")
    if paths:
        terminal.write_plain(f"\n{SINGLE_PATHS}:")
        terminal.show_table(PATH_HEAD, [path_row(path, facts) for path in paths[:MOST_ROWS]])
        _more(len(paths) - MOST_ROWS, "bad path", "bad paths")


def _more(number: int, thing: str, things: str) -> None:
    if number > 0:
        terminal.write_plain(f"and {number:,} more {thing if number == 1 else things}")
