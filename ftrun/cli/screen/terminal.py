"""Prints to a terminal or a file; the only module that imports rich.

Runs in: cli.

Rule 1: Output that is not a terminal has no width: no line of it is wrapped, cut or padded.
Rule 2: On a terminal, text is wrapped and never cut. The live page is the exception, because it
fits the screen.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ftrun.cli.screen.status_page import StyledLine, incident_line
from ftrun.ids import version

NO_WIDTH = 1_000_000
"""Columns if the output is not a terminal; wider than any table."""

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


def show_status(document: Mapping[str, Any]) -> None:
    console = new_console()
    console.print(Text(_verdict(document), style=_style(document)), soft_wrap=True)
    for warning in document.get("warnings") or ():
        console.print(Text(f"WARNING     {warning}", style="bold yellow"), soft_wrap=True)
    console.print(_headline(document), soft_wrap=True)
    if nodes := (document.get("cluster") or {}).get("nodes"):
        _print_table(_node_table(nodes))
    if ranks := document.get("ranks"):
        _print_table(_rank_table(ranks))
    for line in (*_snapshot_lines(document), *_restart_lines(document), *_other_lines(document)):
        console.print(Text(line), soft_wrap=True)


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


def duration(seconds: float) -> str:
    """Formats as `0.12 s`, `45 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


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


def _style(document: Mapping[str, Any]) -> str:
    is_safe = document.get("snapshots", {}).get("protected", True)
    style = _STATE_STYLE.get(str(document.get("state")), "")
    return f"bold {style if is_safe else 'yellow'}".strip()


def _verdict(document: Mapping[str, Any]) -> str:
    verdict = str(document.get("verdict", ""))
    snapshots = document.get("snapshots") or {}
    note = snapshots.get("note")
    if snapshots.get("protected", True) or "UNPROTECTED" in verdict or not note:
        return verdict
    return f"{verdict} - UNPROTECTED: {note}"


def _headline(document: Mapping[str, Any]) -> Text:
    parts = [f"run {document.get('run_id')}"]
    if script := document.get("script"):
        parts.append(str(script))
    if (generation := document.get("generation")) is not None:
        parts.append(f"generation {generation}")
    if (uptime_s := document.get("uptime_s")) is not None:
        parts.append(f"up {duration(uptime_s)}")
    return Text("  ".join(parts))


def _rank_table(ranks: Sequence[Mapping[str, Any]]) -> Table:
    head = ("rank", "pid", "state", "step", "last beat", "phase", "loss", "start")
    table = _new_table(head, right=("rank", "pid", "step"), gap=3)
    for rank in ranks:
        beat_s, loss = rank.get("beat_age_s"), rank.get("loss")
        cells = (
            rank.get("rank"),
            rank.get("pid"),
            rank.get("state"),
            rank.get("step"),
            None if beat_s is None else f"{duration(beat_s)} ago",
            rank.get("phase"),
            None if loss is None else f"{loss:.4f}",
            rank.get("start"),
        )
        table.add_row(*(Text("-" if cell is None else str(cell)) for cell in cells))
    return table


def _node_table(nodes: Sequence[Mapping[str, Any]]) -> Table:
    head = ("node", "host", "place", "state", "ranks", "step", "last heard", "remark")
    table = _new_table(head, right=("step",), gap=3)
    for node in nodes:
        ranks = [str(rank.get("rank")) for rank in node.get("ranks") or ()]
        cells = (
            node.get("node"),
            node.get("host"),
            node.get("place"),
            node.get("state"),
            ", ".join(ranks) or None,
            node.get("step") if ranks else None,
            f"{duration(float(node.get('heard_s_ago') or 0.0))} ago",
            node.get("why") or node.get("unprotected") or _check_remark(node),
        )
        table.add_row(*(Text("-" if cell is None else str(cell)) for cell in cells))
    return table


def _check_remark(node: Mapping[str, Any]) -> str:
    check = node.get("check") or "fit"
    return "" if check == "fit" else f"check: {check}"


def _snapshot_lines(document: Mapping[str, Any]) -> list[str]:
    found = document.get("snapshots")
    if not found:
        return []
    if found.get("step") is None:
        newest = f"none yet ({found.get('note')})" if found.get("note") else "none yet"
    else:
        newest = str(version(found.get("generation") or 0, found["step"]))
        if found.get("age_s") is not None:
            newest += f", {duration(found['age_s'])} old"
    per_rank = found.get("bytes_per_rank")
    each = f"{size(per_rank)} per rank, " if per_rank else ""
    memory = f"{size(found.get('memory_bytes') or 0)} of memory in all"
    if for_others := found.get("for_others_bytes"):
        memory += f", {size(for_others)} of it for other nodes"
    lines = [f"snapshots   newest {newest}; {each}{memory}"]
    if "taken" in found:
        every = found.get("every")
        lines.append(
            f"            taken {found['taken']}, skipped {found.get('skipped', 0)}, discarded "
            f"{found.get('discarded', 0)}; training was blocked for "
            f"{duration(found.get('blocked_s') or 0.0)} in all"
            + (f"; every {'step' if every == 1 else f'{every} steps'}" if every else "")
        )
    return lines


def _restart_lines(document: Mapping[str, Any]) -> list[str]:
    if "restarts" not in document:
        return []
    budget = document.get("restart_budget") or {}
    allowed = (
        f"; {budget.get('used')} of {budget.get('limit')} used within "
        f"{duration(budget.get('window_s') or 0.0)}"
        if budget
        else ""
    )
    lines = [f"restarts    {len(document['restarts'])}{allowed}"]
    for restart in document["restarts"]:
        phases = restart.get("phases_s") or {}
        known = {name: took for name, took in phases.items() if took is not None}
        steps = ", ".join(f"{name} {took:.3f}" for name, took in known.items())
        restored, took_s = restart.get("restored"), restart.get("downtime_s")
        lines.append(
            f"  generation {restart.get('generation')}, "
            f"{duration(restart.get('at_s_ago') or 0.0)} ago: {restart.get('cause')}; "
            + (f"restored {restored}" if restored else "began from the script's beginning")
            + (f"; this node in s: {steps}" if steps else "")
            + (f"; trained again after {duration(took_s)}" if took_s is not None else "")
        )
        if repeated := restart.get("repeated"):
            lines.append(f"    {repeated.get('text')}")
    return lines


def _other_lines(document: Mapping[str, Any]) -> list[str]:
    lines = [incident_line(one) for one in document.get("incidents") or ()]
    if checkpoint := document.get("checkpoint"):
        step, age_s = checkpoint.get("step"), checkpoint.get("age_s")
        what = "none yet" if step is None else f"step {step}"
        age = "" if age_s is None else f", {duration(age_s)} old"
        lines.append(f"checkpoint  {what}{age}; {checkpoint.get('directory')}")
        if why := checkpoint.get("not_written"):
            lines.append(f"            the one after it was NOT WRITTEN: {why}")
    if processes := document.get("processes"):
        known = (f"{name} {pid}" for name, pid in processes.items() if pid)
        lines.append(f"processes   {', '.join(known)}")
    return lines
