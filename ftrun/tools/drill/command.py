"""Implements `ftrun drill`: injects every fault of a plan and judges how the job handles it.

Runs in:  cli.
Takes in: a drill plan by name or file.
Gives:    a line for each fault, a table, drill.json, drill.html; exit code 0 only if all faults
          passed.
"""

import json
import os
import platform
import signal
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from msgspec.structs import replace

from ftrun import __version__, clock
from ftrun.cli.launch.profiles import shown_path
from ftrun.cli.screen import terminal as render
from ftrun.errors import ExitCode, FtrunError
from ftrun.tools.drill.drill_plan_files import drill_plan_names, find_drill_plan, read_drill_plan
from ftrun.tools.drill.drill_table import HEAD, cells, line, markdown, summary
from ftrun.tools.drill.judge import FaultResult
from ftrun.tools.drill.plan import trials_of
from ftrun.tools.drill.series import DrillSeries, check, shape

DEFAULT_PLAN = "drill-quick"
JSON_NAME, PAGE_NAME = "drill.json", "drill.html"
_FAILED = 1


def drill(name: str | None, *, out: str | None, only: list[str], as_markdown: bool) -> int:
    """Executes a plan.

    Args:
        name: the name or file of the plan; None for the quick plan.
        out: folder for results, logs and run data; None for a new folder below `ftrun-drills/`.
        only: kinds of fault to inject; empty for all.
        as_markdown: print the table as Markdown.

    Raises:
        UsageError: there is no such plan, or it is invalid.
        FtrunError: the plan cannot be executed on this machine.
    """
    path = find_drill_plan(name or DEFAULT_PLAN)
    plan = read_drill_plan(path)
    if only:
        parts = [replace(part, faults=[one for one in part.faults if one.kind in only])
                 for part in plan.parts()]  # fmt: skip
        parts = [part for part in parts if part.faults]
        if not parts:
            raise FtrunError(f"{shown_path(path)} has no fault {', '.join(only)}")
        plan = replace(plan, faults=[], runs=parts)
    check(plan)
    signal.signal(signal.SIGTERM, _leave)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # keep the effect of nohup
        signal.signal(signal.SIGHUP, _leave)
    folder = _folder(path.stem, out)
    render.write_plain(f"{shown_path(path)}; logs and results are below {shown_path(folder)}")
    began_s = clock.now_s()
    series = DrillSeries(plan, folder, _tell)
    try:
        series.carry_out()
    finally:  # also if the drill is interrupted
        took_s = clock.now_s() - began_s
        _write(folder, series.rows, name=path.stem, about=plan.about, took_s=took_s)
    rows = series.rows
    render.write_plain("")
    if as_markdown:
        render.write_plain(markdown(rows))
    else:
        render.show_table(HEAD, [cells(row) for row in rows])
    render.write_plain(f"\n{shown_path(folder / PAGE_NAME)}\n{summary(rows)}")
    return ExitCode.DONE if rows and all(row.passed for row in rows) else _FAILED


def list_drills() -> int:
    rows = []
    for name in drill_plan_names():
        plan = read_drill_plan(find_drill_plan(name))
        count = sum(1 for part in plan.parts() for _ in trials_of(part))
        shapes = ", ".join(dict.fromkeys(shape(part) for part in plan.parts()))
        rows.append((name, f"{count} faults on {shapes}: {plan.about}"))
    render.show_pairs(rows)
    return ExitCode.DONE


def show_again(path: str) -> int:
    try:
        rows = [FaultResult(**row) for row in json.loads(Path(path).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise FtrunError(f"{path} holds no rows of a drill: {error}") from None
    render.write_plain(markdown(rows))
    return ExitCode.DONE


def _tell(row: FaultResult) -> None:
    render.write_plain(line(row))
    render.flush()


def _folder(name: str, out: str | None) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(clock.wall_s()))
    folder = Path(out) if out is not None else Path("ftrun-drills") / f"{name}-{stamp}"
    if folder.exists() and any(folder.iterdir()):
        raise FtrunError(f"{folder} is not empty: name another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def _write(folder: Path, rows: list[FaultResult], *, name: str, about: str, took_s: float) -> None:
    # Imported here, because the template engine takes 0.1 s to import.
    from ftrun.tools.drill.drill_page import drill_page

    text = json.dumps([asdict(row) for row in rows], indent=1) + "\n"
    (folder / JSON_NAME).write_text(text, encoding="utf-8")
    page = drill_page(
        rows, name=name, about=about, conditions=_conditions(), took_s=took_s,
        source=str(folder / JSON_NAME), made_t_s=clock.wall_s(),
    )  # fmt: skip
    (folder / PAGE_NAME).write_text(page, encoding="utf-8", errors="replace")


def _conditions() -> list[str]:
    return [
        f"{len(os.sched_getaffinity(0))} cores, Linux {platform.release()}",
        f"ftrun {__version__}, Python {platform.python_version()}",
    ]


def _leave(number: int, _frame: FrameType | None) -> None:
    """Ends the drill on SIGTERM and SIGHUP as on ^C, so that all its runs end."""
    raise SystemExit(128 + number)
