"""`ftrun report`: a run, or one incident of it, as one HTML file.

Runs in:  cli.
Takes in: the journal below `ftrun-logs/RUN_ID/`, of a run that is alive or over.
Gives:    `report.html` or `incident-0003.html` beside it, and its one sentence on the terminal.
"""

import json
import sys
import webbrowser
from dataclasses import asdict, replace
from pathlib import Path

from ftrun import clock
from ftrun.cli.screen.atomic_output import is_stdout, write_out
from ftrun.errors import ExitCode
from ftrun.tools.report.facts import IncidentFacts, RunFacts
from ftrun.tools.report.report_logs import folder_of, is_alive, last_words, raw_lines
from ftrun.tools.report.run import incident_by, run_facts

MAX_PAGES = 200
"""So many pages of incidents are written along with a run's, the newest."""


def report(
    incident: str | None,
    *,
    run: str | None = None,
    out: str | None = None,
    as_json: bool = False,
    opens: bool = False,
) -> int:
    """Write the page, and say where it is.

    Args:
        incident: its number, or `last`; None: the whole run.
        run: a run id or a folder of logs; None: the one that was written to last.
        out: the file, or a FIFO or device to write into; `-` for stdout; None: beside the journal.
        as_json: the facts on stdout instead of a page.
        opens: show it in a browser.

    Raises:
        UsageError: there is no such run.
        FtrunError: there is no such incident; a file cannot be read or written.
    """
    if out is not None and is_stdout(out):
        out = "-"
    folder = folder_of(run, below=Path.cwd())
    facts = run_facts(raw_lines(folder), name=folder.name, is_alive=is_alive(folder.name))
    chosen = None
    if incident is not None:
        chosen = _with_log(facts, incident_by(facts, incident), folder)
    if as_json:
        write_out(out, json.dumps(asdict(chosen or facts), indent=1) + "\n")
        return ExitCode.DONE
    written = _write_pages(facts, chosen, folder, out)
    if out == "-":
        return ExitCode.DONE
    sentence = chosen.sentence if chosen is not None else facts.verdict
    more = f" and {len(written) - 1} of its incidents beside it" if len(written) > 1 else ""
    sys.stdout.write(f"{written[0]}{more}\n{sentence}\n")
    if opens:
        webbrowser.open(written[0].resolve().as_uri())
    return ExitCode.DONE


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
    if not chosen.culprits or chosen.is_planned:
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
