"""The picture of a network: leaf switches, nodes in ring order, rails, and their bad parts.

Up to `FEW_DRAWN` nodes each have a box; more nodes are squares in boxes of leaf switches.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from ftrun.cli.screen.text import count, listed
from ftrun.network.detect.localization import SLOW
from ftrun.tools.network_view import text as words
from ftrun.tools.network_view.facts import NetworkFacts, PathState, between_leaves
from ftrun.tools.report.render.svg import Drawing, fit, width_of

Entry = tuple[str, str, str]
"""`line` or `box`, its style, and its text."""

FEW_DRAWN = 12
"""Up to this number of nodes, each node has a box with its rates."""
MOST_RAILS = 6
_MOST_SINGLE = 6
_WIDTH, _LEFT, _RIGHT = 980.0, 92.0, 968.0
_GAP, _EDGE = 18.0, 12.0
_BAR, _BAR_STEP, _LINE = 6.0, 15.0, 16.0
_MOST_SLOT = 132.0


@dataclass(frozen=True, slots=True)
class _Places:
    """Positions in pixels."""

    rails: Sequence[str]
    slot: float
    middle: dict[str, float]
    """Middle of each node box."""
    boxes: list[tuple[str, float, float]]
    """Leaf switch, left and right end."""
    top: float
    """Top of the leaf boxes."""

    def bar_y(self, number: int) -> float:
        return self.top + 32 + _BAR_STEP * number

    @property
    def node_top(self) -> float:
        return self.bar_y(len(self.rails)) + 22

    @property
    def node_bottom(self) -> float:
        return self.node_top + 30 + _LINE * len(self.rails)

    @property
    def bottom(self) -> float:
        return self.node_bottom + _EDGE


def picture(facts: NetworkFacts, style_sheet: str = "") -> Markup:
    """Draws any number of nodes; `style_sheet` is embedded in a separate file."""
    if len(facts.nodes) > FEW_DRAWN:
        return many_picture(facts, style_sheet)
    places = _places(facts)
    single = facts.single()[:_MOST_SINGLE]
    arcs = 84.0 if len(facts.ring) > 1 else 12.0
    words_top = places.bottom + arcs
    legend_top = words_top + _LINE * len(single) + 14
    entries = rail_entries(facts, places.rails)
    height = legend_top + legend_height(entries)
    drawing = Drawing(
        _WIDTH, height, name="network", title="Nodes, leaf switches and rails", about=about(facts)
    )
    drawing.rect(0, 0, _WIDTH, height, "paper")
    drawing.text(_EDGE, 20, "rates in MB/s", "tick")
    _leaves(drawing, facts, places)
    for node in facts.nodes:
        _node(drawing, facts, places, node)
    _ring(drawing, facts, places)
    for number, path in enumerate(single):
        _arc(drawing, places, (path.source, path.destination), 24.0, "link-dead")
        reported = f"{words.path_name(path)} over {path.rail}: {words.wrong(path, facts)}"
        y = words_top + _LINE * (number + 1)
        drawing.text(_LEFT, y, fit(reported, _RIGHT - _LEFT, 13), "mark-label")
    draw_legend(drawing, entries, legend_top)
    return drawing.markup(style_sheet)


def _places(facts: NetworkFacts) -> _Places:
    groups = list(facts.leaves.items()) or [("", facts.nodes)]
    room = _RIGHT - _LEFT - _GAP * (len(groups) - 1) - 2 * _EDGE * len(groups)
    slot = min(room / max(len(facts.nodes), 1), _MOST_SLOT)
    used = slot * len(facts.nodes) + (_GAP + 2 * _EDGE) * len(groups) - _GAP
    x = _LEFT + (_RIGHT - _LEFT - used) / 2
    middle: dict[str, float] = {}
    boxes = []
    for leaf, nodes in groups:
        left, x = x, x + _EDGE
        for node in nodes:
            middle[node] = x + slot / 2
            x += slot
        boxes.append((leaf, left, x + _EDGE))
        x += _EDGE + _GAP
    return _Places(
        facts.rails[:MOST_RAILS], slot, middle, boxes, 98.0 if len(facts.leaves) > 1 else 36.0
    )


def _leaves(drawing: Drawing, facts: NetworkFacts, places: _Places) -> None:
    if len(places.boxes) > 1:
        left, right = places.boxes[0][1], places.boxes[-1][2]
        drawing.rect(left, 34, right - left, 22, "leaf-box")
        drawing.text((left + right) / 2, 49, "above the leaves", "tick", "middle")
    between = between_leaves(facts)
    usual = max(facts.judged.usual_between.values(), default=0.0)
    for leaf, left, right in places.boxes:
        drawing.rect(left, places.top, right - left, places.bottom - places.top, "leaf-box")
        title = leaf or ("no leaf known" if facts.leaves else "leaf switches are not known")
        drawing.text(left + 10, places.top + 19, fit(title, right - left - 20, 13), "label strong")
        if len(places.boxes) > 1:
            x = (left + right) / 2
            drawing.line(x, 56, x, places.top, "uplink")
            rate = between.get(leaf, 0.0)
            if rate > 0:
                is_slow = rate < SLOW * usual
                reported = fit(f"up {words.megabytes(rate)}", right + _GAP - x - 8)
                drawing.text(x + 8, 82, reported, "mark-label" if is_slow else "tick")
        for number, rail in enumerate(places.rails):
            y = places.bar_y(number)
            drawing.rect(left + 8, y, right - left - 16, _BAR, rail_style(facts, rail, number))
    for number, rail in enumerate(places.rails):
        x = places.boxes[0][1] - 8
        drawing.text(x, places.bar_y(number) + 7, fit(rail, x - 6), "tick", "end")


def _node(drawing: Drawing, facts: NetworkFacts, places: _Places, node: str) -> None:
    middle, wide = places.middle[node], places.slot - 10
    left = middle - wide / 2
    step = min(14.0, (wide - 12) / max(len(places.rails), 1))
    first = middle - step * (len(places.rails) - 1) / 2
    for number, rail in enumerate(places.rails):
        known = facts.node_rails.get((node, rail))
        if known is not None:
            x, top = first + step * number, places.bar_y(number) + _BAR
            style = {PathState.SLOW: "link-slow", PathState.DEAD: "link-dead"}
            drawing.line(
                x, top, x, places.node_top, style.get(known.state, f"link rail-{number % 4}")
            )
            if known.state is PathState.DEAD:
                y = (top + places.node_top) / 2
                drawing.line(x - 5, y - 5, x + 5, y + 5, "cross")
                drawing.line(x - 5, y + 5, x + 5, y - 5, "cross")
    height = places.node_bottom - places.node_top
    drawing.rect(left, places.node_top, wide, height, "node-box")
    place = f"{facts.ring.index(node)} " if node in facts.ring else ""
    name = fit(f"{place}{node}", wide - 10, 13)
    drawing.text(left + 6, places.node_top + 17, name, "label strong")
    for number, rail in enumerate(places.rails):
        y = places.node_top + 32 + _LINE * number
        drawing.rect(left + 6, y - 8, 8, 8, f"at-rail-{number % 4}")
        known = facts.node_rails.get((node, rail))
        state = known.state if known is not None else PathState.UNKNOWN
        reported = "dead" if state is PathState.DEAD else "-"
        if known is not None and known.lower_per_s > 0 and state is not PathState.DEAD:
            reported = words.megabytes(known.lower_per_s)
        ink = "mark-label" if state >= PathState.SLOW else "tick"
        drawing.text(left + 19, y, fit(reported, wide - 22), ink)


def _ring(drawing: Drawing, facts: NetworkFacts, places: _Places) -> None:
    ring = facts.ring
    if len(ring) < 2:
        return
    pairs = list(zip(ring, [*ring[1:], ring[0]], strict=True))
    for one, other in pairs if len(ring) > 2 else pairs[:1]:
        _arc(drawing, places, (one, other), 10.0, "ring")


def _arc(
    drawing: Drawing, places: _Places, ends: tuple[str, str], least: float, style: str
) -> None:
    a, b = (places.middle[end] for end in ends)
    # The ends of two arcs at one node are next to each other.
    shift = 5.0 if b > a else -5.0
    depth = min(least + abs(b - a) * 0.09, 84.0)
    y = places.bottom + 2
    drawing.shape(
        f"M{a + shift:.1f} {y:.1f}C{a + shift:.1f} {y + depth:.1f} "
        f"{b - shift:.1f} {y + depth:.1f} {b - shift:.1f} {y:.1f}",
        style,
    )


# --- many nodes -------------------------------------------------------------------------------

_BOX_GAP = 10.0
_HEAD = 40.0
_LEAST_BOX = 108.0
_MOST_BOXES = 160
"""Largest number of leaf switches that are drawn; the tables show bad nodes of all."""
_MOST_TIPS = 400
_GOOD = "at-2"
_STYLES = ("at-some", "at-slow", "at-dead")
_LEVEL_WORDS = ("one path of it is bad", "a rail of it is slow", "a rail of it is dead")


def many_picture(facts: NetworkFacts, style_sheet: str = "") -> Markup:
    groups = list(facts.leaves.items()) or [("", facts.nodes)]
    shown = groups[:_MOST_BOXES]
    side = 14.0 if len(facts.nodes) <= 300 else 9.0 if len(facts.nodes) <= 1200 else 6.0
    largest = max((len(nodes) for _, nodes in shown), default=1)
    room = math.floor((_WIDTH - 4 * _EDGE) / side)
    columns = room if len(shown) == 1 else max(1, min(16, largest, room))
    box_wide = max(columns * side + 2 * _EDGE, _LEAST_BOX)
    box_high = _HEAD + math.ceil(largest / columns) * side + _EDGE
    in_row = max(1, int((_WIDTH - 2 * _EDGE + _BOX_GAP) / (box_wide + _BOX_GAP)))
    rows = math.ceil(len(shown) / in_row)
    top = 34.0
    legend_top = top + rows * (box_high + _BOX_GAP) + 8
    levels = _levels(facts)
    entries = _many_entries(facts, levels, len(groups) - len(shown))
    height = legend_top + legend_height(entries)
    drawing = Drawing(
        _WIDTH, height, name="network", title="Leaf switches and nodes", about=about(facts)
    )
    drawing.rect(0, 0, _WIDTH, height, "paper")
    order = "in the order of the ring"
    title = f"leaf switches and their nodes, {order}: from the left, row by row"
    drawing.text(_EDGE, 20, title if facts.leaves else f"nodes {order}", "tick")
    between = between_leaves(facts)
    bad: list[tuple[float, float, str]] = []
    good: list[str] = []
    for number, (leaf, nodes) in enumerate(shown):
        left = _EDGE + (number % in_row) * (box_wide + _BOX_GAP)
        y = top + (number // in_row) * (box_high + _BOX_GAP)
        drawing.rect(left, y, box_wide, box_high, "leaf-box")
        name = leaf or ("no leaf known" if facts.leaves else "leaf switches are not known")
        drawing.text(left + 8, y + 16, fit(name, box_wide - 16, 13), "label strong")
        per_s = between.get(leaf, 0.0)
        uplink = fit(f"up {words.rate(per_s)}", box_wide - 16, 11.5) if per_s > 0 else ""
        drawing.text(left + 8, y + 32, uplink, "tick")
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
        tip = f"{node}: {_LEVEL_WORDS[level - 1]}" if number < _MOST_TIPS else ""
        drawing.rect(x, at, side - 2, side - 2, _STYLES[level - 1], tip)
    draw_legend(drawing, entries, legend_top)
    return drawing.markup(style_sheet)


def _levels(facts: NetworkFacts) -> dict[str, int]:
    """Index of the style, from 1; 0: no fault."""
    found: dict[str, int] = {}
    for one in facts.node_rails.values():
        level = {PathState.SLOW: 2, PathState.DEAD: 3}.get(one.state, 0)
        found[one.node] = max(found.get(one.node, 0), level)
    for path in facts.single():
        for end in (path.source, path.destination):
            found[end] = max(found[end], 1)
    return found


def _many_entries(facts: NetworkFacts, levels: dict[str, int], hidden: int) -> Sequence[Entry]:
    found: list[Entry] = [("box", _GOOD, "a node without a fault")]
    there = set(levels.values())
    found += [
        ("box", style, reported)
        for level, (style, reported) in enumerate(zip(_STYLES, _LEVEL_WORDS, strict=True), 1)
        if level in there
    ]
    found += _shared_entries(facts, "")
    if hidden > 0:
        found.append(("", "", f"and {count(hidden, 'leaf switch')} more"))
    return found


# --- the legend -------------------------------------------------------------------------------

_ROW = 22.0
_SIGN, _SPACE = 26.0, 24.0
UP: Entry = ("", "", "up: median of paths to other leaves")


def rail_entries(facts: NetworkFacts, rails: Sequence[str]) -> list[Entry]:
    found: list[Entry] = []
    for number, rail in enumerate(rails):
        words = f"{rail}: not for training" if rail in facts.dropped else rail
        found.append(("box", rail_style(facts, rail, number), words))
    if more := len(facts.rails) - len(rails):
        found.append(("", "", f"and {count(more, 'rail')} more"))
    states = {one.state for one in facts.node_rails.values()}
    if PathState.SLOW in states:
        found.append(("line", "link-slow", "slower than similar paths"))
    if PathState.DEAD in states or facts.single():
        found.append(("line", "link-dead", "dead, or one bad path"))
    return [*found, *_shared_entries(facts, "line")]


def _shared_entries(facts: NetworkFacts, sign: str) -> list[Entry]:
    up = [UP] * (len(facts.leaves) > 1)
    return [*up, *[(sign, "ring", f"ring: {crossings(facts)}")] * (len(facts.ring) > 1)]


def rail_style(facts: NetworkFacts, rail: str, number: int) -> str:
    """Returns a bar in the rail's colour; an outline if training does not use the rail."""
    color = number % 4
    return f"left-out rail-{color}" if rail in facts.dropped else f"at-rail-{color}"


def crossings(facts: NetworkFacts) -> str:
    if not facts.leaves:
        return "the order of the ranks"
    ring = facts.ring
    steps = pairwise([*ring, ring[0]])
    across = sum(facts.leaf_of.get(a) != facts.leaf_of.get(b) for a, b in steps)
    return f"{across} of {count(len(ring), 'hop')} between leaves"


def about(facts: NetworkFacts) -> str:
    leaves = f" on {count(len(facts.leaves), 'leaf switch')}" if facts.leaves else ""
    dead, slow = facts.count(PathState.DEAD), facts.count(PathState.SLOW)
    bad = [
        f"{one.node}'s {one.rail} is {one.state.name.lower()}"
        for one in facts.node_rails.values()
        if one.state >= PathState.SLOW
    ]
    parts = [
        f"{count(len(facts.nodes), 'node')}{leaves}, {count(len(facts.rails), 'rail')}",
        f"{count(dead, 'dead path')}, {count(slow, 'slow path')}",
        *([listed(bad, 12)] if bad else []),
    ]
    if len(facts.ring) > 1:
        parts.append(f"ring: {crossings(facts)}")
    return "; ".join(parts)


def legend_height(entries: Sequence[Entry]) -> float:
    return _ROW * (1 + max((row for row, _, _ in _placed(entries)), default=-1)) + 8


def draw_legend(drawing: Drawing, entries: Sequence[Entry], top: float) -> None:
    for row, x, (sign, style, text) in _placed(entries):
        y = top + _ROW * row + 12
        if sign == "line":
            drawing.line(x, y - 4, x + 20, y - 4, style)
        elif sign:
            drawing.rect(x, y - 9, 20 if style.startswith("left-out") else 10, 10, style)
        drawing.text(x + (_SIGN if sign else 0), y, fit(text, _WIDTH - x - _SIGN - _EDGE), "tick")


def _placed(entries: Sequence[Entry]) -> Iterator[tuple[int, float, Entry]]:
    """Yields row, left end and entry."""
    row, x = 0, _EDGE
    for entry in entries:
        wide = _SIGN + width_of(entry[2])
        if x > _EDGE and x + wide > _WIDTH - _EDGE:
            row, x = row + 1, _EDGE
        yield row, x, entry
        x += wide + _SPACE
