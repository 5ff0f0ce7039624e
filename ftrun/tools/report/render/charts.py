"""The pictures of a report: timeline, ranks over time, delays, progress, lost time.

What no picture can be made of gives None.
"""

import math
from collections.abc import Sequence

from markupsafe import Markup

from ftrun.cli.screen.text import clock, duration, percent
from ftrun.tools.report.facts import DelayView, IncidentFacts, LostTime, RunFacts, TimelineBar
from ftrun.tools.report.render.svg import Axis, Drawing, fit, nice, width_of

WIDTH = 980.0
_LABELS = 244.0
_ROW = 25.0
_EDGE = 24.0
STATES = (
    ("training", "training"),
    ("hung", "computing or hung"),
    ("waiting", "waiting in a collective"),
    ("dead", "dead, or no process"),
    ("starting", "starting"),
    ("restoring", "restoring"),
    ("unknown", "not observed"),
)


def axis_of(facts: IncidentFacts) -> Axis:
    ends = [bar.end_s for bar in facts.bars] + [facts.recovered_s or 0.0, facts.noticed_s]
    begin, end = min([0.0, *(bar.begin_s for bar in facts.bars)]), max(ends)
    first = next((bar.begin_s for bar in facts.bars if bar.style in ("dead", "starting")), 0.0)
    turn = max(first, 0.0)
    length = end - turn if turn - begin > 4 * (end - turn) > 0 else end - begin
    before = 0.05 * (turn - begin if length < end - begin else length)
    return Axis(begin - before, end + max(0.07 * length, 1e-3), left=_LABELS, right=WIDTH - _EDGE,
                turn_s=turn)  # fmt: skip


def timeline(facts: IncidentFacts) -> Markup | None:
    if not facts.bars:
        return None
    axis = axis_of(facts)
    end = max(bar.end_s for bar in facts.bars)
    step = f"to step {facts.step:,}" if facts.step is not None else ""
    rows = [TimelineBar("last good step", -1e9, 0.0, "training", step), *facts.bars]
    if facts.recovered_s is not None:
        rows.append(TimelineBar("training again", end, 1e9, "training", facts.restored and
                        f"from {facts.restored}"))  # fmt: skip
    height = _ROW * len(rows) + 30
    about = ". ".join(f"{bar.name}: {duration(bar.took_s)}" for bar in facts.bars)
    drawing = Drawing(WIDTH, height, name="timeline", title="Timeline of the incident", about=about)
    axis.draw(drawing, 2, height - 26)
    for number, bar in enumerate(rows):
        y = 4 + _ROW * number
        drawing.text(_LABELS - 10, y + 15, fit(bar.name, _LABELS - 12, 13), "label", "end")
        spans = axis.spans(bar.begin_s, bar.end_s)
        for left, right in spans:
            drawing.rect(left, y + 2, max(right - left, 2.0), _ROW - 7, bar.style, bar.note)
        is_edge = bar.took_s > 1e8
        reported = (bar.note,) if is_edge else (duration(bar.took_s), bar.note)
        words = " \u00b7 ".join(one for one in reported if one)
        left, right = spans[0][0], spans[-1][1]
        if is_edge and right - left > width_of(words) + 12:
            drawing.text(left + 7, y + 15, words, "on-bar")
        else:
            _beside(drawing, axis, spans, y + 15, words)
    return drawing.markup()


def _beside(
    drawing: Drawing, axis: Axis, spans: Sequence[tuple[float, float]], y: float, words: str
) -> None:
    """Words on the side of a bar that has more room; never across the change of scale."""
    left, right = spans[0][0], spans[-1][1]
    begin, end = _LABELS, WIDTH - 4
    if axis.is_broken and axis.gap[0] - 60 < right <= axis.gap[0]:
        right = axis.gap[1]  # no number is written across the change of scale
    after, before = end - right - 8, left - begin - 8
    shown_after, shown_before = fit(words, after), fit(words, before)
    if len(shown_after) >= len(shown_before):
        drawing.text(right + 7, y, shown_after, "value")
    else:
        drawing.text(left - 7, y, shown_before, "value", "end")


def strip(facts: IncidentFacts) -> Markup | None:
    if not facts.rows:
        return None
    axis = axis_of(facts)
    height = _ROW * len(facts.rows) + 30
    about = ". ".join(
        f"{row.label}{f', {row.role}' if row.role else ''}: "
        + ", ".join(bar.name for bar in row.bars)
        for row in facts.rows
    )
    drawing = Drawing(WIDTH, height, name="strip", title="What each rank did", about=about)
    axis.draw(drawing, 2, height - 26)
    for number, row in enumerate(facts.rows):
        y = 4 + _ROW * number
        is_culprit = row.role == "culprit"
        label = fit(row.label, _LABELS - 12, 14.5 if is_culprit else 13)
        style = "label strong" if is_culprit else "label"
        drawing.text(_LABELS - 10, y + 15, label, style, "end")
        for bar in row.bars:
            for left, right in axis.spans(bar.begin_s, bar.end_s):
                if right - left < 0.4:
                    continue
                drawing.rect(left, y + 1, right - left, _ROW - 5, bar.style, bar.name)
                if right - left > width_of(bar.name) + 8:
                    ink = {"dead": "on-dark", "unknown": "on-unknown"}.get(bar.style, "on-bar")
                    drawing.text((left + right) / 2, y + 15, bar.name, ink, "middle")
    return drawing.markup()


def heat_map(delays: DelayView) -> Markup:
    rows, columns = len(delays.senders), len(delays.receivers)
    cell = min(44.0, (WIDTH - 180) / columns, 900.0 / rows)
    known = [c for row in delays.cells_s for c in row if c is not None]
    most = max(known, default=0.0)
    names = 12 + max((width_of(one) for one in delays.senders), default=10.0)
    left, top = min(max(names, 60.0), 160.0), 44.0
    worst = max(
        ((c, s, r) for s, row in enumerate(delays.cells_s) for r, c in enumerate(row)
         if c is not None), default=None)  # fmt: skip
    about = "no delay is known" if worst is None else (
        f"the largest is {duration(worst[0])}, from {delays.senders[worst[1]]} to "
        f"{delays.receivers[worst[2]]}")  # fmt: skip
    drawing = Drawing(left + cell * columns + 40, top + cell * rows + 8, name="heat",
                      title=f"{delays.title}, by sender and receiver", about=about)  # fmt: skip
    drawing.text(left - 8, top - 26, "from \\ to", "tick", "end")
    widest = max((width_of(one) for one in delays.receivers), default=10.0)
    every = max(1, math.ceil(min(widest + 8, 120.0) / cell))
    every_row = max(1, math.ceil(12 / cell))
    for number, name in enumerate(delays.receivers):
        if number % every == 0:
            x = left + cell * (number + 0.5)
            drawing.text(x, top - 8, fit(name, cell * every), "tick", "middle")
    if cell < 24:
        _many_cells(drawing, delays, left, top, cell, most)
    for number, (name, row) in enumerate(zip(delays.senders, delays.cells_s, strict=True)):
        y = top + cell * number
        if number % every_row == 0:
            drawing.text(left - 8, y + cell / 2 + 4, fit(name, left - 8), "tick", "end")
        for column, value in enumerate(row if cell >= 24 else ()):
            level = 0 if value is None or most <= 0 else round(9 * max(value, 0.0) / most)
            style = "heat-none" if value is None else f"heat-{level}"
            is_worst = (number, column) in delays.hot
            reported = "not known" if value is None else duration(value)
            tip = f"{name} to {delays.receivers[column]}: {reported}"
            x = left + cell * column
            drawing.rect(x + 1, y + 1, cell - 2, cell - 2, style + " worst" * is_worst, tip)
            if cell >= 40 and value is not None:
                ink = "on-heat" if level > 5 else "heat-ink"
                drawing.text(x + cell / 2, y + cell / 2 + 4, _short(value), ink, "middle")
    return drawing.markup()


def _many_cells(
    drawing: Drawing, delays: DelayView, left: float, top: float, cell: float, most: float
) -> None:
    """One path for all cells of a level: a page of 64 nodes has 4,096 cells."""
    size = round(cell - 1, 1)
    by_level: dict[int, list[str]] = {}
    for number, row in enumerate(delays.cells_s):
        for column, value in enumerate(row):
            if value is not None:
                x, y = left + cell * column, top + cell * number
                level = round(9 * max(value, 0.0) / most) if most > 0 else 0
                by_level.setdefault(level, []).append(f"M{x:.1f} {y:.1f}h{size}v{size}h-{size}z")
    for level, shapes in sorted(by_level.items()):
        drawing.shape("".join(shapes), f"heat-{level}")
    for number, column in delays.hot[:200]:
        x, y = left + cell * column, top + cell * number
        drawing.rect(x - 1, y - 1, cell + 1, cell + 1, "heat-none worst")


def _short(seconds: float) -> str:
    return duration(seconds).replace(" ", "\u2009")


def progress(facts: RunFacts) -> Markup | None:
    points = facts.progress
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return None
    begin, end = facts.began_t_s, max(facts.ended_t_s, points[-1][0])
    most = max(step for _, step in points)
    height, left, top, bottom = 250.0, 70.0, 26.0, 216.0
    about = (
        f"from step {points[0][1]:,} to step {points[-1][1]:,} in {duration(end - begin)}; "
        f"{len(facts.marks)} incidents"
    )
    drawing = Drawing(WIDTH, height, name="progress", title="Steps over time", about=about)
    axis = Axis(0.0, end - begin, left=left, right=WIDTH - _EDGE)
    axis.draw(drawing, top, bottom)
    scale = max(nice(max(most, 1) / 5), 1.0)
    for index in range(int(most / scale) + 1):
        y = bottom - (bottom - top) * index * scale / max(most, 1)
        drawing.line(left, y, WIDTH - _EDGE, y, "grid")
        drawing.text(left - 8, y + 4, f"{index * scale:,.0f}", "tick", "end")
    drawing.text(left - 8, top - 10, "step", "tick", "end")

    def x_of(t_s: float) -> float:
        """A fault may have begun before the first line of the journal."""
        at_s = max(t_s - begin, 0.0)
        return axis.spans(at_s, at_s)[0][0]

    xs = [x_of(t) for t, _ in points]
    line = [(x, bottom - (bottom - top) * step / max(most, 1))
            for x, (_, step) in zip(xs, points, strict=True)]  # fmt: skip
    drawing.path(line, "curve")
    last_x = -1e9
    for at, label in facts.marks[:300]:
        x = x_of(at)
        drawing.line(x, top - 4, x, bottom, "mark")
        if x - last_x > width_of(label) + 12:
            drawing.text(x, top - 9, label, "mark-label", "middle")
            last_x = x
    drawing.text(left, bottom + 31, f"{clock(begin)} UTC", "tick")
    drawing.text(WIDTH - _EDGE, bottom + 31, f"{clock(end)} UTC", "tick", "end")
    return drawing.markup()


def shares(facts: RunFacts) -> Markup | None:
    if facts.useful_s is None or facts.wall_s <= 0:
        return None
    parts = [LostTime("useful", facts.useful_s, ""), *facts.losses]
    about = ", ".join(f"{one.name} {percent(one.seconds / facts.wall_s)}" for one in parts)
    drawing = Drawing(WIDTH, 40, name="shares", title="Where the time went", about=about)
    x = 0.0
    for number, one in enumerate(parts):
        width = WIDTH * one.seconds / facts.wall_s
        share = percent(one.seconds / facts.wall_s)
        drawing.rect(x, 2, max(width - 1, 0.5), 34, f"share-{number}", f"{one.name}: {share}")
        words = f"{one.name} {share}"
        if width > width_of(words) + 10:
            ink = "on-dark" if number in (4, 8) else "on-bar"
            drawing.text(x + width / 2, 24, words, ink, "middle")
        x += width
    return drawing.markup()
