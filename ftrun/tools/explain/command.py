"""`ftrun explain`: which rank is at fault, from the dumps of another launcher's run."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ftrun.cli.completion import AsJson, option
from ftrun.cli.screen.terminal import show_pairs, write_json, write_plain
from ftrun.cli.screen.text import clean, count, ranks
from ftrun.monitor.verdicts import RankView, Verdict
from ftrun.tools.explain.dumps import DumpFolder, read_folder
from ftrun.tools.explain.views import are_times_known, judge, next_step, views_of, without_dump

NO_VERDICT = 3
_NONE = (
    "no rank waits in a collective: the run made progress when the dumps were written, or the "
    "ranks did not wait for each other. Look at the stacks of the ranks"
)

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def explain(
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="with one dump of each rank; subfolders are nodes")
    ],
    prefix: Annotated[
        str | None, option("--prefix", "names before the rank, such as nccl_trace_rank_", "TEXT")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the rank at fault in a hang, from flight recorder dumps of any launcher.

    Reads what torch writes when a collective times out: one pickle for each rank, whose name ends
    in the rank. JSON of a rank's recorder is read too (rank_3.json). Code in a pickle is never run.

    To have dumps of a job, set in the environment of its ranks, on a disk that outlives them:

    \b
      TORCH_NCCL_DUMP_ON_TIMEOUT=1
      TORCH_FR_BUFFER_SIZE=2000           before torch 2.8 TORCH_NCCL_TRACE_BUFFER_SIZE
      TORCH_FR_DUMP_TEMP_FILE=/data/fr/rank_     before TORCH_NCCL_DEBUG_INFO_TEMP_FILE

    Then bring the files of all ranks together (cp -p keeps their times) and run:

    \b
      ftrun explain /data/fr

    The verdict has evidence, what speaks against it, and what to do; docs/verdicts.md explains
    each. A rank without a dump is named only if no other rank is at fault.

    Exit codes: 0 a verdict; 2 usage, also if DIR has no dumps; 3 no rank waits.
    """  # noqa: D301 - \b keeps the lines of a paragraph
    found = read_folder(Path(folder), prefix)
    traces = {rank: one.trace for rank, one in found.dumps.items()}
    changed_ns = {rank: one.changed_ns for rank, one in found.dumps.items()}
    views = views_of(traces, changed_ns, found.damaged)
    verdict = judge(views, found.node_of, has_times=are_times_known(traces, changed_ns))
    if as_json:
        write_json(_document(found, views, verdict))
    else:
        _show(found, views, verdict)
    raise typer.Exit(0 if verdict is not None else NO_VERDICT)


def _document(
    found: DumpFolder, views: dict[int, RankView], verdict: Verdict | None
) -> dict[str, object]:
    return {
        "verdict": msgspec.to_builtins(verdict),
        "next": next_step(verdict, views) if verdict is not None else _NONE,
        "prefix": found.prefix,
        "formats": _formats(found),
        "ranks": sorted(found.dumps),
        "without_dump": without_dump(views),
        "damaged": {str(rank): reason for rank, reason in sorted(found.damaged.items())},
        "exit_code": 0 if verdict is not None else NO_VERDICT,
    }


def _show(found: DumpFolder, views: dict[int, RankView], verdict: Verdict | None) -> None:
    missing = without_dump(views)
    read = f"{count(len(found.dumps), 'dump')} of {count(len(views), 'rank')}"
    read += f", format {', '.join(_formats(found))}"
    rows = [("read", f"{read}; none of {ranks(missing)}" if missing else read)]
    rows += [("damaged", reason) for _, reason in sorted(found.damaged.items())]
    if verdict is None:
        write_plain(_NONE)
    else:
        write_plain(clean(verdict.text))
        rows = [
            ("kind", verdict.kind.value),
            *(("evidence", line) for line in verdict.evidence),
            *(("against", line) for line in verdict.counter_evidence),
            ("sure", verdict.confidence.value),
            ("next", next_step(verdict, views)),
            *rows,
        ]
    before = ""
    shown = []
    for name, text in rows:
        shown.append((f"  {name}" if name != before else "", clean(text)))
        before = name
    show_pairs(shown)


def _formats(found: DumpFolder) -> list[str]:
    return sorted({one.trace.version for one in found.dumps.values()})
