"""`ftrun drill`: break a job in every way of a plan, and look whether it lives through all of it.

Runs in:  cli.
Takes in: a drill plan by name or file.
Gives:    a line for each fault as it happens, a table, drill.json, drill.html; exit code 0 only
          where all have passed.
"""

import json
import os
import platform
import signal
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType

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
    """Carry out a plan.

    Args:
        name: of the plan, or its file; None: the quick one.
        out: folder for the results and everything of the runs; None: a fresh one below
            `ftrun-drills/`.
        only: kinds of fault; empty: all.
        as_markdown: show the table as Markdown.

    Raises:
        UsageError: there is no such plan, or it is wrong.
        FtrunError: it cannot be carried out here.
    """
    path = find_drill_plan(name or DEFAULT_PLAN)
    plan = read_drill_plan(path)
    if only:
        parts = [part.model_copy(update={"faults": [f for f in part.faults if f.kind in only]})
                 for part in plan.parts()]  # fmt: skip
        parts = [part for part in parts if part.faults]
        if not parts:
            raise FtrunError(f"{shown_path(path)} has no fault {', '.join(only)}")
        plan = plan.model_copy(update={"faults": [], "runs": parts})
    check(plan)
    signal.signal(signal.SIGTERM, _leave)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup stays nohup
        signal.signal(signal.SIGHUP, _leave)
    folder = _folder(path.stem, out)
    render.write_plain(f"{shown_path(path)}; logs and results are below {shown_path(folder)}")
    began_s = clock.now_s()
    series = DrillSeries(plan, folder, _tell)
    try:
        series.carry_out()
    finally:  # also of a drill that is ended early
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
    """Show the plans that come with ftrun, and what they order."""
    rows = []
    for name in drill_plan_names():
        plan = read_drill_plan(find_drill_plan(name))
        count = sum(1 for part in plan.parts() for _ in trials_of(part))
        shapes = ", ".join(dict.fromkeys(shape(part) for part in plan.parts()))
        rows.append((name, f"{count} faults on {shapes}: {plan.about}"))
    render.show_pairs(rows)
    return ExitCode.DONE


def show_again(path: str) -> int:
    """Print the table of an earlier drill as Markdown.

    Raises:
        FtrunError: that file is none.
    """
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
    # Imported here: the template engine takes a tenth of a second.
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
    """SIGTERM and SIGHUP end a drill as ^C does: nothing of its runs is left."""
    raise SystemExit(128 + number)
