"""`ftrun report`: a run, or one incident of it, as one HTML file.

It reads the journal below `ftrun-logs/RUN_ID/`, of a run that is alive or over.
"""

import json
import math
import os
import shlex
import shutil
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from ftrun import clock
from ftrun.cli.completion import option
from ftrun.cli.screen.atomic_output import is_stdout, write_out
from ftrun.cli.screen.text import clean, ranges
from ftrun.errors import FtrunError, UsageError
from ftrun.journal import FILE_NAME
from ftrun.records.decode import decode
from ftrun.tools.report.facts import IncidentFacts, RunFacts
from ftrun.tools.report.run import incident_by, run_facts

LOGS = "ftrun-logs"
LAST_LINES = 30
_TAIL_BYTES = 32_768
_MAX_LINE_CHARS = 400
_MAX_READ_BYTES = 8_000_000
MAX_PAGES = 200
"""Maximum number of incident pages that are written with a page of a run: the newest."""


app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def report(
    incident: Annotated[
        str | None, typer.Argument(help="its number, or last; not given: the whole run")
    ] = None,
    run: Annotated[str | None, option("--run", "run id, or folder of its logs", "RUN")] = None,
    out: Annotated[str | None, option("--out", "write it there", "FILE")] = None,
    as_json: Annotated[bool, option("--json", "the facts, as JSON")] = False,
    opens: Annotated[bool, option("--open", "show it in the browser")] = False,
) -> None:
    """Write a run, or one incident of it, as one HTML file."""
    if out is not None and is_stdout(out):
        out = "-"
    folder = folder_of(run, below=Path.cwd())
    facts = run_facts(raw_lines(folder), name=folder.name, is_alive=is_alive(folder.name))
    chosen = None
    if incident is not None:
        chosen = _with_log(facts, incident_by(facts, incident), folder)
    if as_json:
        write_out(out, json.dumps(asdict(chosen or facts), indent=1) + "\n")
        return
    written = _write_pages(facts, chosen, folder, out)
    if out == "-":
        return
    sentence = chosen.sentence if chosen is not None else facts.verdict
    more = (
        f" and {len(written) - 1} of its incidents in the same folder" if len(written) > 1 else ""
    )
    sys.stdout.write(f"{written[0]}{more}\n{sentence}\n")
    if chosen is not None and chosen.dumps:
        sys.stdout.write(f"The ranks' flight recorders: {chosen.dumps}\n")
    if opens:
        webbrowser.open(written[0].resolve().as_uri())


def _write_pages(
    facts: RunFacts, chosen: IncidentFacts | None, folder: Path, out: str | None
) -> list[Path]:
    """The page that was asked for first; with a whole run's those of its incidents."""
    # Imported here: the template engine takes a tenth of a second, and --json needs none.
    from ftrun.tools.report.render.page import RUN_NAME, incident_name, incident_page, run_page

    source, made_t_s = str(folder / "journal.jsonl"), clock.wall_s()
    if chosen is not None:
        has_run_page = out is None and (folder / RUN_NAME).exists()
        page = incident_page(facts, chosen, source=source, made_t_s=made_t_s, links=has_run_page)
        return [_put(out, folder / incident_name(chosen.number), page)]
    page = run_page(facts, source=source, made_t_s=made_t_s, links=out is None)
    written = [_put(out, folder / RUN_NAME, page)]
    if out is None:
        for one in facts.incidents[-MAX_PAGES:]:
            it = _with_log(facts, one, folder)
            page = incident_page(facts, it, source=source, made_t_s=made_t_s)
            written.append(_put(None, folder / incident_name(one.number), page))
    return written


def _put(out: str | None, usual: Path, page: str) -> Path:
    path = usual if out is None else Path(out)
    write_out(str(path), page)
    return path


def _with_log(facts: RunFacts, chosen: IncidentFacts, folder: Path) -> IncidentFacts:
    if chosen.is_planned:
        return chosen
    chosen = replace(chosen, dumps=_collect_dumps(folder, chosen))
    if not chosen.culprits:
        return chosen
    rank = chosen.culprits[0]
    home = next((node for node in facts.nodes if rank in node.ranks), None)
    title, lines = last_words(
        folder,
        rank=rank,
        node=home.name if home is not None else "",
        ranks_here=home.ranks if home is not None else (),
        generation=chosen.generation or 0,
        logs=facts.logs.get(home.name if home is not None else "", ""),
    )
    return replace(chosen, log_title=title, log_lines=lines)


def _collect_dumps(folder: Path, incident: IncidentFacts) -> str:
    """Copy the dumps of all nodes to `incident-0003/fr`; return the command that analyses them.

    Empty if there are none. They belong to the incident by their times, because an incident without
    a restart has no generation.
    """
    found = folder / f"incident-{incident.number:04d}" / "fr"
    end_t_s = incident.began_t_s + (incident.recovered_s or math.inf)
    dumps: list[tuple[float, Path]] = []
    with suppress(OSError):
        for logs in (folder, *folder.iterdir()):
            dumps += [(path.stat().st_mtime, path) for path in logs.glob("fr/*/rank_*")]
    for at_t_s, dump in sorted(dumps):
        if incident.began_t_s <= at_t_s <= end_t_s:
            with suppress(OSError):
                found.mkdir(parents=True, exist_ok=True)
                shutil.copy2(dump, found / dump.name)
    if not found.is_dir():
        return ""
    # A rank that has ended or is stopped has no dump.
    return shlex.join(["torchfrtrace", str(found), "-p", "rank_", "--allow-incomplete-ranks"])


# --- files of a run ---------------------------------------------------------------------------


def folder_of(run: str | None, *, below: Path) -> Path:
    """The folder with the journal of a run id, of a folder, or (None) of the newest run."""
    if run is None:
        return _newest(below)
    for folder in (below / LOGS / run, Path(run)):
        if _journals(folder):
            return folder.resolve()
    from_spec = _of_a_live_run(run)
    if from_spec is not None and _journals(from_spec):
        return from_spec
    known = ", ".join(sorted(found.name for found in _runs(below))[:20])
    raise UsageError(
        f"no journal of run {clean(run, 200)}: neither {LOGS}/ here nor a folder of that name has "
        f"one. {f'Here are: {known}' if known else f'There is no {LOGS}/ with journals here'}"
    )


def _newest(below: Path) -> Path:
    runs = _runs(below)
    if not runs:
        raise UsageError(
            f"there is no {LOGS}/ with a journal below {below}. Name the run or the folder of its "
            "logs: ftrun report --run FOLDER"
        )
    return max(runs, key=lambda one: max(changed_s(path) for path in _journals(one)))


def _runs(below: Path) -> list[Path]:
    folder = below / LOGS
    found = folder.iterdir() if folder.is_dir() else ()
    return [one.resolve() for one in found if _journals(one)]


def _journals(folder: Path) -> list[Path]:
    """The merged journal first, then those of the nodes, which hold a few lines more."""
    try:
        merged = folder / FILE_NAME
        found = [merged] if merged.is_file() else []
        return found + [one for one in sorted(folder.glob(f"*/{FILE_NAME}")) if _is_of_a_node(one)]
    except (OSError, ValueError):
        return []


def _is_of_a_node(path: Path) -> bool:
    """Else it is a run's own, and the folder above it holds several runs."""
    with path.open("rb") as lines:
        first = decode(lines.readline(_MAX_READ_BYTES))
    return first is not None and first.node == path.parent.name


def changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _of_a_live_run(run_id: str) -> Path | None:
    from ftrun.wire.run_environment import all_run_folders

    for folder in all_run_folders():
        if folder.run_id == run_id:
            try:
                spec = json.loads(folder.spec.read_text())
                logs = Path(str(spec["log_folder"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue
            return logs.parent if spec.get("nodes") and _journals(logs.parent) else logs
    return None


def is_alive(run_id: str) -> bool:
    from ftrun.cli.runs import RunLiveness, inspect_run
    from ftrun.wire.run_environment import all_run_folders

    alive = (RunLiveness.RUNNING, RunLiveness.STARTING)
    ours = (folder for folder in all_run_folders() if folder.run_id == run_id)
    return any(inspect_run(folder).life in alive for folder in ours)


def raw_lines(folder: Path) -> Iterator[bytes]:
    """Every line of the run's journals; a line that is far too long is cut."""
    paths = _journals(folder)
    if not paths:
        raise FtrunError(f"{folder} has no {FILE_NAME}")
    for path in paths:
        try:
            with path.open("rb") as lines:
                while line := lines.readline(_MAX_READ_BYTES):
                    yield line
        except OSError as error:
            raise FtrunError(f"{path} cannot be read: {error.strerror}") from error


def last_words(
    folder: Path,
    *,
    rank: int,
    node: str,
    ranks_here: tuple[int, ...],
    generation: int,
    logs: str = "",
) -> tuple[str, tuple[str, ...]]:
    """A title, and the last lines that a rank wrote to its files; `logs`: its node's --log-dir."""
    local = sorted(ranks_here).index(rank) if rank in ranks_here else rank
    places = [folder / node / "workers" if node else folder / "workers", folder / "workers"]
    places += [Path(logs)] if logs else []
    empty: Path | None = None
    found: list[Path] = []
    for place in places:
        # The newest first: each launch of a run has a folder of its own.
        attempts = place.glob(f"*/attempt_{generation}/{local}") if place.is_dir() else ()
        newest_first = sorted(attempts, key=changed_s, reverse=True)
        streams = [sorted(one.glob("std*.log")) for one in newest_first]
        found = next((paths for paths in streams if any(map(_has_text, paths))), [])
        empty = empty or next((paths[0].parent for paths in streams if paths), None)
        if found:
            break
    if not found and empty is not None:
        return f"Rank {rank} had written nothing to {clean(str(empty), 250)}", ()
    if not found:
        return (
            f"No file holds the output of rank {ranges([rank])}: its streams went to the terminal. "
            "Start with --redirects 3 to have it here",
            (),
        )
    lines: list[str] = []
    for path in found:
        if tail := _tail(path):
            lines += [f"[{path.name}]", *tail] if len(found) > 1 else tail
    shown = found[0].parent
    return f"Rank {rank}, generation {generation}: {clean(str(shown), 250)}", tuple(lines)


def _has_text(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - _TAIL_BYTES, 0))
            text = file.read(_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    # Of a progress bar only what would be seen of it in the end.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return [clean(line, _MAX_LINE_CHARS) for line in lines if line.strip()][-LAST_LINES:]
