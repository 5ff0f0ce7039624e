"""The network of a run on a terminal: a matrix for a few nodes, the worst of many.

Runs in: cli.
"""

from ftrun.cli.screen import terminal as render
from ftrun.network.detect.probe_schedule import NetworkPath
from ftrun.tools.network_view import text as words
from ftrun.tools.network_view.facts import NetworkFacts, NodeRailSummary, PathState
from ftrun.tools.network_view.network_part import NetworkReport

FEW = 8
"""Up to so many nodes every road is shown."""
MOST_MATRICES = 4
MOST_ROWS = 12
_MARKS = "!: slow beside roads alike; dead: no answer; ?: not probed"


def show_network(told: NetworkReport, facts: NetworkFacts) -> None:
    """Print it all."""
    render.write_plain(f"run {told.run_id}: {words.verdict(told, facts)}")
    render.write_plain(words.survey_words(told, facts))
    for finding in words.findings(told.part):
        render.write_plain(f"- {finding}")
    if facts.by_road:
        render.write_plain("")
        rows = [words.rail_row(one, told.part) for one in facts.rail_facts]
        render.show_table(words.RAIL_HEAD, rows)
        (_show_few if len(facts.nodes) <= FEW else _show_many)(facts)
    render.write_plain("")
    render.show_pairs(words.plan_rows(told, facts))
    for note in words.notes(told, facts):
        render.write_plain(f"note: {note}")


def matrix_rails(facts: NetworkFacts) -> list[str]:
    """The first rails, and those with a bad road."""
    bad = {one.name for one in facts.rail_facts if one.dead or one.slow}
    return [
        rail for number, rail in enumerate(facts.rails) if number < MOST_MATRICES or rail in bad
    ]


CELLS = "MB/s and round trip in us, from the row's node to the column's"


def matrix(facts: NetworkFacts, rail: str) -> list[tuple[str, ...]]:
    """Rows of cells, each with its node before it; columns are the same nodes."""
    return [
        (f"{number} {source}", *(_cell(facts, source, other, rail) for other in facts.nodes))
        for number, source in enumerate(facts.nodes)
    ]


def worst_nodes(facts: NetworkFacts) -> list[NodeRailSummary]:
    """Nodes' rails that are bad as a whole, the worst first; where none is, the slowest."""
    found = sorted(
        facts.node_rails.values(), key=lambda one: (-one.state, -one.dead, one.lower_per_s)
    )
    return [one for one in found if one.state >= PathState.SLOW] or found


def _cell(facts: NetworkFacts, source: str, destination: str, rail: str) -> str:
    if source == destination:
        return ""
    at = NetworkPath(source, destination, rail)
    road = facts.by_road.get(at)
    if road is None:
        return "?"
    if facts.state_of(at) is PathState.DEAD:
        return "dead"
    mark = "!" if facts.state_of(at) is PathState.SLOW else ""
    rate = words.megabytes(road.bytes_per_s) if road.bytes_per_s > 0 else "?"
    return f"{rate}{mark} {road.rtt_s * 1e6:.0f}" if road.rtt_s > 0 else f"{rate}{mark}"


def _show_few(facts: NetworkFacts) -> None:
    shown = matrix_rails(facts)
    for rail in shown:
        render.write_plain(f"\n{rail}: {CELLS}")
        head = ("from \\ to", *(str(number) for number in range(len(facts.nodes))))
        render.show_table(head, matrix(facts, rail))
    if any(one.dead or one.slow for one in facts.rail_facts):
        render.write_plain(_MARKS)
    _more(len(facts.rails) - len(shown), "rail, all well", "rails, all well")


def _show_many(facts: NetworkFacts) -> None:
    nodes, roads = worst_nodes(facts), facts.single()
    render.write_plain(f"\n{words.nodes_title(nodes)}:")
    rows = [words.node_row(one, facts) for one in nodes[:MOST_ROWS]]
    render.show_table(words.NODE_HEAD, rows)
    if nodes[0].state >= PathState.SLOW:
        _more(len(nodes) - MOST_ROWS, "such rail of a node", "such rails of nodes")
    if roads:
        render.write_plain(f"\n{words.SINGLE_ROADS}:")
        render.show_table(
            words.ROAD_HEAD, [words.road_row(road, facts) for road in roads[:MOST_ROWS]]
        )
        _more(len(roads) - MOST_ROWS, "such road", "such roads")


def _more(number: int, thing: str, things: str) -> None:
    if number > 0:
        render.write_plain(f"and {number:,} more {thing if number == 1 else things}")
