"""Formats one status document as lines that fit a terminal.

Runs in:  cli. Pure.
Takes in: the status document, the width and height of the terminal.
Gives:    `StyledLine` lines: the verdict, nodes and ranks, snapshots, incidents.

If the terminal is narrow, columns are dropped in the order of their weight. If it is low, old
incidents are dropped first, then rows are folded.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftrun.cli.screen.report_clean import clean
from ftrun.cli.screen.watch_rows import StatusRow, rows_of, short_time

_GAP = "  "
_MIN_ROWS = 3
_MIN_REMARK = 22
_MAX_TEXT = 1000

_Column = tuple[str, list[str], int]
"""Heading, cells, weight."""

_COLUMNS = (
    ("node", "node", 9),
    ("ranks", "rank", 10),
    ("state", "state", 7),
    ("step", "step", 8),
    ("time", "step time", 6),
    ("late", "late", 3),
    ("call", "last collective", 5),
    ("seen", "last step", 2),
    ("phase", "phase", 1),
    ("loss", "loss", 0),
    ("remark", "remark", 4),
)
"""Field of a row, heading, and weight; the column with the lowest weight is dropped first."""

_MARK = {"running": "ok", "restarting": "warn", "starting": "warn", "stopping": "warn",
         "paused": "warn", "orphaned": "bad"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StyledLine:
    """One line; `style` is `ok`, `warn`, `bad`, `head`, `dim` or empty."""

    text: str
    style: str = ""


def page(
    document: Mapping[str, Any], *, width: int, height: int, steps_per_s: float | None
) -> list[StyledLine]:
    """Builds the complete page.

    Args:
        document: the document that `ftrun status --json` prints.
        width: columns of the terminal.
        height: lines of the terminal; the page exceeds them only on a very low terminal.
        steps_per_s: rate since the last poll; None if unknown.
    """
    head = _head(document, width, steps_per_s)
    below = [*_snapshots(document, width)]
    incidents = _incidents(document, width)
    room = height - len(head) - len(below) - 3  # blank lines, headings
    while len(incidents) > 1 and room - sum(map(len, incidents)) < _MIN_ROWS:
        incidents.pop()
    rows = rows_of(document, max_rows=max(_MIN_ROWS, room - sum(map(len, incidents))))
    lines = [*head]
    if rows:
        lines += [StyledLine(""), *_table(rows, width)]
    lines += [StyledLine(""), *below, *(line for part in incidents for line in part)]
    return lines


def _head(document: Mapping[str, Any], width: int, steps_per_s: float | None) -> list[StyledLine]:
    verdict = clean(str(document.get("verdict") or ""), _MAX_TEXT).replace("\n", " ")
    is_open = any(one.get("state") != "closed" for one in document.get("incidents") or ())
    mark = _MARK.get(str(document.get("state")), "")
    if mark == "ok" and (is_open or not (document.get("snapshots") or {}).get("protected", True)):
        mark = "warn"
    parts = [f"run {clean(str(document.get('run_id')), 120)}"]
    if (uptime_s := document.get("uptime_s")) is not None:
        parts.append(f"up {short_time(uptime_s)}")
    if steps_per_s is not None:
        parts.append(f"{steps_per_s:.3g} steps/s")
    if life := document.get("life"):
        parts.append(f"life: {life}")
    if restarts := document.get("restarts"):
        parts.append(f"{len(restarts)} restart{'s' if len(restarts) > 1 else ''}")
    first = [StyledLine(line, mark) for line in _wrapped(verdict, width, most=3)]
    warnings = [
        StyledLine(line, "warn")
        for one in (document.get("warnings") or ())[:3]
        for line in _wrapped(f"WARNING: {clean(str(one), _MAX_TEXT)}", width, most=2)
    ]
    return [*first, *warnings, StyledLine(_cut(_GAP.join(parts), width), "dim")]


def _table(rows: Sequence[StatusRow], width: int) -> list[StyledLine]:
    columns: list[_Column] = [
        (heading, [getattr(row, field) for row in rows], weight)
        for field, heading, weight in _COLUMNS
    ]
    columns = [one for one in columns if any(one[1])]
    columns = _that_fit(columns, width)
    sizes = [_width(one) - len(_GAP) for one in columns]
    heading = _line([name for name, _, _ in columns], columns, sizes)
    found = [StyledLine(_cut(heading, width), "head")]
    for number, row in enumerate(rows):
        cells = [cells[number] or "-" for _, cells, _ in columns]
        if not row.state:  # the line with the number of omitted rows
            cells = [cell if cell != "-" else "" for cell in cells]
        text = _line(cells, columns, sizes)
        found.append(StyledLine(_cut(text, width), "warn" if row.is_odd else ""))
    return found


def _that_fit(columns: Sequence[_Column], width: int) -> list[_Column]:
    """Returns the columns of highest weight that fit; the remark column may be cut."""
    left = width + len(_GAP)
    kept: list[_Column] = []
    for column in sorted(columns, key=lambda one: -one[2]):
        needed = min(_width(column), _MIN_REMARK) if column[0] == "remark" else _width(column)
        if needed <= left or not kept:
            kept.append(column)
            left -= needed
    return [column for column in columns if column in kept]


def _line(cells: Sequence[str], columns: Sequence[_Column], sizes: Sequence[int]) -> str:
    right = ("step", "late", "last step", "loss")
    parts = [
        cell.rjust(size) if heading in right else cell.ljust(size)
        for cell, (heading, _, _), size in zip(cells, columns, sizes, strict=True)
    ]
    return _GAP.join(parts).rstrip()


def _width(column: _Column) -> int:
    heading, cells, _ = column
    return max(len(heading), *(len(cell) for cell in cells)) + len(_GAP)


def _snapshots(document: Mapping[str, Any], width: int) -> list[StyledLine]:
    has = document.get("snapshots") or {}
    if not has:
        return []
    if has.get("step") is None:
        text = "none yet"
    else:
        text = f"step {has['step']:,}"
        if has.get("age_s") is not None:
            text += f", {short_time(has['age_s'])} old"
        if has.get("every"):
            text += f", every {has['every']:,} steps" if has["every"] > 1 else ", every step"
    cluster = document.get("cluster") or {}
    if (survives := cluster.get("survives")) is not None:
        text += f"; survives any {survives} node{'' if survives == 1 else 's'} of each group"
    why = clean(str(has.get("unprotected") or cluster.get("unprotected") or ""), 300)
    if why:
        text += f"; UNPROTECTED: {why}"
    lines = _wrapped(f"snapshot   {text}", width, most=2)
    return [StyledLine(line, "" if has.get("protected") else "warn") for line in lines]


def incident_line(incident: Mapping[str, Any]) -> str:
    text = clean(str(incident.get("text") or ""), _MAX_TEXT).replace("\n", " ")
    age = short_time(incident.get("age_s") or 0.0)
    kind = incident.get("verdict_kind") or "no verdict yet"
    state = str(incident.get("state"))
    when = f"{age} ago" if state == "closed" else f"{state.upper()} for {age}"
    return f"incident {incident.get('incident')}  {when}: {kind}{_cost(incident)}: {text}"


def _incidents(document: Mapping[str, Any], width: int) -> list[list[StyledLine]]:
    """Returns the lines of each incident; open incidents are wrapped, closed ones cut."""
    found = []
    for one in document.get("incidents") or ():
        line = incident_line(one)
        if one.get("state") == "closed":
            found.append([StyledLine(_cut(line, width), "dim")])
        else:
            found.append([StyledLine(part, "bad") for part in _wrapped(line, width, most=3)])
    return found or [[StyledLine("no incidents", "dim")]]


def _cost(incident: Mapping[str, Any]) -> str:
    parts = []
    if (recovered_s := incident.get("recovered_s")) is not None:
        parts.append(f"training again after {short_time(recovered_s)}")
    if (lost := incident.get("steps_lost")) is not None:
        parts.append(f"{lost} step{'' if lost == 1 else 's'} lost")
    return f" ({', '.join(parts)})" if parts else ""


def _wrapped(text: str, width: int, *, most: int) -> list[str]:
    lines = textwrap.wrap(text, max(10, width), break_long_words=True) or [""]
    return (
        lines if len(lines) <= most else [*lines[: most - 1], _cut(lines[most - 1] + "...", width)]
    )


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(1, width - 3)]}..."
