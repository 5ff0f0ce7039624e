"""The picture of many nodes: a box for each leaf switch, a square for each node.

Runs in: cli. Pure.
"""

import math
from collections.abc import Sequence

from markupsafe import Markup

from ftrun.cli.screen.text import count
from ftrun.tools.network_view import text as words
from ftrun.tools.network_view.facts import NetworkFacts, PathState, between_leaves
from ftrun.tools.network_view.network_legend import (
    UP,
    Entry,
    about,
    crossings,
    draw_legend,
    legend_height,
)
from ftrun.tools.report.render.svg import Drawing, fit

_WIDTH, _EDGE, _GAP = 980.0, 12.0, 10.0
_HEAD = 40.0
_LEAST_BOX = 108.0
_MOST_BOXES = 160
"""So many leaves are drawn; the bad ones among the others stand in the tables."""
_MOST_TIPS = 400
_GOOD = "at-2"
_STYLES = ("at-some", "at-slow", "at-dead")
_WORDS = (
    "a single road of it is bad",
    "a rail of it is slow",
    "a rail of it is dead",
)


def many_picture(facts: NetworkFacts, style_sheet: str = "") -> Markup:
    """For any number of nodes; few have a better one."""
    groups = list(facts.leaves.items()) or [("", facts.nodes)]
    shown = groups[:_MOST_BOXES]
    side = 14.0 if len(facts.nodes) <= 300 else 9.0 if len(facts.nodes) <= 1200 else 6.0
    largest = max((len(nodes) for _, nodes in shown), default=1)
    room = math.floor((_WIDTH - 4 * _EDGE) / side)
    columns = room if len(shown) == 1 else max(1, min(16, largest, room))
    box_wide = max(columns * side + 2 * _EDGE, _LEAST_BOX)
    box_high = _HEAD + math.ceil(largest / columns) * side + _EDGE
    in_row = max(1, int((_WIDTH - 2 * _EDGE + _GAP) / (box_wide + _GAP)))
    rows = math.ceil(len(shown) / in_row)
    top = 34.0
    legend_top = top + rows * (box_high + _GAP) + 8
    levels = _levels(facts)
    entries = _entries(facts, levels, len(groups) - len(shown))
    height = legend_top + legend_height(entries, _WIDTH)
    drawing = Drawing(
        _WIDTH, height, name="network", title="Leaf switches and nodes", about=about(facts)
    )
    drawing.rect(0, 0, _WIDTH, height, "paper")
    drawing.text(_EDGE, 20, _title(facts), "tick")
    between = between_leaves(facts)
    bad: list[tuple[float, float, str]] = []
    good: list[str] = []
    for number, (leaf, nodes) in enumerate(shown):
        left = _EDGE + (number % in_row) * (box_wide + _GAP)
        y = top + (number // in_row) * (box_high + _GAP)
        drawing.rect(left, y, box_wide, box_high, "leaf-box")
        name = leaf or ("no leaf known" if facts.leaves else "leaf switches are not known")
        drawing.text(left + 8, y + 16, fit(name, box_wide - 16, 13), "label strong")
        drawing.text(left + 8, y + 32, _uplink(between.get(leaf, 0.0), box_wide), "tick")
        for place, node in enumerate(nodes):
            x = left + _EDGE + side * (place % columns)
            at = y + _HEAD + side * (place // columns)
            if levels.get(node):
                bad.append((x, at, node))
            else:
                good.append(f"M{x:.1f} {at:.1f}h{side - 2:.0f}v{side - 2:.0f}h-{side - 2:.0f}z")
    drawing.shape("".join(good), _GOOD)
    for number, (x, at, node) in enumerate(bad):
        level = levels[node]
        tip = f"{node}: {_WORDS[level - 1]}" if number < _MOST_TIPS else ""
        drawing.rect(x, at, side - 2, side - 2, _STYLES[level - 1], tip)
    draw_legend(drawing, entries, _WIDTH, legend_top)
    return drawing.markup(style_sheet)


def _title(facts: NetworkFacts) -> str:
    if not facts.leaves:
        return "nodes in the order of the ring"
    return "leaf switches and their nodes, in the order of the ring: from the left, row by row"


def _levels(facts: NetworkFacts) -> dict[str, int]:
    """0: all well; else which of the styles."""
    found: dict[str, int] = {}
    for one in facts.node_rails.values():
        level = {PathState.SLOW: 2, PathState.DEAD: 3}.get(one.state, 0)
        found[one.node] = max(found.get(one.node, 0), level)
    for road in facts.single():
        for end in (road.source, road.destination):
            found[end] = max(found[end], 1)
    return found


def _uplink(per_s: float, room: float) -> str:
    return fit(f"up {words.rate(per_s)}", room - 16, 11.5) if per_s > 0 else ""


def _entries(facts: NetworkFacts, levels: dict[str, int], hidden: int) -> Sequence[Entry]:
    found: list[Entry] = [("box", _GOOD, "a node, all well")]
    there = set(levels.values())
    found += [
        ("box", style, told)
        for level, (style, told) in enumerate(zip(_STYLES, _WORDS, strict=True), 1)
        if level in there
    ]
    if len(facts.leaves) > 1:
        found.append(UP)
    if len(facts.ring) > 1:
        found.append(("", "", f"ring: {crossings(facts)}"))
    if hidden > 0:
        found.append(("", "", f"and {count(hidden, 'leaf switch')} more"))
    return found
