"""Formats one status as lines that fit a terminal.

If the terminal is narrow, columns are dropped in the order of their weight. If it is low, closed
incidents are dropped first. Then similar ranks of a node share a row, and then similar nodes. Ranks
are similar if they differ only in noise, such as one step or some milliseconds.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ftrun.cli.screen.text import clean, count, duration, ranges
from ftrun.wire.messages.status import (
    ExclusionStatus,
    IncidentStatus,
    NodeStatus,
    RankStatus,
    StatusView,
)

LATE_SHARE = 0.1  # share of a step; less lateness is noise
ALIKE = 1.25  # step times of similar ranks differ by at most this factor
REPORT_AGE_S = 1.5  # maximum age of a node's report; a difference within this time is noise
SEEN_S = 3.0  # the minimum age of a rank's last step at which the rank counts as stalled
MAX_NAME = 40
_MAX_TEXT = 1000
_GAP = "  "
_MIN_ROWS = 3
_MIN_REMARK = 22
_OPEN_LINES = 6  # most lines of an open incident
_Column = tuple[str, list[str], int]  # heading, cells, weight
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

_Signature = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class StyledLine:
    """One line; `style` is `ok`, `warn`, `bad`, `head`, `dim` or empty."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class StatusRow:
    """One row of formatted text; a field is empty if its value is unknown."""

    node: str
    ranks: str
    state: str
    step: str = ""
    time: str = ""
    late: str = ""
    call: str = ""
    seen: str = ""
    phase: str = ""
    loss: str = ""
    remark: str = ""
    is_odd: bool = False  # the row differs from most others, or something is wrong with it


def page(
    view: StatusView, *, width: int, height: int, steps_per_s: float | None
) -> list[StyledLine]:
    """Builds the complete page, which exceeds `height` lines only on a very low terminal."""
    # The terminal cuts the end of a page that is too long, so open incidents come first.
    head = [*_head(view, width, steps_per_s), *_open_incidents(view, width)]
    snapshots, closed = _snapshots(view, width), _closed_incidents(view, width)
    room = height - len(head) - len(snapshots) - 3  # blank lines, headings
    while len(closed) > 1 and room - len(closed) < _MIN_ROWS:
        closed.pop()
    rows = rows_of(view, max_rows=max(_MIN_ROWS, room - len(closed)))
    table = [StyledLine(""), *_table(rows, width)] if rows else []
    return [*head, *table, StyledLine(""), *snapshots, *closed]


def incident_line(incident: IncidentStatus) -> str:
    text = clean(incident.text, _MAX_TEXT).replace("\n", " ")
    age = duration(incident.age_s)
    kind = incident.verdict_kind or "no verdict yet"
    kind += f", {clean(incident.error_class, MAX_NAME)}" if incident.error_class else ""
    when = f"{incident.state.upper()} for {age}" if incident.is_open else f"{age} ago"
    return f"incident {incident.number}  {when}: {kind}{_cost(incident)}: {text}"


def excluded_line(one: ExclusionStatus) -> str:
    """`node b is excluded for 41 min more: 3 failures in an hour`."""
    left = "" if one.left_s is None else f" for {duration(one.left_s)} more"
    return f"node {one.node_id} is excluded{left}: {one.reason}"


def every_steps(interval: int) -> str:
    return "every step" if interval == 1 else f"every {count(interval, 'step')}"


def mark_of(view: StatusView, *, warns_of_incidents: bool) -> str:
    """Returns the style of the summary: `ok`, `warn` or `bad`."""
    is_protected = view.snapshots is None or view.snapshots.protected
    is_open = warns_of_incidents and any(one.is_open for one in view.incidents)
    mark = _MARK.get(view.state, "")
    return "warn" if mark == "ok" and (is_open or not is_protected) else mark


def _cost(incident: IncidentStatus) -> str:
    parts = []
    if incident.recovered_s is not None:
        parts.append(f"training again after {duration(incident.recovered_s)}")
    if incident.steps_lost is not None:
        parts.append(f"{count(incident.steps_lost, 'step')} lost")
    return f" ({', '.join(parts)})" if parts else ""


def _head(view: StatusView, width: int, steps_per_s: float | None) -> list[StyledLine]:
    summary = clean(view.summary, _MAX_TEXT).replace("\n", " ")
    mark = mark_of(view, warns_of_incidents=True)
    parts = [f"run {clean(view.run_id, 120)}"]
    if view.uptime_s is not None:
        parts.append(f"up {duration(view.uptime_s)}")
    if steps_per_s is not None:
        parts.append(f"{steps_per_s:.3g} steps/s")
    if view.lifecycle:
        parts.append(f"lifecycle: {view.lifecycle}")
    if view.restarts:
        parts.append(count(len(view.restarts), "restart"))
    first = [StyledLine(line, mark) for line in _wrapped(summary, width, most=3)]
    warnings = [
        StyledLine(line, "warn")
        for one in view.warnings[:3]
        for line in _wrapped(f"WARNING: {clean(one, _MAX_TEXT)}", width, most=2)
    ]
    excluded = view.cluster.exclusions if view.cluster is not None else ()
    out = [
        StyledLine(line, "warn")
        for one in excluded[:3]
        for line in _wrapped(clean(excluded_line(one), _MAX_TEXT), width, most=2)
    ]
    return [*first, *warnings, *out, StyledLine(_cut(_GAP.join(parts), width), "dim")]


def _open_incidents(view: StatusView, width: int) -> list[StyledLine]:
    return [
        StyledLine(line, "bad")
        for one in view.incidents
        if one.is_open
        for line in _wrapped(incident_line(one), width, most=_OPEN_LINES)
    ]


def _closed_incidents(view: StatusView, width: int) -> list[StyledLine]:
    if not view.incidents:
        return [StyledLine("no incidents", "dim")]
    closed = (incident_line(one) for one in view.incidents if not one.is_open)
    return [StyledLine(_cut(line, width), "dim") for line in closed]


def _snapshots(view: StatusView, width: int) -> list[StyledLine]:
    has = view.snapshots
    if has is None:
        return []
    text = "none yet"
    if has.step is not None:
        text = f"step {has.step:,}"
        if has.age_s is not None:
            text += f", {duration(has.age_s)} old"
        if has.every:
            text += f", {every_steps(has.every)}"
    cluster = view.cluster
    if cluster is not None and cluster.tolerated_losses is not None:
        text += f"; survives any {count(cluster.tolerated_losses, 'node')} of each group"
        text += " (a copy is on the next node)" if cluster.is_mirrored else ""
    of_run = cluster.unprotected_reason if cluster is not None else ""
    if reason := clean(has.unprotected_reason or of_run, 300):
        text += f"; UNPROTECTED: {reason}"
    lines = _wrapped(f"snapshots  {text}", width, most=2)
    found = [StyledLine(line, "" if has.protected else "warn") for line in lines]
    if view.survivors:
        lines = _wrapped(f"survivors  {clean(view.survivors, 300)}", width, most=2)
        found += [
            StyledLine(line, "" if view.survivors.startswith("yes") else "warn") for line in lines
        ]
    return found


# --- the table --------------------------------------------------------------------------------


def _table(rows: Sequence[StatusRow], width: int) -> list[StyledLine]:
    every: list[_Column] = [
        (heading, [getattr(row, field) for row in rows], weight)
        for field, heading, weight in _COLUMNS
    ]
    columns = _that_fit([one for one in every if any(one[1])], width)
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


def _wrapped(text: str, width: int, *, most: int) -> list[str]:
    lines = textwrap.wrap(text, max(10, width), break_long_words=True) or [""]
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], _cut(lines[most - 1] + "...", width)]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(1, width - 3)]}..."


# --- rows -------------------------------------------------------------------------------------


def rows_of(view: StatusView, *, max_rows: int) -> list[StatusRow]:
    """Returns all nodes and ranks in at most `max_rows` rows; the last row counts omitted ones."""
    nodes = _nodes(view)
    usual = _Usual(rank for node in nodes for rank in node.ranks)
    each = [row for node in nodes for row in _rows(node, usual, folds=False)]
    if len(each) <= max_rows:
        return each
    by_node = [_rows(node, usual, folds=True) for node in nodes]
    if sum(len(rows) for rows in by_node) <= max_rows:
        return [row for rows in by_node for row in rows]
    rows = _fold_nodes(nodes, by_node, usual)
    if len(rows) <= max_rows:
        return rows
    # An operator looks for odd rows, so they come first.
    rows.sort(key=lambda row: not row.is_odd)
    left_out = len(rows) - max_rows + 1
    return [*rows[: max_rows - 1], StatusRow("", f"... {left_out} more rows", "", is_odd=False)]


class _Usual:
    """The typical state of the ranks, against which each rank is compared."""

    def __init__(self, ranks: Iterable[RankStatus]) -> None:
        found = list(ranks)
        self.step = max((rank.step or 0 for rank in found), default=0)
        times = [rank.step_p50_s for rank in found if rank.step_p50_s]
        self.time_s = median(times) if times else 0.0
        # Reports of two nodes arrive at different times.
        self.slack = 1 + int(REPORT_AGE_S / self.time_s) if self.time_s else 1
        slowest_s = max((rank.step_p99_s or 0.0 for rank in found), default=0.0)
        self.seen_s = max(SEEN_S, 3 * slowest_s)

    def signature(self, rank: RankStatus) -> _Signature:
        """Returns equal values for similar ranks."""
        step, time_s = rank.step, rank.step_p50_s or 0.0
        behind = step is None or self.step - step > self.slack
        is_usual = not time_s or self.time_s / ALIKE <= time_s <= self.time_s * ALIKE
        return (
            rank.state,
            rank.phase,
            rank.last_collective,
            step if behind else "",
            "" if is_usual else round(time_s, 3),
            rank.rank if self.is_late(rank) else "",
            self.is_stalled(rank),
        )

    def is_late(self, rank: RankStatus) -> bool:
        late_s = rank.lateness_s
        return late_s is not None and late_s > LATE_SHARE * self.time_s > 0

    def is_stalled(self, rank: RankStatus) -> bool:
        return rank.heartbeat_age_s is not None and rank.heartbeat_age_s > self.seen_s

    def is_odd(self, rank: RankStatus) -> bool:
        behind = rank.step is not None and self.step - rank.step > self.slack
        is_wrong = rank.state in ("stopped", "ended")
        return is_wrong or behind or self.is_late(rank) or self.is_stalled(rank)


def _nodes(view: StatusView) -> Sequence[NodeStatus]:
    if view.cluster is not None and view.cluster.nodes:
        return view.cluster.nodes
    return [NodeStatus(node_id="", ranks=view.ranks)] if view.ranks else []


def _rows(node: NodeStatus, usual: _Usual, *, folds: bool) -> list[StatusRow]:
    ranks, name = node.ranks, clean(node.node_id, MAX_NAME)
    remark = clean(node.failure_reason or node.unprotected_reason, 200)
    if not ranks:
        seen, is_odd = duration(node.last_heartbeat_age_s), node.role == "lost"
        return [StatusRow(name, "", node.role, seen=seen, remark=remark, is_odd=is_odd)]
    groups = _alike(ranks, usual) if folds else [[rank] for rank in ranks]
    return [replace(_row(group, usual), node=name, remark=remark) for group in groups]


def _alike(ranks: Sequence[RankStatus], usual: _Usual) -> list[list[RankStatus]]:
    groups: dict[_Signature, list[RankStatus]] = {}
    for rank in ranks:
        groups.setdefault(usual.signature(rank), []).append(rank)
    return list(groups.values())


def _row(ranks: Sequence[RankStatus], usual: _Usual) -> StatusRow:
    first = ranks[0]
    times = [rank.step_p50_s for rank in ranks if rank.step_p50_s]
    slowest = [rank.step_p99_s for rank in ranks if rank.step_p99_s]
    lates = [rank.lateness_s for rank in ranks if rank.lateness_s is not None]
    ages = [rank.heartbeat_age_s for rank in ranks if rank.heartbeat_age_s is not None]
    losses = [rank.loss for rank in ranks if rank.loss is not None]
    time = duration(median(times)) if times else ""
    if time and slowest:
        time += f" (p99 {duration(max(slowest))})"
    return StatusRow(
        node="",
        ranks=ranges([rank.rank for rank in ranks]),
        state=clean(first.state, MAX_NAME),
        step=_span([rank.step for rank in ranks if rank.step is not None]),
        time=time,
        late=duration(max(0.0, *lates)) if lates else "",
        call=clean(first.last_collective or "", MAX_NAME),
        seen=duration(max(ages)) if ages else "",
        phase=clean(first.phase, 20),
        loss=f"{losses[0]:.4g}" if losses else "",
        is_odd=any(usual.is_odd(rank) for rank in ranks),
    )


def _fold_nodes(
    nodes: Sequence[NodeStatus], rows: Sequence[list[StatusRow]], usual: _Usual
) -> list[StatusRow]:
    groups: dict[_Signature, list[int]] = {}
    for number, node in enumerate(nodes):
        key = (
            node.role, node.failure_reason, node.unprotected_reason,
            tuple(usual.signature(rank) for rank in node.ranks),
        )  # fmt: skip
        groups.setdefault(key, []).append(number)
    found: list[StatusRow] = []
    for members in groups.values():
        if len(members) == 1:
            found += rows[members[0]]
            continue
        ranks = [rank for number in members for rank in nodes[number].ranks]
        first = rows[members[0]][0]
        names = [clean(nodes[number].node_id, MAX_NAME) for number in members]
        label = f"{names[0]} ... {names[-1]} ({len(names)})"
        folded = [_row(group, usual) for group in _alike(ranks, usual)] or [first]
        found += [replace(one, node=label, remark=first.remark) for one in folded]
    return found


def _span(steps: Sequence[int]) -> str:
    if not steps:
        return ""
    low, high = min(steps), max(steps)
    return f"{high:,}" if low == high else f"{low:,}-{high:,}"
