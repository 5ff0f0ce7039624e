"""Prints to a terminal or a file; the only module that imports rich.

Rule 1: Output that is not a terminal has no width: no line of it is wrapped, cut or padded.
Rule 2: On a terminal, text is wrapped and never cut. The live page is the exception, because it
fits the screen.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Literal, Self

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ftrun.cli.screen.status_page import (
    StyledLine,
    every_steps,
    excluded_line,
    incident_line,
    mark_of,
)
from ftrun.cli.screen.text import duration, ranges, size, with_commas
from ftrun.ids import version
from ftrun.wire.messages.status import (
    NodeStatus,
    RankStatus,
    RestartStatus,
    StatusView,
    VersionStatus,
)

NO_WIDTH = 1_000_000  # columns if the output is not a terminal; wider than any table
HOUR_S = 3600.0

_STYLE_OF_MARK = {"ok": "green", "warn": "yellow", "bad": "red"}
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

    def __exit__(self, *_: object) -> None:
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


def write_json(document: object) -> None:
    write_plain(msgspec.json.format(msgspec.json.encode(document), indent=1).decode())


def show_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    gap: int = 2,
    unknown: str = "",
) -> None:
    """Prints a table; `unknown` replaces empty cells, see `_new_table`."""
    table = _new_table(head, right=right, gap=gap)
    for row in rows:
        table.add_row(*(Text(cell or unknown) for cell in row))
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
        nodes = map(_node_row, view.cluster.nodes)
        show_table(_NODE_HEAD, nodes, right=("step",), gap=3, unknown="-")
    if view.ranks:
        ranks = map(_rank_row, view.ranks)
        show_table(_RANK_HEAD, ranks, right=("rank", "pid", "step"), gap=3, unknown="-")
    lines = [
        *_snapshot_lines(view),
        *_restart_lines(view),
        *_incident_lines(view, is_open=False),
        *_other_lines(view),
    ]
    for line in lines:
        console.print(Text(line))


def show_versions(view: StatusView) -> None:
    if view.versions:
        show_table(_VERSION_HEAD, map(_version_row, view.versions), right=("size",), gap=3)
    else:
        write_plain("neither memory nor the checkpoint directory holds a version")


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
    """A console as wide as the terminal; without a limit, also of COLUMNS, if stdout is none."""
    side = None if sys.stdout.isatty() else NO_WIDTH
    return Console(width=side, height=side, highlight=False, markup=False, emoji=False)


def _new_table(
    head: Sequence[str], *, right: Sequence[str] = (), gap: int = 2, has_head: bool = True
) -> Table:
    """Cells wrap, also in a long word. Columns in `right` are right-aligned, `gap` spaces apart."""
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
    return f"bold {_STYLE_OF_MARK.get(mark_of(view, warns_of_incidents=False), '')}".strip()


def _summary(view: StatusView) -> str:
    has = view.snapshots
    if has is None or not has.unprotected_reason or "UNPROTECTED" in view.summary:
        return view.summary
    return f"{view.summary} - UNPROTECTED: {has.unprotected_reason}"


def _headline(view: StatusView) -> str:
    parts = [f"run {view.run_id}", view.script] if view.script else [f"run {view.run_id}"]
    if view.generation is not None and view.generation >= 0:
        parts.append(f"generation {view.generation}")
    if view.uptime_s is not None:
        parts.append(f"up {duration(view.uptime_s)}")
    if view.lifecycle:
        parts.append(f"lifecycle: {view.lifecycle}")
    return "  ".join(parts)


_VERSION_HEAD = ("version", "state", "age", "size", "on the nodes")


def _version_row(one: VersionStatus) -> tuple[str, ...]:
    nodes = ", ".join(f"{node_id}: {state}" for node_id, state in one.nodes.items())
    return (
        with_commas(str(version(one.generation, one.step))),
        ", ".join(one.states),
        "" if one.age_s is None else duration(one.age_s),
        size(one.num_bytes) if one.num_bytes else "",
        one.note or nodes,
    )


_RANK_HEAD = ("rank", "pid", "state", "step", "last step", "phase", "loss", "start")
_NODE_HEAD = ("node", "host", "role", "state", "ranks", "step", "last heartbeat", "remark")


def _rank_row(rank: RankStatus) -> tuple[str, ...]:
    age_s = rank.heartbeat_age_s
    return (
        str(rank.rank),
        str(rank.pid),
        rank.state,
        "" if rank.step is None else f"{rank.step:,}",
        "" if age_s is None else f"{duration(age_s)} ago",
        rank.phase,
        "" if rank.loss is None else f"{rank.loss:.4g}",
        rank.start or "",
    )


def _node_row(node: NodeStatus) -> tuple[str, ...]:
    check = "" if node.preflight in ("", "fit") else f"check: {node.preflight}"
    return (
        node.node_id,
        node.host,
        node.role,
        node.state,
        ranges([rank.rank for rank in node.ranks]),
        f"{node.step:,}" if node.ranks and node.step is not None else "",
        f"{duration(node.last_heartbeat_age_s)} ago",
        node.failure_reason or node.unprotected_reason or check or " ",
    )


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
    if has.needed_bytes:
        memory += f", up to {size(has.needed_bytes)} more needed"
    lines = [f"snapshots   {newest}; {each}{memory}"]
    if view.uptime_s is not None:  # no agent answered otherwise, and only the agent counts
        counts = f"{has.taken:,} taken, {has.skipped:,} skipped, {has.discarded:,} discarded"
        every = f"; {every_steps(has.every)}" if has.every else ""
        blocked = f"training was blocked for {duration(has.blocked_s)} in all"
        lines.append(f"            {counts}; {blocked}{every}")
    if view.survivors:
        lines.append(f"survivors   {view.survivors}")
    return lines


def _restart_lines(view: StatusView) -> list[str]:
    """Returns the number of restarts, and those that belong to no incident that is shown."""
    if view.restart_budget is None and not view.restarts:
        return []
    shown = {number for one in view.incidents for number in one.generations}
    lines = [f"restarts    {len(view.restarts)}{_budget(view)}"]
    for restart in view.restarts:
        if restart.generation not in shown:
            lines += _restart(restart, f"  {duration(restart.age_s)} ago: {restart.cause}; ")
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
    source = restart.restored and with_commas(restart.restored)
    text = f"{before}generation {restart.generation} started from "
    text += source or "the beginning of the script"
    if phases := (restart.phases_s or {}).items():
        took = ", ".join(f"{name} {duration(took_s)}" for name, took_s in phases)
        text += f"; on this node: {took}"
    if restart.downtime_s is not None:
        text += f"; training again after {duration(restart.downtime_s)}"
    lines = [text]
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
    excluded = view.cluster.exclusions if view.cluster is not None else ()
    lines = [f"excluded    {excluded_line(one)}" for one in excluded]
    if (written := view.checkpoint) is not None:
        what = "none yet" if written.step is None else f"step {written.step:,}"
        age = "" if written.age_s is None else f", {duration(written.age_s)} old"
        lines.append(f"checkpoint  {what}{age}; {written.directory}")
        if written.last_error:
            lines.append(f"            the next one was NOT WRITTEN: {written.last_error}")
        if written.skipped:
            lines.append(
                f"            {written.skipped:,} due versions were skipped: the storage is slower "
                "than they are due"
            )
    if (processes := view.processes) is not None:
        pids = (("agent", processes.agent), ("zygote", processes.zygote), ("smp", processes.smp))
        lines.append(f"processes   {', '.join(f'{name} {pid}' for name, pid in pids if pid)}")
    return lines
