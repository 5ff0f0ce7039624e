"""Declares the flags of `ftrun drill` for typer.

Runs in: cli. The implementation is imported when the command runs.
"""

from typing import Annotated

import typer

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def drill_command(
    plan: Annotated[
        str | None,
        typer.Argument(help="name or file; see --list", autocompletion=lambda: _drill_names()),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="results and logs go there")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="KIND", help="only this kind of fault")
    ] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="the table as Markdown, one line for each kind")
    ] = False,
    again: Annotated[
        str | None, typer.Option("--show", metavar="JSON", help="only print an earlier drill.json")
    ] = None,
    wants_list: Annotated[bool, typer.Option("--list", help="show the plans")] = False,
) -> None:
    """Inject every fault of a plan into a job, and judge how the job handles it."""
    from ftrun.tools.drill import command as drills

    if wants_list:
        raise typer.Exit(drills.list_drills())
    if again is not None:
        raise typer.Exit(drills.show_again(again))
    raise typer.Exit(drills.drill(plan, out=out, only=only or [], as_markdown=as_markdown))


def _drill_names() -> list[str]:
    from ftrun.tools.drill.drill_plan_files import drill_plan_names

    return drill_plan_names()
