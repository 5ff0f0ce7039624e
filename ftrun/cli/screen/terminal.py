"""Prints to a terminal or a file; the only module that imports rich.

Runs in: cli.

Rule 1: Output that is not a terminal has no width: no line of it is wrapped, cut or padded.
Rule 2: On a terminal, text is wrapped and never cut. The live page is the exception, because it
fits the screen.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Literal, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ftrun.cli.screen.status_page import StyledLine, incident_line
from ftrun.cli.screen.text import count, duration, ranges, size, with_commas
from ftrun.ids import version
from ftrun.wire.messages.status import NodeStatus, RankStatus, RestartStatus, StatusView

NO_WIDTH = 1_000_000
"""Columns if the output is not a terminal; wider than any table."""
HOUR_S = 3600.0

_STATE_STYLE = {
    "running": "green",
    "restarting": "yellow",
    "starting": "yellow",
    "stopping": "yellow",
    "paused": "yellow",
    "orphaned": "red",
}

_LINE_STYLE = {
    "ok": "bold green",
    "warn": "yellow",
    "bad": "bold red",
    "head": "bold",
    "dim": "dim",
}


class LiveTerminal:
    """Shows a page on the whole terminal and restores the previous screen on exit."""

    def __init__(self) -> None:
        self._console = new_console()
        self._live = Live(console=self._console, screen=True, auto_refresh=False)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        return self._console.size.width, self._console.size.height

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def pause(self) -> None:
        """Restores the previous screen until `resume`."""
        self._live.stop()

    def resume(self) -> None:
        self._live.start()

    def show(self, lines: Sequence[StyledLine]) -> None:
        texts = (
            Text(line.text, _LINE_STYLE.get(line.style, ""), no_wrap=True, overflow="ellipsis")
            for line in lines
        )
        self._live.update(Group(*texts), refresh=True)


def write_plain(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def flush() -> None:
    sys.stdout.flush()


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = _new_table(head)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    _print_table(table)


def show_status(view: StatusView) -> None:
    console = new_console()
    console.print(Text(_summary(view), style=_style(view)))
    for warning in view.warnings:
        console.print(Text(f"WARNING     {warning}", style="bold yellow"))
    for line in _incident_lines(view, is_open=True):
        console.print(Text(line, style="bold red"))
    console.print(Text(_headline(view)))
    if view.cluster is not None and view.cluster.nodes:
        _print_table(_node_table(view.cluster.nodes))
    if view.ranks:
        _print_table(_rank_table(view.ranks))
    below = (
        *_snapshot_lines(view),
        *_restart_lines(view),
        *_incident_lines(view, is_open=False),
        *_other_lines(view),
    )
    for line in below:
        console.print(Text(line))


def show_pairs(rows: Iterable[tuple[str, str]]) -> None:
    table = _new_table(("", ""), has_head=False)
    for left, right in rows:
        table.add_row(Text(left, style="bold"), Text(right))
    _print_table(table)


def show_profile(rows: Sequence[tuple[str, str, str, str]]) -> None:
    """Prints rows of key, value, origin (empty if not requested) and meaning."""
    with_origin = any(origin for _, _, origin, _ in rows)
    table = _new_table(("key", "value", *(["from"] if with_origin else []), "meaning"))
    for key, value, origin, about in rows:
        middle = [Text(origin, style="dim" if origin == "default" else "")] if with_origin else []
        table.add_row(Text(key, style="bold"), Text(value), *middle, Text(about, style="dim"))
    _print_table(table)


def value_text(value: object) -> str:
    if value is None or isinstance(value, bool | int | float | list):
        return json.dumps(value)
    return str(value)


def new_console() -> Console:
    """Returns a console as wide as the terminal; without a limit if stdout is not a terminal.

    The variable COLUMNS has no effect on the latter.
    """
    side = None if sys.stdout.isatty() else NO_WIDTH
    return Console(width=side, height=side, highlight=False, markup=False, emoji=False)


def _new_table(
    head: Sequence[str], *, right: Sequence[str] = (), gap: int = 2, has_head: bool = True
) -> Table:
    """Creates a table that wraps its cells, within a word if the word is too long.

    Args:
        head: the column names.
        right: the columns that are right-aligned.
        gap: spaces between columns.
        has_head: show the names.
    """
    table = Table(box=None, show_header=has_head, pad_edge=False, padding=(0, gap, 0, 0))
    for name in head:
        justify: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(name, justify=justify, overflow="fold")
    return table


def _print_table(table: Table) -> None:
    console = new_console()
    with console.capture() as found:
        console.print(table)
    # rich pads the last column to its longest cell.
    sys.stdout.write("\n".join(line.rstrip() for line in found.get().split("\n")))


def _style(view: StatusView) -> str:
    is_safe = view.snapshots is None or view.snapshots.protected
    is_warning = view.state == "running" and not is_safe
    return f"bold {'yellow' if is_warning else _STATE_STYLE.get(view.state, '')}".strip()


def _summary(view: StatusView) -> str:
    has = view.snapshots
    if has is None or has.protected or not has.note or "UNPROTECTED" in view.summary:
        return view.summary
    return f"{view.summary} - UNPROTECTED: {has.note}"


def _headline(view: StatusView) -> str:
    parts = [f"run {view.run_id}"]
    if view.script:
        parts.append(view.script)
    if view.generation is not None and view.generation >= 0:
        parts.append(f"generation {view.generation}")
    if view.uptime_s is not None:
        parts.append(f"up {duration(view.uptime_s)}")
    if view.lifecycle:
        parts.append(f"lifecycle: {view.lifecycle}")
    return "  ".join(parts)


def _rank_table(ranks: Sequence[RankStatus]) -> Table:
    head = ("rank", "pid", "state", "step", "last step", "phase", "loss", "start")
    table = _new_table(head, right=("rank", "pid", "step"), gap=3)
    for rank in ranks:
        age_s = rank.heartbeat_age_s
        cells = (
            str(rank.rank),
            str(rank.pid),
            rank.state,
            "" if rank.step is None else f"{rank.step:,}",
            "" if age_s is None else f"{duration(age_s)} ago",
            rank.phase,
            "" if rank.loss is None else f"{rank.loss:.4g}",
            rank.start or "",
        )
        table.add_row(*(Text(cell or "-") for cell in cells))
    return table


def _node_table(nodes: Sequence[NodeStatus]) -> Table:
    head = ("node", "host", "role", "state", "ranks", "step", "last heartbeat", "remark")
    table = _new_table(head, right=("step",), gap=3)
    for node in nodes:
        check = "" if node.preflight in ("", "fit") else f"check: {node.preflight}"
        cells = (
            node.node_id,
            node.host,
            node.role,
            node.state,
            ranges([rank.rank for rank in node.ranks]),
            f"{node.step:,}" if node.ranks and node.step is not None else "",
            f"{duration(node.last_heartbeat_age_s)} ago",
        )
        remark = node.failure_reason or node.unprotected_reason or check
        table.add_row(*(Text(cell or "-") for cell in cells), Text(remark))
    return table


def _snapshot_lines(view: StatusView) -> list[str]:
    has = view.snapshots
    if has is None:
        return []
    if has.step is None:
        newest = f"none yet ({has.note})" if has.note else "none yet"
    else:
        newest = with_commas(f"newest {version(has.generation or 0, has.step)}")
        if has.age_s is not None:
            newest += f", {duration(has.age_s)} old"
    each = f"{size(has.bytes_per_rank)} per rank, " if has.bytes_per_rank else ""
    memory = f"{size(has.memory_bytes)} of memory in all"
    if has.redundancy_bytes:
        memory += f", {size(has.redundancy_bytes)} of it for other nodes"
    lines = [f"snapshots   {newest}; {each}{memory}"]
    if view.uptime_s is not None:  # no agent answered otherwise, and only the agent counts
        counts = f"{has.taken:,} taken, {has.skipped:,} skipped, {has.discarded:,} discarded"
        every = "every step" if has.every == 1 else f"every {count(has.every, 'step')}"
        lines.append(
            f"            {counts}; training was blocked for {duration(has.blocked_s)} in all"
            + (f"; {every}" if has.every else "")
        )
    return lines


def _restart_lines(view: StatusView) -> list[str]:
    """Returns the number of restarts, and those that belong to no incident that is shown."""
    if view.restart_budget is None and not view.restarts:
        return []
    shown = {number for one in view.incidents for number in one.generations}
    lines = [f"restarts    {len(view.restarts)}{_budget(view)}"]
    for restart in view.restarts:
        if restart.generation not in shown:
            cause = f"{duration(restart.age_s)} ago: {restart.cause}; "
            lines += _restart(restart, f"  {cause}")
    return lines


def _budget(view: StatusView) -> str:
    budget = view.restart_budget
    if budget is None:
        return ""
    if budget.window_s is None:
        return f" (limit {budget.limit})"
    window = "hour" if budget.window_s == HOUR_S else duration(budget.window_s)
    if budget.used == len(view.restarts):
        return f" (limit {budget.limit} per {window})"
    return f", {budget.used} of them in the last {window} (limit {budget.limit})"


def _restart(restart: RestartStatus, before: str) -> list[str]:
    restored = (
        f"from {with_commas(restart.restored)}"
        if restart.restored
        else "from the beginning of the script"
    )
    phases = ", ".join(
        f"{name} {duration(took_s)}" for name, took_s in (restart.phases_s or {}).items()
    )
    took_s = restart.downtime_s
    lines = [
        f"{before}generation {restart.generation} started {restored}"
        + (f"; on this node: {phases}" if phases else "")
        + (f"; training again after {duration(took_s)}" if took_s is not None else "")
    ]
    if restart.repeated is not None:
        lines.append(f"    {restart.repeated.text}")
    return lines


def _incident_lines(view: StatusView, *, is_open: bool) -> list[str]:
    """Returns incidents, each with the restarts that it caused."""
    lines = []
    for incident in view.incidents:
        if incident.is_open is is_open:
            lines.append(with_commas(incident_line(incident)))
            for restart in view.restarts:
                if restart.generation in incident.generations:
                    lines += _restart(restart, "  ")
    return lines


def _other_lines(view: StatusView) -> list[str]:
    lines = []
    if (written := view.checkpoint) is not None:
        what = "none yet" if written.step is None else f"step {written.step:,}"
        age = "" if written.age_s is None else f", {duration(written.age_s)} old"
        lines.append(f"checkpoint  {what}{age}; {written.directory}")
        if written.last_error:
            lines.append(f"            the next one was NOT WRITTEN: {written.last_error}")
    if (processes := view.processes) is not None:
        pids = (("agent", processes.agent), ("zygote", processes.zygote), ("smp", processes.smp))
        lines.append(f"processes   {', '.join(f'{name} {pid}' for name, pid in pids if pid)}")
    return lines
