"""`ftrun verify`, as typer reads it.

Runs in: cli. What it does is loaded when it is typed.
"""

import typer

from ftrun.cli.completion import AsTyped, with_flags

app = typer.Typer(rich_markup_mode=None, add_completion=False)


def _verify(ctx: typer.Context, **_: object) -> None:
    """Kill ranks of a script, and compare its results bit for bit."""
    from ftrun.tools.verify.command import verify

    raise typer.Exit(verify(ctx.args))


app.command(cls=AsTyped)(with_flags(_verify))
