"""`ftrun drill`: injects every fault of a plan and judges how the job handles it.

It prints a line for each fault and a table, and writes drill.json and drill.html. The exit code is
0 only if all faults passed.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from ftrun import __version__, clock
from ftrun.cli.completion import option
from ftrun.cli.launch.profiles import shown_path
from ftrun.cli.runs import end_on_signals
from ftrun.cli.screen import terminal as render
from ftrun.cli.screen.text import count, duration
from ftrun.errors import ExitCode, FtrunError
from ftrun.tools.drill.judge import FaultResult
from ftrun.tools.drill.plan import drill_plan_names, find_drill_plan, read_drill_plan, trials_of
from ftrun.tools.drill.series import DrillSeries, check, shape

DEFAULT_PLAN = "drill-quick"
JSON_NAME, PAGE_NAME = "drill.json", "drill.html"
HEAD = ("fault", "on", "nodes", "detected", "culprit", "action", "steps lost", "equal", "passed")
_MOST_ROWS = 500


app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def _drill(
    plan: Annotated[
        str | None, typer.Argument(help="name or file; see --list", autocompletion=drill_plan_names)
    ] = None,
    out: Annotated[str | None, option("--out", "results and logs go there", "DIR")] = None,
    only: Annotated[list[str] | None, option("--only", "only this kind of fault", "KIND")] = None,
    as_markdown: Annotated[
        bool, option("--markdown", "the table as Markdown, one line for each kind")
    ] = False,
    again: Annotated[
        str | None, option("--show", "only print an earlier drill.json", "JSON")
    ] = None,
    wants_list: Annotated[bool, option("--list", "show the plans")] = False,
) -> None:
    """Inject every fault of a plan into a job, and judge how the job handles it."""
    if wants_list:
        list_drills()
    elif again is not None:
        show_again(again)
    else:
        raise typer.Exit(drill(plan, out=out, only=only or [], as_markdown=as_markdown))


def drill(name: str | None, *, out: str | None, only: list[str], as_markdown: bool) -> int:
    """Executes a plan; without `out`, in a new folder below `ftrun-drills/`."""
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
    end_on_signals()
    folder = _folder(path.stem, out)
    render.write_plain(f"{shown_path(path)}; logs and results are below {shown_path(folder)}")
    started_s = clock.now_s()
    series = DrillSeries(plan, folder, _send)
    try:
        series.carry_out()
    finally:  # also if the drill is interrupted
        took_s = clock.now_s() - started_s
        _write(folder, series.rows, name=path.stem, about=plan.about, took_s=took_s)
    rows = series.rows
    render.write_plain("")
    if as_markdown:
        render.write_plain(markdown(rows))
    else:
        render.show_table(HEAD, [cells(row) for row in rows])
    render.write_plain(f"\n{shown_path(folder / PAGE_NAME)}\n{summary(rows)}")
    return ExitCode.DONE if rows and all(row.passed for row in rows) else ExitCode.FAILED


def list_drills() -> None:
    rows = []
    for name in drill_plan_names():
        plan = read_drill_plan(find_drill_plan(name))
        faults = sum(1 for part in plan.parts() for _ in trials_of(part))
        shapes = ", ".join(dict.fromkeys(shape(part) for part in plan.parts()))
        rows.append((name, f"{faults} faults on {shapes}: {plan.about}"))
    render.show_pairs(rows)


def show_again(path: str) -> None:
    try:
        rows = [FaultResult(**row) for row in json.loads(Path(path).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise FtrunError(f"{path} holds no rows of a drill: {error}") from None
    render.write_plain(markdown(rows))


def _send(row: FaultResult) -> None:
    render.write_plain(line(row))
    sys.stdout.flush()


def _folder(name: str, out: str | None) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(clock.wall_s()))
    folder = Path(out) if out is not None else Path("ftrun-drills") / f"{name}-{stamp}"
    if folder.exists() and any(folder.iterdir()):
        raise FtrunError(f"{folder} is not empty: name another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def _write(folder: Path, rows: list[FaultResult], *, name: str, about: str, took_s: float) -> None:
    text = json.dumps([asdict(row) for row in rows], indent=1) + "\n"
    (folder / JSON_NAME).write_text(text, encoding="utf-8")
    conditions = [
        f"{len(os.sched_getaffinity(0))} cores, Linux {platform.release()}",
        f"ftrun {__version__}, Python {platform.python_version()}",
    ]
    page = drill_page(
        rows,
        name=name,
        about=about,
        took_s=took_s,
        conditions=conditions,
        source=str(folder / JSON_NAME),
        made_t_s=clock.wall_s(),
    )
    (folder / PAGE_NAME).write_text(page, encoding="utf-8", errors="replace")


def cells(row: FaultResult) -> tuple[str, ...]:
    return (
        row.fault, row.target, row.nodes, detected(row), yes_or_no(row.culprit_right),
        row.action or "-", "-" if row.steps_lost is None else str(row.steps_lost),
        yes_or_no(row.equal), "yes" if row.passed else "NO",
    )  # fmt: skip


def line(row: FaultResult) -> str:
    printed = f"{row.fault:16} {row.target:8} {row.nodes:9} {detected(row):>17}  "
    lost = "-" if row.steps_lost is None else row.steps_lost
    reported = f"{row.found}; {row.action or 'no action'}; {lost} steps lost; equal: " + yes_or_no(
        row.equal
    )
    return printed + (reported if row.passed else f"FAILED: {row.problem}")


def summary(rows: Sequence[FaultResult]) -> str:
    passed = sum(row.passed for row in rows)
    named = [row.culprit_right for row in rows if row.culprit_right is not None]
    wrong = sum(not one for one in named)
    if passed == len(rows):
        printed = f"all {len(rows)} faults passed"
    else:
        printed = f"{len(rows) - passed} of {len(rows)} faults failed"
    return f"{printed}; {wrong} wrong culprits in {len(named)} that had to be named"


def markdown(rows: Sequence[FaultResult]) -> str:
    """Formats one line per kind of fault: median times, and the worst of all other values."""
    lines = [
        "| fault | trials | verdict | detected in (median) | culprit right | action | steps lost "
        "| bitwise equal | passed |",
        "|---|--:|---|--:|---|---|--:|---|---|",
    ]
    for group in grouped(rows):
        passed, found = f"{group.passed} of {group.count}", group.found.replace("|", "\\|")
        lines.append(
            f"| `{group.fault}` | {group.count} | {found} | "
            f"{detected(group)} | {group.culprit} | {group.action} | {group.lost} | "
            f"{group.equal} | {passed if group.passed < group.count else 'yes'} |"
        )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class FaultSummary:
    """All rows of one fault."""

    fault: str
    count: int
    found: str
    detected_s: float | None
    detected_steps: float | None
    culprit: str
    action: str
    lost: str
    equal: str
    passed: int


def grouped(rows: Sequence[FaultResult]) -> list[FaultSummary]:
    found = []
    for kind in dict.fromkeys(row.kind for row in rows):
        own = [row for row in rows if row.kind == kind]
        times_s = [row.detected_s for row in own if row.detected_s is not None]
        steps = [row.detected_steps for row in own if row.detected_steps is not None]
        lost = [row.steps_lost for row in own if row.steps_lost is not None]
        found.append(
            FaultSummary(
                fault=own[0].fault,
                count=len(own),
                found=", ".join(dict.fromkeys(row.found for row in own if row.found)),
                detected_s=statistics.median(times_s) if times_s else None,
                detected_steps=statistics.median(steps) if steps else None,
                culprit=_share([row.culprit_right for row in own]),
                action=", ".join(dict.fromkeys(row.action or "none" for row in own)),
                lost=str(max(lost)) if lost else "-",
                equal=_share([row.equal for row in own]),
                passed=sum(row.passed for row in own),
            )
        )
    return found


def _share(printed: Sequence[bool | None]) -> str:
    known = [one for one in printed if one is not None]
    if not known:
        return "-"
    return "yes" if all(known) else f"{sum(known)} of {len(known)}"


def yes_or_no(value: bool | None) -> str:
    return "-" if value is None else ("yes" if value else "NO")


def seconds(value: float | None) -> str:
    return "-" if value is None else duration(value)


def detected(it: "FaultResult | FaultSummary") -> str:
    steps = round(it.detected_steps or 0)
    return seconds(it.detected_s) + (f", {count(steps, 'step')}" if steps else "")


def drill_page(
    rows: Sequence[FaultResult],
    *,
    name: str,
    about: str,
    took_s: float,
    conditions: Sequence[str],
    source: str,
    made_t_s: float,
) -> str:
    """`name` and `about` of the plan; `source` is the JSON file with the same rows."""
    # Imported here, because the template engine takes 0.1 s to import.
    from ftrun.tools.report.render.page import fitted_page

    def values(share: float) -> dict[str, Any]:
        return {
            "rows": rows,
            "failed": [row for row in rows if not row.passed],
            "groups": grouped(rows),
            "passed": sum(row.passed for row in rows),
            "sentence": summary(rows),
            "most": max(int(_MOST_ROWS * share), 20),
            "detected": detected,
            "seconds": seconds,
            "yes_or_no": yes_or_no,
            "name": name,
            "about": about,
            "took_s": took_s,
            "conditions": conditions,
        }

    return fitted_page("drill.html", values, source=source, made_t_s=made_t_s)
