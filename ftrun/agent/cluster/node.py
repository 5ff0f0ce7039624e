"""Sets up this node: name, address, secret, and control loop.

Runs in the main thread, before the run begins.
"""

import logging
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun import clock
from ftrun.agent.cluster.connections import ClusterConnections
from ftrun.agent.cluster.control_loop import ClusterControlLoop, ControlLoop
from ftrun.agent.cluster.etcd_witness import EtcdWitness, WitnessClient
from ftrun.agent.cluster.interfaces import listen_on, own_rails
from ftrun.agent.cluster.path_probe import LinkProber, PathProber
from ftrun.agent.cluster.rail_heartbeat import RailHeartbeat
from ftrun.agent.launch.rendezvous import LOOPBACK
from ftrun.agent.observe.node_check import NodeCheck
from ftrun.agent.snapshots.retained_memory import PersistedAgentState, last_agent_ended_s
from ftrun.agent.snapshots.smp_client import AgentSmpClient
from ftrun.config.cluster import MembershipSettings, NodesSpec
from ftrun.config.run_spec import RunSpec
from ftrun.errors import AddressTaken, PeerError, PeerLost, UsageError
from ftrun.network.detect.rails import VARIABLES
from ftrun.wire.cluster.generation import NodeCard
from ftrun.wire.transport.handshake import PeerIdentity
from ftrun.wire.transport.secret import HOW_TO_MAKE, Secret, load_secret
from ftrun.wire.transport.tcp import bind_address, is_local_address, is_own_name, listen_tcp

if TYPE_CHECKING:
    from ftrun.agent.launcher import Run

NAME_CHECK_S = 0.5
"""Seconds between two name look-ups of the endpoint."""

_log = logging.getLogger(__name__)


@dataclass
class LocalNode:
    """This node of the run."""

    spec: RunSpec
    card: NodeCard
    agent_lost_s: float | None
    """When the last agent of this stub ended; None: this is the first one."""
    secret: Secret | None = None
    listeners: list[socket.socket] = field(default_factory=list)
    register: EtcdWitness | None = None
    """Client of the outside witness; None: the run has no witness."""

    @classmethod
    def of(cls, spec: RunSpec, num_ranks: int, persisted: PersistedAgentState) -> "LocalNode":
        """Find this node's address and open its port.

        Raises:
            UsageError: the address is not this machine's, a required secret is missing, or the
                outside witness cannot be used.
            PeerError: the endpoint has no address within `nodes.join_timeout_s`.
        """
        incarnation, agent_lost_s = secrets.randbits(62), last_agent_ended_s()
        nodes = spec.nodes
        if nodes is None:
            name = socket.gethostname() or "node"
            card = NodeCard(name, incarnation, LOOPBACK, 0, num_ranks, endpoint=True)
            return cls(spec, card, agent_lost_s)
        register = _register(spec, nodes, persisted)
        before = persisted.plan.card(nodes.node_id) if persisted.plan is not None else None
        if before is not None and is_local_address(before.host):
            host = before.host
        else:
            host = _find_host(nodes, spec.profile.nodes.join_timeout_s)
        number, endpoint = _endpoint(nodes, host) if register is None else (0, None)
        listener = endpoint or _own_port(host, before)
        secret = load_secret(Path(nodes.secret_file)) if nodes.secret_file else None
        network = spec.profile.network
        is_narrow = nodes.bind is not None or (secret is None and network.plan != "on")
        rails = own_rails(
            listener.getsockname()[0],
            network.rails,
            only_first=is_narrow,
            is_again=persisted.plan is not None,
        )
        rails, listeners = listen_on(rails, listener, before)
        card = NodeCard(
            node_id=nodes.node_id,
            incarnation=incarnation,
            host=listener.getsockname()[0],
            port=listener.getsockname()[1],
            num_ranks=num_ranks,
            node_rank=nodes.node_rank if nodes.node_rank is not None else -1,
            domain=nodes.domain or "",
            endpoint=endpoint is not None and number == 0,
            switch=nodes.switch,
            rails=rails,
            further_endpoint=number,
            is_first=agent_lost_s is None,
        )
        return cls(spec, card, agent_lost_s, secret, listeners, register)

    @property
    def is_alone(self) -> bool:
        return self.spec.nodes is None

    def control_loop(self, persisted: PersistedAgentState) -> ControlLoop:
        spec = self.spec
        settings = MembershipSettings.of(
            spec.profile,
            spec.nodes,
            max_restarts=spec.max_restarts,
            user_env={name: os.environ[name] for name in VARIABLES if name in os.environ},
        )
        kind = ControlLoop if self.is_alone else ClusterControlLoop
        control_loop = kind(self.card, settings, kept=persisted.plan, is_chosen=persisted.is_chosen)
        control_loop.member.follower.agent_lost_s = self.agent_lost_s
        return control_loop

    def introduce(self, smp: AgentSmpClient) -> None:
        if not self.is_alone:
            others = [rail.host for rail in self.card.rails if rail.host != self.card.host]
            smp.listen_for_peers(self.card.host, self.secret, others)

    def start(self, run: "Run", preflight: NodeCheck) -> None:
        control, rpc = run.control_loop, run.rpc
        if not isinstance(control, ClusterControlLoop) or rpc is None:
            return
        identity = PeerIdentity(
            run_id=self.spec.run_id,
            purpose="agent",
            node_id=self.card.node_id,
            incarnation=self.card.incarnation,
            torch=_torch_version(),
        )
        thread = ClusterConnections(
            control,
            identity,
            self.secret,
            self.listeners,
            wake_executor=run.signals.wake,
            suspend_now=run.workers.suspend,
            lease=run.workers.lease,
            on_other_message=rpc.take,
            dialled=preflight.dialled,
            serve_ring=preflight.collective.accept,
            each_turn=rpc.control_loop.poll,
        )
        control.thread = rpc.thread = thread
        rpc.prober = LinkProber(identity, self.secret)
        control.probe_path = PathProber(
            identity, self.secret, post=control.post, send=thread.send
        ).take
        control.check_again = preflight.again
        control.run_collective = preflight.collective.take
        if self.register is not None:
            witness = WitnessClient(self.register, self.card, control.post)
            control.witness_thread, control.ask_witness = witness, witness.ask
            witness.start()
        preflight.join(identity, self.secret, control.post)
        self._report_where()
        thread.start()
        if self.spec.profile.network.plan != "off":
            RailHeartbeat(self.spec.run_id, self.card, self.secret, control).start()

    def forget_secret(self, *, is_over: bool) -> None:
        """Remove the secret that ftrun has created for this run, once the run is over for all."""
        nodes = self.spec.nodes
        if is_over and nodes is not None and nodes.secret_is_ours and nodes.secret_file:
            with suppress(OSError):
                os.unlink(nodes.secret_file)

    def _report_where(self) -> None:
        nodes = self.spec.nodes
        assert nodes is not None
        hosts = ", ".join(dict.fromkeys(host for host, _ in nodes.endpoints))
        role = "the endpoint" if self.card.endpoint else hosts
        role = f"the etcd at {self.register.name}" if self.register is not None else role
        _log.warning(
            "node %s listens at %s port %d; meets the others at %s",
            self.card.node_id,
            self.card.host,
            self.card.port,
            role,
        )
        others = ", ".join(f"{one.name} {one.host} port {one.port}" for one in self.card.rails[1:])
        if others:
            _log.warning("node %s can also be reached by %s", self.card.node_id, others)
        if self.secret is None:
            _log.warning(
                "UNAUTHENTICATED: any process that can connect to port %d can join this run. Make "
                "a secret with %s, copy FILE to every node and give --secret-file FILE",
                self.card.port,
                HOW_TO_MAKE,
            )


def _register(
    spec: RunSpec, nodes: NodesSpec, persisted: PersistedAgentState
) -> EtcdWitness | None:
    """The outside witness. The first agent of this node checks it; restarted agents do not."""
    if not nodes.etcd:
        return None
    endpoints = [(host, int(port)) for host, _, port in (at.rpartition(":") for at in nodes.etcd)]
    job = f"{spec.script} with --nnodes/--spares {nodes.size}"
    # A requeued job may run on other nodes, and the nodes of its previous start do not return.
    name = f"{spec.run_id}.{nodes.etcd_life}" if nodes.etcd_life else spec.run_id
    times = spec.profile.nodes
    found = EtcdWitness(
        endpoints, name, job=job, lease_s=times.failure_timeout_s, tls=nodes.etcd_tls
    )
    if persisted.plan is None:
        found.check()
    return found


def _find_host(nodes: NodesSpec, wait_s: float) -> str:
    """The address by which other nodes reach this node, once it can be determined.

    In Kubernetes a pod may start before its own name, or another pod's, has an address.
    """
    started_s = clock.now_s()
    is_reported = False
    while True:
        try:
            found = _bind_address(nodes)
        except PeerLost as error:
            waited_s = clock.now_s() - started_s
            if waited_s >= wait_s:
                raise PeerError(
                    f"the endpoint is not found within {waited_s:.0f} s: {error}. Check the name "
                    f"in --rdzv-endpoint or --master-addr on node {nodes.node_id}; in Kubernetes "
                    "also the headless service of the pods"
                ) from error
            if not is_reported:
                is_reported = True
                _log.warning("%s; looking for it for %.0f s", error, wait_s)
        else:
            if is_reported:
                _log.warning("the endpoint has an address now")
            return nodes.bind or found
        clock.sleep(NAME_CHECK_S)


def _bind_address(nodes: NodesSpec) -> str:
    endpoints = nodes.endpoints
    mine = [one for one in endpoints if is_local_address(one[0]) or is_own_name(one[0])][:1]
    lost: PeerLost | None = None
    for host, port in mine or endpoints:
        try:
            return bind_address(host, port)
        except PeerLost as error:
            lost = lost or error
    assert lost is not None
    raise lost


def _endpoint(nodes: NodesSpec, host: str) -> tuple[int, socket.socket | None]:
    """The number of the first endpoint that this node can listen on, and its listener."""
    for number, (endpoint_host, port) in enumerate(nodes.endpoints):
        if is_local_address(endpoint_host) or is_own_name(endpoint_host):
            try:
                return number, listen_tcp(host, port)
            except AddressTaken as error:
                _log.warning("%s. This node looks for the run there", error)
    return 0, None


def _own_port(host: str, before: NodeCard | None) -> socket.socket:
    """A listener on the port of this node's last agent, if possible; else on a free port."""
    if before is not None and before.host == host:
        with suppress(UsageError):
            return listen_tcp(host, before.port)
    return listen_tcp(host, 0)


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return os.environ.get("PYTORCH_VERSION", "")
