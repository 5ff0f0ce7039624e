"""Declares the flags of `ftrun inject-fault` for typer.

Runs in: cli. The implementation is imported when the command runs.
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
    """Inject a fault into a run that was started with --allow-faults."""
    from ftrun.cli.commands import inject_fault as faults

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
    from ftrun.wire.fault_catalog import FAULTS

    return list(FAULTS)
