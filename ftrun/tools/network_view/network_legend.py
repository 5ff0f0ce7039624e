"""What the colours and lines of a network's picture mean, and the picture in words.

Runs in: cli. Pure.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ftrun.cli.screen.text import count
from ftrun.tools.network_view.facts import NetworkFacts, PathState
from ftrun.tools.report.render.svg import Drawing, fit, width_of

_ROW = 22.0
_SIGN, _SPACE, _EDGE = 26.0, 24.0, 12.0

Entry = tuple[str, str, str]
"""`line` or `box`, its style, and words."""


UP: Entry = ("", "", "up: median of roads to other leaves")


def rail_entries(facts: NetworkFacts, rails: Sequence[str]) -> list[Entry]:
    """Of all that occurs in a picture of a few nodes."""
    found: list[Entry] = []
    for number, rail in enumerate(rails):
        words = f"{rail}: not for training" if rail in facts.dropped else rail
        found.append(("box", rail_style(facts, rail, number), words))
    if more := len(facts.rails) - len(rails):
        found.append(("", "", f"and {count(more, 'rail')} more"))
    states = {one.state for one in facts.node_rails.values()}
    if PathState.SLOW in states:
        found.append(("line", "link-slow", "slow beside what is alike"))
    if PathState.DEAD in states or facts.single():
        found.append(("line", "link-dead", "dead, or a single bad road"))
    if len(facts.leaves) > 1:
        found.append(UP)
    if len(facts.ring) > 1:
        found.append(("line", "ring", f"ring: {crossings(facts)}"))
    return found


def rail_style(facts: NetworkFacts, rail: str, number: int) -> str:
    """A bar in the rail's colour, which is an outline where training does not use it."""
    color = number % 4
    return f"left-out rail-{color}" if rail in facts.dropped else f"at-rail-{color}"


def crossings(facts: NetworkFacts) -> str:
    """How often the ring goes from leaf to leaf."""
    if not facts.leaves:
        return "the order of the ranks"
    ring = facts.ring
    steps = pairwise([*ring, ring[0]])
    across = sum(facts.leaf_of.get(a) != facts.leaf_of.get(b) for a, b in steps)
    return f"{across} of {count(len(ring), 'hop')} between leaves"


def about(facts: NetworkFacts) -> str:
    """The picture for those who cannot see it."""
    leaves = f" on {count(len(facts.leaves), 'leaf switch')}" if facts.leaves else ""
    dead, slow = facts.count(PathState.DEAD), facts.count(PathState.SLOW)
    bad = [
        f"{one.node}'s {one.rail} is {one.state.name.lower()}"
        for one in facts.node_rails.values()
        if one.state >= PathState.SLOW
    ]
    more = f" and {len(bad) - 12} more" if len(bad) > 12 else ""
    parts = [
        f"{count(len(facts.nodes), 'node')}{leaves}, {count(len(facts.rails), 'rail')}",
        f"{count(dead, 'dead road')}, {count(slow, 'slow road')}",
        *([", ".join(bad[:12]) + more] if bad else []),
    ]
    if len(facts.ring) > 1:
        parts.append(f"ring: {crossings(facts)}")
    return "; ".join(parts)


def legend_height(entries: Sequence[Entry], width: float) -> float:
    return _ROW * (1 + max((row for row, _, _ in _placed(entries, width)), default=-1)) + 8


def draw_legend(drawing: Drawing, entries: Sequence[Entry], width: float, top: float) -> None:
    """Below the picture, from left to right."""
    for row, x, (sign, style, text) in _placed(entries, width):
        y = top + _ROW * row + 12
        if sign == "line":
            drawing.line(x, y - 4, x + 20, y - 4, style)
        elif sign:
            drawing.rect(x, y - 9, 20 if style.startswith("left-out") else 10, 10, style)
        drawing.text(x + (_SIGN if sign else 0), y, fit(text, width - x - _SIGN - _EDGE), "tick")


def _placed(entries: Sequence[Entry], width: float) -> Iterator[tuple[int, float, Entry]]:
    """Row, left end, entry."""
    row, x = 0, _EDGE
    for entry in entries:
        wide = _SIGN + width_of(entry[2])
        if x > _EDGE and x + wide > width - _EDGE:
            row, x = row + 1, _EDGE
        yield row, x, entry
        x += wide + _SPACE
