"""Folds nodes and ranks into rows of a table that fits the terminal.

Runs in:  cli. Pure.
Takes in: the status document.
Gives:    `StatusRow`s: one per rank if they fit. Otherwise similar ranks of a node share a row,
          then similar nodes do.

Ranks are similar if they differ only in noise, such as one step or some milliseconds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ftrun.cli.screen.report_clean import clean

MAX_NAME = 40
LATE_SHARE = 0.1
"""Share of a step; less lateness is noise."""
ALIKE = 1.25
"""Step times of similar ranks differ by at most this factor."""
BEAT_S = 1.5
"""Seconds; steps within this time are no difference, because reports of a node may be that old."""
SEEN_S = 3.0
"""Seconds; the minimum age of a rank's last step at which the rank counts as silent."""

Node = Mapping[str, Any]
Rank = Mapping[str, Any]
Signature = tuple[object, ...]


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
    is_odd: bool = False
    """The row differs from most others, or something is wrong with it."""


def rows_of(document: Mapping[str, Any], *, max_rows: int) -> list[StatusRow]:
    """Returns all nodes and ranks in at most `max_rows` rows; the last row counts omitted ones."""
    nodes = _nodes(document)
    usual = _Usual(rank for node in nodes for rank in node["ranks"])
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


def in_ranges(numbers: Iterable[int]) -> str:
    """Formats as `0-6, 8`."""
    runs: list[tuple[int, int]] = []
    for one in sorted(numbers):
        if runs and one == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], one)
        else:
            runs.append((one, one))
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def short_time(seconds: float) -> str:
    """Formats as `850 us`, `12 ms`, `1.25 s`, `3 min`."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class _Usual:
    """The typical state of the ranks, against which each rank is compared."""

    def __init__(self, ranks: Iterable[Rank]) -> None:
        found = list(ranks)
        self.step = max((rank.get("step") or 0 for rank in found), default=0)
        times = [rank["step_p50_s"] for rank in found if rank.get("step_p50_s")]
        self.time_s = median(times) if times else 0.0
        # Reports of two nodes arrive at different times.
        self.slack = 1 + int(BEAT_S / self.time_s) if self.time_s else 1
        slowest_s = max((rank.get("step_p99_s") or 0.0 for rank in found), default=0.0)
        self.seen_s = max(SEEN_S, 3 * slowest_s)

    def signature(self, rank: Rank) -> Signature:
        """Returns equal values for similar ranks."""
        step, time_s = rank.get("step"), rank.get("step_p50_s") or 0.0
        behind = step is None or self.step - step > self.slack
        is_usual = not time_s or self.time_s / ALIKE <= time_s <= self.time_s * ALIKE
        return (
            rank.get("state"),
            rank.get("phase"),
            rank.get("last_collective"),
            step if behind else "",
            "" if is_usual else round(time_s, 3),
            rank.get("rank") if self.is_late(rank) else "",
            self.is_silent(rank),
        )

    def is_late(self, rank: Rank) -> bool:
        late_s = rank.get("lateness_s")
        return late_s is not None and late_s > LATE_SHARE * self.time_s > 0

    def is_silent(self, rank: Rank) -> bool:
        seen_s = _seen_s(rank)
        return seen_s is not None and seen_s > self.seen_s

    def is_odd(self, rank: Rank) -> bool:
        step = rank.get("step")
        behind = step is not None and self.step - step > self.slack
        is_wrong = rank.get("state") in ("stopped", "ended")
        return is_wrong or behind or self.is_late(rank) or self.is_silent(rank)


def _nodes(document: Mapping[str, Any]) -> list[Node]:
    nodes = (document.get("cluster") or {}).get("nodes")
    if nodes:
        return [{**node, "ranks": node.get("ranks") or []} for node in nodes]
    ranks = document.get("ranks") or []
    return [{"node": "", "place": "rank", "ranks": ranks}] if ranks else []


def _rows(node: Node, usual: _Usual, *, folds: bool) -> list[StatusRow]:
    ranks = node["ranks"]
    name = clean(str(node.get("node", "")), MAX_NAME)
    remark = clean(str(node.get("why") or node.get("unprotected") or ""), 200)
    if not ranks:
        heard_s = node.get("heard_s_ago")
        seen = "" if heard_s is None else short_time(float(heard_s))
        place = str(node.get("place", ""))
        return [StatusRow(name, "", place, seen=seen, remark=remark, is_odd=place == "lost")]
    groups = _alike(ranks, usual) if folds else [[rank] for rank in ranks]
    return [replace(_row(group, usual), node=name, remark=remark) for group in groups]


def _alike(ranks: Sequence[Rank], usual: _Usual) -> list[list[Rank]]:
    groups: dict[Signature, list[Rank]] = {}
    for rank in ranks:
        groups.setdefault(usual.signature(rank), []).append(rank)
    return list(groups.values())


def _row(ranks: Sequence[Rank], usual: _Usual) -> StatusRow:
    first = ranks[0]
    steps = [rank["step"] for rank in ranks if rank.get("step") is not None]
    times = [rank["step_p50_s"] for rank in ranks if rank.get("step_p50_s")]
    slowest = [rank["step_p99_s"] for rank in ranks if rank.get("step_p99_s")]
    lates = [rank["lateness_s"] for rank in ranks if rank.get("lateness_s") is not None]
    seens = [seen for rank in ranks if (seen := _seen_s(rank)) is not None]
    losses = [rank["loss"] for rank in ranks if rank.get("loss") is not None]
    time = short_time(median(times)) if times else ""
    if time and slowest:
        time += f" (p99 {short_time(max(slowest))})"
    return StatusRow(
        node="",
        ranks=in_ranges(rank["rank"] for rank in ranks),
        state=clean(str(first.get("state") or ""), MAX_NAME),
        step=_span(steps),
        time=time,
        late=short_time(max(0.0, *lates)) if lates else "",
        call=clean(str(first.get("last_collective") or ""), MAX_NAME),
        seen=short_time(max(seens)) if seens else "",
        phase=clean(str(first.get("phase") or ""), 20),
        loss=f"{losses[0]:.4g}" if losses else "",
        is_odd=any(usual.is_odd(rank) for rank in ranks),
    )


def _fold_nodes(
    nodes: Sequence[Node], rows: Sequence[list[StatusRow]], usual: _Usual
) -> list[StatusRow]:
    """Folds nodes into shared rows if all their ranks are similar."""
    groups: dict[Signature, list[int]] = {}
    for number, node in enumerate(nodes):
        key = (
            node.get("place"), node.get("why"), node.get("unprotected"),
            tuple((usual.signature(rank)) for rank in node["ranks"]),
        )  # fmt: skip
        groups.setdefault(key, []).append(number)
    found: list[StatusRow] = []
    for members in groups.values():
        if len(members) == 1:
            found += rows[members[0]]
            continue
        ranks = [rank for number in members for rank in nodes[number]["ranks"]]
        first = rows[members[0]][0]
        names = [clean(str(nodes[number].get("node", "")), MAX_NAME) for number in members]
        label = f"{names[0]} ... {names[-1]} ({len(names)})"
        if not ranks:
            found.append(replace(first, node=label))
            continue
        found += [
            replace(_row(group, usual), node=label, remark=first.remark)
            for group in _alike(ranks, usual)
        ]
    return found


def _seen_s(rank: Rank) -> float | None:
    age_s = rank.get("beat_age_s", rank.get("age_s"))
    return None if age_s is None or age_s < 0 else float(age_s)


def _span(steps: Sequence[int]) -> str:
    if not steps:
        return ""
    low, high = min(steps), max(steps)
    return f"{high:,}" if low == high else f"{low:,}-{high:,}"
