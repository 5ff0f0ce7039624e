"""`ftrun network`, as typer reads it.

Runs in: cli. What it does is loaded when it is typed.
"""

from typing import Annotated

import typer

from ftrun.cli.completion import RunIdArgument

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def _network(
    run_id: RunIdArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="as one JSON document")] = False,
    svg: Annotated[
        str | None, typer.Option("--svg", metavar="FILE", help="the picture; - for stdout")
    ] = None,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="all as one page; - for stdout")
    ] = None,
) -> None:
    """Show the roads between a run's nodes, and what is planned on them."""
    from ftrun.tools.network_view.command import network

    raise typer.Exit(network(run_id, as_json=as_json, svg=svg, html=html))
