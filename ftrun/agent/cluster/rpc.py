"""Requests between the nodes of a run that need no decision: status, and lines for the journal.

`take` runs in the cluster thread, which also publishes `control_loop`; `whole` in the control
thread, the rest in the main thread. If the leader does not answer, the node's own status is shown.
"""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from ftrun import clock
from ftrun.agent.cluster.connections import ClusterConnections
from ftrun.agent.cluster.control_loop import ControlLoop
from ftrun.agent.cluster.path_probe import LinkProber
from ftrun.agent.faults.controller import NOT_ALLOWED, FaultController
from ftrun.agent.publish.cluster_status import control_loop_status
from ftrun.agent.publish.published import Published
from ftrun.journal import Journal
from ftrun.membership.events import MessageReceived
from ftrun.wire.cluster.messages import (
    AnyClusterMessage,
    ClusterStatusReply,
    ClusterStatusRequest,
    DrainNode,
    JournalLines,
    ProbeLinkRequest,
    ReadmitNode,
)
from ftrun.wire.messages.faults import ForwardFault, ForwardFaultReply
from ftrun.wire.messages.status import ClusterStatus, decode_status

ANSWER_S = 2.0
LINES_EVERY_S = 1.0
CONTROL_LOOP_EVERY_S = 5.0
"""The thread that sends heartbeats builds the status of a run on several nodes, so it does so
rarely."""
MAX_LINES_BYTES = 256 << 10
"""In one message, far below the limit of a frame."""


class ClusterRpc:
    """Handles the requests of other nodes on one node."""

    def __init__(self, control_loop: ControlLoop, journal: Journal, merged_folder: Path) -> None:
        self.thread: ClusterConnections | None = None
        self.faults: FaultController | None = None
        """Takes orders for faults; None: this node takes none."""
        self.leave: Callable[[str], None] | None = None
        """Has this node leave the run; the text names the origin."""
        self.prober: LinkProber | None = None
        self.control_loop = Published(
            partial(control_loop_status, control_loop, is_alone=False),
            wake=self._wake,
            every_s=CONTROL_LOOP_EVERY_S,
        )
        self.control_loop.publish()  # the cluster thread does not run yet
        self._control_loop = control_loop
        self._journal = journal
        self._merged: Journal | None = None
        self._merged_folder = merged_folder
        self._number = 0
        self._answered = threading.Condition()
        self._answer: tuple[int, bytes] = (0, b"")
        self._lines: deque[str] = deque(maxlen=10_000)
        self._due_s = 0.0
        journal.keep_copies()

    # --- cluster thread -----------------------------------------------------------------------

    def take(self, sender: str, message: AnyClusterMessage) -> None:
        match message:
            case ClusterStatusRequest() if self.thread is not None:
                self.control_loop.publish()
                document = msgspec.json.encode(self.control_loop.last().value.cluster)
                self.thread.send(sender, ClusterStatusReply(message.number, document))
            case ClusterStatusReply():
                with self._answered:
                    self._answer = (message.number, message.document)
                    self._answered.notify_all()
            case DrainNode():
                self._drain(message)
            case JournalLines():
                self._lines.extend(message.lines)
            case ForwardFault() | ForwardFaultReply() if self.faults is not None:
                self.faults.take(sender, message)
            case ForwardFault(order=order) if self.thread is not None:
                self.thread.send(sender, ForwardFaultReply(order.id, refused=NOT_ALLOWED))
            case ProbeLinkRequest() if self.prober is not None and self.thread is not None:
                answer = partial(self.thread.send, sender)
                self.prober.take(message, answer)
            case _:
                pass

    def _drain(self, body: DrainNode) -> None:
        """Execute an order for this node; as the leader, pass on one for another node."""
        if body.node_id == self._control_loop.member.me.node_id:
            if self.leave is not None:
                self.leave(body.by)
        elif self.thread is not None and self._control_loop.leads:
            self.thread.send(body.node_id, body)

    def _wake(self) -> None:
        if self.thread is not None:
            self.thread.wake()

    # --- control thread -----------------------------------------------------------------------

    def whole(self) -> ClusterStatus | None:
        control_loop = self.control_loop.read().value
        own = control_loop.cluster
        if own is None or control_loop.leads or not control_loop.leader_id or self.thread is None:
            return own
        self._number += 1
        self.thread.send(control_loop.leader_id, ClusterStatusRequest(self._number))
        with self._answered:
            has_come = self._answered.wait_for(lambda: self._answer[0] == self._number, ANSWER_S)
            data = self._answer[1]
        if has_come:
            return decode_status(data, ClusterStatus, source=f"node {control_loop.leader_id}")
        note = f"node {control_loop.leader_id}, the leader, did not answer within {ANSWER_S:.0f} s"
        return msgspec.structs.replace(own, note=note)

    def readmit(self, node_id: str) -> None:
        """Request from the leader that a node may run ranks again."""
        last, body = self.control_loop.read().value, ReadmitNode(node_id)
        if self.thread is not None and last.leads:
            self.thread.post(MessageReceived(self._control_loop.member.me.node_id, body))
        elif self.thread is not None:
            self.thread.send(last.leader_id, body)

    def drain(self, node_id: str, by: str) -> None:
        """Request from a node, through the leader, that it leaves the run."""
        last, body = self.control_loop.read().value, DrainNode(node_id, by)
        if node_id == self._control_loop.member.me.node_id or last.leads:
            self._drain(body)
        elif self.thread is not None:
            self.thread.send(last.leader_id, body)

    # --- main thread --------------------------------------------------------------------------

    def pass_lines_on(self, *, at_once: bool = False) -> None:
        """Send new lines of this node's journal to the leader; a leader writes all lines."""
        now_s = clock.now_s()
        if now_s < self._due_s and not at_once:
            return
        self._due_s = now_s + LINES_EVERY_S
        ours = self._journal.take_copies()
        leader = self._control_loop.member.leader_card
        if self._control_loop.leads:
            theirs = [self._lines.popleft() for _ in range(len(self._lines))]
            self._write([*ours, *theirs])
        elif leader is not None and self.thread is not None:
            for some in _in_parts(ours):
                self.thread.send(leader.node_id, JournalLines(some))

    def _write(self, lines: list[str]) -> None:
        if not lines:
            return
        if self._merged is None:
            self._merged = Journal(self._merged_folder)
        for line in lines:
            self._merged.append(line)


def _in_parts(lines: list[str]) -> list[list[str]]:
    parts: list[list[str]] = []
    room = 0
    for line in lines:
        kept = line if len(line) < MAX_LINES_BYTES else line[: MAX_LINES_BYTES // 4]
        if not parts or len(kept) > room:
            parts.append([])
            room = MAX_LINES_BYTES
        parts[-1].append(kept)
        room -= len(kept)
    return parts
