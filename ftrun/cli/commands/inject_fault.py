"""`ftrun inject-fault`: injects or cancels a fault, or lists all faults."""

import json
import os
from typing import Annotated, Any

import typer

from ftrun.cli.completion import AsJson, RunIdArgument, option
from ftrun.cli.runs import RunLiveness, ask, choose
from ftrun.cli.screen import terminal as render
from ftrun.errors import FaultRefused, FtrunError, UsageError
from ftrun.wire.fault_catalog import FAULTS, TARGETS, FaultKind
from ftrun.wire.fault_orders import duration_s, make_cancel, make_order
from ftrun.wire.messages.envelope import Refused
from ftrun.wire.messages.faults import FaultAccepted, FaultOrder, InjectFault

_ANSWER_S = 40.0  # seconds; the agent may wait for another node and for the injector

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def inject_fault_command(  # noqa: PLR0913 - its flags
    kind: Annotated[
        str | None, typer.Argument(help="see --list", autocompletion=lambda: list(FAULTS))
    ] = None,
    run_id: RunIdArgument = None,
    rank: Annotated[int | None, option("--rank", "which rank")] = None,
    node: Annotated[str | None, option("--node", "which node")] = None,
    at_step: Annotated[int | None, option("--at-step", "at the end of this step, from 1")] = None,
    lasts: Annotated[str | None, option("--for", "duration: 500ms, 5s, 2m", "T")] = None,
    amount: Annotated[float | None, option("--amount", "how much; see --list")] = None,
    again: Annotated[
        bool, option("--again", "each time the step is reached, after restarts too")
    ] = False,
    cancel: Annotated[str | None, option("--cancel", "cancel this order", "ID")] = None,
    wants_list: Annotated[bool, option("--list", "show all faults")] = False,
    as_json: AsJson = False,
) -> None:
    """Inject a fault into a run that was started with --allow-faults."""
    if wants_list:
        list_faults(as_json=as_json)
    elif cancel is None:
        order = order_of(
            kind, rank=rank, node=node, at_step=at_step, lasts=lasts, amount=amount, again=again
        )
        _inject(order, run_id, as_json=as_json)
    elif any(one is not None for one in (rank, at_step, lasts, amount, run_id, again or None)):
        raise UsageError("--cancel ID cancels an order; it accepts only --node and the run")
    else:
        _inject(make_cancel(_new_id(), cancel, node=node), kind, as_json=as_json)


def order_of(kind: str | None, *, lasts: str | None, **options: Any) -> FaultOrder:
    """`options` are those of `make_order`."""
    if kind is None:
        raise UsageError("which fault? ftrun inject-fault --list shows them all")
    for_s = duration_s(lasts) if lasts is not None else None
    return make_order(_new_id(), kind, for_s=for_s, **options)


def _new_id() -> str:
    return f"f{os.urandom(3).hex()}"


def _inject(order: FaultOrder, run_id: str | None, *, as_json: bool) -> None:
    command = f"inject-fault {order.kind or f'--cancel {order.cancels}'}"
    run = choose(run_id, command=command)
    if run.life is not RunLiveness.RUNNING:
        raise FtrunError(f"run {run.name} is {run.life.value}: it has no agent that takes orders")
    body = ask(run.to_agent(), InjectFault(order), FaultAccepted, deadline_s=_ANSWER_S)
    if isinstance(body, Refused):
        raise FaultRefused(body.reason)
    if as_json:
        render.write_plain(json.dumps({"id": body.id, "node": body.node, "how": body.how}))
    else:
        render.write_plain(_taken(order, body))


def _taken(order: FaultOrder, taken: FaultAccepted) -> str:
    if order.cancels:
        return f"{order.cancels} on node {taken.node}: {taken.how}"
    target = f"rank {order.rank}" if order.rank >= 0 else f"node {taken.node}"
    when = f" at the end of step {order.at_step}" if order.at_step else ""
    return f"{taken.id}: {order.kind} on {target}{when}: {taken.how}"


def list_faults(*, as_json: bool) -> None:
    if as_json:
        render.write_plain(json.dumps([_document(kind) for kind in FAULTS.values()], indent=1))
        return
    for target, title in TARGETS.items():
        render.write_plain(title)
        for kind in FAULTS.values():
            if kind.target == target:
                render.write_plain("\n".join(_lines(kind)))
        render.write_plain("")
    render.write_plain(
        "--at-step S: at the end of step S of the run, counted from 1; exact for faults that the "
        "rank itself executes.\n--cancel ID: cancels a fault that waits for its step or lasts.\n"
        "Only in a run started with --allow-faults. The journal records when a fault is ordered, "
        "fires and ends."
    )


def _lines(kind: FaultKind) -> list[str]:
    within = f" (within {kind.within_s:g} s)" if kind.within_s else ""
    found = [f"  {kind.name}", f"      does    {kind.does}", f"      seen    {kind.seen}{within}"]
    found.append(f"      lost    {kind.lost}")
    if kind.needs:
        found.append(f"      needs   {kind.needs}")
    if kind.for_s:
        found.append(f"      --for   {kind.for_s:g}s unless given")
    if kind.unit:
        found.append(f"      --amount {kind.amount:g} unless given: {kind.unit}")
    return found


def _document(kind: FaultKind) -> dict[str, object]:
    return {
        "name": kind.name,
        "target": kind.target,
        "by": "rank" if kind.by_rank else "node",
        "does": kind.does,
        "seen": kind.seen,
        "within_s": kind.within_s,
        "lost": kind.lost,
        "needs": kind.needs,
        "exact_step": kind.is_inside,
        "for_s": kind.for_s,
        "amount": kind.amount if kind.unit else None,
        "amount_means": kind.unit,
    }
