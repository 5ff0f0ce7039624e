"""Accepts fault orders, injects the faults when they are due, and journals them.

`ask` runs in a thread for each order, `take` in the cluster thread, the rest in the main thread,
once per turn of the loop. An order that a rank has not reached stays valid for its next process.

Rule 1: the journal records an order when it is accepted, and again when it has fired. The journal
        therefore shows an order that never fires.
Rule 2: an order that waits for its step, or a fault with a duration, can be cancelled. The
        controller that accepted an order from the operator stores its node.
"""

import signal
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from ftrun import clock
from ftrun.agent.cluster.control_loop import ClusterControlLoop
from ftrun.agent.faults.injectors import FaultInjectors
from ftrun.agent.faults.reverter import FaultAction, RunningFault
from ftrun.errors import FaultRefused, FtrunError
from ftrun.records.faults import FaultAcceptedRecord, FaultInjected, FaultReverted
from ftrun.wire.cluster.generation import GenerationPlan
from ftrun.wire.fault_catalog import fault_kind
from ftrun.wire.fault_orders import FaultPage
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import faults as fault_messages
from ftrun.wire.messages.faults import FaultOrder, ForwardFault, ForwardFaultReply
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage

if TYPE_CHECKING:
    from ftrun.agent.launcher import Run

ANSWER_S = 30.0
"""Longer than the start of a reverter (reverter.py), so that an order that timed out is not
executed later."""
_CANNOT = (FtrunError, OSError, ValueError)
"""Errors of a fault that is not possible; they must not end the run."""

NOT_ALLOWED = "this run does not allow fault injection. Start it with --allow-faults"
_LAST_WORDS_S = 0.2
"""Delay of a fault that ends, stops or cuts off this agent, so that the answer is sent first."""

_ITSELF = "the rank does it itself"
_LASTS_INSIDE = frozenset({"hang", "busy-loop", "slow-input", "stop"})
"""Faults inside a rank that have a duration and can be cancelled."""

_MAX_KNOWN = 1000
_UNAUTHENTICATED = (
    "this run is UNAUTHENTICATED, so orders from other machines are refused: ask on that node "
    "itself, or start the run with --secret-file"
)


@dataclass
class _Ticket:
    """An order that passes from the requester's thread to the main thread, with its answer."""

    order: FaultOrder
    asked_by: str = ""
    """Node that forwarded the order; empty: the order was given on this node."""
    answered: threading.Event = field(default_factory=threading.Event)
    how: str = ""
    refused: str = ""
    is_given_up: bool = False


@dataclass
class _Running:
    """An order that was accepted on this node and has not ended."""

    order: FaultOrder
    action: FaultAction | None = None
    """Action of the agent; None if the rank injects the fault into itself."""
    number: int = 0
    """Number of the order on the rank's fault page."""
    times_reported: int = 0
    not_before_s: float = 0.0
    has_fired: bool = False
    pid: int = 0
    """Pid of the affected rank when the fault fired."""
    active_fault: RunningFault | None = None


class FaultController:
    """Fault orders of one node."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._acts = FaultInjectors(run)
        self._tickets: SimpleQueue[_Ticket] = SimpleQueue()
        self._sent: dict[str, _Ticket] = {}
        """Orders forwarded to other nodes, by id."""
        self._running: list[_Running] = []
        self._node_of: dict[str, str] = {}
        """Node of each order that was given here, by order id."""

    # --- a thread for each order --------------------------------------------------------------

    def ask(self, order: FaultOrder) -> messages.AnyMessage:
        try:
            node_id, order = self._resolve(order)
        except FaultRefused as error:
            return messages.Refused(str(error))
        ticket = _Ticket(order)
        is_here = node_id in ("", self._own_id)
        if is_here:
            self._tickets.put(ticket)
            self._run.signals.wake()
        else:
            self._sent[order.id] = ticket
            self._send(node_id, ForwardFault(order))
        if not ticket.answered.wait(ANSWER_S):
            ticket.is_given_up = True
            target = "this node's agent" if is_here else f"node {node_id}"
            self._sent.pop(order.id, None)
            return messages.Refused(
                f"{target} has not answered within {ANSWER_S:.0f} s; see the journal"
            )
        self._sent.pop(order.id, None)
        if ticket.refused:
            return messages.Refused(ticket.refused)
        if len(self._node_of) < _MAX_KNOWN:
            self._node_of[order.id] = node_id
        return fault_messages.FaultAccepted(order.id, node_id or self._own_id, ticket.how)

    def _resolve(self, order: FaultOrder) -> tuple[str, FaultOrder]:
        """The node for an order, and the order with its rank filled in."""
        plan = self._run.control_loop.plan
        if plan is None:
            raise FaultRefused("the run has not begun yet: it has no ranks to break")
        if order.cancels:
            known = self._node_of.get(order.cancels, self._own_id)
            return _node_named(plan, order.node) if order.node else known, order
        kind = fault_kind(order.kind)
        if kind.by_rank:
            return self._of_rank(plan, order)
        if order.kind == "leader-kill":
            return plan.leader, order
        if order.node:
            return _node_named(plan, order.node), order
        if len(plan.voters) > 1:
            names = ", ".join(card.node_id for card in plan.voters)
            raise FaultRefused(f"which node? --node N, one of {names}")
        return self._own_id, order

    def _of_rank(self, plan: GenerationPlan, order: FaultOrder) -> tuple[str, FaultOrder]:
        size = plan.world_size
        if order.rank < 0:
            if size > 1:
                raise FaultRefused(f"which rank? --rank R, 0 to {size - 1}")
            order = msgspec.structs.replace(order, rank=0)
        for node in plan.members:
            if order.rank in node.ranks:
                return node.node_id, order
        raise FaultRefused(f"there is no rank {order.rank}: this run has 0 to {size - 1}")

    @property
    def _own_id(self) -> str:
        nodes, plan = self._run.spec.nodes, self._run.control_loop.plan
        if nodes is not None:
            return nodes.node_id
        return plan.members[0].node_id if plan is not None else ""

    # --- cluster thread -----------------------------------------------------------------------

    def take(self, sender: str, message: ForwardFault | ForwardFaultReply) -> None:
        """Process an order from another node, or the reply to a forwarded order; never blocks."""
        if isinstance(message, ForwardFaultReply):
            ticket = self._sent.get(message.id)
            if ticket is not None:
                ticket.how, ticket.refused = message.how, message.refused
                ticket.answered.set()
            return
        nodes = self._run.spec.nodes
        if nodes is None or nodes.secret_file is None:
            self._send(sender, ForwardFaultReply(message.order.id, refused=_UNAUTHENTICATED))
            return
        self._tickets.put(_Ticket(message.order, asked_by=sender))
        self._run.signals.wake()

    def _send(self, node_id: str, message: ForwardFault | ForwardFaultReply) -> None:
        control = self._run.control_loop
        if isinstance(control, ClusterControlLoop) and control.thread is not None:
            control.thread.send(node_id, message)

    # --- main thread --------------------------------------------------------------------------

    @property
    def is_eager(self) -> bool:
        """An order waits for its step, so the loop must poll often."""
        return any(one.action is not None and not one.has_fired for one in self._running)

    def poll(self) -> None:
        try:
            while True:
                self._begin(self._tickets.get_nowait())
        except Empty:
            pass
        for running in list(self._running):
            if running.action is None:
                self._check_page(running)
            elif not running.has_fired and self._is_due(running):
                try:
                    self._fire(running)
                except _CANNOT as error:
                    self._over(running, f"not made: {error}")
            if running.active_fault is not None and running.active_fault.is_over():
                over = "it is taken back"
                self._over(running, over if running.has_fired else "its rank has ended before")

    def close(self) -> None:
        self.poll()
        for running in list(self._running):
            if running.active_fault is not None:
                running.active_fault.end()
            if running.active_fault is not None or not running.has_fired:
                reason = "the run has ended" if running.has_fired else "it has not fired"
                self._over(running, reason)

    def _begin(self, ticket: _Ticket) -> None:
        if ticket.is_given_up:
            return
        order = ticket.order
        if order.cancels:
            self._cancel(ticket)
            return
        try:
            running = self._prepare(order)
        except _CANNOT as error:
            ticket.refused = f"{order.kind} is not possible here: {error}"
            self._answer(ticket)
            return
        ticket.how = running.action.how if running.action is not None else _ITSELF
        self._running.append(running)
        self._report_ordered(order, ticket.how)
        action = running.action
        if action is not None and (action.is_last or action.is_answered_first):
            running.not_before_s = clock.now_s() + _LAST_WORDS_S
        elif action is not None and not order.at_step:
            try:
                self._fire(running)
            except _CANNOT as error:
                ticket.refused = f"{order.kind} is not possible here: {error}"
                self._over(running, f"refused: {error}")
        elif action is None:
            running.number = self._page(order.rank).put(order)
        self._answer(ticket)

    def _cancel(self, ticket: _Ticket) -> None:
        wanted = ticket.order.cancels
        found = next((one for one in self._running if one.order.id == wanted), None)
        try:
            if found is None:
                raise FaultRefused(
                    f"fault order {wanted} is neither pending nor active on this node. Run the "
                    "command on the node that accepted it, or pass --node"
                )
            self._take_back(found)
        except _CANNOT as error:
            ticket.refused = str(error)
        else:
            ticket.how = "it is taken back" if found.has_fired else "it will not fire"
            self._over(found, "cancelled")
        self._answer(ticket)

    def _take_back(self, running: _Running) -> None:
        order = running.order
        if running.action is None and not running.has_fired:
            self._page(order.rank).cancel(running.number)
        if running.active_fault is not None:
            running.active_fault.end()
        elif running.has_fired and order.kind not in _LASTS_INSIDE:
            raise FaultRefused(f"{order.kind} cannot be taken back once it has fired")
        elif running.has_fired:
            handle = self._acts.rank(order.rank)
            if handle.pid != running.pid:
                self._running.remove(running)
                raise FaultRefused(f"rank {order.rank} was started again: {order.kind} is over")
            if order.kind == "stop":
                handle.child.signal(signal.SIGCONT)
            else:
                self._page(order.rank).cancel(running.number)

    def _answer(self, ticket: _Ticket) -> None:
        if ticket.asked_by:
            self._send(
                ticket.asked_by, ForwardFaultReply(ticket.order.id, ticket.how, ticket.refused)
            )
        ticket.answered.set()

    def _prepare(self, order: FaultOrder) -> _Running:
        """Check the order as far as possible before it is due."""
        kind = fault_kind(order.kind)
        step = self._step_here(order.rank) if kind.by_rank else self._step_here()
        if order.at_step and step >= order.at_step:
            subject = f"rank {order.rank}" if kind.by_rank else "this node"
            raise FaultRefused(
                f"{subject} has done step {step} already, and --at-step is {order.at_step}"
            )
        now = kind.name in ("rank-kill", "stop") and not order.at_step and not order.again
        if not kind.is_inside or now:
            return _Running(order, self._acts.action(order))
        self._acts.rank(order.rank)
        for other in self._running:
            if other.action is None and other.order.rank == order.rank and not other.has_fired:
                raise FaultRefused(
                    f"rank {order.rank} has an order that has not fired yet: {other.order.kind} at "
                    f"step {other.order.at_step or 'next'} ({other.order.id})"
                )
        running = _Running(order)
        if order.kind == "oom":
            running.active_fault = self._acts.make_room_for_oom(order)
        return running

    def _is_due(self, running: _Running) -> bool:
        is_late_enough = clock.now_s() >= running.not_before_s
        return is_late_enough and self._step_here() >= running.order.at_step

    def _fire(self, running: _Running) -> None:
        """Inject the fault; if it ends this agent, journal it first."""
        action = running.action
        assert action is not None
        running.has_fired = True
        if action.is_last:
            self._report_fired(running, self._step_here(), clock.now_s())
            self._run.send_lines()
        running.active_fault = action.do()
        if not action.is_last:
            self._report_fired(running, self._step_here(), clock.now_s())
        if running.active_fault is not None:
            return
        if running.order.kind == "stop":
            running.pid = self._acts.rank(running.order.rank).pid
        else:
            self._running.remove(running)

    def _check_page(self, running: _Running) -> None:
        page, order = self._page(running.order.rank), running.order
        if page.failed == running.number:
            if running.active_fault is not None:
                running.active_fault.end()
            self._over(running, f"not made: {page.reason}")
            return
        if page.fired != running.number or page.ordered != running.number:
            return
        if page.times != running.times_reported:
            running.times_reported = page.times
            running.has_fired = True
            self._report_fired(running, page.fired_step, page.fired_ns / 1e9)
            with suppress(FaultRefused):
                running.pid = self._acts.rank(order.rank).pid
            if order.kind == "stop" and order.for_s:
                with suppress(FaultRefused):  # the rank was killed after it stopped
                    handle = self._acts.rank(order.rank)
                    fired_s = page.fired_ns / 1e9
                    running.active_fault = self._acts.continue_rank(handle, order, fired_s)
        is_done = running.active_fault is None and not order.fires_again
        if is_done and page.ended == running.number and order.for_s:
            self._over(running, "it is over")
        elif is_done and not order.for_s and order.kind not in _LASTS_INSIDE:
            self._running.remove(running)

    def _report_ordered(self, order: FaultOrder, how: str) -> None:
        self._run.journal.write(
            FaultAcceptedRecord(
                order.id,
                order.kind,
                order.rank,
                at_step=order.at_step,
                for_s=order.for_s,
                amount=order.amount,
                again=order.again,
                how=how,
            )
        )

    def _report_fired(self, running: _Running, step: int, at_s: float) -> None:
        order = running.order
        how = running.action.how if running.action is not None else _ITSELF
        record = FaultInjected(order.id, order.kind, order.rank, step, round(at_s, 6), how)
        self._run.journal.write(record)

    def _over(self, running: _Running, reason: str) -> None:
        order = running.order
        self._run.journal.write(FaultReverted(order.id, order.kind, order.rank, reason))
        if running in self._running:
            self._running.remove(running)

    def _page(self, rank: int) -> FaultPage:
        pages = self._run.workers.fault_pages
        assert pages is not None
        pages.fd_of(rank)
        return pages.by_rank[rank]

    def _step_here(self, rank: int | None = None) -> int:
        """Completed steps of this rank, or the most of all ranks here."""
        slots = [slot for slot in self._run.workers.slots if rank in (None, slot.rank)]
        return max((_step_on(slot.page) for slot in slots), default=0)


def _step_on(page: SharedPage) -> int:
    """Completed steps; the page of a new process has step 0 before its first boundary."""
    return page.get(HeartbeatField.STEP) or page.get(HeartbeatField.RESTORED_STEP)


def _node_named(plan: GenerationPlan, text: str) -> str:
    """The id of a node, given its id or its index among the voters of the plan."""
    names = [card.node_id for card in plan.voters]
    if text in names:
        return text
    if text.isdigit() and int(text) < len(names):
        return names[int(text)]
    raise FaultRefused(f"there is no node {text!r}; this run has {', '.join(names)}")
