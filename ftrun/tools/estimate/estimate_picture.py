"""Draws goodput over the number of nodes, with a curve for each strategy.

Runs in: cli. Pure.
"""

import math
from collections.abc import Sequence

from markupsafe import Markup

from ftrun.cli.screen.text import duration, percent
from ftrun.tools.estimate.outlook import Outlook
from ftrun.tools.estimate.text import WAYS
from ftrun.tools.report.render.svg import Drawing, nice

_WIDTH, _HEIGHT = 980.0, 430.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 660.0, 40.0, 362.0
_LINE = 32.0
"""Pixels; twice the minimum distance between the labels of two curves."""
_TICK_PX = 78.0


def picture(outlooks: Sequence[Outlook], style_sheet: str = "") -> Markup:
    """Draws the picture for one or more numbers of nodes in rising order.

    Args:
        outlooks: results with the same assumptions.
        style_sheet: styles to embed if the picture is a file of its own.
    """
    ways = _goodputs(outlooks)
    last = outlooks[-1]
    about = f"with {last.nodes:,} nodes " + ", ".join(
        f"{name} {percent(way[-1])}" for name, way in zip(WAYS, ways, strict=True)
    )
    title = "Goodput over the number of nodes"
    drawing = Drawing(_WIDTH, _HEIGHT, name="estimate", title=title, about=about)
    drawing.rect(0, 0, _WIDTH, _HEIGHT, "paper")
    drawing.text(_LEFT, 20, "part of the time that is progress (goodput)", "label strong")
    least = _floor(min(min(way) for way in ways))
    xs = _xs([one.nodes for one in outlooks])
    _grid(drawing, outlooks, xs, least)
    lines = [[(x, _y(value, least)) for x, value in zip(xs, way, strict=True)] for way in ways]
    for number, points in enumerate(lines):
        if len(points) > 1:
            drawing.path(points, f"way-{number}")
        for x, y in points:
            drawing.rect(x - 2.5, y - 2.5, 5, 5, f"at-{number}")
    ends = _apart([points[-1][1] for points in lines])
    for number, (name, y) in enumerate(zip(WAYS, ends, strict=True)):
        drawing.rect(_RIGHT + 16, y - 5, 10, 10, f"at-{number}")
        drawing.text(_RIGHT + 32, y + 4, f"{percent(ways[number][-1])}  {name}", "label")
    return drawing.markup(style_sheet)


def _goodputs(outlooks: Sequence[Outlook]) -> list[list[float]]:
    return [
        [one.periodic.goodput for one in outlooks],
        [one.noticed.goodput for one in outlooks],
        [one.ftrun.goodput for one in outlooks],
    ]


def _floor(least: float) -> float:
    """Returns the lower end of the axis: 0, or close to the values if all are 0.7 or more."""
    if least < 0.7:
        return 0.0
    part = nice((1.0 - least) / 4)
    return max(0.0, 1.0 - part * math.ceil((1.0 - least) / part + 1e-9))


def _xs(nodes: Sequence[int]) -> list[float]:
    """Returns logarithmic positions: every doubling has the same width."""
    low, high = math.log2(nodes[0]), math.log2(nodes[-1])
    if high == low:
        return [(_LEFT + _RIGHT) / 2]
    return [_LEFT + 20 + (math.log2(one) - low) / (high - low) * (_RIGHT - _LEFT - 40)
            for one in nodes]  # fmt: skip


def _y(value: float, least: float) -> float:
    return _BOTTOM - (value - least) / (1.0 - least) * (_BOTTOM - _TOP)


def _grid(drawing: Drawing, outlooks: Sequence[Outlook], xs: Sequence[float], least: float) -> None:
    part = nice((1.0 - least) / 5)
    for index in range(round((1.0 - least) / part) + 1):
        value = 1.0 - index * part
        if value < least - 1e-9:
            break
        y = _y(value, least)
        drawing.line(_LEFT, y, _RIGHT, y, "grid")
        drawing.text(_LEFT - 8, y + 4, f"{100 * value:.4g} %", "tick", "end")
    after = math.inf
    # Begin at the largest number, which is always labelled.
    for one, x in zip(reversed(outlooks), reversed(xs), strict=True):
        drawing.line(x, _TOP, x, _BOTTOM, "grid")
        if after - x < _TICK_PX:
            continue
        after = x
        drawing.text(x, _BOTTOM + 18, f"{one.nodes:,}", "tick", "middle")
        shown = "never" if math.isinf(one.mtbf_s) else duration(one.mtbf_s)
        drawing.text(x, _BOTTOM + 36, shown, "tick", "middle")
    drawing.text(_RIGHT + 32, _BOTTOM + 18, "nodes", "tick")
    drawing.text(_RIGHT + 32, _BOTTOM + 36, "between two failures", "tick")


def _apart(ys: Sequence[float]) -> list[float]:
    """Moves the heights apart so that no two labels overlap."""
    order = sorted(range(len(ys)), key=lambda index: (ys[index], -index))
    placed: dict[int, float] = {}
    lowest = -math.inf
    for index in order:
        lowest = max(ys[index], lowest + _LINE / 2)
        placed[index] = lowest
    return [placed[index] for index in range(len(ys))]
