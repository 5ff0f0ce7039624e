"""What a generation is: its nodes, their ranks, the version it goes on from, and who decides next.

Runs in:  every agent; its messages and its records hold these. Pure.
Takes in: nothing.
Gives:    structs without behaviour of their own, but for look-ups.
"""

import msgspec

from ftrun.wire.cluster.rails import NetworkPlan, Rail

VersionPair = tuple[int, int]
"""(generation, step)."""

Identity = tuple[str, int]
"""Node id and incarnation."""

WITNESS = "the witness"
"""Stands for the outside witness among the voters; no node can be named so."""

Edition = tuple[int, int]
"""Generation, and which roster of it: who votes may change while its ranks run."""


class NodeCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One agent: who it is, and where it is found."""

    node_id: str
    incarnation: int
    """Drawn anew by each agent process."""
    host: str
    port: int
    num_ranks: int
    node_rank: int = -1
    """As the user has given it; -1 where not."""
    domain: str = ""
    """Fault domain, such as a rack."""
    endpoint: bool = False
    """It listens at the rendezvous endpoint, the first of several."""
    switch: str = ""
    """The leaf switch it hangs on, as its scheduler tells."""
    rails: list[Rail] = []
    """By which it can be reached, the one of `host` first; empty: that address is all there is."""
    further_endpoint: int = 0
    """Number of the further endpoint that it listens at, from 1; 0: of none."""

    @property
    def identity(self) -> Identity:
        """Of this agent process: the next one on the node is another."""
        return (self.node_id, self.incarnation)


class PlanMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A member of a generation with the ranks it runs."""

    card: NodeCard
    first_rank: int

    @property
    def node_id(self) -> str:
        return self.card.node_id

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.card.num_ranks)


class RestoreSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The group in which the restored version was protected, for shards that must be fetched.

    Parity 0 and generation -1: no protection is relied on, the shards lie in these nodes' slots.
    """

    node_ids: list[str]
    ranks: list[list[int]]
    """Those that each of them ran then."""
    parity: int
    generation: int


class VoterSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who decides about the successor of a generation."""

    generation: int
    """-1: none has been yet."""
    who: list[Identity]
    roster: int = 0

    @property
    def edition(self) -> Edition:
        return (self.generation, self.roster)


class PastRestart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A generation that followed another."""

    generation: int
    cause: str
    age_s: float
    restored: VersionPair | None
    downtime_s: float | None = None


class GoneNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A node that was lost or has left, and has not come back."""

    card: NodeCard
    reason: str
    age_s: float
    has_left: bool


class FailureHistory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the next lead must know to be as strict as this one; ages in seconds."""

    restarts: int = 0
    spent_ages_s: list[float] = []
    same_cause: str = ""
    same_cause_count: int = 0
    without_progress: int = 0
    best_step: int = -1
    steps_seen: bool = False
    node_failures: dict[str, list[float]] = {}
    """How long ago each node was lost, by node id."""
    barred: dict[str, float] = {}
    """How long ago a node was set aside though it was there, by node id."""
    incidents: int = 0
    """So many have been opened."""
    spoiled: VersionPair | None = None
    """This version and later ones hold bad numbers, and are not gone on from."""
    skip_to: int = -1
    """The batches up to this step are left out on the way back; -1: all come again."""
    hung_nodes: list[str] = []
    """Named by the last hang in communication, while no step was made since."""
    longest_start_s: float = 0.0
    """That a generation has needed up to its first step; 0: not known."""
    bad_checkpoints: dict[str, str] = {}
    """Checkpoints that no node loads, because one of them cannot use it: names and reasons."""
    past_restarts: list[PastRestart] = []
    """The last ones, for status."""
    gone: list[GoneNode] = []


class GenerationPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One generation: who takes part, in which ranks, from which version."""

    generation: int
    lead: str
    why: str
    members: list[PlanMember]
    spares: list[NodeCard]
    restore: VersionPair | None
    restore_why: str
    store_host: str
    store_port: int
    groups: list[list[str]] = []
    """Node ids, each list in the order of its protection group."""
    parity: int = 0
    skip_batches: int = 0
    """So many of each rank are left out after the restored version."""
    restore_world_size: int = 0
    """Ranks that took the restored version."""
    sources: list[RestoreSource] = []
    smp_ports: dict[str, int] = {}
    """Where the SMPs listen for each other, of every node that is here."""
    history: FailureHistory = FailureHistory()
    decided_by: list[VoterSet] = []
    """Whose majorities it needs: those of the last generation, and of each later one that may
    have taken effect."""
    committed: VersionPair | None = None
    """The newest version that is known to be committed."""
    ancestry: list[VersionPair] = []
    """Which versions of earlier generations this one has come from: of each the last step."""
    roster: int = 0
    """Counts how often other spares were taken in while this generation ran."""
    life: str = ""
    """Equal in all generations of a run, and another one where the run is started again."""
    witness: int = 0
    """The life of the outside witness, where it votes beside the nodes; 0: it does not."""
    roads: NetworkPlan | None = None
    """How the ways between the nodes are used, where `--network-plan on` has it so."""

    @property
    def edition(self) -> Edition:
        return (self.generation, self.roster)

    def is_of(self, other: "GenerationPlan") -> bool:
        """Whether both are the same generation, whoever its spares are."""
        same = self.generation == other.generation and self.lead == other.lead
        return same and self.members == other.members

    @property
    def world_size(self) -> int:
        return sum(node.card.num_ranks for node in self.members)

    @property
    def is_alone(self) -> bool:
        """There is one voter."""
        return len(self.members) + len(self.spares) == 1

    @property
    def voters(self) -> list[NodeCard]:
        """Who decides about the next generation, in the order of succession."""
        return [node.card for node in self.members] + self.spares

    @property
    def is_resized(self) -> bool:
        """The restored version is of another number of ranks than this generation has."""
        return self.restore is not None and self.restore_world_size not in (0, self.world_size)

    def protected_in(self, node_id: str) -> int:
        """The generation whose protection of the restored version this node is to keep.

        -1: it has no part in any.
        """
        relied = (one.generation for one in self.sources if node_id in one.node_ids)
        return next(relied, -1)

    def member(self, node_id: str) -> PlanMember | None:
        return next((node for node in self.members if node.node_id == node_id), None)

    def card(self, node_id: str) -> NodeCard | None:
        return next((card for card in self.voters if card.node_id == node_id), None)
