"""`ftrun readmit`: ends the exclusion of a repaired node before its time."""

from typing import Annotated

import typer

from ftrun.cli import runs
from ftrun.cli.completion import RunIdArgument
from ftrun.cli.screen.terminal import write_plain
from ftrun.errors import FtrunError
from ftrun.wire.messages.envelope import Done, ReadmitRequest, Refused

_ANSWER_S = 10.0

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def readmit(
    node_id: Annotated[str, typer.Argument(metavar="NODE", help="as `ftrun status` names it")],
    run_id: RunIdArgument = None,
) -> None:
    """Let an excluded node run ranks again, after a check of the node."""
    run = runs.choose(run_id, command=f"readmit {node_id}")
    if run.life is not runs.RunLiveness.RUNNING:
        raise FtrunError(f"run {run.name} is {run.life.value}: no agent answers")
    body = runs.ask(run.to_agent(), ReadmitRequest(node_id), Done, deadline_s=_ANSWER_S)
    if isinstance(body, Refused):
        raise FtrunError(body.reason)
    write_plain(f"requested: node {node_id} may run ranks again when its check has passed")
