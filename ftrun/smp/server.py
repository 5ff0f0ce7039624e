"""The SMP's event loop: receives messages, dispatches them, and ends the process.

Runs in:  the SMP, in its main thread; the other threads are those of jobs and links.
Takes in: connections on a unix socket, results of jobs, SIGTERM.
Gives:    nothing by itself; `MessageHandler` makes the replies.
Survives: its agent, for `orphan_s`; each client, whatever it sends.

Rule 1: a client that breaks the protocol loses its connection; the server continues.
Rule 2: there is one agent; a newer one replaces the older.
Rule 3: workers wait until a generation has begun, and with `--adopt` until memory was adopted. A
        worker that reconnects earlier would get fresh memory in addition to its old arena.
"""

import logging
import os
import selectors
import socket
from collections.abc import Callable
from pathlib import Path

from ftrun import clock
from ftrun.errors import PeerLost, ProtocolError
from ftrun.ids import Rank, RunId, version
from ftrun.smp.client import ClientConnection, ClientRole, Requester
from ftrun.smp.jobs import JobLanes
from ftrun.smp.message_handler import MessageHandler
from ftrun.wire.messages import checkpoint as checkpoint_messages
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import files as file_messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.transport.channel import Channel, ReceivedMessage, accept, listen, short_socket_path

_OfWorker = (
    worker_messages.ReserveMemory
    | worker_messages.PrepareArena
    | worker_messages.RequestArena
    | worker_messages.RequestPool
    | worker_messages.RequestShares
    | worker_messages.ShardSealed
    | worker_messages.WithdrawShard
    | worker_messages.ShardSkipped
    | worker_messages.AwaitRestored
    | worker_messages.OpenShards
    | worker_messages.FetchShardHeaders
    | worker_messages.FetchPieces
    | file_messages.SaveFile
    | file_messages.OpenSavedFile
)
ACCEPT_AGAIN_S = 0.5
"""Pause after a connection could not be accepted, for example without a free descriptor."""

_OfCli = messages.StatusRequest | smp_messages.Shutdown
_log = logging.getLogger(__name__)


class SmpServer:
    """Serves a unix socket until it is shut down or has had no agent for `orphan_s`."""

    def __init__(self, run_id: RunId, path: Path, *, orphan_s: float, adopt: bool) -> None:
        self._run_id = run_id
        self._path = path
        self._orphan_s = orphan_s
        self._awaits_adoption = adopt
        self._orphaned_since_s: float | None = clock.now_s()
        self._is_ending = self._must_end = self._is_woken = False
        self._clients: set[ClientConnection] = set()
        self._selector = selectors.DefaultSelector()
        self._jobs = JobLanes()
        self._handler = MessageHandler(run_id, self._jobs)
        self._socket = listen(path)
        self._inode = path.stat().st_ino
        self._accept_again_s: float | None = None
        """When connections are accepted again; None: they are accepted now."""
        self._watch(self._socket, self._accept)
        self._watch(self._jobs, self._jobs.finish)

    def end_if_alone(self) -> None:
        """End the server if no agent is connected; otherwise the agent ends it.

        The loop turn that the signal wakes makes the decision. By then it has processed the
        disconnect of an agent that exited before the signal.
        """
        self._must_end = True

    def wake_on(self, sock: socket.socket) -> None:
        """Run one loop turn when `sock` becomes readable; the signal handler has run by then."""

        def wake() -> None:
            sock.recv(4096)
            self._is_woken = True

        self._watch(sock, wake)

    def serve(self) -> None:
        try:
            while not self._is_ending:
                for key, _ in self._selector.select(self._timeout_s()):
                    key.data()
                self._sweep()
                self._accept_again()
                self._receive_signal()
                self._check_orphan()
        finally:
            self._finish()

    def _receive_signal(self) -> None:
        if self._is_woken and self._must_end:
            self._must_end = False
            self._is_ending |= self._handler.agent is None
        self._is_woken = False

    def _watch(
        self, what: socket.socket | JobLanes | Channel, action: Callable[[], object]
    ) -> None:
        self._selector.register(what, selectors.EVENT_READ, action)

    def _timeout_s(self) -> float | None:
        since_s = self._orphaned_since_s
        orphan_ends_s = None if since_s is None else since_s + self._orphan_s
        due_s = [at_s for at_s in (orphan_ends_s, self._accept_again_s) if at_s is not None]
        return max(0.0, min(due_s) - clock.now_s()) if due_s else None

    def _check_orphan(self) -> None:
        since_s = self._orphaned_since_s
        if since_s is not None and clock.now_s() >= since_s + self._orphan_s:
            _log.warning(
                "no agent for %.0f s: freeing the snapshots of run %s", self._orphan_s, self._run_id
            )
            self._is_ending = True

    def _finish(self) -> None:
        self._handler.free()
        for client in self._clients:
            client.close()
        self._unlink()
        self._socket.close()
        self._selector.close()

    def _unlink(self) -> None:
        """Remove the socket file, unless another SMP has created its own at this path."""
        try:
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
        except FileNotFoundError:
            pass

    def _accept(self) -> None:
        try:
            channel = accept(self._socket, run_id=self._run_id)
        except OSError as error:
            _log.warning("cannot accept a connection: %s", error)
            # The listener stays readable, so the loop would not wait any more.
            self._selector.unregister(self._socket)
            self._accept_again_s = clock.now_s() + ACCEPT_AGAIN_S
            return
        if channel is None:
            _log.warning("rejected a connection of another user")
            return
        client = ClientConnection(channel)
        self._clients.add(client)
        self._watch(client.channel, lambda: self._receive(client))

    def _accept_again(self) -> None:
        if self._accept_again_s is not None and clock.now_s() >= self._accept_again_s:
            self._accept_again_s = None
            self._watch(self._socket, self._accept)

    def _receive(self, client: ClientConnection) -> None:
        try:
            client.backlog.extend(client.channel.receive_ready())
        except PeerLost:
            client.is_gone = True
        except ProtocolError as error:
            _log.warning("%s: %s", client.channel.peer, error)
            client.is_gone = True
        self._drain(client)

    def _drain(self, client: ClientConnection) -> None:
        """Handle the received messages, unless this client is a worker that must wait (rule 3)."""
        while client.backlog and not client.is_gone and not self._has_to_wait(client):
            received = client.backlog.popleft()
            try:
                self._handle(client, received)
            except ProtocolError as error:
                _log.warning("%s: %s", client.channel.peer, error)
                client.is_gone = True
            except Exception:  # noqa: BLE001
                # The process loop: a bug must cost a connection, not the snapshots of a run.
                _log.exception("%s: internal error in ftrun", client.channel.peer)
                client.is_gone = True
            finally:
                received.close()

    def _has_to_wait(self, client: ClientConnection) -> bool:
        may_begin = self._handler.commits.has_started and not self._awaits_adoption
        return client.role is ClientRole.WORKER and not may_begin

    def _sweep(self) -> None:
        for client in [one for one in self._clients if one.is_gone]:
            self._selector.unregister(client.channel)
            self._clients.remove(client)
            client.close()
            if client is self._handler.agent:
                self._handler.agent = None
                self._orphaned_since_s = clock.now_s()
                _log.info(
                    "the agent has disconnected; keeping the snapshots for %.0f s", self._orphan_s
                )
                let_go_of_streams(2)  # otherwise a reader of the run's output waits for us

    def _handle(self, client: ClientConnection, received: ReceivedMessage) -> None:
        body = received.body
        if client.role is ClientRole.UNKNOWN:
            self._meet(client, body)
        elif client.role is ClientRole.WORKER:
            self._serve_worker(client, received)
        else:
            if client.role is ClientRole.CLI and not isinstance(body, _OfCli):
                raise _not_allowed(body, client.role)
            requester = Requester(client, received)
            answer = self._serve_agent(requester, received)
            if answer is not None:
                requester.send(answer)

    def _meet(self, client: ClientConnection, body: messages.AnyMessage) -> None:
        if not isinstance(body, messages.Hello):
            raise _not_allowed(body, client.role)
        if body.protocol != messages.PROTOCOL_VERSION:
            client.send(
                messages.Refused(f"protocol {body.protocol} is not {messages.PROTOCOL_VERSION}")
            )
            raise ProtocolError(f"protocol {body.protocol} is not supported")
        try:
            client.role = ClientRole(body.role)
        except ValueError as error:
            raise ProtocolError(f"unknown client role {body.role!r}") from error
        client.rank = body.rank
        is_worker = client.role is ClientRole.WORKER
        client.channel.peer = f"the worker of rank {body.rank}" if is_worker else f"the {body.role}"
        if client.role is ClientRole.AGENT:
            if self._handler.agent is not None:
                _log.info("a newer agent (pid %d) replaces the old one", body.pid)
                self._handler.agent.is_gone = True
            self._handler.agent = client
            self._orphaned_since_s = None
        elif client.role is ClientRole.WORKER and not self._has_to_wait(client):
            self._handler.commits.resend_sealed(Rank(client.rank))

    def _serve_worker(  # noqa: C901, PLR0912
        self, client: ClientConnection, received: ReceivedMessage
    ) -> None:
        handler, body, requester = self._handler, received.body, Requester(client, received)
        if not isinstance(body, _OfWorker):
            raise _not_allowed(body, client.role)
        if body.rank != client.rank:
            raise ProtocolError(f"the message names rank {body.rank}, not {client.rank}")
        is_over = handler.is_over(received.envelope)
        if is_over and not isinstance(
            body,
            worker_messages.ShardSealed
            | worker_messages.ShardSkipped
            | file_messages.OpenSavedFile,
        ):
            requester.send(messages.Refused(f"generation {received.envelope.generation} has ended"))
            return
        rank = Rank(body.rank)
        match body:
            case worker_messages.ReserveMemory():
                handler.requests.reserve(requester, body)
            case worker_messages.PrepareArena():
                handler.requests.prepare(requester, body)
            case worker_messages.RequestArena():
                handler.requests.request(requester, body)
            case worker_messages.RequestPool():
                handler.requests.pools.request(requester, body)
            case worker_messages.ShardSealed():
                handler.requests.sealed(rank)
                sealed = version(body.generation, body.step)
                handler.commits.sealed(rank, sealed, body.check)
            case worker_messages.RequestShares():
                requester.send(handler.group_work.replicas.grant(body))
            case worker_messages.ShardSkipped():
                handler.commits.skipped(version(body.generation, body.step))
            case worker_messages.WithdrawShard():
                requester.send(handler.commits.withdraw(rank, version(body.generation, body.step)))
            case file_messages.SaveFile() | file_messages.OpenSavedFile():
                handler.files.serve(requester, body, received.fds)
            case worker_messages.AwaitRestored():
                wanted = version(body.generation, body.step)
                handler.group_work.restores.grant(requester, rank, wanted)
            case (
                worker_messages.OpenShards()
                | worker_messages.FetchShardHeaders()
                | worker_messages.FetchPieces()
            ):
                handler.group_work.range_fetches.ask(requester, body)

    def _serve_agent(  # noqa: C901, PLR0912
        self, requester: Requester, received: ReceivedMessage
    ) -> messages.AnyMessage | None:
        handler = self._handler
        match received.body:
            case smp_messages.ListenForPeers() as body:
                return handler.group_work.listen([body.host, *body.others], received.fds)
            case smp_messages.CommitVersion() as body:
                if not handler.is_over(received.envelope):
                    handler.commits.commit(version(body.generation, body.step))
            case smp_messages.AbandonVersion() as body:
                handler.commits.abandon(body.generation, body.step)
            case smp_messages.BeginGeneration() as body:
                requester.send(handler.begin_generation(body, received))
                self._let_workers_in()
            case smp_messages.InventoryRequest() as body:
                return handler.group_work.inventory(body)
            case smp_messages.VoidAfter() as body:
                return handler.void_after(body)
            case smp_messages.HandOverMemory():
                handler.hand_over(requester)
            case smp_messages.AdoptMemory() as body:
                self._awaits_adoption = False
                requester.send(handler.adopt(body, received))
                self._let_workers_in()
            case smp_messages.PersistRunState() as body:
                return handler.persist_run_state(body)
            case checkpoint_messages.WriteCheckpoint() as body:
                handler.write_checkpoint(requester, body)
            case checkpoint_messages.ExpediteCheckpoint():
                handler.checkpoints.expedite()
            case checkpoint_messages.LoadCheckpoint() as body:
                handler.checkpoints.load(requester, body)
            case checkpoint_messages.EndCheckpoints() as body:
                handler.checkpoints.end(requester, body)
            case file_messages.FileHeld() as body:
                handler.files.take_back(body, received.fds)
            case file_messages.FinishFiles():
                handler.files.finish(requester)
            case messages.StatusRequest():
                return handler.status(self._orphan_status())
            case smp_messages.Shutdown():
                handler.free()
                self._unlink()
                self._is_ending = True
                return messages.Done()
            case other:
                raise _not_allowed(other, ClientRole.AGENT)
        return None

    def _let_workers_in(self) -> None:
        for client in [one for one in self._clients if one.role is ClientRole.WORKER]:
            self._drain(client)

    def _orphan_status(self) -> dict[str, object]:
        since_s = self._orphaned_since_s
        return {
            "orphaned_for_s": None if since_s is None else clock.now_s() - since_s,
            "orphan_s": self._orphan_s,
        }


def _not_allowed(body: messages.AnyMessage, role: ClientRole) -> ProtocolError:
    return ProtocolError(f"{type(body).__name__} is not allowed for role {role.value}")


def is_served(path: Path) -> bool:
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with short_socket_path(path) as short:
            probe.connect(short)
    except OSError:
        return False
    finally:
        probe.close()
    return True


def let_go_of_streams(*numbers: int) -> None:
    """Point these standard streams at /dev/null."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in numbers:
        os.dup2(null, number)
    os.close(null)
