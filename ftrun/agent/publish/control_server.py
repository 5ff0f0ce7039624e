"""Answers requests of the operator independently of the main thread.

Runs in a thread of its own, so that it answers status also while torch starts workers. Each fault
order has a thread, because another node may take long to answer.
"""

import logging
import selectors
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from ftrun import clock
from ftrun.agent.faults.controller import NOT_ALLOWED, FaultController
from ftrun.errors import FtrunError, PeerError
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import faults as fault_messages
from ftrun.wire.messages.faults import FaultOrder
from ftrun.wire.messages.status import ClusterStatus, drain_refusal
from ftrun.wire.transport.channel import Channel, accept, listen

if TYPE_CHECKING:
    from ftrun.agent.launcher import Run

_log = logging.getLogger(__name__)

REFUSED_PAUSE_S = 0.05


class ControlServer:
    """Server of agent.sock; without `faults`, the run does not allow them."""

    def __init__(self, run: "Run", faults: FaultController | None) -> None:
        self._run = run
        self._faults = faults
        self._path = run.smp.folder.agent_socket
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="ftrun-control", daemon=True)
        self._stop_read, self._stop_write = socket.socketpair()

    def start(self) -> None:
        server = listen(self._path)
        self._selector.register(server, selectors.EVENT_READ)
        self._selector.register(self._stop_read, selectors.EVENT_READ)
        self._server = server
        self._thread.start()

    def stop(self) -> None:
        self._stop_write.send(b"\0")
        self._thread.join(5.0)
        self._path.unlink(missing_ok=True)
        if self._thread.is_alive():
            return  # the thread waits for a status; the process ends soon
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, Channel | socket.socket):
                key.fileobj.close()
        self._stop_write.close()
        self._selector.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._stop_read:
                    return
                try:
                    if key.fileobj is self._server:
                        self._accept()
                    elif isinstance(key.fileobj, Channel):
                        self._answer(key.fileobj)
                except Exception:  # noqa: BLE001 - an error costs one client
                    # The thread must continue, because it answers all status and stop requests.
                    _log.exception("a request was not answered: a bug of ftrun")
                    if isinstance(key.fileobj, Channel):
                        self._hang_up(key.fileobj)
                    clock.sleep(REFUSED_PAUSE_S)

    def _hang_up(self, channel: Channel) -> None:
        with suppress(KeyError, ValueError, OSError):
            self._selector.unregister(channel)
        with suppress(OSError):
            channel.close()

    def _accept(self) -> None:
        try:
            channel = accept(self._server, run_id=self._run.spec.run_id)
        except OSError as error:
            # For example too many open files: clients wait until a descriptor is free.
            _log.debug("a client was not accepted: %s", error)
            clock.sleep(REFUSED_PAUSE_S)
            return
        if channel is not None:
            self._selector.register(channel, selectors.EVENT_READ)

    def _status_reply(self) -> messages.AnyMessage:
        try:
            return messages.StatusReply(self._run.observers.status.document())
        except PeerError as error:
            return messages.Refused(str(error))

    def _stop(self) -> messages.AnyMessage:
        """Without a secret, only on the leader's node.

        Any host that reaches the port could join, and request a stop through its node.
        """
        if leader := self._only_leader():
            return messages.Refused(
                "this run is UNAUTHENTICATED, so only the node of the leader accepts a stop: "
                f"{leader}. Or send SIGINT to ftrun on any node"
            )
        self._run.signals.ask_stop("ftrun stop")
        return messages.Done()

    def _only_leader(self) -> str:
        """The leader's node, if only that may take this request; else empty."""
        nodes, rpc = self._run.spec.nodes, self._run.rpc
        if nodes is None or rpc is None or nodes.secret_file is not None:
            return ""
        last = rpc.control_loop.read().value
        is_other = bool(last.leader_id) and not last.leads
        return f"node {last.leader_id} ({last.leader_host})" if is_other else ""

    def _cluster(self, task: str) -> ClusterStatus | messages.Refused:
        """The run as the leader sees it, for an order about another node."""
        if leader := self._only_leader():
            return messages.Refused(
                f"this run is UNAUTHENTICATED, so only the node of the leader {task}: {leader}"
            )
        rpc = self._run.rpc
        cluster = rpc.whole() if rpc is not None else None
        if cluster is None:
            return messages.Refused("this run has one node. To end it: ftrun stop")
        if not cluster.nodes:
            return messages.Refused(f"no leader has answered: {cluster.note or cluster.summary}")
        return cluster

    def _readmit(self, node_id: str) -> messages.AnyMessage:
        cluster = self._cluster("readmits nodes")
        if isinstance(cluster, messages.Refused):
            return cluster
        found = next((one for one in cluster.exclusions if one.node_id == node_id), None)
        if found is None:
            names = ", ".join(one.node_id for one in cluster.exclusions)
            return messages.Refused(f"node {node_id} is not excluded; excluded: {names or 'none'}")
        if found.left_s is None:
            return messages.Refused(
                f"node {node_id} cannot be readmitted: {found.reason}. Repair it, and start ftrun "
                "on it again"
            )
        assert self._run.rpc is not None
        self._run.rpc.readmit(node_id)
        return messages.Done()

    def _drain(self, node_id: str) -> messages.AnyMessage:
        cluster = self._cluster("drains nodes")
        if isinstance(cluster, messages.Refused):
            return cluster
        if reason := drain_refusal(cluster, node_id):
            return messages.Refused(reason)
        assert self._run.rpc is not None
        self._run.rpc.drain(node_id, "ftrun drain")
        return messages.Done()

    def _inject(self, channel: Channel, order: FaultOrder, question: int) -> None:
        faults = self._faults
        if faults is None:
            channel.send(messages.Refused(NOT_ALLOWED), question=question)
            return

        def order_fault() -> None:
            try:
                channel.send(faults.ask(order), question=question)
            except (FtrunError, OSError) as error:
                _log.debug("the client that ordered a fault has disconnected: %s", error)

        try:
            threading.Thread(target=order_fault, name="ftrun-inject", daemon=True).start()
        except RuntimeError:
            order_fault()  # no thread can be started, as under pid-limit

    def _answer(self, channel: Channel) -> None:
        try:
            for received in channel.receive_ready():
                number = received.envelope.question
                match received.body:
                    case messages.StatusRequest():
                        channel.send(self._status_reply(), question=number)
                    case messages.StopRequest():
                        channel.send(self._stop(), question=number)
                    case messages.ReadmitRequest(node_id=node_id):
                        channel.send(self._readmit(node_id), question=number)
                    case messages.DrainRequest(node_id=node_id):
                        channel.send(self._drain(node_id), question=number)
                    case fault_messages.InjectFault(order=order):
                        self._inject(channel, order, number)
                    case messages.Hello():
                        pass
                    case other:
                        refused = messages.Refused(f"the agent does not handle {other!r}")
                        channel.send(refused, question=number)
        except (FtrunError, OSError) as error:
            _log.debug("a client has disconnected: %s", error)
            self._hang_up(channel)
