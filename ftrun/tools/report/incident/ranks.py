"""What each rank did while an incident lasted: a row for each, equal ranks together.

Only observations count: a rank that was not observed between the first sign and the kill
is "not observed" there, however likely it is that it waited for the others.
"""

from collections.abc import Iterable, Mapping, Sequence

from ftrun.cli.screen.text import by_number, clean, duration, ranks
from ftrun.events import ExitKind, WorkersExited
from ftrun.monitor.slow.links import DelayTableCell
from ftrun.monitor.verdicts import ProcessGroupView, RankView
from ftrun.records.decode import JournalLine
from ftrun.records.incidents import VerdictRecord
from ftrun.records.membership import LeaderLost, NodeLost
from ftrun.records.recovery import Recovered
from ftrun.records.snapshots import MemoryAdopted
from ftrun.tools.report.facts import DelayView, RankRow, StackView, TimelineBar
from ftrun.tools.report.incident.grouping import IncidentLines
from ftrun.tools.report.incident.timeline import PHASES, IncidentTimes

MAX_ROWS = 20
_MAX_FRAMES = 40
_MAX_NODES = 64
_SLOW = ("slow computation", "slow communication", "input-bound", "memory growth")


def rows_of(
    case: IncidentLines,
    moments: IncidentTimes,
    *,
    world: Sequence[int],
    homes: Mapping[int, tuple[str, str]],
    culprits: Sequence[int],
    victims: Sequence[int],
) -> list[RankRow]:
    """One row for ranks that did the same, the culprits' first; `homes`: node before and after."""
    views = _views(case)
    deaths = {rank: t_s for t_s, rank in reversed(ended_by_themselves(case, moments.acted))}
    # Ranks do not outlive their agent.
    all_died = moments.start if case.first(MemoryAdopted) is not None else None
    by_node = {line.node: line for line in case.of(Recovered)}
    length = max(moments.ended - moments.start, 1e-3)
    folded: dict[tuple[object, ...], list[int]] = {}
    shown: dict[tuple[object, ...], tuple[TimelineBar, ...]] = {}
    for rank in world:
        role = "culprit" if rank in culprits else "victim" if rank in victims else ""
        home, next_placement = homes.get(rank, ("", ""))
        line = by_node.get(next_placement, moments.slowest)
        before = _before(role, moments, views.get(rank), deaths.get(rank, all_died))
        both = [*before, *_after(line, moments)]
        bars = tuple(bar for bar in both if bar.took_s > 1e-6)
        is_alone = role == "culprit" or home != next_placement
        alike = tuple((bar.name, _about(bar.begin_s, length)) for bar in bars)
        key = (role, (home, next_placement) if is_alone else "", alike)
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


def _views(case: IncidentLines) -> dict[int, tuple[float, RankView]]:
    found: dict[int, tuple[float, RankView]] = {}
    for line in case.of(VerdictRecord):
        for view in line.record.ranks:
            found.setdefault(view.rank, (line.t_s, view))
    return found


def ended_by_themselves(case: IncidentLines, acted: float | None) -> list[tuple[float, int]]:
    """(time, rank) of ranks that had ended before ftrun ended any."""
    return [
        (line.t_s, one.rank)
        for line in case.of(WorkersExited)
        if acted is None or line.t_s <= acted
        for one in line.record.exits
        if one.kind is not ExitKind.FINISHED
    ]


def _before(
    role: str, moments: IncidentTimes, seen: tuple[float, RankView] | None, died: float | None
) -> list[TimelineBar]:
    """Until the ranks are ended."""
    end = _stop_begins(moments) - moments.start
    last_step, style, name = 0.0, "unknown", "not observed"
    if died is not None:
        last_step, style, name = max(died - moments.start, 0.0), "dead", "dead"
    elif seen is not None:
        at_s, view = seen
        last_step = min(max(at_s - view.unresponsive_s - moments.start, 0.0), end)
        style, name = _style(view, role)
    elif role == "culprit":
        style, name = "dead", "no sign of life"
    return [
        TimelineBar("training", -1e9, last_step, "training"),
        TimelineBar(name, last_step, max(last_step, end), style),
    ]


def _style(view: RankView, role: str) -> tuple[str, str]:
    if view.is_finished:
        return "dead", "finished"
    if view.process in ("T", "t"):
        return "hung", "stopped"
    if view.waiting and role != "culprit":
        return "waiting", "waits in a collective"
    return "hung", "in a collective" if view.waiting else "computing or hung"


def _stop_begins(moments: IncidentTimes) -> float:
    slowest = moments.slowest
    noticed = slowest.at(slowest.record.noticed_s) if slowest is not None else None
    found = [one for one in (moments.acted, noticed) if one is not None]
    return max(min(found, default=moments.ended), moments.start)


def _after(line: JournalLine[Recovered] | None, moments: IncidentTimes) -> list[TimelineBar]:
    zero = moments.start
    begin = _stop_begins(moments) - zero
    decided = line.at(line.record.decided_s) if line is not None else None
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
    for key, after_s in (line.record.phases_s or {}).items():
        if key not in PHASES:
            continue
        took_s, (name, style) = max(after_s, 0.0), PHASES[key]
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
    """At most `MAX_ROWS`: of those with the same role, one of them stands for the many."""
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
    return kind in _SLOW


def stacks_of(
    judged: VerdictRecord | None,
    culprits: Sequence[int],
    victims: Sequence[int],
    case: IncidentLines,
) -> Iterable[StackView]:
    """Stacks of at most two culprits and of one victim; tracebacks of ranks that ended."""
    views = {one.rank: one for one in (judged.ranks if judged is not None else ())}
    others = [one for one in (*victims, *views) if one not in culprits]
    for role, chosen, most in (("culprit", culprits, 2), ("victim", others, 1)):
        shown = [views[rank] for rank in chosen if rank in views and views[rank].stack]
        for view in shown[:most]:
            frames = view.stack[:_MAX_FRAMES]
            yield StackView(f"rank {view.rank} ({role})", _doing(view), frames, view.place)
    for line in case.of(WorkersExited)[:1]:
        for one in line.record.exits[:2]:
            if one.detail.strip():
                frames = tuple(one.detail.rstrip().splitlines()[-_MAX_FRAMES:])
                yield StackView(f"rank {one.rank}: its exception", "", frames)


def _doing(view: RankView) -> str:
    words = [
        f"at step {view.step:,}",
        f"no progress for {duration(view.unresponsive_s)}",
        f"uses {view.cpu:.2f} cores",
        f"process state {view.process}" if view.process else "",
        "holds the GIL" if view.holds_gil else "",
        *(f"waits in {_collective(group)}" for group in view.groups[:3] if group.waits_seq),
        *(
            f"waits in {one.op}, peer rank {one.peer}"
            for group in view.groups[:3]
            for one in group.messages[:1]
        ),
        *view.recorder_notes,
    ]
    return ", ".join(one for one in words if one)


def _collective(group: ProcessGroupView) -> str:
    """`all_reduce #41,207 of group default_pg`."""
    call, name = group.call(group.waits_seq), clean(group.desc or group.name, 60)
    text = f"{call.op if call is not None else 'collective'} #{group.waits_seq:,}"
    return f"{text} of group {name}" if name else text


def delays_of(case: IncidentLines) -> DelayView | None:
    with_matrix = [one.record for one in case.of(VerdictRecord) if one.record.matrix]
    return _matrix(with_matrix[-1].matrix[: _MAX_NODES**2]) if with_matrix else None


def _matrix(cells: Sequence[DelayTableCell]) -> DelayView:
    known = {name for one in cells for name in (one.sender, one.receiver)}
    names = sorted(known, key=by_number)[:_MAX_NODES]
    per_mb = any(one.s_per_mb is not None for one in cells)
    at = {name: index for index, name in enumerate(names)}
    table: list[list[float | None]] = [[None] * len(names) for _ in names]
    hot = []
    for one in cells:
        if one.sender in at and one.receiver in at:
            place = (at[one.sender], at[one.receiver])
            table[place[0]][place[1]] = one.s_per_mb if per_mb else one.rtt_s
            hot += [place] if one.is_hot else []
    shown = tuple(clean(name, 30) for name in names)
    title = "time per megabyte" if per_mb else "round trip"
    return DelayView(shown, shown, tuple(tuple(row) for row in table), title, tuple(hot))


def evidence_of(case: IncidentLines, acted: float | None) -> Iterable[str]:
    """What the journal says without a verdict; ends that ftrun itself caused say nothing."""
    exits = [line for line in case.of(WorkersExited) if acted is None or line.t_s <= acted]
    for line in exits[:1]:
        yield from (f"{one.text}: as the kernel reports it" for one in line.record.exits[:8])
    yield from (line.record.text for line in case.of(NodeLost, LeaderLost)[:4])
    if case.first(MemoryAdopted) is not None:
        yield "an agent found memory of an earlier one whose run had not ended"
