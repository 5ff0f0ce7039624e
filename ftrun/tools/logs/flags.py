"""Declares the flags of `ftrun logs` for typer.

Runs in: cli. The implementation is imported when the command runs.
"""

from typing import Annotated

import typer

from ftrun.cli.completion import RunIdArgument

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def _logs(
    run_id: RunIdArgument = None,
    ranks: Annotated[
        str | None, typer.Option("-r", "--rank", metavar="RANKS", help="such as 3 or 0-7,12")
    ] = None,
    node: Annotated[str | None, typer.Option("--node", help="ranks of this node only")] = None,
    generation: Annotated[
        int | None, typer.Option("--generation", metavar="G", help="not given: all")
    ] = None,
    incident: Annotated[
        str | None,
        typer.Option("--incident", metavar="I", help="last words of its culprit; or last"),
    ] = None,
    follows: Annotated[bool, typer.Option("-f", "--follow", help="go on as they write")] = False,
    last: Annotated[
        int | None, typer.Option("-n", "--lines", metavar="N", help="so many of each at the end")
    ] = None,
) -> None:
    """Show what the ranks have written, if their output goes to files."""
    from ftrun.tools.logs.command import LogRequest, logs

    wanted = LogRequest(ranks, node, generation, incident, last)
    raise typer.Exit(logs(run_id, wanted, follows=follows))
