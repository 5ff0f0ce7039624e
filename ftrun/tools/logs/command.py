"""Implements `ftrun logs`: merges the output of the ranks, such as `node3:17 | loss 2.13`.

The files have no timestamps per line. Lines of one generation are merged as if each rank wrote at a
constant rate, from the start of the generation to the last change of its file. While files are
followed, lines appear in the order in which the files grow.
"""

import heapq
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ftrun.cli.completion import RunIdArgument, option, with_groups
from ftrun.cli.runs import RunLiveness, choose, inspect_run
from ftrun.cli.screen.text import clean, ranges
from ftrun.errors import FtrunError, UsageError
from ftrun.records.decode import of_kinds
from ftrun.records.run import RunStarted
from ftrun.tools.logs.files import LogFile, log_files, parse_ranks, started
from ftrun.tools.logs.follow import (
    LogFilter,
    follow,
    is_run_alive,
    lines_of,
    read_lines,
    report_generation,
    write_notice,
)
from ftrun.tools.report.command import folder_of, raw_lines
from ftrun.tools.report.facts import IncidentFacts
from ftrun.tools.report.journal import Line
from ftrun.tools.report.run import incident_by, run_facts
from ftrun.wire.run_environment import all_run_folders

INCIDENT_LINES = 40


@dataclass(frozen=True, slots=True)
class LogRequest:
    """The options that select lines."""

    ranks: Annotated[
        str | None,
        option("--rank", "such as 3 or 0-7,12", "RANKS", short="-r"),
    ] = None
    node: Annotated[str | None, option("--node", "ranks of this node only")] = None
    generation: Annotated[int | None, option("--generation", "not given: all", "G")] = None
    incident: Annotated[
        str | None, option("--incident", "last words of its culprit; or last", "I")
    ] = None
    lines: Annotated[
        int | None,
        option("--lines", "the last N lines of each", "N", short="-n"),
    ] = None


app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
@with_groups
def _logs(
    wanted: LogRequest,
    run_id: RunIdArgument = None,
    follows: Annotated[
        bool, option("--follow", "follow the files as they grow", short="-f")
    ] = False,
) -> None:
    """Show what the ranks have written, if their output goes to files."""
    folder = _folder(run_id)
    lines = read_lines(folder)
    choice = _choice(wanted, lines, folder)
    every = log_files(folder, lines)
    if not every and not (follows and is_run_alive(lines)):
        raise FtrunError(_no_files(lines))
    files = [file for file in every if choice.takes(file)]
    if every and not files and not follows:
        raise UsageError(_none_of_them(every, choice))
    with suppress(KeyboardInterrupt):
        try:
            if follows:
                follow(folder, choice)
            else:
                _show(files, choice.lines, lines)
        except BrokenPipeError:  # the reader, such as `head`, closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _folder(run_id: str | None) -> Path:
    """Returns the log folder of the named run, else of the live run, else of the newest one."""
    if run_id is None:
        alive = [
            one for one in map(inspect_run, all_run_folders()) if one.life is RunLiveness.RUNNING
        ]
        here = (Path.cwd() / "ftrun-logs").is_dir()
        if len({one.run_id for one in alive}) == 1 or (alive and not here):
            run_id = choose(None, command="logs").run_id if len(alive) > 1 else alive[0].run_id
    return folder_of(run_id, below=Path.cwd())


def _choice(wanted: LogRequest, lines: Sequence[Line], folder: Path) -> LogFilter:
    ranks = parse_ranks(wanted.ranks) if wanted.ranks is not None else None
    nodes = sorted({line.node for line in of_kinds(lines, RunStarted)})
    if wanted.node is not None and wanted.node not in nodes:
        known = ", ".join(node for node in nodes if node) or "none, it runs on one node"
        raise UsageError(
            f"there is no node {clean(wanted.node, 100)} in this run; there are {known}"
        )
    if wanted.lines is not None and wanted.lines < 0:
        raise UsageError(f"--lines takes 0 and more, not {wanted.lines}")
    if wanted.incident is None:
        return LogFilter(ranks, wanted.node, wanted.generation, wanted.lines)
    incident = _incident(wanted.incident, folder)
    culprits = _culprits_of(incident, lines)
    write_notice(
        f"incident {incident.number}, generation {incident.generation}: {incident.sentence}"
    )
    count = INCIDENT_LINES if wanted.lines is None else wanted.lines
    chosen = wanted.generation if wanted.generation is not None else incident.generation
    return LogFilter(ranks if ranks is not None else culprits, wanted.node, chosen, count)


def _incident(name: str, folder: Path) -> IncidentFacts:
    facts = run_facts(raw_lines(folder), name=folder.name)
    try:
        return incident_by(facts, name)
    except FtrunError as error:
        raise UsageError(clean(str(error), 500)) from None


def _culprits_of(incident: IncidentFacts, lines: Sequence[Line]) -> frozenset[int] | None:
    """Returns the culprit ranks; if only nodes are named, all ranks of these nodes."""
    ranks = set(incident.culprits)
    for node in () if ranks else incident.nodes:
        start = started(lines, generation=incident.generation or 0, node=node)
        ranks.update(start.record.ranks if start is not None else ())
    return frozenset(ranks) or None


def _no_files(lines: Sequence[Line]) -> str:
    nodes = sorted({line.node for line in of_kinds(lines, RunStarted) if line.node})
    where = f" Each node has its own files: ask on {', '.join(nodes)}." if nodes else ""
    return (
        "no file on this machine holds what the ranks of this run have said: it went to the "
        "terminal that started it. Start with --redirects 3 to have it in files, or with --tee 3 "
        f"to have both.{where}"
    )


def _none_of_them(every: Sequence[LogFile], choice: LogFilter) -> str:
    ranks = ranges(sorted({file.rank for file in every}))
    generations = ranges(sorted({file.generation for file in every}))
    asked = [
        f"ranks {ranges(sorted(choice.ranks))}" if choice.ranks is not None else "",
        f"node {choice.node}" if choice.node is not None else "",
        f"generation {choice.generation}" if choice.generation is not None else "",
    ]
    what = ", ".join(one for one in asked if one)
    return f"no log file here is of {what}; there are ranks {ranks} of generations {generations}"


def _show(files: Sequence[LogFile], last: int | None, lines: Sequence[Line]) -> None:
    """Prints generation by generation, each merged by estimated time."""
    width = max((len(file.prefix) for file in files), default=0)
    eras = sorted({file.era for file in files})
    for era in eras:
        if len(eras) > 1:
            report_generation(era[1], lines)
        timed = [_timed(file, last) for file in files if file.era == era]
        for _, _, prefix, text in heapq.merge(*timed):
            sys.stdout.write(f"{prefix.ljust(width)} | {text}\n")
    sys.stdout.flush()


def _timed(file: LogFile, last: int | None) -> Iterator[tuple[float, int, str, str]]:
    try:
        ended_s = max(file.path.stat().st_mtime, file.started_s)
    except OSError:
        return
    for part, text in lines_of(file.path, last=last):
        yield file.started_s + part * (ended_s - file.started_s), file.rank, file.prefix, text
