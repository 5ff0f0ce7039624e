"""The control loop of an agent: membership, and the supervisor if this agent leads.

Runs in:  agent. In a run on one node in the main thread; on several nodes in the cluster thread,
          which never waits for the executor. `FinishedWatch` reads in a separate thread, because a
          file system may hang.
Takes in: events, from the main thread and from the network. If this node finds no other node: the
          owner record in the checkpoint directory, which shows whether the run has finished.
Gives:    commands for the executor, in a queue; commands for the network, to the caller. Ranks are
          suspended and resumed at once.
Survives: a checkpoint directory that cannot be read: the node continues to search for other nodes.

Rule 1: only one thread uses the member. The main thread posts events and receives commands.
"""

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from ftrun import clock
from ftrun.config.cluster import MembershipSettings
from ftrun.config.run_spec import RunSpec
from ftrun.membership.discovery import MemberRole
from ftrun.membership.events import ClockTick, Happening, RunFinished
from ftrun.membership.member import Member
from ftrun.network.failover.pair_check import PairCheck
from ftrun.recovery import commands
from ftrun.recovery.generation_monitor import GenerationMonitor
from ftrun.urls import is_url
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard
from ftrun.wire.cluster.membership import CollectiveRing
from ftrun.wire.finished_run import has_finished, read_owner

if TYPE_CHECKING:
    from ftrun.agent.cluster.connections import ClusterConnections
    from ftrun.agent.cluster.etcd_witness import WitnessClient


class ControlLoop:
    """Decides for this node and, while this agent leads, for the run."""

    def __init__(
        self,
        me: NodeCard,
        settings: MembershipSettings,
        *,
        kept: GenerationPlan | None,
        is_chosen: bool,
    ) -> None:
        self.settings = settings
        self.orders: SimpleQueue[commands.NodeCommand] = SimpleQueue()
        self.monitor = GenerationMonitor(settings, me.node_id, pairs=PairCheck())
        """The newest monitor; used only while this agent leads."""
        # These functions do not block. In a run on one node, or without a witness, they do nothing.
        self.check_again: Callable[[int], None] = _ignored
        """Starts a check of this node whose number is at least this one."""
        self.run_collective: Callable[[CollectiveRing], None] = _ignored
        self.ask_witness: Callable[[commands.QueryWitness], None] = _ignored
        self.probe_path: Callable[[commands.ProbePath], None] = _ignored
        self._me = me.node_id
        self.member = Member(
            me, settings, self._new_monitor, now_s=clock.now_s(), kept=kept, is_chosen=is_chosen
        )

    def post(self, event: Happening) -> None:
        self.think(event)

    def tick(self) -> None:
        """Handle the time; has an effect only if the control loop has no own thread."""
        self.think(ClockTick())

    def next_order(self) -> commands.NodeCommand | None:
        try:
            return self.orders.get_nowait()
        except Empty:
            return None

    @property
    def plan(self) -> GenerationPlan | None:
        """The newest chosen generation that was reported to this node."""
        return self.member.follower.plan

    @property
    def leads(self) -> bool:
        return self.member.leader is not None

    def card_of(self, node_id: str) -> NodeCard | None:
        """The newest known card of a node. Call it only in the thread of the control loop."""
        member = self.member
        peer = member.leader.known.get(node_id) if member.leader is not None else None
        if peer is not None:
            return peer.card
        card = member.leader_card
        if card is not None and card.node_id == node_id:
            return card
        plan = member.follower.newest_plan
        return plan.card(node_id) if plan is not None else None

    def close(self) -> None:
        """Release the threads of the control loop; this class has none."""

    def think(self, event: Happening) -> list[commands.NetworkCommand]:
        """Decide; queue commands for the executor, and return commands for the network.

        Only in the thread of the control loop.
        """
        network: list[commands.NetworkCommand] = []
        for command in self.member.handle(event, now_s=clock.now_s()):
            self._sort(command, network)
        return network

    def _sort(self, command: commands.Command, network: list[commands.NetworkCommand]) -> None:
        match command:
            case commands.Connect() | commands.Send() | commands.Disconnect():
                network.append(command)
            case commands.RepeatNodeCheck():
                self.check_again(command.number)
            case commands.RunCollectiveCheck():
                self.run_collective(command.ring)
            case commands.ProbePath():
                self.probe_path(command)
            case commands.QueryWitness():
                self.ask_witness(command)
            case _:
                self.orders.put(command)

    def _new_monitor(self) -> GenerationMonitor:
        self.monitor = GenerationMonitor(self.settings, self._me, pairs=PairCheck())
        return self.monitor


def _ignored(_: object) -> None: ...


class ClusterControlLoop(ControlLoop):
    """A control loop in the cluster thread; `post` passes events of the main thread to it."""

    thread: "ClusterConnections | None" = None
    witness_thread: "WitnessClient | None" = None

    def post(self, event: Happening) -> None:
        assert self.thread is not None
        self.thread.post(event)

    def tick(self) -> None:
        """Raise the failure of a thread, so that the agent ends.

        The cluster thread handles the time itself.
        """
        for name, thread in (("cluster", self.thread), ("witness", self.witness_thread)):
            if thread is not None and thread.failure is not None:
                raise RuntimeError(f"the {name} thread has ended") from thread.failure

    def close(self) -> None:
        for thread in (self.thread, self.witness_thread):
            if thread is not None:
                thread.close()

    def _sort(self, command: commands.Command, network: list[commands.NetworkCommand]) -> None:
        # The main thread may be busy, so this thread suspends ranks, before another agent can have
        # replaced them.
        if (
            isinstance(command, commands.SuspendRanks | commands.ResumeRanks)
            and self.thread is not None
        ):
            self.thread.suspend_now(isinstance(command, commands.SuspendRanks))
        super()._sort(command, network)


POLL_EVERY_S = 2.0

_log = logging.getLogger("ftrun")


class FinishedWatch:
    """Polls the owner record of a checkpoint directory; does nothing if that is a URL."""

    def __init__(self, spec: RunSpec, control_loop: ControlLoop) -> None:
        self._spec = spec
        self._control_loop = control_loop
        directory = spec.checkpoint_directory
        is_used = spec.nodes is not None and directory is not None and not is_url(directory)
        self._directory = directory if is_used else None
        self._due_s: float | None = None
        self._is_reported = False
        self.thread: threading.Thread | None = None

    def poll(self, *, now_s: float) -> None:
        if self._directory is None or not self._is_apart():
            self._due_s = None
            return
        if self._due_s is None:
            self._due_s = now_s + POLL_EVERY_S
        if now_s < self._due_s or (self.thread is not None and self.thread.is_alive()):
            return
        self._due_s = now_s + POLL_EVERY_S
        self.thread = threading.Thread(target=self._read, name="ftrun-finished", daemon=True)
        self.thread.start()

    def _is_apart(self) -> bool:
        """Whether this node has found no leader, or leads a paused run."""
        leader = self._control_loop.member.leader
        if leader is not None:
            return leader.pause.is_on
        return self._control_loop.member.role in (MemberRole.JOINING, MemberRole.SEEKING)

    def _read(self) -> None:
        assert self._directory is not None
        plan = self._control_loop.plan
        record = read_owner(self._directory)
        if reason := has_finished(self._spec, record, life=plan.life if plan is not None else ""):
            if not self._is_reported:
                self._is_reported = True
                _log.warning("%s", reason)
            self._control_loop.post(RunFinished(reason))
