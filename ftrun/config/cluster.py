"""Settings of a run over several nodes: the start of each node, and what membership uses."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ftrun.config.profile import NetworkConfig, NodesConfig, Profile, SlowConfig


class ClusterSize(msgspec.Struct, frozen=True):
    """The requested number of nodes of a run."""

    min_nodes: int
    max_nodes: int
    spares: int

    def __str__(self) -> str:
        return f"{self.min_nodes}:{self.max_nodes}+{self.spares}"

    def refusal(self, other: str) -> str:
        """Why a node that was started with other numbers is rejected; empty if it is not."""
        if other == str(self):
            return ""
        return (
            f"it was started with --nnodes/--spares {other}, and this run with {self}. "
            "Give the same to every node"
        )


class EtcdTls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files for TLS between a node and an etcd cluster; absolute paths."""

    ca: str | None = None  # signs the certificates of the cluster; None: the CAs of the system
    cert: str | None = None  # certificate of this node; None: it shows none
    key: str | None = None


class NodesSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one node for a run over several nodes, from its own command line."""

    min_nodes: Annotated[int, Meta(ge=1)]  # members of the smallest generation, without spares
    max_nodes: Annotated[int, Meta(ge=1)]
    spares: Annotated[int, Meta(ge=0)] = 0
    endpoint_host: str  # name or address at which the nodes meet, as given
    endpoint_port: Annotated[int, Meta(ge=1, le=65535)]
    more_endpoints: list[tuple[str, int]] = []
    etcd: list[str] = []  # HOST:PORT of each member of the etcd where the nodes meet, if any
    etcd_tls: EtcdTls | None = None  # None: plain HTTP
    etcd_life: Annotated[int, Meta(ge=0)] = 0  # requeues by Slurm; each is a run of its own
    node_id: str  # name of this node, unique in the run
    is_named: bool = False  # the name is not the machine's, so two nodes may share a machine
    node_rank: int | None = None  # as given; None: the nodes are ordered by name
    secret_file: str | None = None  # absolute path, checked; None: connections are UNAUTHENTICATED
    secret_is_ours: bool = False  # ftrun made the file, and removes it when the run has ended
    no_secret: str = ""  # why there is no secret, for the operator
    bind: str | None = None  # own address to listen at; None: that of the route to the endpoint
    domain: str | None = None  # fault domain of this node, such as its rack
    switch: str = ""  # leaf switch of this node, from Slurm
    topology: dict[str, Any] | None = None  # content of the file network.topology, if it is YAML
    slurm_topology: str = ""  # content of that file, if it is Slurm's topology.conf
    erasure_data: int | None = None  # K; None: ftrun chooses
    erasure_parity: int | None = None  # M; None: ftrun chooses; 0: no parity
    erasure_ring: bool = False  # each node stores a copy of the state of the node before it; M is 1

    @property
    def size(self) -> ClusterSize:
        return ClusterSize(self.min_nodes, self.max_nodes, self.spares)

    @property
    def endpoints(self) -> list[tuple[str, int]]:
        """Where the nodes meet, the first leader at the first one."""
        return [(self.endpoint_host, self.endpoint_port), *self.more_endpoints]


class MembershipSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the decisions about a run, on one node or on several."""

    profile: Profile = Profile()
    node: NodesSpec | None = None  # None: the run has one node
    max_restarts: int | None = None  # as given; None: `restart.budget` applies
    user_env: dict[str, str] = {}  # variables set by the user that a network plan may set
    orders_checkpoints: bool = False  # by the leader; on one node the SMP decides by itself
    blank_wait_s: float = 2.0  # a new agent at the endpoint waits this time for a leader's request
    redial_s: float = 0.5
    answer_s: float = 30.0  # time that one connected node that does not answer may delay all others
    same_boundary_s: float = 1.0  # lead of a common boundary: over a heartbeat and its delivery

    @classmethod
    def of(
        cls,
        profile: Profile,
        node: NodesSpec | None,
        *,
        max_restarts: int | None,
        user_env: dict[str, str],
    ) -> "MembershipSettings":
        if node is None:
            # Sections about other nodes have no effect on one node.
            profile = msgspec.structs.replace(
                profile, nodes=NodesConfig(), slow=SlowConfig(), network=NetworkConfig()
            )
            return cls(profile=profile, max_restarts=max_restarts, blank_wait_s=0.0)
        return cls(
            profile=profile,
            node=node,
            max_restarts=max_restarts,
            user_env=user_env,
            orders_checkpoints=bool(profile.checkpoint.directory),
        )

    @property
    def times(self) -> NodesConfig:
        return self.profile.nodes

    @property
    def cluster_size(self) -> ClusterSize:
        return self.node.size if self.node is not None else ClusterSize(1, 1, 0)

    @property
    def endpoints(self) -> list[tuple[str, int]]:
        """Where a node searches for the run; empty with a witness, which is used instead."""
        return self.node.endpoints if self.node is not None and not self.node.etcd else []

    @property
    def has_witness(self) -> bool:
        return self.node is not None and bool(self.node.etcd)

    @property
    def has_checkpoints(self) -> bool:
        return bool(self.profile.checkpoint.directory)

    @property
    def leave_s(self) -> float:
        """The run then continues without a last snapshot of a draining node.

        Such a node is killed after `stop.grace_s`.
        """
        return self.profile.stop.grace_s / 2

    @property
    def let_go_s(self) -> float:
        """A draining node ends then; until then it serves the generation that follows `leave_s`."""
        return self.leave_s * 5 / 3
