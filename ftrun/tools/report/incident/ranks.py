"""What each rank did while an incident lasted: a row for each, equal ranks together.

Runs in:  cli. Pure.
Takes in: the lines of one incident, its moments, and on which node each rank is.
Gives:    rows of bars.

What was seen counts: a rank of which nobody has taken a look between the first sign and the kill
is "not looked at" there, however likely it is that it waited for the others.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ftrun.cli.screen.text import number, ranks, whole
from ftrun.tools.report.facts import RankRow, TimelineBar
from ftrun.tools.report.incident.grouping import IncidentLines
from ftrun.tools.report.incident.timeline import PHASES, IncidentTimes
from ftrun.tools.report.journal import JournalLine

MAX_ROWS = 20
_SLOW = ("slow computation", "slow communication", "input-bound", "memory creeping")


def rows_of(
    case: IncidentLines,
    moments: IncidentTimes,
    *,
    world: Sequence[int],
    homes: Mapping[int, tuple[str, str]],
    culprits: Sequence[int],
    victims: Sequence[int],
) -> list[RankRow]:
    """One row for ranks that did the same, the culprits' first.

    Args:
        case: the incident's lines.
        moments: of it.
        world: every rank there is.
        homes: of each rank, its node before and after; empty where it is not known.
        culprits: ranks of the last verdict, or those that ended by themselves.
        victims: those that only waited.
    """
    views = _views(case)
    deaths = _deaths(case, moments)
    # Ranks do not outlive their agent.
    all_died = moments.began if case.first("adopted") is not None else None
    by_node = {line.node: line for line in case.of("Recovered")}
    length = max(moments.ended - moments.began, 1e-3)
    folded: dict[tuple[object, ...], list[int]] = {}
    shown: dict[tuple[object, ...], tuple[TimelineBar, ...]] = {}
    for rank in world:
        role = "culprit" if rank in culprits else "victim" if rank in victims else ""
        home, next_home = homes.get(rank, ("", ""))
        line = by_node.get(next_home, moments.slowest)
        both = [*_before(rank, role, moments, views.get(rank), deaths.get(rank, all_died)),
                *_after(line, moments)]  # fmt: skip
        bars = tuple(bar for bar in both if bar.took_s > 1e-6)
        is_alone = role == "culprit" or home != next_home
        alike = tuple((bar.name, _about(bar.begin_s, length)) for bar in bars)
        key = (role, (home, next_home) if is_alone else "", alike)
        folded.setdefault(key, []).append(rank)
        shown.setdefault(key, bars)
    has_nodes = len(set(homes.values())) > 1
    rows = [
        RankRow(_label(found, homes if has_nodes else {}), tuple(found), str(key[0]), shown[key])
        for key, found in folded.items()
    ]
    return _fewer(rows)


def _about(at_s: float, length_s: float) -> int:
    """Times that look the same in a picture of that length; nearer to the end it is finer."""
    at_s = min(max(at_s, -length_s), 2 * length_s)
    return round(at_s / length_s * 12)


def _views(case: IncidentLines) -> dict[int, tuple[float, Mapping[str, Any]]]:
    """When each rank was looked at first, and what was seen."""
    found: dict[int, tuple[float, Mapping[str, Any]]] = {}
    for line in case.of("Verdict"):
        for view in line.parts("ranks"):
            rank = whole(view.get("rank"))
            if rank is not None:
                found.setdefault(rank, (line.t_s, view))
    return found


def _deaths(case: IncidentLines, moments: IncidentTimes) -> dict[int, float]:
    """Ranks that had ended before anybody ended them."""
    found: dict[int, float] = {}
    for line in case.of("WorkersExited"):
        if moments.acted is None or line.t_s <= moments.acted:
            for one in line.parts("exits"):
                rank = whole(one.get("rank"))
                if rank is not None and one.get("kind") != "finished":
                    found.setdefault(rank, line.t_s)
    return found


def _before(
    rank: int,
    role: str,
    moments: IncidentTimes,
    seen: tuple[float, Mapping[str, Any]] | None,
    died: float | None,
) -> list[TimelineBar]:
    """Until the ranks are ended."""
    end = _stop_begins(moments) - moments.began
    if died is not None:
        at = max(died - moments.began, 0.0)
        return [
            TimelineBar("training", -1e9, at, "training"),
            TimelineBar("dead", at, max(at, end), "dead"),
        ]
    if seen is not None:
        at_s, view = seen
        silent_s = number(view.get("silent_s")) or 0.0
        last_step = min(max(at_s - silent_s - moments.began, 0.0), end)
        style, name = _style(view, role)
        return [
            TimelineBar("training", -1e9, last_step, "training"),
            TimelineBar(name, last_step, end, style),
        ]
    if role == "culprit":
        name, style = "no sign of life", "dead"
    else:
        name, style = "not looked at", "unknown"
    return [TimelineBar("training", -1e9, 0.0, "training"), TimelineBar(name, 0.0, end, style)]


def _style(view: Mapping[str, Any], role: str) -> tuple[str, str]:
    if view.get("is_finished") is True:
        return "dead", "finished"
    if view.get("process") in ("T", "t"):
        return "hung", "stopped"
    groups = view.get("groups")
    waits = [one for one in groups if isinstance(one, dict) and whole(one.get("waits_seq"))] if (
        isinstance(groups, list)) else []  # fmt: skip
    if waits and role != "culprit":
        return "waiting", "waits in a collective"
    if waits:
        return "hung", "in a collective"
    return "hung", "computing or hung"


def _stop_begins(moments: IncidentTimes) -> float:
    noticed = moments.slowest.at_mono("noticed_s") if moments.slowest is not None else None
    found = [one for one in (moments.acted, noticed) if one is not None]
    return max(min(found, default=moments.ended), moments.began)


def _after(line: JournalLine | None, moments: IncidentTimes) -> list[TimelineBar]:
    """From the stop to the first steps."""
    zero = moments.began
    begin = _stop_begins(moments) - zero
    decided = line.at_mono("decided_s") if line is not None else None
    if line is None or decided is None:
        if moments.acted is None:
            return []
        end = moments.recovered if moments.recovered is not None else moments.ended
        found = [TimelineBar("no process, or starting", begin, end - zero, "dead")]
        if moments.recovered is not None:
            found.append(TimelineBar("training", end - zero, 1e9, "training"))
        return found
    at = max(decided - zero, begin)
    bars = [TimelineBar("no process", begin, at, "dead")]
    for key, name, style in PHASES:
        took_s = max(number(line.part("phases_s").get(key)) or 0.0, 0.0)
        label = "starting" if style == "starting" else name
        if bars[-1].style == style:
            bars[-1] = TimelineBar(label, bars[-1].begin_s, at + took_s, style)
        else:
            bars.append(TimelineBar(label, at, at + took_s, style))
        at += took_s
    return [*bars[:-1], TimelineBar("training", bars[-1].begin_s, 1e9, "training")]


def _label(found: Sequence[int], homes: Mapping[int, tuple[str, str]]) -> str:
    many = f" ({len(found)})" if len(found) > 2 else ""
    places = {homes[rank] for rank in found if rank in homes}
    if len(places) == 1:
        before, after = next(iter(places))
        where = f" on {before}" if before == after else f" on {before}, then {after}"
    else:
        where = ""
    return f"{ranks(found, most=3)}{many}{where}"


def _fewer(rows: list[RankRow]) -> list[RankRow]:
    """At most `MAX_ROWS`: of those with the same role, the many are told by one of them."""
    order = {"culprit": 0, "victim": 1, "": 2}
    rows.sort(key=lambda row: (order[row.role], row.ranks[0]))
    if len(rows) <= MAX_ROWS:
        return rows
    kept = rows[: MAX_ROWS - 3]
    for role in order:
        rest = [row for row in rows[MAX_ROWS - 3 :] if row.role == role]
        if rest:
            members = sorted(rank for row in rest for rank in row.ranks)
            label = f"{len(members)} others, as rank {rest[0].ranks[0]}"
            kept.append(RankRow(label, tuple(members), role, rest[0].bars))
    return kept


def slow_kind(kind: str) -> bool:
    """Of a verdict: the ranks go on, only slowly."""
    return kind in _SLOW
