"""`ftrun inject-fault` and `ftrun drill`, as typer reads them.

Runs in: cli. What they do is loaded when one of them is typed.
"""

from typing import Annotated

import typer

from ftrun.cli.completion import RunIdArgument


def inject_fault_command(  # noqa: PLR0913 - its flags
    kind: Annotated[
        str | None, typer.Argument(help="see --list", autocompletion=lambda: _fault_names())
    ] = None,
    run_id: RunIdArgument = None,
    rank: Annotated[int | None, typer.Option("--rank", help="which rank")] = None,
    node: Annotated[str | None, typer.Option("--node", help="which node")] = None,
    at_step: Annotated[
        int | None, typer.Option("--at-step", help="at the end of this step, from 1")
    ] = None,
    lasts: Annotated[
        str | None, typer.Option("--for", metavar="T", help="so long: 500ms, 5s, 2m")
    ] = None,
    amount: Annotated[float | None, typer.Option("--amount", help="how much; see --list")] = None,
    again: Annotated[
        bool, typer.Option("--again", help="each time the step comes, after restarts too")
    ] = False,
    cancel: Annotated[
        str | None, typer.Option("--cancel", metavar="ID", help="take this order back")
    ] = None,
    wants_list: Annotated[bool, typer.Option("--list", help="show all faults")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="as one JSON document")] = False,
) -> None:
    """Break something of a run that was started with --allow-faults."""
    from ftrun.cli import inject_fault as faults

    if wants_list:
        raise typer.Exit(faults.list_faults(as_json=as_json))
    if cancel is not None:
        beside = (rank, at_step, lasts, amount, run_id, again or None)
        order = faults.cancel_of(cancel, node=node, beside=beside)
        raise typer.Exit(faults.inject_fault(order, kind, as_json=as_json))
    order = faults.order_of(
        kind, rank=rank, node=node, at_step=at_step, lasts=lasts, amount=amount, again=again
    )
    raise typer.Exit(faults.inject_fault(order, run_id, as_json=as_json))


def _fault_names() -> list[str]:
    from ftrun.wire.fault_kinds import FAULTS

    return list(FAULTS)


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
    """Break a job in every way of a plan, and judge what it does."""
    from ftrun.cli import drill as drills

    if wants_list:
        raise typer.Exit(drills.list_drills())
    if again is not None:
        raise typer.Exit(drills.show_again(again))
    raise typer.Exit(drills.drill(plan, out=out, only=only or [], as_markdown=as_markdown))


def _drill_names() -> list[str]:
    from ftrun.cli.drill_plan_files import drill_plan_names

    return drill_plan_names()
