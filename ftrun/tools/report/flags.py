"""`ftrun report`, as typer reads it.

Runs in: cli. What it does is loaded when it is typed.
"""

from typing import Annotated

import typer

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def _report(
    incident: Annotated[
        str | None, typer.Argument(help="its number, or last; not given: the whole run")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="run id, or folder of its logs")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", metavar="FILE", help="write it there")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the facts, as JSON")] = False,
    opens: Annotated[bool, typer.Option("--open", help="show it in the browser")] = False,
) -> None:
    """Write a run, or one incident of it, as one HTML file."""
    from ftrun.tools.report.command import report

    raise typer.Exit(report(incident, run=run, out=out, as_json=as_json, opens=opens))
