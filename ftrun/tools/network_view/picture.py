"""The picture of a network: leaf switches, nodes in ring order, rails, and what is bad of them.

Runs in: cli. Pure. For many nodes it is `network_many_picture`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ftrun.network.detect.localization import SLOW
from ftrun.tools.network_view import text as words
from ftrun.tools.network_view.facts import NetworkFacts, PathState, between_leaves
from ftrun.tools.network_view.network_legend import (
    about,
    draw_legend,
    legend_height,
    rail_entries,
    rail_style,
)
from ftrun.tools.network_view.network_many_picture import many_picture
from ftrun.tools.report.render.svg import Drawing, fit

FEW_DRAWN = 12
"""Up to so many nodes each has a box with its rates."""
MOST_RAILS = 6
_MOST_SINGLE = 6
_WIDTH, _LEFT, _RIGHT = 980.0, 92.0, 968.0
_GAP, _EDGE = 18.0, 12.0
_BAR, _BAR_STEP, _LINE = 6.0, 15.0, 16.0
_MOST_SLOT = 132.0


@dataclass(frozen=True, slots=True)
class _Places:
    """Where everything is, in pixels."""

    rails: Sequence[str]
    slot: float
    middle: dict[str, float]
    """Of each node."""
    boxes: list[tuple[str, float, float]]
    """Leaf, left and right end."""
    top: float
    """Of the leaf boxes."""

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
    """For any number of nodes.

    Args:
        facts: of one survey.
        style_sheet: for a file of its own.
    """
    if len(facts.nodes) > FEW_DRAWN:
        return many_picture(facts, style_sheet)
    places = _places(facts)
    single = facts.single()[:_MOST_SINGLE]
    arcs = 84.0 if len(facts.ring) > 1 else 12.0
    words_top = places.bottom + arcs
    legend_top = words_top + _LINE * len(single) + 14
    entries = rail_entries(facts, places.rails)
    height = legend_top + legend_height(entries, _WIDTH)
    drawing = Drawing(
        _WIDTH, height, name="network", title="Nodes, leaf switches and rails", about=about(facts)
    )
    drawing.rect(0, 0, _WIDTH, height, "paper")
    drawing.text(_EDGE, 20, "rates in MB/s", "tick")
    _leaves(drawing, facts, places)
    for node in facts.nodes:
        _node(drawing, facts, places, node)
    _ring(drawing, facts, places)
    for number, road in enumerate(single):
        _single(drawing, places, (road.source, road.destination))
        told = f"{words.road_name(road)} over {road.rail}: {words.wrong(road, facts)}"
        y = words_top + _LINE * (number + 1)
        drawing.text(_LEFT, y, fit(told, _RIGHT - _LEFT, 13), "mark-label")
    draw_legend(drawing, entries, _WIDTH, legend_top)
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
                told = fit(f"up {words.megabytes(rate)}", right + _GAP - x - 8)
                drawing.text(x + 8, 82, told, "mark-label" if is_slow else "tick")
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
                _cross(drawing, x, (top + places.node_top) / 2)
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
        told = "dead" if state is PathState.DEAD else "-"
        if known is not None and known.lower_per_s > 0 and state is not PathState.DEAD:
            told = words.megabytes(known.lower_per_s)
        ink = "mark-label" if state >= PathState.SLOW else "tick"
        drawing.text(left + 19, y, fit(told, wide - 22), ink)


def _cross(drawing: Drawing, x: float, y: float) -> None:
    drawing.line(x - 5, y - 5, x + 5, y + 5, "cross")
    drawing.line(x - 5, y + 5, x + 5, y - 5, "cross")


def _ring(drawing: Drawing, facts: NetworkFacts, places: _Places) -> None:
    """From each node to the next one in the order, and from the last to the first."""
    ring = facts.ring
    if len(ring) < 2:
        return
    pairs = list(zip(ring, [*ring[1:], ring[0]], strict=True))
    for one, other in pairs if len(ring) > 2 else pairs[:1]:
        _arc(drawing, places, (one, other), 10.0, "ring")


def _single(drawing: Drawing, places: _Places, ends: tuple[str, str]) -> None:
    _arc(drawing, places, ends, 24.0, "link-dead")


def _arc(
    drawing: Drawing, places: _Places, ends: tuple[str, str], least: float, style: str
) -> None:
    a, b = (places.middle[end] for end in ends)
    # The ends of two arcs at one node stand beside each other.
    shift = 5.0 if b > a else -5.0
    depth = min(least + abs(b - a) * 0.09, 84.0)
    y = places.bottom + 2
    drawing.shape(
        f"M{a + shift:.1f} {y:.1f}C{a + shift:.1f} {y + depth:.1f} "
        f"{b - shift:.1f} {y + depth:.1f} {b - shift:.1f} {y:.1f}",
        style,
    )
