"""Implements `ftrun inject-fault`: injects or cancels a fault, or lists all faults.

Runs in: cli.
"""

import json
import os
from collections.abc import Sequence

from ftrun.cli.runs import RunLiveness, choose
from ftrun.cli.screen import terminal as render
from ftrun.errors import ExitCode, FaultRefused, FtrunError, ProtocolError, UsageError
from ftrun.wire.fault_catalog import FAULTS, TARGETS, FaultKind
from ftrun.wire.fault_orders import duration_s, make_cancel, make_order
from ftrun.wire.messages.envelope import Refused
from ftrun.wire.messages.faults import FaultAccepted, FaultOrder, InjectFault

_ANSWER_S = 40.0
"""Seconds; the agent may wait for another node and for the injector."""


def order_of(
    kind: str | None,
    *,
    rank: int | None,
    node: str | None,
    at_step: int | None,
    lasts: str | None,
    amount: float | None,
    again: bool,
) -> FaultOrder:
    if kind is None:
        raise UsageError("which fault? ftrun inject-fault --list shows them all")
    return make_order(
        f"f{os.urandom(3).hex()}",
        kind,
        rank=rank,
        node=node,
        at_step=at_step,
        for_s=duration_s(lasts) if lasts is not None else None,
        amount=amount,
        again=again,
    )


def cancel_of(order_id: str, *, node: str | None, beside: Sequence[object]) -> FaultOrder:
    """Builds the order that cancels another order.

    Args:
        order_id: the id that `inject-fault` printed.
        node: the node of the fault, if it is not the node that took the order.
        beside: the values of all other options; None if not given.

    Raises:
        UsageError: another option was given.
    """
    if any(one is not None for one in beside):
        raise UsageError("--cancel ID takes an order back, and goes with --node and the run only")
    return make_cancel(f"f{os.urandom(3).hex()}", order_id, node=node)


def inject_fault(order: FaultOrder, run_id: str | None, *, as_json: bool) -> int:
    command = f"inject-fault {order.kind or f'--cancel {order.cancels}'}"
    run = choose(run_id, command=command)
    if run.life is not RunLiveness.RUNNING:
        raise FtrunError(f"run {run.name} is {run.life.value}: it has nobody who takes orders")
    channel = run.to_agent()
    try:
        body = channel.ask(InjectFault(order), deadline_s=_ANSWER_S).body
    finally:
        channel.close()
    if isinstance(body, Refused):
        raise FaultRefused(body.why)
    if not isinstance(body, FaultAccepted):
        raise ProtocolError(f"the agent answered with a {type(body).__name__}")
    if as_json:
        render.write_plain(json.dumps({"id": body.id, "node": body.node, "how": body.how}))
    else:
        render.write_plain(_taken(order, body))
    return ExitCode.DONE


def _taken(order: FaultOrder, taken: FaultAccepted) -> str:
    if order.cancels:
        return f"{order.cancels} on node {taken.node}: {taken.how}"
    whom = f"rank {order.rank}" if order.rank >= 0 else f"node {taken.node}"
    when = f" at the end of step {order.at_step}" if order.at_step else ""
    return f"{taken.id}: {order.kind} on {whom}{when}: {taken.how}"


def list_faults(*, as_json: bool) -> int:
    if as_json:
        render.write_plain(json.dumps([_document(kind) for kind in FAULTS.values()], indent=1))
        return ExitCode.DONE
    for target, title in TARGETS.items():
        render.write_plain(title)
        for kind in FAULTS.values():
            if kind.target == target:
                render.write_plain("\n".join(_lines(kind)))
        render.write_plain("")
    render.write_plain(
        "--at-step S: at the end of step S of the run, counted from 1; repeats exactly for what a "
        "rank does itself.\n--cancel ID: takes back what waits for its step, or lasts.\n"
        "Only in a run started with --allow-faults. What was ordered, has fired "
        "and has ended stands in the journal."
    )
    return ExitCode.DONE


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
