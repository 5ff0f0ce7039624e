"""Structs that describe a generation: nodes, ranks, restored version, and its voters.

Runs in:  every agent; messages and records contain these structs. Pure.
"""

import msgspec


class Rail(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One interface of a node over which other nodes can reach it."""

    name: str  # name of the interface, such as eth0 or ib0: a value for GLOO_SOCKET_IFNAME
    host: str  # address of the interface
    prefix_bits: int = 0  # prefix length of its network; 0: not known
    port: int = 0  # port on which this node's agent listens at that address
    speed_mbit: int = 0  # as reported by the driver; 0: not reported
    duplex: str = ""  # `full`, `half`, or empty if the driver does not report it
    hca: str = ""  # RDMA device of the interface, such as mlx5_0: a value for NCCL_IB_HCA


class PathMeasurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of one short transfer from one node to another over a rail; 0: not known."""

    source: str  # node id
    destination: str
    rail: str  # name of the rail in this run: the name of the source's interface
    rtt_s: float = 0.0  # shortest of several round trips
    bytes_per_s: float = 0.0  # from source to destination
    problem: str = ""  # why there is no result or no rate; with no round trip either, it is dead
    is_unreached: bool = False  # no connection was established, and no kernel refused one


class NetworkPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rails, node order and snapshot rail chosen for one generation, with reasons."""

    order: list[str] = []  # node ids in the order of their ranks
    rails: list[str] = []  # rails that training uses; no other rail is used
    dropped: dict[str, str] = {}  # rails that training does not use, each with the reason
    flows: dict[str, int] = {}  # variables of NCCL for several flows in a connection
    snapshot_rail: str = ""  # rail between the SMPs; empty: the rail between the agents
    snapshot_bytes_per_s: int = 0  # limit of each node on a shared training rail; 0: no limit
    leaves: dict[str, str] = {}  # leaf switch of each node, if known, by node id
    leaves_from: str = ""  # from `labels`, `file`, `slurm`, `probes`; empty: not known
    words: list[str] = []  # decisions and their reasons, one sentence each, for people


VersionPair = tuple[int, int]  # (generation, step)
Identity = tuple[str, int]  # node id and incarnation
WITNESS = "the witness"  # the outside witness among the voters; no node can have this name
ConfigurationId = tuple[int, int]  # generation, and voter revision, which changes during it


class NodeCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Identity and addresses of one agent."""

    node_id: str
    incarnation: int  # random number that each agent process draws at its start
    host: str
    port: int
    num_ranks: int
    node_rank: int = -1  # as given by the user; -1 if not given
    domain: str = ""  # fault domain, such as a rack
    endpoint: bool = False  # it listens at the (first) rendezvous endpoint
    switch: str = ""  # leaf switch that the node is attached to, as reported by its scheduler
    rails: list[Rail] = []  # over which it is reachable, that of `host` first; empty: `host` only
    further_endpoint: int = 0  # number, from 1, of the further endpoint where it listens; 0: none
    is_first: bool = False  # the first agent of its stub: ftrun was started on the node

    @property
    def identity(self) -> Identity:
        return (self.node_id, self.incarnation)


class PlanMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A member of a generation, with the ranks that it runs."""

    card: NodeCard
    first_rank: int

    @property
    def node_id(self) -> str:
        return self.card.node_id

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.card.num_ranks)


class RestoreSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Group in which the restored version was protected, for shards that must be fetched.

    Parity 0 and generation -1: no protection is used, and the shards are in the slots of these
    nodes.
    """

    node_ids: list[str]
    ranks: list[list[int]]  # ranks that each of the nodes ran then
    parity: int
    generation: int
    is_ring: bool = False


class VoterSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Voters that decide about the successor of a generation."""

    generation: int  # -1: there has been no generation yet
    identities: list[Identity]
    voter_revision: int = 0

    @property
    def configuration_id(self) -> ConfigurationId:
        return (self.generation, self.voter_revision)


class PastRestart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A generation that followed another one."""

    generation: int
    cause: str
    age_s: float
    restored: VersionPair | None
    downtime_s: float | None = None


class DepartedNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A node that was lost or drained, and has not returned."""

    card: NodeCard
    reason: str
    age_s: float
    has_left: bool


class CauseCount(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Failures by one cause since the last progress, and where they occurred."""

    cause: str
    count: int = 0
    places: list[tuple[str, int]] = []  # the last nodes and ranks, since an exclusion for it
    excluded: list[tuple[str, int]] = []  # nodes excluded for it, and the ranks that failed there
    age_s: float = 0.0  # since the last of these failures


class Exclusion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Why a node that was present gets no ranks; its age is in `FailureHistory.barred`."""

    reason: str
    incarnation: int = 0  # of the node's agent at that time; 0: not known
    is_fault: bool = False  # its hardware is at fault
    is_slow: bool = False  # or its ranks hung: it runs ranks if too few other nodes are left


class SlowEviction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A node that was replaced because one of its ranks was slow."""

    rank: int
    node_id: str
    age_s: float


class FailureHistory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State that the next leader needs to apply the same limits as this one; ages in seconds."""

    restarts: int = 0
    spent_ages_s: list[float] = []
    causes: list[CauseCount] = []  # since the last progress, that of the last failure last
    suspects: list[str] = []  # nodes that were excluded only because a failure repeated on them
    faulty: list[str] = []  # nodes with a hardware fault whose ranks no other node could run
    without_progress: int = 0
    best_step: int = -1
    steps_seen: bool = False
    node_failures: dict[str, list[float]] = {}  # ages of the losses of each node, by node id
    barred: dict[str, float] = {}  # ages of the exclusions of nodes that were present, by node id
    exclusions: dict[str, Exclusion] = {}  # the reason of each
    slow_evictions: list[SlowEviction] = []
    readmitted: dict[str, float] = {}  # ages of readmissions after a hardware fault, by node id
    incidents: int = 0  # number of incidents opened so far
    bad_version: VersionPair | None = None  # it and later ones hold numerical anomalies
    skip_to: int = -1  # batches up to this step are skipped in repeated steps; -1: none is skipped
    hung_nodes: list[str] = []  # of the last hang in communication, if no step was completed since
    hung_pairs: list[list[str]] = []  # nodes of the last hangs whose link was named, in this run
    longest_start_s: float = 0.0  # longest time of a generation up to its first step; 0: not known
    bad_checkpoints: dict[str, str] = {}  # not loaded, because one node cannot use them: reasons
    past_restarts: list[PastRestart] = []  # the last restarts, for status
    gone: list[DepartedNode] = []
    join_problem: str = ""  # a rank could not join ranks that stay, so none stays in this run


class GenerationPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plan of one generation: members, their ranks, and the restored version."""

    generation: int
    leader: str
    reason: str
    members: list[PlanMember]
    spares: list[NodeCard]
    restore: VersionPair | None
    restore_reason: str
    store_host: str
    store_port: int
    groups: list[list[str]] = []  # node ids, each list in the order of its protection group
    parity: int = 0
    is_ring: bool = False  # each node of a group stores a copy of the state of the node before it
    skip_batches: int = 0  # number of batches that each rank skips after the restored version
    restore_world_size: int = 0  # number of ranks that took the restored version
    sources: list[RestoreSource] = []
    smp_ports: dict[str, int] = {}  # port on which each present node's SMP listens for other SMPs
    history: FailureHistory = FailureHistory()
    decided_by: list[VoterSet] = []
    """Voter sets whose majorities this generation needs: those of the last generation, and of each
    later one that may have been chosen."""
    committed: VersionPair | None = None  # newest version known to be committed
    ancestry: list[VersionPair] = []  # last step of each earlier generation that it descends from
    voter_revision: int = 0  # counts changes of the spares while this generation ran
    life: str = ""  # equal in all generations of a run; different if the run is started again
    witness: int = 0  # life of the outside witness, if it votes too; 0: none votes
    paths: NetworkPlan | None = None  # use of the paths, with `--network-plan on`
    restore_survives: int = 0  # nodes of each group of `sources` that may still be lost
    staying: list[int] = []  # ranks whose processes stay; all others start in new ones
    not_staying: str = ""  # why none stays although the ballot asked for it

    @property
    def configuration_id(self) -> ConfigurationId:
        return (self.generation, self.voter_revision)

    def is_of(self, other: "GenerationPlan") -> bool:
        """Whether both plans are of the same generation; their spares may differ."""
        same = self.generation == other.generation and self.leader == other.leader
        return same and self.members == other.members

    @property
    def world_size(self) -> int:
        return sum(node.card.num_ranks for node in self.members)

    @property
    def node_of(self) -> dict[int, str]:
        return {rank: node.node_id for node in self.members for rank in node.ranks}

    @property
    def is_alone(self) -> bool:
        return len(self.members) + len(self.spares) == 1

    @property
    def voters(self) -> list[NodeCard]:
        """Voters that decide about the next generation, in the order of succession."""
        return [node.card for node in self.members] + self.spares

    @property
    def is_resized(self) -> bool:
        """The restored version has another world size than this generation."""
        return self.restore is not None and self.restore_world_size not in (0, self.world_size)

    def protected_in(self, node_id: str) -> int:
        """Generation whose protection of the restored version this node must retain; -1: none."""
        relied = (one.generation for one in self.sources if node_id in one.node_ids)
        return next(relied, -1)

    def member(self, node_id: str) -> PlanMember | None:
        return next((node for node in self.members if node.node_id == node_id), None)

    def card(self, node_id: str) -> NodeCard | None:
        return next((card for card in self.voters if card.node_id == node_id), None)
